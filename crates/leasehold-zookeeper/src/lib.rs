//! The `zookeeper:` store: locks on a ZooKeeper ensemble, in one queue with Curator's or kazoo's.
//!
//! The lock's node is the queue. A claim is an ephemeral sequential child of that node. The server
//! numbers the child when it is created, and deletes it when its session ends. The child's name
//! contains everything that matters about the claim. So a listing of the names determines the
//! holders (`node.rs`).
//!
//! ```text
//! CHROOT/NAME                               a container, deleted by the server when it stays empty
//! CHROOT/NAME/_c_GUID-lock-0000000007       one claim; its data describes the client, for display
//! ```
//!
//! With `naming=kazoo`, the lock's node is persistent, and the children have kazoo's names.
//!
//! # One call
//! - *join* sends the creation of the child and the listing of all children together, so acquiring
//!   a free lock takes one round trip. The server executes a session's requests in order. So the
//!   listing contains the new child and every child with a smaller number. No child is ever
//!   inserted ahead of an existing one, so the number of claims ahead only shrinks. A try lists
//!   first, and writes nothing if it would not be granted. The token is the transaction that
//!   created the child (its `czxid`). It increases across all nodes of the ensemble. It also
//!   increases across deletions of the lock's node, crashes and fail-overs.
//! - *leave* deletes the child. The server notifies the clients that watch it, whose claims are the
//!   ones that may now fit.
//! - *renew* of holders is one write that changes nothing: a transaction that only checks that the
//!   children exist, for many claims at once. The answer is reliable because a majority has agreed
//!   to the transaction (`session.rs`). Waiters whose watches are set are renewed by reads
//!   (`renew.rs`).
//!
//! # Notification
//! A waiter watches the nearest claims ahead that together leave no room for it. For a mutex that
//! is its predecessor, for a reader the writer ahead, and for one of n permits the n claims ahead.
//! It watches no other claims. The waiter cannot be granted while they all stay. When one of them
//! is deleted, the waiter watches another one instead. If it does not know the names of all claims
//! that are left ahead, it lists the queue. So a release wakes one waiter of a mutex, and at most n
//! waiters for n permits. A waiter also watches its own child. An evicted waiter is notified of its
//! eviction before it is notified of later departures ahead, because the server notifies in the
//! order of its transactions.
//!
//! So the cost of a mutex hand-over for the server does not depend on the number of waiters. It is
//! a deletion, a creation, two listings and two watches with their replies, and one notification to
//! each of the two clients.
//!
//! The client that evicts a holder also notifies it. A client that displays a queue watches the
//! whole queue (`notify.rs`).
//!
//! # Clocks and expiry
//! A child lives as long as its client's session, measured by the leader's monotonic clock.
//! `session.rs` calculates for how long the client can be certain of that. In addition, the client
//! itself deletes each of its children that was not renewed for the claim's lease. So `no_renewal`
//! and `max_hold` work as in other stores while the client lives. The queue positions of callers
//! that are gone also expire as in other stores. If the client crashes, its children are deleted
//! when its session expires.
//!
//! # Failures
//! - *The reply to the creation is lost.* The child's name contains the claim's ID. The next join
//!   looks for that child before it creates another one.
//! - *The creation arrives after the client has looked for the child.* This cannot happen. The
//!   servers execute a session's requests in order. When the session reconnects, the server drops
//!   the session's old connection. Requests that another member still forwards for the session are
//!   rejected (`SessionMoved`). If an old request to move the session arrives late in the same way,
//!   the servers reject the new connection's requests instead. Then the client reconnects, which
//!   moves the session back.
//! - *The caller's future is dropped.* Each call is a task of the client and continues. The `leave`
//!   that follows waits for that task. So the client never drops a future of the driver that is not
//!   safe to drop.
//! - *The session ends.* Its claims are lost. The next call opens a new session, which inherits
//!   nothing. A child of the old session that is still visible is treated as another client's.
//! - *The lock's node is deleted.* The client creates it again. The sequence numbers start again
//!   from zero, but the tokens continue to increase.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod claims;
mod doctor;
mod fault;
mod inspect;
mod join;
mod join_all;
mod leave;
mod members;
mod node;
mod notify;
mod ownership;
mod path;
mod queue;
mod relay;
mod renew;
mod session;
mod shared;
mod ticks;
mod tunnel;
mod url;
mod wait_in_queue;
mod watch;

use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use self::claims::{Claims, Stage};
use self::leave::reap;
use self::notify::notify_evictions;
use self::ownership::SCHEME;
pub use self::ownership::ZooKeeperGuardExt;
use self::session::Session;
use self::shared::Shared;
use self::url::ZooKeeperUrl;
use leasehold_core::Opening;
use leasehold_core::doctor::Finding;
use leasehold_core::store::{
    ALL_KINDS, ClockModel, Durability, Evict, EvictionListener, EvictionListeners, Follow,
    Guarantees, Joined, Liveness, LockInfo, Mode, Ownership, Queues, Renew, Renewal, Signal, Stall,
    Store, StoreInfo, Survival, Wakeup,
};
use leasehold_core::{Claim, Clock, Error, ErrorKind, Name, Result, Token};

