//! The fenced resource in the store under test itself (`--fence store`): its own rows, keys or nodes,
//! written by the workers over connections of their own and guarded by that store's fence.
//!
//! For each lock there is a list of entries that only grows. An entry says on which one it builds,
//! as the versions of a [`Cell`] do; what the parent reads in the end is replayed into one. A worker
//! shows what it got *with* the grant, and never asks its guard again: so a holder that was stopped
//! sends its late write, and it is the store that must refuse it.
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
use leasehold::{Error, ErrorKind, Guard, Result, Token};
use serde::{Deserialize, Serialize};

use super::history::OpId;
use super::resource::{Cell, Read};

pub(super) use open::{open, supported};

/// What a holder shows to the resource: taken from its guard at once, and good for as long as the
/// resource takes it.
#[derive(Clone, Debug)]
pub(super) enum Proof {
    /// The token.
    Token(Token),
    /// etcd: that the hold's key is there, as an encoded comparison.
    #[cfg(feature = "etcd")]
    Compare(Vec<u8>),
    /// ZooKeeper: the path of the hold's node.
    #[cfg(feature = "zookeeper")]
    Node(String),
}

/// One write that was taken.
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
    /// Taken from the guard, while it is fresh.
    fn prove(&self, guard: &Guard) -> Result<Proof> {
        Ok(Proof::Token(guard.token()))
    }

    /// The last entry of a lock's list, shown to its holder. `None`: the store refused the proof.
    async fn read(&self, lock: usize, proof: &Proof) -> Result<Option<Read>>;

    /// Adds an entry. `false`: the store refused the proof.
    async fn write(&self, lock: usize, proof: &Proof, entry: Entry) -> Result<bool>;

    /// All entries of a lock, each with the version it made, in their order.
    async fn entries(&self, lock: usize) -> Result<Vec<(usize, Entry)>>;

    /// Removes everything of this run.
    async fn remove(&self, locks: usize) -> Result<()>;
}

/// What the lists come to.
///
/// # Errors
/// [`ErrorKind::Corrupt`] if an entry builds on one that is not there.
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

/// A proof of another store's kind.
fn foreign(_: &Proof) -> Error {
    Error::new(ErrorKind::Config, "this proof is for another store")
}

/// A store that did not do what was asked.
fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::new(ErrorKind::Unreachable, "the fenced resource does not respond").because(error)
}

/// What the drivers need of a store's URL: its servers, who asks, and what follows.
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
    fn lists_are_replayed_by_what_each_entry_builds_on() {
        let ops = |n: &[u32]| n.iter().map(|n| OpId { worker: 1, n: *n }).collect::<Vec<_>>();
        let chain = [(70, entry(0, 1, 1)), (75, entry(70, 2, 2)), (90, entry(75, 3, 3))];
        let end = replay(&chain).unwrap().end();
        assert_eq!((end.value, end.set), (3, ops(&[3, 2, 1])));
        let clobbered = [(70, entry(0, 1, 1)), (75, entry(70, 2, 2)), (90, entry(70, 2, 3))];
        let end = replay(&clobbered).unwrap().end();
        assert_eq!((end.value, end.set), (2, ops(&[3, 1])), "the second update is gone");
        assert_eq!(replay(&[(70, entry(5, 1, 1))]).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[cfg(feature = "redis")]
    #[test]
    fn the_parts_of_a_url() {
        let p = parts("redis://u:p@h:1,i/2?x=1").unwrap();
        assert_eq!((p.user, p.servers, p.path), (Some(("u", "p")), "h:1,i", "2"));
        assert!(parts("redis://u:%20@h").is_err());
    }
}
