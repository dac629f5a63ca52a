//! One call: as often as it takes, on a connection of the pool.
//!
//! What the database undid for others' sake is tried again; a connection that turns out to be dead
//! is replaced. Every call is decided by the claim's id alone, so that doing it twice is no harm; the
//! one that must tell the difference (`leave`) is told when it may be the second time.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::SemaphorePermit;

use super::beat::Beaten;
use super::fault::{self, Failure, given_up, no_answer};
use super::leaves::First;
use super::limits::{LIMIT, SLOW, TRIES};
use super::loaded::{self, Loaded, Reach};
use super::pool::{Pool, Pooled};
use super::shared::Shared;
use super::url::is_file;
use super::wire::{Arg, Wire};
use leasehold_core::queue::Queue;
use leasehold_core::store::{Evict, Joined, LockInfo, Mode, Renew, Renewal, Reweighed};
use leasehold_core::{Claim, ClaimId, Error, ErrorKind, Name, Result, Token};

/// Whether nobody needs the answer any more.
pub(super) type Gone<'a> = &'a (dyn Fn() -> bool + Send + Sync);

/// One call.
#[derive(Clone, Debug)]
pub(super) enum Call {
    Join(Claim, Mode),
    /// A join by the one statement that takes a free lock.
    Take(Claim),
    /// A leave by the one statement that releases a lock which nobody waits for.
    Release(Claim),
    Beat(Vec<Renew>),
    /// Renewals on one lock, with its row locked.
    Renew(Vec<Renew>),
    Leave(Claim, Option<Duration>, Told),
    Reweigh(Claim),
    Read(Name),
    /// The same, but waiters may be left out.
    Holders(Name),
    List(String),
    Evict(Name, Evict),
    /// Removes what is over.
    Settle(Name),
}

/// What this client was told of a claim that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// Perhaps nothing: a join of it is under way, and leaves when it ends.
    Nothing,
    /// That it waits.
    Waits,
    /// That it holds, or whatever else.
    Whatever,
}

/// Its answer.
#[derive(Debug)]
pub(super) enum Answer {
    Joined(Joined),
    Taken(Option<Token>),
    /// A join that can never be.
    Refused(Error),
    Beaten(Vec<Beaten>),
    Renewed(Vec<Renewal>),
    Left(bool),
    Reweighed(Reweighed),
    Read(Option<LockInfo>),
    Listed(Vec<LockInfo>),
    Evicted(usize),
    Settled,
}

