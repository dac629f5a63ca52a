//! Parses the URL of a store:
//! `scheme://[user[:password]@]host[:port][,host[:port]…][/path][?key=value&…]`.
//!
//! User, password, path and values are percent-encoded, as in every URL. The last `@` ends the
//! password, which may contain an unencoded `@`. Parameters are taken by name, and unknown ones are
//! rejected, because a misspelled prefix or certificate file would silently have no effect. Errors
//! do not show text that may be a misplaced password.

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;

use super::{redacted, shows_no_password, split_query};
use crate::store::secrets::{PASSWORD_FILE, Password};
use crate::types::error::{Error, ErrorKind, Result};
use crate::util::percent::{ENCODING_HINT, decoded};
use crate::util::similar::did_you_mean;

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Host {
    /// A host name or an IP address. An IPv6 address has no brackets.
    pub name: String,
    /// The port, never 0.
    pub port: u16,
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, port } = self;
        if name.contains(':') { write!(f, "[{name}]:{port}") } else { write!(f, "{name}:{port}") }
    }
}

/// The parts of a URL. It contains the password, so do not print it.
#[derive(Clone)]
pub struct UrlParts {
    /// The user: the text before the `@`, up to the first colon. May be empty.
    pub user: Option<String>,
    /// The password: the text between the first colon of the credentials and the `@`.
    pub password: Option<String>,
    /// The hosts, in the order of the URL.
    pub hosts: Vec<Host>,
    /// The path, from its first slash on, or an empty string.
    pub path: String,
    /// The file that contained the password.
    password_file: Option<PathBuf>,
    parameters: BTreeMap<String, String>,
}

impl fmt::Debug for UrlParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UrlParts")
            .field("hosts", &self.hosts)
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

fn refused<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::new(ErrorKind::Config, what))
}

impl UrlParts {
    /// Parses a URL. Hosts without a port get `port`. `form` is an example URL for the hint of an
    /// error.
    ///
    /// # Errors
    /// - [`Config`](ErrorKind::Config): the URL is invalid. The error shows no secrets.
    pub fn parse(url: &str, form: &str, port: u16) -> Result<Self> {
        let Some((_, rest)) = url.split_once("://") else {
            let what = format!("invalid store URL {:?}: missing \"//\"", redacted(url));
            return Err(Error::new(ErrorKind::Config, what).with_hint(format!("use {form}")));
        };
        let (rest, query) = split_query(rest)?;
        let (credentials, rest) = match rest.rsplit_once('@') {
            Some((credentials, rest)) => (Some(credentials), rest),
            None => (None, rest),
        };
        let (hosts, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (user, password) = match credentials.map(|text| text.split_once(':').ok_or(text)) {
            None => (None, None),
            Some(Ok((user, password))) => (Some(unescaped(user)?), Some(unescaped(password)?)),
            Some(Err(user)) => (Some(unescaped(user)?), None),
        };
        let host = |text| {
            host(text, port).ok_or_else(|| {
                let what = match shows_no_password(text) {
                    true => format!("invalid host {text:?} in the store URL"),
                    false => "invalid host in the store URL".to_owned(),
                };
                let hint = format!(
                    "use {form}; separate multiple hosts (host, host:port or [IPv6]:port) with \
                     commas, and put user:password@ only before the first"
                );
                Error::new(ErrorKind::Config, what).with_hint(hint)
            })
        };
        let hosts = match hosts {
            "" => Vec::new(),
            hosts => hosts.split(',').map(host).collect::<Result<_>>()?,
        };
        let mut parameters = parameters(query)?;
        // When the store was opened, the password was inserted into the URL, and the parameter was
        // kept.
        let is_read = user.is_some() || parameters.contains_key("password");
        let password_file =
            if is_read { parameters.remove(PASSWORD_FILE).map(PathBuf::from) } else { None };
        let path = unescaped(path)?;
        Ok(Self { user, password, hosts, path, password_file, parameters })
    }

    /// Returns the first host that is listed twice.
    pub fn twice(&self) -> Option<&Host> {
        let mut hosts = self.hosts.iter().enumerate();
        hosts.find(|(n, host)| self.hosts[..*n].contains(host)).map(|(_, host)| host)
    }

    /// Returns a [`Password`] for connections. `text` is the password in this URL. If it came from
    /// a file, connections read that file again.
    pub fn secret(&self, text: String) -> Password {
        Password::new(text, self.password_file.clone())
    }

    /// Takes the parameter with this name out of the URL and returns it.
    pub fn take(&mut self, key: &str) -> Option<String> {
        self.parameters.remove(key)
    }

    /// Takes the parameter with this name, and parses it as a number between `least` and `most`.
    ///
    /// # Errors
    /// - [`Config`](ErrorKind::Config): the value is not such a number.
    pub fn number(&mut self, key: &str, least: u64, most: u64) -> Result<Option<u64>> {
        let Some(value) = self.take(key) else { return Ok(None) };
        match value.parse() {
            Ok(n) if (least..=most).contains(&n) => Ok(Some(n)),
            _ if is_word(&value) => refused(format!(
                "invalid value {value:?} for {key}: expected a number from {least} to {most}"
            )),
            _ => refused(format!(
                "invalid value for {key}: expected a number from {least} to {most}"
            )),
        }
    }

    /// Checks that all parameters were taken. `known` lists the known ones, for the hint.
    ///
    /// # Errors
    /// - [`Config`](ErrorKind::Config): there is an unknown parameter.
    pub fn done(&self, known: &str) -> Result<()> {
        match self.parameters.keys().next() {
            None => Ok(()),
            Some(key) => {
                let what = match is_word(key) {
                    true => format!("unknown URL parameter {key:?}"),
                    false => "unknown URL parameter".to_owned(),
                };
                let known_words = known.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                let hint = match did_you_mean(key, known_words) {
                    Some(meant) => format!("did you mean {meant:?}? (known parameters: {known})"),
                    None => format!("known parameters: {known}"),
                };
                Err(Error::new(ErrorKind::Config, what).with_hint(hint))
            }
        }
    }
}

/// Returns whether `key` can be shown as the name or value of a parameter. Other text may be part
/// of a password.
pub(crate) fn is_word(key: &str) -> bool {
    key.len() <= 40 && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
}

fn parameters(query: &str) -> Result<BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let Some((key, value)) = pair.split_once('=') else {
            let what = "a URL parameter has no value";
            let hint = "write parameters as ?key=value&key=value";
            return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
        };
        if all.insert(key.to_owned(), unescaped(value)?).is_some() {
            return match is_word(key) {
                true => refused(format!("URL parameter {key:?} is given more than once")),
                false => refused("a URL parameter is given more than once"),
            };
        }
    }
    Ok(all)
}

