//! `memcached://host:11211` or `memcached://a,b,c`: locks on memcached servers, which have no
//! access control in most cases and may lose data.
//!
//! - *Atomicity.* The meta command `ms` is atomic if it contains the CAS number that `mg` returned,
//!   or uses the mode that only adds.
//! - *Clock.* The server's own clock decides, and cannot be set. It counts whole seconds, so a
//!   session may expire up to one second early. Another second is reserved for a clock that ticks
//!   late.
//! - *Loss of data.* A restart or `flush_all` loses all data, which clients detect (`epoch.rs`). A
//!   server whose memory is full may evict any value, which clients do not detect. The evicted
//!   queue's lock may then have two holders. The guarantees state this, and `doctor` checks for it.
//! - *Without eviction* (`-M`) the server refuses a write instead, and the key's old value is lost
//!   too. The client that was refused ends the epoch.
//! - *CAS numbers* start again when the server restarts. Each is valid only on the connection that
//!   returned it.
//! - *Several servers* share the lock names, and do not know of each other (`servers.rs`).
//! - *Tokens* continue while the value is kept. Otherwise they restart at the time of this
//!   machine's clock, but at most a few seconds away from the server's.

mod doctor;
mod fault;
pub mod fence;
mod link;
mod server;
mod servers;
mod url;
mod wire;

use std::sync::Arc;

use leasehold_core::store::Store;
use leasehold_core::{Error, ErrorKind, Opening, Result};
use tokio::runtime::Handle;

use self::server::connected;
use self::servers::Servers;
use self::url::MemcachedUrl;
use crate::store::CellStore;

/// Opens the store of a URL, for a [`Registry`](leasehold_core::Registry).
pub fn open(url: String, runtime: Handle) -> Opening {
    Box::pin(async move {
        match <[_; 1]>::try_from(MemcachedUrl::parse(&url)?) {
            Ok([server]) => {
                Ok(Arc::new(connected(server, &url, &runtime).await?) as Arc<dyn Store>)
            }
            Err(servers) => Ok(Arc::new(Servers::connect(servers, &url, runtime).await?) as _),
        }
    })
}

/// Opens the store of a URL that names one server; [`open`] accepts several. Its connection and
/// tasks run on `runtime`. Four round trips.
///
/// # Cancel safety
/// Cancel safe: dropping the future changes nothing.
///
/// # Errors
/// - [`ErrorKind::Config`]: the URL is invalid, or the server cannot store locks.
/// - [`ErrorKind::Denied`]: the server rejected the user name or the password.
/// - [`ErrorKind::Unreachable`]: no response within 3 s.
pub async fn connect(url: &str, runtime: &Handle) -> Result<CellStore> {
    match <[_; 1]>::try_from(MemcachedUrl::parse(url)?) {
        Ok([server]) => connected(server, url, runtime).await,
        Err(_) => {
            let what = "the URL names several memcached servers";
            let hint = "call memcached::open, or name one server";
            Err(Error::new(ErrorKind::Config, what).with_hint(hint))
        }
    }
}
