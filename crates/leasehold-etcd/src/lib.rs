//! The `etcd:` store: queues in the order of etcd's revisions.
//!
//! # The keys
//! Each claim is one key, `NAME/LEASE`, that hangs on that lease. Claims stand in the order in which their
//! keys were created, which is etcd's order of transactions, kept by a majority of its members; the
//! create revision is the fencing token. This is the queue of the official Go client's
//! `concurrency.Mutex` and of `etcdctl lock`: they and our mutexes stand in one queue, each waiting
//! for whoever came before. Our keys have values as well, which say what the lock is and who claims.
//!
//! # One call
//! - *join* (`etcd/join.rs`): one transaction, whether it holds at once or stands in the queue; where the
//!   last guess was wrong (`etcd/contended.rs`), two.
//! - *leave* (`etcd/leave.rs`): one transaction.
//! - *renew* (`etcd/renew.rs`): keep-alives, all of a client's on a few streams, and a look at the keys.
//! - *hear* and *follow* (`etcd/hear.rs`): watches, of one key that says who was evicted, and of queues.
//! - *changed* (`etcd/stand.rs`): a watch from the present on what blocks the claim. Near the front of a
//!   mutex its events tell all (`etcd/front.rs`); else there is a look after each, which shows the waiter's
//!   own key as well.
//!
//! # Leases
//! Each claim has one of its own (two claims on one lease would be one claim, scenario 81), for as long
//! as its lease, in whole seconds; etcd may grant more, and has a minimum of 1 to 2 s by its election
//! time-out. With a lock-delay it is longer by that: a holder believes in the first part only and neither
//! renews nor leaves in the second, by its own clock (`etcd/leave.rs`); for others, what is left of the lease
//! tells which part it is. What counts is the least of what was asked for and what was
//! granted, from before the request was sent. Leases are used again for other claims (`etcd/leases.rs`),
//! so that granting one costs no round trip when a lock is taken.
//!
//! Waiters hang on leases of the same length, since a key cannot change its lease without a write: a
//! dead waiter is gone within its lease, and so are many that died together.
//!
//! # Whose clock
//! The leader's, which cannot be set. A new leader begins all leases anew, so a fail-over never ends
//! one early.
//!
//! # If a reply is lost, if the future is dropped, if we die
//! The client that joined finds its claim again by the key; another one, which may make it leave, finds it by
//! its id in the value (and must not join it as well: it would stand behind itself). A lease that was sent in
//! a request which was not answered is not used again, and is revoked when the claim leaves, so that a `join`
//! which the network held back comes to nothing. A `leave` that it held back ends only the place that it was
//! meant for, by its revision. What nobody leaves ends with its lease. A member that does not answer is left
//! for the next one (`etcd/client.rs`).
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod ask;
mod calls;
mod claims;
mod client;
mod compare;
mod contended;
mod doctor;
mod fault;
mod front;
mod hear;
mod inspect;
mod join;
mod keepalive;
mod leases;
mod leave;
mod probe;
mod proto;
mod queue;
mod renew;
mod reweigh;
mod stand;
#[cfg(feature = "tls")]
mod tls;
mod turns;
mod url;
mod waiters;
mod watch;

use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::Handle;

pub use self::compare::{EtcdCompare, EtcdGuardExt};

use self::client::Client;
use self::compare::SCHEME;
use self::fault::{Failure, closed};
use self::keepalive::KeepAlives;
use self::leases::Leases;
use self::probe::{Found, probe};
use self::url::EtcdUrl;
use self::waiters::Waiters;
use self::watch::Watches;
use leasehold_core::Opening;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::{Ends, redacted};
use leasehold_core::store::{
    ALL_KINDS, ClockModel, Durability, Ear, Ears, Evict, Follow, Guarantees, Joined, Liveness,
    LockInfo, Mode, Ownership, Queues, Renew, Renewal, Reweighed, Signal, Stall, Store, StoreInfo,
    Survival, Wakeup,
};
use leasehold_core::{Claim, Name, Result, Token};

