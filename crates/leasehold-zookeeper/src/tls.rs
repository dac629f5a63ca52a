//! Members that are reached through TLS: rustls, for a certificate that names the host as the URL does.

#[cfg(feature = "tls")]
pub(super) use built::Encryption;
#[cfg(not(feature = "tls"))]
pub(super) use missing::Encryption;

#[cfg(feature = "tls")]
mod built {
    use std::io;
    use std::sync::Arc;

    use leasehold_core::kit::{Host, Pem, Tls};
    use leasehold_core::{Error, ErrorKind, Result};
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
    use rustls::{ClientConfig, RootCertStore};
    use tokio::net::TcpStream;
    use tokio_rustls::TlsConnector;

    use crate::stream::Stream;

    pub(crate) struct Encryption(TlsConnector);

    impl Encryption {
        /// As the URL says, for these hosts.
        pub(crate) fn of(tls: &Tls, hosts: &[Host]) -> Result<Self> {
            if let Some(host) = hosts.iter().find(|host| name(host).is_err()) {
                let what = format!("{host} cannot be checked against a TLS certificate");
                let hint = "use the host's DNS name in the URL";
                return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
            }
            Ok(Self(TlsConnector::from(Arc::new(config(tls)?))))
        }

        /// Greets the host at the other end.
        pub(crate) async fn greet(
            &self,
            host: &Host,
            stream: TcpStream,
        ) -> io::Result<Box<dyn Stream>> {
            Ok(Box::new(self.0.connect(name(host)?, stream).await?))
        }
    }

    fn name(host: &Host) -> io::Result<ServerName<'static>> {
        let named = ServerName::try_from(host.name.clone());
        named.map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))
    }

    fn certificates(pem: &Pem) -> Result<Vec<CertificateDer<'static>>> {
        let all = CertificateDer::pem_slice_iter(&pem.bytes).collect::<Result<Vec<_>, _>>();
        let all = all.map_err(|why| pem.unusable(why))?;
        if all.is_empty() { Err(pem.unusable("the file contains no certificate")) } else { Ok(all) }
    }

    fn config(tls: &Tls) -> Result<ClientConfig> {
        let mut roots = RootCertStore::empty();
        match tls.ca()? {
            Some(pem) => {
                for certificate in certificates(&pem)? {
                    roots.add(certificate).map_err(|why| pem.unusable(why))?;
                }
            }
            None => {
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|why| Error::new(ErrorKind::Config, "cannot set up TLS").because(why))?
            .with_root_certificates(roots);
        let Some((cert, key)) = tls.identity()? else { return Ok(builder.with_no_client_auth()) };
        let chain = certificates(&cert)?;
        let secret = PrivateKeyDer::from_pem_slice(&key.bytes).map_err(|why| key.unusable(why))?;
        let shown = builder.with_client_auth_cert(chain, secret);
        shown.map_err(|why| {
            Error::new(ErrorKind::Config, format!("{key} does not match {cert}"))
                .with_hint("give the private key of this certificate")
                .because(why)
        })
    }
}

#[cfg(not(feature = "tls"))]
mod missing {
    use std::io;

    use leasehold_core::Result;
    use leasehold_core::kit::{Host, Tls, no_tls};
    use tokio::net::TcpStream;

    use crate::stream::Stream;

    /// There is none.
    pub(crate) enum Encryption {}

    impl Encryption {
        pub(crate) fn of(_: &Tls, _: &[Host]) -> Result<Self> {
            Err(no_tls())
        }

        pub(crate) async fn greet(&self, _: &Host, _: TcpStream) -> io::Result<Box<dyn Stream>> {
            match *self {}
        }
    }
}
