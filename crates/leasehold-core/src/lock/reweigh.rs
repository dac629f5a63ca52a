//! A writer that becomes a reader, and a reader that becomes a writer, while they hold.
//!
//! The queue's rule says what that does ([`Queue::reweigh`](crate::queue::Queue::reweigh)), and what the guard may
//! believe meanwhile is in `client/weight.rs`.
//!
//! *Why nobody waits to become a writer.* Two readers that both did so would wait for each other for ever: neither
//! gives up what the other waits for. So a reader becomes a writer at once, where nobody else holds, or not at
//! all.

use std::pin::pin;
use std::time::Duration;

use crate::client::ask::outage_timeout;
use crate::client::core::Core;
use crate::client::lease::{Lease, State};
use crate::lock::guard::Guard;
use crate::store::cannot_reweigh;
use crate::words::answer::Reweighed;
use crate::words::claim::{Claim, Kind, MAX_READERS};
use crate::words::error::{Error, ErrorKind, LostReason, Result};
use crate::words::limits::request_timeout;

impl Guard {
    /// Makes a writer a reader, without letting another writer in between: readers that are next in the queue come
    /// in at once, and writers wait for this reader like any other. One round trip; of what is a reader already, none.
    ///
    /// Token, lease, renewals and [`max_hold`](crate::Mutex::max_hold) go on as they are. The guard is a
    /// reader from the call on, whatever comes of it: fences refuse it, and a [`Sequencer`](crate::Sequencer)
    /// that was shown before is no longer good. All guards of one hold (of an [`Owner`](crate::Owner), or in
    /// [`run`](crate::RwLock::run_write)) become readers together.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let config = locks.rwlock("config");
    /// let guard = config.write().await?;
    /// // … write it …
    /// guard.downgrade().await?;
    /// let _other = config.read().await?; // and nobody has written since
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Dropped, or after an error, the guard is a reader; but the store may have it as a writer and keep others out,
    /// until this is called again or the lock is released.
    ///
    /// # Errors
    /// [`Lost`](ErrorKind::Lost) if the lock is lost; [`Unsupported`](ErrorKind::Unsupported) for what is no
    /// read-write lock, and where the store cannot do it
    /// ([`Guarantees::downgrades`](crate::store::Guarantees::downgrades)): then nothing has changed. Where
    /// the store is silent for a lease (15 s at least), that.
    pub async fn downgrade(&self) -> Result<()> {
        self.reweighed("downgrade", downgrade(self.hold().core(), self.lease())).await
    }

    /// Makes a reader a writer if nobody else holds the lock, at once or not at all; of what is a writer
    /// already, nothing. Those who wait go on waiting. One round trip.
    ///
    /// There is no `upgrade` that waits: two readers that both wait for the other to leave wait for ever. Who
    /// must write takes the lock for writing from the start, or [downgrades](Self::downgrade), or releases,
    /// takes it anew and reads again what it has read.
    ///
    /// Token, lease and renewals go on as they are: no writer has held the lock since the token was drawn, so
    /// it is greater than that of every earlier one. (A fence that was shown tokens of later *readers*
    /// refuses it.) A hold that was ever downgraded is not made a writer again: what was sent to make it a
    /// reader may arrive late.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let config = locks.rwlock("config");
    /// let guard = config.read().await?;
    /// // … it is to be mended …
    /// let guard = match guard.try_upgrade().await {
    ///     Ok(()) => guard,
    ///     Err(error) if error.kind() == leasehold::ErrorKind::Contended => {
    ///         guard.release().await?;
    ///         config.write().await? // … and read again: others may have written in between
    ///     }
    ///     Err(error) => return Err(error),
    /// };
    /// assert!(config.try_read().await.is_err());
    /// # drop(guard);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Dropped, or after an error, the guard is a reader; but the store may have it as a writer and keep others out,
    /// until this or [`downgrade`](Self::downgrade) is called again or the lock is released.
    ///
    /// # Errors
    /// [`Contended`](ErrorKind::Contended) if somebody else holds it too (or it is kept closed in somebody's
    /// place); [`Lost`](ErrorKind::Lost) if the lock is lost; [`Unsupported`](ErrorKind::Unsupported) as of
    /// [`downgrade`](Self::downgrade) (by [`Guarantees::upgrades`](crate::store::Guarantees::upgrades)), and
    /// for a hold that was downgraded.
    pub async fn try_upgrade(&self) -> Result<()> {
        self.reweighed("try_upgrade", try_upgrade(self.hold().core(), self.lease())).await
    }

