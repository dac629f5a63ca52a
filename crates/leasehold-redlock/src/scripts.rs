//! The atomic steps of a node, in Lua (`scripts/`). Their rules are those of [`round::Node`], and a
//! test compares the two.
//!
//! # The keys
//! - *The main key* is the prefix and the lock's name, byte for byte what every Redlock client
//!   sets. It alone determines the owner of the node's vote. Leasehold's value is the claim's id, a
//!   dot, and the number of the attempt. So a late release of an earlier attempt cannot affect a
//!   later one.
//! - *The record* contains the name's last token, and the holder for status output. The holder in
//!   it is current only if the record's id equals the main key's value. It outlives the lock by
//!   [`MEMORY`], so that a name that is used again does not depend on the tokens of other names
//!   (see below).
//! - *The memory* exists once per node. It contains the highest token stored for any name (`cur`),
//!   and the token that was sent to the node after it had forgotten (`told`). It also contains the
//!   server's run in which this was valid (`run`), and since when another run is known to have
//!   forgotten (`since`, `lapsed`).
//! - *The waiters* are stored by the start of their wait, and by the time until which each counts
//!   as alive.
//!
//! A name without a record has a last token of at most `cur`. So tokens rise even for names that
//! were unused for years, without data for each name, however the server's clock is set. The cost
//! is an occasional second round trip. It happens if a name has no record and another client, whose
//! clock is ahead, has just acquired another name.
//!
//! # The node is reserved for the notified waiter
//! A node that becomes free while claims wait notifies the longest-waiting claim, and *reserves*
//! itself for it. For [`KEPT`] milliseconds the main key belongs to that claim, as if by
//! attempt 0. So the client that has just released cannot acquire the node again before the message
//! arrives. Newcomers and other Redlock clients find the node taken.
//!
//! A claim that *waits* at the node may acquire it nevertheless. Nodes may disagree about the
//! longest-waiting claim, and then no claim would get a majority of the reserved nodes.
//! - *A reservation is not a vote.* No attempt has number 0, so no client counts a reservation,
//!   extends it or holds a lock by it. It has no effect on tokens.
//! - *A notified claim does not come*, because it died, or the message was lost and it polls later.
//!   Newcomers then lose the time of the reservation once. The claim then counts as alive for at
//!   most [`SOON`] milliseconds until it polls. It keeps its place, because it sends how long it
//!   has waited.
//! - *A claim that is released* deletes its reservation, and the next waiter is notified.
//! - *The server has no memory left.* Then nothing is reserved, because the release must not fail
//!   for that reason.
//!
//! # The common case
//! The key is free, the proposal is above all tokens that the node has stored, and no claim waits.
//! This needs eleven commands for an acquisition and its release, and comes first in the scripts
//! (`take_free.lua`, `release_alone.lua`). All other cases have changed nothing at that point, and
//! continue with the general code.
//! - *The record need not be read.* Every stored token also raises `cur`, so a proposal above `cur`
//!   is above every name's last token.
//! - *SET NX* checks and acquires in one command. If it is refused, or memory is full, it has
//!   written nothing.
//! - *The waiters* are checked by reading the first one. If there is none, no claim has to be
//!   removed or notified. A claim that waits later finds the key free.
//! - *A release does not change the record.* The record is valid only while its id is in the main
//!   key, and a released attempt is never repeated.
//!
//! A record may be older than a memory that was lost. The lease of the claim that stored its token
//! has expired since then, because the delay is longer. The restored memory includes every
//! completed token. So this is equivalent to a lost record.
//!
//! A lost reply, a crashed client and a dropped call are handled as in the general case, because it
//! is still one script.
//!
//! # The server's run
//! A restart may lose data, so a vote counts only in the server run in which the memory was kept.
//! Calling `INFO` in every script would show that, but it costs more than all other commands.
//! Instead, the text of the voting script contains the run's id. After a restart the server does
//! not know the script (NOSCRIPT), and the client meets the server again.
//!
//! (Redis 6 may restore the script from a snapshot. It does not expose its version to scripts
//! either, so the script calls `INFO` there.) The script is loaded by a call that compares the id
//! with that of `INFO` in the same atomic step. If they differ, it invalidates the memory.
//!
//! # How long a node that has forgotten does not vote
//! Not only a restarted server has forgotten its data. The same applies to a server that was
//! emptied, a restored copy and a promoted replica, all of which may have been up for a long time.
//! So the first client that meets a run which does not remember stores the current time in the
//! node. The token is restored (`TELL`) only when the delay has passed since then, whichever client
//! does it.
//!
//! The server's own uptime is used instead only if a client is certain that its start was the only
//! reason for the loss (see [`super::token_restore`]).
//!
//! [`round::Node`]: super::round::Node

