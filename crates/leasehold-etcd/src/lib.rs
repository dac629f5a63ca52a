//! The `etcd:` store: queues in the order of etcd's revisions.
//!
//! # The keys
//! Each claim is one key, `NAME/LEASE`, which is attached to that lease. Claims are queued in the
//! order in which their keys were created. This is etcd's order of transactions, which a majority
//! of its members stores. The create revision is the fencing token. The queue is that of the
//! official Go client's `concurrency.Mutex` and of `etcdctl lock`. Their claims and those of
//! leasehold's mutexes share one queue, and each waits for those ahead of it. leasehold's keys also
//! have values, which describe the lock and the claim.
//!
//! # One call
//! - *join* (`etcd/join.rs`): one transaction, whether the claim is granted or waits. It takes two
//!   if the guess of `etcd/contention_hints.rs` was wrong.
//! - *leave* (`etcd/leave.rs`): one transaction.
//! - *renew* (`etcd/renew.rs`): keep-alives, all of a client's on a few streams, and a read of the
//!   keys.
//! - *hear* and *follow* (`etcd/notify.rs`): watches, of the keys that announce evictions, and of
//!   queues.
//! - *changed* (`etcd/wait_in_queue.rs`): a watch, from the current revision on, of the claims that
//!   block this one. Near the front of a mutex its events are sufficient (`etcd/predecessors.rs`).
//!   Otherwise the client reads the queue after each event, which also shows the waiter's own key.
//!
//! # Leases
//! Each claim has its own etcd lease, because two claims on one lease would be one claim (scenario
//! 81). It is as long as the claim's lease, in whole seconds. etcd may grant more, and has a
//! minimum of 1 to 2 s that depends on its election timeout. A client relies on the smaller of the
//! requested and the granted time, counted from before the request was sent. etcd leases are reused
//! for other claims (`etcd/leases.rs`), so that granting one costs no round trip when a lock is
//! acquired.
//!
//! With a lock delay, the etcd lease is longer by the delay. A holder relies on the first part
//! only. In the second part, according to its own clock, it neither renews nor leaves
//! (`etcd/leave.rs`). Other clients see from the remaining time of the lease which part it is in.
//!
//! Waiters use leases of the same length, because a key cannot change its lease without a write. A
//! crashed waiter is removed within its lease, and so are many that crashed at the same time.
//!
//! # Clock
//! Leases are measured by the clock of etcd's leader, which cannot be set. A new leader restarts
//! all leases, so a fail-over never ends a lease early.
//!
//! # Lost replies, dropped futures and crashes
//! The client that joined finds its claim again by the key. Another client, which may remove the
//! claim, finds it by its ID in the value. (That client must not join it as well, because the claim
//! would be queued after itself.)
//!
//! A lease that was sent in a request without a reply is not reused. It is revoked when the claim
//! leaves, so that a delayed `join` has no effect. A delayed `leave` ends only the entry that it
//! was meant for, because it names the revision of that entry. A claim that is not removed ends
//! with its lease. If a member does not respond, the client changes to the next one
//! (`etcd/client.rs`).
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod calls;
mod claims;
mod client;
mod compare;
mod contention_hints;
mod convert;
mod doctor;
mod fault;
mod inspect;
mod join;
mod join_limit;
mod keepalive;
mod leases;
mod leave;
mod notify;
mod predecessors;
mod probe;
mod proto;
mod queue;
mod renew;
mod requests;
#[cfg(feature = "tls")]
mod tls;
mod url;
mod wait_in_queue;
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
    ALL_KINDS, ClockModel, Converted, Durability, Evict, EvictionListener, EvictionListeners,
    Follow, Guarantees, Joined, Liveness, LockInfo, Mode, Ownership, Queues, Renew, Renewal,
    Signal, Stall, Store, StoreInfo, Survival, Wakeup,
};
use leasehold_core::{Claim, Name, Result, Token};

/// Locks in etcd. See the crate's documentation.
pub struct EtcdStore {
    info: StoreInfo,
    members: usize,
    shared: Arc<Shared>,
    listeners: Arc<EvictionListeners>,
    /// The task that watches for evictions, once a listener has been added.
    eviction_listener: OnceLock<Ends>,
    /// Whether this user may watch for evictions.
    can_listen: bool,
    _tending: Ends,
}

/// State shared by the calls and the waiters' tasks.
#[derive(Debug)]
struct Shared {
    namespace: String,
    client: Arc<Client>,
    keep_alives: Arc<KeepAlives>,
    watches: Watches,
    leases: Arc<Leases>,
    claims: claims::Claims,
    waiters: Waiters,
    join_limiter: join_limit::JoinLimiter,
    contention_hints: contention_hints::ContentionHints,
}

