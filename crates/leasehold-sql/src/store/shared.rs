//! What the calls' tasks share.

use std::collections::HashSet;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use tokio::sync::{Semaphore, watch};

use super::contended::Contended;
#[cfg(feature = "sqlite")]
use super::doorbell::Doorbells;
use super::joins::Joins;
use super::known::Known;
use super::leaves::Leaves;
use super::pool::Pool;
use super::statements::Statements;
use super::url::Dialect;
use leasehold_core::Name;
use leasehold_core::kit::Waiters;
use leasehold_core::store::Ears;

/// What the calls' tasks share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) url: String,
    pub(super) dialect: Dialect,
    pub(super) sql: Statements,
    pub(super) pool: Pool,
    /// For renewals and heartbeats alone, so that they never stand behind calls that wait for a
    /// lock's row.
    pub(super) beats: Pool,
    /// What some heartbeat is settling just now.
    pub(super) settling: Mutex<HashSet<Name>>,
    pub(super) waiters: Arc<Waiters>,
    pub(super) joins: Joins,
    pub(super) leaves: Arc<Leaves>,
    pub(super) contended: Contended,
    pub(super) known: Known,
    /// Whose turn it is: all but one of the connections for calls are for joins, and all but one of
    /// those for renewals for heartbeats of waiters.
    pub(super) joining: Semaphore,
    pub(super) waiting: Semaphore,
    /// How long a message with renewals may be.
    pub(super) most_bytes: AtomicUsize,
    /// This client, as its claims' rows name it; PostgreSQL's channel.
    pub(super) session: String,
    pub(super) pushes: bool,
    /// SQLite: where clients are told of grants, if files can be made there.
    #[cfg(feature = "sqlite")]
    pub(super) doorbells: Option<Arc<Doorbells>>,
    /// SQLite: who is told of evictions; whether there are any, until the client says goodbye.
    pub(super) ears: Ears,
    pub(super) hears: watch::Sender<bool>,
}
