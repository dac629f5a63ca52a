//! What a node does in one atomic step, in Lua (`scripts/`). The rules are those of [`round::Node`]; a test
//! compares the two.
//!
//! # The keys
//! - *the main key*, the prefix and the lock's name: byte for byte what every Redlock client sets.
//!   It alone says whose the node's vote is. Ours is the claim's id, a point, and the number of the
//!   attempt, so that a late release of an earlier attempt cannot touch a later one.
//! - *the record*: the last token for the name, and who holds, for people. It counts as the holder's
//!   only if its id is the main key's value. It outlives the lock by [`MEMORY`], so that a name that
//!   is used again does not depend on others' tokens: see the next.
//! - *the memory*, one for the node: the highest token stored for any name (`cur`), what it was told
//!   when it had forgotten (`told`), and in which run of the server all this was so (`run`); also
//!   since when another run is known to have forgotten (`since`, `lapsed`). A name
//!   without a record has a token of at most `cur`. So tokens rise over names that were not used for
//!   years, though nothing is kept for each, however the server's clock is stepped. The price is a
//!   second round trip where a name has no record and another client, whose clock is ahead, has just
//!   taken another name.
//! - *who waits*, by since when, and until when each counts as alive.
//!
//! # Who is told is kept the node for
//! A node that is freed while somebody waits tells the one who has waited longest, and *keeps* itself
//! for it: the main key is that claim's, as if by an attempt number 0, for [`KEPT`]. So who has just released
//! does not take the node again before the message has arrived: newcomers, and other clients of the
//! recipe, find it taken. Whoever *waits* at the node may take it all the same: nodes may disagree about
//! who has waited longest, and then nobody would get a majority of what is kept.
//! - *It is no vote*: no attempt has the number 0, so nobody counts it, extends it or holds by it; for the
//!   tokens it does not exist.
//! - *Who is told and does not come* (it died, or the message was lost and it asks again later) costs
//!   newcomers that time, once: it counts as alive for [`SOON`] at the most then, until it asks again, at the place
//!   that it had, since it says for how long it has waited.
//! - *Who leaves* deletes what was kept for it, and the next is told.
//! - *Where there is no room* for it nothing is kept: the release must not fail of that.
//!
//! # What is usual
//! A free key, a proposal above all that the node has stored, and nobody who waits: that needs eleven
//! commands for a pair, and comes first in the scripts (`take_free.lua`, `release_alone.lua`); what is not so
//! has changed nothing by then, and goes on to the rest, which can do everything.
//! - *The record need not be read*: whatever is stored raises `cur` as well, so a proposal above `cur` is
//!   above every name's last token. (A record may be older than a memory that was lost. Who stored its
//!   token has had its lease's time since, as the delay is longer, and the memory was told of every token
//!   that was complete: it is as if the record had gone too.)
//! - *SET NX* looks and takes in one. Refused, or without room for it, it has written nothing.
//! - *Who waits* is one look at the first of them: where there is none, there is nobody to be taken out or
//!   told. Whoever comes to wait later finds the key free.
//! - *The record is left as it is by a release*: it counts only while its id is in the main key, and an
//!   attempt that was released is never made again.
//!
//! A lost reply, a client that dies and a call that is dropped are as before: it is still one script.
//!
//! # The server's run
//! A restart may lose data, so a vote counts only in the run of the server in which the memory was
//! kept. `INFO` in every script would tell, but costs more than all the rest. Instead the script that
//! votes has the run's id in its text: after a restart no server knows it (NOSCRIPT), and the client
//! looks anew. (Redis 6 may, from a snapshot; it does not tell its version to scripts either, so there
//! `INFO` is asked all the same.) It is put into the server by a call that compares the id with `INFO`'s in the same
//! atomic step, and makes the memory invalid if they differ.
//!
//! # How long a node that has forgotten does not vote
//! Not only who restarted has forgotten: so has who was emptied, who was restored from a copy, or a
//! replica that was promoted, and these have been up for long. So the first client that meets a run
//! which does not remember writes down when that was, and the node is told what it missed (`TELL`)
//! only when the delay has passed since then, whoever tells it. Its own age counts instead only where
//! a client can be certain that nothing but its start took its memory (see [`super::memory`]).
//!
//! [`round::Node`]: super::round::Node

use redis::Value;

use crate::redis::connection::Script;

/// For how many milliseconds the record outlives the lock.
pub(super) const MEMORY: u64 = 120_000;
/// For how many milliseconds a node is kept for who was told: a message and a request, also from afar.
const KEPT: u64 = 200;
/// For how many more milliseconds who was told counts as alive, until it asks.
const SOON: u64 = 1_000;
/// What is read where the key of a lock's name is something else.
pub(super) const NO_LOCK: &str = "no lock";

// Each begins with what it is for, its KEYS and its ARGV.
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

/// The scripts that do not vote.
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

/// A script, whose `usual` case needs nothing of what several share.
fn script(usual: &str, body: &str, run: &str) -> Script {
    keeping(KEPT, usual, body, run)
}

/// The same, where a node is kept for so many milliseconds.
fn keeping(kept: u64, usual: &str, body: &str, run: &str) -> Script {
    let head = format!(
        "local RUN, MEMORY, NO_LOCK, KEPT, SOON = '{run}', {MEMORY}, '{NO_LOCK}', {kept}, {SOON}\n"
    );
    Script::new(format!("{head}{usual}{COMMON}{body}"))
}

/// The script that votes in this run of a server, which is 40 hexadecimal digits.
pub(super) fn take(run: &str) -> Script {
    script(TAKE_FREE, TAKE, run)
}

/// The same as a server before Redis 7 runs it.
#[cfg(test)]
pub(super) fn take_of_old(run: &str) -> Script {
    let old = |body: &str| body.replace("redis.REDIS_VERSION_NUM", "redis.NOT_THERE");
    script(&old(TAKE_FREE), &old(TAKE), run)
}

impl Scripts {
    pub(super) fn new() -> Self {
        Self::keeping(KEPT)
    }

    /// Where a node is kept for so many milliseconds.
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

/// Walks through the elements of an answer.
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

    /// A number that is not negative.
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