impl EtcdStore {
    /// Opens the store of this URL. Its connections and tasks run on `runtime`.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// - [`Config`](leasehold_core::ErrorKind::Config): the URL is invalid.
    /// - [`Unreachable`](leasehold_core::ErrorKind::Unreachable): no majority of the members
    ///   responds.
    /// - [`Denied`](leasehold_core::ErrorKind::Denied): etcd rejects the user or the password, or
    ///   the user lacks a permission.
    /// - [`Unsupported`](leasehold_core::ErrorKind::Unsupported): the URL leads to etcd's
    ///   grpc-proxy.
    /// - Any other error of etcd.
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
            join_limiter: join_limit::JoinLimiter::default(),
            contention_hints: contention_hints::ContentionHints::default(),
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
        let (listeners, eviction_listener) = (Arc::default(), OnceLock::new());
        let (members, can_listen) = (found.members, found.can_listen);
        Ok(Self {
            info,
            members,
            shared,
            listeners,
            eviction_listener,
            can_listen,
            _tending: tending,
        })
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
    /// Returns the key of a claim's entry. For a claim that this client does not know, returns a
    /// key that no claim has.
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
        self.result(doctor::diagnose(&self.shared.client, self.members).await)
    }

    async fn disconnect(&self) {
        self.shared.leases.disconnect().await;
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        self.result_about(&claim.name, self.shared.join(claim, mode).await)
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        self.result(self.shared.renew(renewals).await)
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        self.result_about(&claim.name, self.shared.leave(claim, keep).await)
    }

    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        self.result_about(&claim.name, self.shared.convert(claim).await)
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        Ok(self.shared.waiters.news(claim.id).await)
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        self.result_about(name, self.shared.show(name).await)
    }

    async fn holders(&self, name: &Name, token: Option<Token>) -> Result<Option<LockInfo>> {
        self.result_about(name, self.shared.show_holders(name, token).await)
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        self.result(self.shared.list(prefix).await)
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        self.result_about(name, self.shared.evict(name, which).await)
    }

    fn on_eviction(&self, listener: Weak<dyn EvictionListener>) {
        self.listeners.add(listener);
        if self.can_listen {
            let listen = || self.shared.listen_for_evictions(self.listeners.clone());
            self.eviction_listener.get_or_init(listen);
        }
    }

    async fn follow(&self, queues: &Queues) -> Result<Option<Follow>> {
        self.result(self.shared.follow_all(queues).await).map(Some)
    }

    fn ownership(&self, claim: &Claim) -> Result<Option<Ownership>> {
        Ok(Some(Ownership::new(SCHEME, self.shared.key(claim))))
    }
}

impl EtcdStore {
    fn result<T>(&self, done: Result<T, Failure>) -> Result<T> {
        done.map_err(|failure| closed(failure, &self.shared.namespace).into())
    }

    /// Converts the result of a call about one lock.
    fn result_about<T>(&self, name: &Name, done: Result<T, Failure>) -> Result<T> {
        let prefix = self.shared.prefix(name);
        done.map_err(|failure| closed(failure, &String::from_utf8_lossy(&prefix)).into())
    }
}

fn guarantees(&Found { members, ignores_old_leaders, can_listen, .. }: &Found) -> Guarantees {
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
    promised.evicted = if can_listen { Wakeup::Push } else { Wakeup::Poll };
    promised.followed = Wakeup::Push;
    promised.liveness = Liveness::Lease;
    promised.clock = ClockModel::Monotonic;
    promised.lock_delay = true;
    promised.min_hold = true;
    promised.downgrades = true;
    promised.grant = durability;
    promised.token = durability;
    promised.on_pause = Survival::Fenced;
    promised.on_clock_step = Survival::Exclusive;
    promised.on_store_crash = Survival::Exclusive;
    promised.on_failover = failover;
    promised.on_partition = Survival::Exclusive;
    promised.stall = Stall::Nobody;
    // Whole seconds, etcd's minimum lease, half a second until etcd checks, and an election.
    promised.recovery = Duration::from_secs(6);
    promised.recovery_leases = 1;
    promised.notes = Cow::Borrowed(&[
        Cow::Borrowed(
            "etcd counts leases in whole seconds and has a minimum of 1 or 2 s, depending on its \
                 election timeout. A dead holder's lock stays taken for at least that long.",
        ),
        Cow::Borrowed(
            "A crashed waiter keeps its queue position for its whole lease and lock-delay, even if \
                 later waiters have shorter leases.",
        ),
        Cow::Borrowed(
            "Each change of leader restarts all leases. If a holder crashed shortly before, its lock \
                 stays unavailable for one more lease.",
        ),
        Cow::Borrowed(
            "Tokens are etcd revisions. They decrease only if etcd is restored from a \
                       backup.",
        ),
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
