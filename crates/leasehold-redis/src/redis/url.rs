//! The URL of a Redis store: servers, credentials and leasehold's parameters.
//!
//! The driver's own parser is not used. It supports only one host, and ignores what it does not
//! understand.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use leasehold_core::kit::{Host, Password, Tls, TlsWords, UrlParts, redacted};
use leasehold_core::{Error, ErrorKind, Result};

/// Default port of Redis.
pub const PORT: u16 = 6379;
/// Default port of a sentinel.
const SENTINEL_PORT: u16 = 26_379;
/// Prefix of leasehold's own keys and channels, other than the locks' main keys.
pub const RESERVED: &str = "leasehold:";
/// Maximum length of the prefix of lock names.
const MAX_PREFIX: usize = 100;
/// The words of error messages about TLS.
const TLS: TlsWords = TlsWords {
    scheme: "rediss:",
    ca: "tls_ca",
    identity: Some(("cert", "key")),
    built: cfg!(feature = "tls"),
};

/// Address at which a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    Tcp(String, u16),
    Unix(PathBuf),
}

impl Address {
    /// Parses an address that a server returned for another server.
    pub(crate) fn reported(host: &str, port: &str) -> Option<Self> {
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let strange = |c: char| c.is_control() || c.is_whitespace();
        let port = port.parse().ok().filter(|port| *port > 0)?;
        (!host.is_empty() && !host.contains(strange)).then(|| Self::Tcp(host.to_owned(), port))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Credentials, database and TLS settings for any server of the store.
#[derive(Clone, Default)]
pub struct Login {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<Password>,
    pub db: i64,
    pub tls: Option<Tls>,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login")
            .field("db", &self.db)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

/// Servers that form the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Deployment {
    Single(Address),
    /// The server that the sentinels report as the master with this name.
    Sentinel {
        sentinels: Vec<Address>,
        master: String,
    },
    /// The nodes of a cluster that are queried for the other nodes.
    Cluster(Vec<Address>),
}

/// Action when fewer replicas than requested have a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shortfall {
    /// The lock is released, and the caller gets an error.
    Refuse,
    /// The lock is held anyway.
    Accept,
}

/// Setting `replicas=N`: how many replicas must have a grant, within which time, and what happens
/// otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Replicas {
    pub(crate) count: u32,
    pub(crate) within: Duration,
    pub(crate) short: Shortfall,
}

/// Parsed URL.
#[derive(Clone, Debug)]
pub(crate) struct RedisUrl {
    pub(crate) deployment: Deployment,
    pub(crate) login: Login,
    /// Credentials for the sentinels, which have their own users.
    pub(crate) sentinel_login: Login,
    /// Prefix of the main keys, before the lock's name.
    pub(crate) prefix: String,
    pub(crate) replicas: Option<Replicas>,
    /// Time after a server's start during which it grants no locks.
    pub(crate) restart_delay: Duration,
}

fn refused<T>(what: impl Into<String>, hint: &str) -> Result<T> {
    Err(Error::new(ErrorKind::Config, what).with_hint(hint))
}

/// Parses a URL into its parts and the credentials in them.
pub fn parts(url: &str, port: u16, encrypted: bool) -> Result<(UrlParts, Login)> {
    let mut parts = UrlParts::parse(url, "redis://host:port/", port)?;
    let given = |text: Option<String>| text.filter(|text| !text.is_empty());
    let (user, password) = (given(parts.user.take()), given(parts.password.take()));
    let password = password.map(|text| parts.secret(text));
    let tls = parts.tls(encrypted, &TLS)?;
    Ok((parts, Login { user, password, db: 0, tls }))
}

/// Converts hosts to addresses.
pub fn addresses(hosts: Vec<Host>) -> Vec<Address> {
    hosts.into_iter().map(|host| Address::Tcp(host.name, host.port)).collect()
}

/// Takes the prefix of lock names from the parameters.
pub fn prefix(parts: &mut UrlParts) -> Result<String> {
    let prefix = parts.take("prefix").unwrap_or_default();
    if prefix.len() > MAX_PREFIX || prefix.chars().any(char::is_control) {
        return refused(
            format!("invalid prefix {:?}", shown(&prefix)),
            &format!("use at most {MAX_PREFIX} bytes, and no control characters"),
        );
    }
    if prefix.starts_with(RESERVED) {
        return refused(
            format!("invalid prefix {prefix:?}: {RESERVED:?} is reserved for leasehold's own keys"),
            "use another prefix",
        );
    }
    Ok(prefix)
}

