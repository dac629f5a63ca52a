//! TLS connections to members.

use leasehold_core::kit::Tls;
use leasehold_core::{Error, ErrorKind, Result};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use super::fault::cause;

/// Returns the endpoint with TLS, as configured in the URL.
pub(super) fn encrypted(endpoint: Endpoint, tls: &Tls) -> Result<Endpoint> {
    let mut options = match tls.ca()? {
        Some(ca) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca.bytes)),
        None => ClientTlsConfig::new().with_native_roots(),
    };
    if let Some((cert, key)) = tls.identity()? {
        options = options.identity(Identity::from_pem(cert.bytes, key.bytes));
    }
    endpoint.tls_config(options).map_err(|e| {
        let what = "cannot use the certificates that the URL names";
        let hint = "ca=, cert= and key= must name PEM files";
        Error::new(ErrorKind::Config, what).with_hint(hint).with_source(cause(&e))
    })
}
