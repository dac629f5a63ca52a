//! Runs one call on a connection from the pool, with retries.
//!
//! A call that the database rolled back because of other transactions is retried. A broken
//! connection is replaced. The claim's ID alone decides every call, so repeating it is harmless.
//! Only `leave` must recognize a repetition, so `in_doubt` marks a call that may be the second one.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::SemaphorePermit;

use super::fault::{self, Failure, given_up, no_answer};
use super::in_flight_joins::LastJoin;
use super::in_flight_leaves::FirstLeave;
use super::limits::{LIMIT, SLOW, TRIES};
use super::pool::{Pool, Pooled};
use super::queue_snapshot::{self, QueueSnapshot, ReadScope};
use super::renew_unlocked::UnlockedRenewal;
use super::shared::Shared;
use super::url::is_file;
use super::wire::{Arg, Wire};
use leasehold_core::queue::Queue;
use leasehold_core::store::{Converted, Evict, Joined, LockInfo, Mode, Renew, Renewal};
use leasehold_core::{Claim, ClaimId, Error, ErrorKind, Name, Result, Token};

/// A function that returns whether no caller waits for the reply any more.
pub(super) type IsCancelled<'a> = &'a (dyn Fn() -> bool + Send + Sync);

/// One call to the database.
#[derive(Clone, Debug)]
pub(super) enum Call {
    Join(Claim, Mode),
    /// A join by the single statement that acquires a free lock.
    Take(Claim),
    /// A leave by the single statement that releases a lock without waiters.
    Release(Claim),
    RenewUnlocked(Vec<Renew>),
    /// Renewals on one lock, with its row locked.
    Renew(Vec<Renew>),
    Leave(Claim, Option<Duration>, ReleaseHint),
    Convert(Claim),
    Read(Name),
    /// Reads a lock like `Read`, but may omit waiters.
    Holders(Name),
    List(String),
    Evict(Name, Evict),
    /// Settles a queue: removes expired claims and grants what has become free.
    Settle(Name),
}

/// What this client knows about a claim that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReleaseHint {
    /// The claim may have received no reply, because its join is in progress. That join will leave
    /// when it completes.
    JoinInProgress,
    /// The claim has waited, as far as this client knows, or another claim waits.
    Waiting,
    /// The claim has not waited: its join was granted immediately, or got any other reply.
    OtherReply,
}

/// The reply to a call.
#[derive(Debug)]
pub(super) enum Answer {
    Joined(Joined),
    Taken(Option<Token>),
    /// A join that can never succeed.
    Refused(Error),
    RenewedUnlocked(Vec<UnlockedRenewal>),
    Renewed(Vec<Renewal>),
    Left(bool),
    Converted(Converted),
    Read(Option<LockInfo>),
    Listed(Vec<LockInfo>),
    Evicted(usize),
    Settled,
}

impl Shared {
    /// Runs one call, with retries while the caller waits for it. A caller that gets no reply calls
    /// again.
    pub(super) async fn call(&self, call: Call, is_cancelled: IsCancelled<'_>) -> Result<Answer> {
        let pool = match call {
            Call::RenewUnlocked(_) => &self.renewal_pool,
            _ => &self.pool,
        };
        let _turn = self.turn(&call).await;
        let (mut tries, mut replaced, mut in_doubt) = (0, 0, false);
        loop {
            let pooled = pool.take().await;
            let mut pooled = pooled.map_err(|error| Failure::from(error).into_error())?;
            if is_cancelled() {
                pool.put(pooled);
                return Err(given_up());
            }
            tries += 1;
            let done = in_time(pool, self.perform(&mut *pooled.wire, &call, in_doubt)).await;
            match done {
                Some(Ok(answer)) => {
                    pool.put(pooled);
                    return Ok(answer);
                }
                None => return Err(no_answer()),
                // Retries on another connection. The server has probably closed this one while it
                // was idle, or a statement of its transaction had failed before, so that nothing
                // was done. An eviction is not retried, because it could hit the next holder.
                Some(Err(Failure::Broken(error)))
                    if (pooled.used || fault::had_failed_before(&error))
                        && replaced < 2
                        && !matches!(call, Call::Evict(..)) =>
                {
                    in_doubt |= !fault::had_failed_before(&error);
                    replaced += 1;
                }
                // The client's other idle connections lead to the same changed database.
                Some(Err(Failure::Changed(error))) => {
                    self.pool.forget_idle();
                    self.renewal_pool.forget_idle();
                    replaced += 1;
                    if replaced > 2 || matches!(call, Call::Evict(..)) {
                        return Err(error);
                    }
                }
                Some(Err(Failure::ReadOnly(error))) => {
                    self.pool.forget_idle();
                    self.renewal_pool.forget_idle();
                    return Err(fault::replaced(&error));
                }
                Some(Err(Failure::Conflict(error))) => {
                    self.undo(pool, pooled).await;
                    if tries >= TRIES {
                        return Err(Failure::Conflict(error).into_error());
                    }
                    pause(tries).await;
                }
                Some(Err(failure)) => return Err(failure.into_error()),
            }
        }
    }