/// Locks on a ZooKeeper ensemble. See the crate's documentation.
pub struct ZooKeeperStore {
    info: StoreInfo,
    shared: Arc<Shared>,
    reaper: AbortHandle,
    /// The task that receives announcements of evictions. `None` if the server or the user's
    /// permissions do not allow that.
    eviction_task: Option<AbortHandle>,
}

impl ZooKeeperStore {
    /// Opens the store of this URL, `zookeeper://host:port,host:port/path?…`. Its session and tasks
    /// run on `runtime`. Takes a few round trips.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// - [`ErrorKind::Config`]: the URL is invalid, or the path does not exist.
    /// - [`ErrorKind::Unreachable`]: no server with a quorum responds within 10 s.
    /// - [`ErrorKind::Denied`]: the user lacks a permission.
    pub async fn open(url: &str, runtime: &Handle) -> Result<Arc<Self>> {
        let url = ZooKeeperUrl::parse(url)?;
        let shown = url.shown();
        let session = Session::open(&url, runtime).await?;
        let shared = Arc::new(Shared {
            url,
            runtime: runtime.clone(),
            clock: Clock::default(),
            current: Mutex::new(session.clone()),
            opening: tokio::sync::Mutex::default(),
            claims: Claims::default(),
            warned: Mutex::default(),
            listeners: EvictionListeners::default(),
        });
        let first_session = session.clone();
        let work = shared.run(|shared| async move {
            let (found, members, evicted) = tokio::join!(
                shared.find_chroot(&first_session),
                doctor::members(&first_session),
                shared.watch_evicted(&first_session)
            );
            found.map(|()| (members, evicted.ok()))
        });
        let (members, evicted) = work.await?;
        let guarantees = guarantees(&shared.url, &session, members, evicted.is_some());
        let info = StoreInfo::new(shown, guarantees).identified(identity(&shared.url));
        let reaper = runtime.spawn(reap(Arc::downgrade(&shared)));
        let reaper = reaper.abort_handle();
        let notify = |watcher| notify_evictions(Arc::downgrade(&shared), watcher);
        let eviction_task = evicted.map(|watcher| runtime.spawn(notify(watcher)).abort_handle());
        Ok(Arc::new(Self { info, shared, reaper, eviction_task }))
    }
}

impl Drop for ZooKeeperStore {
    fn drop(&mut self) {
        self.reaper.abort();
        self.eviction_task.iter().for_each(AbortHandle::abort);
    }
}

impl fmt::Debug for ZooKeeperStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZooKeeperStore").field("url", &self.info.url).finish_non_exhaustive()
    }
}

/// Returns the store's identity: its addresses, chroot and naming, because an ensemble has no name
/// of its own.
fn identity(url: &ZooKeeperUrl) -> String {
    let mut hosts: Vec<String> = url.hosts.iter().map(ToString::to_string).collect();
    hosts.sort_unstable();
    format!("zookeeper:{}{}#{:?}", hosts.join(","), url.root(), url.naming)
}

/// Opens the store of a URL, for a [`Registry`](leasehold_core::Registry).
pub fn open(url: String, runtime: Handle) -> Opening {
    Box::pin(async move { Ok(ZooKeeperStore::open(&url, &runtime).await? as Arc<dyn Store>) })
}

