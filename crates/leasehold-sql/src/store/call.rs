//! Runs one call on a connection from the pool, with retries.
//!
//! A call that the database rolled back because of other transactions is retried. A broken
//! connection is replaced. The claim's ID alone decides every call, so repeating it is harmless.
//! Only `leave` must recognize a repetition, so `in_doubt` marks a call that may be the second one.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;

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
use leasehold_core::{Claim, ClaimId, Name, Result};

/// A function that returns whether no caller waits for the reply any more.
pub(super) type IsCancelled<'a> = &'a (dyn Fn() -> bool + Send + Sync);

/// How a call is sent: on which connections, and whether it may be repeated.
#[derive(Clone, Copy)]
struct Lane<'a> {
    pool: &'a Pool,
    /// Limits how many calls of this kind run at the same time.
    turns: Option<&'a Semaphore>,
    /// Whether the call may be sent again if it may have been executed.
    is_repeatable: bool,
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

impl Shared {
    /// Runs `work` on a connection, with retries while the caller waits for the result. A caller
    /// that gets no reply calls again. `work` returns its result and the connection. Its second
    /// argument is whether an earlier attempt may have been executed.
    async fn retry<T, F>(
        &self,
        lane: Lane<'_>,
        is_cancelled: IsCancelled<'_>,
        work: impl Fn(Pooled, bool) -> F,
    ) -> Result<T>
    where
        F: Future<Output = (Result<T, Failure>, Pooled)>,
    {
        let Lane { pool, turns, is_repeatable } = lane;
        let _turn = match turns {
            Some(turns) => turns.acquire().await.ok(),
            None => None,
        };
        let (mut tries, mut replaced, mut in_doubt) = (0, 0, false);
        loop {
            let pooled = pool.take().await;
            let pooled = pooled.map_err(|error| Failure::from(error).into_error())?;
            if is_cancelled() {
                pool.put(pooled);
                return Err(given_up());
            }
            tries += 1;
            let Some((done, pooled)) = in_time(pool, work(pooled, in_doubt)).await else {
                return Err(no_answer());
            };
            match done {
                Ok(done) => {
                    pool.put(pooled);
                    return Ok(done);
                }
                // Retries on another connection. The server has probably closed this one while it
                // was idle, or a statement of its transaction had failed before, so that nothing
                // was done.
                Err(Failure::Broken(error))
                    if (pooled.used || fault::had_failed_before(&error))
                        && replaced < 2
                        && is_repeatable =>
                {
                    in_doubt |= !fault::had_failed_before(&error);
                    replaced += 1;
                }
                // The client's other idle connections lead to the same changed database.
                Err(Failure::Changed(error)) => {
                    self.pool.forget_idle();
                    self.renewal_pool.forget_idle();
                    replaced += 1;
                    if replaced > 2 || !is_repeatable {
                        return Err(error);
                    }
                }
                Err(Failure::ReadOnly(error)) => {
                    self.pool.forget_idle();
                    self.renewal_pool.forget_idle();
                    return Err(fault::replaced(&error));
                }
                Err(Failure::Conflict(error)) => {
                    self.undo(pool, pooled).await;
                    if tries >= TRIES {
                        return Err(Failure::Conflict(error).into_error());
                    }
                    pause(tries).await;
                }
                Err(failure) => return Err(failure.into_error()),
            }
        }
    }

