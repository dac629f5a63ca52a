//! The URL of a SQL store. Some parameters are ours, and the driver gets the rest.

use std::borrow::Cow;
use std::path::PathBuf;

use leasehold_core::kit::{Host, Password, UrlParts, decoded, did_you_mean};
use leasehold_core::{Error, ErrorKind, Result};

use super::callers::CallersPool;

/// The URL schemes that this build supports.
const KNOWN: &[&str] = &[
    #[cfg(feature = "sqlite")]
    "sqlite:",
    #[cfg(feature = "postgres")]
    "postgres:",
    #[cfg(feature = "mysql")]
    "mysql:",
];

/// The kind of database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    #[cfg(feature = "sqlite")]
    Sqlite,
    #[cfg(feature = "postgres")]
    Postgres,
    #[cfg(feature = "mysql")]
    MySql,
}

/// A parsed URL.
#[derive(Clone, Debug)]
pub(super) struct SqlUrl {
    pub(super) dialect: Dialect,
    /// The URL for the driver, with one host and without our parameters.
    pub(super) driver: String,
    /// The password, if the URL names a file that contains it.
    pub(super) password: Option<Password>,
    /// PostgreSQL: the hosts, if there are several.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "only PostgreSQL has several")
    )]
    pub(super) hosts: Vec<Host>,
    /// The prefix of the tables' names.
    pub(super) prefix: String,
    /// PostgreSQL: the schema of the tables, as it is written in SQL.
    pub(super) schema: Option<String>,
    /// The maximum number of connections for calls.
    pub(super) pool: usize,
    /// Whether a client may create the tables.
    pub(super) create: bool,
    /// SQLite: how durable a commit is.
    pub(super) synchronous: Synchronous,
    /// PostgreSQL: whether a pooler in front of the server gives the connection to another client
    /// after each transaction.
    pub(super) pooler: bool,
    /// The caller's pool, if the client uses one. Its options then replace the URL for the driver.
    pub(super) callers: Option<CallersPool>,
}

/// The setting `synchronous` of SQLite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Synchronous {
    Full,
    Normal,
    Off,
}

const DEFAULT_POOL: usize = 4;
const MAX_POOL: usize = 64;

