//! The store's URL: `zookeeper://[user:password@]host[:port],…[/chroot][?…]`, or `zookeepers:` with TLS.

use std::time::Duration;

use super::node::Naming;
use leasehold_core::kit::{Host, Password, Tls, TlsWords, UrlParts};
use leasehold_core::{Error, ErrorKind, Result};

/// Access to the nodes that this client creates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// All users.
    Open,
    /// Only clients with the same user and password.
    Creator,
}

/// A parsed URL. Its `Debug` form has no password.
#[derive(Clone)]
pub(super) struct ZooKeeperUrl {
    pub(super) hosts: Vec<Host>,
    /// The node below which all locks are, without a `/` at its end. Empty for the root.
    pub(super) chroot: String,
    pub(super) credentials: Option<(String, Password)>,
    pub(super) access: Access,
    pub(super) naming: Naming,
    /// The requested session timeout. The server may grant another one.
    pub(super) session: Duration,
    /// Whether a missing chroot is created.
    pub(super) create: bool,
    /// `Some` for `zookeepers:`.
    pub(super) tls: Option<Tls>,
}

impl std::fmt::Debug for ZooKeeperUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ZooKeeperUrl").field("shown", &self.shown()).finish_non_exhaustive()
    }
}

const FORM: &str = "zookeeper://host:2181,host:2181/path";
const DEFAULT_PORT: u16 = 2181;
/// The servers' port for TLS, according to their documentation.
const DEFAULT_TLS_PORT: u16 = 2281;
/// The words of error messages about TLS.
const TLS: TlsWords = TlsWords {
    scheme: "zookeepers:",
    ca: "ca",
    identity: Some(("cert", "key")),
    built: cfg!(feature = "tls"),
};
/// The node for locks if the URL does not name one. It is created if it is missing.
const DEFAULT_CHROOT: &str = "/leasehold";

const PARAMETERS: &str = "naming=curator|kazoo, session=15s, create=yes|no, acl=open|creator; with zookeepers: ca, \
     cert and key";

impl ZooKeeperUrl {
    pub(super) fn parse(url: &str) -> Result<Self> {
        let refused =
            |what: &str, hint: &str| Err(Error::new(ErrorKind::Config, what).with_hint(hint));
        let invalid = |key: &str, value: &str, hint: &str| {
            refused(&format!("invalid value {} for {key}", shown(value)), hint)
        };
        let encrypted = url.starts_with("zookeepers:");
        let port = if encrypted { DEFAULT_TLS_PORT } else { DEFAULT_PORT };
        let mut parts = UrlParts::parse(url, FORM, port)?;
        if parts.hosts.is_empty() {
            return refused("the URL names no server", &format!("use {FORM}"));
        }
        let credentials = match (parts.user.take(), parts.password.take()) {
            (None, _) => None,
            (Some(user), Some(password)) if !user.is_empty() && !user.contains(':') => {
                Some((user, parts.secret(password)))
            }
            _ => {
                return refused(
                    "invalid credentials in the URL",
                    "use zookeeper://user:password@host:2181/path; the user name cannot \
                     contain a colon",
                );
            }
        };
        let tls = parts.tls(encrypted, &TLS)?;
        let naming = match parts.take("naming").as_deref() {
            None | Some("curator") => Naming::Curator,
            Some("kazoo") => Naming::Kazoo,
            Some(other) => return invalid("naming", other, "use curator or kazoo"),
        };
        let access = match (parts.take("acl").as_deref(), &credentials) {
            (None | Some("creator"), Some(_)) => Access::Creator,
            (None, None) | (Some("open"), _) => Access::Open,
            (Some("creator"), None) => {
                let hint = "use zookeeper://user:password@host:2181/path?acl=creator";
                return refused("acl=creator needs a user name and a password", hint);
            }
            (Some(other), _) => return invalid("acl", other, "use open or creator"),
        };
        let create = match parts.take("create").as_deref() {
            None => parts.path.is_empty(),
            Some("yes") => true,
            Some("no") => false,
            Some(other) => return invalid("create", other, "use yes or no"),
        };
        let given = parts.take("session").as_deref().map(session).transpose()?;
        parts.done(PARAMETERS)?;
        let session = given.unwrap_or(leasehold_core::DEFAULT_LEASE);
        let chroot = chroot(&parts.path)?;
        let hosts = parts.hosts;
        Ok(Self { hosts, chroot, credentials, access, naming, session, create, tls })
    }