impl RedisUrl {
    pub(crate) fn parse(url: &str) -> Result<Self> {
        let scheme = url.split_once(':').map_or(url, |(scheme, _)| scheme);
        let (scheme, is_cluster, is_sentinel) = match scheme.split_once('+') {
            Some((scheme, "cluster")) => (scheme, true, false),
            Some((scheme, "sentinel")) => (scheme, false, true),
            Some(("redis" | "valkey", "unix")) => return Self::unix(url),
            None => (scheme, false, false),
            _ => {
                return refused(
                    format!(
                        "unknown scheme {:?}",
                        shown(url.split(':').next().unwrap_or_default())
                    ),
                    "use redis:, redis+sentinel:, redis+cluster: or redis+unix:; with TLS rediss:",
                );
            }
        };
        let tls = matches!(scheme, "rediss" | "valkeys");
        let port = if is_sentinel { SENTINEL_PORT } else { PORT };
        let (mut parts, mut login) = parts(url, port, tls)?;
        let mut hosts = addresses(std::mem::take(&mut parts.hosts));
        if hosts.is_empty() {
            hosts.push(Address::Tcp("127.0.0.1".into(), port));
        }
        let mut sentinel_login = Login { tls: login.tls.clone(), ..Login::default() };
        let deployment = if is_sentinel {
            let path = std::mem::take(&mut parts.path);
            let path = path.trim_start_matches('/');
            let (master, db) = path.split_once('/').unwrap_or((path, ""));
            if master.is_empty() {
                return refused(
                    "the URL does not name the master",
                    "use redis+sentinel://host1,host2,host3/mymaster",
                );
            }
            login.db = database(db)?;
            sentinel_login.user = parts.take("sentinel_user");
            let file = parts.take("sentinel_password_file").map(PathBuf::from);
            let password = parts.take("sentinel_password");
            sentinel_login.password = password.map(|text| Password::new(text, file));
            Deployment::Sentinel { sentinels: hosts, master: master.to_owned() }
        } else if is_cluster {
            let database = database(&parts.path)?;
            if database != 0 {
                return refused(
                    format!("invalid database {database}: a Redis Cluster has database 0 only"),
                    "remove the number from the URL",
                );
            }
            Deployment::Cluster(hosts)
        } else {
            login.db = database(&parts.path)?;
            match hosts.as_slice() {
                [one] => Deployment::Single(one.clone()),
                _ => {
                    return refused(
                        format!("the URL names {} servers, but redis: uses one", hosts.len()),
                        "use redis+sentinel:, redis+cluster: or redlock: for several servers",
                    );
                }
            }
        };
        Self::finish(deployment, parts, login, sentinel_login)
    }

    /// Parses `redis+unix:///path/of/socket?db=1&user=…&password=…`.
    fn unix(url: &str) -> Result<Self> {
        let (mut parts, mut login) = parts(url, PORT, false)?;
        if !parts.hosts.is_empty() || parts.path.len() < 2 {
            return refused(
                "invalid store URL: redis+unix: needs the absolute path of a socket",
                "use redis+unix:///run/redis/redis.sock",
            );
        }
        let path = PathBuf::from(std::mem::take(&mut parts.path));
        let db = parts.take("db").unwrap_or_default();
        login.db = database(&db)?;
        if let Some(user) = parts.take("user") {
            login.user = Some(user);
        }
        if let Some(password) = parts.take("password") {
            login.password = Some(parts.secret(password));
        }
        Self::finish(Deployment::Single(Address::Unix(path)), parts, login, Login::default())
    }

    fn finish(
        deployment: Deployment,
        mut parts: UrlParts,
        login: Login,
        sentinel_login: Login,
    ) -> Result<Self> {
        let prefix = prefix(&mut parts)?;
        let replicas = replicas(&mut parts)?;
        let restart_delay = parts.number("restart_delay_ms", 0, 86_400_000)?;
        let restart_delay = Duration::from_millis(restart_delay.unwrap_or(0));
        parts.done(
            "prefix, tls_ca, cert, key, password_file, replicas, replicas_ms, replicas_short, restart_delay_ms; \
                         with redis+sentinel: sentinel_user, sentinel_password and sentinel_password_file; with \
                         redis+unix: db, user and password",
        )?;
        Ok(Self { deployment, login, sentinel_login, prefix, replicas, restart_delay })
    }
}

fn replicas(parts: &mut UrlParts) -> Result<Option<Replicas>> {
    let count = parts.number("replicas", 0, 100)?;
    let within = parts.number("replicas_ms", 1, 60_000)?;
    let short = match parts.take("replicas_short").as_deref() {
        None | Some("refuse") => Shortfall::Refuse,
        Some("accept") => Shortfall::Accept,
        Some(other) => {
            let what = format!("invalid value {:?} for replicas_short", shown(other));
            return refused(what, "use refuse or accept");
        }
    };
    let Some(count) = count.and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0) else {
        return Ok(None);
    };
    let within = Duration::from_millis(within.unwrap_or(1_000));
    Ok(Some(Replicas { count, within, short }))
}

