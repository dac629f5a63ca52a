//! The `redlock:` store: a mutex on the majority of three to nine independent Redis servers.
//!
//! Each server knows one key for each lock, by itself; who has the keys of more than half of them
//! holds the lock. No server has to be up as long as a majority is, and none is more important than
//! another. There is no common queue, since there is no common order: who waits asks again after
//! times at random, and is told when nodes are free.
//!
//! # The algorithm
//! - *Taking* asks all nodes at once ([`attempt`](self)), with the same key and value as every
//!   Redlock client (`SET name value NX PX lease`), so that others respect us and we them. A node has
//!   a short time to answer, much less than the lease, so that one that hangs costs that much once.
//!   Validity is the lease, less the time since before the first request was sent, less the drift.
//! - *The fencing token* is agreed on in the same round trip: [`round`] is the protocol and the
//!   argument, and a model checker has been through it.
//! - *Releasing* compares the value and deletes, on all nodes, always, also where the vote seemed to
//!   fail, until each has answered or its lease is over.
//! - *Extending* needs a majority that still has the key, and never takes away what still stands.
//! - *Waiting*: each node writes down who waits. Who releases has each node tell the one who waited
//!   longest, and keep itself for that one for a moment ([`scripts`](self)), so that who comes anew does not
//!   overtake it; told by a majority, that one asks at once. A message that is lost costs a pause of 60
//!   milliseconds at random, longer the more wait.
//!
//! # What is atomic
//! One script on one node. Everything that concerns more than one node is decided by counting, and
//! only the client that counted knows the result; it is remembered in this client ([`claims`](self)),
//! and a claim of which nobody knows that it was granted is lost.
//!
//! # Whose clock
//! Each node's own for its key's expiry, and ours for the deadline. A node whose clock is stepped
//! forward loses its vote early, and nobody can see that. What that does depends on how many nodes the
//! holder has: with all of them, two of five may lose their keys; who got a bare majority, since the
//! others were away, has another holder beside it once *one* of them has lost its key.
//! Tokens do not depend on clocks while a majority remembers.
//!
//! # Dropped calls
//! Every call runs in a task of the client's own thread, which its caller's drop does not stop. An
//! attempt whose claim was given up meanwhile gives back what it got.
//!
//! # Restarts
//! A server that restarted may have lost its keys. It does not vote until it has been up for the
//! longest lease that anybody may ask for (`max_lease_ms`, 30 seconds; `restart_delay_ms` if another
//! time is right): the *delayed restart* of the algorithm's description, kept by every client of
//! ours by what the server says of its age, and by its run id where it was known before. Other
//! people's Redlock clients do not keep it, so with them it must be kept by whoever starts servers.
//! A whole deployment that was just started therefore grants nothing for that long.
//!
//! A server that was emptied (FLUSHALL), and another one at a known address, a promoted replica or a
//! restored copy, is treated like one that restarted when the first client found out: the server
//! itself keeps when that was ([`scripts`](self)). Nobody can see two servers that serve under one
//! name at the same time, some clients by one and some by the other; so a server that has a replica
//! has no vote, for a fail-over does that.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::Handle;

use leasehold_core::Opening;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::redacted;
use leasehold_core::store::{
    ClockModel, Durability, Evict, Guarantees, Joined, Liveness, LockInfo, Mode, Place, Renew,
    Renewal, Signal, Store, StoreInfo, Survival, Wakeup,
};
use leasehold_core::{Claim, ClaimId, Error, ErrorKind, Name, Result};

mod attempt;
mod claims;
mod doctor;
mod hold;
mod inspect;
mod memory;
mod node;
// For the model that checks it, and nobody else.
#[doc(hidden)]
pub mod round;
mod scripts;
mod shared;
#[cfg(test)]
mod tests;
mod url;

use attempt::{Busy, Outcome};
use claims::{Claims, Entry, Held, random};
use hold::{Hold, Wait};
use node::{Node, Trouble};
use round::majority;
use scripts::Scripts;
use shared::Shared;
use url::RedlockUrl;

/// How long connecting waits for a node.
const CONNECT: Duration = Duration::from_secs(2);
/// How often an attempt that met another one, and neither won, is repeated at once.
const DUELS: u32 = 4;

