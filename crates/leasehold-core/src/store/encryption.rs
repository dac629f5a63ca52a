//! TLS with rustls, for stores that implement their server's protocol themselves. The server's
//! certificate must be valid for the host in the URL.

use std::fmt;

use tokio::io::{AsyncRead, AsyncWrite};

#[cfg(feature = "tls")]
pub use built::Encryption;
#[cfg(not(feature = "tls"))]
pub use missing::Encryption;

/// A connection to a server, encrypted or not.
pub trait Stream: AsyncRead + AsyncWrite + fmt::Debug + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + fmt::Debug + Send + Unpin> Stream for T {}

#[cfg(feature = "tls")]
mod built {
    use std::fmt;
    use std::io;
    use std::sync::Arc;

    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
    use rustls::{ClientConfig, RootCertStore};
    use tokio_rustls::TlsConnector;

    use super::Stream;
    use crate::store::url::parts::Host;
    use crate::store::url::tls::{Pem, Tls};
    use crate::types::error::{Error, ErrorKind, Result};

    /// The encryption of a store's connections.
    pub struct Encryption {
        tls: Tls,
        /// A TLS connector built from the certificate files as they were when the store was opened.
        connector: TlsConnector,
    }

    impl Encryption {
        /// Reads the files that the URL names.
        ///
        /// # Errors
        /// - [`Config`](ErrorKind::Config): a file cannot be used, or a certificate cannot name one
        ///   of the hosts.
        pub fn of(tls: &Tls, hosts: &[Host]) -> Result<Self> {
            if let Some(host) = hosts.iter().find(|host| name(host).is_err()) {
                let what = format!("{host} cannot be checked against a TLS certificate");
                let hint = "use the host's DNS name in the URL";
                return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
            }
            Ok(Self { tls: tls.clone(), connector: connector(tls)? })
        }

        /// Encrypts a new connection to this host. The files may have changed, so they are read
        /// again. If they cannot be used, the earlier contents are used.
        ///
        /// # Cancel safety
        /// Cancel safe: dropping the future closes the connection.
        ///
        /// # Errors
        /// - The handshake failed, for example because the certificate is not trusted.
        pub async fn greet(
            &self,
            host: &Host,
            stream: impl Stream + 'static,
        ) -> io::Result<Box<dyn Stream>> {
            let now = match self.tls == Tls::default() {
                true => None,
                false => connector(&self.tls).ok(),
            };
            let connector = now.as_ref().unwrap_or(&self.connector);
            Ok(Box::new(connector.connect(name(host)?, stream).await?))
        }
    }

    impl fmt::Debug for Encryption {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("Encryption").field("tls", &self.tls).finish_non_exhaustive()
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

    fn connector(tls: &Tls) -> Result<TlsConnector> {
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
            .map_err(|why| Error::new(ErrorKind::Config, "cannot set up TLS").with_source(why))?
            .with_root_certificates(roots);
        let config = match tls.identity()? {
            None => builder.with_no_client_auth(),
            Some((cert, key)) => {
                let chain = certificates(&cert)?;
                let secret =
                    PrivateKeyDer::from_pem_slice(&key.bytes).map_err(|why| key.unusable(why))?;
                builder.with_client_auth_cert(chain, secret).map_err(|why| {
                    Error::new(ErrorKind::Config, format!("{key} does not match {cert}"))
                        .with_hint("set key= to the private key of this certificate")
                        .with_source(why)
                })?
            }
        };
        Ok(TlsConnector::from(Arc::new(config)))
    }
}

#[cfg(not(feature = "tls"))]
mod missing {
    use std::io;

    use super::Stream;
    use crate::store::url::parts::Host;
    use crate::store::url::tls::{Tls, no_tls};
    use crate::types::error::Result;

    /// The encryption of a store's connections. A build without TLS cannot create a value.
    #[derive(Debug)]
    pub enum Encryption {}

    impl Encryption {
        /// Returns the error for a build without TLS.
        ///
        /// # Errors
        /// - [`Config`](crate::ErrorKind::Config): always.
        pub fn of(_: &Tls, _: &[Host]) -> Result<Self> {
            Err(no_tls())
        }

        /// Encrypts a new connection to this host. It is never called.
        ///
        /// # Cancel safety
        /// Cancel safe: dropping the future changes nothing.
        ///
        /// # Errors
        /// - None.
        pub async fn greet(
            &self,
            _: &Host,
            _: impl Stream + 'static,
        ) -> io::Result<Box<dyn Stream>> {
            match *self {}
        }
    }
}
