//! The store's URL: `etcd://user:password@host1:2379,host2,host3/namespace?ca=/a/file.pem`.

use leasehold_core::{Error, ErrorKind, Result};

/// Where etcd listens unless the URL says otherwise.
const PORT: u16 = 2379;

/// What a URL says.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct EtcdUrl {
    /// `http://host:port` or `https://host:port`, one for each member.
    pub(super) endpoints: Vec<String>,
    pub(super) credentials: Option<Credentials>,
    /// What all keys begin with: empty, or something that ends with a slash.
    pub(super) namespace: String,
    /// `Some` for `etcds:`.
    pub(super) tls: Option<Tls>,
}

/// A user of etcd's.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Credentials {
    pub(super) user: String,
    pub(super) password: String,
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

impl EtcdUrl {
    pub(super) fn parse(url: &str) -> Result<Self> {
        let refused = |what: String| Err(Error::new(ErrorKind::Config, what));
        let form = "write it as etcd://host1,host2,host3 or etcds://user:password@host/namespace";
        let Some((scheme @ ("etcd" | "etcds"), rest)) = url.split_once("://") else {
            return refused(format!("an etcd store needs its members: {form}"));
        };
        let (rest, query) = leasehold_core::kit::split_query(rest)?;
        // A password may hold an @ that nobody encoded.
        let (user, rest) = match rest.rsplit_once('@') {
            Some((user, rest)) => (Some(user), rest),
            None => (None, rest),
        };
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        let mut tls = (scheme == "etcds").then(Tls::default);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = Some(decoded(value)?);
            match (key, &mut tls) {
                ("ca", Some(tls)) => tls.ca = value,
                ("cert", Some(tls)) => tls.cert = value,
                ("key", Some(tls)) => tls.key = value,
                ("ca" | "cert" | "key", None) => {
                    return refused(format!("{key} is for TLS: write etcds:// for that"));
                }
                // What is there is not shown: it may be a secret at the wrong place.
                _ => return refused("etcd: has no parameters but ca, cert and key".into()),
            }
        }
        if tls.as_ref().is_some_and(|t| t.cert.is_some() != t.key.is_some()) {
            return refused("cert and key go together: give both or neither".into());
        }
        let mut endpoints = Vec::new();
        for host in hosts.split(',') {
            let endpoint = endpoint(host, tls.is_some());
            let Some(endpoint) = endpoint else {
                // It is not shown: where the host was forgotten, it is user and password.
                return refused(format!(
                    "a member is host or host:port, and user:password@ stands before the first: {form}"
                ));
            };
            if endpoints.contains(&endpoint) {
                return refused(format!("{host:?} is there twice: name each member once"));
            }
            endpoints.push(endpoint);
        }
        let credentials = match user {
            None => None,
            Some(user) => {
                let (user, password) = user.split_once(':').unwrap_or((user, ""));
                let (user, password) = (decoded(user)?, decoded(password)?);
                if user.is_empty() {
                    return refused(format!("there is no user before the @: {form}"));
                }
                Some(Credentials { user, password })
            }
        };
        let mut namespace = decoded(path.trim_end_matches('/'))?;
        if namespace.chars().any(char::is_control) {
            return refused("a namespace has no control characters".into());
        }
        if !namespace.is_empty() {
            namespace.push('/');
        }
        Ok(Self { endpoints, credentials, namespace, tls })
    }
}

/// `host`, `host:port`, `[v6]` or `[v6]:port`, as tonic wants it.
fn endpoint(text: &str, tls: bool) -> Option<String> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (inside, after) = rest.split_once(']')?;
            inside.parse::<std::net::Ipv6Addr>().ok()?;
            (format!("[{inside}]"), after.strip_prefix(':').or((after.is_empty()).then_some(""))?)
        }
        None => {
            let (host, port) = text.split_once(':').unwrap_or((text, ""));
            let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
            if host.is_empty() || !host.chars().all(plain) {
                return None;
            }
            (host.to_owned(), port)
        }
    };
    let port = match port {
        "" if !text.ends_with(':') => PORT,
        port => port.parse().ok().filter(|p| *p != 0)?,
    };
    let scheme = if tls { "https" } else { "http" };
    Some(format!("{scheme}://{host}:{port}"))
}

/// `%41` is `A`.
fn decoded(text: &str) -> Result<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = [rest.next(), rest.next()].map(|b| char::from(b.unwrap_or(0)).to_digit(16));
        let [Some(high), Some(low)] = digits else {
            let what = "a % in the URL is not followed by two hexadecimal digits: write it as %25";
            return Err(Error::new(ErrorKind::Config, what));
        };
        bytes.push(u8::try_from(high * 16 + low).unwrap_or(0));
    }
    String::from_utf8(bytes)
        .map_err(|_| Error::new(ErrorKind::Config, "what the URL has with % in it is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_user_namespace_and_tls() {
        let url = EtcdUrl::parse("etcds://u%40x:p@ss:w%25@h1,h2:1,[::1]:2/a/b/?ca=/x%20y.pem");
        let url = url.unwrap();
        assert_eq!(url.endpoints, ["https://h1:2379", "https://h2:1", "https://[::1]:2"]);
        let credentials = url.credentials.unwrap();
        assert_eq!((credentials.user, credentials.password), ("u@x".into(), "p@ss:w%".into()));
        assert_eq!(url.namespace, "a/b/");
        assert_eq!(url.tls.unwrap().ca.as_deref(), Some("/x y.pem"));
        assert_eq!(EtcdUrl::parse("etcd://h").unwrap().namespace, "");
        assert_eq!(EtcdUrl::parse("etcd://h/").unwrap().namespace, "");
    }

    #[test]
    fn s94_what_cannot_work_is_refused_in_one_line_without_the_password() {
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
            let Err(error) = EtcdUrl::parse(bad) else { panic!("{bad} was taken") };
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            let shown = error.to_string();
            assert!(!shown.contains(":p@") && !shown.contains("secret"), "{shown}");
            assert_eq!(shown.lines().count(), 1, "{shown}");
        }
    }
}
