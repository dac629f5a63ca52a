//! **Broken on purpose: do not copy.** Locks on Redis, made by hand.

use crate::ours::NAME;
use crate::trouble::{Result, Trouble};
use crate::wire::{Said, Wire};

/// Compare-and-delete, as everybody has it.
const RELEASE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

/// `SET … NX PX`: right on one server, and no protection for what the lock is for.
pub(crate) async fn take(wire: &mut Wire, me: &str, lease: &str) -> Result<Said> {
    wire.say(&["SET", NAME, me, "NX", "PX", lease]).await
}

/// The same again and again, until it is taken.
pub(crate) async fn take_at_last(wire: &mut Wire, me: &str, lease: &str) -> Result<Said> {
    wire.say_until(&["SET", NAME, me, "NX", "PX", lease], "OK").await
}

/// Compares and deletes: of what goes with it, the part that is right.
pub(crate) async fn release(wire: &mut Wire, me: &str) -> Result<Said> {
    wire.call(&["EVAL", RELEASE, "1", NAME, me], format!("script: DEL if the value is {me}")).await
}

/// Deletes, without a look at whose lock it is.
pub(crate) async fn delete(wire: &mut Wire) -> Result<Said> {
    wire.say(&["DEL", NAME]).await
}

/// `SETNX`, to which an `EXPIRE` belongs that may never be sent.
pub(crate) async fn set_if_free(wire: &mut Wire, me: &str) -> Result<Said> {
    wire.say(&["SETNX", NAME, me]).await
}

/// The lock whose value is the time at which it ends, by the clock of whoever took it.
pub(crate) struct Timed {
    /// What this client's clock shows, in seconds.
    pub(crate) clock: i64,
    /// For how long it takes the lock.
    pub(crate) lease: i64,
}

impl Timed {
    /// When the lock ends that is taken now.
    pub(crate) fn end(&self) -> String {
        (self.clock + self.lease).to_string()
    }

    /// The first step: takes it if it was never taken.
    pub(crate) async fn set_if_free(&self, wire: &mut Wire) -> Result<Said> {
        wire.say(&["SETNX", NAME, &self.end()]).await
    }

    /// Whether a time that was read is over, by this client's clock.
    pub(crate) fn is_over(&self, read: &Said) -> Result<bool> {
        let end: i64 =
            read.answer.parse().map_err(|_| Trouble::new(format!("{read}: not a time")))?;
        Ok(end < self.clock)
    }

    /// The last step: puts its own time in, whatever is there.
    pub(crate) async fn get_and_set(&self, wire: &mut Wire) -> Result<Said> {
        wire.say(&["GETSET", NAME, &self.end()]).await
    }
}