impl SqlUrl {
    pub(super) fn parse(url: &str) -> Result<Self> {
        let refused =
            |what: String, hint: String| Err(Error::new(ErrorKind::Config, what).with_hint(hint));
        let (scheme, rest) = url.split_once(':').unwrap_or((url, ""));
        let dialect = match scheme {
            #[cfg(feature = "sqlite")]
            "sqlite" => Dialect::Sqlite,
            #[cfg(feature = "postgres")]
            "postgres" | "postgresql" => Dialect::Postgres,
            #[cfg(feature = "mysql")]
            "mysql" | "mariadb" => Dialect::MySql,
            _ => {
                // A scheme that is not a word may be a part of a password.
                let what = match is_word(scheme) {
                    true => format!(
                        "unknown scheme \"{scheme}:\" for a SQL \
                                                         store"
                    ),
                    false => "unknown scheme for a SQL store".to_owned(),
                };
                return refused(what, format!("this build supports {}", KNOWN.join(", ")));
            }
        };
        let is_file = scheme == "sqlite";
        if !is_file && !rest.starts_with("//") {
            return refused(
                "invalid store URL: missing \"//\"".to_owned(),
                format!("use {scheme}://user:password@host/database"),
            );
        }
        let (base, query) = match is_file {
            true => url.split_once('?').unwrap_or((url, "")),
            false => leasehold_core::kit::split_query(url)?,
        };
        let (base, hosts) = match is_file {
            true => (Cow::Borrowed(base), Vec::new()),
            false => first_host(scheme, base)?,
        };
        let mut parsed = Self {
            dialect,
            driver: String::new(),
            password: None,
            hosts,
            prefix: "leasehold_".into(),
            schema: None,
            pool: DEFAULT_POOL,
            create: true,
            synchronous: Synchronous::Full,
            pooler: false,
            callers: None,
        };
        let mut theirs = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            match key {
                "prefix" => parsed.prefix = identifier("prefix", value)?,
                "schema" if scheme.starts_with("postgres") => {
                    parsed.schema = Some(identifier("schema", value)?);
                }
                "pool" => match value.parse() {
                    Ok(n) if (1..=MAX_POOL).contains(&n) => parsed.pool = n,
                    _ => {
                        return refused(
                            format!("invalid value {} for pool", shown(value)),
                            format!("use a number from 1 to {MAX_POOL}"),
                        );
                    }
                },
                "create" => match value {
                    "yes" => parsed.create = true,
                    "no" => parsed.create = false,
                    _ => {
                        return refused(
                            format!("invalid value {} for create", shown(value)),
                            "use yes or no".to_owned(),
                        );
                    }
                },
                "pooler" if scheme.starts_with("postgres") => match value {
                    "transaction" => parsed.pooler = true,
                    "none" => parsed.pooler = false,
                    _ => {
                        return refused(
                            format!("invalid value {} for pooler", shown(value)),
                            "use transaction or none".to_owned(),
                        );
                    }
                },
                "password_file" if !is_file => {
                    let file = decoded(value, |_| true).map(PathBuf::from);
                    parsed.password = Some(Password::new(password_of(url), file));
                }
                "target_session_attrs" if scheme.starts_with("postgres") => {
                    if !matches!(value, "read-write" | "primary") {
                        return refused(
                            format!("invalid value {} for target_session_attrs", shown(value)),
                            "use read-write, the default, since locks are written".to_owned(),
                        );
                    }
                }
                "host" if scheme.starts_with("postgres") && value.contains(',') => {
                    return refused(
                        "URL parameter \"host\" names several hosts".to_owned(),
                        "write them as postgres://user@host1,host2/database".to_owned(),
                    );
                }
                "synchronous" if is_file => match value {
                    "full" => parsed.synchronous = Synchronous::Full,
                    "normal" => parsed.synchronous = Synchronous::Normal,
                    "off" => parsed.synchronous = Synchronous::Off,
                    _ => {
                        return refused(
                            format!("invalid value {} for synchronous", shown(value)),
                            "use full, normal or off".to_owned(),
                        );
                    }
                },
                _ if !cfg!(feature = "tls") && wants_tls(key, value) => {
                    return Err(leasehold_core::kit::no_tls());
                }
                _ if theirs_of(dialect).contains(&key) => theirs.push(pair),
                // One setting of PostgreSQL's `options`, as `options[NAME]`.
                _ if scheme.starts_with("postgres") && key.starts_with("options[") => {
                    theirs.push(pair);
                }
                _ => return Err(unknown(scheme, dialect, key)),
            }
        }
        let query = theirs.join("&");
        parsed.driver =
            if query.is_empty() { base.into_owned() } else { format!("{base}?{query}") };
        Ok(parsed)
    }

    /// Returns whether the next connection may use another password than the last one.
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    pub(super) fn can_change_password(&self) -> bool {
        self.callers.is_some() || self.password.is_some()
    }

    /// Returns the path of SQLite's database file.
    #[cfg(feature = "sqlite")]
    pub(super) fn path(&self) -> Result<&str> {
        let rest = self.driver.split_once(':').map_or("", |(_, rest)| rest);
        let path = rest.strip_prefix("//").unwrap_or(rest);
        if path.is_empty() || path.contains(":memory:") {
            let what = match path.is_empty() {
                true => "the URL does not name a database file",
                false => "an in-memory SQLite database cannot store locks",
            };
            let hint = "use sqlite:/var/lib/app/locks.db, or use memory: for one process";
            return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
        }
        if !path.starts_with('/') {
            let path = leasehold_core::kit::redacted(path);
            let what = format!("invalid store URL: the path {path:?} is relative");
            let hint = "use the absolute path, as in sqlite:/var/lib/app/locks.db: in another \
                        directory, a relative path is another store";
            return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
        }
        Ok(path)
    }

    /// Returns a table's name as it is written in SQL.
    pub(super) fn table(&self, name: &str) -> String {
        let table = format!("{}{name}", self.prefix);
        match &self.schema {
            Some(schema) => format!("{schema}.{table}"),
            None => table,
        }
    }
}