/// Parses `host`, `host:port`, `[v6]` or `[v6]:port`.
fn host(text: &str, default_port: u16) -> Option<Host> {
    let (name, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (name, after) = rest.split_once(']')?;
            name.split('%').next()?.parse::<Ipv6Addr>().ok()?;
            (name, if after.is_empty() { None } else { Some(after.strip_prefix(':')?) })
        }
        None => match text.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (text, None),
        },
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._:%".contains(c);
    if name.is_empty() || !name.chars().all(plain) {
        return None;
    }
    let port = match port {
        None => default_port,
        Some(port) => port.parse().ok().filter(|port| *port > 0)?,
    };
    Some(Host { name: name.to_owned(), port })
}

/// Decodes the percent-encoding of `text`. The error does not show the text, which may be a
/// password.
fn unescaped(text: &str) -> Result<String> {
    decoded(text, |_| true).ok_or_else(|| {
        let what = "invalid percent-encoding in the store URL";
        Error::new(ErrorKind::Config, what).with_hint(ENCODING_HINT)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<UrlParts> {
        UrlParts::parse(url, "x://host1,host2", 7)
    }

    #[test]
    fn url_is_split_into_its_parts() {
        let url = "x://u%40x:p@ss:w%25@h1,h-2.a:1,[::1]:2,[fe80::1%eth0]/a%20b/?n=5&s=%26&e=";
        let mut parts = parse(url).unwrap();
        assert_eq!(parts.user.as_deref(), Some("u@x"));
        assert_eq!(parts.password.as_deref(), Some("p@ss:w%"));
        let hosts: Vec<String> = parts.hosts.iter().map(Host::to_string).collect();
        assert_eq!(hosts, ["h1:7", "h-2.a:1", "[::1]:2", "[fe80::1%eth0]:7"]);
        assert_eq!(parts.path, "/a b/");
        assert_eq!(parts.number("n", 1, 5).unwrap(), Some(5));
        let error = parts.done("n").unwrap_err();
        assert_eq!(error.reason(), r#"unknown URL parameter "e""#);
        assert_eq!(error.hint(), Some("known parameters: n"));
        assert_eq!(parts.take("s").as_deref(), Some("&"));
        assert_eq!(parts.take("e").as_deref(), Some(""));
        assert_eq!((parts.take("n"), parts.number("n", 0, 0).unwrap()), (None, None));
        parts.done("nothing").unwrap();
    }

    #[test]
    fn missing_url_parts_are_none_or_empty() {
        let parts = parse("x://").unwrap();
        assert_eq!(
            (parts.user, parts.password, parts.hosts, parts.path.as_str()),
            (None, None, vec![], "")
        );
        assert_eq!(parse("x://@h").unwrap().user.as_deref(), Some(""));
        assert_eq!(parse("x://u@h").unwrap().password, None);
        assert_eq!(parse("x://h/").unwrap().path, "/");
    }

    #[test]
    fn errors_quote_the_wrong_part_with_a_suggestion() {
        let shown = |error: Error| (error.reason(), error.hint().unwrap_or_default().to_owned());
        let (cause, hint) = shown(parse("x:h").unwrap_err());
        assert_eq!(cause, r#"invalid store URL "x:h": missing "//""#);
        assert_eq!(hint, "use x://host1,host2");
        assert_eq!(
            shown(parse("x://h:0").unwrap_err()).0,
            r#"invalid host "h:0" in the store URL"#
        );
        let mut parts = parse("x://h?poool=many").unwrap();
        let (cause, hint) = shown(parts.done("schema, pool and prefix").unwrap_err());
        assert_eq!(cause, r#"unknown URL parameter "poool""#);
        assert_eq!(hint, r#"did you mean "pool"? (known parameters: schema, pool and prefix)"#);
        let error = parts.number("poool", 1, 64).unwrap_err();
        assert_eq!(
            error.reason(),
            r#"invalid value "many" for poool: expected a number from 1 to 64"#
        );
    }

    #[test]
    fn duplicate_host_is_detected() {
        assert_eq!(parse("x://a,b,a:7,b").unwrap().twice().unwrap().name, "a");
        assert_eq!(parse("x://a,b,a:8").unwrap().twice(), None);
    }

    // S94
    #[test]
    fn invalid_urls_are_rejected_in_one_line_without_secrets() {
        for bad in [
            "x:h",
            "x://a,,b",
            "x://h:0",
            "x://h:",
            "x://h:99999",
            "x://h:x",
            "x://[::1",
            "x://[x]",
            "x://[::1]2",
            "x://h h",
            "x://u:secret",
            "x://u:secret/x",
            "x://a,u:secret,b",
            "x://u:se cret",
            "x://u:s?secret@h",
            "x://h/%",
            "x://h/%ff",
            "x://h/%zz",
            "x://u:secret%@h",
            "x://h?secret",
            "x://h?a=1&a=secret",
            "x://h?a=secret%",
        ] {
            let error = parse(bad).map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            let shown = format!("{error:#}");
            assert!(shown.lines().count() == 1 && !shown.contains("secret"), "{bad}: {shown}");
        }
        let mut parts = parse("x://u:secret@h?n=sec%25ret&sec%ret=1").unwrap();
        assert!(!format!("{parts:?}").contains("secret"));
        let shown = [parts.number("n", 0, 1).unwrap_err(), parts.done("n").unwrap_err()];
        assert!(shown.iter().all(|e| !format!("{e:?}").contains("sec")), "{shown:?}");
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_url_is_parsed_or_rejected_in_one_line(url in testbed::texts(&[
            "x://u%40x:sekret@h1,h-2.a:1,[::1]:2,[fe80::1%eth0]/a%20b/?n=5&s=%26&e=", "x://h",
        ])) {
            match parse(&url) {
                Ok(mut parts) => {
                    let hosts: Vec<String> = parts.hosts.iter().map(Host::to_string).collect();
                    let again = parse(&format!("x://{}", hosts.join(","))).unwrap();
                    proptest::prop_assert_eq!(&again.hosts, &parts.hosts);
                    let _ = (parts.number("n", 0, 9), parts.done("n"));
                }
                Err(error) => {
                    let message = format!("{error:#}");
                    proptest::prop_assert_eq!(message.lines().count(), 1);
                    let secret = url.contains(":sekret@") && url.matches("sekret").count() == 1;
                    proptest::prop_assert!(!secret || !message.contains("sekret"), "{}", message);
                }
            }
        }
    }
}
