//! The store's URL: `https://host1:8484,host2/base?ca=/a/file.pem&token_file=/another`.

use std::path::PathBuf;

use leasehold_core::kit::{Host, Password, Tls, TlsWords, UrlParts};
use leasehold_core::{Error, ErrorKind, Result};

/// The port of `leasehold serve`, unless the URL has another one.
const PORT: u16 = 8484;
/// Examples of valid URLs, for error messages.
const FORM: &str = "http://host1,host2/, https://host/?token_file=/a/file or http+unix:///a/socket";
/// The supported parameters, for error messages.
const KNOWN: &str = "prefix and token_file; with https: ca, cert and key";
/// The words of error messages about TLS.
const TLS: TlsWords = TlsWords {
    scheme: "https:",
    ca: "ca",
    identity: Some(("cert", "key")),
    built: cfg!(feature = "tls"),
};
const UNIX: &str = "http+unix:";
pub(super) const TOKEN_FILE: &str =
    "put the token into a file, and add ?token_file=/path/to/file to the URL";

/// The parts of a URL.
pub(super) struct HttpUrl {
    pub(super) servers: Vec<Server>,
    /// The base path of all requests: empty, or a path such as `/locks`, without a trailing slash.
    pub(super) base: String,
    /// The prefix of all lock names at the server.
    pub(super) prefix: String,
    /// The bearer token.
    pub(super) token: Option<Password>,
    /// The TLS settings, which only an `https:` URL has.
    pub(super) tls: Option<Tls>,
}

/// The address of one replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Server {
    Tcp(Host),
    Unix(PathBuf),
}

impl Server {
    /// Returns the host and the port in the URI of requests to this replica.
    pub(super) fn authority(&self) -> String {
        match self {
            Self::Tcp(Host { name, port }) if name.contains(':') => {
                // A zone is meaningful on this machine only.
                let name = name.split('%').next().unwrap_or_default();
                format!("[{name}]:{port}")
            }
            Self::Tcp(host) => host.to_string(),
            Self::Unix(_) => "localhost".to_owned(),
        }
    }
}

impl HttpUrl {
    pub(super) fn parse(url: &str) -> Result<Self> {
        let refused = |what: String, hint: &str| {
            Err(Error::new(ErrorKind::Config, what).with_hint(hint.to_owned()))
        };
        let use_form = format!("use {FORM}");
        let mut parts = UrlParts::parse(url, FORM, PORT)?;
        let tls = parts.tls(url.starts_with("https:"), &TLS)?;
        let file = parts.take("token_file").map(PathBuf::from);
        let token = parts.take("token").map(|text| Password::new(text, file));
        let prefix = parts.take("prefix").unwrap_or_default();
        parts.done(KNOWN)?;
        if parts.user.is_some() {
            let what = "a server's URL cannot contain a user name or a password";
            return refused(what.to_owned(), TOKEN_FILE);
        }
        if token.as_ref().is_some_and(|token| !is_header(&token.now())) {
            let what = "the token contains characters that a header cannot have";
            return refused(what.to_owned(), "use a token of visible ASCII characters");
        }
        if url.starts_with(UNIX) {
            if !parts.hosts.is_empty() || parts.path.len() < 2 {
                let what = "the URL names no socket by its absolute path".to_owned();
                return refused(what, "use http+unix:///a/socket");
            }
            let servers = vec![Server::Unix(parts.path.into())];
            return Ok(Self { servers, base: String::new(), prefix, token, tls });
        }
        if parts.hosts.is_empty() {
            return refused("the URL names no server".to_owned(), &use_form);
        }
        if let Some(host) = parts.twice() {
            return refused(format!("the URL names {host} twice"), "name each replica once");
        }
        let base = parts.path.trim_end_matches('/').to_owned();
        if !base.bytes().all(|b| b.is_ascii_alphanumeric() || b"/-._~".contains(&b)) {
            // The path may contain a misplaced token, so it is not shown.
            let what = "the URL's path contains characters that leasehold does not send".to_owned();
            return refused(what, "mount the server at a path of letters, digits, -, . and _");
        }
        let servers = parts.hosts.into_iter().map(Server::Tcp).collect();
        Ok(Self { servers, base, prefix, token, tls })
    }
}

/// Returns whether a header can have this value.
fn is_header(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_is_split_into_replicas_base_token_and_prefix() {
        let url = HttpUrl::parse("http://h1,h2:1,[::1]:2/locks/?prefix=a%2F&token=t").unwrap();
        let servers: Vec<String> = url.servers.iter().map(Server::authority).collect();
        assert_eq!(servers, ["h1:8484", "h2:1", "[::1]:2"]);
        assert_eq!((url.base.as_str(), url.prefix.as_str()), ("/locks", "a/"));
        assert_eq!(url.token.unwrap().now(), "t");
        let url = HttpUrl::parse("http+unix:///run/a%20b/socket").unwrap();
        assert_eq!(url.servers, [Server::Unix("/run/a b/socket".into())]);
        assert!(url.token.is_none() && url.base.is_empty() && url.tls.is_none());
    }

    #[test]
    #[cfg(feature = "tls")]
    fn https_url_names_certificate_files() {
        let tls = HttpUrl::parse("https://h/?ca=/x").unwrap().tls.unwrap();
        assert!(tls.ca().unwrap_err().to_string().contains(r#"ca="/x""#));
    }

    #[test]
    fn invalid_urls_are_rejected_in_one_line_without_the_token() {
        for bad in [
            "http:",
            "http:h",
            "http://",
            "http://a,a",
            "http://h:0",
            "http://user:secret@h/",
            "http://secret@h/",
            "http://h/?tokn=secret",
            "http://h/?token=sec%0aret",
            "http://h/?ca=/x",
            "http://h/a%20b",
            "http://h/a&token=secret",
            "http+unix://h/socket",
            "http+unix:///",
            "https://h?cert=/x",
        ] {
            let Err(error) = HttpUrl::parse(bad) else { panic!("{bad} was accepted") };
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            let shown = format!("{error:#}");
            assert!(!shown.contains("secret") && shown.lines().count() == 1, "{bad}: {shown}");
        }
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_url_is_accepted_or_rejected_in_one_line(url in testbed::texts(&[
            "https://h1,h2:1,[::1]:7/a/b?ca=/x%20y&token=sekret&prefix=p", "http+unix:///a/b",
        ])) {
            if let Err(error) = HttpUrl::parse(&url) {
                let shown = format!("{error:#}");
                proptest::prop_assert_eq!(shown.lines().count(), 1);
                // It is a parameter only after the ? of a URL.
                let (query, token) = (url.find("?ca="), url.find("&token=sekret"));
                let is_parameter = url.contains("://") && query.is_some() && query < token;
                let secret = is_parameter && url.matches("sekret").count() == 1;
                proptest::prop_assert!(!secret || !shown.contains("sekret"), "{}", shown);
            }
        }
    }
}
