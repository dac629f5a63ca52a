//! TLS for TCP sockets, and the names of client certificates.
//!
//! **The files may change while the server runs**, for example when a certificate is renewed. A
//! file that cannot be used changes nothing: new connections use the earlier contents.
//!
//! **A client certificate is optional**, because other clients have tokens. If a client presents
//! one, the authority must have signed it for client authentication, or the handshake fails.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_core::kit::locked;
use leasehold_core::{Error, ErrorKind, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::access::{Peer, Stamp, stamp};

/// The first byte of a TLS connection: the content type of a handshake record (RFC 8446, section
/// 5.1).
const HANDSHAKE: u8 = 22;
/// The response to a client that does not use TLS.
const PLAIN: &[u8] = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\n\
    Content-Length: 44\r\nConnection: close\r\n\r\nThis address needs https: instead of http:.\n";
/// How much of such a client's request is read. If data is unread when the connection is closed,
/// the client may lose the response.
const PLAIN_REQUEST: u64 = 16 << 10;
/// How long a handshake may take.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// The certificate of a server, and the authority of its clients.
///
/// ```no_run
/// # fn main() -> leasehold::Result<()> {
/// use leasehold_server::Tls;
/// let (certificate, key) = ("/etc/leasehold/cert.pem", "/etc/leasehold/key.pem");
/// let tls = Tls::new(certificate, key, Some("/etc/leasehold/clients.pem".into()))?;
/// # drop(tls); Ok(()) }
/// ```
pub struct Tls {
    certificate: PathBuf,
    key: PathBuf,
    client_authority: Option<PathBuf>,
    loaded: Mutex<Loaded>,
}

struct Loaded {
    config: Arc<ServerConfig>,
    /// The state of the files before they were read.
    stamps: Vec<Option<Stamp>>,
}

impl Tls {
    /// Reads the certificate chain and the private key of the server, two files in PEM format.
    ///
    /// With a `client_authority`, the server also accepts client certificates that an authority in
    /// this file has signed. The token file states which identities have which certificate.
    ///
    /// # Errors
    /// - [`Config`](ErrorKind::Config): a file cannot be used, or the key belongs to another
    ///   certificate.
    pub fn new(
        certificate: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
        client_authority: Option<PathBuf>,
    ) -> Result<Self> {
        let (certificate, key) = (certificate.into(), key.into());
        let stamps = stamps(&certificate, &key, client_authority.as_deref());
        let config = Arc::new(config(&certificate, &key, client_authority.as_deref())?);
        let loaded = Mutex::new(Loaded { config, stamps });
        Ok(Self { certificate, key, client_authority, loaded })
    }

    /// Reads the files again if one has changed. Returns whether they are in use now.
    ///
    /// # Errors
    /// The same as [`new`](Self::new). New connections then use the earlier contents, and the same
    /// error is not returned again until a file changes.
    pub(crate) fn reload(&self) -> Result<bool> {
        let authority = self.client_authority.as_deref();
        let stamps = stamps(&self.certificate, &self.key, authority);
        if locked(&self.loaded).stamps == stamps {
            return Ok(false);
        }
        // Handshakes do not wait for the files.
        let config = config(&self.certificate, &self.key, authority);
        let mut loaded = locked(&self.loaded);
        loaded.stamps = stamps;
        loaded.config = Arc::new(config?);
        Ok(true)
    }

    /// Performs the handshake. Returns `None` if it fails or takes too long.
    pub(crate) async fn accept(&self, stream: TcpStream) -> Option<(TlsStream<TcpStream>, Peer)> {
        let config = locked(&self.loaded).config.clone();
        let greeted = async {
            let mut first = [0];
            if stream.peek(&mut first).await.is_ok_and(|n| n == 1) && first[0] != HANDSHAKE {
                answer_plain(stream).await;
                return None;
            }
            match TlsAcceptor::from(config).accept(stream).await {
                Ok(stream) => Some(stream),
                Err(error) => {
                    tracing::info!(target: "leasehold_server", %error, "a TLS handshake failed");
                    None
                }
            }
        };
        let stream = tokio::time::timeout(HANDSHAKE_TIME, greeted).await.ok().flatten()?;
        let peer = match stream.get_ref().1.peer_certificates() {
            Some([certificate, ..]) => Peer::Certificate(names(certificate).into()),
            _ => Peer::Other,
        };
        Some((stream, peer))
    }
}

/// Answers a request without TLS, and closes the connection.
async fn answer_plain(mut stream: TcpStream) {
    if stream.write_all(PLAIN).await.is_ok() && stream.shutdown().await.is_ok() {
        let mut rest = stream.take(PLAIN_REQUEST);
        let _ = tokio::io::copy(&mut rest, &mut tokio::io::sink()).await;
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

fn stamps(certificate: &Path, key: &Path, authority: Option<&Path>) -> Vec<Option<Stamp>> {
    [Some(certificate), Some(key), authority].into_iter().flatten().map(stamp).collect()
}

/// Returns the DNS names of a certificate, in lower case.
fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    match webpki::EndEntityCert::try_from(certificate) {
        Ok(certificate) => certificate.valid_dns_names().map(str::to_ascii_lowercase).collect(),
        Err(_) => Vec::new(),
    }
}

fn unusable(path: &Path, why: impl fmt::Display, hint: &str) -> Error {
    Error::new(ErrorKind::Config, format!("cannot use {}: {why}", path.display()))
        .with_hint(hint.to_owned())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let hint = "name a file in PEM format that contains certificates";
    let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match all {
        Ok(all) if all.is_empty() => Err(unusable(path, "it contains no certificate", hint)),
        all => all.map_err(|why| unusable(path, why, hint)),
    }
}

fn config(certificate: &Path, key: &Path, authority: Option<&Path>) -> Result<ServerConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|why| Error::new(ErrorKind::Config, "cannot set up TLS").with_source(why))?;
    let builder = match authority {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let refused = |why: &dyn fmt::Display| {
                unusable(path, why, "name the authority that signs the client certificates")
            };
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|why| refused(&why))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .allow_unauthenticated()
                .build()
                .map_err(|why| refused(&why))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let chain = certificates(certificate)?;
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|why| {
        unusable(key, why, "name a file in PEM format that contains the private key")
    })?;
    let mut config = builder.with_single_cert(chain, secret).map_err(|why| {
        let what = format!("{} does not match {}", key.display(), certificate.display());
        Error::new(ErrorKind::Config, what)
            .with_hint("name the private key of this certificate")
            .with_source(why)
    })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    if authority.is_some() {
        // A resumed session would not check the client's certificate again, which may have expired.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
    }
    Ok(config)
}