pub fn database(text: &str) -> Result<i64> {
    let text = text.trim_matches('/');
    if text.is_empty() {
        return Ok(0);
    }
    match text.parse::<u32>() {
        Ok(n) => Ok(i64::from(n)),
        Err(_) => refused(
            format!("invalid database {:?}", shown(text)),
            "use a number: redis://host:port/0",
        ),
    }
}

/// Returns a part of a URL for an error message. Text with an `@` may be part of a password and is
/// hidden.
fn shown(text: &str) -> String {
    if text.contains('@') { "***".into() } else { redacted(text).chars().take(60).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp(host.into(), port)
    }

    #[test]
    fn all_url_forms_are_parsed() {
        let parse = |url| RedisUrl::parse(url).unwrap();
        let single = parse("redis://us%40er:p%3Aw@h:7/3?prefix=app:&replicas=2&replicas_ms=50");
        assert_eq!(single.deployment, Deployment::Single(tcp("h", 7)));
        assert_eq!(single.login.user.as_deref(), Some("us@er"));
        assert_eq!(single.login.password.map(|p| p.now()).as_deref(), Some("p:w"));
        assert_eq!((single.login.db, single.prefix.as_str()), (3, "app:"));
        let within = Duration::from_millis(50);
        assert_eq!(single.replicas, Some(Replicas { count: 2, within, short: Shortfall::Refuse }));
        assert_eq!(parse("valkey://h:7").deployment, Deployment::Single(tcp("h", 7)));
        assert!(parse("valkeys://h").login.tls.is_some());
        assert_eq!(
            parse("valkey+cluster://a").deployment,
            Deployment::Cluster(vec![tcp("a", PORT)])
        );
        assert_eq!(parse("redis://").deployment, Deployment::Single(tcp("127.0.0.1", PORT)));
        assert_eq!(parse("redis://[::1]:9/").deployment, Deployment::Single(tcp("::1", 9)));
        assert!(parse("rediss://h").login.tls.is_some());
        assert_eq!(
            parse("redis+sentinel://a,b:5,c/mymaster/2").deployment,
            Deployment::Sentinel {
                sentinels: vec![tcp("a", 26_379), tcp("b", 5), tcp("c", 26_379)],
                master: "mymaster".into()
            }
        );
        assert_eq!(parse("redis+sentinel://a/m/2").login.db, 2);
        assert_eq!(
            parse("rediss+cluster://a:1,b:2/").deployment,
            Deployment::Cluster(vec![tcp("a", 1), tcp("b", 2)])
        );
        assert_eq!(
            parse("redis+unix:///run/r.sock?db=1").deployment,
            Deployment::Single(Address::Unix("/run/r.sock".into()))
        );
    }

    #[test]
    fn bad_urls_are_refused_in_one_line_without_secrets() {
        for url in [
            "redis:h",
            "redis://h:0",
            "redis://h:x",
            "redis://a,b",
            "redis://h/x",
            "redis://u:secret@h/?nonsense=secret",
            "redis://u:secret%zz@h/",
            "redis://u:s?secret@h/",
            "redis+sentinel://u:s?secret@a,b/mymaster",
            "redis://u:secret",
            "redis://:secret",
            "redis://[u:secret",
            "redis://u:secret/0?prefix=x",
            "redis+cluster://a,u:secret,b",
            "redis://h/?prefix=leasehold:x",
            "redis://h/?prefix=a%0ab",
            "redis://h/?replicas=-1",
            "redis://h/?replicas=1&replicas=1",
            "redis://h/?replicas=1&replicas_short=perhaps",
            "redis://h/?tls_ca=/x",
            "redis://h/?cert=/x&key=/y",
            "redis+sentinel://a,b",
            "redis+cluster://a/1",
            "redis+unix://h/x",
            "redis+other://h",
        ] {
            let error = RedisUrl::parse(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{url}");
            let text = format!("{error:#}");
            assert!(text.lines().count() == 1 && !text.contains("secret"), "{text}");
        }
        let debug = format!("{:?}", RedisUrl::parse("redis://u:secret@h/").unwrap());
        assert!(!debug.contains("secret"), "{debug}");
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_url_is_parsed_or_refused_in_one_line(url in testbed::texts(&[
            "redis://u:sekret@h:7/3?prefix=a%3A&replicas=2&replicas_ms=5&restart_delay_ms=9", "rediss+sentinel://u:sekret@a,b:5/m/2?tls_ca=/x", "redis+cluster://a:1,b:2", "redis+unix:///run/s?db=1&user=u&password=p"
        ])) {
            if let Err(error) = RedisUrl::parse(&url) {
                let message = format!("{error:#}");
                proptest::prop_assert_eq!(message.lines().count(), 1);
                // The text is a password only if it is still before the `@`.
                let secret = url.contains(":sekret@") && url.matches("sekret").count() == 1;
                proptest::prop_assert!(!secret || !message.contains("sekret"), "{}", message);
            }
        }
    }
}