/// Returns the password in a server's URL, or an empty one.
fn password_of(url: &str) -> String {
    let (base, query) = url.split_once('?').unwrap_or((url, ""));
    let credentials = base.split_once("//").and_then(|(_, rest)| rest.rsplit_once('@'));
    let of_user = credentials.and_then(|(credentials, _)| credentials.split_once(':'));
    let of_query = || query.split('&').find_map(|pair| pair.strip_prefix("password="));
    let text = of_user.map(|(_, password)| password).or_else(of_query);
    text.and_then(|text| decoded(text, |_| true)).unwrap_or_default()
}

/// Returns a server's URL (without parameters) with its first host only, and the list of all hosts
/// if there are several. The drivers support only one host.
fn first_host<'a>(scheme: &str, base: &'a str) -> Result<(Cow<'a, str>, Vec<Host>)> {
    let start = base.rfind('@').map_or_else(|| scheme.len() + "://".len(), |at| at + 1);
    let (before, rest) = base.split_at(start);
    let (all, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let Some((first, _)) = all.split_once(',') else { return Ok((base.into(), Vec::new())) };
    if !scheme.starts_with("postgres") {
        let what = format!("a URL of {scheme}: with several hosts is not supported");
        let hint = "name one host that always leads to the primary, such as a proxy";
        return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
    }
    let form = "postgres://user:password@host1,host2/database";
    let parts = UrlParts::parse(&format!("postgres://{all}"), form, 5432)?;
    if let Some(host) = parts.twice() {
        let what = format!("the host {host} is listed twice in the URL");
        return Err(Error::new(ErrorKind::Config, what).with_hint("list each host once"));
    }
    Ok((format!("{before}{first}{path}").into(), parts.hosts))
}

/// Returns the parameters that the driver knows. The driver only logs and ignores all others, so a
/// misspelled prefix or TLS mode would have no effect.
fn theirs_of(dialect: Dialect) -> &'static [&'static str] {
    match dialect {
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => &[],
        #[cfg(feature = "postgres")]
        Dialect::Postgres => &[
            "sslmode",
            "ssl-mode",
            "sslrootcert",
            "ssl-root-cert",
            "ssl-ca",
            "sslcert",
            "ssl-cert",
            "sslkey",
            "ssl-key",
            "statement-cache-capacity",
            "host",
            "hostaddr",
            "port",
            "dbname",
            "user",
            "password",
            "application_name",
            "options",
        ],
        #[cfg(feature = "mysql")]
        Dialect::MySql => &[
            "sslmode",
            "ssl-mode",
            "sslca",
            "ssl-ca",
            "sslcert",
            "ssl-cert",
            "sslkey",
            "ssl-key",
            "charset",
            "collation",
            "statement-cache-capacity",
            "socket",
            "timezone",
            "time-zone",
        ],
    }
}

/// Returns whether a parameter of the driver requires TLS instead of only permitting it.
fn wants_tls(key: &str, value: &str) -> bool {
    let optional = ["disable", "disabled", "allow", "prefer", "preferred"];
    let is_mode = matches!(key, "sslmode" | "ssl-mode");
    match is_mode {
        true => !optional.contains(&value.to_ascii_lowercase().as_str()),
        false => key.starts_with("ssl"),
    }
}

fn is_word(text: &str) -> bool {
    text.len() <= 40 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
}

/// Returns the error for an unknown parameter. A key that is not a word may be part of a password.
fn unknown(scheme: &str, dialect: Dialect, key: &str) -> Error {
    let ours: &[&str] = match dialect {
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => &["prefix", "pool", "create", "synchronous"],
        #[cfg(feature = "postgres")]
        Dialect::Postgres => {
            &["prefix", "schema", "pool", "create", "pooler", "target_session_attrs"]
        }
        #[cfg(feature = "mysql")]
        Dialect::MySql => &["prefix", "pool", "create"],
    };
    let known: Vec<&str> = ours.iter().chain(theirs_of(dialect)).copied().collect();
    let what = match is_word(key) {
        true => format!("unknown URL parameter {key:?} for {scheme}:"),
        false => format!("unknown URL parameter for {scheme}:"),
    };
    let hint = match did_you_mean(key, known.iter().copied()) {
        Some(meant) => format!("did you mean {meant:?}? (known parameters: {})", known.join(", ")),
        None => format!("known parameters: {}", known.join(", ")),
    };
    Error::new(ErrorKind::Config, what).with_hint(hint)
}

