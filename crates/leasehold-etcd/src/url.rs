//! The store's URL: `etcd://user:password@host1:2379,host2,host3/namespace?ca=/a/file.pem`.

use leasehold_core::kit::{Password, Tls, TlsWords, UrlParts};
use leasehold_core::{Error, ErrorKind, Result};

/// The default port of etcd.
const PORT: u16 = 2379;
/// Examples of valid URLs, for error messages.
const FORM: &str = "etcd://host1,host2,host3 or etcds://user:password@host/namespace";
/// The words of error messages about TLS.
const TLS: TlsWords = TlsWords {
    scheme: "etcds:",
    ca: "ca",
    identity: Some(("cert", "key")),
    built: cfg!(feature = "tls"),
};

/// The parsed URL.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct EtcdUrl {
    /// `http://host:port` or `https://host:port`, one per member.
    pub(super) endpoints: Vec<String>,
    pub(super) credentials: Option<Credentials>,
    /// The prefix of all keys, which is empty or ends with a slash.
    pub(super) namespace: String,
    /// `Some` for `etcds:`.
    pub(super) tls: Option<Tls>,
}

/// A user of etcd.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Credentials {
    pub(super) user: String,
    pub(super) password: Password,
}

impl EtcdUrl {
    pub(super) fn parse(url: &str) -> Result<Self> {
        let refused =
            |what: String, hint: &str| Err(Error::new(ErrorKind::Config, what).with_hint(hint));
        let write_it = format!("use {FORM}");
        let mut parts = UrlParts::parse(url, FORM, PORT)?;
        let tls = parts.tls(url.starts_with("etcds:"), &TLS)?;
        parts.done("with etcds: ca, cert and key")?;
        if parts.hosts.is_empty() {
            return refused("the URL names no etcd member".to_owned(), &write_it);
        }
        if let Some(host) = parts.twice() {
            return refused(format!("the URL names {host} twice"), "name each member once");
        }
        let scheme = if tls.is_some() { "https" } else { "http" };
        let endpoints = parts.hosts.iter().map(|host| format!("{scheme}://{host}")).collect();
        let credentials = match (parts.user.take(), parts.password.take()) {
            (None, _) => None,
            (Some(user), _) if user.is_empty() => {
                return refused("the URL has no user name before the @".to_owned(), &write_it);
            }
            (Some(user), password) => {
                Some(Credentials { user, password: parts.secret(password.unwrap_or_default()) })
            }
        };
        let path = parts.path.strip_prefix('/').unwrap_or_default();
        let mut namespace = path.trim_end_matches('/').to_owned();
        if namespace.chars().any(char::is_control) {
            return refused(
                format!("the namespace {:?} contains control characters", namespace),
                "remove them from the URL's path",
            );
        }
        if !namespace.is_empty() {
            namespace.push('/');
        }
        Ok(Self { endpoints, credentials, namespace, tls })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(feature = "tls")]
    fn members_user_namespace_and_tls_are_parsed() {
        let url = EtcdUrl::parse("etcds://u%40x:p@ss:w%25@h1,h2:1,[::1]:2/a/b/?ca=/x%20y.pem");
        let url = url.unwrap();
        assert_eq!(url.endpoints, ["https://h1:2379", "https://h2:1", "https://[::1]:2"]);
        let credentials = url.credentials.unwrap();
        assert_eq!(
            (credentials.user, credentials.password.now()),
            ("u@x".into(), "p@ss:w%".into())
        );
        assert_eq!(url.namespace, "a/b/");
        let message = url.tls.unwrap().ca().unwrap_err().to_string();
        assert!(message.contains(r#"ca="/x y.pem""#), "{message}");
        assert_eq!(EtcdUrl::parse("etcd://h").unwrap().namespace, "");
        assert_eq!(EtcdUrl::parse("etcd://h/").unwrap().namespace, "");
    }

    // S94
    #[test]
    fn bad_urls_are_refused_in_one_line_without_the_password() {
        for bad in [
            "etcd:",
            "etcd:h",
            "etcd://",
            "etcd://a,,b",
            "etcd://a,a",
            "etcd://a,a:2379",
            "etcd://h:0",
            "etcd://h:",
            "etcd://h:99999",
            "etcd://h:x",
            "etcd://[::1",
            "etcd://[x]",
            "etcd://h h",
            "etcd://:p@h",
            "etcd://h/%",
            "etcd://h/%ff",
            "etcd://h/%0a",
            "etcd://h?x=1",
            "etcd://h?ca=/x",
            "etcds://h?cert=/x",
            "etcd://u:secret",
            "etcd://u:secret/x",
            "etcd://a,u:secret,b",
            "etcd://u:s?secret@h",
            "etcds://u:s?ca=secret@h/x",
            "etcd://h?secret",
            "etcd://u:secret@h/x%",
        ] {
            let Err(error) = EtcdUrl::parse(bad) else { panic!("{bad} was accepted") };
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            let shown = format!("{error:#}");
            assert!(!shown.contains(":p@") && !shown.contains("secret"), "{shown}");
            assert_eq!(shown.lines().count(), 1, "{shown}");
        }
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_url_is_parsed_or_refused_in_one_line(url in testbed::texts(&[
            "etcds://u:sekret@h1,h2:2379,[::1]:7/a/b?ca=/x%20y&cert=/c&key=/k", "etcd://h"
        ])) {
            if let Err(error) = EtcdUrl::parse(&url) {
                let message = format!("{error:#}");
                proptest::prop_assert_eq!(message.lines().count(), 1);
                // The text is the password only if it is still in front of the @.
                let secret = url.contains(":sekret@") && url.matches("sekret").count() == 1;
                proptest::prop_assert!(!secret || !message.contains("sekret"), "{}", message);
            }
        }
    }
}
