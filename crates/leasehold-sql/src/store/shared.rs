//! The state that the tasks of a client's calls share.

use std::collections::HashSet;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use tokio::sync::{Semaphore, watch};

use super::contention_hints::ContentionHints;
use super::in_flight_joins::InFlightJoins;
use super::in_flight_leaves::InFlightLeaves;
use super::lock_turns::LockTurns;
use super::pool::Pool;
#[cfg(feature = "postgres")]
use super::postgres::positions::Positions;
#[cfg(any(feature = "sqlite", feature = "postgres"))]
use super::seen_names::SeenNames;
#[cfg(feature = "sqlite")]
use super::sqlite::notify_fifo::NotifyFifos;
use super::statements::Statements;
use super::url::Dialect;
use leasehold_core::kit::Waiters;
use leasehold_core::store::{EvictionListeners, Joined};
use leasehold_core::{Claim, Name};

/// The state that the tasks of a client's calls share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) url: String,
    pub(super) dialect: Dialect,
    pub(super) sql: Statements,
    pub(super) pool: Pool,
    /// For renewals and heartbeats only, so that they never wait for calls that wait for a lock's
    /// row.
    pub(super) renewal_pool: Pool,
    /// The locks that a heartbeat is currently settling (see `settle`).
    pub(super) settling: Mutex<HashSet<Name>>,
    pub(super) waiters: Arc<Waiters>,
    /// PostgreSQL: the queue positions of the waiters.
    #[cfg(feature = "postgres")]
    pub(super) positions: Positions,
    pub(super) joins: InFlightJoins,
    pub(super) leaves: Arc<InFlightLeaves>,
    pub(super) contention_hints: ContentionHints,
    #[cfg(any(feature = "sqlite", feature = "postgres"))]
    pub(super) seen_names: SeenNames,
    /// Limits how many connections joins and heartbeats of waiters use. Joins use all but one of
    /// the connections for calls. Heartbeats of waiters use all but one of those for renewals.
    pub(super) joining: Semaphore,
    /// The joins of one lock use at most two of these connections.
    pub(super) joins_of_lock: LockTurns,
    pub(super) waiting: Semaphore,
    /// The maximum size of a message with renewals.
    pub(super) most_bytes: AtomicUsize,
    /// The name of this client in its claims' rows, and its channel on PostgreSQL.
    pub(super) session: String,
    pub(super) pushes: bool,
    /// SQLite: the FIFOs that notify clients of grants, if files can be created next to the
    /// database.
    #[cfg(feature = "sqlite")]
    pub(super) notify_fifos: Option<Arc<NotifyFifos>>,
    /// SQLite: the receivers of this client's notifications of evictions. `wants_evictions` states
    /// whether there are any, and is false after the client has disconnected.
    pub(super) listeners: EvictionListeners,
    pub(super) wants_evictions: watch::Sender<bool>,
}

impl Shared {
    /// Registers a claim that is about to join and will wait.
    pub(super) fn enlist(&self, claim: &Claim) {
        self.waiters.enlist(claim.id, || ());
        #[cfg(feature = "postgres")]
        if self.dialect == Dialect::Postgres && self.pushes {
            self.positions.add(claim);
        }
    }

    /// Records the answer to a join.
    pub(super) fn learn(&self, claim: &Claim, joined: &Joined) {
        self.contention_hints.learn(&claim.name, joined);
        #[cfg(feature = "postgres")]
        if let Joined::Waiting(place) = joined {
            self.positions.note(claim.id, place.ahead);
        }
    }
}
