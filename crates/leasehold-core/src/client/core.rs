//! What the parts of one client share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::background::Background;
use super::ids::Ids;
use super::keeper::Keeper;
use super::leave::leave_with_retry;
use super::leaving::{Leaving, PATIENCE};
use crate::base::clock::{Clock, Moment};
use crate::base::world::process_id;
use crate::store::Store;
use crate::words::claim::{Claim, ClaimId};
use crate::words::error::{Error, ErrorKind, Result};
use crate::words::holder::Holder;
use crate::words::name::Name;
use crate::words::options::LockOptions;
use crate::words::token::Token;

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) background: Background,
    pub(crate) clock: Clock,
    /// What its locks have unless they say otherwise.
    pub(crate) options: LockOptions,
    pub(crate) holder: Arc<Holder>,
    /// What sequencers say of the store.
    pub(crate) identity: String,
    leaving: Arc<Leaving>,
    ids: Ids,
    seen: AtomicU64,
    closed: AtomicBool,
}

impl Core {
    /// Of a client that begins to keep its claims alive now.
    pub(crate) fn new(
        store: Arc<dyn Store>,
        background: Background,
        clock: Clock,
        options: LockOptions,
        identity: String,
    ) -> Self {
        let keeper = Keeper::new(store.clone(), clock.clone());
        let ear: Weak<Keeper> = Arc::downgrade(&keeper);
        store.hear(ear);
        background.spawn(keeper.clone().run());
        let holder = Arc::new(Holder::this_process(&options.label));
        let (seen, closed) = (AtomicU64::new(0), AtomicBool::new(false));
        let (ids, leaving) = (Ids::default(), Arc::default());
        Self {
            store,
            keeper,
            background,
            clock,
            options,
            holder,
            identity,
            leaving,
            ids,
            seen,
            closed,
        }
    }

    /// Nothing can be taken through it any more.
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

    /// The id of a claim that is made now, in the process that connected: see [`ids`](super::ids).
    pub(crate) fn draw(&self, now: Moment) -> Result<ClaimId> {
        self.check_ours()?;
        self.ids.draw(now)
    }

    /// The store, in the process that connected: in a forked child its connections are the
    /// parent's.
    pub(crate) fn ours(&self) -> Result<&dyn Store> {
        self.check_ours()?;
        Ok(&*self.store)
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::SeqCst) { Err(Error::closed()) } else { Ok(()) }
    }

    /// The highest token that this client has seen, whatever the name: higher than needed never
    /// harms, since tokens are drawn from clocks.
    pub(crate) fn seen(&self) -> u64 {
        self.seen.load(Ordering::SeqCst)
    }

    pub(crate) fn saw(&self, token: Token) {
        self.seen.fetch_max(token.get(), Ordering::SeqCst);
    }

    /// What is left of `at_least`.
    pub(crate) fn keep(&self, until: Moment) -> Option<Duration> {
        if until == Moment::from_nanos(0) {
            return None;
        }
        let left = until.since(self.clock.now());
        (!left.is_zero()).then_some(left)
    }

    /// Gives a claim back without a caller to wait for it: at once where the store is local, else
    /// on the background thread, until the store answers or the claim can no longer live there.
    /// Only in the process that connected. What was begun here and did not come to an end at once is begun
    /// again there: leaving twice is leaving once.
    pub(crate) fn leave_in_background(&self, claim: &Claim, keep_until: Moment) {
        if self.store.info().is_local {
            let mut leave = self.store.leave(claim, self.keep(keep_until));
            if let Some(Ok(_)) = self.background.at_once(leave.as_mut()) {
                return;
            }
        }
        let (store, clock) = (self.store.clone(), self.clock.clone());
        let left = self.leaving.begin(claim);
        let leave = leave_with_retry(store, clock, claim.clone(), keep_until);
        self.background.spawn_cleanup(async move {
            leave.await;
            drop(left);
        });
    }

    /// Waits for what this client has let go of before, so that nobody stands behind himself; not for long,
    /// and not beyond `give_up`. Only in the process that connected.
    pub(crate) async fn nothing_leaves(&self, name: &Name, give_up: Moment) -> Result<()> {
        self.check_ours()?;
        let limit = || PATIENCE.min(give_up.since(self.clock.now()));
        self.background.within(limit, self.leaving.answered(name)).await;
        Ok(())
    }

    /// Whether there may be something to wait for.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.any()
    }

    pub(crate) fn holder_is_us(&self) -> bool {
        self.holder.pid == process_id()
    }
}