impl Shared {
    /// One call, as often as it takes, and as long as somebody wants to know: who does not get an
    /// answer asks again.
    pub(super) async fn call(&self, call: Call, gone: Gone<'_>) -> Result<Answer> {
        let pool = if matches!(call, Call::Beat(_)) { &self.beats } else { &self.pool };
        let _turn = self.turn(&call).await;
        let (mut tries, mut replaced, mut in_doubt) = (0, 0, false);
        loop {
            let pooled = pool.take().await;
            let mut pooled = pooled.map_err(|error| Failure::from(error).into_error())?;
            if gone() {
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
                // Closed by the server while it lay idle, as likely as not.
                // Retrying an eviction could hit the next holder.
                // One in whose transaction a statement failed before has done nothing.
                Some(Err(Failure::Broken(error)))
                    if (pooled.used || fault::had_failed_before(&error))
                        && replaced < 2
                        && !matches!(call, Call::Evict(..)) =>
                {
                    in_doubt |= !fault::had_failed_before(&error);
                    replaced += 1;
                }
                // Others of ours lead to the same place.
                Some(Err(Failure::Changed(error))) => {
                    self.pool.forget_idle();
                    self.beats.forget_idle();
                    replaced += 1;
                    if replaced > 2 || matches!(call, Call::Evict(..)) {
                        return Err(error);
                    }
                }
                Some(Err(Failure::ReadOnly(error))) => {
                    self.pool.forget_idle();
                    self.beats.forget_idle();
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

    /// A join that has [begun](super::joins::Joins::begin), and what becomes of it if its claim was given up
    /// meanwhile.
    pub(super) async fn join_or_leave(
        &self,
        claim: Claim,
        mode: Mode,
        gone: Gone<'_>,
    ) -> Result<Answer> {
        let id = claim.id;
        let sent = AtomicBool::new(false);
        let gone = || {
            let is_gone = gone();
            sent.fetch_or(!is_gone, Ordering::SeqCst);
            is_gone
        };
        let done = self.call(Call::Join(claim.clone(), mode), &gone).await;
        let ended = self.joins.end(id, matches!(done, Ok(Answer::Joined(Joined::Waiting(_)))));
        if ended.given_up && sent.into_inner() {
            // Unheard, the claim's lease says it later.
            let _ = self.call(Call::Leave(claim, None, Told::Waits), &|| false).await;
        }
        if ended.given_up || ended.idle {
            self.waiters.dismiss(id);
        }
        if ended.given_up { Err(given_up()) } else { done }
    }

    /// A leave in full, and what it says to those who asked for it again.
    pub(super) async fn leave_first(
        &self,
        claim: Claim,
        keep: Option<Duration>,
        told: Told,
        in_doubt: bool,
        first: &First,
    ) -> Result<bool> {
        let done = self.call(Call::Leave(claim, keep, told), &|| first.is_overtaken()).await?;
        let Answer::Left(left) = done else { return out_of_step() };
        first.answered(left || in_doubt);
        Ok(left || in_doubt)
    }

    /// What could fill a pool with calls of its kind takes turns, so that the others find room in it:
    /// a release must not stand behind a thousand joins, nor a holder's renewal behind waiters'.
    pub(super) async fn turn(&self, call: &Call) -> Option<SemaphorePermit<'_>> {
        let turns = match call {
            Call::Join(..) | Call::Take(_) => &self.joining,
            Call::Beat(all) if all.iter().all(|r| self.waiters.has(r.claim.id)) => &self.waiting,
            _ => return None,
        };
        turns.acquire().await.ok()
    }

    /// Ends the transaction; one that cannot be ended so ends with its connection.
    async fn undo(&self, pool: &Pool, mut pooled: Pooled) {
        match tokio::time::timeout(LIMIT, pooled.wire.raw("ROLLBACK")).await {
            Ok(Ok(())) => pool.put(pooled),
            // SQLite: there was none.
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
            Call::Beat(renewals) => Answer::Beaten(self.beat(wire, renewals).await?),
            Call::Renew(renewals) => {
                let Some(first) = renewals.first() else { return Ok(Answer::Renewed(Vec::new())) };
                let name = &first.claim.name;
                let renewed = self.section(wire, name, Reach::All, None, |loaded| {
                    let now = loaded.now;
                    renewals.iter().map(|r| renew(&mut loaded.queue, r, now)).collect()
                });
                let lost = || vec![Renewal::Lost; renewals.len()];
                Answer::Renewed(renewed.await?.unwrap_or_else(lost))
            }
            Call::Leave(claim, keep, told) => {
                Answer::Left(self.leave(wire, claim, *keep, *told).await? || in_doubt)
            }
            Call::Reweigh(claim) => {
                let reach = Reach::FrontAnd(claim.id);
                let reweighed = self.section(wire, &claim.name, reach, None, |loaded| {
                    let now = loaded.now;
                    loaded.queue.reweigh(claim, now)
                });
                Answer::Reweighed(reweighed.await?.unwrap_or(Reweighed::Lost))
            }
            Call::Read(name) => Answer::Read(self.read_all(wire, name).await?),
            Call::Holders(name) => Answer::Read(self.read_holders(wire, name).await?),
            Call::List(prefix) => {
                let rows = wire.rows(&self.sql.list, vec![Arg::Name(prefix.clone())]).await?;
                let mut all = loaded::snapshots(rows)?;
                all.retain(|(name, _)| name.as_str().starts_with(prefix));
                all.sort_by(|(a, _), (b, _)| a.cmp(b));
                let shown = all.iter_mut().filter_map(|(name, loaded)| describe(name, loaded));
                Answer::Listed(shown.collect())
            }
            Call::Evict(name, which) => {
                let evicted = self.section(wire, name, Reach::All, None, |loaded| {
                    loaded.queue.evict(*which, loaded.now)
                });
                let evicted = evicted.await?.unwrap_or_default();
                #[cfg(feature = "sqlite")]
                self.ring_evicted(evicted.iter().map(|entry| entry.id).collect()).await;
                Answer::Evicted(evicted.len())
            }
            Call::Settle(name) => {
                let settled = self.section(wire, name, Reach::All, None, |loaded| {
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

    /// The front of the queue, if a claim in it still waits: those behind it do so, too.
    async fn read_holders(
        &self,
        wire: &mut dyn Wire,
        name: &Name,
    ) -> Result<Option<LockInfo>, Failure> {
        // No claim has this id.
        let no_claim = ClaimId::from_u128(0);
        let mut front = loaded::look(wire, &self.sql, name, no_claim).await?;
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
    ) -> Result<Option<Loaded>, Failure> {
        let rows = wire.rows(&self.sql.read, vec![Arg::Name(name.as_str().into())]).await?;
        loaded::snapshot(rows)
    }
}

/// A call's work, if it comes to an end in time. One that takes longer than most has perhaps been sent
/// into the void: whoever comes next gets a connection that is known to lead somewhere.
pub(super) async fn in_time<T>(pool: &Pool, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    if let Ok(done) = tokio::time::timeout(SLOW, work.as_mut()).await {
        return Some(done);
    }
    pool.forget_idle();
    tokio::time::timeout(LIMIT.saturating_sub(SLOW), work).await.ok()
}

/// No longer than was asked for: by a clock that was set back, more may be left.
fn renew(queue: &mut Queue, Renew { claim, lease }: &Renew, now: u64) -> Renewal {
    match queue.renew(claim, *lease, now) {
        Renewal::Holding { token, remaining } => {
            Renewal::Holding { token, remaining: remaining.map(|left| left.min(*lease)) }
        }
        other => other,
    }
}

/// The queue as people see it: settled, though nothing is written.
fn describe(name: &Name, loaded: &mut Loaded) -> Option<LockInfo> {
    let now = loaded.now;
    let queue = &mut loaded.queue;
    queue.settle(now);
    let info = LockInfo::new(name.clone(), queue.kind(), queue.capacity(), queue.claims(now));
    (!info.claims.is_empty()).then_some(info)
}

/// The error for an answer that belongs to another call.
pub(super) fn out_of_step<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Corrupt, "internal error: the store's reply belongs to another call")
        .with_hint("report this as a bug"))
}

/// Between tries: longer each time, and spread, so that those who met once do not meet for ever.
pub(super) async fn pause(tries: u32) {
    let spread = ClaimId::random().map_or(0, |id| (id.as_u128() % 1_000) as u64);
    let most = 1_000 << tries.min(5);
    tokio::time::sleep(Duration::from_micros(500 + most * spread / 1_000)).await;
}