    /// Runs a join that has [begun](super::in_flight_joins::InFlightJoins::begin). If its claim was
    /// given up in the meantime, the claim leaves again.
    pub(super) async fn join_or_leave(
        &self,
        claim: Claim,
        mode: Mode,
        is_cancelled: IsCancelled<'_>,
    ) -> Result<Answer> {
        let id = claim.id;
        let sent = AtomicBool::new(false);
        let record_sent = || {
            let cancelled = is_cancelled();
            sent.fetch_or(!cancelled, Ordering::SeqCst);
            cancelled
        };
        let done = self.call(Call::Join(claim.clone(), mode), &record_sent).await;
        let waits = matches!(done, Ok(Answer::Joined(Joined::Waiting(_))));
        let ended = self.joins.end(id, waits, sent.into_inner());
        if ended.given_up || ended.idle {
            self.waiters.dismiss(id);
        }
        if let Some(last) = ended.last {
            self.leave_given_up(claim, last).await;
        }
        if ended.given_up { Err(given_up()) } else { done }
    }

    /// Removes a claim that was given up during its last join. The `leave` that gave it up may have
    /// found nothing, and waits for this one.
    pub(super) async fn leave_given_up(&self, claim: Claim, last: LastJoin) {
        let is_removed = match last.may_exist {
            true => {
                let leave = Call::Leave(claim, None, ReleaseHint::Waiting);
                self.call(leave, &|| false).await.is_ok()
            }
            false => true,
        };
        last.removed(is_removed);
    }

    /// Runs a `leave` as a full call, and passes its result to callers that have repeated the
    /// request.
    pub(super) async fn leave_first(
        &self,
        claim: Claim,
        keep: Option<Duration>,
        hint: ReleaseHint,
        in_doubt: bool,
        first: &FirstLeave,
    ) -> Result<bool> {
        let done = self.call(Call::Leave(claim, keep, hint), &|| first.is_overtaken()).await?;
        let Answer::Left(left) = done else { return out_of_step() };
        first.answered(left || in_doubt);
        Ok(left || in_doubt)
    }

