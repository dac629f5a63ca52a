//! `replicas=N`: a client relies on a grant only once N replicas have it.
//!
//! Redis replies before its replicas have a write. A fail-over to a replica that lacks the grant
//! loses it. `WAIT` returns how many replicas have the writes of its own connection, and blocks
//! that connection while it waits.
//!
//! So there is one separate connection to each server, on which many grants are confirmed together.
//! It checks that the server (still) has the grants, writes a key, and waits until enough replicas
//! have that write. They then also have everything that was written before.
//!
//! The result for a claim is kept until the claim is released. Its heartbeat and all other requests
//! for it get the same result, so they cannot contradict each other. If the server fails over or
//! pauses meanwhile, there is no result, and the next request queries the master again.
//!
//! This narrows the gap but does not close it, because another replica may be promoted. A pushed
//! grant is only a hint: the waiter polls, and the replicas confirm the grant before the poll is
//! answered.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::{Pipeline, RedisError, RedisResult, Value};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::connection::Node;
use super::fault::{self, Refusal};
use super::keys::Keys;
use super::request::sleep;
use super::servers::Servers;
use super::url::{Address, Login, Replicas, Shortfall};

use leasehold_core::{Claim, ClaimId, Error, ErrorKind, Kind, Result};

/// Divisor of a waiter's lease that limits how long one heartbeat waits for replicas, because other
/// claims wait for it. The next heartbeat checks again.
const PART: u32 = 8;
/// Extra time to connect and to reply, beyond the time for the replicas.
const CONNECTING: Duration = Duration::from_secs(1);

/// Confirmation of the grants of one client.
#[derive(Debug)]
pub(super) struct ReplicaConfirmations {
    wanted: Replicas,
    servers: Arc<Servers>,
    login: Login,
    runtime: Handle,
    groups: Mutex<HashMap<Address, Arc<Group>>>,
    /// Confirmations by claim, finished or pending. A heartbeat waits for only a part of the time,
    /// and the next one continues to wait.
    confirmations: Mutex<HashMap<ClaimId, Confirmation>>,
}

/// Number of replicas that have a grant, or `None` if the server does not have it.
type Reached = Result<Option<u32>, Unknown>;

/// Reason why the number of replicas is unknown: the kind of error, its text, and the hint.
type Unknown = (ErrorKind, String, Option<String>);

/// One grant that is being confirmed, which any number of calls can wait for.
#[derive(Clone, Debug)]
struct Confirmation {
    /// Server that was queried. Its result does not apply to another server.
    at: Address,
    reached: watch::Receiver<Option<Reached>>,
}

/// Grants that wait for the replicas of one server.
#[derive(Debug)]
struct Group {
    node: Arc<Node>,
    pending: Mutex<Pending>,
}

#[derive(Debug, Default)]
struct Pending {
    grants: Vec<Grant>,
    /// Whether a task is confirming grants.
    running: bool,
}

#[derive(Debug)]
struct Grant {
    /// Command that reads the grant from the server.
    read: redis::Cmd,
    /// Beginning of the reply if the server has the grant. After a fail-over, it may have another
    /// claim's grant.
    ours: String,
    /// Key in the same slot, which is written for `WAIT`.
    mark: String,
    result: watch::Sender<Option<Reached>>,
}

impl ReplicaConfirmations {
    pub(super) fn new(
        wanted: Replicas,
        login: &Login,
        servers: &Arc<Servers>,
        runtime: &Handle,
    ) -> Self {
        Self {
            wanted,
            servers: servers.clone(),
            login: login.clone(),
            runtime: runtime.clone(),
            groups: Mutex::default(),
            confirmations: Mutex::default(),
        }
    }

    /// Returns how long a grant may wait for the replicas. An earlier batch and the grant's own
    /// batch each take up to half of that.
    pub(super) fn within(&self) -> Duration {
        (self.wanted.within + CONNECTING) * 2
    }

    /// Rejects a lease that can expire before it is clear that too few replicas respond, if the
    /// lock is then to be held anyway ([`Shortfall::Accept`]). No client could then hold the lock
    /// while replicas are missing.
    pub(super) fn check(&self, claim: &Claim) -> Result<()> {
        let Replicas { within, short, .. } = self.wanted;
        if short == Shortfall::Refuse || claim.lease >= within * 3 {
            return Ok(());
        }
        let what = format!(
            "a lease of {:?} can expire while leasehold waits {within:?} for replicas",
            claim.lease
        );
        let hint =
            format!("use a lease of at least {:?}, or lower replicas_ms in the URL", within * 3);
        Err(Error::new(ErrorKind::Config, what).with_hint(hint))
    }

    /// Limits a call to the time that it would have without replicas.
    pub(super) async fn limited<T>(
        &self,
        limit: Duration,
        answer: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        tokio::select! {
            biased;
            answer = answer => answer,
            () = sleep(&self.runtime, limit) => Err(Error::no_reply(limit)),
        }
    }

