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
//!   become less. Token is the transaction that made the child (its `czxid`): it rises over all nodes
//!   of the ensemble, over deletion of the lock's node, crash and fail-over.
//! - *leave* deletes the child. The server tells those who watch it, which are the ones that fit now.
//! - *renew* is one write that changes nothing: a transaction that only checks that our children
//!   exist, for up to hundreds of claims at once. That a majority has agreed is what makes the
//!   answer worth something (`session.rs`).
//!
//! # Who wakes whom
//! A waiter watches the nearest claims before it that together leave it no room, and no others: of
//! a mutex its predecessor, of a reader the writer before it, of one of n permits the n before it.
//! While they all stay it cannot hold; when the last that was in its way is deleted it holds, and
//! knows it without asking. It watches its own child too: who is evicted while it waits hears of that
//! before it hears of anybody behind or before it, since the server tells in the order of its
//! transactions.
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
//!   still forwards for it are refused (`SessionMoved`);
//! - *the caller's future is dropped*: each call is a task of the client's own and goes on; the
//!   `leave` that follows waits for it. Nothing of the driver's that is not safe to drop is ever
//!   dropped;
//! - *the session ends*: its claims are lost. The next call opens a new session, which inherits
//!   nothing: a child of the old one that is still to be seen is somebody else's;
//! - *the lock's node was deleted*: it is made again, and numbers begin anew; tokens do not.

mod claims;
mod doctor;
mod fault;
mod node;
mod ownership;
mod path;
mod session;
mod url;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use zookeeper_client::{
    Acls, CreateMode, Error as Fault, EventType, MultiWriteError, OneshotWatcher, Stat,
    WatchedEvent,
};

use self::claims::{Claims, Known, Stage, Standing};
use self::fault::{ends_session, explain};
use self::node::{Children, LAST_SEQUENCE, LATE_SEQUENCE, Naming, Node, Places, Stand};
use self::session::{Session, shut_down};
use self::url::{Access, ZooKeeperUrl};
use super::guarantees::ALL_KINDS;
use super::{
    ClaimInfo, ClockModel, Durability, Evict, Guarantees, Joined, Liveness, LockInfo, Mode, Place,
    Renew, Renewal, Signal, Store, Survival, Wakeup, holders_of, mismatch,
};
use crate::claim::{Claim, ClaimId, Holder, Kind, Token};
use crate::clock::{Clock, Moment, wall_micros};
use crate::doctor::Finding;
use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;
use crate::store::Standing as Shown;

/// How much of paths goes into one request: the server refuses requests above a megabyte.
const REQUEST_BYTES: usize = 256 * 1024;
/// How many requests about nodes are under way at once, for people.
const READ_TOGETHER: usize = 256;
/// How often the lock's node is made when it vanishes again before its child is.
const MAKE_TRIES: u32 = 8;

/// Locks on a ZooKeeper ensemble. See the module's documentation.
pub struct ZooKeeperStore {
    shared: Arc<Shared>,
    guarantees: Guarantees,
    shown: String,
    reaper: AbortHandle,
}

/// What calls and tasks share.
#[derive(Debug)]
struct Shared {
    url: ZooKeeperUrl,
    runtime: Handle,
    clock: Clock,
    /// The session as it was last opened.
    current: Mutex<Arc<Session>>,
    /// Held while a new one is opened.
    opening: tokio::sync::Mutex<()>,
    claims: Claims,
    /// Locks whose numbers were said to run out.
    warned: Mutex<HashSet<String>>,
}

impl ZooKeeperStore {
    /// Opens the store of this URL, `zookeeper://host:port,host:port/path?…`. Its session and all its
    /// tasks live on `runtime`. A few round trips.
    ///
    /// # Errors
    /// One line that says what to do: [`ErrorKind::Config`] for a URL that cannot work or a path that
    /// does not exist, [`ErrorKind::Unreachable`] if no majority serves within 10 s,
    /// [`ErrorKind::Denied`] without permission.
    pub async fn open(url: &str, runtime: &Handle) -> Result<Arc<Self>> {
        let url = ZooKeeperUrl::parse(url)?;
        let shown = url.shown();
        let session = Session::open(&url, runtime).await?;
        let guarantees = guarantees(&url, &session);
        let shared = Arc::new(Shared {
            url,
            runtime: runtime.clone(),
            clock: Clock::default(),
            current: Mutex::new(session.clone()),
            opening: tokio::sync::Mutex::default(),
            claims: Claims::default(),
            warned: Mutex::default(),
        });
        shared.run(|shared| async move { shared.find_chroot(&session).await }).await?;
        let reaper = runtime.spawn(reap(Arc::downgrade(&shared)));
        let reaper = reaper.abort_handle();
        Ok(Arc::new(Self { shared, guarantees, shown, reaper }))
    }
}

impl Drop for ZooKeeperStore {
    fn drop(&mut self) {
        self.reaper.abort();
    }
}

impl fmt::Debug for ZooKeeperStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZooKeeperStore").field("url", &self.shown).finish_non_exhaustive()
    }
}

/// One more look at the queue is needed.
enum Looked {
    Stands(Stand),
    /// The child is not there any more.
    Gone,
}

/// What becomes of a claim that listens.
enum Heard {
    /// So much has left that the claim fits.
    Free,
    /// Something else happened to one of them.
    Changed,
    /// Its own child was deleted, or the session is over.
    Over,
}

impl Shared {
    /// Runs a call on the client's runtime, whatever becomes of the caller.
    async fn run<T, F>(self: &Arc<Self>, call: impl FnOnce(Arc<Self>) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.runtime.spawn(call(self.clone())).await.unwrap_or_else(|_| Err(shut_down()))
    }

    fn current(&self) -> Arc<Session> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The session, or a new one if it is over.
    async fn session(&self) -> Result<Arc<Session>> {
        let current = self.current();
        if !current.is_over() {
            return Ok(current);
        }
        let _one = self.opening.lock().await;
        let current = self.current();
        if !current.is_over() {
            return Ok(current);
        }
        let session = Session::open(&self.url, &self.runtime).await?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = session.clone();
        Ok(session)
    }

