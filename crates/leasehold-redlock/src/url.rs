//! The URL of a `redlock:` store.

use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};
use leasehold_redis::redis::url::{Address, Login, PORT, addresses, database, parts, prefix};

/// Hint with the form of the URL.
const FORM: &str = "use redlock://host1,host2,host3,host4,host5";
/// Allowed number of servers.
const NODES: std::ops::RangeInclusive<usize> = 3..=9;
/// Default time limit for one node to respond.
const NODE_TIMEOUT: Duration = Duration::from_millis(50);
/// Default for the longest allowed lease, which is also the default time for which a restarted node
/// does not vote.
const MAX_LEASE: Duration = Duration::from_secs(30);

const KNOWN: &str =
    "prefix, node_timeout_ms, max_lease_ms, restart_delay_ms, tls_ca, cert, key and password_file";

/// Parsed URL.
#[derive(Clone, Debug)]
pub(super) struct RedlockUrl {
    pub(super) nodes: Vec<Address>,
    pub(super) login: Login,
    pub(super) prefix: String,
    pub(super) node_timeout: Duration,
    pub(super) max_lease: Duration,
    /// Time that a node must have been up before it votes.
    pub(super) restart_delay: Duration,
}

impl RedlockUrl {
    /// Parses `redlock://[user:password@]host[:port],host[:port],…[/database][?parameters]`, or the
    /// same with `redlocks://` for TLS.
    pub(super) fn parse(url: &str) -> Result<Self> {
        let refused =
            |what: String, hint: &str| Err(Error::new(ErrorKind::Config, what).with_hint(hint));
        if !url.contains("://") {
            return refused("invalid store URL: missing \"//\"".into(), FORM);
        }
        let (mut parts, mut login) = parts(url, PORT, url.starts_with("redlocks:"))?;
        if let Some(twice) = parts.twice() {
            return refused(
                format!("the URL names {twice} twice, but each server has one vote"),
                "name each server once",
            );
        }
        let nodes = addresses(std::mem::take(&mut parts.hosts));
        if !NODES.contains(&nodes.len()) {
            let what = format!(
                "the URL names {} servers, but redlock: needs {} to {} (usually 5)",
                nodes.len(),
                NODES.start(),
                NODES.end(),
            );
            return refused(what, FORM);
        }
        login.db = database(&parts.path)?;
        let mut millis = |key, least, default: Duration| -> Result<Duration> {
            let given = parts.number(key, least, 86_400_000)?;
            Ok(given.map_or(default, Duration::from_millis))
        };
        let node_timeout = millis("node_timeout_ms", 1, NODE_TIMEOUT)?;
        let max_lease = millis("max_lease_ms", 50, MAX_LEASE)?;
        let restart_delay = millis("restart_delay_ms", 0, max_lease)?;
        let prefix = prefix(&mut parts)?;
        parts.done(KNOWN)?;
        Ok(Self { nodes, login, prefix, node_timeout, max_lease, restart_delay })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_url_forms_are_parsed() {
        let url = RedlockUrl::parse("redlock://:pw@a,b:7,[::1]:8/2?node_timeout_ms=20").unwrap();
        assert_eq!(url.nodes.len(), 3);
        assert_eq!(url.login.db, 2);
        assert_eq!(url.node_timeout, Duration::from_millis(20));
        assert_eq!((url.max_lease, url.restart_delay), (MAX_LEASE, MAX_LEASE));
        let url = RedlockUrl::parse("redlocks://a,b,c?max_lease_ms=1000").unwrap();
        assert!(url.login.tls.is_some());
        assert_eq!(url.restart_delay, Duration::from_secs(1));
    }

    #[test]
    fn bad_urls_are_refused_in_one_line_without_secrets() {
        for url in [
            "redlock:a,b,c",
            "redlock://:secret@a,b",
            "redlock://u:s?secret@a,b,c",
            "redlock://a,u:secret,c",
            "redlock://a,b,c,d,e,f,g,h,i,j",
            "redlock://a,b,a",
            "redlock://a,b,a:6379",
            "redlock://a,b,c/x",
            "redlock://a,b,c?node_timeout_ms=0",
            "redlock://a,b,c?max_lease_ms=x",
            "redlock://a,b,c?quorum=2",
            "redlock://a,b,c?tls_ca=/x",
        ] {
            let error = RedlockUrl::parse(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{url}");
            let text = format!("{error:#}");
            assert!(text.lines().count() == 1 && !text.contains("secret"), "{text}");
        }
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_url_is_parsed_or_refused_in_one_line(url in testbed::texts(&[
            "redlock://u:sekret@a,b:7,[::1]:8/2?node_timeout_ms=20&max_lease_ms=9000&restart_delay_ms=1&prefix=x", "redlocks://a,b,c,d,e?tls_ca=/x"
        ])) {
            if let Err(error) = RedlockUrl::parse(&url) {
                let message = format!("{error:#}");
                proptest::prop_assert_eq!(message.lines().count(), 1);
                // The text is a password only if it is still before the `@`.
                let secret = url.contains(":sekret@") && url.matches("sekret").count() == 1;
                proptest::prop_assert!(!secret || !message.contains("sekret"), "{}", message);
            }
        }
    }
}