    /// Returns the URL without credentials.
    pub(super) fn shown(&self) -> String {
        let scheme = if self.tls.is_some() { "zookeepers" } else { "zookeeper" };
        format!("{scheme}://{}{}", self.servers(), self.chroot)
    }

    /// Returns the servers as `host:port,host:port`.
    pub(super) fn servers(&self) -> String {
        let hosts: Vec<String> = self.hosts.iter().map(Host::to_string).collect();
        hosts.join(",")
    }

    /// Returns the full path of the node with this name below the chroot.
    pub(super) fn path(&self, node: &str) -> String {
        format!("{}/{node}", self.chroot)
    }

    /// Returns the chroot as a path.
    pub(super) fn root(&self) -> &str {
        if self.chroot.is_empty() { "/" } else { &self.chroot }
    }
}

/// Returns a parameter's value for an error message. A value that may be a pasted URL with a
/// password is hidden.
fn shown(value: &str) -> String {
    match value.contains([':', '@', '/']) {
        true => "…".to_owned(),
        false => format!("{:?}", value.chars().take(60).collect::<String>()),
    }
}

fn chroot(path: &str) -> Result<String> {
    if path.is_empty() {
        return Ok(DEFAULT_CHROOT.into());
    }
    let path = path.strip_suffix('/').unwrap_or(path);
    let bad = |part: &str| {
        part.is_empty()
            || part == "."
            || part == ".."
            || part.chars().any(|c| c.is_control() || !c.is_ascii())
    };
    if path.split('/').skip(1).any(bad) || path.split('/').nth(1) == Some("zookeeper") {
        let what = "invalid path after the hosts in the URL";
        let hint = "use /name or /name/name, in ASCII, outside of /zookeeper";
        return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
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
            let what = format!("invalid value {} for session", shown(text));
            let hint = "use a time from 400ms to 3600s, such as 15s or 4000ms";
            Err(Error::new(ErrorKind::Config, what).with_hint(hint))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(feature = "tls")]
    fn url_parts_and_parameters_are_parsed() {
        let url = ZooKeeperUrl::parse(
            "zookeeper://me:p%40ss:w@a,b:2182,[::1]:2183/locks/app/?naming=kazoo&session=4s&acl=open",
        )
        .unwrap();
        assert_eq!(url.servers(), "a:2181,b:2182,[::1]:2183");
        assert_eq!(url.chroot, "/locks/app");
        let (user, password) = url.credentials.unwrap();
        assert_eq!((user.as_str(), password.now().as_str()), ("me", "p@ss:w"));
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
            (url.servers().as_str(), url.shown().as_str()),
            ("h:2281,i:7", "zookeepers://h:2281,i:7/x")
        );
        let message = url.tls.unwrap().ca().unwrap_err().to_string();
        assert!(message.contains(r#"ca="/a b.pem""#), "{message}");
    }

    // S94
    #[test]
    fn bad_urls_are_refused_in_one_line_without_the_password() {
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
            "zookeeper://h?naming=u:secret",
            "zookeeper://h?acl=some%40secret",
            "zookeeper://h?session=/secret",
            "zookeeper://h?x=secret",
            "zookeeper://h?acl=creator",
        ] {
            let error = ZooKeeperUrl::parse(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            let shown = format!("{error:#}");
            assert_eq!(shown.lines().count(), 1);
            assert!(!shown.contains("secret"), "{shown}");
        }
        let url = ZooKeeperUrl::parse("zookeeper://u:secret@h/x").unwrap();
        assert!(!format!("{url:?}").contains("secret"));
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_url_is_parsed_or_refused_in_one_line(url in testbed::texts(&[
            "zookeeper://u:sekret@h1,h2:2181,[::1]:7/a/b?naming=kazoo&session=4s&create=no&acl=open", "zookeepers://h/x?ca=/a"
        ])) {
            if let Err(error) = ZooKeeperUrl::parse(&url) {
                let message = format!("{error:#}");
                proptest::prop_assert_eq!(message.lines().count(), 1);
                // The text is the password only if it is still in front of the @.
                let secret = url.contains(":sekret@") && url.matches("sekret").count() == 1;
                proptest::prop_assert!(!secret || !message.contains("sekret"), "{}", message);
            }
        }
    }
}
