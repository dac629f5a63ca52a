//! The URL of a SQL store: what of it is ours, and what the driver gets.

use leasehold_core::kit::did_you_mean;
use leasehold_core::{Error, ErrorKind, Result};

use super::callers::CallersPool;

/// What URLs of this build begin with.
const KNOWN: &[&str] = &[
    #[cfg(feature = "sqlite")]
    "sqlite:",
    #[cfg(feature = "postgres")]
    "postgres:",
    #[cfg(feature = "mysql")]
    "mysql:",
];

/// Which database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    #[cfg(feature = "sqlite")]
    Sqlite,
    #[cfg(feature = "postgres")]
    Postgres,
    #[cfg(feature = "mysql")]
    MySql,
}

/// A URL, taken apart.
#[derive(Clone, Debug)]
pub(super) struct SqlUrl {
    pub(super) dialect: Dialect,
    /// For the driver: without the parameters that are ours.
    pub(super) driver: String,
    /// The tables' names begin with this.
    pub(super) prefix: String,
    /// The database schema that the tables are in (PostgreSQL), as it is written in SQL.
    pub(super) schema: Option<String>,
    /// The most connections.
    pub(super) pool: usize,
    /// SQLite: how durable a commit is.
    pub(super) synchronous: Synchronous,
    /// PostgreSQL: a pooler that hands a connection to another client after each transaction is in
    /// front.
    pub(super) pooler: bool,
    /// The pool that its caller has: the driver's options are that one's.
    pub(super) callers: Option<CallersPool>,
}

/// SQLite's setting of that name.
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
                // What is no word may be a part of a password.
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
                format!("write it as {scheme}://user:password@host/database"),
            );
        }
        let (base, query) = url.split_once('?').map_or((url, ""), |(b, q)| (b, q));
        let mut parsed = Self {
            dialect,
            driver: String::new(),
            prefix: "leasehold_".into(),
            schema: None,
            pool: DEFAULT_POOL,
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
                // A part of PostgreSQL's `options`, with the setting's name in it.
                _ if scheme.starts_with("postgres") && key.starts_with("options[") => {
                    theirs.push(pair);
                }
                _ => return Err(unknown(scheme, dialect, key)),
            }
        }
        let query = theirs.join("&");
        parsed.driver = if query.is_empty() { base.to_owned() } else { format!("{base}?{query}") };
        Ok(parsed)
    }

    /// SQLite: the path of the database file.
    pub(super) fn path(&self) -> Result<&str> {
        let rest = self.driver.split_once(':').map_or("", |(_, rest)| rest);
        let path = rest.strip_prefix("//").unwrap_or(rest);
        if path.is_empty() || path.contains(":memory:") {
            let what = match path.is_empty() {
                true => "the URL names no database file",
                false => "an in-memory SQLite database cannot store locks",
            };
            let hint = "write it as sqlite:/var/lib/app/locks.db, or use memory: for one process";
            return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
        }
        Ok(path)
    }

    /// A table's name as it is written in SQL.
    pub(super) fn table(&self, name: &str) -> String {
        let table = format!("{}{name}", self.prefix);
        match &self.schema {
            Some(schema) => format!("{schema}.{table}"),
            None => table,
        }
    }
}

/// The parameters of which the driver knows something. It passes over all others with no more than a
/// line in a log: a prefix or a TLS mode that is misspelt would be none.
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

/// Whether a parameter of the driver's asks for more than that TLS may be used.
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

/// The error for an unknown parameter. A key that is not a word may be part of a password.
fn unknown(scheme: &str, dialect: Dialect, key: &str) -> Error {
    let ours: &[&str] = match dialect {
        #[cfg(feature = "sqlite")]
        Dialect::Sqlite => &["prefix", "pool", "synchronous"],
        #[cfg(feature = "postgres")]
        Dialect::Postgres => &["prefix", "schema", "pool", "pooler"],
        #[cfg(feature = "mysql")]
        Dialect::MySql => &["prefix", "pool"],
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

/// A parameter's value for an error message. What may be a pasted URL with a password is hidden.
fn shown(value: &str) -> String {
    match value.contains([':', '@', '/']) {
        true => "…".to_owned(),
        false => format!("{:?}", value.chars().take(60).collect::<String>()),
    }
}

/// Lower-case letters, digits and `_` only: these are written into SQL as they are.
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
        _ => false,
    }
}

#[cfg(all(test, feature = "postgres", feature = "sqlite"))]
mod tests {
    use super::*;

    #[test]
    fn our_parameters_are_taken_out_and_theirs_left() {
        let url = "postgres://u:p@h/d?sslmode=require&prefix=a_&schema=locks&pool=7&options[a]=y";
        let parsed = SqlUrl::parse(url).unwrap();
        assert_eq!(parsed.driver, "postgres://u:p@h/d?sslmode=require&options[a]=y");
        assert_eq!(parsed.table("claims"), "locks.a_claims");
        assert_eq!(parsed.pool, 7);
    }

    #[test]
    fn f34_a_parameter_that_is_misspelt_is_refused() {
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
            let told = format!("{error:#}");
            assert!(told.contains(&format!("{key:?}")) && told.contains("prefix"), "{told}");
        }
        // What follows a ? that nobody encoded is a password.
        let told = format!("{:#}", SqlUrl::parse("postgres://u:p?se%cret@h/d").unwrap_err());
        assert!(!told.contains("cret"), "{told}");
    }

    #[test]
    fn f76_who_demands_tls_is_known() {
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

    #[test]
    fn s90_identifiers_are_never_sql() {
        for bad in ["", "a;drop table x", "a\"b", "A", "1a", "a.b", &"a".repeat(41)] {
            for key in ["prefix", "schema"] {
                let error = SqlUrl::parse(&format!("postgres://h/d?{key}={bad}")).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            }
        }
        for bad in ["sqlite:", "sqlite::memory:", "sqlite://"] {
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
        fn a_url_from_outside_is_taken_or_refused_in_one_line(url in testbed::texts(&[
            "postgres://u:sekret@h:5432/d?sslmode=require&prefix=a_&schema=s&pool=7&pooler=none&options[x]=y", "mysql://u:sekret@h/d?prefix=x&pool=3", "sqlite:///a/b.db?synchronous=off&pool=1"
        ])) {
            if let Err(error) = SqlUrl::parse(&url).and_then(|url| if is_file(url.dialect) { url.path().map(drop) } else { Ok(()) }) {
                let told = format!("{error:#}");
                proptest::prop_assert_eq!(told.lines().count(), 1);
                // Only where it still stands before the @ is it the password.
                let secret = url.contains(":sekret@") && url.matches("sekret").count() == 1;
                proptest::prop_assert!(!secret || !told.contains("sekret"), "{}", told);
            }
        }
    }
}
