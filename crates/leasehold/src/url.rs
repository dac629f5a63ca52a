//! Store URLs: which store a scheme names, and how a URL is shown without its credentials.

use std::sync::Arc;

use crate::background::Background;
use crate::error::{Error, ErrorKind, Result};
use crate::store::Store;
#[cfg(feature = "file")]
use crate::store::file::FileStore;
use crate::store::memory::MemoryStore;

/// The schemes of the stores in this build.
pub const BUILT_IN: &[&str] = &[
    "memory",
    #[cfg(feature = "file")]
    "file",
    #[cfg(feature = "sqlite")]
    "sqlite",
    #[cfg(feature = "postgres")]
    "postgres",
    #[cfg(feature = "mysql")]
    "mysql",
    #[cfg(feature = "redis")]
    "redis",
    #[cfg(feature = "redlock")]
    "redlock",
];

/// The URL without user, password and query values; safe to print.
pub(crate) fn redacted(url: &str) -> String {
    let shown: String = url.chars().filter(|c| !c.is_control()).take(200).collect();
    let Some((scheme, rest)) = shown.split_once("://") else {
        // Mistyped, it may have a password all the same.
        return match shown.rsplit_once('@') {
            Some((before, after)) if !before.starts_with("file:") => format!("***@{after}"),
            _ => shown,
        };
    };
    let (rest, query) = rest.split_once('?').map_or((rest, ""), |(r, q)| (r, q));
    // The last @ of the authority: a password may hold an @ or a / that nobody encoded.
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    let hidden = if host.len() < rest.len() { "***@" } else { "" };
    let keys: Vec<String> = query
        .split('&')
        .filter_map(|pair| pair.split('=').next().filter(|key| !key.is_empty()))
        .map(|key| format!("{key}=…"))
        .collect();
    let query = if keys.is_empty() { String::new() } else { format!("?{}", keys.join("&")) };
    format!("{scheme}://{hidden}{host}{query}")
}

/// Opens the store that `url` names.
pub(crate) async fn open(url: &str, background: &Background) -> Result<Arc<dyn Store>> {
    let refused =
        |kind, what: String| Err(Error::new(kind, what).during("connect").at(&redacted(url)));
    let Some((scheme, _)) = url.split_once(':') else {
        let what = "a store is named by a URL, such as file: or memory:".to_owned();
        return refused(ErrorKind::Config, what);
    };
    let opened: Result<Arc<dyn Store>> = match scheme {
        "memory" => MemoryStore::connect(url).map(|store| store as Arc<dyn Store>),
        #[cfg(feature = "file")]
        "file" => file(url, background).await,
        #[cfg(feature = "sqlite")]
        "sqlite" => sql(url, background).await,
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => sql(url, background).await,
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => sql(url, background).await,
        #[cfg(feature = "redis")]
        _ if is_redis(scheme) => {
            let opened = crate::store::redis::RedisStore::open(url, background.handle()).await;
            opened.map(|store| store as Arc<dyn Store>)
        }
        #[cfg(feature = "redlock")]
        "redlock" | "redlocks" => redlock(url, background).await,
        #[allow(unreachable_patterns, reason = "those of them that this build has are above")]
        known @ ("file" | "sqlite" | "postgres" | "postgresql" | "mysql" | "mariadb"
        | "redlock" | "redlocks") => {
            let _ = background;
            let feature = match known {
                "postgresql" => "postgres",
                "mariadb" => "mysql",
                "redlocks" => "redlock",
                other => other,
            };
            let what = format!("this build leaves out the feature `{feature}`: enable it");
            return refused(ErrorKind::Unsupported, what);
        }
        _ if is_redis(scheme) => {
            let what = "this build leaves out the feature `redis`: enable it".to_owned();
            return refused(ErrorKind::Unsupported, what);
        }
        _ => {
            let what = format!("no such store: this build has {}", BUILT_IN.join(": and ") + ":");
            return refused(ErrorKind::Config, what);
        }
    };
    opened.map_err(|e| e.during("connect").at(&redacted(url)))
}

/// `redis`, `rediss` and their other names, alone or with a deployment after a `+`.
fn is_redis(scheme: &str) -> bool {
    let server = scheme.split_once('+').map_or(scheme, |(server, _)| server);
    matches!(server, "redis" | "rediss" | "valkey" | "valkeys")
}

#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
async fn sql(url: &str, background: &Background) -> Result<Arc<dyn Store>> {
    let opened = crate::store::sql::SqlStore::open(url, background.handle()).await;
    opened.map(|store| store as Arc<dyn Store>)
}

#[cfg(feature = "redlock")]
async fn redlock(url: &str, background: &Background) -> Result<Arc<dyn Store>> {
    let opened = crate::store::redlock::RedlockStore::open(url, background.handle()).await;
    opened.map(|store| store as Arc<dyn Store>)
}

#[cfg(feature = "file")]
async fn file(url: &str, background: &Background) -> Result<Arc<dyn Store>> {
    // Opening may wait for the disk.
    let (url, handle) = (url.to_owned(), background.handle().clone());
    let opened = background.handle().spawn_blocking(move || FileStore::open(&url, &handle)).await;
    match opened {
        Ok(store) => store.map(|store| store as Arc<dyn Store>),
        Err(_) => Err(Error::new(ErrorKind::Closed, "the client was closed while it connected")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s94_credentials_are_never_shown() {
        for (url, shown) in [
            ("redis://user:secret@h:1/0?x=secret&y", "redis://***@h:1/0?x=…&y=…"),
            ("redis://:se@cr/et@h:1", "redis://***@h:1"),
            ("etcd://a,b,c", "etcd://a,b,c"),
            ("file:/tmp/x", "file:/tmp/x"),
            ("postgres:user:secret@h/d", "***@h/d"),
            ("memory:\nforged", "memory:forged"),
        ] {
            assert_eq!(redacted(url), shown);
        }
    }
}
