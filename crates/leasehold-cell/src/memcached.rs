//! `memcached://host:11211` or `memcached://a,b,c`: servers that anybody may have for public memory, and that
//! forget.
//!
//! - *What is atomic*: the meta commands `ms` with the number that `mg` told (compare and set), or with the
//!   mode that only adds.
//! - *Whose clock*: the server's own, which nobody can set; it counts whole seconds, so that a session may
//!   end up to one earlier, and one more is left for a clock that ticks late.
//! - *What is forgotten*: all, by a restart or `flush_all`, which is noticed (`epoch.rs`); and any value, when
//!   the memory is full, which is not. Then the queue is gone whose value it was: two may hold. That is
//!   what the store says of itself, and what `doctor` looks for. Where nothing is thrown away to make room
//!   (`-M`), a write is refused instead, and its value is gone as well: who is refused ends the epoch.
//! - *Numbers of values* begin anew with the server: each is good on the connection that it was read on.
//! - *Several servers* share out the names, and know nothing of each other (`servers.rs`).
//! - *Tokens* go on where they were while the value is kept. Without it they begin at the clock, this
//!   machine's, held to the server's to a few seconds.

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
