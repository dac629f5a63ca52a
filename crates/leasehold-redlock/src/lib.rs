//! The `redlock:` store: a mutex on the majority of three to nine independent Redis servers.
//!
//! Each server stores one key per lock, independently of the other servers. The client whose value
//! is stored on more than half of them holds the lock. Any majority of the servers suffices, and
//! all servers are equal. There is no common queue, because there is no common order of events. A
//! waiter polls after random pauses, and is notified when nodes become free.
//!
//! # The algorithm
//! - *Acquiring* sends a request to all nodes at once ([`attempt`](self)). Each node sets the same
//!   key as for every Redlock client (`SET name value NX PX lease`), so other clients respect
//!   leasehold's holders and vice versa. A node has a short time to respond, much less than the
//!   lease, so an unresponsive node delays an attempt only briefly. The grant is valid for the
//!   lease, minus the time since before the first request was sent, minus the drift.
//! - *The fencing token* is agreed on in the same round trip. [`round`] contains the protocol and
//!   the argument, and a model checker verifies it.
//! - *Releasing* compares the value and deletes the key. It is always sent to all nodes, even after
//!   a vote that seemed to fail, until each node has replied or the lease there has expired.
//! - *Extending* needs a majority that still has the key, and never shortens a valid lease.
//! - *Waiting* registers the claim on each node. On a release, each node notifies its
//!   longest-waiting claim and reserves itself for that claim for a moment ([`scripts`](self)), so
//!   that newcomers do not overtake it. A waiter that is notified by a majority polls immediately.
//!   A lost message costs a random pause of about 60 milliseconds, or more if many clients wait.
//!
//! # What is atomic
//! One script on one node is atomic. Everything that concerns several nodes is decided by counting,
//! and only the client that counted knows the result. It keeps the result in memory
//! ([`claims`](self)). A claim that its client does not know as granted is lost.
//!
//! # Clocks
//! Each node expires its key by its own clock, and the client's clock determines the deadline. A
//! node whose clock is set forward loses its key early, and no client can detect that.
//!
//! The effect depends on how many nodes the holder has. If the holder has all of five nodes, two of
//! them may lose their keys without harm. If the holder got a bare majority because the other nodes
//! were down, a second holder is possible once *one* node has lost its key. Tokens do not depend on
//! clocks while a majority remembers.
//!
//! # Dropped calls
//! Every call runs in a task on the client's own thread, which continues when the caller's future
//! is dropped. An attempt whose claim was given up in the meantime releases what it acquired.
//!
//! # Restarts
//! A restarted server may have lost its keys. It does not vote until it has been up for the longest
//! allowed lease (`max_lease_ms`, 30 seconds), or for `restart_delay_ms` if that is set. This is
//! the *delayed restart* of the algorithm's description.
//!
//! Every leasehold client enforces it by the age that the server reports, and by its run id if the
//! server was known before. Other Redlock clients do not enforce it, so if there are any, the
//! operator must wait for that long before starting a server again. A whole deployment that has
//! just started therefore grants no locks for that long.
//!
//! The server at a known address may have lost its data without a restart. It was emptied
//! (FLUSHALL), or it is another server, a promoted replica or a restored copy. It is treated as if
//! it had restarted when the first client detected that. The server itself stores that time
//! ([`scripts`](self)).
//!
//! No client can detect two servers that use one name at the same time, each for some of the
//! clients. A fail-over causes exactly that, so a server that has a replica has no vote.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

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
mod node;
// Public only for the model that checks it.
#[doc(hidden)]
pub mod round;
mod scripts;
mod shared;
#[cfg(test)]
mod tests;
mod token_restore;
mod url;
#[cfg(test)]
#[path = "../../leasehold-redis/src/values.rs"]
mod values;

use attempt::{Busy, Outcome};
use claims::{Claims, Entry, Held, random};
use hold::{Hold, Wait};
use node::{Node, Trouble};
use round::majority;
use scripts::Scripts;
use shared::Shared;
use url::RedlockUrl;

/// Time limit per node while connecting.
const CONNECT: Duration = Duration::from_secs(2);
/// Maximum immediate retries after two attempts collided and neither of them won.
const DUELS: u32 = 4;

/// Mutexes on a majority of independent Redis servers. See the module's documentation.
#[derive(Debug)]
pub struct RedlockStore {
    info: StoreInfo,
    parsed: RedlockUrl,
    shared: Arc<Shared>,
}

impl RedlockStore {
    /// Connects to at least a majority of the servers. Waits a short time for the others, and
    /// continues to connect to them in the background.
    ///
    /// # Errors
    /// - [`ErrorKind::Config`]: the URL is invalid, or two of its names lead to one server.
    /// - [`ErrorKind::Denied`] and others: a server that responds in time refuses this client.
    /// - [`ErrorKind::Unreachable`]: fewer than a majority respond within two seconds.
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
        // Late requests continue in the background. If they fail, the first vote connects to those
        // servers.
        while let Ok(Some((i, answer))) = tokio::time::timeout_at(most, answers.recv()).await {
            match answer {
                Ok(()) => met += 1,
                Err(trouble) => match trouble.problem().kind {
                    ErrorKind::Unreachable => away.push((i, trouble)),
                    // The other servers may be sufficient without it.
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
            let what = format!(
                "only {met} of {} servers respond, but {needed} are required",
                self.nodes.len()
            );
            let refused = away.iter().filter(|(_, t)| matches!(t, Trouble::HasReplicas(_))).count();
            let error = self.in_trouble(what, &away);
            // Waiting does not help, because too many servers can never vote.
            let hopeless = self.nodes.len() - refused < needed;
            return Err(if hopeless { error.with_kind(ErrorKind::Config) } else { error });
        }
        self.restore_all().await;
        Ok(())
    }

    /// Tries to acquire the lock. If the claim already holds it, extends the hold instead.
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
            // The claim is lost, and `extend` has released it.
            return Ok(Joined::Busy { holders: Vec::new() });
        }
        let mut duels = 0;
        loop {
            // An earlier call found that the hold had expired, or the caller has released the
            // claim. The claim is not registered as a waiter any more.
            if entry.has_left() {
                return Ok(Joined::Busy { holders: Vec::new() });
            }
            match self.attempt(claim, entry, mode == Mode::Wait).await {
                Outcome::Held { token, value, start } => {
                    let until = start.plus(claim.lease);
                    entry.waits.store(false, std::sync::atomic::Ordering::SeqCst);
                    entry.hold(Some(Held { token, value, until }));
                    if entry.has_left() {
                        self.release_some(claim, u64::MAX, |_| true);
                    }
                    // The caller counts the remaining time from the start of this call, so the time
                    // before the attempt is included.
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

/// Returns the store's identity: the addresses of its servers, the database and the prefix.
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
            // Nodes that are held by other claims have registered the claim as a waiter.
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
            // The request may be sent again, and nodes may have the claim.
            Err(error) if error.is_transient() => {}
            // The caller does not release a claim that was not admitted.
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

    /// Waits for releases that are still in progress on some nodes. A release returns before that,
    /// as soon as a majority has answered.
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
        "A server with a replica has no vote. Each host name must resolve to one server, the same \
         for all clients."
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
