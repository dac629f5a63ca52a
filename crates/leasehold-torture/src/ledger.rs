//! The fenced resource in the store under test itself (`--fence store`). It consists of its own
//! rows, keys or nodes. The workers write them over their own connections, guarded by the store's
//! fence.
//!
//! Each lock has an append-only list of entries. An entry names the entry that it builds on, like
//! the versions of a [`Cell`]. At the end the parent reads the entries and replays them into a
//! cell. A worker shows the proof that it got *with* the grant, and never checks its guard again.
//! So a paused holder sends its late write, and the store must refuse it.
#![cfg_attr(
    not(all(feature = "sqlite", feature = "redis", feature = "etcd", feature = "zookeeper")),
    allow(dead_code, reason = "with fewer stores there is less to show")
)]

#[cfg(feature = "etcd")]
mod etcd;
mod open;
#[cfg(feature = "redis")]
mod redis;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
mod sql;
#[cfg(feature = "zookeeper")]
mod zookeeper;

use async_trait::async_trait;
use leasehold::{Error, ErrorKind, FencingToken, Hold, Result};
use serde::{Deserialize, Serialize};

use super::history::OpId;
use super::resource::{Cell, Read};

pub(super) use open::{open, supported};

/// A holder's proof for the resource. It is taken from the guard immediately, and is valid for as
/// long as the resource accepts it.
#[derive(Clone, Debug)]
pub(super) enum Proof {
    /// The token.
    Token(FencingToken),
    /// etcd: an encoded comparison that requires the hold's key to exist.
    #[cfg(feature = "etcd")]
    Compare(Vec<u8>),
    /// ZooKeeper: the path of the hold's node.
    #[cfg(feature = "zookeeper")]
    Node(String),
}

/// One write that was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// The [`Read::version`] that it builds on.
    pub(super) base: usize,
    pub(super) value: u64,
    pub(super) token: u64,
    pub(super) op: OpId,
}

impl Entry {
    pub(super) fn new(read: Read, token: u64, op: OpId) -> Self {
        Self { base: read.version, value: read.value.saturating_add(1), token, op }
    }
}

/// The lists of one run.
#[async_trait]
pub(super) trait Ledger: Send + Sync {
    /// Takes the proof from the guard, right after the grant.
    fn prove(&self, guard: &Hold) -> Result<Proof> {
        let token = guard.fencing_token();
        let shared = || Error::new(ErrorKind::Unsupported, "other clients can hold this lock");
        token.map(Proof::Token).ok_or_else(shared)
    }

    /// Returns the last entry of a lock's list to its holder. `None`: the store refused the proof.
    async fn read(&self, lock: usize, proof: &Proof) -> Result<Option<Read>>;

    /// Adds an entry. `false`: the store refused the proof.
    async fn write(&self, lock: usize, proof: &Proof, entry: Entry) -> Result<bool>;

    /// Returns all entries of a lock in order, each with the version that it made.
    async fn entries(&self, lock: usize) -> Result<Vec<(usize, Entry)>>;

    /// Removes everything of this run.
    async fn remove(&self, locks: usize) -> Result<()>;
}

/// Replays the entries into a cell.
///
/// # Errors
/// [`ErrorKind::Corrupt`] if an entry builds on one that does not exist.
pub(super) fn replay(entries: &[(usize, Entry)]) -> Result<Cell> {
    let mut cell = Cell::plain();
    for (_, entry) in entries {
        // The store's own versions need not count from 1.
        let base = match entry.base {
            0 => Some(0),
            base => entries.iter().position(|(version, _)| *version == base).map(|i| i + 1),
        };
        let read = base.map(|version| Read { version, value: entry.value.saturating_sub(1) });
        if !read.is_some_and(|read| cell.write(entry.token, read, entry.op)) {
            let what = format!("the write of {} builds on a write that no worker made", entry.op);
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
    }
    Ok(cell)
}

/// Returns the error for a proof of another store's kind.
fn foreign(_: &Proof) -> Error {
    Error::new(ErrorKind::Config, "this proof of a hold is for another kind of store")
}

/// Returns the error for a store that did not execute a request.
fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::new(ErrorKind::Unreachable, "the fenced resource does not respond").with_source(error)
}

/// The parts of a store's URL that the drivers need: the user, the servers and the path.
#[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
struct Parts<'a> {
    user: Option<(&'a str, &'a str)>,
    servers: &'a str,
    path: &'a str,
}

#[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
fn parts(url: &str) -> Result<Parts<'_>> {
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    let rest = rest.split_once('?').map_or(rest, |(rest, _)| rest);
    let (user, rest) =
        rest.rsplit_once('@').map_or((None, rest), |(user, rest)| (Some(user), rest));
    if user.is_some_and(|user| user.contains('%')) {
        let what = "--fence store does not support URLs with a % in the credentials";
        return Err(Error::new(ErrorKind::Unsupported, what));
    }
    let (servers, path) = rest.split_once('/').unwrap_or((rest, ""));
    Ok(Parts { user: user.map(|user| user.split_once(':').unwrap_or((user, ""))), servers, path })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(base: usize, value: u64, n: u32) -> Entry {
        Entry { base, value, token: n.into(), op: OpId { worker: 1, n } }
    }

    #[test]
    fn each_entry_is_replayed_on_its_base_version() {
        let ops = |n: &[u32]| n.iter().map(|n| OpId { worker: 1, n: *n }).collect::<Vec<_>>();
        let chain = [(70, entry(0, 1, 1)), (75, entry(70, 2, 2)), (90, entry(75, 3, 3))];
        let end = replay(&chain).unwrap().end();
        assert_eq!((end.value, end.set), (3, ops(&[3, 2, 1])));
        let clobbered = [(70, entry(0, 1, 1)), (75, entry(70, 2, 2)), (90, entry(70, 2, 3))];
        let end = replay(&clobbered).unwrap().end();
        assert_eq!((end.value, end.set), (2, ops(&[3, 1])), "the second update must be lost");
        assert_eq!(replay(&[(70, entry(5, 1, 1))]).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[cfg(feature = "redis")]
    #[test]
    fn url_is_split_into_its_parts() {
        let p = parts("redis://u:p@h:1,i/2?x=1").unwrap();
        assert_eq!((p.user, p.servers, p.path), (Some(("u", "p")), "h:1,i", "2"));
        assert!(parts("redis://u:%20@h").is_err());
    }
}
