//! Changes a held read-write lock from writing to reading, and back.
//!
//! [`Queue::reweigh`](crate::queue::Queue::reweigh) defines the rule, and `client/weight.rs` what
//! the guard may assume meanwhile.
//!
//! **An upgrade never waits.** Two readers that both waited for an upgrade would deadlock, because
//! neither releases the lock that the other waits for. So an upgrade succeeds immediately, if there
//! is no other holder, or fails.

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
    /// Turns a write hold into a read hold, without letting another writer in between. One round
    /// trip, or none if the hold is already a read hold.
    ///
    /// Readers that are next in the queue acquire the lock immediately. Writers wait for this
    /// reader as for any other.
    ///
    /// The token, the lease, the renewals and [`max_hold`](crate::Mutex::max_hold) stay the same.
    /// From this call on, the guard is a read hold even if the call fails: fences reject it, and a
    /// [`Sequencer`](crate::Sequencer) that was made earlier is no longer valid. All guards of one
    /// hold (with an [`Owner`](crate::Owner), or inside [`run`](crate::RwLock::run_write)) are
    /// downgraded together.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let config = locks.rwlock("config");
    /// let guard = config.write().await?;
    /// // … write it …
    /// guard.downgrade().await?;
    /// let _other = config.read().await?; // and no other client has written since
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Not cancel safe: the operation may or may not have happened. The guard is a read hold, but
    /// the store may still treat it as a write hold and block other clients. Call this again, or
    /// release the lock.
    ///
    /// # Errors
    /// After an error other than `Unsupported` or `Lost`, the state is the same as after a dropped
    /// future.
    /// - [`Lost`](ErrorKind::Lost): the lock was lost.
    /// - [`Unsupported`](ErrorKind::Unsupported): this is not a read-write lock, or the store
    ///   cannot downgrade ([`Guarantees::downgrades`](crate::store::Guarantees::downgrades)).
    ///   Nothing has changed.
    /// - [`Unreachable`](ErrorKind::Unreachable): the store did not answer for a lease (at least 15
    ///   s).
    pub async fn downgrade(&self) -> Result<()> {
        self.reweighed("downgrade", downgrade(self.hold().core(), self.lease())).await
    }

    /// Turns a read hold into a write hold if there is no other holder. It does not wait. One round
    /// trip, or none if the hold is already a write hold.
    ///
    /// Waiters keep their queue positions. There is no upgrade that waits, because two readers that
    /// both wait for it would deadlock. To be sure to write, acquire the lock for writing from the
    /// start and [downgrade](Self::downgrade) it later. Or release it, acquire it for writing, and
    /// read the data again.
    ///
    /// The token, the lease and the renewals stay the same. No writer has held the lock since the
    /// token was assigned, so the token is larger than that of every earlier writer. (A fence that
    /// has seen the tokens of later *readers* rejects it.) A hold that was downgraded cannot be
    /// upgraded again, because the request that downgraded it may arrive late.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let config = locks.rwlock("config");
    /// let guard = config.read().await?;
    /// // … it has to be changed …
    /// let guard = match guard.try_upgrade().await {
    ///     Ok(()) => guard,
    ///     Err(error) if error.kind() == leasehold::ErrorKind::Contended => {
    ///         guard.release().await?;
    ///         config.write().await? // … and read the data again, because others may have written in between
    ///     }
    ///     Err(error) => return Err(error),
    /// };
    /// assert!(config.try_read().await.is_err());
    /// # drop(guard);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Not cancel safe: the operation may or may not have happened. The guard is a read hold, but
    /// the store may treat it as a write hold and block other clients. Call this or
    /// [`downgrade`](Self::downgrade) again, or release the lock.
    ///
    /// # Errors
    /// - [`Contended`](ErrorKind::Contended): the lock has other holders, or is in a cooldown.
    /// - [`Lost`](ErrorKind::Lost): the lock was lost.
    /// - [`Unsupported`](ErrorKind::Unsupported): this is not a read-write lock, the hold was
    ///   downgraded before, or the store cannot upgrade
    ///   ([`Guarantees::upgrades`](crate::store::Guarantees::upgrades)).
    /// - [`Unreachable`](ErrorKind::Unreachable): the store did not answer.
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
            let hint = "report this to the authors of the store";
            Err(Error::new(ErrorKind::Corrupt, "the store rejected a downgrade").with_hint(hint))
        }
    }
}

async fn try_upgrade(core: &Core, lease: &Lease) -> Result<()> {
    check(lease, core.store.guarantees().upgrades)?;
    if lease.weight.now() == MAX_READERS {
        return Ok(());
    }
    let downgraded = || {
        let what = "a hold that was downgraded cannot be upgraded again";
        let hint = "release the lock, and acquire it for writing";
        Error::new(ErrorKind::Unsupported, what).with_hint(hint)
    };
    if !lease.weight.ask_more() {
        return Err(downgraded());
    }
    let limit = request_timeout(lease.claim.lease);
    match ask(core, lease, "try_upgrade", MAX_READERS, limit).await? {
        true if lease.weight.answered(MAX_READERS) => Ok(()),
        true => Err(downgraded()),
        false => {
            let what = "cannot upgrade: the lock has other readers or is in a cooldown";
            let hint = "retry, or release the lock and acquire it for writing";
            Err(Error::new(ErrorKind::Contended, what).with_hint(hint))
        }
    }
}

/// Refuses what can never be, before anything is changed.
fn check(lease: &Lease, can: bool) -> Result<()> {
    if let State::Lost(reason) = lease.state() {
        return Err(Error::lost(reason));
    }
    if lease.claim.kind != Kind::RwLock {
        let what = format!(
            "only a read-write lock has readers and writers; this is a {}",
            lease.claim.kind
        );
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