    fn acls(&self) -> Acls<'static> {
        match self.url.access {
            Access::Open => Acls::anyone_all(),
            Access::Creator => Acls::creator_all(),
        }
    }

    fn lock_path(&self, name: &Name) -> String {
        self.url.path(&path::encode(name))
    }

    fn naming(&self) -> Naming {
        self.url.naming
    }

    /// Makes sure at connecting that there is a node to put locks under.
    async fn find_chroot(&self, session: &Session) -> Result<()> {
        let root = self.url.root();
        let found = session.read(|c| c.check_stat(root)).await;
        match found.map_err(|fault| explain(fault, root))? {
            Some(_) => Ok(()),
            None if self.url.create => self.make_chroot(session).await,
            None => Err(explain(Fault::NoNode, root)),
        }
    }

    async fn make_chroot(&self, session: &Session) -> Result<()> {
        let chroot = &self.url.chroot;
        let ends = chroot.match_indices('/').map(|(i, _)| i).skip(1).chain([chroot.len()]);
        for end in ends {
            let part = &chroot[..end];
            let options = CreateMode::Persistent.with_acls(self.acls());
            match session.write(|c| c.create(part, &[], &options)).await {
                Ok(_) | Err(Fault::NodeExists) => {}
                Err(fault) => return Err(explain(fault, part)),
            }
        }
        Ok(())
    }

    /// Makes a lock's node. kazoo makes its own once and then counts on it; Curator makes it again.
    async fn make_lock(&self, session: &Session, lock: &str) -> Result<()> {
        let mode = match self.naming() {
            Naming::Curator => CreateMode::Container,
            Naming::Kazoo => CreateMode::Persistent,
        };
        let options = mode.with_acls(self.acls());
        match session.write(|c| c.create(lock, &[], &options)).await {
            Ok(_) | Err(Fault::NodeExists) => Ok(()),
            Err(Fault::NoNode) if self.url.create => self.make_chroot(session).await,
            Err(Fault::NoNode) => Err(explain(Fault::NoNode, self.url.root())),
            Err(fault) => Err(explain(fault, lock)),
        }
    }

    /// Joins for a caller who is there as long as `caller` is.
    async fn join(self: Arc<Self>, claim: Claim, mode: Mode, caller: Weak<()>) -> Result<Joined> {
        if !claim.lock_delay.is_zero() {
            let what = "ZooKeeper keeps nothing of an unclean end, so there is no lock-delay: leave \
                        lock_delay out, or use another store";
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let _turn = self.claims.enter(claim.id).await;
        if self.claims.is_given_up(claim.id) {
            self.end_given_up(claim.id).await;
            self.claims.begin_anew(claim.id);
        }
        let started = self.clock.now();
        let stage = self.claims.stage(claim.id);
        if caller.strong_count() == 0 {
            // Who asked has gone, and what comes now would be nobody's.
            if let Stage::New = stage {
                self.claims.remove(claim.id);
            }
            return Err(explain(Fault::Timeout, self.url.root()));
        }
        let session = match self.session().await {
            Ok(session) => session,
            Err(error) => {
                if let Stage::New = stage {
                    self.claims.remove(claim.id);
                }
                return Err(error);
            }
        };
        let standing = match stage {
            Stage::New => None,
            Stage::Asked { lock } => self.search(&session, &claim, &lock).await?,
            Stage::Standing(standing) => Some(standing),
        };
        match standing {
            None => self.enter_queue(&session, claim, mode, started).await,
            Some(standing) if standing.session == session.id() => {
                match self.ask(&session, claim.clone(), started).await? {
                    // It was there, and was taken away, or expired just now: it stands anew, and
                    // never beside its first child.
                    Joined::Busy { .. } => {
                        self.delete(&session, &standing).await?;
                        self.claims.begin_anew(claim.id);
                        self.enter_queue(&session, claim, mode, started).await
                    }
                    // Its child should have been deleted when it did not hold.
                    Joined::Waiting(_) if mode == Mode::Try && self.claims.is_trying(claim.id) => {
                        self.delete(&session, &standing).await?;
                        self.claims.remove(claim.id);
                        Ok(Joined::Busy { holders: Vec::new() })
                    }
                    joined => Ok(joined),
                }
            }
            // A new session inherits nothing.
            Some(_) => Ok(Joined::Busy { holders: Vec::new() }),
        }
    }

    /// Makes the claim's child, and sees who is before it.
    async fn enter_queue(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: Claim,
        mode: Mode,
        started: Moment,
    ) -> Result<Joined> {
        let lock = self.lock_path(&claim.name);
        let prefix = format!("{lock}/{}", node::prefix(self.naming(), &claim));
        let data = serde_json::to_vec(&*claim.holder).unwrap_or_default();
        let options = CreateMode::EphemeralSequential.with_acls(self.acls());
        let mut tries = 0;
        loop {
            self.claims.asked(&claim, mode, &lock, self.clock.now());
            let sent = session.write(|c| async {
                let create = c.create(&prefix, &data, &options);
                let list = c.list_children(&lock);
                let (created, listed) = tokio::join!(create, list);
                created.map(|created| (created, listed))
            });
            match sent.await {
                Ok(((stat, sequence), listed)) => {
                    let Some(token) = token_of(&stat) else {
                        let what = "the server tells no transaction of what it creates: leasehold \
                                    needs ZooKeeper 3.6 or later";
                        return Err(Error::new(ErrorKind::Unsupported, what));
                    };
                    let node = format!("{}{sequence}", &prefix[lock.len() + 1..]);
                    let standing = Standing {
                        session: session.id(),
                        lock: lock.clone(),
                        node,
                        token,
                        sequence: sequence.into_i64(),
                    };
                    if !self.claims.stands(claim.id, standing.clone()) {
                        self.delete(session, &standing).await?;
                        return Err(explain(Fault::Timeout, &lock));
                    }
                    let node = standing.clone();
                    let decided = match listed {
                        Ok(names) => {
                            self.decide(session, &claim, mode, started, standing, names).await
                        }
                        Err(fault) => Err(explain(fault, &lock)),
                    };
                    return match decided {
                        // Refused, it is not asked for again, and nobody would leave for it.
                        Err(error) if error.kind() != ErrorKind::Unreachable => {
                            Err(self.undone(session, &claim, &node, error).await)
                        }
                        decided => decided,
                    };
                }
                Err(Fault::NoNode) if tries < MAKE_TRIES => {
                    tries += 1;
                    if let Err(error) = self.make_lock(session, &lock).await {
                        self.claims.remove(claim.id);
                        return Err(error);
                    }
                }
                Err(fault) => {
                    let error = explain(fault, &lock);
                    // Refused, there is nothing of it; else it is looked for when asked again.
                    if error.kind() != ErrorKind::Unreachable {
                        self.claims.remove(claim.id);
                    }
                    return Err(error);
                }
            }
        }
    }

    /// What the listing that came with a new child means for it.
    async fn decide(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: &Claim,
        mode: Mode,
        started: Moment,
        standing: Standing,
        names: Vec<String>,
    ) -> Result<Joined> {
        let children = self.order(&standing.lock, names)?;
        if let Some((kind, capacity)) = children.mismatch(claim, &standing.node) {
            return Err(mismatch(claim, kind, capacity));
        }
        let Some(stand) = children.stand(&standing.node) else {
            self.claims.remove(claim.id);
            return Ok(Joined::Busy { holders: Vec::new() });
        };
        if stand.blockers.is_empty() {
            return self.hold(session, claim, started, standing.token);
        }
        if mode == Mode::Try {
            let front = &children.nodes()[..children.holding().min(stand.ahead)];
            let (left, seen) = tokio::join!(
                self.delete(session, &standing),
                self.look_at(session, &standing.lock, front)
            );
            left?;
            self.claims.remove(claim.id);
            let info = self.describe(&claim.name, &children, front.iter().zip(seen?));
            return Ok(Joined::Busy { holders: holders_of(&info) });
        }
        self.wait(session, claim, started, stand).await
    }

    /// The claim is refused: its child goes first.
    async fn undone(
        &self,
        session: &Session,
        claim: &Claim,
        standing: &Standing,
        refusal: Error,
    ) -> Error {
        match self.delete(session, standing).await {
            Ok(_) => {
                self.claims.remove(claim.id);
                refusal
            }
            Err(error) => error,
        }
    }

    /// What is certain of a lease that was asked for at `started`.
    fn remaining(&self, session: &Session, lease: Duration, started: Moment) -> Duration {
        lease.min(session.certain_until().since(started))
    }

    fn hold(
        &self,
        session: &Session,
        claim: &Claim,
        started: Moment,
        token: Token,
    ) -> Result<Joined> {
        if !self.claims.holds(claim.id, self.clock.now().plus(claim.lease)) {
            return Ok(Joined::Busy { holders: Vec::new() });
        }
        let remaining = Some(self.remaining(session, claim.lease, started));
        Ok(Joined::Holding { token, remaining })
    }

    /// Stands in the queue: listens for what is in the way, before it is told that it waits.
    async fn wait(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: &Claim,
        started: Moment,
        mut stand: Stand,
    ) -> Result<Joined> {
        loop {
            let Some((standing, _)) = self.claims.known(claim.id) else {
                return Ok(Joined::Busy { holders: Vec::new() });
            };
            self.claims.waits(claim, stand.ahead, started);
            let ahead = stand.ahead;
            if let Some(watches) = self.watch(session, &standing, stand).await? {
                let listening = listen(
                    Arc::downgrade(self),
                    Arc::downgrade(session),
                    claim.clone(),
                    standing.clone(),
                    watches,
                );
                self.claims.listens(claim.id, self.runtime.spawn(listening).abort_handle());
                let token = Some(standing.token);
                return Ok(Joined::Waiting(Place { ahead, head_remaining: None, token }));
            }
            match self.look(session, &standing).await? {
                Looked::Gone => {
                    self.claims.remove(claim.id);
                    return Ok(Joined::Busy { holders: Vec::new() });
                }
                Looked::Stands(now) if now.blockers.is_empty() => {
                    return self.hold(session, claim, started, standing.token);
                }
                Looked::Stands(now) => stand = now,
            }
        }
    }

    /// Watches the claim's own child and what is in its way; `None` if one of them is gone already.
    async fn watch(
        &self,
        session: &Session,
        standing: &Standing,
        stand: Stand,
    ) -> Result<Option<Watches>> {
        let Stand { blockers, excess, .. } = stand;
        let paths: Vec<String> =
            blockers.iter().map(|b| format!("{}/{}", standing.lock, b.name)).collect();
        let own = standing.path();
        let asked = session.read(|c| async {
            let all = [&own].into_iter().chain(&paths).map(|path| c.get_and_watch_data(path));
            Ok(all_of(all.collect()).await)
        });
        let answers = asked.await.map_err(|fault| explain(fault, &own))?;
        let mut watchers = Vec::with_capacity(answers.len());
        for (answer, path) in answers.into_iter().zip([&own].into_iter().chain(&paths)) {
            watchers.push(match answer {
                Ok((_, _, watcher)) => watcher,
                Err(Fault::NoNode) => return Ok(None),
                Err(Fault::NoAuth) => match self.watch_closed(session, path).await? {
                    Some(watcher) => watcher,
                    None => return Ok(None),
                },
                Err(fault) => return Err(explain(fault, path)),
            });
        }
        let mut watchers = watchers.into_iter();
        let Some(mine) = watchers.next() else { return Ok(None) };
        let others = blockers.iter().map(|blocker| blocker.weight).zip(watchers).collect();
        Ok(Some(Watches::new(mine, others, excess)))
    }

    /// Watches a child of another client's that is closed to us. Anybody may ask whether a node is
    /// there; but of one that is not, that leaves a watch behind.
    async fn watch_closed(&self, session: &Session, path: &str) -> Result<Option<OneshotWatcher>> {
        let asked = session.read(|c| c.check_and_watch_stat(path)).await;
        let (stat, watcher) = asked.map_err(|fault| explain(fault, path))?;
        Ok(stat.map(|_| watcher))
    }

    /// Where a claim stands by now.
    async fn look(&self, session: &Session, standing: &Standing) -> Result<Looked> {
        let listed = session.read(|c| c.list_children(&standing.lock)).await;
        self.looked(standing, listed)
    }

    fn looked(&self, standing: &Standing, listed: session::Answer<Vec<String>>) -> Result<Looked> {
        let names = match listed {
            Ok(names) => names,
            Err(Fault::NoNode) => return Ok(Looked::Gone),
            Err(fault) => return Err(explain(fault, &standing.lock)),
        };
        let children = self.order(&standing.lock, names)?;
        Ok(children.stand(&standing.node).map_or(Looked::Gone, Looked::Stands))
    }

    /// The children in order, if they are what they should be.
    fn order(&self, lock: &str, names: Vec<String>) -> Result<Children> {
        let children = match Children::order(self.naming(), names) {
            Ok(children) => children,
            Err(foreign) => return Err(foreign_child(self.naming(), lock, foreign)),
        };
        let last = children.last_sequence();
        if children.is_disordered() || last >= LAST_SEQUENCE {
            let what = format!(
                "the node {} has given out its numbers (at {last} of 2147483647), and past them no \
                 client can order the queue: let nobody use the lock until its node is gone, or \
                 delete the node when it has no children",
                lock.escape_debug()
            );
            return Err(Error::new(ErrorKind::Full, what));
        }
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if last >= LATE_SEQUENCE && warned.len() < 1_000 && warned.insert(lock.to_owned()) {
            crate::telemetry::sequences_run_out(lock, last);
        }
        Ok(children)
    }

    /// "And now?" for a claim that has a child.
    async fn ask(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: Claim,
        started: Moment,
    ) -> Result<Joined> {
        let lease = claim.lease;
        let renewed = self.renew_on(session, &[Renew { claim, lease }], started).await?;
        Ok(match renewed.into_iter().next().map(Renewal::known).transpose()? {
            Some(Renewal::Holding { token, remaining }) => Joined::Holding { token, remaining },
            Some(Renewal::Waiting(place)) => Joined::Waiting(place),
            Some(Renewal::Lost | Renewal::Unknown { .. }) | None => {
                Joined::Busy { holders: Vec::new() }
            }
        })
    }

    /// The child of a claim whose creation was not answered.
    async fn search(
        &self,
        session: &Session,
        claim: &Claim,
        lock: &str,
    ) -> Result<Option<Standing>> {
        let Some(name) = self.named_after(session, claim.id, lock).await? else { return Ok(None) };
        let path = format!("{lock}/{name}");
        let stat = match session.read(|c| c.check_stat(&path)).await {
            Ok(Some(stat)) => stat,
            Ok(None) => return Ok(None),
            Err(fault) => return Err(explain(fault, &path)),
        };
        let sequence = Node::parse(self.naming(), name.clone()).map_or(-1, |node| node.sequence());
        let Some(token) = token_of(&stat) else { return Ok(None) };
        let (lock, session) = (lock.to_owned(), stat.ephemeral_owner);
        let standing = Standing { session, lock, node: name, token, sequence };
        self.claims.stands(claim.id, standing.clone());
        Ok(Some(standing))
    }

    /// The name of the child that bears this claim's id, by the leader's word.
    async fn named_after(
        &self,
        session: &Session,
        id: ClaimId,
        lock: &str,
    ) -> Result<Option<String>> {
        let names = match self.list_synced(session, lock).await? {
            Some(names) => names,
            None => return Ok(None),
        };
        let guid = node::guid(self.naming(), id);
        Ok(names.into_iter().find(|name| name.starts_with(&guid)))
    }

    /// The children as of now, and not as of what this member has heard; `None` without the node.
    async fn list_synced(&self, session: &Session, lock: &str) -> Result<Option<Vec<String>>> {
        let listed = session.read(|c| async {
            let (synced, listed) = tokio::join!(c.sync(lock), c.list_children(lock));
            match synced {
                Ok(()) | Err(Fault::NoNode) => listed,
                Err(fault) => Err(fault),
            }
        });
        match listed.await {
            Ok(names) => Ok(Some(names)),
            Err(Fault::NoNode) => Ok(None),
            Err(fault) => Err(explain(fault, lock)),
        }
    }

    async fn renew(self: Arc<Self>, renewals: Vec<Renew>) -> Result<Vec<Renewal>> {
        let started = self.clock.now();
        self.renew_on(&self.current(), &renewals, started).await
    }

    /// Renews what stands in this session; what does not is lost.
    async fn renew_on(
        self: &Arc<Self>,
        session: &Arc<Session>,
        renewals: &[Renew],
        started: Moment,
    ) -> Result<Vec<Renewal>> {
        let mut answers = vec![Renewal::Lost; renewals.len()];
        if session.is_over() {
            return Ok(answers);
        }
        let mut open: Vec<(usize, Standing)> = Vec::with_capacity(renewals.len());
        for (i, renew) in renewals.iter().enumerate() {
            let known = self.claims.known(renew.claim.id);
            let here = known.filter(|(standing, _)| standing.session == session.id());
            open.extend(here.map(|(standing, _)| (i, standing)));
        }
        let open = self.existing(session, open).await?;
        let mut waiting: BTreeMap<String, Vec<(usize, Standing)>> = BTreeMap::new();
        for (i, standing) in open {
            let Renew { claim, lease } = &renewals[i];
            if let Some(holding) = self.renew_holder(session, claim.id, *lease, started) {
                answers[i] = holding;
            } else if let Some((_, Known::Waiting(_))) = self.claims.known(claim.id) {
                waiting.entry(standing.lock.clone()).or_default().push((i, standing));
            }
        }
        if waiting.is_empty() {
            return Ok(answers);
        }
        // One listing for each lock, whoever waits there.
        let listed = session.read(|c| async {
            Ok(all_of(waiting.keys().map(|lock| c.list_children(lock)).collect()).await)
        });
        let listed = listed.await.map_err(|fault| explain(fault, self.url.root()))?;
        for ((lock, waiters), names) in waiting.into_iter().zip(listed) {
            let children = match names {
                // Its node is gone, and so are all who waited.
                Err(Fault::NoNode) => continue,
                Err(fault) => Err(explain(fault, &lock)),
                Ok(names) => self.order(&lock, names),
            };
            let children = match children {
                Ok(children) => children,
                Err(error) => {
                    for (i, _) in waiters {
                        answers[i] = self.refuse(session, &renewals[i], started, &error);
                    }
                    continue;
                }
            };
            // Ordered once, however many wait here.
            let places = children.places();
            for (i, standing) in waiters {
                let renew = &renewals[i];
                let renewed = self.renew_waiter(session, renew, started, &standing, &places).await;
                answers[i] =
                    renewed.unwrap_or_else(|error| self.refuse(session, renew, started, &error));
            }
        }
        Ok(answers)
    }

    /// What those hear who wait for a lock that is no good any more: they are lost, and told why when
    /// they join anew. What was not answered is asked again. Who holds or waits elsewhere hears nothing
    /// of it.
    fn refuse(
        self: &Arc<Self>,
        session: &Session,
        Renew { claim, lease }: &Renew,
        started: Moment,
        error: &Error,
    ) -> Renewal {
        if error.kind() == ErrorKind::Unreachable {
            return Renewal::unknown(error);
        }
        if self.claims.refuse(claim.id) {
            crate::telemetry::place_given_up(claim, error);
            self.runtime.spawn(self.clone().give_up(claim.id));
            return Renewal::Lost;
        }
        // It was granted in between, and holds what it has.
        self.renew_holder(session, claim.id, *lease, started).unwrap_or(Renewal::Lost)
    }

    /// The answer about a claim whose child exists, if it holds.
    fn renew_holder(
        &self,
        session: &Session,
        id: ClaimId,
        lease: Duration,
        started: Moment,
    ) -> Option<Renewal> {
        let Some((_, Known::Holding(token))) = self.claims.known(id) else { return None };
        let holds = self.claims.holds(id, self.clock.now().plus(lease));
        let remaining = Some(self.remaining(session, lease, started));
        holds.then_some(Renewal::Holding { token, remaining })
    }

    async fn renew_waiter(
        self: &Arc<Self>,
        session: &Arc<Session>,
        Renew { claim, lease }: &Renew,
        started: Moment,
        standing: &Standing,
        places: &Places<'_>,
    ) -> Result<Renewal> {
        let joined = match places.of(&standing.node) {
            None => return Ok(Renewal::Lost),
            Some((_, true)) => {
                let claim = Claim { lease: *lease, ..claim.clone() };
                self.hold(session, &claim, started, standing.token)?
            }
            Some((ahead, false)) if self.claims.is_listening(claim.id) => {
                self.claims.waits(claim, ahead, started);
                let token = Some(standing.token);
                Joined::Waiting(Place { ahead, head_remaining: None, token })
            }
            Some(_) => match places.stand(&standing.node) {
                Some(stand) => self.wait(session, claim, started, stand).await?,
                None => return Ok(Renewal::Lost),
            },
        };
        Ok(match joined {
            Joined::Holding { token, remaining } => Renewal::Holding { token, remaining },
            Joined::Waiting(place) => Renewal::Waiting(place),
            Joined::Busy { .. } => Renewal::Lost,
        })
    }

    /// Those of `open` whose children exist, by a majority's word.
    async fn existing(
        &self,
        session: &Session,
        open: Vec<(usize, Standing)>,
    ) -> Result<Vec<(usize, Standing)>> {
        let mut existing = Vec::with_capacity(open.len());
        let mut open = open.into_iter().peekable();
        while open.peek().is_some() {
            let mut bytes = 0;
            let mut some = Vec::new();
            while let Some((i, standing)) = open.next_if(|_| bytes < REQUEST_BYTES) {
                bytes += standing.lock.len() + standing.node.len() + 32;
                some.push((i, standing));
            }
            existing.extend(self.checked(session, some).await?);
        }
        Ok(existing)
    }

    async fn checked(
        &self,
        session: &Session,
        mut some: Vec<(usize, Standing)>,
    ) -> Result<Vec<(usize, Standing)>> {
        while !some.is_empty() {
            let done = session.write(|c| async {
                let mut writer = c.new_multi_writer();
                for (_, standing) in &some {
                    writer.add_check_version(&standing.path(), -1)?;
                }
                writer.commit().await
            });
            match done.await {
                Ok(_) => break,
                Err(MultiWriteError::OperationFailed { source: Fault::NoNode, .. }) => {
                    // One is gone, and where one is others may be: all are looked at.
                    let paths: Vec<String> = some.iter().map(|(_, s)| s.path()).collect();
                    let found = session.read(|c| async {
                        Ok(all_of(paths.iter().map(|path| c.check_stat(path)).collect()).await)
                    });
                    let found = found.await.map_err(|fault| explain(fault, self.url.root()))?;
                    let mut found = found.into_iter();
                    let mut failed = None;
                    some.retain(|_| match found.next() {
                        Some(Ok(stat)) => stat.is_some(),
                        Some(Err(fault)) => {
                            failed = Some(fault);
                            true
                        }
                        None => true,
                    });
                    if let Some(fault) = failed {
                        return Err(explain(fault, self.url.root()));
                    }
                }
                Err(error) => {
                    let fault = Fault::from(error);
                    if ends_session(&fault) {
                        return Ok(Vec::new());
                    }
                    return Err(explain(fault, self.url.root()));
                }
            }
        }
        Ok(some)
    }

    async fn leave(self: Arc<Self>, claim: Claim) -> Result<bool> {
        let _turn = self.claims.enter(claim.id).await;
        let session = self.session().await?;
        let left = match self.claims.stage(claim.id) {
            Stage::Standing(standing) => self.delete(&session, &standing).await?,
            Stage::Asked { lock } => self.delete_of(&session, claim.id, &lock).await?,
            Stage::New => self.delete_of(&session, claim.id, &self.lock_path(&claim.name)).await?,
        };
        self.claims.remove(claim.id);
        Ok(left)
    }

    async fn delete_of(&self, session: &Session, id: ClaimId, lock: &str) -> Result<bool> {
        match self.named_after(session, id, lock).await? {
            Some(name) => self.delete_path(session, &format!("{lock}/{name}")).await,
            None => Ok(false),
        }
    }

    /// Deletes a claim's child; tells whether it was there.
    async fn delete(&self, session: &Session, standing: &Standing) -> Result<bool> {
        let deleted = self.delete_path(session, &standing.path()).await?;
        let late = !(0..LATE_SEQUENCE).contains(&standing.sequence);
        if late && self.naming() == Naming::Curator {
            // Where nobody else stands the numbers may begin anew; the server refuses otherwise.
            let _ = session.write(|c| c.delete(&standing.lock, None)).await;
        }
        Ok(deleted)
    }

    async fn delete_path(&self, session: &Session, path: &str) -> Result<bool> {
        match session.write(|c| c.delete(path, None)).await {
            Ok(()) => Ok(true),
            Err(Fault::NoNode) => Ok(false),
            Err(fault) => Err(explain(fault, path)),
        }
    }

    /// What is in these children: `None` for one that is gone by now.
    async fn look_at(
        &self,
        session: &Session,
        lock: &str,
        nodes: &[Node],
    ) -> Result<Vec<Option<(Vec<u8>, Stat)>>> {
        let mut seen = Vec::with_capacity(nodes.len());
        for some in nodes.chunks(READ_TOGETHER) {
            let paths: Vec<String> = some.iter().map(|n| format!("{lock}/{}", n.name)).collect();
            let read = session.read(|c| async {
                Ok(all_of(paths.iter().map(|path| c.get_data(path)).collect()).await)
            });
            let read = read.await.map_err(|fault| explain(fault, lock))?;
            for (answer, path) in read.into_iter().zip(&paths) {
                seen.push(match answer {
                    Ok(seen) => Some(seen),
                    Err(Fault::NoNode) => None,
                    // Another client's, and closed to us: it is there all the same, whoever it is.
                    Err(Fault::NoAuth) => {
                        let stat = session.read(|c| c.check_stat(path)).await;
                        let stat = stat.map_err(|fault| explain(fault, path))?;
                        stat.map(|stat| (Vec::new(), stat))
                    }
                    Err(fault) => return Err(explain(fault, path)),
                });
            }
        }
        Ok(seen)
    }

    /// What people see of a queue.
    fn describe<'a>(
        &self,
        name: &Name,
        children: &Children,
        seen: impl Iterator<Item = (&'a Node, Option<(Vec<u8>, Stat)>)>,
    ) -> LockInfo {
        let holding = children.holding();
        let now = self.clock.now();
        let claims = seen.enumerate().filter_map(|(i, (node, seen))| {
            let (data, stat) = seen?;
            let standing = if i < holding { Shown::Holding } else { Shown::Waiting };
            let created = u64::try_from(stat.ctime).unwrap_or(0).saturating_mul(1_000);
            let since = Duration::from_micros(wall_micros().saturating_sub(created));
            let own = node.id(self.naming());
            let remaining = own.and_then(|id| self.claims.remaining(id, now));
            let weight = children.weight(node);
            Some(ClaimInfo::new(standing, holder(&data), token_of(&stat), weight, since, remaining))
        });
        let claims = claims.collect();
        let (kind, capacity) = children.lock().unwrap_or((Kind::Mutex, 1));
        LockInfo::new(name.clone(), kind, capacity, claims)
    }

    async fn read(self: Arc<Self>, name: Name) -> Result<Option<LockInfo>> {
        let session = self.session().await?;
        self.read_on(&session, &name).await
    }

    async fn read_on(&self, session: &Session, name: &Name) -> Result<Option<LockInfo>> {
        let lock = self.lock_path(name);
        let Some(names) = self.list_synced(session, &lock).await? else { return Ok(None) };
        let children = match Children::order(self.naming(), names) {
            Ok(children) => children,
            Err(foreign) => return Err(foreign_child(self.naming(), &lock, foreign)),
        };
        let seen = self.look_at(session, &lock, children.nodes()).await?;
        let info = self.describe(name, &children, children.nodes().iter().zip(seen));
        Ok((!info.claims.is_empty()).then_some(info))
    }

    async fn list(self: Arc<Self>, prefix: String) -> Result<Vec<LockInfo>> {
        let session = self.session().await?;
        let root = self.url.root();
        let nodes = self.list_synced(&session, root).await?;
        let nodes = nodes.ok_or_else(|| explain(Fault::NoNode, root))?;
        let names = nodes.iter().filter_map(|node| path::decode(node));
        let mut names: Vec<Name> = names.filter(|n| n.as_str().starts_with(&prefix)).collect();
        names.sort_unstable();
        let mut locks = Vec::new();
        for some in names.chunks(READ_TOGETHER) {
            let read = some.iter().map(|name| self.read_on(&session, name)).collect();
            for info in all_of(read).await {
                match info {
                    Ok(info) => locks.extend(info),
                    // Beside locks there may be other things, and locks that are not for us.
                    Err(error)
                        if matches!(error.kind(), ErrorKind::Mismatch | ErrorKind::Denied) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(locks)
    }

    async fn evict(self: Arc<Self>, name: Name, which: Evict) -> Result<usize> {
        let session = self.session().await?;
        let lock = self.lock_path(&name);
        let Some(names) = self.list_synced(&session, &lock).await? else { return Ok(0) };
        let children = match Children::order(self.naming(), names) {
            Ok(children) => children,
            Err(foreign) => return Err(foreign_child(self.naming(), &lock, foreign)),
        };
        let nodes = children.nodes();
        let chosen: Vec<&Node> = match which {
            Evict::Holders => nodes[..children.holding()].iter().collect(),
            Evict::Token(token) => {
                let seen = self.look_at(&session, &lock, nodes).await?;
                let is_it = |seen: &Option<(Vec<u8>, Stat)>| {
                    seen.as_ref().and_then(|(_, stat)| token_of(stat)) == Some(token)
                };
                nodes.iter().zip(seen).filter(|(_, seen)| is_it(seen)).map(|(n, _)| n).collect()
            }
        };
        let mut evicted = 0;
        for node in chosen {
            let gone = self.delete_path(&session, &format!("{lock}/{}", node.name)).await?;
            evicted += usize::from(gone);
        }
        Ok(evicted)
    }

    /// A claim that nobody has renewed goes, for as long as it takes to tell the servers.
    async fn give_up(self: Arc<Self>, id: ClaimId) {
        let _turn = self.claims.enter(id).await;
        if self.claims.is_given_up(id) {
            self.end_given_up(id).await;
            self.claims.remove(id);
        } else if let Stage::New = self.claims.stage(id) {
            // Somebody was faster, and asking for our turn has made this.
            self.claims.remove(id);
        }
    }

    /// Deletes the child of a claim that was given up, whose turn it is.
    async fn end_given_up(&self, id: ClaimId) {
        let mut pause = Duration::from_millis(50);
        loop {
            let session = self.current();
            let done = match self.claims.stage(id) {
                Stage::New => true,
                // With its session its child goes too.
                Stage::Standing(standing) if standing.session != session.id() => true,
                Stage::Standing(standing) => self.delete(&session, &standing).await.is_ok(),
                Stage::Asked { lock } => self.delete_of(&session, id, &lock).await.is_ok(),
            };
            if done || session.is_over() {
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }
}

/// Deletes what of this client's was not renewed in time. Ends with the store.
async fn reap(shared: Weak<Shared>) {
    loop {
        let Some(strong) = shared.upgrade() else { return };
        for id in strong.claims.expired(strong.clock.now()) {
            strong.runtime.spawn(strong.clone().give_up(id));
        }
        strong.claims.something_expires(strong.clock.now()).await;
    }
}

/// Waits for what is in a claim's way, and tells it of its turn.
async fn listen(
    shared: Weak<Shared>,
    session: Weak<Session>,
    claim: Claim,
    standing: Standing,
    mut watches: Watches,
) {
    loop {
        let heard = watches.next().await;
        let (Some(shared), Some(session)) = (shared.upgrade(), session.upgrade()) else { return };
        let granted = match heard {
            Heard::Free => true,
            Heard::Changed => false,
            Heard::Over => return shared.claims.tell_to_ask(claim.id),
        };
        if granted {
            let certain = session.certain_until();
            return shared.claims.granted(claim.id, claim.waiter_lease, certain);
        }
        // Whatever else happened: who is in the way now?
        loop {
            let stand = match shared.look(&session, &standing).await {
                Ok(Looked::Stands(stand)) => stand,
                Ok(Looked::Gone) | Err(_) => return shared.claims.tell_to_ask(claim.id),
            };
            if stand.blockers.is_empty() {
                let certain = session.certain_until();
                return shared.claims.granted(claim.id, claim.waiter_lease, certain);
            }
            shared.claims.stands_behind(claim.id, stand.ahead);
            match shared.watch(&session, &standing, stand).await {
                Ok(Some(new)) => {
                    watches = new;
                    break;
                }
                Ok(None) => {}
                // The heartbeat listens anew.
                Err(_) => return shared.claims.tell_to_ask(claim.id),
            }
        }
    }
}

type Event = Pin<Box<dyn Future<Output = WatchedEvent> + Send>>;

/// What a waiting claim watches.
struct Watches {
    own: Event,
    others: Vec<(u32, Event)>,
    /// How much more than there is room for was before it in the listing by which they were chosen.
    /// Only what leaves of these is taken off: other listings, which heartbeats look at, lack by then
    /// some whose departure is news here still, and those would be taken off twice.
    excess: u64,
}

impl Watches {
    fn new(own: OneshotWatcher, others: Vec<(u32, OneshotWatcher)>, excess: u64) -> Self {
        let others =
            others.into_iter().map(|(w, watcher)| (w, Box::pin(watcher.changed()) as Event));
        Self { own: Box::pin(own.changed()), others: others.collect(), excess }
    }

    /// The next event. Those of one's own child come first, so that nobody who was evicted takes the
    /// departure of another for its turn.
    async fn next(&mut self) -> Heard {
        poll_fn(|cx| {
            if let Poll::Ready(event) = self.own.as_mut().poll(cx) {
                return Poll::Ready(match event.event_type {
                    EventType::Session | EventType::NodeDeleted => Heard::Over,
                    _ => Heard::Changed,
                });
            }
            for (weight, event) in &mut self.others {
                if let Poll::Ready(event) = event.as_mut().poll(cx) {
                    return Poll::Ready(match event.event_type {
                        EventType::Session => Heard::Over,
                        EventType::NodeDeleted if self.excess <= u64::from(*weight) => Heard::Free,
                        _ => Heard::Changed,
                    });
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// Awaits all of them at once, so that their requests go out together.
async fn all_of<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
    let mut all: Vec<_> = futures.into_iter().map(|f| (Box::pin(f), None)).collect();
    poll_fn(|cx| {
        let mut open = false;
        for (future, done) in all.iter_mut().filter(|(_, done)| done.is_none()) {
            match future.as_mut().poll(cx) {
                Poll::Ready(value) => *done = Some(value),
                Poll::Pending => open = true,
            }
        }
        if open { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    all.into_iter().filter_map(|(_, done)| done).collect()
}

fn token_of(stat: &Stat) -> Option<Token> {
    u64::try_from(stat.czxid).ok().and_then(Token::new)
}

/// Who made a child: as we write it, or whatever another client wrote.
fn holder(data: &[u8]) -> Holder {
    serde_json::from_slice(data).unwrap_or_else(|_| {
        let text = String::from_utf8_lossy(data);
        let host: String = text.chars().filter(|c| !c.is_control()).take(256).collect();
        let host = if host.is_empty() { "unknown".to_owned() } else { host };
        Holder { host, pid: 0, label: "another client".into() }
    })
}

fn foreign_child(naming: Naming, lock: &str, child: String) -> Error {
    let other = match naming {
        Naming::Curator => Naming::Kazoo,
        Naming::Kazoo => Naming::Curator,
    };
    let (lock, shown) = (lock.escape_debug(), child.escape_debug().to_string());
    let shown: String = shown.chars().take(80).collect();
    let what = match Node::parse(other, child) {
        Ok(_) => {
            let other = if other == Naming::Kazoo { "kazoo" } else { "curator" };
            format!(
                "the node {lock} is in use by locks of the other naming ({shown}), and the two ignore \
                 each other: write naming={other} into the URL, or use another path"
            )
        }
        Err(_) => format!(
            "the node {lock} has the child {shown}, which is no claim of this lock: use another name \
             or path (Curator's semaphores and ours are not the same), or delete that child"
        ),
    };
    Error::new(ErrorKind::Mismatch, what)
}

#[async_trait]
impl Store for ZooKeeperStore {
    fn guarantees(&self) -> &Guarantees {
        &self.guarantees
    }

    fn url(&self) -> &str {
        &self.shown
    }

    fn identity(&self) -> String {
        let url = &self.shared.url;
        let mut hosts: Vec<&str> = url.hosts.split(',').collect();
        hosts.sort_unstable();
        format!("zookeeper:{}{}#{:?}", hosts.join(","), url.root(), url.naming)
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let looked = self.shared.run(|shared| async move {
            let session = shared.session().await?;
            doctor::diagnose(&session, &shared.url).await
        });
        looked.await
    }

    fn place_path(&self, claim: &Claim) -> Option<Result<String>> {
        Some(match self.shared.claims.stage(claim.id) {
            Stage::Standing(standing) => Ok(standing.path()),
            Stage::New | Stage::Asked { .. } => Err(Error::lost(crate::error::LostReason::Gone)),
        })
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
        joined.map_err(|e| e.on(&name).at(&self.shown))
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let renewals = renewals.to_vec();
        let renewed = self.shared.run(|shared| shared.renew(renewals)).await;
        renewed.map_err(|e| e.at(&self.shown))
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        if keep.is_some() {
            let what = "a node is gone when its holder is, so nothing keeps the lock taken: leave \
                        at_least out, or use another store";
            return Err(Error::new(ErrorKind::Unsupported, what).on(&claim.name).at(&self.shown));
        }
        let (name, claim) = (claim.name.clone(), claim.clone());
        let left = self.shared.run(|shared| shared.leave(claim)).await;
        left.map_err(|e| e.on(&name).at(&self.shown))
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        Ok(self.shared.claims.news(claim.id).await)
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        let wanted = name.clone();
        let read = self.shared.run(|shared| shared.read(wanted)).await;
        read.map_err(|e| e.on(name).at(&self.shown))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let prefix = prefix.to_owned();
        let listed = self.shared.run(|shared| shared.list(prefix)).await;
        listed.map_err(|e| e.at(&self.shown))
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        let wanted = name.clone();
        let evicted = self.shared.run(move |shared| shared.evict(wanted, which)).await;
        evicted.map_err(|e| e.on(name).at(&self.shown))
    }
}

fn guarantees(url: &ZooKeeperUrl, session: &Session) -> Guarantees {
    let mut notes = vec![
        Cow::Borrowed(
            "While its client lives, a claim that is not renewed ends with its lease; when the client \
             dies, with the client's session, whatever lease was asked for.",
        ),
        Cow::Borrowed(
            "A new leader counts every session from its own beginning, so a holder that dies with \
             the leader is found out up to a session later.",
        ),
        Cow::Borrowed(
            "A leader that stood still for nearly a session and goes on can end a session that it has \
             just served: then only checked tokens are safe.",
        ),
        Cow::Borrowed(
            "All members must have the same session limits: the shortest that any of them enforces \
             is what holds after a change of member.",
        ),
        Cow::Borrowed(
            "Grants are durable as the members' disks are: with forceSync=no, or one server, not over \
             a power cut.",
        ),
        Cow::Borrowed("Whoever has the permission to delete nodes can take locks away."),
    ];
    let (asked, given) = (url.session, session.timeout());
    if asked != given {
        notes.push(Cow::Owned(format!(
            "The session is {given:?}, as the servers allow, and not {asked:?} as asked for."
        )));
    }
    Guarantees {
        kinds: Cow::Borrowed(ALL_KINDS),
        fifo: true,
        wakeup: Wakeup::Push,
        liveness: Liveness::Session,
        clock: ClockModel::Monotonic,
        lock_delay: false,
        at_least: false,
        grant: Durability::Majority,
        token: Durability::Majority,
        on_pause: Survival::Fenced,
        on_clock_step: Survival::Exclusive,
        on_store_crash: Survival::Exclusive,
        on_failover: Survival::Exclusive,
        on_partition: Survival::Exclusive,
        stalls: false,
        // The leader looks once a tick.
        recovery: given + Duration::from_secs(3),
        recovery_leases: 0,
        notes: Cow::Owned(notes),
    }
}
