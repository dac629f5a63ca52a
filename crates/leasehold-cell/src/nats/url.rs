//! The store's URL: `nats://user:password@a,b,c/bucket?replicas=3&create=no&prefix=…&session_ms=…&poll_ms=…`.

use std::fmt;
use std::time::Duration;

use leasehold_core::kit::{Host, Password, Tls, TlsWords, UrlParts};
use leasehold_core::{Error, ErrorKind, Result};

use crate::keys::{LONGEST_PREFIX, invalid, invalid_name};
use crate::store::Options;

/// The default port of NATS.
const PORT: u16 = 4222;
/// Examples of valid URLs, for error messages.
const FORM: &str = "nats://host1,host2,host3/bucket or nats://user:password@host/bucket";
/// The supported parameters, for error messages.
const KNOWN: &str = "replicas, create, domain, prefix, session_ms, poll_ms, ca, cert and key";
/// The words of error messages about TLS.
const TLS: TlsWords =
    TlsWords { scheme: "natss:", ca: "ca", identity: Some(("cert", "key")), built: true };
/// The default bucket.
const BUCKET: &str = "leasehold";
/// Maximum length of a bucket's name, which is part of each subject.
const LONGEST_BUCKET: usize = 64;

/// The client's credentials.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Login {
    Nobody,
    User(String, Password),
    Token(Password),
}

/// The parts of a NATS URL.
#[derive(Clone)]
pub(super) struct NatsUrl {
    pub(super) hosts: Vec<Host>,
    pub(super) login: Login,
    /// `Some` for `natss:`. With `None`, TLS is used only if the server requires it, with this
    /// machine's certificate authorities.
    pub(super) tls: Option<Tls>,
    pub(super) bucket: String,
    /// The required number of replicas of the bucket.
    pub(super) replicas: Option<usize>,
    /// Whether a missing bucket is created.
    pub(super) create: bool,
    /// The JetStream domain, if there are several.
    pub(super) domain: Option<String>,
    pub(super) prefix: String,
    pub(super) session: Duration,
    /// The longest pause between polls. The default depends on whether clients are notified.
    pub(super) poll: Option<Duration>,
}

impl fmt::Debug for NatsUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("NatsUrl");
        shown.field("hosts", &self.hosts).field("bucket", &self.bucket).finish_non_exhaustive()
    }
}

fn refused<T>(what: impl Into<String>, hint: impl Into<String>) -> Result<T> {
    Err(Error::new(ErrorKind::Config, what).with_hint(hint.into()))
}

impl NatsUrl {
    pub(super) fn parse(url: &str) -> Result<Self> {
        let mut parts = UrlParts::parse(url, FORM, PORT)?;
        let millis = |n: Option<u64>| n.map(Duration::from_millis);
        let usual = Options::default();
        let replicas = parts.number("replicas", 1, 5)?.and_then(|n| usize::try_from(n).ok());
        let create = match parts.take("create").as_deref() {
            None | Some("yes") => true,
            Some("no") => false,
            Some(other) => return refused(invalid("create", other), "use yes or no"),
        };
        let domain = parts.take("domain");
        let prefix = parts.take("prefix").unwrap_or(usual.prefix);
        let session =
            millis(parts.number("session_ms", 1_000, 3_600_000)?).unwrap_or(usual.session);
        let poll = millis(parts.number("poll_ms", 1, 60_000)?);
        let encrypted = url.starts_with("natss:");
        let tls = parts.tls(true, &TLS)?.filter(|tls| encrypted || *tls != Tls::default());
        parts.done(KNOWN)?;
        if parts.hosts.is_empty() {
            return refused("the URL names no server", format!("use {FORM}"));
        }
        if let Some(host) = parts.twice() {
            return refused(format!("the URL names {host} twice"), "name each server once");
        }
        let login = match (parts.user.take(), parts.password.take()) {
            (None, _) => Login::Nobody,
            (Some(token), None) if !token.is_empty() => Login::Token(parts.secret(token)),
            (Some(user), Some(password)) if !user.is_empty() => {
                Login::User(user, parts.secret(password))
            }
            _ => {
                return refused(
                    "invalid credentials in the URL",
                    "use nats://user:password@host/bucket or nats://token@host/bucket",
                );
            }
        };
        let bucket = match parts.path.strip_prefix('/').unwrap_or_default().trim_end_matches('/') {
            "" => BUCKET.to_owned(),
            bucket => bucket.to_owned(),
        };
        let plain = |text: &str, also: &str| {
            text.bytes().all(|b| b.is_ascii_alphanumeric() || also.as_bytes().contains(&b))
        };
        if bucket.len() > LONGEST_BUCKET || !plain(&bucket, "_-") {
            return refused(
                invalid_name("bucket name", &bucket),
                format!("use at most {LONGEST_BUCKET} letters, digits, - and _"),
            );
        }
        if let Some(domain) = &domain
            && (domain.is_empty() || !plain(domain, "_-"))
        {
            return refused(invalid("domain", domain), "use letters, digits, - and _");
        }
        let is_odd = prefix.starts_with(':') || prefix.contains("::");
        if prefix.len() > LONGEST_PREFIX || !plain(&prefix, "_-:") || is_odd {
            return refused(
                invalid("prefix", &prefix),
                format!(
                    "use at most {LONGEST_PREFIX} letters, digits, - and _, with single colons \
                     between"
                ),
            );
        }
        let hosts = parts.hosts;
        Ok(Self { hosts, login, tls, bucket, replicas, create, domain, prefix, session, poll })
    }

