//! The `zookeeper:` store: locks on a ZooKeeper ensemble, in one queue with Curator's or kazoo's.
//!
//! The lock's node is the queue. A claim is an ephemeral sequential child of it: the server numbers
//! it as it joins, and deletes it when its session ends. All of a claim that matters is in its name,
//! so that a listing of the names decides who holds (`node.rs`).
//!
//! ```text
//! CHROOT/NAME                               a container, deleted by the server when it stays empty
//! CHROOT/NAME/_c_GUID-lock-0000000007       one claim; its data: who, for people
//! ```
//!
//! # One call
//! - *join* sends the creation of the child and the listing of all children together, so a free
//!   lock costs one round trip. The session is served in order: the listing has our child and
//!   every one numbered before it. Nobody is ever put before us, so what we see before us can only
//!   become less. Who only tries looks first, and where others hold nothing is written. Token is
//!   the transaction that made the child (its `czxid`): it rises over all nodes of the ensemble,
//!   over deletion of the lock's node, crash and fail-over.
//! - *leave* deletes the child. The server tells those who watch it, which are the ones that fit now.
//! - *renew* is one write that changes nothing: a transaction that only checks that our children
//!   exist, for up to hundreds of claims at once. That a majority has agreed is what makes the
//!   answer worth something (`session.rs`).
//!
//! # Who wakes whom
//! A waiter watches the nearest claims before it that together leave it no room, and no others: of
//! a mutex its predecessor, of a reader the writer before it, of one of n permits the n before it.
//! While they all stay it cannot hold. When one is deleted, it watches one more instead, or lists
//! the queue if it does not know the names of all that are left ahead. So a release wakes one of
//! those that wait for a mutex, and at most n of those that wait for n permits. A waiter watches
//! its own child too: one that is evicted learns of that before it learns of those ahead, since the
//! server notifies in the order of its transactions.
//!
//! So a hand-over of a mutex costs the server the same however many clients wait: a deletion, a
//! creation, two listings and two watches with their replies, and one notification to each of the
//! two clients.
//!
//! The evictor notifies a holder that it evicts. A client that shows a queue to people watches all
//! of it (`hear.rs`).
//!
//! # Whose clock, and who is dead
//! A child lives as long as its client's session, by the leader's monotonic clock. For how long that
//! is certain, seen from here, is reckoned in `session.rs`. On top of that the client itself deletes
//! what of its own was not renewed for its lease, so `no_renewal`, `max_hold` and places of callers
//! that went away work as in other stores, as long as the client lives; when it dies, the session is
//! what counts.
//!
//! # What if
//! - *the reply to the creation is lost*: the claim's id is in the child's name, where it is looked
//!   for before another is made;
//! - *the creation arrives after we have looked for it*: it cannot. A session is served in order; a
//!   server drops a session's old connection when it comes back, and requests that another member
//!   still forwards for it are refused (`SessionMoved`). Should an old request to move the session come
//!   late in the same way, it is our own that are refused: then we connect anew, which moves it back;
//! - *the caller's future is dropped*: each call is a task of the client's own and goes on; the
//!   `leave` that follows waits for it. Nothing of the driver's that is not safe to drop is ever
//!   dropped;
//! - *the session ends*: its claims are lost. The next call opens a new session, which inherits
//!   nothing: a child of the old one that is still to be seen is somebody else's;
//! - *the lock's node was deleted*: it is made again, and numbers begin anew; tokens do not.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod claims;
mod doctor;
mod fault;
mod hear;
mod inspect;
mod join;
mod leave;
mod members;
mod node;
mod ownership;
mod path;
mod queue;
mod relay;
mod renew;
mod session;
mod shared;
mod stand;
mod stream;
mod ticks;
mod tls;
mod together;
mod tunnel;
mod url;
mod watch;

use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use self::claims::{Claims, Stage};
use self::hear::hear;
use self::leave::reap;
use self::ownership::SCHEME;
pub use self::ownership::ZooKeeperGuardExt;
use self::session::Session;
use self::shared::Shared;
use self::url::ZooKeeperUrl;
use leasehold_core::Opening;
use leasehold_core::doctor::Finding;
use leasehold_core::store::{
    ALL_KINDS, ClockModel, Durability, Ear, Ears, Evict, Follow, Guarantees, Joined, Liveness,
    LockInfo, Mode, Ownership, Queues, Renew, Renewal, Signal, Stall, Store, StoreInfo, Survival,
    Wakeup,
};
use leasehold_core::{Claim, Clock, Error, ErrorKind, Name, Result, Token};

/// Locks on a ZooKeeper ensemble. See the module's documentation.
pub struct ZooKeeperStore {
    info: StoreInfo,
    shared: Arc<Shared>,
    reaper: AbortHandle,
    /// Hears of evictions, where we may.
    hearing: Option<AbortHandle>,
}