/// Mutexes on a majority of independent Redis servers. See the module's documentation.
#[derive(Debug)]
pub struct RedlockStore {
    info: StoreInfo,
    parsed: RedlockUrl,
    shared: Arc<Shared>,
}

impl RedlockStore {
    /// Connects to a majority of the servers at least; the others are waited for a little, and met
    /// meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for a URL that cannot work, also if two names lead to one server;
    /// [`ErrorKind::Denied`] and the like if any server that answers in time refuses us;
    /// [`ErrorKind::Unreachable`] if fewer than a majority answer within two seconds.
    pub(crate) async fn open(url: &str, runtime: &Handle) -> Result<Arc<Self>> {
        let parsed = RedlockUrl::parse(url)?;
        let claims = Arc::new(Claims::new(parsed.nodes.len()));
        let channel = ClaimId::random()?.to_hex();
        let nodes = Node::all(&parsed, runtime, &claims, &channel)?;
        let shared = Arc::new(Shared {
            nodes,
            claims,
            scripts: Scripts::new(),
            prefix: parsed.prefix.clone(),
            node_timeout: parsed.node_timeout,
            max_lease: parsed.max_lease,
            releases: tokio::sync::watch::Sender::new(0),
            runtime: runtime.clone(),
        });
        let meeting = shared.clone();
        let met = shared.spawned(async move { meeting.meet_all().await });
        met.await??;
        let info = StoreInfo::new(redacted(url), guarantees(&parsed));
        let info = info.identified(identity(&parsed));
        Ok(Arc::new(Self { info, parsed, shared }))
    }
}

impl Shared {
    async fn meet_all(self: &Arc<Self>) -> Result<()> {
        let mut answers = self.ask_each(CONNECT, Duration::ZERO, |i| {
            let shared = self.clone();
            async move {
                shared.nodes[i].met(false).await?;
                Ok::<_, Trouble>(())
            }
        });
        let needed = majority(self.nodes.len());
        let (mut met, mut away) = (0, Vec::new());
        let mut most = tokio::time::Instant::now() + CONNECT;
        // What does not answer in time goes on by itself, and is met by the first vote at the latest.
        while let Ok(Some((i, answer))) = tokio::time::timeout_at(most, answers.recv()).await {
            match answer {
                Ok(()) => met += 1,
                Err(trouble) => match trouble.problem().kind {
                    ErrorKind::Unreachable => away.push((i, trouble)),
                    // The others may do without it.
                    _ if matches!(trouble, Trouble::HasReplicas(_)) => away.push((i, trouble)),
                    _ => return Err(trouble.explain(self.nodes[i].address())),
                },
            }
            if met == needed {
                most = most.min(tokio::time::Instant::now() + self.patient());
            }
        }
        for i in 0..self.nodes.len() {
            if let Some(twin) = self.twin_of(i) {
                return Err(twin.explain(self.nodes[i].address()));
            }
        }
        if met < needed {
            let what =
                format!("{met} of {} servers respond, {needed} are needed", self.nodes.len());
            let refused = away.iter().filter(|(_, t)| matches!(t, Trouble::HasReplicas(_))).count();
            let error = self.in_trouble(what, &away);
            // Not a matter of time.
            let hopeless = self.nodes.len() - refused < needed;
            return Err(if hopeless { error.but(ErrorKind::Config) } else { error });
        }
        self.tell_all().await;
        Ok(())
    }

