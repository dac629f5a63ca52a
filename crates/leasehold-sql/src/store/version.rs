//! Refuses servers that this store does not support. They are refused when a client connects,
//! because a lock would otherwise fail later.
//! - *Old servers* lack syntax that this store's statements need (`SKIP LOCKED`, `JSON_TABLE`), or
//!   were never tested. A version that cannot be parsed is accepted, and the statements themselves
//!   decide.
//! - *Other products* speak the protocol of PostgreSQL or MySQL. They lack statements or
//!   notifications, or each of their nodes has a clock of its own.

#[cfg(any(feature = "postgres", feature = "mysql"))]
use leasehold_core::{Error, ErrorKind};

/// Returns the oldest supported PostgreSQL, if `server_version_num` belongs to an older one.
#[cfg(feature = "postgres")]
pub(super) fn postgres_too_old(number: &str) -> Option<&'static str> {
    number.parse().is_ok_and(|number: u32| number < 120_000).then_some("PostgreSQL 12")
}

/// Returns the oldest supported MySQL or MariaDB, if `VERSION()` belongs to an older one.
#[cfg(feature = "mysql")]
pub(super) fn mysql_too_old(version: &str) -> Option<&'static str> {
    let is_maria = is_mariadb(version);
    let mut numbers = version.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(u32::MAX), numbers.next().unwrap_or(0));
    let (least, named) = if is_maria { ((10, 6), "MariaDB 10.6") } else { ((8, 0), "MySQL 8.0") };
    (version < least).then_some(named)
}

/// Returns whether this `VERSION()` belongs to MariaDB.
#[cfg(feature = "mysql")]
pub(super) fn is_mariadb(version: &str) -> bool {
    version.to_ascii_lowercase().contains("mariadb")
}

/// Other products, each with a word that its reported version contains.
#[cfg(any(feature = "postgres", feature = "mysql"))]
const OTHER_PRODUCTS: [(&str, &str); 7] = [
    ("cockroachdb", "CockroachDB"),
    ("-yb-", "YugabyteDB"),
    ("tidb", "TiDB"),
    ("vitess", "Vitess"),
    ("planetscale", "PlanetScale"),
    ("singlestore", "SingleStore"),
    ("memsql", "SingleStore"),
];

/// Returns the error for another product that speaks the protocol of `wanted`, if `version` names
/// one of them.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) fn other_product(version: &str, wanted: &str) -> Option<Error> {
    let lower = version.to_ascii_lowercase();
    let (_, product) = OTHER_PRODUCTS.iter().find(|(word, _)| lower.contains(word))?;
    let what = format!(
        "the server is {product} (its version is {:?}), which this store does not support",
        shown(version)
    );
    let hint = format!("use {wanted} itself, or a store of another kind, such as etcd: or redis:");
    Some(Error::new(ErrorKind::Config, what).with_hint(hint))
}

#[cfg(any(feature = "postgres", feature = "mysql"))]
fn shown(version: &str) -> String {
    version.chars().filter(|c| !c.is_control()).take(60).collect()
}

/// Returns the error for a server that is too old.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) fn refused(least: &str, found: &str) -> Error {
    let what = format!("the server version {} is too old", shown(found));
    Error::new(ErrorKind::Config, what).with_hint(format!("upgrade to {least} or later"))
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
            ("8.0.36", None),
            ("9.1.0", None),
            ("10.3.39-MariaDB", Some("MariaDB 10.6")),
            ("10.5.23-MariaDB-log", Some("MariaDB 10.6")),
            ("10.6.18-MariaDB", None),
            ("11.4.2-MariaDB-ubu2404", None),
            ("unknown", None),
        ] {
            assert_eq!(mysql_too_old(found), least, "{found}");
        }
        let error = refused("MySQL 8.0", "5.7.44-log");
        assert_eq!(error.kind(), ErrorKind::Config);
        let shown = format!("{error:#}");
        assert!(shown.contains("version 5.7.44-log is too old"), "{shown}");
        assert_eq!(error.hint(), Some("upgrade to MySQL 8.0 or later"));
        assert_eq!(shown.lines().count(), 1);
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn wrong_postgres_version_is_refused() {
        for (found, least) in
            [("110022", Some("PostgreSQL 12")), ("120000", None), ("150006", None), ("?", None)]
        {
            assert_eq!(postgres_too_old(found), least, "{found}");
        }
        assert!(refused("PostgreSQL 12", "11.22").to_string().contains("version 11.22 is too old"));
    }

    #[cfg(any(feature = "postgres", feature = "mysql"))]
    #[test]
    fn other_database_products_are_refused_by_name() {
        for (version, product) in [
            (
                "CockroachDB CCL v24.3.5 (x86_64-pc-linux-gnu, built 2025/02/03 17:28:15, go1.22.8)",
                "CockroachDB",
            ),
            (
                "PostgreSQL 11.2-YB-2.6.1.0-b0 on x86_64-pc-linux-gnu, compiled by gcc (Homebrew gcc \
                 5.5.0_4) 5.5.0, 64-bit",
                "YugabyteDB",
            ),
            ("PostgreSQL 15.12-YB-2025.2.6.0-b0 on x86_64-pc-linux-gnu", "YugabyteDB"),
            ("5.7.25-TiDB-v6.1.0", "TiDB"),
            ("8.0.11-TiDB-v7.5.1 TiDB Server (Apache License 2.0) Community Edition", "TiDB"),
            ("8.0.11-TiDB-v8.5.3-serverless", "TiDB"),
            ("8.0.30-Vitess", "Vitess"),
            ("8.0.23-PlanetScale", "PlanetScale"),
            (
                "5.7.32 SingleStoreDB source distribution (compatible; MySQL Enterprise & MySQL \
                 Commercial)",
                "SingleStore",
            ),
            ("5.5.8 MemSQL source distribution (compatible; MySQL Enterprise)", "SingleStore"),
        ] {
            let error = other_product(version, "MySQL").expect(version);
            assert_eq!(error.kind(), ErrorKind::Config, "{version}");
            let shown = format!("{error:#}");
            assert!(shown.contains(&format!("the server is {product} (")), "{shown}");
            assert!(shown.contains(&version[..version.len().min(18)]), "{shown}");
            assert!(error.hint().is_some_and(|hint| hint.contains("use MySQL itself")), "{shown}");
            assert_eq!(shown.lines().count(), 1);
        }
        for version in [
            "PostgreSQL 15.14 (Debian 15.14-0+deb12u1) on x86_64-pc-linux-gnu, compiled by gcc \
             (Debian 12.2.0-14+deb12u1) 12.2.0, 64-bit",
            "PostgreSQL 15.2 (EnterpriseDB Advanced Server 15.2.0) on x86_64-pc-linux-gnu",
            "8.0.36-28 Percona Server (GPL), Release 28, Revision 47601f19",
            "8.0.35 MySQL Community Server - GPL",
            "10.11.6-MariaDB-0+deb12u1 Debian 12",
            "",
        ] {
            assert!(other_product(version, "MySQL").is_none(), "{version}");
        }
    }
}
