//! Which servers are too old: they lack words that the statements of this store need (`SKIP LOCKED`,
//! `JSON_TABLE`), or nobody has tested them. They are refused when a client connects, or a lock would
//! fail in its middle. A version that cannot be read is let pass: the statements themselves decide.

#[cfg(any(feature = "postgres", feature = "mysql"))]
use leasehold_core::{Error, ErrorKind};

/// The oldest PostgreSQL, if `server_version_num` tells of an older one.
#[cfg(feature = "postgres")]
pub(super) fn postgres_too_old(number: &str) -> Option<&'static str> {
    number.parse().is_ok_and(|number: u32| number < 120_000).then_some("PostgreSQL 12")
}

/// The oldest MySQL or MariaDB, if `VERSION()` tells of an older one.
#[cfg(feature = "mysql")]
pub(super) fn mysql_too_old(version: &str) -> Option<&'static str> {
    let is_maria = is_mariadb(version);
    let mut numbers = version.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(u32::MAX), numbers.next().unwrap_or(0));
    let (least, named) = if is_maria { ((10, 6), "MariaDB 10.6") } else { ((8, 0), "MySQL 8.0") };
    (version < least).then_some(named)
}

/// Whether it is MariaDB that tells this `VERSION()`.
#[cfg(feature = "mysql")]
pub(super) fn is_mariadb(version: &str) -> bool {
    version.to_ascii_lowercase().contains("mariadb")
}

/// What who connects to such a server is told.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) fn refused(least: &str, found: &str) -> Error {
    let found: String = found.chars().filter(|c| !c.is_control()).take(60).collect();
    let what = format!("leasehold needs {least} or later, this is {found}: upgrade the server");
    Error::new(ErrorKind::Config, what)
}

#[cfg(test)]
mod tests {
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    use super::*;

    #[cfg(feature = "mysql")]
    #[test]
    fn wrong_server_version_is_refused_with_the_fix() {
        for (found, least) in [
            ("5.7.44-log", Some("MySQL 8.0")),
            ("5.7.25-TiDB-v6.1.0", Some("MySQL 8.0")),
            ("8.0.36", None),
            ("9.1.0", None),
            ("10.3.39-MariaDB", Some("MariaDB 10.6")),
            ("10.5.23-MariaDB-log", Some("MariaDB 10.6")),
            ("10.6.18-MariaDB", None),
            ("11.4.2-MariaDB-ubu2404", None),
            ("who knows", None),
        ] {
            assert_eq!(mysql_too_old(found), least, "{found}");
        }
        let error = refused("MySQL 8.0", "5.7.44-log");
        assert_eq!(error.kind(), ErrorKind::Config);
        let told = format!("{error:#}");
        assert!(told.contains("needs MySQL 8.0 or later, this is 5.7.44-log: upgrade"), "{told}");
        assert_eq!(told.lines().count(), 1);
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn wrong_postgres_version_is_refused() {
        for (found, least) in
            [("110022", Some("PostgreSQL 12")), ("120000", None), ("150006", None), ("?", None)]
        {
            assert_eq!(postgres_too_old(found), least, "{found}");
        }
        assert!(refused("PostgreSQL 12", "11.22").to_string().contains("this is 11.22"));
    }
}