    /// Limits joins and waiters' heartbeats, so that they cannot occupy all connections. A release
    /// must not wait for a thousand joins, and a holder's renewal must not wait for the heartbeats
    /// of waiters.
    pub(super) async fn turn(&self, call: &Call) -> Option<SemaphorePermit<'_>> {
        let turns = match call {
            Call::Join(..) | Call::Take(_) => &self.joining,
            Call::RenewUnlocked(all) if all.iter().all(|r| self.waiters.has(r.claim.id)) => {
                &self.waiting
            }
            _ => return None,
        };
        turns.acquire().await.ok()
    }

    /// Rolls the transaction back. If that fails, the connection is closed, which rolls it back
    /// too.
    async fn undo(&self, pool: &Pool, mut pooled: Pooled) {
        match tokio::time::timeout(LIMIT, pooled.wire.raw("ROLLBACK")).await {
            Ok(Ok(())) => pool.put(pooled),
            // On SQLite, no transaction was open.
            Ok(Err(sqlx::Error::Database(_))) if is_file(self.dialect) => pool.put(pooled),
            Ok(Err(_)) | Err(_) => {}
        }
    }

    pub(super) async fn perform(
        &self,
        wire: &mut dyn Wire,
        call: &Call,
        in_doubt: bool,
    ) -> Result<Answer, Failure> {
        Ok(match call {
            Call::Join(claim, mode) => self.join(wire, claim, *mode).await?,
            Call::Take(claim) => Answer::Taken(self.take(wire, claim).await?),
            Call::Release(claim) => Answer::Left(self.release(wire, claim).await?),
            Call::RenewUnlocked(renewals) => {
                Answer::RenewedUnlocked(self.renew_unlocked(wire, renewals).await?)
            }
            Call::Renew(renewals) => {
                let Some(first) = renewals.first() else { return Ok(Answer::Renewed(Vec::new())) };
                let name = &first.claim.name;
                let renewed = self.section(wire, name, ReadScope::All, None, |loaded| {
                    let now = loaded.now;
                    renewals.iter().map(|r| renew(&mut loaded.queue, r, now)).collect()
                });
                let lost = || vec![Renewal::Lost; renewals.len()];
                Answer::Renewed(renewed.await?.unwrap_or_else(lost))
            }
            Call::Leave(claim, keep, hint) => {
                Answer::Left(self.leave(wire, claim, *keep, *hint).await? || in_doubt)
            }
            Call::Convert(claim) => {
                let scope = ReadScope::FrontAnd(claim.id);
                let converted = self.section(wire, &claim.name, scope, None, |loaded| {
                    let now = loaded.now;
                    loaded.queue.convert(claim, now)
                });
                Answer::Converted(converted.await?.unwrap_or(Converted::Lost))
            }
            Call::Read(name) => Answer::Read(self.read_all(wire, name).await?),
            Call::Holders(name) => Answer::Read(self.read_holders(wire, name).await?),
            Call::List(prefix) => {
                let rows = wire.rows(&self.sql.list, vec![Arg::Name(prefix.clone())]).await?;
                let mut all = queue_snapshot::snapshots(rows)?;
                all.retain(|(name, _)| name.as_str().starts_with(prefix));
                all.sort_by(|(a, _), (b, _)| a.cmp(b));
                let shown = all.iter_mut().filter_map(|(name, loaded)| describe(name, loaded));
                Answer::Listed(shown.collect())
            }
            Call::Evict(name, which) => {
                let evicted = self.section(wire, name, ReadScope::All, None, |loaded| {
                    loaded.queue.evict(*which, loaded.now)
                });
                let evicted = evicted.await?.unwrap_or_default();
                #[cfg(feature = "sqlite")]
                self.notify_evicted(evicted.iter().map(|entry| entry.id).collect()).await;
                Answer::Evicted(evicted.len())
            }
            Call::Settle(name) => {
                let settled = self.section(wire, name, ReadScope::All, None, |loaded| {
                    let now = loaded.now;
                    loaded.queue.settle(now);
                });
                settled.await?;
                Answer::Settled
            }
        })
    }

    async fn read_all(
        &self,
        wire: &mut dyn Wire,
        name: &Name,
    ) -> Result<Option<LockInfo>, Failure> {
        let mut loaded = self.snapshot(wire, name).await?;
        Ok(loaded.as_mut().and_then(|loaded| describe(name, loaded)))
    }

    /// Reads the front of the queue if a claim in it waits, because all claims after a waiter wait
    /// too. Otherwise reads the whole queue.
    async fn read_holders(
        &self,
        wire: &mut dyn Wire,
        name: &Name,
    ) -> Result<Option<LockInfo>, Failure> {
        // No claim has the ID 0.
        let no_claim = ClaimId::from_u128(0);
        let mut front = queue_snapshot::read_front(wire, &self.sql, name, no_claim).await?;
        let lock = front.as_mut().and_then(|loaded| describe(name, loaded));
        match front.is_none_or(|loaded| loaded.is_enough()) {
            true => Ok(lock),
            false => self.read_all(wire, name).await,
        }
    }

    pub(super) async fn snapshot(
        &self,
        wire: &mut dyn Wire,
        name: &Name,
    ) -> Result<Option<QueueSnapshot>, Failure> {
        let rows = wire.rows(&self.sql.read, vec![Arg::Name(name.as_str().into())]).await?;
        queue_snapshot::snapshot(rows)
    }
}

/// Runs a call's work, and returns `None` if it takes longer than [`LIMIT`].
///
/// If it takes longer than [`SLOW`], the connections may be dead. The idle ones are then dropped,
/// so that the next caller gets one that works.
pub(super) async fn in_time<T>(pool: &Pool, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    if let Ok(done) = tokio::time::timeout(SLOW, work.as_mut()).await {
        return Some(done);
    }
    pool.forget_idle();
    tokio::time::timeout(LIMIT.saturating_sub(SLOW), work).await.ok()
}

/// Renews a claim. The remaining time is at most the requested lease, because the row may contain a
/// later end if the clock was set back.
fn renew(queue: &mut Queue, Renew { claim, lease }: &Renew, now: u64) -> Renewal {
    match queue.renew(claim, *lease, now) {
        Renewal::Holding { token, remaining } => {
            Renewal::Holding { token, remaining: remaining.map(|left| left.min(*lease)) }
        }
        other => other,
    }
}

/// Returns the queue for display, or `None` if it has no claims. The queue is settled, but nothing
/// is written.
fn describe(name: &Name, loaded: &mut QueueSnapshot) -> Option<LockInfo> {
    let now = loaded.now;
    let queue = &mut loaded.queue;
    queue.settle(now);
    let info = LockInfo::new(name.clone(), queue.kind(), queue.capacity(), queue.claims(now));
    (!info.claims.is_empty()).then_some(info)
}

/// Returns the error for a reply that belongs to another call.
pub(super) fn out_of_step<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Corrupt, "internal error: the store's reply belongs to another call")
        .with_hint("report this as a bug"))
}

/// Waits between two tries. The pause grows with each try and is random, so that transactions that
/// conflicted once do not conflict forever.
pub(super) async fn pause(tries: u32) {
    let spread = ClaimId::random().map_or(0, |id| (id.as_u128() % 1_000) as u64);
    let most = 1_000 << tries.min(5);
    tokio::time::sleep(Duration::from_micros(500 + most * spread / 1_000)).await;
}