    /// Takes the lock, or asks "and now?" for a claim that is there.
    async fn stand(
        self: &Arc<Self>,
        claim: &Claim,
        entry: &Arc<Entry>,
        mode: Mode,
    ) -> Result<Joined> {
        let _one_at_a_time = entry.gate.lock().await;
        let asked = self.claims.now();
        if let Some(held) = entry.held() {
            let (claim, lease) = (claim.clone(), claim.lease);
            let hold = Hold { claim, lease, entry: entry.clone(), held };
            if let Some(Renewal::Holding { token, remaining }) =
                self.extend(vec![hold]).await?.pop()
            {
                return Ok(Joined::Holding { token, remaining });
            }
            // Lost, and given up by that.
            return Ok(Joined::Busy { holders: Vec::new() });
        }
        let mut duels = 0;
        loop {
            if entry.has_left() {
                return Err(Error::new(ErrorKind::Closed, "the acquisition was cancelled"));
            }
            match self.attempt(claim, entry, mode == Mode::Wait).await {
                Outcome::Held { token, value, start } => {
                    let until = start.plus(claim.lease);
                    entry.waits.store(false, std::sync::atomic::Ordering::SeqCst);
                    entry.hold(Some(Held { token, value, until }));
                    if entry.has_left() {
                        self.release_some(claim, u64::MAX, |_| true);
                    }
                    // From when the call was asked: what is before the attempt is not lost.
                    return Ok(Joined::Holding { token, remaining: Some(until.since(asked)) });
                }
                Outcome::Busy(busy) if busy.decided || duels == DUELS || busy.ahead > 1 => {
                    return Ok(self.behind(entry, mode, busy));
                }
                Outcome::Busy(busy) => {
                    let pause = busy.took.max(Duration::from_millis(1)) * (1 << duels);
                    tokio::time::sleep(pause.mul_f64(0.5 + random())).await;
                    duels += 1;
                }
                Outcome::Failed(error) => return Err(error),
            }
        }
    }

    fn behind(&self, entry: &Entry, mode: Mode, busy: Busy) -> Joined {
        let Busy { holders, ahead, head_remaining, .. } = busy;
        if mode == Mode::Try {
            return Joined::Busy { holders };
        }
        entry.stands_behind(ahead);
        Joined::Waiting(Place { ahead, head_remaining, token: None })
    }

    async fn renew_all(self: &Arc<Self>, renewals: Vec<Renew>) -> Result<Vec<Renewal>> {
        let (holds, waits) = hold::sorted(&renewals, |id| self.claims.get(id));
        let mut answers: HashMap<ClaimId, Renewal> = HashMap::new();
        let mut failed = None;
        let mut asking = tokio::task::JoinSet::new();
        for Wait { claim, entry } in waits {
            let shared = self.clone();
            asking.spawn(async move { (claim.id, shared.stand(&claim, &entry, Mode::Wait).await) });
        }
        if !holds.is_empty() {
            let ids: Vec<ClaimId> = holds.iter().map(|hold| hold.claim.id).collect();
            match self.extend(holds).await {
                Ok(extended) => answers.extend(ids.into_iter().zip(extended)),
                Err(error) => {
                    answers.extend(ids.into_iter().map(|id| (id, Renewal::unknown(&error))));
                    failed = Some(error);
                }
            }
        }
        while let Some(asked) = asking.join_next().await {
            let (id, joined) = match asked {
                Ok((id, Ok(joined))) => (id, joined),
                Ok((id, Err(error))) => {
                    answers.insert(id, Renewal::unknown(&error));
                    failed = Some(error);
                    continue;
                }
                Err(_) => {
                    let what = "the thread of this client has ended";
                    return Err(Error::new(ErrorKind::Closed, what));
                }
            };
            let renewal = match joined {
                Joined::Holding { token, remaining } => Renewal::Holding { token, remaining },
                Joined::Waiting(place) => Renewal::Waiting(place),
                Joined::Busy { .. } => Renewal::Lost,
            };
            answers.insert(id, renewal);
        }
        let answer = |r: &Renew| answers.remove(&r.claim.id).unwrap_or(Renewal::Lost);
        let answers: Vec<Renewal> = renewals.iter().map(answer).collect();
        match failed {
            Some(error) if answers.iter().all(|a| matches!(a, Renewal::Unknown { .. })) => {
                Err(error)
            }
            _ => Ok(answers),
        }
    }
}

/// By address, as of a single server.
fn identity(url: &RedlockUrl) -> String {
    let mut nodes: Vec<String> = url.nodes.iter().map(ToString::to_string).collect();
    nodes.sort_unstable();
    format!("redlock:{}/{}#{}", nodes.join(","), url.login.db, url.prefix)
}

/// Opens the store of a URL, for a [`Registry`](leasehold_core::Registry).
pub fn open(url: String, runtime: Handle) -> Opening {
    Box::pin(async move { Ok(RedlockStore::open(&url, &runtime).await? as Arc<dyn Store>) })
}

