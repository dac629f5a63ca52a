//! **Broken on purpose: do not copy.** Handmade locks on Redis.

use crate::ours::NAME;
use crate::trouble::{Result, Trouble};
use crate::wire::{Exchange, Wire};

/// The usual script: it deletes the key if the key contains the client's value.
const RELEASE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

/// Runs `SET … NX PX`. It is correct on one server, but does not protect what the lock is for.
pub(crate) async fn take(wire: &mut Wire, me: &str, lease: &str) -> Result<Exchange> {
    wire.say(&["SET", NAME, me, "NX", "PX", lease]).await
}

/// Runs `SET … NX PX` repeatedly, until the lock is taken.
pub(crate) async fn take_at_last(wire: &mut Wire, me: &str, lease: &str) -> Result<Exchange> {
    wire.say_until(&["SET", NAME, me, "NX", "PX", lease], "OK").await
}

/// Deletes the key if it contains the client's value. This part of the recipe is correct.
pub(crate) async fn release(wire: &mut Wire, me: &str) -> Result<Exchange> {
    wire.call(&["EVAL", RELEASE, "1", NAME, me], format!("script: DEL if the value is {me}")).await
}

/// Deletes the key without checking whose lock it is.
pub(crate) async fn delete(wire: &mut Wire) -> Result<Exchange> {
    wire.say(&["DEL", NAME]).await
}

/// Runs `SETNX`, which needs an `EXPIRE` afterwards that may never be sent.
pub(crate) async fn set_if_free(wire: &mut Wire, me: &str) -> Result<Exchange> {
    wire.say(&["SETNX", NAME, me]).await
}

/// A lock whose value is the time at which it ends, by the clock of the client that took it.
pub(crate) struct Timed {
    /// This client's clock, in seconds.
    pub(crate) clock: i64,
    /// Lease in seconds.
    pub(crate) lease: i64,
}

impl Timed {
    /// Returns the time at which a lock that is taken now ends.
    pub(crate) fn end(&self) -> String {
        (self.clock + self.lease).to_string()
    }

    /// Takes the lock if it was never taken. This is the first step of the recipe.
    pub(crate) async fn set_if_free(&self, wire: &mut Wire) -> Result<Exchange> {
        wire.say(&["SETNX", NAME, &self.end()]).await
    }

    /// Returns whether the time in the reply `read` has passed, by this client's clock.
    pub(crate) fn is_over(&self, read: &Exchange) -> Result<bool> {
        let end: i64 =
            read.answer.parse().map_err(|_| Trouble::new(format!("{read}: not a time")))?;
        Ok(end < self.clock)
    }

    /// Stores the end of this client's lease, whatever the key contains. This is the last step of
    /// the recipe.
    pub(crate) async fn get_and_set(&self, wire: &mut Wire) -> Result<Exchange> {
        wire.say(&["GETSET", NAME, &self.end()]).await
    }
}
