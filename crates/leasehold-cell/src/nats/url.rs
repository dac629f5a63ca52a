//! The store's URL: `nats://user:password@a,b,c/bucket?replicas=3&create=no&prefix=…&session_ms=…&poll_ms=…`.

use std::fmt;
use std::time::Duration;

use leasehold_core::kit::{Host, UrlParts};
use leasehold_core::{Error, ErrorKind, Result};

use crate::keys::LONGEST_PREFIX;
use crate::store::Options;

/// Where NATS listens unless the URL says otherwise.
const PORT: u16 = 4222;
const FORM: &str = "nats://host1,host2,host3/bucket or nats://user:password@host/bucket";
const KNOWN: &str = "replicas, create, domain, prefix, session_ms and poll_ms";
/// The bucket that a URL means that names none.
const BUCKET: &str = "leasehold";
/// The longest name of a bucket: it is a part of each subject.
const LONGEST_BUCKET: usize = 64;

/// Who we are.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Login {
    Nobody,
    User(String, String),
    Token(String),
}

/// What a URL says.
#[derive(Clone)]
pub(super) struct NatsUrl {
    pub(super) hosts: Vec<Host>,
    pub(super) login: Login,
    pub(super) bucket: String,
    /// How many copies the bucket is to have.
    pub(super) replicas: Option<usize>,
    /// Whether a missing bucket is made.
    pub(super) create: bool,
    /// The JetStream domain, where there are several.
    pub(super) domain: Option<String>,
    pub(super) prefix: String,
    pub(super) session: Duration,
    /// `None`: as is good for who is told.
    pub(super) poll: Option<Duration>,
}

impl fmt::Debug for NatsUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("NatsUrl");
        shown.field("hosts", &self.hosts).field("bucket", &self.bucket).finish_non_exhaustive()
    }
}

fn refused<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::new(ErrorKind::Config, what))
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
            Some(_) => return refused("create is yes or no"),
        };
        let domain = parts.take("domain");
        let prefix = parts.take("prefix").unwrap_or(usual.prefix);
        let session =
            millis(parts.number("session_ms", 1_000, 3_600_000)?).unwrap_or(usual.session);
        let poll = millis(parts.number("poll_ms", 1, 60_000)?);
        parts.done(KNOWN)?;
        if parts.hosts.is_empty() {
            return refused(format!("a nats store needs its servers: write it as {FORM}"));
        }
        if let Some(host) = parts.twice() {
            return refused(format!("{host} is there twice: name each server once"));
        }
        let login = match (parts.user, parts.password) {
            (None, _) => Login::Nobody,
            (Some(token), None) if !token.is_empty() => Login::Token(token),
            (Some(user), Some(password)) if !user.is_empty() => Login::User(user, password),
            _ => return refused("write credentials as user:password@ or token@"),
        };
        let bucket = match parts.path.strip_prefix('/').unwrap_or_default().trim_end_matches('/') {
            "" => BUCKET.to_owned(),
            bucket => bucket.to_owned(),
        };
        let plain = |text: &str, also: &str| {
            text.bytes().all(|b| b.is_ascii_alphanumeric() || also.as_bytes().contains(&b))
        };
        if bucket.len() > LONGEST_BUCKET || !plain(&bucket, "_-") {
            return refused(format!(
                "a bucket is called by at most {LONGEST_BUCKET} letters, digits, - and _"
            ));
        }
        if domain.as_deref().is_some_and(|domain| domain.is_empty() || !plain(domain, "_-")) {
            return refused("a domain is called by letters, digits, - and _");
        }
        let is_odd = prefix.starts_with(':') || prefix.contains("::");
        if prefix.len() > LONGEST_PREFIX || !plain(&prefix, "_-:") || is_odd {
            return refused(format!(
                "prefix is at most {LONGEST_PREFIX} letters, digits, - and _, with single colons between"
            ));
        }
        let hosts = parts.hosts;
        Ok(Self { hosts, login, bucket, replicas, create, domain, prefix, session, poll })
    }

    /// The servers, for people.
    pub(super) fn servers(&self) -> String {
        let all: Vec<String> = self.hosts.iter().map(Host::to_string).collect();
        all.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_url_says() {
        let url = NatsUrl::parse("nats://h").unwrap();
        assert_eq!((url.servers().as_str(), url.bucket.as_str()), ("h:4222", "leasehold"));
        assert!(url.create && url.login == Login::Nobody && url.replicas.is_none());
        assert_eq!((url.prefix.as_str(), url.poll), ("leasehold:", None));
        let url = "nats://u:p%40@a,[::1]:7/locks?replicas=3&create=no&domain=hub&prefix=app:x:\
                   &session_ms=5000&poll_ms=20";
        let url = NatsUrl::parse(url).unwrap();
        assert_eq!(url.servers(), "a:4222, [::1]:7");
        assert!(url.login == Login::User("u".into(), "p@".into()));
        assert_eq!((url.bucket.as_str(), url.replicas, url.create), ("locks", Some(3), false));
        assert_eq!((url.prefix.as_str(), url.domain.as_deref()), ("app:x:", Some("hub")));
        assert_eq!(url.session, Duration::from_secs(5));
        assert_eq!(url.poll, Some(Duration::from_millis(20)));
        assert!(NatsUrl::parse("nats://t0ken@h").unwrap().login == Login::Token("t0ken".into()));
    }

    #[test]
    fn s94_what_cannot_be_is_refused_in_one_line_that_shows_no_secret() {
        for (bad, says) in [
            ("nats:h", "write it as"),
            ("nats://", "needs its servers"),
            ("nats://a,a:4222", "there twice"),
            ("nats://:sekret@h", "user:password@"),
            ("nats://sekret:p@h/a/b", "a bucket is called"),
            ("nats://h/a.b", "a bucket is called"),
            ("nats://u:sekret@h?prefix=a%20b", "prefix is"),
            ("nats://h?prefix=a::b", "prefix is"),
            ("nats://h?create=1", "create is yes or no"),
            ("nats://h?replicas=6", "for replicas"),
            ("nats://h?domain=a.b", "a domain is called"),
            ("nats://h?poll_ms=0", "for poll_ms"),
            ("nats://h?session=5", "known parameters: replicas"),
        ] {
            let error = NatsUrl::parse(bad).map(drop).unwrap_err();
            let told = format!("{error:#}");
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            assert!(told.contains(says) && told.lines().count() == 1, "{bad}: {told}");
            assert!(!told.contains("sek"), "{told}");
        }
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn a_url_from_outside_is_read_or_refused(url in testbed::texts(&[
            "nats://u:p@a,[::1]:7/b?replicas=3&create=no&domain=d&prefix=a%3A&session_ms=5000&poll_ms=20",
        ])) {
            if let Err(error) = NatsUrl::parse(&url).map(drop) {
                proptest::prop_assert_eq!(format!("{error:#}").lines().count(), 1);
            }
        }
    }
}