/// Locks in etcd. See the module's documentation.
pub struct EtcdStore {
    info: StoreInfo,
    members: usize,
    shared: Arc<Shared>,
    ears: Arc<Ears>,
    /// What hears of evictions, as soon as somebody wants to.
    hearing: OnceLock<Ends>,
    /// Whether it may.
    hears: bool,
    _tending: Ends,
}

/// What the calls and the waiters' tasks share.
#[derive(Debug)]
struct Shared {
    namespace: String,
    client: Arc<Client>,
    keep_alives: Arc<KeepAlives>,
    watches: Watches,
    leases: Arc<Leases>,
    claims: claims::Claims,
    waiters: Waiters,
    turns: turns::Turns,
    contended: contended::Contended,
}

impl EtcdStore {
    /// Opens the store of this URL. Its connections and tasks run on `runtime`.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// An error with a hint if etcd cannot be used.
    pub async fn open(url: &str, runtime: &Handle) -> Result<Self> {
        let parsed = EtcdUrl::parse(url)?;
        let client = Client::new(&parsed, runtime)?;
        let found = probe(&client, &parsed).await;
        let found = if parsed.tls.is_some() { found.map_err(fault::over_tls)? } else { found? };
        let keep_alives = Arc::new(KeepAlives::new(client.clone()));
        let leases = Arc::new(Leases::new(client.clone(), keep_alives.clone()));
        let tending = Ends::new(&runtime.spawn(leases.clone().tend()));
        let shared = Arc::new(Shared {
            namespace: parsed.namespace,
            watches: Watches::new(client.clone()),
            client,
            keep_alives,
            leases,
            claims: claims::Claims::default(),
            waiters: Waiters::default(),
            turns: turns::Turns::default(),
            contended: contended::Contended::default(),
        });
        let identity = match found.cluster {
            Some(id) => format!("etcd:{id:x}/{}", shared.namespace),
            None => {
                let mut members = parsed.endpoints.clone();
                members.sort_unstable();
                format!("etcd:{}/{}", members.join(","), shared.namespace)
            }
        };
        let info = StoreInfo::new(redacted(url), guarantees(&found)).identified(identity);
        let (ears, hearing) = (Arc::default(), OnceLock::new());
        let (members, hears) = (found.members, found.hears);
        Ok(Self { info, members, shared, ears, hearing, hears, _tending: tending })
    }

    /// Returns how many requests this client has sent, including those on streams (keep-alives,
    /// watches). For measurements.
    pub fn requests(&self) -> u64 {
        self.shared.client.sent()
    }
}

impl Drop for EtcdStore {
    fn drop(&mut self) {
        self.shared.waiters.dismiss_all();
    }
}

impl fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdStore").field("url", &self.info.url).finish_non_exhaustive()
    }
}

impl Shared {
    /// The key of a claim's place; of a claim that this client does not know, a key that nobody has.
    fn key(&self, claim: &Claim) -> Vec<u8> {
        let lease = self.claims.get(claim.id).map_or(0, |known| known.lease.id);
        self.key_on(&claim.name, lease)
    }

    fn key_on(&self, name: &Name, lease: i64) -> Vec<u8> {
        queue::key(&self.namespace, name.as_str(), lease)
    }

    fn prefix(&self, name: &Name) -> Vec<u8> {
        queue::prefix(&self.namespace, name.as_str())
    }
}

/// Opens the store of a URL, for a [`Registry`](leasehold_core::Registry).
pub fn open(url: String, runtime: Handle) -> Opening {
    Box::pin(async move { Ok(Arc::new(EtcdStore::open(&url, &runtime).await?) as Arc<dyn Store>) })
}