#[async_trait]
impl Store for ZooKeeperStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let work = self.shared.run(|shared| async move {
            let session = shared.session().await?;
            doctor::diagnose(&session, &shared.url).await
        });
        work.await
    }

    fn ownership(&self, claim: &Claim) -> Result<Option<Ownership>> {
        match self.shared.claims.stage(claim.id) {
            Stage::Created(claim_node) => Ok(Some(Ownership::new(SCHEME, claim_node.path()))),
            Stage::New | Stage::Requested { .. } => {
                Err(Error::lost(leasehold_core::LostReason::Gone))
            }
        }
    }

    fn longest_lease(&self) -> Duration {
        self.shared.current().longest_lease()
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let (name, claim) = (claim.name.clone(), claim.clone());
        let caller = Arc::new(());
        let there = Arc::downgrade(&caller);
        let joined = self.shared.run(|shared| shared.join(claim, mode, there)).await;
        drop(caller);
        joined.map_err(|e| e.with_lock(&name).with_store(&self.info.url))
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let renewals = renewals.to_vec();
        let renewed = self.shared.run(|shared| shared.renew(renewals)).await;
        renewed.map_err(|e| e.with_store(&self.info.url))
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        if keep.is_some() {
            let what = "min_hold is not supported by zookeeper:";
            let hint = "remove min_hold, or use postgres:, mysql:, sqlite:, redis:, etcd: or file:";
            return Err(Error::new(ErrorKind::Unsupported, what)
                .with_hint(hint)
                .with_lock(&claim.name)
                .with_store(&self.info.url));
        }
        let (name, claim) = (claim.name.clone(), claim.clone());
        let left = self.shared.run(|shared| shared.leave(claim)).await;
        left.map_err(|e| e.with_lock(&name).with_store(&self.info.url))
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        Ok(self.shared.claims.news(claim.id).await)
    }

    fn on_eviction(&self, listener: Weak<dyn EvictionListener>) {
        self.shared.listeners.add(listener);
    }

    async fn follow(&self, queues: &Queues) -> Result<Option<Follow>> {
        // The server does not support such watches, or this user may not set them.
        if self.eviction_task.is_none() {
            return Ok(None);
        }
        let queues = queues.clone();
        let followed = self.shared.run(|shared| shared.follow_all(queues)).await;
        followed.map(Some).map_err(|e| e.with_store(&self.info.url))
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        let wanted = name.clone();
        let read = self.shared.run(|shared| shared.read(wanted)).await;
        read.map_err(|e| e.with_lock(name).with_store(&self.info.url))
    }

    async fn holders(&self, name: &Name, token: Option<Token>) -> Result<Option<LockInfo>> {
        let wanted = name.clone();
        let read = self.shared.run(move |shared| shared.holders(wanted, token)).await;
        read.map_err(|e| e.with_lock(name).with_store(&self.info.url))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let prefix = prefix.to_owned();
        let listed = self.shared.run(|shared| shared.list(prefix)).await;
        listed.map_err(|e| e.with_store(&self.info.url))
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        let wanted = name.clone();
        let evicted = self.shared.run(move |shared| shared.evict(wanted, which)).await;
        evicted.map_err(|e| e.with_lock(name).with_store(&self.info.url))
    }
}

/// Returns the store's guarantees. `members` is the number of voting members, if it is known.
/// `is_listening` is whether this client receives announcements of evictions.
fn guarantees(
    url: &ZooKeeperUrl,
    session: &Session,
    members: Option<usize>,
    is_listening: bool,
) -> Guarantees {
    let mut notes = vec![
        Cow::Borrowed(
            "While a client lives, its claims end with their leases. If the client dies, they end with its \
             session, whatever lease was requested.",
        ),
        Cow::Borrowed(
            "A new leader restarts all sessions. If holder and leader die together, the lock stays taken \
             for up to one more session.",
        ),
        Cow::Borrowed(
            "A leader that was paused for nearly a session and resumes before another leader is elected can \
             end a session that it has just served. Check tokens.",
        ),
        Cow::Borrowed(
            "All members must have the same session limits. After a change of member, the shortest limit \
             that any member enforces applies.",
        ),
        Cow::Borrowed(
            "Grants are as durable as the members' disks. With forceSync=no, or with a single server, they do \
             not survive a power cut.",
        ),
        Cow::Borrowed("Anyone with permission to delete nodes can remove locks."),
    ];
    let alone = members.is_some_and(|members| members < 2);
    if alone {
        notes.push(Cow::Borrowed(
            "There is only one server. While it is down, no lock is granted. If its disk fails, all locks are lost.",
        ));
    }
    let (asked, given) = (url.session, session.timeout());
    if asked != given {
        notes.push(Cow::Owned(format!(
            "The servers granted a session of {given:?}; {asked:?} was requested."
        )));
    }
    let mut promised = Guarantees::least();
    promised.kinds = Cow::Borrowed(ALL_KINDS);
    promised.fifo = true;
    promised.wakeup = Wakeup::Push;
    promised.evicted = if is_listening { Wakeup::Push } else { Wakeup::Poll };
    promised.followed = promised.evicted;
    promised.liveness = Liveness::Session;
    promised.clock = ClockModel::Monotonic;
    promised.lock_delay = false;
    promised.min_hold = false;
    promised.grant = if alone { Durability::Disk } else { Durability::Majority };
    promised.token = if alone { Durability::Disk } else { Durability::Majority };
    promised.on_pause = Survival::Fenced;
    promised.on_clock_step = Survival::Exclusive;
    promised.on_store_crash = Survival::Exclusive;
    // The cause is not the election itself, but a leader that was paused until shortly before one.
    promised.on_failover = Survival::Fenced;
    promised.on_partition = Survival::Exclusive;
    promised.stall = Stall::Nobody;
    // The leader checks for expired sessions once per tick.
    promised.recovery = given + Duration::from_secs(3);
    promised.recovery_leases = 0;
    promised.notes = Cow::Owned(notes);
    promised
}