/// Returns a parameter's value for an error message. A value that may be a pasted URL with a
/// password is hidden.
fn shown(value: &str) -> String {
    match value.contains([':', '@', '/']) {
        true => "…".to_owned(),
        false => format!("{:?}", value.chars().take(60).collect::<String>()),
    }
}

/// Returns the text if it consists only of lower-case letters, digits and `_`. Such identifiers are
/// written into SQL unchanged.
fn identifier(what: &str, text: &str) -> Result<String> {
    let first = text.chars().next().is_some_and(|c| c.is_ascii_lowercase() || c == '_');
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if !first || text.len() > 40 || !text.chars().all(plain) {
        let what = format!("invalid value {} for {what}", shown(text));
        let hint = "begin with a lower-case letter; use lower-case letters, digits and _, at most \
                    40 characters";
        return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
    }
    Ok(text.to_owned())
}

#[allow(clippy::match_like_matches_macro, reason = "depends on the features")]
pub(super) fn is_file(dialect: Dialect) -> bool {
    match dialect {
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => true,
        #[cfg(any(feature = "postgres", feature = "mysql"))]
        _ => false,
    }
}

#[cfg(all(test, feature = "postgres", feature = "sqlite"))]
mod tests {
    use super::*;

    #[test]
    fn own_parameters_are_removed_and_driver_parameters_kept() {
        let url = "postgres://u:p@h/d?sslmode=require&prefix=a_&schema=locks&pool=7&options[a]=y";
        let parsed = SqlUrl::parse(url).unwrap();
        assert_eq!(parsed.driver, "postgres://u:p@h/d?sslmode=require&options[a]=y");
        assert_eq!(parsed.table("claims"), "locks.a_claims");
        assert_eq!(parsed.pool, 7);
    }