    async fn reweighed(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        let core = self.hold().core();
        let done = core.background.with_runtime(pin!(work)).await;
        done.map_err(|e| e.during(operation).on(self.name()).at(core.store.url()))
    }
}

async fn downgrade(core: &Core, lease: &Lease) -> Result<()> {
    check(lease, core.store.guarantees().downgrades)?;
    if !lease.weight.lighten(1) {
        return Ok(());
    }
    match ask(core, lease, "downgrade", 1, outage_timeout(&*core.store, &lease.claim)).await? {
        true => Ok(()),
        false => {
            let what = "the store refused to make a writer a reader: report this";
            Err(Error::new(ErrorKind::Corrupt, what))
        }
    }
}

async fn try_upgrade(core: &Core, lease: &Lease) -> Result<()> {
    check(lease, core.store.guarantees().upgrades)?;
    if lease.weight.now() == MAX_READERS {
        return Ok(());
    }
    let downgraded = || {
        let what = "a hold that was downgraded is not made a writer again: release it, and take it for writing";
        Error::new(ErrorKind::Unsupported, what)
    };
    if !lease.weight.ask_more() {
        return Err(downgraded());
    }
    let limit = request_timeout(lease.claim.lease);
    match ask(core, lease, "try_upgrade", MAX_READERS, limit).await? {
        true if lease.weight.answered(MAX_READERS) => Ok(()),
        true => Err(downgraded()),
        false => {
            let what = "others read it, or are kept in mind: release it and take it for writing, or try again";
            Err(Error::new(ErrorKind::Contended, what))
        }
    }
}

/// Refuses what can never be, before anything is changed.
fn check(lease: &Lease, can: bool) -> Result<()> {
    if let State::Lost(reason) = lease.state() {
        return Err(Error::lost(reason));
    }
    if lease.claim.kind != Kind::RwLock {
        let what = format!("a {} has neither readers nor writers", lease.claim.kind);
        return Err(Error::new(ErrorKind::Unsupported, what));
    }
    if can { Ok(()) } else { Err(cannot_reweigh(&lease.claim)) }
}

/// Asks for this weight, again and again for so long; tells whether the store has it so.
async fn ask(
    core: &Core,
    lease: &Lease,
    operation: &'static str,
    weight: u32,
    patient: Duration,
) -> Result<bool> {
    let claim = Claim { weight, ..lease.claim.clone() };
    let started = core.clock.now();
    let limit = || request_timeout(claim.lease);
    let mut pause = Duration::from_millis(10);
    loop {
        let asking = lease.holding.call(operation, core.store.reweigh(&claim));
        let answer = core.background.within(limit, asking).await;
        let error = match answer.unwrap_or_else(|| Err(Error::no_reply(limit()))) {
            Ok(Reweighed::Done { token }) if token == lease.token => return Ok(true),
            Ok(Reweighed::Busy) => return Ok(false),
            // Another token is another grant: see the keeper, who would say the same.
            Ok(Reweighed::Done { .. } | Reweighed::Lost) => {
                lease.lose(LostReason::Gone);
                core.keeper.forget(lease.claim.id);
                return Err(Error::lost(lease.lost_reason().unwrap_or(LostReason::Gone)));
            }
            Err(error) => error,
        };
        if let State::Lost(reason) = lease.state() {
            return Err(Error::lost(reason));
        }
        if !error.is_transient() || core.clock.now().since(started) > patient {
            return Err(error);
        }
        core.background.sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}