#[async_trait]
impl Store for RedlockStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        self.shared.check(claim)?;
        let entry = self.shared.claims.enter(claim);
        let (shared, id, claim) = (self.shared.clone(), claim.id, claim.clone());
        let stood = self.shared.spawned(async move {
            let joined = shared.stand(&claim, &entry, mode).await;
            // Nodes that are taken know it among those who wait.
            if let Err(error) = &joined
                && mode == Mode::Wait
                && !error.is_transient()
            {
                shared.claims.leave(claim.id);
                shared.withdraw(&claim);
            }
            joined
        });
        let joined = stood.await?;
        match &joined {
            Ok(Joined::Holding { .. } | Joined::Waiting(_)) => {}
            // It may be sent again, and nodes may have it.
            Err(error) if error.is_transient() => {}
            // Nobody leaves what did not get in.
            Ok(Joined::Busy { .. }) | Err(_) => drop(self.shared.claims.leave(id)),
        }
        joined
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let (shared, renewals) = (self.shared.clone(), renewals.to_vec());
        self.shared.spawned(async move { shared.renew_all(renewals).await }).await?
    }

    async fn leave(&self, claim: &Claim, _keep: Option<Duration>) -> Result<bool> {
        let (shared, claim) = (self.shared.clone(), claim.clone());
        self.shared.spawned(async move { shared.leave(&claim).await }).await?
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        let Some(entry) = self.shared.claims.get(claim.id) else { return Ok(Signal::Ask) };
        let pause = entry.pause(claim.waiter_lease / 3);
        let woken = self.shared.spawned(async move {
            let _ = tokio::time::timeout(pause, entry.woken()).await;
        });
        woken.await?;
        Ok(Signal::Ask)
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        let (shared, name) = (self.shared.clone(), name.clone());
        self.shared.spawned(async move { shared.read(&name).await }).await?
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let (shared, prefix) = (self.shared.clone(), prefix.to_owned());
        self.shared.spawned(async move { shared.list(&prefix).await }).await?
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        let (shared, name) = (self.shared.clone(), name.clone());
        self.shared.spawned(async move { shared.evict(&name, which).await }).await?
    }

    /// A release that only a majority has answered is under way still.
    async fn disconnect(&self) {
        let shared = self.shared.clone();
        let _ = self.shared.spawned(async move { shared.all_released().await }).await;
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let (shared, parsed) = (self.shared.clone(), self.parsed.clone());
        self.shared.spawned(async move { shared.diagnose(&parsed).await }).await
    }
}

fn guarantees(url: &RedlockUrl) -> Guarantees {
    let delayed = url.restart_delay >= url.max_lease;
    let mut notes: Vec<Cow<'static, str>> = vec![
        "Servers share no queue. Each server notifies the waiter that has waited longest and reserves \
         itself for that waiter for a moment. Other waiters can still overtake it."
            .into(),
        "Exclusion and increasing tokens require clocks that run at the same rate. No server may lose a key \
         unnoticed within a lease, because the key was deleted or the wall clock set forward. If the holder got \
         only a bare majority, one such server is enough to grant the lock twice."
            .into(),
        "A server with a replica has no vote. Each host name must lead to one server, the same for all \
         clients."
            .into(),
        "If more than half of the servers lose their data at the same time, tokens increase unless the \
         clocks are behind the last lost token."
            .into(),
    ];
    notes.push(match delayed {
        true => format!(
            "A server that was restarted, emptied or replaced does not vote for {:?}. Other Redlock clients \
             do not respect this.",
            url.restart_delay
        )
        .into(),
        false => format!(
            "A restarted server votes again after {:?}, although leases can be {:?}. If it has lost its data, \
             there can be two holders, and tokens can decrease.",
            url.restart_delay, url.max_lease
        )
        .into(),
    });
    let mut promised = Guarantees::least();
    promised.wakeup = Wakeup::Push;
    promised.liveness = Liveness::Lease;
    promised.clock = ClockModel::Wall;
    promised.grant = Durability::Majority;
    promised.token = Durability::Majority;
    promised.on_pause = Survival::Fenced;
    promised.on_clock_step = Survival::Fenced;
    promised.on_store_crash = if delayed { Survival::Exclusive } else { Survival::Unsafe };
    promised.on_failover = Survival::NotApplicable;
    promised.on_partition = Survival::Fenced;
    promised.recovery = Duration::from_secs(2);
    promised.recovery_leases = 1;
    promised.notes = Cow::Owned(notes);
    promised
}
