//! The state that all parts of one client share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::background::Background;
use super::ids::Ids;
use super::leave::{leave_late_joins, leave_with_retry};
use super::pending_releases::{PATIENCE, PendingReleases};
use super::renewer::Renewer;
use crate::store::Store;
use crate::types::claim::{Claim, ClaimId};
use crate::types::error::{Error, ErrorKind, Result};
use crate::types::holder::Holder;
use crate::types::name::Name;
use crate::types::options::LockOptions;
use crate::types::token::Token;
use crate::util::clock::{Clock, Moment};
use crate::util::world::{self, process_id};

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) renewer: Arc<Renewer>,
    pub(crate) background: Background,
    pub(crate) clock: Clock,
    /// The default options of the client's locks.
    pub(crate) options: LockOptions,
    pub(crate) holder: Arc<Holder>,
    /// The identity of the store, as sequencers contain it.
    pub(crate) identity: String,
    pending_releases: Arc<PendingReleases>,
    ids: Ids,
    seen: AtomicU64,
    /// The time by which the leases of all holds that are being released in the background have
    /// expired, as a [`Moment`].
    released_by: AtomicU64,
    closed: Arc<AtomicBool>,
}

impl Core {
    /// Creates a client, and starts the task that renews its claims.
    pub(crate) fn new(
        store: Arc<dyn Store>,
        background: Background,
        clock: Clock,
        options: LockOptions,
        identity: String,
    ) -> Self {
        let renewer = Renewer::new(store.clone(), clock.clone());
        let listener: Weak<Renewer> = Arc::downgrade(&renewer);
        store.on_eviction(listener);
        background.spawn(renewer.clone().run());
        let holder = Arc::new(Holder::this_process(&options.label));
        let (seen, released_by) = (AtomicU64::new(0), AtomicU64::new(0));
        let closed = Arc::new(AtomicBool::new(false));
        let (ids, pending_releases) = (Ids::default(), Arc::default());
        Self {
            store,
            renewer,
            background,
            clock,
            options,
            holder,
            identity,
            pending_releases,
            ids,
            seen,
            released_by,
            closed,
        }
    }

    /// Rejects all further acquisitions.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub(crate) fn check_ours(&self) -> Result<()> {
        if !self.holder_is_us() {
            let what = "this process is a fork of the one that connected, and has no thread to \
                        renew with: connect after forking";
            return Err(Error::new(ErrorKind::Closed, what));
        }
        Ok(())
    }

    /// Draws the ID of a new claim; see [`ids`](super::ids). Fails in a forked child.
    pub(crate) fn draw(&self, now: Moment) -> Result<ClaimId> {
        self.check_ours()?;
        self.ids.draw(now)
    }

    /// Returns the store. Fails in a forked child, which must not use its parent's connections.
    pub(crate) fn ours(&self) -> Result<&dyn Store> {
        self.check_ours()?;
        Ok(&*self.store)
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::SeqCst) { Err(Error::closed()) } else { Ok(()) }
    }

    /// Returns the highest token that this client has seen, for any name. A value that is too high
    /// is harmless, because tokens are derived from clocks.
    pub(crate) fn seen(&self) -> u64 {
        self.seen.load(Ordering::SeqCst)
    }

    pub(crate) fn saw(&self, token: Token) {
        self.seen.fetch_max(token.get(), Ordering::SeqCst);
    }

    /// Returns how much of `min_hold` is left, or `None` if nothing is.
    pub(crate) fn keep(&self, until: Moment) -> Option<Duration> {
        if until == Moment::from_nanos(0) {
            return None;
        }
        let left = until.since(self.clock.now());
        (!left.is_zero()).then_some(left)
    }

    /// Releases a claim when no caller waits for the result. Call it only in the process that
    /// connected.
    ///
    /// If the store is local, the claim is released immediately, if possible. Otherwise the
    /// background thread releases it and retries ([`leave_with_retry`]). If the immediate release
    /// starts but does not complete, the background thread starts it again. Releasing twice has no
    /// further effect.
    pub(crate) fn leave_in_background(&self, claim: &Claim, keep_until: Moment) {
        self.leave(claim, keep_until, false);
    }

    /// Like [`leave_in_background`](Self::leave_in_background), for a claim that its caller has
    /// given up. `may_join_late`: a request to join has no reply, so it may take effect after the
    /// release. The release is then repeated.
    pub(crate) fn leave_given_up(&self, claim: &Claim, may_join_late: bool) {
        self.leave(claim, Moment::from_nanos(0), may_join_late);
    }

    fn leave(&self, claim: &Claim, keep_until: Moment, may_join_late: bool) {
        let is_local = self.store.info().is_local;
        if is_local {
            let mut leave = self.store.leave(claim, self.keep(keep_until));
            if let Some(Ok(_)) = self.background.at_once(leave.as_mut()) {
                return;
            }
        }
        let (store, clock, claim) = (self.store.clone(), self.clock.clone(), claim.clone());
        let closed = self.closed.clone();
        let pending = self.pending_releases.begin(&claim);
        self.background.spawn_cleanup(async move {
            leave_with_retry(store.clone(), clock.clone(), claim.clone(), keep_until).await;
            drop(pending);
            // A local store has no late requests, because its client calls it directly.
            if may_join_late && !is_local {
                world::spawn(leave_late_joins(store, clock, claim, closed));
            }
        });
    }

    /// Like [`leave_in_background`](Self::leave_in_background), for a hold.
    pub(crate) fn release_in_background(&self, claim: &Claim, keep_until: Moment) {
        let expiry = self.clock.now().plus(claim.lease);
        self.released_by.fetch_max(expiry.as_nanos(), Ordering::SeqCst);
        self.leave_in_background(claim, keep_until);
    }

    /// Returns the time until the leases of all holds that are released in the background have
    /// expired.
    pub(crate) fn until_released(&self) -> Duration {
        Moment::from_nanos(self.released_by.load(Ordering::SeqCst)).since(self.clock.now())
    }

    /// Waits for this client's earlier releases of the lock, so that a new claim does not queue
    /// after an old claim of the same client. Waits at most [`PATIENCE`], and not beyond `give_up`.
    ///
    /// Call it only in the process that connected.
    pub(crate) async fn earlier_releases_done(&self, name: &Name, give_up: Moment) -> Result<()> {
        self.check_ours()?;
        let limit = || PATIENCE.min(give_up.since(self.clock.now()));
        self.background.within(limit, self.pending_releases.completed(name)).await;
        Ok(())
    }

    /// Returns whether any release is in progress.
    pub(crate) fn has_pending_releases(&self) -> bool {
        self.pending_releases.has_any()
    }

    pub(crate) fn holder_is_us(&self) -> bool {
        self.holder.pid == process_id()
    }
}
