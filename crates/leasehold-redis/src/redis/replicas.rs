//! `replicas=N`: a grant counts once N replicas have it.
//!
//! Redis answers before its replicas know, and a fail-over to one that does not know loses the grant.
//! `WAIT` tells how many replicas have what *its own connection* wrote, and stalls that connection
//! meanwhile. So there is one connection for it to each server, on which many grants are confirmed at
//! once: it looks whether the server (still) has them, writes something itself, and waits until
//! that is known by enough replicas; what was written before is known by them too.
//!
//! What was found for a claim stands until the claim leaves: its heartbeat and whoever asks out of turn
//! are told the same, and neither can be refused what the other was granted. A server that fails over
//! or stands still meanwhile has found nothing, and is asked again.
//!
//! This narrows the gap, and does not close it: the replica that is promoted may be another. A pushed
//! grant is an invitation only; whoever it is for asks, and that is confirmed before the answer.

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

/// Which part of a waiter's lease one heartbeat may wait for replicas, for whom others wait in turn; the
/// next one asks again.
const PART: u32 = 8;
/// How much longer an answer may take than the replicas.
const CONNECTING: Duration = Duration::from_secs(1);

/// Confirms the grants of one client.
#[derive(Debug)]
pub(super) struct Confirm {
    wanted: Replicas,
    servers: Arc<Servers>,
    login: Login,
    runtime: Handle,
    groups: Mutex<HashMap<Address, Arc<Group>>>,
    /// What was asked, and found or not yet: a heartbeat waits for a part of the time only, and the next
    /// one goes on.
    asked: Mutex<HashMap<ClaimId, Asked>>,
}

/// How many replicas have a grant; `None` if the server has not.
type Reached = Result<Option<u32>, Unknown>;

/// Why it is not known how many replicas have a grant: the kind, what went wrong, and the hint.
type Unknown = (ErrorKind, String, Option<String>);

/// One grant that is being confirmed, for as many as wait for it.
#[derive(Clone, Debug)]
struct Asked {
    /// Which server was asked: what one has told says nothing of another.
    at: Address,
    reached: watch::Receiver<Option<Reached>>,
}

/// Those who wait for one server's replicas.
#[derive(Debug)]
struct Group {
    node: Arc<Node>,
    pending: Mutex<Pending>,
}

#[derive(Debug, Default)]
struct Pending {
    grants: Vec<Grant>,
    /// Somebody is at work on them.
    running: bool,
}

#[derive(Debug)]
struct Grant {
    /// Asks the server whether it has the grant.
    look: redis::Cmd,
    /// What the answer begins with if it has. After a fail-over it may have somebody else's.
    ours: String,
    /// What to write in the same slot.
    mark: String,
    told: watch::Sender<Option<Reached>>,
}