impl ZooKeeperStore {
    /// Opens the store of this URL, `zookeeper://host:port,host:port/path?…`. Its session and tasks
    /// run on `runtime`. A few round trips.
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
            ears: Ears::default(),
        });
        let looking = session.clone();
        let looked = shared.run(|shared| async move {
            let (found, members, evicted) = tokio::join!(
                shared.find_chroot(&looking),
                doctor::members(&looking),
                shared.watch_evicted(&looking)
            );
            found.map(|()| (members, evicted.ok()))
        });
        let (members, evicted) = looked.await?;
        let guarantees = guarantees(&shared.url, &session, members, evicted.is_some());
        let info = StoreInfo::new(shown, guarantees).identified(identity(&shared.url));
        let reaper = runtime.spawn(reap(Arc::downgrade(&shared)));
        let reaper = reaper.abort_handle();
        let hearing = evicted.map(|watcher| runtime.spawn(hear(Arc::downgrade(&shared), watcher)));
        let hearing = hearing.map(|hearing| hearing.abort_handle());
        Ok(Arc::new(Self { info, shared, reaper, hearing }))
    }
}

impl Drop for ZooKeeperStore {
    fn drop(&mut self) {
        self.reaper.abort();
        self.hearing.iter().for_each(AbortHandle::abort);
    }
}

impl fmt::Debug for ZooKeeperStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZooKeeperStore").field("url", &self.info.url).finish_non_exhaustive()
    }
}

/// By address: an ensemble has no name of its own.
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
        let looked = self.shared.run(|shared| async move {
            let session = shared.session().await?;
            doctor::diagnose(&session, &shared.url).await
        });
        looked.await
    }

    fn ownership(&self, claim: &Claim) -> Result<Option<Ownership>> {
        match self.shared.claims.stage(claim.id) {
            Stage::Standing(standing) => Ok(Some(Ownership::new(SCHEME, standing.path()))),
            Stage::New | Stage::Asked { .. } => Err(Error::lost(leasehold_core::LostReason::Gone)),
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
        joined.map_err(|e| e.on(&name).at(&self.info.url))
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let renewals = renewals.to_vec();
        let renewed = self.shared.run(|shared| shared.renew(renewals)).await;
        renewed.map_err(|e| e.at(&self.info.url))
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        if keep.is_some() {
            let what = "at_least is not supported by zookeeper:";
            let hint = "remove at_least, or use postgres:, mysql:, sqlite:, redis:, etcd: or file:";
            return Err(Error::new(ErrorKind::Unsupported, what)
                .with_hint(hint)
                .on(&claim.name)
                .at(&self.info.url));
        }
        let (name, claim) = (claim.name.clone(), claim.clone());
        let left = self.shared.run(|shared| shared.leave(claim)).await;
        left.map_err(|e| e.on(&name).at(&self.info.url))
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        Ok(self.shared.claims.news(claim.id).await)
    }

    fn hear(&self, ear: Weak<dyn Ear>) {
        self.shared.ears.add(ear);
    }

    async fn follow(&self, queues: &Queues) -> Result<Option<Follow>> {
        // A server that knows no such watches, or does not let us.
        if self.hearing.is_none() {
            return Ok(None);
        }
        let queues = queues.clone();
        let followed = self.shared.run(|shared| shared.follow_all(queues)).await;
        followed.map(Some).map_err(|e| e.at(&self.info.url))
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        let wanted = name.clone();
        let read = self.shared.run(|shared| shared.read(wanted)).await;
        read.map_err(|e| e.on(name).at(&self.info.url))
    }

    async fn holders(&self, name: &Name, token: Option<Token>) -> Result<Option<LockInfo>> {
        let wanted = name.clone();
        let read = self.shared.run(move |shared| shared.holders(wanted, token)).await;
        read.map_err(|e| e.on(name).at(&self.info.url))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let prefix = prefix.to_owned();
        let listed = self.shared.run(|shared| shared.list(prefix)).await;
        listed.map_err(|e| e.at(&self.info.url))
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        let wanted = name.clone();
        let evicted = self.shared.run(move |shared| shared.evict(wanted, which)).await;
        evicted.map_err(|e| e.on(name).at(&self.info.url))
    }
}

/// `members`: how many have a vote, if that is told. `hears`: whether it is told who was evicted.
fn guarantees(
    url: &ZooKeeperUrl,
    session: &Session,
    members: Option<usize>,
    hears: bool,
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
            "There is only one server. What its disk loses is lost, and while it is down nothing is granted.",
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
    promised.evicted = if hears { Wakeup::Push } else { Wakeup::Poll };
    promised.followed = promised.evicted;
    promised.liveness = Liveness::Session;
    promised.clock = ClockModel::Monotonic;
    promised.lock_delay = false;
    promised.at_least = false;
    promised.grant = if alone { Durability::Disk } else { Durability::Majority };
    promised.token = if alone { Durability::Disk } else { Durability::Majority };
    promised.on_pause = Survival::Fenced;
    promised.on_clock_step = Survival::Exclusive;
    promised.on_store_crash = Survival::Exclusive;
    // Not by the election itself: by a leader that stood still until it was nearly time for one.
    promised.on_failover = Survival::Fenced;
    promised.on_partition = Survival::Exclusive;
    promised.stall = Stall::Nobody;
    // The leader looks once a tick.
    promised.recovery = given + Duration::from_secs(3);
    promised.recovery_leases = 0;
    promised.notes = Cow::Owned(notes);
    promised
}