    /// Waits until enough replicas have this claim's grant.
    pub(super) async fn grant(&self, claim: &Claim, keys: &Keys) -> Result<()> {
        self.result(self.begin(claim, keys).await?).await
    }

    /// Waits for many grants concurrently, each with its own result. If some take too long for the
    /// other claims, their result is unknown until the next request.
    pub(super) async fn all(&self, grants: &[(&Claim, Keys)]) -> Vec<Result<()>> {
        let mut started = Vec::with_capacity(grants.len());
        for (claim, keys) in grants {
            started.push(self.begin(claim, keys).await);
        }
        let shortest = grants.iter().map(|(claim, _)| claim.waiter_lease).min();
        let mut limit = pin!(sleep(&self.runtime, shortest.unwrap_or_default() / PART));
        let (mut late, mut all) = (false, Vec::with_capacity(started.len()));
        for confirmation in started {
            let confirmation = match confirmation {
                Ok(confirmation) => confirmation,
                Err(error) => {
                    all.push(Err(error));
                    continue;
                }
            };
            let result = tokio::select! {
                biased;
                result = self.result(confirmation) => Some(result),
                () = std::future::ready(()), if late => None,
                () = &mut limit, if !late => None,
            };
            all.push(result.unwrap_or_else(|| {
                late = true;
                let what = "granted, but the replicas have not confirmed it yet";
                Err(Error::new(ErrorKind::Unreachable, what))
            }));
        }
        all
    }

    /// Starts to confirm a grant together with others, unless that has already been started.
    async fn begin(&self, claim: &Claim, keys: &Keys) -> Result<Confirmation> {
        let node = self.servers.node(keys.slot).await.map_err(|e| fault::explain(&e))?;
        let group = self.group(node.address())?;
        let (result, reached) = watch::channel(None);
        let confirmation = Confirmation { at: node.address().clone(), reached };
        {
            let mut all = locked(&self.confirmations);
            match all.get(&claim.id) {
                Some(before) if before.at == confirmation.at && before.is_of_use() => {
                    return Ok(before.clone());
                }
                _ => drop(all.insert(claim.id, confirmation.clone())),
            }
        }
        let (read, ours) = read_command(claim, keys);
        let grant = Grant { read, ours, mark: keys.mark(), result };
        let start = {
            let mut pending = locked(&group.pending);
            pending.grants.push(grant);
            !std::mem::replace(&mut pending.running, true)
        };
        if start {
            let wanted = self.wanted;
            drop(self.runtime.spawn(async move { group.work(wanted).await }));
        }
        Ok(confirmation)
    }

    /// Waits for the result of a confirmation, and fails if it is not sufficient.
    async fn result(&self, mut confirmation: Confirmation) -> Result<()> {
        let found = confirmation.reached.wait_for(Option::is_some).await.map(|found| found.clone());
        let Ok(Some(reached)) = found else {
            let what = "the runtime of this client was shut down";
            return Err(Error::new(ErrorKind::Closed, what).with_hint("connect again"));
        };
        let reached = reached.map_err(|(kind, what, hint)| {
            let error = Error::new(kind, what);
            match hint {
                Some(hint) => error.with_hint(hint),
                None => error,
            }
        })?;
        let Replicas { count, within, short } = self.wanted;
        let Some(reached) = reached else {
            let what = "granted, but the server lost the grant before replicas confirmed it \
                        (fail-over or eviction)";
            return Err(Error::new(ErrorKind::Unconfirmed, what).with_hint("retry"));
        };
        if reached < count && short == Shortfall::Refuse {
            let what = format!(
                "only {reached} of {count} replicas confirmed the grant within {within:?}, so the \
                 lock was released"
            );
            let hint = "check the replicas, or lower replicas=N or raise replicas_ms in the URL";
            return Err(Error::new(ErrorKind::Unconfirmed, what).with_hint(hint));
        }
        Ok(())
    }

    /// Returns how many replicas had this claim's grant when it was confirmed.
    pub(super) fn reached(&self, id: ClaimId) -> Option<u32> {
        match &*locked(&self.confirmations).get(&id)?.reached.borrow() {
            Some(Ok(reached)) => *reached,
            _ => None,
        }
    }

    /// Removes the confirmation of this claim's grant.
    pub(super) fn forget(&self, id: ClaimId) {
        locked(&self.confirmations).remove(&id);
    }

    fn group(&self, at: &Address) -> Result<Arc<Group>> {
        let mut groups = locked(&self.groups);
        if let Some(group) = groups.get(at) {
            return Ok(group.clone());
        }
        let node = Node::new(at.clone(), &self.login, &self.runtime, None, None)?;
        let group = Arc::new(Group { node, pending: Mutex::default() });
        groups.insert(at.clone(), group.clone());
        Ok(group)
    }
}

impl Confirmation {
    /// Returns whether the result is pending or final. A failed query has to be repeated.
    fn is_of_use(&self) -> bool {
        match &*self.reached.borrow() {
            Some(found) => found.is_ok(),
            None => self.reached.has_changed().is_ok(),
        }
    }
}

