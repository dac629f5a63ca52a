//! The TLS parameters of a store's URL: files in PEM format.

use std::fmt;

use super::parts::UrlParts;
use crate::store::features::feature_hint;
use crate::types::error::{Error, ErrorKind, Result};

/// The scheme and parameters with which a store's URLs configure TLS.
#[derive(Clone, Copy, Debug)]
pub struct TlsWords {
    /// The scheme for TLS, such as `rediss:`.
    pub scheme: &'static str,
    /// The parameter that names the file of trusted authorities.
    pub ca: &'static str,
    /// The parameters that name the client certificate and its key.
    pub identity: Option<(&'static str, &'static str)>,
    /// Whether the store was compiled with TLS.
    pub built: bool,
}

/// The trusted authorities and the client certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    ca: Option<File>,
    identity: Option<(File, File)>,
}

/// A file that a parameter names.
#[derive(Clone, Debug, PartialEq, Eq)]
struct File {
    parameter: &'static str,
    path: String,
}

/// The contents of a PEM file.
#[derive(Clone, Debug)]
pub struct Pem {
    /// The contents, unparsed.
    pub bytes: Vec<u8>,
    file: File,
}

impl UrlParts {
    /// Takes the TLS parameters out of the URL. Returns `Some` if connections must be encrypted.
    ///
    /// # Errors
    /// - [`Config`](ErrorKind::Config): a parameter needs TLS or is incomplete, or the store was
    ///   compiled without TLS.
    pub fn tls(&mut self, encrypted: bool, words: &TlsWords) -> Result<Option<Tls>> {
        let refused = |what: String| Err(Error::new(ErrorKind::Config, what));
        let mut file = |parameter| self.take(parameter).map(|path| File { parameter, path });
        let ca = file(words.ca);
        let identity = words.identity.map(|(cert, key)| (file(cert), file(key)));
        let (cert, key) = identity.unwrap_or_default();
        if let (false, Some(file)) = (encrypted, [&ca, &cert, &key].into_iter().flatten().next()) {
            let what = format!("URL parameter {:?} needs TLS", file.parameter);
            let hint = format!("use {}//", words.scheme);
            return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
        }
        if !encrypted {
            return Ok(None);
        }
        if !words.built {
            return Err(no_tls());
        }
        match (cert, key) {
            (None, None) => Ok(Some(Tls { ca, identity: None })),
            (Some(cert), Some(key)) => Ok(Some(Tls { ca, identity: Some((cert, key)) })),
            (Some(one), None) | (None, Some(one)) => {
                let (cert, key) = words.identity.unwrap_or((one.parameter, one.parameter));
                refused(format!("URL parameters {cert:?} and {key:?} must be given together"))
            }
        }
    }
}

/// Returns the error for a URL that needs TLS in a build without it.
pub fn no_tls() -> Error {
    Error::new(ErrorKind::Config, "leasehold was built without TLS").with_hint(feature_hint("tls"))
}

impl Tls {
    /// Reads the file of trusted authorities. Returns `None` if the machine's authorities are
    /// trusted.
    ///
    /// # Errors
    /// - [`Config`](ErrorKind::Config): the file cannot be read.
    pub fn ca(&self) -> Result<Option<Pem>> {
        self.ca.as_ref().map(File::read).transpose()
    }

    /// Reads the client certificate and its key, if the URL names them.
    ///
    /// # Errors
    /// - [`Config`](ErrorKind::Config): a file cannot be read.
    pub fn identity(&self) -> Result<Option<(Pem, Pem)>> {
        let Some((cert, key)) = &self.identity else { return Ok(None) };
        Ok(Some((cert.read()?, key.read()?)))
    }
}

impl File {
    fn read(&self) -> Result<Pem> {
        let bytes = std::fs::read(&self.path).map_err(|why| self.unusable(why))?;
        Ok(Pem { bytes, file: self.clone() })
    }

    fn unusable(&self, why: impl fmt::Display) -> Error {
        let Self { parameter, path } = self;
        let what = format!("cannot use {parameter}={path:?}");
        let hint = format!("{parameter} must name a readable PEM file");
        Error::new(ErrorKind::Config, what).with_hint(hint).with_source(why.to_string())
    }
}

impl fmt::Display for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={:?}", self.file.parameter, self.file.path)
    }
}

impl Pem {
    /// Returns the path of the file.
    pub fn path(&self) -> &str {
        &self.file.path
    }

    /// Creates the error for a file whose contents are not usable.
    pub fn unusable(&self, why: impl fmt::Display) -> Error {
        self.file.unusable(why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: TlsWords =
        TlsWords { scheme: "xs:", ca: "ca", identity: Some(("cert", "key")), built: true };

    fn tls(query: &str, encrypted: bool, words: &TlsWords) -> Result<Option<Tls>> {
        let mut parts = UrlParts::parse(&format!("x://h?{query}"), "x://h", 1)?;
        let tls = parts.tls(encrypted, words)?;
        parts.done("ca").map(|()| tls)
    }

    #[test]
    fn tls_files_are_read_and_named_in_errors() {
        assert_eq!(tls("", false, &WORDS).unwrap(), None);
        assert_eq!(tls("", true, &WORDS).unwrap(), Some(Tls::default()));
        let found = tls("ca=/no%20file&cert=/c&key=/k", true, &WORDS).unwrap().unwrap();
        let message = found.ca().unwrap_err().to_string();
        assert!(message.contains(r#"ca="/no file""#), "{message}");
        assert!(found.identity().is_err());
        let whole = tls("ca=/dev/null", true, &WORDS).unwrap().unwrap();
        assert!(whole.ca().unwrap().unwrap().bytes.is_empty());
        assert!(whole.identity().unwrap().is_none());
    }

    // F76
    #[test]
    fn conflicting_or_unsupported_tls_parameters_are_rejected() {
        let message = |query, encrypted, words: &TlsWords| {
            let error = tls(query, encrypted, words).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            format!("{error:#}")
        };
        assert!(message("key=/x", false, &WORDS).contains("use xs://"));
        assert!(message("cert=/x", true, &WORDS).contains("given together"));
        let without = TlsWords { built: false, ..WORDS };
        assert!(message("", true, &without).contains("cargo add leasehold --features tls"));
        assert_eq!(tls("", false, &without).unwrap(), None);
        let no_identity = TlsWords { identity: None, ..WORDS };
        assert!(message("cert=/x", true, &no_identity).contains("unknown URL parameter \"cert\""));
    }
}
