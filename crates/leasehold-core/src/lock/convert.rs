//! Changes a held read-write lock from writing to reading, or from reading to writing.
//!
//! [`Queue::convert`](crate::queue::Queue::convert) defines the rule. `client/weight.rs` defines
//! what the guard may assume until the store has answered.
//!
//! **An upgrade never waits.** Two readers that both waited for an upgrade would deadlock, because
//! neither releases the lock that the other waits for. So an upgrade succeeds immediately, if there
//! is no other holder, or fails.

use std::pin::pin;
use std::time::Duration;

use crate::client::ask::outage_timeout;
use crate::client::core::Core;
use crate::client::lease::{Lease, State};
use crate::lock::hold::Hold;
use crate::store::cannot_convert;
use crate::types::answer::Converted;
use crate::types::claim::{Claim, MAX_READERS};
use crate::types::error::{Error, ErrorKind, LostReason, Result};
use crate::types::limits::request_timeout;

/// Changes a write hold into a read hold; see
/// [`WriteGuard::downgrade`](crate::WriteGuard::downgrade).
pub(crate) async fn downgrade(hold: &Hold) -> Result<()> {
    let core = hold.owned().core();
    converted(hold, "downgrade", lighten(core, hold.lease())).await
}

/// Changes a read hold into a write hold; see
/// [`ReadGuard::try_upgrade`](crate::ReadGuard::try_upgrade).
pub(crate) async fn try_upgrade(hold: &Hold) -> Result<()> {
    let core = hold.owned().core();
    converted(hold, "try_upgrade", weigh_more(core, hold.lease())).await
}

async fn converted(
    hold: &Hold,
    operation: &'static str,
    work: impl Future<Output = Result<()>>,
) -> Result<()> {
    let core = hold.owned().core();
    let done = core.background.with_runtime(pin!(work)).await;
    done.map_err(|e| {
        e.with_operation(operation).with_lock(hold.name()).with_store(core.store.url())
    })
}

async fn lighten(core: &Core, lease: &Lease) -> Result<()> {
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

async fn weigh_more(core: &Core, lease: &Lease) -> Result<()> {
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

/// Rejects an impossible conversion before anything is changed.
fn check(lease: &Lease, can: bool) -> Result<()> {
    if let State::Lost(reason) = lease.state() {
        return Err(Error::lost(reason));
    }
    if can { Ok(()) } else { Err(cannot_convert(&lease.claim)) }
}

/// Requests `weight` for the hold, and retries for up to `patient`. Returns whether the store has
/// applied the weight.
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
        let asking = lease.holding.call(operation, core.store.convert(&claim));
        let answer = core.background.within(limit, asking).await;
        let error = match answer.unwrap_or_else(|| Err(Error::no_reply(limit()))) {
            Ok(Converted::Done { token }) if token == lease.token => return Ok(true),
            Ok(Converted::Busy) => return Ok(false),
            // Another token belongs to another grant. The renewer treats that as a loss too.
            Ok(Converted::Done { .. } | Converted::Lost) => {
                lease.lose(LostReason::Gone);
                core.renewer.forget(lease.claim.id);
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
