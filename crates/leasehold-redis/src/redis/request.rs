//! One request to the server of its slot, with its retry limit and retryable errors.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, RedisError};
use tokio::runtime::Handle;

use super::connection::Script;
use super::fault::{self, Refusal};

/// Maximum attempts to send a request.
pub(super) const TRIES: u32 = 4;

/// One call of a script on keys of one slot.
pub(super) struct Request {
    pub(super) slot: u16,
    pub(super) script: Arc<Script>,
    pub(super) call: Cmd,
    /// Whether the keys can also be requested one by one. If so, the request does not wait while
    /// the slot is being moved, because that may take longer than a lease.
    pub(super) divisible: bool,
    /// Whether the request must not be sent again if it may have been executed.
    pub(super) once: bool,
}

impl Request {
    /// Returns whether the request may be sent again. `in_doubt` states whether it may have been
    /// executed.
    pub(super) fn is_repeatable(&self, in_doubt: bool) -> bool {
        !(self.once && in_doubt)
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").field("slot", &self.slot).finish_non_exhaustive()
    }
}

/// Returns the error to report after the last attempt has failed.
pub(super) fn given_up(last: Option<RedisError>) -> RedisError {
    last.unwrap_or_else(|| {
        std::io::Error::new(std::io::ErrorKind::NotConnected, "no server is available").into()
    })
}

/// Sleeps on the timer of the client's own runtime.
pub(super) async fn sleep(runtime: &Handle, d: Duration) {
    let sleeping = {
        let _context = runtime.enter();
        tokio::time::sleep(d)
    };
    sleeping.await;
}

/// Returns whether a server other than the one that failed may be the master.
pub(super) fn is_elsewhere(error: &RedisError) -> bool {
    fault::is_gone(error)
        || matches!(fault::refusal(error), Some(Refusal::ReadOnly | Refusal::ClusterDown))
}