    #[test]
    fn several_hosts_are_kept_and_the_driver_gets_the_first() {
        let url = "postgres://u:p,w@h1:1,h2,[::1]:3/d?target_session_attrs=read-write&pool=2";
        let parsed = SqlUrl::parse(url).unwrap();
        assert_eq!(parsed.driver, "postgres://u:p,w@h1:1/d");
        let hosts: Vec<String> = parsed.hosts.iter().map(Host::to_string).collect();
        assert_eq!(hosts, ["h1:1", "h2:5432", "[::1]:3"]);
        assert!(SqlUrl::parse("postgres://u:p,w@h/d").unwrap().hosts.is_empty());
        assert!(SqlUrl::parse("postgres://h/d?target_session_attrs=primary").is_ok());
        for (bad, hint) in [
            ("postgres://h1,h2/d?target_session_attrs=any", "use read-write"),
            ("postgres:///d?host=h1,h2", "postgres://user@host1,host2/database"),
            ("postgres://h1,h2,h1:5432/d", "h1:5432 is listed twice"),
            ("postgres://h1,,h2/d", "invalid host"),
            #[cfg(feature = "mysql")]
            ("mysql://u:secret@h1,h2/d", "a URL of mysql: with several hosts"),
        ] {
            let error = SqlUrl::parse(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            let shown = format!("{error:#}");
            assert!(shown.contains(hint) && !shown.contains("secret"), "{shown}");
        }
    }

    #[test]
    fn password_file_is_not_passed_to_the_driver() {
        for (url, driver, password) in [
            ("postgres://u:p%40@h/d?password_file=/f&pool=2", "postgres://u:p%40@h/d", "p@"),
            ("postgres:///d?password_file=/f&password=p", "postgres:///d?password=p", "p"),
            ("postgres://u@h/d?password_file=/f", "postgres://u@h/d", ""),
        ] {
            let parsed = SqlUrl::parse(url).unwrap();
            assert_eq!(parsed.driver, driver);
            assert!(parsed.can_change_password());
            // The file does not exist, so the password in the URL is used.
            assert_eq!(parsed.password.unwrap().now(), password, "{url}");
        }
        assert!(SqlUrl::parse("postgres://u:p@h/d").unwrap().password.is_none());
    }

    // F34
    #[test]
    fn misspelled_parameter_is_refused() {
        let mut wrong = vec![
            ("postgres://h/d?prefx=a_", "prefx"),
            ("postgres://h/d?sslmod=verify-full", "sslmod"),
            ("postgres://h/d?synchronous=full", "synchronous"),
            ("sqlite:/a.db?prefx=a_", "prefx"),
        ];
        #[cfg(feature = "mysql")]
        wrong.extend([
            ("mysql://h/d?prefx=a_", "prefx"),
            ("mysql://h/d?sslmod=VERIFY_CA", "sslmod"),
            ("mysql://h/d?schema=x", "schema"),
            ("mariadb://h/d?pooler=transaction", "pooler"),
        ]);
        for (url, key) in wrong {
            let error = SqlUrl::parse(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{url}");
            let message = format!("{error:#}");
            assert!(
                message.contains(&format!("{key:?}")) && message.contains("prefix"),
                "{message}"
            );
        }
        // The text after an unencoded `?` is a part of a password.
        let message = format!("{:#}", SqlUrl::parse("postgres://u:p?se%cret@h/d").unwrap_err());
        assert!(!message.contains("cret"), "{message}");
    }

    // F76
    #[test]
    fn urls_that_require_tls_are_recognized() {
        let demands = [
            ("sslmode", "require"),
            ("ssl-mode", "VERIFY_CA"),
            ("sslrootcert", "/x"),
            ("ssl-key", "/x"),
        ];
        assert!(demands.iter().all(|(key, value)| wants_tls(key, value)));
        let others =
            [("sslmode", "prefer"), ("ssl-mode", "DISABLED"), ("user", "ssl"), ("pool", "1")];
        assert!(!others.iter().any(|(key, value)| wants_tls(key, value)));
    }

    // S90
    #[test]
    fn identifiers_are_never_sql() {
        for bad in ["", "a;drop table x", "a\"b", "A", "1a", "a.b", &"a".repeat(41)] {
            for key in ["prefix", "schema"] {
                let error = SqlUrl::parse(&format!("postgres://h/d?{key}={bad}")).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            }
        }
        for bad in ["sqlite:", "sqlite::memory:", "sqlite://", "sqlite:a.db", "sqlite://a/b.db"] {
            assert!(SqlUrl::parse(bad).unwrap().path().is_err(), "{bad}");
        }
        assert_eq!(SqlUrl::parse("sqlite:///a/b.db?pool=1").unwrap().path().unwrap(), "/a/b.db");
        assert!(SqlUrl::parse("sqlite:/a?mode=ro").is_err());
        for pasted in ["pool=3mysql://u:secret@h/d", "prefix=xmysql://u:secret@h/d"] {
            let error = format!("{:#}", SqlUrl::parse(&format!("sqlite:/a?{pasted}")).unwrap_err());
            assert!(!error.contains("secret") && error.contains("…"), "{error}");
        }
        assert!(SqlUrl::parse("postgres:u:p@h").is_err());
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_url_is_parsed_or_refused_in_one_line(url in testbed::texts(&[
            "postgres://u:sekret@h:5432,h2/d?target_session_attrs=primary&sslmode=require&prefix=a_&schema=s&pool=7&pooler=none&options[x]=y", "mysql://u:sekret@h/d?prefix=x&pool=3", "sqlite:///a/b.db?synchronous=off&pool=1"
        ])) {
            if let Err(error) = SqlUrl::parse(&url).and_then(|url| if is_file(url.dialect) { url.path().map(drop) } else { Ok(()) }) {
                let message = format!("{error:#}");
                proptest::prop_assert_eq!(message.lines().count(), 1);
                // `sekret` is the password only if it is still before the @.
                let secret = url.contains(":sekret@") && url.matches("sekret").count() == 1;
                proptest::prop_assert!(!secret || !message.contains("sekret"), "{}", message);
            }
        }
    }
}