#[async_trait]
impl Store for EtcdStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        self.told(doctor::diagnose(&self.shared.client, self.members).await)
    }

    async fn disconnect(&self) {
        self.shared.leases.disconnect().await;
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        self.told_of(&claim.name, self.shared.join(claim, mode).await)
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        self.told(self.shared.renew(renewals).await)
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        self.told_of(&claim.name, self.shared.leave(claim, keep).await)
    }

    async fn reweigh(&self, claim: &Claim) -> Result<Reweighed> {
        self.told_of(&claim.name, self.shared.reweigh(claim).await)
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        Ok(self.shared.waiters.news(claim.id).await)
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        self.told_of(name, self.shared.show(name).await)
    }

    async fn holders(&self, name: &Name, token: Option<Token>) -> Result<Option<LockInfo>> {
        self.told_of(name, self.shared.show_holders(name, token).await)
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        self.told(self.shared.list(prefix).await)
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        self.told_of(name, self.shared.evict(name, which).await)
    }

    fn hear(&self, ear: Weak<dyn Ear>) {
        self.ears.add(ear);
        if self.hears {
            self.hearing.get_or_init(|| self.shared.hear(self.ears.clone()));
        }
    }

    async fn follow(&self, queues: &Queues) -> Result<Option<Follow>> {
        self.told(self.shared.follow_all(queues).await).map(Some)
    }

    fn ownership(&self, claim: &Claim) -> Result<Option<Ownership>> {
        Ok(Some(Ownership::new(SCHEME, self.shared.key(claim))))
    }
}

impl EtcdStore {
    fn told<T>(&self, done: Result<T, Failure>) -> Result<T> {
        done.map_err(|failure| closed(failure, &self.shared.namespace).into())
    }

    /// The same of a call about one lock.
    fn told_of<T>(&self, name: &Name, done: Result<T, Failure>) -> Result<T> {
        let prefix = self.shared.prefix(name);
        done.map_err(|failure| closed(failure, &String::from_utf8_lossy(&prefix)).into())
    }
}

fn guarantees(&Found { members, ignores_old_leaders, hears, .. }: &Found) -> Guarantees {
    let durability = if members > 1 { Durability::Majority } else { Durability::Disk };
    let failover = match (members, ignores_old_leaders) {
        (0 | 1, _) => Survival::NotApplicable,
        (_, true) => Survival::Exclusive,
        (_, false) => Survival::Fenced,
    };
    let mut promised = Guarantees::least();
    promised.kinds = Cow::Borrowed(ALL_KINDS);
    promised.fifo = true;
    promised.wakeup = Wakeup::Push;
    promised.evicted = if hears { Wakeup::Push } else { Wakeup::Poll };
    promised.followed = Wakeup::Push;
    promised.liveness = Liveness::Lease;
    promised.clock = ClockModel::Monotonic;
    promised.lock_delay = true;
    promised.at_least = true;
    promised.downgrades = true;
    promised.grant = durability;
    promised.token = durability;
    promised.on_pause = Survival::Fenced;
    promised.on_clock_step = Survival::Exclusive;
    promised.on_store_crash = Survival::Exclusive;
    promised.on_failover = failover;
    promised.on_partition = Survival::Exclusive;
    promised.stall = Stall::Nobody;
    // Whole seconds, the least that etcd grants, half a second until it looks, and an election.
    promised.recovery = Duration::from_secs(6);
    promised.recovery_leases = 1;
    promised.notes = Cow::Borrowed(&[
        Cow::Borrowed(
            "etcd counts leases in whole seconds and has a minimum of 1 or 2 s, depending on its \
                 election timeout. A dead holder's lock stays taken for at least that long.",
        ),
        Cow::Borrowed(
            "A dead waiter keeps its place for its whole lease and lock-delay, not for a shorter \
                 waiter's lease.",
        ),
        Cow::Borrowed(
            "Each change of leader restarts all leases. If a holder died shortly before, its lock stays \
                 taken for one more lease.",
        ),
        Cow::Borrowed("Tokens are etcd revisions. They go back if etcd is restored from a backup."),
        Cow::Borrowed(
            "Before 3.4.31 and 3.5.13, a leader that was paused and resumes can end renewed leases. Check \
                 tokens.",
        ),
        Cow::Borrowed(
            "A client of the official Go library that locks a name also waits for locks whose names \
                 begin with that name and a slash. leasehold does not.",
        ),
    ]);
    promised
}
