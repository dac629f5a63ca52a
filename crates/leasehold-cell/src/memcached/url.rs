//! The store's URL: `memcached://user:password@host:11211?prefix=…&session_ms=…&poll_ms=…`.

use std::fmt;
use std::time::Duration;

use leasehold_core::kit::{Host, UrlParts};
use leasehold_core::{Error, ErrorKind, Result};

use crate::keys::LONGEST_PREFIX;
use crate::store::Options;

/// Where memcached listens unless the URL says otherwise.
const PORT: u16 = 11211;
const FORM: &str = "memcached://host:11211 or memcached://user:password@host";

/// What a URL says.
#[derive(Clone)]
pub(super) struct MemcachedUrl {
    pub(super) host: Host,
    /// User and password, of `-Y`.
    pub(super) login: Option<(String, String)>,
    pub(super) options: Options,
}

impl fmt::Debug for MemcachedUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemcachedUrl").field("host", &self.host).finish_non_exhaustive()
    }
}

fn refused<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::new(ErrorKind::Config, what))
}

impl MemcachedUrl {
    pub(super) fn parse(url: &str) -> Result<Self> {
        let mut parts = UrlParts::parse(url, FORM, PORT)?;
        let millis = |n: Option<u64>| n.map(Duration::from_millis);
        let prefix = parts.take("prefix");
        let session = millis(parts.number("session_ms", 1_000, 3_600_000)?);
        let poll = millis(parts.number("poll_ms", 1, 60_000)?);
        let restart_delay = millis(parts.number("restart_delay_ms", 0, 86_400_000)?);
        parts.done("prefix, session_ms, poll_ms and restart_delay_ms")?;
        let host = match &parts.hosts[..] {
            [host] => host.clone(),
            [] => {
                return refused(format!("a memcached store needs its server: write it as {FORM}"));
            }
            _ => {
                return refused(
                    "locks are kept on one memcached server, not on several: name the one that all \
                     clients shall use",
                );
            }
        };
        if !matches!(parts.path.as_str(), "" | "/") {
            return refused(
                "memcached has no databases: leave the path out, and write ?prefix=… instead",
            );
        }
        let login = match (parts.user, parts.password) {
            (None, _) => None,
            (Some(user), Some(password)) if is_word(&user) && is_word(&password) => {
                Some((user, password))
            }
            _ => {
                return refused(
                    "write credentials as user:password@; memcached takes none with spaces or control \
                     characters",
                );
            }
        };
        let usual = Options::default();
        let options = Options {
            prefix: prefix.unwrap_or(usual.prefix),
            session: session.unwrap_or(usual.session),
            poll: poll.unwrap_or(usual.poll),
            restart_delay,
        };
        if options.prefix.len() > LONGEST_PREFIX || !is_graphic(&options.prefix) {
            return refused(format!(
                "prefix is at most {LONGEST_PREFIX} printable ASCII characters without spaces"
            ));
        }
        Ok(Self { host, login, options })
    }
}

fn is_graphic(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_graphic())
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| !c.is_whitespace() && !c.is_control())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_url_says() {
        let url = MemcachedUrl::parse("memcached://h").unwrap();
        assert_eq!((url.host.to_string().as_str(), url.login), ("h:11211", None));
        assert_eq!(url.options.prefix, "leasehold:");
        let url =
            "memcached://u:p%40@[::1]:7/?prefix=a%3A&session_ms=5000&poll_ms=20&restart_delay_ms=0";
        let url = MemcachedUrl::parse(url).unwrap();
        assert_eq!(url.login, Some(("u".into(), "p@".into())));
        assert_eq!(url.options.prefix, "a:");
        assert_eq!(url.options.session, Duration::from_secs(5));
        assert_eq!(url.options.restart_delay, Some(Duration::ZERO));
    }

    #[test]
    fn s94_what_cannot_be_is_refused_in_one_line_that_shows_no_secret() {
        for (bad, says) in [
            ("memcached:h", "write it as"),
            ("memcached://", "needs its server"),
            ("memcached://a,b", "one memcached server"),
            ("memcached://h/db", "no databases"),
            ("memcached://u@h", "user:password@"),
            ("memcached://u:sek%20ret@h", "user:password@"),
            ("memcached://u:sekret@h?prefix=a%20b", "without spaces"),
            ("memcached://h?poll_ms=0", "poll_ms is a number"),
            ("memcached://h?session=5", "there are prefix"),
        ] {
            let error = MemcachedUrl::parse(bad).map(drop).unwrap_err();
            let told = error.to_string();
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            assert!(told.contains(says) && told.lines().count() == 1, "{bad}: {told}");
            assert!(!told.contains("sek"), "{told}");
        }
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn a_url_from_outside_is_read_or_refused(url in testbed::texts(&[
            "memcached://u:p@[::1]:7/?prefix=a%3A&session_ms=5000&poll_ms=20&restart_delay_ms=0",
        ])) {
            if let Err(error) = MemcachedUrl::parse(&url).map(drop) {
                proptest::prop_assert_eq!(error.to_string().lines().count(), 1);
            }
        }
    }
}
