//! What a store's URL says of TLS: files in PEM.

use std::fmt;

use super::parts::UrlParts;
use crate::words::error::{Error, ErrorKind, Result};

/// How a store's URLs say it.
#[derive(Clone, Copy, Debug)]
pub struct TlsWords {
    /// What a URL begins with that means TLS: `rediss:`.
    pub scheme: &'static str,
    /// The parameter that names the authorities to trust.
    pub ca: &'static str,
    /// Those that name the certificate to be shown, and its key.
    pub identity: Option<(&'static str, &'static str)>,
    /// Whether the store was built with TLS.
    pub built: bool,
}

/// Whom to trust, and who we are.
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

/// What a file held.
#[derive(Clone, Debug)]
pub struct Pem {
    /// As it was read.
    pub bytes: Vec<u8>,
    file: File,
}

impl UrlParts {
    /// The parameters of TLS, taken: `Some` if the connections are to be encrypted.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if they do not belong here or are not complete, and for a store that was
    /// built without TLS.
    pub fn tls(&mut self, encrypted: bool, words: &TlsWords) -> Result<Option<Tls>> {
        let refused = |what: String| Err(Error::new(ErrorKind::Config, what));
        let mut file = |parameter| self.take(parameter).map(|path| File { parameter, path });
        let ca = file(words.ca);
        let identity = words.identity.map(|(cert, key)| (file(cert), file(key)));
        let (cert, key) = identity.unwrap_or_default();
        if let (false, Some(file)) = (encrypted, [&ca, &cert, &key].into_iter().flatten().next()) {
            let what = format!("{} is for TLS: write {}// for that", file.parameter, words.scheme);
            return refused(what);
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
                refused(format!("{cert} and {key} go together: give both or neither"))
            }
        }
    }
}

/// What who wants TLS is told by a store that was built without.
pub fn no_tls() -> Error {
    let what = "this program was built without TLS: build leasehold with its feature `tls`";
    Error::new(ErrorKind::Config, what)
}

impl Tls {
    /// The only authorities to trust; else those that the machine trusts.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the file cannot be read.
    pub fn ca(&self) -> Result<Option<Pem>> {
        self.ca.as_ref().map(File::read).transpose()
    }

    /// The certificate that we show, and its key.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if a file cannot be read.
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
        let what = format!("cannot use {parameter}={path:?}: a readable PEM file is needed");
        Error::new(ErrorKind::Config, what).because(why.to_string())
    }
}

impl fmt::Display for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={:?}", self.file.parameter, self.file.path)
    }
}

impl Pem {
    /// What the user is told if this is not what it should be.
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
    fn files_are_named_and_read() {
        assert_eq!(tls("", false, &WORDS).unwrap(), None);
        assert_eq!(tls("", true, &WORDS).unwrap(), Some(Tls::default()));
        let found = tls("ca=/no%20file&cert=/c&key=/k", true, &WORDS).unwrap().unwrap();
        let told = found.ca().unwrap_err().to_string();
        assert!(told.contains(r#"ca="/no file""#), "{told}");
        assert!(found.identity().is_err());
        let whole = tls("ca=/dev/null", true, &WORDS).unwrap().unwrap();
        assert!(whole.ca().unwrap().unwrap().bytes.is_empty());
        assert!(whole.identity().unwrap().is_none());
    }

    #[test]
    fn f76_what_does_not_belong_together_is_refused_and_so_is_tls_that_was_not_built() {
        let told = |query, encrypted, words: &TlsWords| {
            let error = tls(query, encrypted, words).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            error.to_string()
        };
        assert!(told("key=/x", false, &WORDS).contains("write xs://"));
        assert!(told("cert=/x", true, &WORDS).contains("go together"));
        let without = TlsWords { built: false, ..WORDS };
        assert!(told("", true, &without).contains("feature `tls`"));
        assert_eq!(tls("", false, &without).unwrap(), None);
        let no_identity = TlsWords { identity: None, ..WORDS };
        assert!(told("cert=/x", true, &no_identity).contains("no parameter"));
    }
}