use redis::Value;

use leasehold_redis::redis::connection::Script;

/// Milliseconds by which the record outlives the lock.
pub(super) const MEMORY: u64 = 120_000;
/// Milliseconds for which a node is reserved for a notified waiter. They suffice for a message and
/// a request over a long distance.
const KEPT: u64 = 200;
/// Additional milliseconds for which a notified waiter counts as alive until it polls.
const SOON: u64 = 1_000;
/// Value that is returned if the lock's key has another type.
pub(super) const NO_LOCK: &str = "no lock";

// Each script begins with its purpose, its KEYS and its ARGV.
const COMMON: &str = include_str!("scripts/common.lua");
const TAKE_FREE: &str = include_str!("scripts/take_free.lua");
const TAKE: &str = include_str!("scripts/take.lua");
const WRITE_BACK: &str = include_str!("scripts/write_back.lua");
const EXTEND: &str = include_str!("scripts/extend.lua");
const HEAL: &str = include_str!("scripts/heal.lua");
const RELEASE_ALONE: &str = include_str!("scripts/release_alone.lua");
const RELEASE: &str = include_str!("scripts/release.lua");
const EVICT: &str = include_str!("scripts/evict.lua");
const READ: &str = include_str!("scripts/read.lua");
const KNOWN: &str = include_str!("scripts/known.lua");
const TELL: &str = include_str!("scripts/tell.lua");

/// Scripts that do not vote.
#[derive(Debug)]
pub(super) struct Scripts {
    pub(super) write_back: Script,
    pub(super) extend: Script,
    pub(super) heal: Script,
    pub(super) release: Script,
    pub(super) evict: Script,
    pub(super) read: Script,
    pub(super) known: Script,
    pub(super) tell: Script,
}

/// Builds a script. Its part `usual` comes before the shared functions, so it cannot use them.
fn script(usual: &str, body: &str, run: &str) -> Script {
    keeping(KEPT, usual, body, run)
}

/// Builds a script like `script`, in which a reservation lasts for `kept` milliseconds.
fn keeping(kept: u64, usual: &str, body: &str, run: &str) -> Script {
    let head = format!(
        "local RUN, MEMORY, NO_LOCK, KEPT, SOON = '{run}', {MEMORY}, '{NO_LOCK}', {kept}, {SOON}\n"
    );
    Script::new(format!("{head}{usual}{COMMON}{body}"))
}

/// Returns the script that votes in this run of a server. The run id is 40 hexadecimal digits.
pub(super) fn take(run: &str) -> Script {
    script(TAKE_FREE, TAKE, run)
}

/// Returns the script like `take`, as a server before Redis 7 runs it.
#[cfg(test)]
pub(super) fn take_of_old(run: &str) -> Script {
    let old = |body: &str| body.replace("redis.REDIS_VERSION_NUM", "redis.NOT_THERE");
    script(&old(TAKE_FREE), &old(TAKE), run)
}

impl Scripts {
    pub(super) fn new() -> Self {
        Self::keeping(KEPT)
    }

    /// Creates the scripts, with reservations of `kept` milliseconds.
    pub(super) fn keeping(kept: u64) -> Self {
        let plain = |body| keeping(kept, "", body, "");
        Self {
            write_back: plain(WRITE_BACK),
            extend: plain(EXTEND),
            heal: plain(HEAL),
            release: keeping(kept, RELEASE_ALONE, RELEASE, ""),
            evict: plain(EVICT),
            read: plain(READ),
            known: plain(KNOWN),
            tell: plain(TELL),
        }
    }
}

/// Iterator over the elements of a reply.
pub(super) struct Elements(std::vec::IntoIter<Value>);

impl Elements {
    pub(super) fn of(value: Value) -> Self {
        match value {
            Value::Array(all) => Self(all.into_iter()),
            one => Self(vec![one].into_iter()),
        }
    }

    pub(super) fn number(&mut self) -> Option<i64> {
        match self.0.next()? {
            Value::Int(n) => Some(n),
            _ => None,
        }
    }

    /// Returns the next number, if it is not negative.
    pub(super) fn natural(&mut self) -> Option<u64> {
        u64::try_from(self.number()?).ok()
    }

    pub(super) fn text(&mut self) -> Option<String> {
        match self.0.next()? {
            Value::BulkString(bytes) => String::from_utf8(bytes).ok(),
            Value::SimpleString(text) | Value::VerbatimString { text, .. } => Some(text),
            Value::Okay => Some("OK".into()),
            _ => None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.len() == 0
    }
}
