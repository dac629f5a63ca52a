//! The store's URL: `zookeeper://[user:password@]host[:port],…[/chroot][?…]`, or `zookeepers:` with TLS.

use std::time::Duration;

use super::node::Naming;
use leasehold_core::{Error, ErrorKind, Result};

/// Who may touch the nodes that we make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Everybody.
    Open,
    /// Only who has our user and password.
    Creator,
}

/// A URL, taken apart. Its `Debug` form has no password.
#[derive(Clone)]
pub(super) struct ZooKeeperUrl {
    /// `host:port,host:port`.
    pub(super) hosts: String,
    /// The node that all locks are under, without a `/` at its end; empty for the top.
    pub(super) chroot: String,
    /// `user:password`.
    pub(super) credentials: Option<String>,
    pub(super) access: Access,
    pub(super) naming: Naming,
    /// The session that is asked for; the server may give another.
    pub(super) session: Duration,
    /// Whether a missing chroot is made.
    pub(super) create: bool,
    /// `Some` for `zookeepers:`.
    pub(super) tls: Option<Tls>,
}

/// Files in PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tls {
    /// The only authority to trust; else those that the machine trusts.
    pub(super) ca: Option<String>,
    /// The certificate that we show, and its key.
    pub(super) cert: Option<String>,
    pub(super) key: Option<String>,
}

impl std::fmt::Debug for ZooKeeperUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ZooKeeperUrl").field("shown", &self.shown()).finish_non_exhaustive()
    }
}

const DEFAULT_PORT: &str = "2181";
/// Where servers listen for TLS, by their documentation.
const DEFAULT_TLS_PORT: &str = "2281";
/// Where locks are if the URL does not say: made if it is missing.
const DEFAULT_CHROOT: &str = "/leasehold";

const PARAMETERS: &str = "naming=curator|kazoo, session=15s, create=yes|no, acl=open|creator, and for zookeepers: \
                          ca, cert and key";

impl ZooKeeperUrl {
    pub(super) fn parse(url: &str) -> Result<Self> {
        let refused = |what: String| Err(Error::new(ErrorKind::Config, what));
        let Some((scheme @ ("zookeeper" | "zookeepers"), rest)) = url.split_once("://") else {
            return refused("write it as zookeeper://host:2181,host:2181/path".into());
        };
        let tls = (scheme == "zookeepers").then(Tls::default);
        let (base, query) = leasehold_core::kit::split_query(rest)?;
        // As for the other stores: the last @ ends the credentials.
        let (credentials, place) = match base.rsplit_once('@') {
            Some((credentials, place)) => (Some(credentials), place),
            None => (None, base),
        };
        let credentials = match credentials {
            None => None,
            Some(text) => match text.split_once(':') {
                Some((user, password)) if !user.is_empty() => {
                    let (user, password) = (unescape(user)?, unescape(password)?);
                    if user.contains(':') {
                        return refused("a user's name has no colon".into());
                    }
                    Some(format!("{user}:{password}"))
                }
                _ => return refused("write credentials as user:password@".into()),
            },
        };
        let (hosts, path) = match place.find('/') {
            Some(slash) => place.split_at(slash),
            None => (place, ""),
        };
        let mut parsed = Self {
            hosts: servers(hosts, if tls.is_some() { DEFAULT_TLS_PORT } else { DEFAULT_PORT })?,
            chroot: chroot(path)?,
            access: if credentials.is_some() { Access::Creator } else { Access::Open },
            credentials,
            naming: Naming::Curator,
            session: leasehold_core::DEFAULT_LEASE,
            create: path.is_empty(),
            tls,
        };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            match (key, value) {
                ("naming", "curator") => parsed.naming = Naming::Curator,
                ("naming", "kazoo") => parsed.naming = Naming::Kazoo,
                ("create", "yes") => parsed.create = true,
                ("create", "no") => parsed.create = false,
                ("acl", "open") => parsed.access = Access::Open,
                ("acl", "creator") if parsed.credentials.is_some() => {
                    parsed.access = Access::Creator;
                }
                ("acl", "creator") => {
                    return refused("acl=creator needs user:password@ before the hosts".into());
                }
                ("session", value) => parsed.session = session(value)?,
                ("ca" | "cert" | "key", value) => {
                    let Some(tls) = &mut parsed.tls else {
                        return refused(format!("{key} is for TLS: write zookeepers:// for that"));
                    };
                    let value = Some(unescape(value)?);
                    match key {
                        "ca" => tls.ca = value,
                        "cert" => tls.cert = value,
                        _ => tls.key = value,
                    }
                }
                _ => {
                    // What is there is not shown: it may be a secret at the wrong place.
                    let what = format!(
                        "the URL has a parameter that does not exist, or no such value: there is \
                         {PARAMETERS}"
                    );
                    return refused(what);
                }
            }
        }
        if parsed.tls.as_ref().is_some_and(|t| t.cert.is_some() != t.key.is_some()) {
            return refused("cert and key go together: give both or neither".into());
        }
        Ok(parsed)
    }

    /// The URL without credentials.
    pub(super) fn shown(&self) -> String {
        let scheme = if self.tls.is_some() { "zookeepers" } else { "zookeeper" };
        format!("{scheme}://{}{}", self.hosts, self.chroot)
    }

    /// The whole path of the node of this name under the chroot.
    pub(super) fn path(&self, node: &str) -> String {
        format!("{}/{node}", self.chroot)
    }

    /// The chroot as a path.
    pub(super) fn root(&self) -> &str {
        if self.chroot.is_empty() { "/" } else { &self.chroot }
    }
}