impl Confirm {
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
            asked: Mutex::default(),
        }
    }

    /// How long a grant may wait for the replicas: for those of an earlier one, and its own.
    pub(super) fn within(&self) -> Duration {
        (self.wanted.within + CONNECTING) * 2
    }

    /// Refuses a lease that would be over each time before it is clear that too few replicas answer, so
    /// that nobody could ever hold without them.
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

    /// What the server itself answers, which has no longer than without replicas.
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

    /// Returns when enough replicas know of this claim's grant.
    pub(super) async fn grant(&self, claim: &Claim, keys: &Keys) -> Result<()> {
        self.told(self.ask(claim, keys).await?).await
    }

    /// The same for many, each for itself, at once. Those that take longer than others can be kept
    /// waiting for are unknown, until they are asked about again.
    pub(super) async fn all(&self, grants: &[(&Claim, Keys)]) -> Vec<Result<()>> {
        let mut asked = Vec::with_capacity(grants.len());
        for (claim, keys) in grants {
            asked.push(self.ask(claim, keys).await);
        }
        let shortest = grants.iter().map(|(claim, _)| claim.waiter_lease).min();
        let mut limit = pin!(sleep(&self.runtime, shortest.unwrap_or_default() / PART));
        let (mut late, mut all) = (false, Vec::with_capacity(asked.len()));
        for asked in asked {
            let asked = match asked {
                Ok(asked) => asked,
                Err(error) => {
                    all.push(Err(error));
                    continue;
                }
            };
            let told = tokio::select! {
                biased;
                told = self.told(asked) => Some(told),
                () = std::future::ready(()), if late => None,
                () = &mut limit, if !late => None,
            };
            all.push(told.unwrap_or_else(|| {
                late = true;
                let what = "granted, but the replicas have not confirmed it yet";
                Err(Error::new(ErrorKind::Unreachable, what))
            }));
        }
        all
    }

    /// Begins to confirm a grant, beside others, unless that was begun before.
    async fn ask(&self, claim: &Claim, keys: &Keys) -> Result<Asked> {
        let node = self.servers.node(keys.slot).await.map_err(|e| fault::explain(&e))?;
        let group = self.group(node.address())?;
        let (told, reached) = watch::channel(None);
        let asked = Asked { at: node.address().clone(), reached };
        {
            let mut all = locked(&self.asked);
            match all.get(&claim.id) {
                Some(before) if before.at == asked.at && before.is_of_use() => {
                    return Ok(before.clone());
                }
                _ => drop(all.insert(claim.id, asked.clone())),
            }
        }
        let (look, ours) = look(claim, keys);
        let grant = Grant { look, ours, mark: keys.mark(), told };
        let start = {
            let mut pending = locked(&group.pending);
            pending.grants.push(grant);
            !std::mem::replace(&mut pending.running, true)
        };
        if start {
            let wanted = self.wanted;
            drop(self.runtime.spawn(async move { group.work(wanted).await }));
        }
        Ok(asked)
    }

    /// Returns when enough replicas know of it.
    async fn told(&self, mut asked: Asked) -> Result<()> {
        let told = asked.reached.wait_for(Option::is_some).await.map(|told| told.clone());
        let Ok(Some(reached)) = told else {
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

    /// How many replicas had this claim's grant as it was confirmed.
    pub(super) fn reached(&self, id: ClaimId) -> Option<u32> {
        match &*locked(&self.asked).get(&id)?.reached.borrow() {
            Some(Ok(reached)) => *reached,
            _ => None,
        }
    }

    /// This claim is no more.
    pub(super) fn forget(&self, id: ClaimId) {
        locked(&self.asked).remove(&id);
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

impl Asked {
    /// Whether it is not known yet, or for good: what could not be asked is asked again.
    fn is_of_use(&self) -> bool {
        match &*self.reached.borrow() {
            Some(found) => found.is_ok(),
            None => self.reached.has_changed().is_ok(),
        }
    }
}

/// What tells whether a server has a grant, and what it answers then.
fn look(claim: &Claim, keys: &Keys) -> (redis::Cmd, String) {
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
    /// Confirms until nobody waits any more.
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
            // Connecting, the first time, is not the replicas' fault.
            let limit = wanted.within + CONNECTING;
            let confirmed = tokio::time::timeout(limit, self.confirm(&grants, wanted)).await;
            let reached = match confirmed {
                Ok(Ok(answers)) => reached(&answers, &grants),
                Ok(Err(error)) => vec![Err(unknown(&error)); grants.len()],
                // It may have it, and no replica is known to.
                Err(_) if wanted.short == Shortfall::Accept => vec![Ok(Some(0)); grants.len()],
                Err(_) => {
                    let what = "the server did not reply while it waited for its replicas";
                    vec![Err((ErrorKind::Unreachable, what.to_owned(), None)); grants.len()]
                }
            };
            grants.into_iter().zip(reached).for_each(|(grant, reached)| grant.tell(reached));
        }
    }

    async fn confirm(&self, grants: &[Grant], wanted: Replicas) -> RedisResult<Vec<Value>> {
        let mut pipeline = Pipeline::new();
        for grant in grants {
            pipeline.add_command(grant.look.clone());
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
    fn tell(self, reached: Reached) {
        // Nobody may be listening any more.
        let _ = self.told.send(Some(reached));
    }
}

/// What an error says of a grant. Whoever is not the master of its slot any more can say nothing, and the
/// next one is asked.
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

/// How many replicas have which grant, by the answers to what was sent together.
fn reached(answers: &[Value], grants: &[Grant]) -> Vec<Reached> {
    let [looks @ .., wrote, waited] = answers else { return vec![Ok(None); grants.len()] };
    // Without a write of its own it has waited for an earlier one.
    let waited = wrote.clone().extract_error().and_then(|_| waited.clone().extract_error());
    let waited = match waited {
        Ok(Value::Int(n)) => Ok(u32::try_from(n).unwrap_or(0)),
        Ok(_) => Ok(0),
        Err(error) => Err(unknown(&error)),
    };
    let reached = |(look, grant): (&Value, &Grant)| match look.clone().extract_error() {
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

        /// No answer, however damaged, is taken for more replicas than it says.
        #[test]
        fn what_replicas_have_is_never_more_than_was_told(answers in proptest::collection::vec(
            values(&["17 ours", "17", "OK", ""]), 0..6,
        )) {
            let grant = |ours: &str| Grant {
                look: redis::Cmd::new(),
                ours: ours.into(),
                mark: String::new(),
                told: watch::Sender::new(None),
            };
            let grants = [grant("17 "), grant("18 ")];
            let most = answers.last().and_then(|told| match told {
                Value::Int(n) => u32::try_from(*n).ok(),
                _ => None,
            });
            for reached in reached(&answers, &grants).into_iter().flatten().flatten() {
                prop_assert!(reached <= most.unwrap_or(0));
            }
        }
    }
}