/// Returns the command that reads a grant, and the beginning of its reply if the server has the
/// grant.
fn read_command(claim: &Claim, keys: &Keys) -> (redis::Cmd, String) {
    match claim.kind {
        Kind::Mutex if claim.capacity == 1 => {
            let mut cmd = redis::cmd("GETRANGE");
            cmd.arg(&keys.main).arg(0).arg(32);
            (cmd, format!("{} ", claim.id.to_hex()))
        }
        _ => {
            let mut cmd = redis::cmd("HGET");
            cmd.arg(keys.meta()).arg(claim.id.to_hex());
            (cmd, "h ".into())
        }
    }
}

impl Group {
    /// Confirms grants until none are pending.
    async fn work(&self, wanted: Replicas) {
        loop {
            let grants = {
                let mut pending = locked(&self.pending);
                if pending.grants.is_empty() {
                    pending.running = false;
                    return;
                }
                std::mem::take(&mut pending.grants)
            };
            // The time to connect, at the first use, must not count as the replicas' delay.
            let limit = wanted.within + CONNECTING;
            let confirmed = tokio::time::timeout(limit, self.confirm(&grants, wanted)).await;
            let reached = match confirmed {
                Ok(Ok(answers)) => reached(&answers, &grants),
                Ok(Err(error)) => vec![Err(unknown(&error)); grants.len()],
                // The server may have the grant, but no replica is known to have it.
                Err(_) if wanted.short == Shortfall::Accept => vec![Ok(Some(0)); grants.len()],
                Err(_) => {
                    let what = "the server did not report in time how many replicas have the grant";
                    vec![Err((ErrorKind::Unreachable, what.to_owned(), None)); grants.len()]
                }
            };
            grants.into_iter().zip(reached).for_each(|(grant, reached)| grant.report(reached));
        }
    }

    async fn confirm(&self, grants: &[Grant], wanted: Replicas) -> RedisResult<Vec<Value>> {
        let mut pipeline = Pipeline::new();
        for grant in grants {
            pipeline.add_command(grant.read.clone());
        }
        if let Some(grant) = grants.first() {
            pipeline.cmd("SET").arg(&grant.mark).arg("").arg("PX").arg(60_000);
        }
        pipeline.cmd("WAIT").arg(wanted.count);
        pipeline.arg(u64::try_from(wanted.within.as_millis()).unwrap_or(1_000));
        self.node.pipeline(&pipeline).await
    }
}

impl Grant {
    fn report(self, reached: Reached) {
        // The waiting calls may have been dropped.
        let _ = self.result.send(Some(reached));
    }
}

/// Converts an error to the reason why the result for a grant is unknown. A server that is no
/// longer the master of its slot cannot give a result, and the next master is queried.
fn unknown(error: &RedisError) -> Unknown {
    let moved = matches!(
        fault::refusal(error),
        Some(Refusal::Moved | Refusal::Ask | Refusal::TryAgain | Refusal::ReadOnly)
    );
    if moved {
        let what = "granted, but the server is no longer the master of this lock";
        return (ErrorKind::Unreachable, what.into(), None);
    }
    let error = fault::explain(error);
    (error.kind(), error.reason(), error.hint().map(str::to_owned))
}

/// Returns how many replicas have each grant, from the replies to one batch.
fn reached(answers: &[Value], grants: &[Grant]) -> Vec<Reached> {
    let [looks @ .., wrote, waited] = answers else { return vec![Ok(None); grants.len()] };
    // If the write failed, WAIT waited for an earlier write.
    let waited = wrote.clone().extract_error().and_then(|_| waited.clone().extract_error());
    let waited = match waited {
        Ok(Value::Int(n)) => Ok(u32::try_from(n).unwrap_or(0)),
        Ok(_) => Ok(0),
        Err(error) => Err(unknown(&error)),
    };
    let reached = |(reply, grant): (&Value, &Grant)| match reply.clone().extract_error() {
        Ok(Value::BulkString(found)) if found.starts_with(grant.ours.as_bytes()) => {
            waited.clone().map(Some)
        }
        Ok(_) => Ok(None),
        Err(error) => Err(unknown(&error)),
    };
    looks.iter().zip(grants).map(reached).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::values::values;

    proptest! {
        #![proptest_config(testbed::cases())]

        /// No reply, however damaged, may count as more replicas than it contains.
        #[test]
        fn confirmed_replicas_never_exceed_the_reported_number(answers in proptest::collection::vec(
            values(&["17 ours", "17", "OK", ""]), 0..6,
        )) {
            let grant = |ours: &str| Grant {
                read: redis::Cmd::new(),
                ours: ours.into(),
                mark: String::new(),
                result: watch::Sender::new(None),
            };
            let grants = [grant("17 "), grant("18 ")];
            let most = answers.last().and_then(|reply| match reply {
                Value::Int(n) => u32::try_from(*n).ok(),
                _ => None,
            });
            for reached in reached(&answers, &grants).into_iter().flatten().flatten() {
                prop_assert!(reached <= most.unwrap_or(0));
            }
        }
    }
}
