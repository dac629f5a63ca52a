//! `https:`, through a proxy that ends TLS, as in front of a `leasehold serve` in production.

use std::net::Ipv4Addr;
use std::sync::Arc;

use leasehold::{ErrorKind, Result};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ServerConfig, WebPkiClientVerifier};
use testbed::Certificates;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::common::{Replica, runtime};

/// A proxy that ends TLS, and its certificates.
struct TlsProxy {
    _directory: tempfile::TempDir,
    certificates: Certificates,
    port: u16,
}

impl TlsProxy {
    /// Starts a proxy that accepts only clients with a certificate of its authority.
    fn before(replica: &Replica) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let certificates = Certificates::make(directory.path());
        let acceptor = TlsAcceptor::from(Arc::new(config(&certificates)));
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (port, target) = (listener.local_addr().unwrap().port(), replica.port());
        runtime().spawn(async move {
            let listener = TcpListener::from_std(listener).unwrap();
            while let Ok((client, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let mut client = acceptor.accept(client).await?;
                    let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, target)).await?;
                    tokio::io::copy_bidirectional(&mut client, &mut server).await
                });
            }
        });
        Self { _directory: directory, certificates, port }
    }

    fn url(&self, parameters: &str) -> String {
        format!("https://127.0.0.1:{}/?{parameters}", self.port)
    }

    /// Returns the parameter for the authority of the server's certificate.
    fn authority(&self) -> String {
        format!("ca={}", self.certificates.authority().display())
    }

    /// Returns the parameters for the client's certificate.
    fn client(&self) -> String {
        let (certificate, key) = self.certificates.client();
        format!("cert={}&key={}", certificate.display(), key.display())
    }
}

fn config(certificates: &Certificates) -> ServerConfig {
    let read = |path| CertificateDer::pem_file_iter(path).unwrap().map(|one| one.unwrap());
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(read(certificates.authority()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    let (certificate, key) = certificates.server();
    ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_single_cert(read(certificate).collect(), PrivateKeyDer::from_pem_file(key).unwrap())
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_is_handed_over_through_tls() {
    let replica = Replica::over_memory();
    let proxy = TlsProxy::before(&replica);
    let url = proxy.url(&format!("{}&{}", proxy.authority(), proxy.client()));
    let first = leasehold::connect(&url).await.unwrap();
    let second = leasehold::connect(&url).await.unwrap();
    let held = first.mutex("x").lock().await.unwrap();
    let waiting = tokio::spawn(async move { second.mutex("x").lock().await });
    // The waiter is in the queue, so its grant comes through its long poll.
    let waits = || async { first.inspect("x").await.unwrap().unwrap().claims.len() == 2 };
    while !waits().await {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let token = held.token();
    held.release().await.unwrap();
    let next = waiting.await.unwrap().unwrap();
    assert!(next.token() > token);
}

#[tokio::test(flavor = "multi_thread")]
async fn untrusted_certificate_is_reported_with_a_hint() {
    let replica = Replica::over_memory();
    let proxy = TlsProxy::before(&replica);
    let lock = async |parameters: &str| -> Result<()> {
        let locks = leasehold::connect(proxy.url(parameters)).await?;
        locks.mutex("x").try_lock().await?.release().await.map(drop)
    };
    for parameters in [proxy.client(), proxy.authority()] {
        let error = lock(&parameters).await.unwrap_err();
        let text = format!("{error:#}");
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{text}");
        assert!(text.to_lowercase().contains("certificate"), "{text}");
        assert!(error.hint().is_some_and(|hint| hint.contains("ca=")), "{text}");
    }
    lock(&format!("{}&{}", proxy.authority(), proxy.client())).await.unwrap();
}
