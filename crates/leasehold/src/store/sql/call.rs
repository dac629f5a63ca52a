//! One call: as often as it takes, on a connection of the pool.
//!
//! What the database undid for others' sake is tried again; a connection that turns out to be dead
//! is replaced. Every call is decided by the claim's id alone, so that doing it twice is no harm; the
//! one that must tell the difference (`leave`) is told when it may be the second time.

use std::time::Duration;

use super::beat::Beaten;
use super::fault::Failure;
use super::loaded::{self, Loaded, Reach};
use super::wire::{Arg, Wire};
use super::{LIMIT, Shared, TRIES, no_answer};
use crate::claim::{Claim, ClaimId};
use crate::error::Result;
use crate::name::Name;
use crate::store::{Evict, Joined, LockInfo, Mode, Renew, Renewal};

/// One call.
#[derive(Clone, Debug)]
pub(super) enum Call {
    Join(Claim, Mode),
    Beat(Vec<Renew>),
    /// Renewals on one lock, with its row locked.
    Renew(Vec<Renew>),
    Leave(Claim, Option<Duration>),
    Read(Name),
    List(String),
    Evict(Name, Evict),
}

/// Its answer.
#[derive(Debug)]
pub(super) enum Answer {
    Joined(Joined),
    Beaten(Vec<Beaten>),
    Renewed(Vec<Renewal>),
    Left(bool),
    Read(Option<LockInfo>),
    Listed(Vec<LockInfo>),
    Evicted(usize),
}

impl Shared {
    /// One call, as often as it takes.
    pub(super) async fn call(&self, call: Call) -> Result<Answer> {
        let (mut tries, mut replaced, mut in_doubt) = (0, 0, false);
        loop {
            tries += 1;
            let pool = if matches!(call, Call::Beat(_)) { &self.beats } else { &self.pool };
            let mut pooled = match pool.take().await {
                Ok(pooled) => pooled,
                Err(error) => return Err(Failure::from(error).into_error()),
            };
            let done = self.perform(&mut *pooled.wire, &call, in_doubt);
            let failure = match tokio::time::timeout(LIMIT, done).await {
                Ok(Ok(answer)) => {
                    pool.put(pooled);
                    return Ok(answer);
                }
                Ok(Err(failure)) => failure,
                Err(_) => return Err(no_answer()),
            };
            match failure {
                // Closed by the server while it lay idle, as likely as not.
                Failure::Broken(_) if pooled.used && replaced < 2 => {
                    in_doubt = true;
                    replaced += 1;
                    pool.forget_idle();
                }
                Failure::Broken(error) => return Err(Failure::Broken(error).into_error()),
                Failure::Conflict(error) => {
                    // Ends the transaction; one that cannot be ended so ends with its connection.
                    if pooled.wire.raw("ROLLBACK").await.is_ok() {
                        pool.put(pooled);
                    }
                    if tries >= TRIES {
                        return Err(Failure::Conflict(error).into_error());
                    }
                    pause(tries).await;
                }
                Failure::Final(error) => return Err(error),
            }
        }
    }

    async fn perform(
        &self,
        wire: &mut dyn Wire,
        call: &Call,
        in_doubt: bool,
    ) -> Result<Answer, Failure> {
        Ok(match call {
            Call::Join(claim, mode) => Answer::Joined(self.join(wire, claim, *mode).await?),
            Call::Beat(renewals) => Answer::Beaten(self.beat(wire, renewals).await?),
            Call::Renew(renewals) => {
                let Some(first) = renewals.first() else { return Ok(Answer::Renewed(Vec::new())) };
                let name = &first.claim.name;
                let renewed = self.section(wire, name, Reach::All, None, |loaded| {
                    let now = loaded.now;
                    let renew = |r: &Renew| loaded.queue.renew(&r.claim, r.lease, now);
                    renewals.iter().map(renew).collect()
                });
                let lost = || vec![Renewal::Lost; renewals.len()];
                Answer::Renewed(renewed.await?.unwrap_or_else(lost))
            }
            Call::Leave(claim, keep) => {
                Answer::Left(self.leave(wire, claim, *keep).await? || in_doubt)
            }
            Call::Read(name) => {
                let mut loaded = self.snapshot(wire, name).await?;
                Answer::Read(loaded.as_mut().and_then(|loaded| describe(name, loaded)))
            }
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
                Answer::Evicted(evicted.await?.unwrap_or(0))
            }
        })
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

/// The queue as people see it: settled, though nothing is written.
fn describe(name: &Name, loaded: &mut Loaded) -> Option<LockInfo> {
    let now = loaded.now;
    let queue = &mut loaded.queue;
    queue.settle(now);
    let info = LockInfo::new(name.clone(), queue.kind(), queue.capacity(), queue.claims(now));
    (!info.claims.is_empty()).then_some(info)
}

/// Between tries: longer each time, and spread, so that those who met once do not meet for ever.
pub(super) async fn pause(tries: u32) {
    let spread = ClaimId::random().map_or(0, |id| (id.as_u128() % 1_000) as u64);
    let most = 1_000 << tries.min(5);
    tokio::time::sleep(Duration::from_micros(500 + most * spread / 1_000)).await;
}