fn servers(hosts: &str, default_port: &str) -> Result<String> {
    let refused = |what: String| Err(Error::new(ErrorKind::Config, what));
    let mut all = Vec::new();
    for host in hosts.split(',') {
        // What is no host is not shown: where the host was forgotten, it is user and password.
        let plain =
            |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '[' | ']');
        if host.is_empty() || !host.chars().all(plain) {
            return refused(
                "a host has letters, digits, dots and dashes: write host:port, and a comma between \
                 them; user:password@ stands before the first"
                    .into(),
            );
        }
        let (name, port) = match host.rfind(']') {
            Some(end) => (&host[..=end], host[end + 1..].strip_prefix(':')),
            None => host.split_once(':').map_or((host, None), |(name, port)| (name, Some(port))),
        };
        let port = port.unwrap_or(default_port);
        if name.is_empty() || port.parse::<u16>().ok().is_none_or(|port| port == 0) {
            return refused(
                "a port is a number from 1 to 65535: write host:port, and user:password@ before the \
                 first host"
                    .into(),
            );
        }
        all.push(format!("{name}:{port}"));
    }
    Ok(all.join(","))
}

fn chroot(path: &str) -> Result<String> {
    if path.is_empty() {
        return Ok(DEFAULT_CHROOT.into());
    }
    let path = unescape(path)?;
    let path = path.strip_suffix('/').unwrap_or(&path);
    let bad = |part: &str| {
        part.is_empty()
            || part == "."
            || part == ".."
            || part.chars().any(|c| c.is_control() || !c.is_ascii())
    };
    if path.split('/').skip(1).any(bad) || path.split('/').nth(1) == Some("zookeeper") {
        let what =
            "what stands after the hosts is no path for locks: write /name or /name/name, in ASCII";
        return Err(Error::new(ErrorKind::Config, what));
    }
    Ok(path.to_owned())
}

fn session(text: &str) -> Result<Duration> {
    let number = |digits: &str, unit: u64| digits.parse::<u64>().ok()?.checked_mul(unit);
    let millis = match (text.strip_suffix("ms"), text.strip_suffix('s')) {
        (Some(digits), _) => number(digits, 1),
        (None, Some(digits)) => number(digits, 1_000),
        (None, None) => None,
    };
    match millis {
        Some(ms @ 400..=3_600_000) => Ok(Duration::from_millis(ms)),
        _ => {
            let what = "session is a time such as 15s or 4000ms, from 400ms to 3600s";
            Err(Error::new(ErrorKind::Config, what))
        }
    }
}