    /// Returns the connections for calls other than renewals.
    fn call_lane(&self) -> Lane<'_> {
        Lane { pool: &self.pool, turns: None, is_repeatable: true }
    }

    /// Returns the connections for joins, which must not occupy all connections. A release must not
    /// wait for a thousand joins.
    fn join_lane(&self) -> Lane<'_> {
        Lane { turns: Some(&self.joining), ..self.call_lane() }
    }

    /// Returns the connections for renewals. A holder's renewal must not wait for the heartbeats of
    /// waiters, so these take turns.
    fn renewal_lane(&self, all: &[Renew]) -> Lane<'_> {
        let only_waiters = all.iter().all(|renewal| self.waiters.has(renewal.claim.id));
        let turns = only_waiters.then_some(&self.waiting);
        Lane { pool: &self.renewal_pool, turns, is_repeatable: true }
    }

    /// Runs a join that has [begun](super::in_flight_joins::InFlightJoins::begin). If its claim was
    /// given up in the meantime, the claim leaves again.
    pub(super) async fn join_or_leave(
        &self,
        claim: Claim,
        mode: Mode,
        is_cancelled: IsCancelled<'_>,
    ) -> Result<Joined> {
        let id = claim.id;
        let sent = AtomicBool::new(false);
        let record_sent = || {
            let cancelled = is_cancelled();
            sent.fetch_or(!cancelled, Ordering::SeqCst);
            cancelled
        };
        let wanted = &claim;
        let turn = self.joins_of_lock.take(&claim.name).await;
        let join =
            |mut on: Pooled, _| async move { (self.join(&mut *on.wire, wanted, mode).await, on) };
        let done = self.retry(self.join_lane(), &record_sent, join).await.flatten();
        drop(turn);
        let waits = matches!(done, Ok(Joined::Waiting(_)));
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
    async fn leave_given_up(&self, claim: Claim, last: LastJoin) {
        let is_removed = !last.may_exist
            || self.leave_by_call(&claim, None, ReleaseHint::Waiting, &|| false).await.is_ok();
        last.removed(is_removed);
    }

    async fn leave_by_call(
        &self,
        claim: &Claim,
        keep: Option<Duration>,
        hint: ReleaseHint,
        is_cancelled: IsCancelled<'_>,
    ) -> Result<bool> {
        let leave = |mut on: Pooled, in_doubt| async move {
            let left = self.leave(&mut *on.wire, claim, keep, hint).await;
            (left.map(|left| left || in_doubt), on)
        };
        self.retry(self.call_lane(), is_cancelled, leave).await
    }

    /// Sends a `leave`, and passes its result to callers that have repeated the request.
    pub(super) async fn leave_first(
        &self,
        claim: Claim,
        keep: Option<Duration>,
        hint: ReleaseHint,
        first: &FirstLeave,
    ) -> Result<bool> {
        let left = self.leave_by_call(&claim, keep, hint, &|| first.is_overtaken()).await?;
        first.answered(left);
        Ok(left)
    }

    /// Renews claims without locking their locks' rows.
    pub(super) async fn renew_rows(&self, renewals: &[Renew]) -> Result<Vec<UnlockedRenewal>> {
        let renew = |mut on: Pooled, _| async move {
            (self.renew_unlocked(&mut *on.wire, renewals).await, on)
        };
        self.retry(self.renewal_lane(renewals), &|| false, renew).await
    }

    /// Renews claims of one lock with its row locked, and settles its queue.
    pub(super) async fn renew_in_section(
        &self,
        name: &Name,
        renewals: &[Renew],
        is_cancelled: IsCancelled<'_>,
    ) -> Result<Vec<Renewal>> {
        let renew = |mut on: Pooled, _| async move {
            let renewed = self.section(&mut *on.wire, name, ReadScope::All, None, |loaded| {
                let now = loaded.now;
                loaded.queue.settle(now);
                renewals.iter().map(|r| renew(&mut loaded.queue, r, now)).collect()
            });
            (renewed.await, on)
        };
        let renewed = self.retry(self.call_lane(), is_cancelled, renew).await?;
        Ok(renewed.unwrap_or_else(|| vec![Renewal::Lost; renewals.len()]))
    }

    pub(super) async fn convert(
        &self,
        claim: &Claim,
        is_cancelled: IsCancelled<'_>,
    ) -> Result<Converted> {
        let scope = ReadScope::FrontAnd(claim.id);
        let convert = |mut on: Pooled, _| async move {
            let converted = self.section(&mut *on.wire, &claim.name, scope, None, |loaded| {
                let now = loaded.now;
                loaded.queue.convert(claim, now)
            });
            (converted.await, on)
        };
        let converted = self.retry(self.call_lane(), is_cancelled, convert).await?;
        Ok(converted.unwrap_or(Converted::Lost))
    }

    pub(super) async fn read(
        &self,
        name: &Name,
        is_cancelled: IsCancelled<'_>,
    ) -> Result<Option<LockInfo>> {
        let read =
            |mut on: Pooled, _| async move { (self.read_all(&mut *on.wire, name).await, on) };
        self.retry(self.call_lane(), is_cancelled, read).await
    }

    /// Reads a lock like [`read`](Self::read), but may omit waiters.
    pub(super) async fn holders(
        &self,
        name: &Name,
        is_cancelled: IsCancelled<'_>,
    ) -> Result<Option<LockInfo>> {
        let read =
            |mut on: Pooled, _| async move { (self.read_holders(&mut *on.wire, name).await, on) };
        self.retry(self.call_lane(), is_cancelled, read).await
    }

    pub(super) async fn list(
        &self,
        prefix: &str,
        is_cancelled: IsCancelled<'_>,
    ) -> Result<Vec<LockInfo>> {
        let list = |mut on: Pooled, _| async move {
            let rows = on.wire.rows(&self.sql.list, vec![Arg::Name(prefix.to_owned())]).await;
            (rows.map_err(Failure::from).and_then(queue_snapshot::snapshots), on)
        };
        let mut all = self.retry(self.call_lane(), is_cancelled, list).await?;
        all.retain(|(name, _)| name.as_str().starts_with(prefix));
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(all.iter_mut().filter_map(|(name, loaded)| describe(name, loaded)).collect())
    }

    /// Evicts claims. The call is sent once, because a repeated one could hit the next holder.
    pub(super) async fn evict(
        &self,
        name: &Name,
        which: Evict,
        is_cancelled: IsCancelled<'_>,
    ) -> Result<usize> {
        let evict = |mut on: Pooled, _| async move {
            let evicted = self.section(&mut *on.wire, name, ReadScope::All, None, |loaded| {
                loaded.queue.evict(which, loaded.now)
            });
            (evicted.await, on)
        };
        let lane = Lane { is_repeatable: false, ..self.call_lane() };
        let evicted = self.retry(lane, is_cancelled, evict).await?.unwrap_or_default();
        #[cfg(feature = "sqlite")]
        self.notify_evicted(evicted.iter().map(|entry| entry.id).collect()).await;
        Ok(evicted.len())
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
async fn in_time<T>(pool: &Pool, work: impl Future<Output = T>) -> Option<T> {
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

/// Waits between two tries. The pause grows with each try and is random, so that transactions that
/// conflicted once do not conflict forever.
pub(super) async fn pause(tries: u32) {
    let spread = ClaimId::random().map_or(0, |id| (id.as_u128() % 1_000) as u64);
    let most = 1_000 << tries.min(5);
    tokio::time::sleep(Duration::from_micros(500 + most * spread / 1_000)).await;
}
