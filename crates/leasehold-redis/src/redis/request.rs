//! One request to whoever serves its slot: how often it is sent, and what may have gone wrong.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, RedisError};
use tokio::runtime::Handle;

use super::connection::Script;
use super::fault::{self, Refusal};

/// How often a request is sent at most.
pub(super) const TRIES: u32 = 4;

/// One call of a script on keys of one slot.
pub(super) struct Request {
    pub(super) slot: u16,
    pub(super) script: Arc<Script>,
    pub(super) call: Cmd,
    /// Its keys can as well be asked for one by one: then it does not wait for a slot that is half
    /// moved, which may take longer than a lease.
    pub(super) divisible: bool,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").field("slot", &self.slot).finish_non_exhaustive()
    }
}

/// What is told when the tries are used up.
pub(super) fn given_up(last: Option<RedisError>) -> RedisError {
    last.unwrap_or_else(|| {
        std::io::Error::new(std::io::ErrorKind::NotConnected, "no server is available").into()
    })
}

/// Sleeps on our own timer.
pub(super) async fn sleep(runtime: &Handle, d: Duration) {
    let sleeping = {
        let _context = runtime.enter();
        tokio::time::sleep(d)
    };
    sleeping.await;
}

/// Whether another server than the one that was asked may be the master.
pub(super) fn is_elsewhere(error: &RedisError) -> bool {
    fault::is_gone(error)
        || matches!(fault::refusal(error), Some(Refusal::ReadOnly | Refusal::ClusterDown))
}
