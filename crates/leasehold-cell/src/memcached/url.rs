//! The store's URL: `memcached://user:password@a:11211,b,c?prefix=…&session_ms=…&poll_ms=…`, or
//! `memcacheds:` with TLS.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::kit::{Addresses, Encryption, Host, Password, TlsWords, UrlParts};
use leasehold_core::{Error, ErrorKind, Result};

use crate::keys::{LONGEST_PREFIX, invalid};
use crate::store::Options;

/// The default port of memcached.
const PORT: u16 = 11211;
/// Time that a connection usually takes at most.
const HEAD_START: Duration = Duration::from_millis(250);
/// Examples of valid URLs, for error messages.
const FORM: &str = "memcached://host:11211, memcached://user:password@host or memcached://a,b,c";
/// The supported parameters, for error messages.
const KNOWN: &str = "prefix, session_ms, poll_ms, restart_delay_ms and names; with memcacheds: ca, \
                     cert and key";
/// The words of error messages about TLS.
const TLS: TlsWords = TlsWords {
    scheme: "memcacheds:",
    ca: "ca",
    identity: Some(("cert", "key")),
    built: cfg!(feature = "tls"),
};

/// The part of a URL that concerns one of its servers.
#[derive(Clone)]
pub(super) struct MemcachedUrl {
    pub(super) host: Host,
    /// The host's addresses, shared by all connections to it.
    pub(super) addresses: Arc<Addresses>,
    /// The server's name, which is the same in all clients, regardless of the address that they
    /// use.
    pub(super) name: String,
    /// The names of all servers; `None` if there is only one.
    pub(super) list: Option<String>,
    /// User name and password for `-Y`.
    pub(super) login: Option<(String, Password)>,
    /// `Some` for `memcacheds:`.
    pub(super) encryption: Option<Arc<Encryption>>,
    pub(super) options: Options,
}

impl fmt::Debug for MemcachedUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemcachedUrl").field("host", &self.host).finish_non_exhaustive()
    }
}

fn refused<T>(what: impl Into<String>, hint: impl Into<String>) -> Result<T> {
    Err(Error::new(ErrorKind::Config, what).with_hint(hint.into()))
}

impl MemcachedUrl {
    /// Parses the URL and returns its servers, sorted by name.
    pub(super) fn parse(url: &str) -> Result<Vec<Self>> {
        let mut parts = UrlParts::parse(url, FORM, PORT)?;
        let millis = |n: Option<u64>| n.map(Duration::from_millis);
        let prefix = parts.take("prefix");
        let session = millis(parts.number("session_ms", 1_000, 3_600_000)?);
        let poll = millis(parts.number("poll_ms", 1, 60_000)?);
        let restart_delay = millis(parts.number("restart_delay_ms", 0, 86_400_000)?);
        let names = parts.take("names");
        let tls = parts.tls(url.starts_with("memcacheds:"), &TLS)?;
        parts.done(KNOWN)?;
        if parts.hosts.is_empty() {
            return refused("the URL names no server", format!("use {FORM}"));
        }
        if let Some(host) = parts.twice() {
            return refused(format!("the URL names {host} twice"), "name each server once");
        }
        if !matches!(parts.path.as_str(), "" | "/") {
            return refused(
                "the URL has a path, but memcached has no databases",
                "remove the path; to separate locks, add ?prefix=…",
            );
        }
        let login = match (parts.user.take(), parts.password.take()) {
            (None, _) => None,
            (Some(user), Some(password)) if is_word(&user) && is_word(&password) => {
                Some((user, parts.secret(password)))
            }
            _ => {
                return refused(
                    "invalid credentials in the URL",
                    "use memcached://user:password@host, without spaces and control \
                     characters",
                );
            }
        };
        let encryption = tls.map(|tls| Encryption::of(&tls, &parts.hosts)).transpose()?;
        let encryption = encryption.map(Arc::new);
        let names = named(&parts.hosts, names.as_deref())?;
        let usual = Options::default();
        let options = Options {
            prefix: prefix.unwrap_or(usual.prefix),
            session: session.unwrap_or(usual.session),
            poll: poll.unwrap_or(usual.poll),
            restart_delay,
            members: None,
            clock: usual.clock,
        };
        let list = listed(&names);
        if options.prefix.len() > LONGEST_PREFIX || !is_graphic(&options.prefix) {
            return refused(
                invalid("prefix", &options.prefix),
                format!("use at most {LONGEST_PREFIX} printable ASCII characters without spaces"),
            );
        }
        let of = |(host, name): (Host, String)| {
            // The members include this server's own name. Otherwise, two clients with swapped names
            // would look for the same lock on different servers.
            let members = list.as_ref().map(|list| format!("{name}@{list}"));
            let options = Options { members, ..options.clone() };
            let (list, login) = (list.clone(), login.clone());
            Self {
                host,
                addresses: Arc::new(Addresses::new(HEAD_START)),
                name,
                list,
                login,
                encryption: encryption.clone(),
                options,
            }
        };
        let mut all: Vec<Self> = parts.hosts.into_iter().zip(names).map(of).collect();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(all)
    }
}