/// Percent-encoded bytes as they are meant.
fn unescape(text: &str) -> Result<String> {
    let refused = || Error::new(ErrorKind::Config, "a % in the URL begins no %xx of a UTF-8 text");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, others @ ..] = rest {
        rest = others;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let [high, low, others @ ..] = others else { return Err(refused()) };
        let digit = |b: u8| char::from(b).to_digit(16);
        let (Some(high), Some(low)) = (digit(*high), digit(*low)) else { return Err(refused()) };
        bytes.push(u8::try_from(high * 16 + low).unwrap_or_default());
        rest = others;
    }
    String::from_utf8(bytes).map_err(|_| refused())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_parts_are_found() {
        let url = ZooKeeperUrl::parse(
            "zookeeper://me:p%40ss:w@a,b:2182,[::1]:2183/locks/app/?naming=kazoo&session=4s&acl=open",
        )
        .unwrap();
        assert_eq!(url.hosts, "a:2181,b:2182,[::1]:2183");
        assert_eq!(url.chroot, "/locks/app");
        assert_eq!(url.credentials.as_deref(), Some("me:p@ss:w"));
        assert_eq!((url.naming, url.access), (Naming::Kazoo, Access::Open));
        assert_eq!(url.session, Duration::from_secs(4));
        assert!(!url.create);
        let url = ZooKeeperUrl::parse("zookeeper://h").unwrap();
        assert_eq!((url.chroot.as_str(), url.create), ("/leasehold", true));
        assert_eq!(ZooKeeperUrl::parse("zookeeper://h/").unwrap().chroot, "");
        assert_eq!(url.tls, None);
        let url = "zookeepers://h,i:7/x?ca=/a%20b.pem&cert=/c.pem&key=/k.pem";
        let url = ZooKeeperUrl::parse(url).unwrap();
        assert_eq!(
            (url.hosts.as_str(), url.shown().as_str()),
            ("h:2281,i:7", "zookeepers://h:2281,i:7/x")
        );
        assert_eq!(url.tls.unwrap().ca.as_deref(), Some("/a b.pem"));
    }

    #[test]
    fn s94_bad_urls_are_refused_in_one_line_without_the_password() {
        for bad in [
            "zookeeper:h",
            "zookeeper://",
            "zookeeper://a,,b",
            "zookeeper://a b",
            "zookeeper://a:0",
            "zookeeper://a:99999",
            "zookeeper://secret@h",
            "zookeeper://:secret@h",
            "zookeeper://u:secret",
            "zookeeper://u:secret/x",
            "zookeeper://a,u:secret,b",
            "zookeeper://u:se cret",
            "zookeeper://u:s?secret@h",
            "zookeeper://h?ca=/secret",
            "zookeepers://h?cert=/secret",
            "zookeeper://u:s?session=secret@h/x",
            "zookeeper://u:/secret//x",
            "zookeeper://h/a//b",
            "zookeeper://h/a/../b",
            "zookeeper://h/zookeeper",
            "zookeeper://h/%zz",
            "zookeeper://h/%00",
            "zookeeper://h?session=1ms",
            "zookeeper://h?session=soon",
            "zookeeper://h?naming=secret",
            "zookeeper://h?secret=1",
            "zookeeper://h?acl=creator",
        ] {
            let error = ZooKeeperUrl::parse(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            let shown = error.to_string();
            assert_eq!(shown.lines().count(), 1);
            assert!(!shown.contains("secret"), "{shown}");
        }
        let url = ZooKeeperUrl::parse("zookeeper://u:secret@h/x").unwrap();
        assert!(!format!("{url:?}").contains("secret"));
    }
}