    /// Returns the servers as text, for error messages.
    pub(super) fn servers(&self) -> String {
        let all: Vec<String> = self.hosts.iter().map(Host::to_string).collect();
        all.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_parts_and_parameters_are_parsed() {
        let url = NatsUrl::parse("nats://h").unwrap();
        assert_eq!((url.servers().as_str(), url.bucket.as_str()), ("h:4222", "leasehold"));
        assert!(url.create && url.login == Login::Nobody && url.replicas.is_none());
        assert_eq!((url.prefix.as_str(), url.poll), ("leasehold:", None));
        let url = "nats://u:p%40@a,[::1]:7/locks?replicas=3&create=no&domain=hub&prefix=app:x:\
                   &session_ms=5000&poll_ms=20";
        let url = NatsUrl::parse(url).unwrap();
        assert_eq!(url.servers(), "a:4222, [::1]:7");
        assert!(url.login == Login::User("u".into(), Password::new("p@".into(), None)));
        assert_eq!((url.bucket.as_str(), url.replicas, url.create), ("locks", Some(3), false));
        assert_eq!((url.prefix.as_str(), url.domain.as_deref()), ("app:x:", Some("hub")));
        assert_eq!(url.session, Duration::from_secs(5));
        assert_eq!(url.poll, Some(Duration::from_millis(20)));
        assert!(
            NatsUrl::parse("nats://t0ken@h").unwrap().login
                == Login::Token(Password::new("t0ken".into(), None))
        );
    }

    // S94
    #[test]
    fn bad_urls_are_refused_in_one_line_without_secrets() {
        for (bad, says) in [
            ("nats:h", "use "),
            ("nats://", "names no server"),
            ("nats://a,a:4222", "names a:4222 twice"),
            ("nats://:sekret@h", "user:password@"),
            ("nats://sekret:p@h/a/b", "bucket name \"a/b\""),
            ("nats://h/a.b", "bucket name \"a.b\""),
            ("nats://u:sekret@h?prefix=a%20b", "\"a b\" for prefix"),
            ("nats://h?prefix=a::b", "invalid value for prefix"),
            ("nats://h?create=1", "use yes or no"),
            ("nats://h?replicas=6", "for replicas"),
            ("nats://h?domain=a.b", "\"a.b\" for domain"),
            ("nats://h?poll_ms=0", "for poll_ms"),
            ("nats://h?session=5", "known parameters: replicas"),
        ] {
            let error = NatsUrl::parse(bad).map(drop).unwrap_err();
            let message = format!("{error:#}");
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            assert!(message.contains(says) && message.lines().count() == 1, "{bad}: {message}");
            assert!(!message.contains("sek"), "{message}");
        }
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_url_is_parsed_or_refused_in_one_line(url in testbed::texts(&[
            "nats://u:p@a,[::1]:7/b?replicas=3&create=no&domain=d&prefix=a%3A&session_ms=5000&poll_ms=20",
        ])) {
            if let Err(error) = NatsUrl::parse(&url).map(drop) {
                proptest::prop_assert_eq!(format!("{error:#}").lines().count(), 1);
            }
        }
    }
}