/// Returns the names of the servers, from `names=` or from their addresses.
fn named(hosts: &[Host], names: Option<&str>) -> Result<Vec<String>> {
    let Some(names) = names else { return Ok(hosts.iter().map(Host::to_string).collect()) };
    let names: Vec<String> = names.split(',').map(str::to_owned).collect();
    let mut sorted = names.clone();
    sorted.sort_unstable();
    sorted.dedup();
    let is_good = sorted.len() == hosts.len() && names.len() == hosts.len();
    if !is_good || !names.iter().all(|name| !name.is_empty() && is_graphic(name)) {
        return refused(
            invalid("names", &names.join(",")),
            "give one name for each server, in the same order, all different and without spaces",
        );
    }
    Ok(names)
}

/// Returns the sorted list of all servers; `None` if there is only one.
fn listed(names: &[String]) -> Option<String> {
    let mut names = names.to_vec();
    names.sort_unstable();
    (names.len() > 1).then(|| names.join(","))
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
    fn url_parts_and_parameters_are_parsed() {
        let one = |url: &str| <[_; 1]>::try_from(MemcachedUrl::parse(url).unwrap()).unwrap();
        let [url] = one("memcached://h");
        assert_eq!((url.host.to_string().as_str(), url.login), ("h:11211", None));
        assert_eq!(url.options.prefix, "leasehold:");
        let url =
            "memcached://u:p%40@[::1]:7/?prefix=a%3A&session_ms=5000&poll_ms=20&restart_delay_ms=0";
        let [url] = one(url);
        assert_eq!(url.login, Some(("u".into(), Password::new("p@".into(), None))));
        assert_eq!(url.options.prefix, "a:");
        assert_eq!(url.options.session, Duration::from_secs(5));
        assert_eq!(url.options.restart_delay, Some(Duration::ZERO));
        assert_eq!(url.options.members, None);
        // The order of servers does not matter.
        for url in
            ["memcached://u:p@b,[::1]:7,a:1?poll_ms=5", "memcached://u:p@[::1]:7,a:1,b?poll_ms=5"]
        {
            let all = MemcachedUrl::parse(url).unwrap();
            let hosts: Vec<String> = all.iter().map(|url| url.host.to_string()).collect();
            assert_eq!(hosts, ["[::1]:7", "a:1", "b:11211"]);
            for url in all {
                let members = format!("{}@[::1]:7,a:1,b:11211", url.name);
                assert_eq!(url.options.members, Some(members));
                assert_eq!(url.login, Some(("u".into(), Password::new("p".into(), None))));
            }
        }
        // Other addresses of the same servers.
        let all = MemcachedUrl::parse("memcached://proxy:1,proxy:2?names=b:11211,a:1").unwrap();
        let named: Vec<_> = all.iter().map(|url| (url.name.as_str(), url.host.port)).collect();
        assert_eq!(named, [("a:1", 2), ("b:11211", 1)]);
        assert_eq!(all[0].options.members.as_deref(), Some("a:1@a:1,b:11211"));
        assert_eq!(all[0].list.as_deref(), Some("a:1,b:11211"));
    }

    // S94
    #[test]
    fn bad_urls_are_refused_in_one_line_without_secrets() {
        for (bad, says) in [
            ("memcached:h", "use "),
            ("memcached://", "names no server"),
            ("memcached://a,b,a:11211", "names a:11211 twice"),
            ("memcached://h/db", "no databases"),
            ("memcached://u@h", "user:password@"),
            ("memcached://u:sek%20ret@h", "user:password@"),
            ("memcached://u:sekret@h?prefix=a%20b", "without spaces"),
            ("memcached://h?poll_ms=0", "for poll_ms"),
            ("memcached://a,b?names=x", "\"x\" for names"),
            ("memcached://a,b?names=x,x", "\"x,x\" for names"),
            ("memcached://a,b?names=x,", "\"x,\" for names"),
            ("memcached://h?session=5", "known parameters: prefix"),
        ] {
            let error = MemcachedUrl::parse(bad).map(drop).unwrap_err();
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
            "memcached://u:p@[::1]:7,b/?prefix=a%3A&session_ms=5000&poll_ms=20&restart_delay_ms=0",
        ])) {
            if let Err(error) = MemcachedUrl::parse(&url).map(drop) {
                proptest::prop_assert_eq!(format!("{error:#}").lines().count(), 1);
            }
        }
    }
}
