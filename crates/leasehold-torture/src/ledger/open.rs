//! Decides by the URL which stores can keep the fenced resource, and opens its lists there.

use super::Ledger;
#[cfg(feature = "etcd")]
use super::etcd;
#[cfg(feature = "redis")]
use super::redis;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
use super::sql;
#[cfg(feature = "zookeeper")]
use super::zookeeper;
use leasehold::{Error, ErrorKind, Result};

/// Checks that the store of this URL can keep the fenced resource.
///
/// # Errors
/// [`ErrorKind::Unsupported`] with the reason.
pub(crate) fn supported(url: &str) -> Result<()> {
    let why = match url.split(':').next().unwrap_or_default() {
        "sqlite" | "postgres" | "postgresql" | "mysql" | "mariadb" | "redis" | "valkey"
        | "etcd" | "zookeeper" => return Ok(()),
        "file" => "file: has no fence, and holds never expire there",
        "redlock" => {
            "redlock: has no single server that sees all writes and can store the highest token"
        }
        "memcached" => "memcached may evict the highest token",
        "nats" | "s3" | "gs" | "az" => "not implemented for this store",
        _ => "not available for this store",
    };
    Err(Error::new(
        ErrorKind::Unsupported,
        format!("--fence store is not supported: {why} (omit the option)"),
    ))
}

/// Opens the lists of `run` in the store of this URL. The parent opens them first, and creates what
/// `make` lists need. A worker creates nothing.
///
/// # Errors
/// The errors of the store.
pub(crate) async fn open(url: &str, run: &str, make: usize) -> Result<Box<dyn Ledger>> {
    match url.split(':').next().unwrap_or_default() {
        #[cfg(feature = "sqlite")]
        "sqlite" => Ok(Box::new(sql::Sqlite::open(url, run, make > 0).await?)),
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => Ok(Box::new(sql::Postgres::open(url, run, make > 0).await?)),
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => Ok(Box::new(sql::MySql::open(url, run, make > 0).await?)),
        #[cfg(feature = "redis")]
        "redis" | "valkey" => Ok(Box::new(redis::Redis::open(url, run).await?)),
        #[cfg(feature = "etcd")]
        "etcd" => Ok(Box::new(etcd::Etcd::open(url, run).await?)),
        #[cfg(feature = "zookeeper")]
        "zookeeper" => Ok(Box::new(zookeeper::ZooKeeper::open(url, run, make).await?)),
        _ => {
            let _ = (run, make);
            supported(url)?;
            Err(Error::new(
                ErrorKind::Unsupported,
                "--fence store is not supported: this build does not include that store",
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_without_a_fence_are_rejected_with_a_reason() {
        for url in ["file:/x", "redlock://a,b,c", "carrier-pigeon:"] {
            let error = supported(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert_eq!(error.to_string().lines().count(), 1);
        }
        assert!(supported("sqlite:/x").is_ok());
    }
}
