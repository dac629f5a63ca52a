//! The `file:` store: locks on one machine, kept by its kernel, without a server.
//!
//! Each lock name has a *control file* that contains its [`Queue`]. Each client has a *session*, a
//! FIFO whose read end only that client has. A claim in a queue is valid while its session lives.
//!
//! There are no leases. A hold ends when it is released, when its process ends (for whatever
//! reason), or when an operator evicts it. It never ends because a process was slow.
//!
//! ```text
//! ROOT/locks/NAME.lock   the queue, as JSON for people to read   (control.rs, text.rs, path.rs)
//! ROOT/clients/ID        a session: a sign of life and an inbox  (session.rs, peers.rs, inbox.rs)
//! ROOT/tokens[.boot]     makes tokens rise across restarts       (tokens.rs)
//! ```
//! The root directory's permissions determine which users can access these files (permissions.rs).
//! Data of dead clients is removed a little at a time (sweep.rs).
//!
//! # One call
//! Every call is one *section*. It takes the control file's flock, reads the queue, removes expired
//! entries, does its work, writes the queue and unlocks. No section awaits anything, so every call
//! is atomic for all clients, and dropping its future leaves either nothing or everything done.
//!
//! If the flock is taken, the call yields a few times, then sleeps about a millisecond between
//! tries. After two seconds it returns an error that names the locked file.
//!
//! # Which clients are dead
//! A section checks the sessions that matter to its answer, and removes the claims of dead ones:
//! - Before the answer "busy" or "mismatch" it checks all sessions in the queue.
//! - Before the answer "waiting" it checks the holders and the claim's predecessor.
//! - Before a grant to a waiter it checks that waiter, and continues with the next waiter if that
//!   one is dead.
//!
//! # Notifications
//! After its section, the caller notifies the claims that it granted, through their inboxes. Deaths
//! are noticed by watching sessions. The first claim that does not fit watches the sessions of
//! *all* holders, because any of them may make room. Each other waiter watches its predecessor's
//! session. When the set of sessions to watch changes, the waiter is notified and polls:
//! - Its predecessor left the queue while waiting, so it has another predecessor.
//! - A grant made it the first claim that does not fit, and a claim other than its predecessor
//!   holds. (This needs a capacity above 1.)
//!
//! The evicting client notifies the evicted holder in the same way. The holder's client then polls,
//! and finds its claim gone.
//!
//! No death is missed between two checks. A dead session never lives again, and a client that
//! starts to watch a dead session is notified immediately and polls. A cooldown after a release is
//! reported as [`Place::head_remaining`](leasehold_core::store::Place). The heartbeat is the
//! fallback for all notifications, such as when a granting client is paused between its section and
//! its notifications.
//!
//! # Which directory
//! All clients meet at a path, and a path can lead elsewhere later. The directory may be moved and
//! replaced, mounted over, or exchanged for a copy. So each section checks that the locked control
//! file is still the one at the path. Each join and each renewal checks that the client's own FIFO
//! is still where other clients look for it.
//!
//! If one of these checks fails, nothing is granted any more, and all holds of this client are
//! lost, because other clients cannot know of them. Replacing a directory admits other clients
//! immediately. The holders in the old directory find out at their next renewal.
//!
//! # Upgrades
//! Control files and `tokens` begin with the number of their format. A later version works with all
//! earlier formats. An earlier version leaves files of later formats unchanged and reports them. It
//! never advises to delete them or to use another directory, because that would create two holders
//! while programs are upgraded one after the other.
//!
//! Every change of a control file's content is a new format, even a single new field. Otherwise an
//! older version would drop an unknown field when it writes the queue back. In `tokens` and
//! `tokens.boot` unknown fields are preserved.
//!
//! # Clock
//! No clock determines whether a hold is valid. The wall clock stamps tokens, which rise even if it
//! is set back (see `tokens.rs`). It also ends the cooldown of `min_hold`, which therefore survives
//! a restart of the machine and moves with the clock.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod control;
mod doctor;
mod fault;
mod held;
mod inbox;
mod path;
mod peers;
mod permissions;
mod place;
mod session;
mod sweep;
mod text;
mod tokens;
mod waiters;

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::future::poll_fn;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::runtime::Handle;

use self::control::{AttemptResult, Controls};
use self::inbox::Reader;
use self::peers::WriteEnd;
use self::place::Place as Directory;
use self::session::{Clients, Life, Session};
use self::tokens::Tokens;
use self::waiters::Waiters;
use leasehold_core::Opening;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::{boot_id, identity_of, wall_micros};
use leasehold_core::queue::{Entry, Mismatch, Queue, StoreTime};
use leasehold_core::store::{
    ALL_KINDS, ClaimState, ClockModel, Converted, Durability, Evict, EvictionListener, Guarantees,
    Joined, Liveness, LockInfo, Mode, Renew, Renewal, Signal, Stall, Store, StoreInfo, Survival,
    Wakeup, mismatch,
};
use leasehold_core::{Claim, ClaimId, Error, ErrorKind, Name, Result};

/// Time for which a call retries a control file that another client has locked.
const PATIENCE: Duration = Duration::from_secs(2);
/// Minimum number of pauses before a call gives up, which is about a tenth of the pauses that fit
/// into [`PATIENCE`].
const ENOUGH_PAUSES: u32 = 200;
/// Number of consecutive tries before a call sleeps. Sections are short. A client that runs one
/// section after the other leaves only short gaps, which a single try rarely hits.
const EAGER_TRIES: u32 = 24;

/// Store that keeps locks on one machine. See the crate's documentation.
pub struct FileStore {
    info: StoreInfo,
    clients: Clients,
    session: Session,
    inbox: Arc<Reader>,
    waiters: Arc<Waiters>,
    controls: Arc<Controls>,
    runtime: Handle,
    wall: fn() -> u64,
}

impl FileStore {
    /// Opens the store of this URL: `file:` for the user's own store, or `file:/abs/dir`.
    ///
    /// Creates the directory if necessary. The store reads its inbox on `runtime`. This function
    /// can block on the disk, so do not call it on a thread that runs other tasks.
    ///
    /// # Errors
    /// - [`ErrorKind::Config`]: the URL does not name a suitable directory on a local disk.
    /// - [`ErrorKind::Denied`]: the directory is not accessible or not writable.
    /// - [`ErrorKind::Full`]: there is no disk space.
    /// - [`ErrorKind::Unreachable`]: a file stays locked, or the file system fails.
    /// - Other kinds, if the directory contains damaged or newer files.
    pub fn open(url: &str, runtime: &Handle) -> Result<Arc<Self>> {
        Self::open_with(url, runtime, boot_id(), wall_micros)
            .map(Arc::new)
            .map_err(|e| e.with_store(url))
    }

    fn open_with(url: &str, runtime: &Handle, boot: String, wall: fn() -> u64) -> Result<Self> {
        let directory = Directory::find(url)?;
        let _as_owner = directory.acting.now();
        let root = directory.root.clone();
        let clients = Clients::of(&directory);
        let tokens = Tokens::open(&directory, boot)?;
        let session = Session::begin(&directory, &clients)?;
        let controls = Arc::new(Controls::new(directory, tokens)?);
        let waiters = Waiters::new(clients.clone(), runtime.clone());
        let inbox = Reader::new(session.inbox(), &waiters, runtime);
        let identity = identity_of("file", &root);
        let store = Self {
            info: StoreInfo::new(url_of(&root), guarantees()).identified(identity).local(),
            clients,
            session,
            inbox,
            waiters,
            controls,
            runtime: runtime.clone(),
            wall,
        };
        // If the cleanup fails, a later client repeats it.
        let _ = store.sweep();
        Ok(store)
    }

    /// Returns the store's directory.
    pub fn directory(&self) -> &Path {
        self.clients.dir.parent().unwrap_or(Path::new("/"))
    }

    /// Removes some data of dead clients, if a cleanup is due. See `sweep`.
    fn sweep(&self) -> Result<()> {
        let tokens = &self.controls.tokens;
        let now = (self.wall)();
        let Some(mut from) = tokens.begin_sweep(now)? else { return Ok(()) };
        // The `.` also resolves a root that is a symbolic link.
        if let Ok((names, reached)) = sweep::batch(&self.directory().join("."), from.root) {
            let ours = |stem: &str| ["tokens", "tokens.boot", "locks", "clients"].contains(&stem);
            let paths = names.iter().map(|name| self.directory().join(name));
            paths.for_each(|path| sweep::remove_temporary(&path, now, ours));
            from.root = reached;
        }
        if let Ok((names, reached)) = sweep::batch(&self.clients.dir, from.clients) {
            for name in &names {
                match name.to_str().filter(|name| sweep::is_random(name)) {
                    Some(session) => drop(self.clients.probe(session)),
                    None => {
                        let path = self.clients.dir.join(name);
                        sweep::remove_temporary(&path, now, str::is_empty);
                    }
                }
            }
            from.clients = reached;
        }
        let (names, reached) = self.controls.some_names(from.locks, now)?;
        for name in &names {
            // A locked file is in use, and an unreadable one is reported by `ls`.
            if let Ok(AttemptResult::Done(news)) = self.tidy(name) {
                self.spread(news, ());
            }
        }
        from.locks = reached;
        tokens.end_sweep(from)
    }

    /// Removes dead claims from one lock's queue, and its file if the queue is then empty.
    fn tidy(&self, name: &Name) -> Result<AttemptResult<News>> {
        self.controls.visit(name, |queue| {
            let ((), news) = self.changing(queue, None, |queue, now| {
                queue.settle(now);
                self.remove_all_dead(queue, now);
            });
            news
        })
    }

    /// Works on the queue of `name` in one section, and retries while the file is locked.
    async fn section<T>(
        &self,
        name: &Name,
        mut attempt: impl FnMut(&Controls) -> Result<AttemptResult<T>>,
    ) -> Result<Option<T>> {
        let started = Instant::now();
        let (mut tries, mut pauses) = (0_u32, 0_u32);
        loop {
            match attempt(&self.controls)? {
                AttemptResult::Done(done) => return Ok(Some(done)),
                AttemptResult::Absent => return Ok(None),
                AttemptResult::Locked => tries += 1,
            }
            if !tries.is_multiple_of(EAGER_TRIES) {
                std::thread::yield_now();
                continue;
            }
            // A client that was itself paused has not retried during all that time.
            if started.elapsed() > PATIENCE && pauses >= ENOUGH_PAUSES {
                return Err(tokens::stuck(&self.controls.path(name)));
            }
            // The random part prevents clients that collided once from colliding forever.
            let spread = u64::from(started.elapsed().subsec_nanos() / 64 % 1_000);
            self.pause(Duration::from_micros(500 + spread)).await;
            pauses += 1;
        }
    }

    /// Works on a queue, and sends the notifications that result from it.
    async fn with_queue<T>(
        &self,
        name: &Name,
        mut work: impl FnMut(&mut Queue, u64) -> T,
    ) -> Result<Option<T>> {
        let done = self.section(name, |controls| {
            controls.enter(name, false, |queue| Some(self.changing(queue, None, &mut work)))
        });
        Ok(done.await?.flatten().map(|(done, news)| self.spread(news, done)))
    }

    /// Does the work inside a section, grants the claims that fit afterwards, and returns the
    /// notifications to send.
    fn changing<T>(
        &self,
        queue: &mut Queue,
        me: Option<ClaimId>,
        work: impl FnOnce(&mut Queue, u64) -> T,
    ) -> (T, News) {
        let now = (self.wall)();
        let before: Vec<(ClaimId, bool)> = claim_states(queue).collect();
        let done = work(queue, now);
        let mut news = self.granted(queue, now);
        if before.len() > 1 {
            let asked = must_watch_anew(&before, queue, !news.is_empty());
            news.extend(asked.map(|e| (e.id, e.session.clone(), Signal::Ask, None)));
        }
        news.retain(|(id, ..)| Some(*id) != me);
        (done, news)
    }

    /// Returns notifications for the live claims that the section granted. Dead ones among them are
    /// removed, and the next claims are granted instead.
    fn granted(&self, queue: &mut Queue, now: u64) -> News {
        let mut news = News::new();
        let mut lives: HashMap<String, Life<WriteEnd>> = HashMap::new();
        loop {
            let fresh: HashSet<ClaimId> = queue.take_fresh_grants().into_iter().collect();
            if fresh.is_empty() {
                break;
            }
            let mut someone_died = false;
            for e in queue.entries().filter(|e| fresh.contains(&e.id)) {
                if !self.is_ours(e) && !lives.contains_key(&e.session) {
                    let life = self.waiters.probe(&e.session);
                    someone_died |= matches!(life, Life::Dead);
                    lives.insert(e.session.clone(), life);
                }
                news.push((e.id, e.session.clone(), Signal::Granted(e.token), None));
            }
            if someone_died {
                let dead = |s: &String| matches!(lives.get(s), Some(Life::Dead));
                queue.retain(now, |e| e.state == ClaimState::Cooldown || !dead(&e.session));
            }
        }
        news.retain(|(_, session, ..)| !matches!(lives.get(session), Some(Life::Dead)));
        for (_, session, _, inbox) in &mut news {
            if let Some(Life::Alive(fifo)) = lives.remove(session.as_str()) {
                *inbox = fifo;
            }
        }
        news
    }

    /// Sends the notifications of a section, after it has ended.
    fn spread<T>(&self, news: News, done: T) -> T {
        let mut inboxes: HashMap<String, Option<WriteEnd>> = HashMap::new();
        for (id, session, signal, inbox) in news {
            if session == self.session.id() {
                if !self.waiters.notify(id, signal) && signal == Signal::Ask {
                    self.inbox.evicted(id);
                }
                continue;
            }
            let inbox = inboxes.entry(session).or_insert_with_key(|session| {
                inbox.or_else(|| match self.waiters.probe(session) {
                    Life::Alive(fifo) => fifo,
                    Life::Dead => None,
                })
            });
            if let Some(fifo) = inbox {
                session::notify(fifo, id, signal);
            }
        }
        done
    }

    fn is_ours(&self, entry: &Entry) -> bool {
        entry.session == self.session.id()
    }

    /// Checks the sessions of the selected entries, and removes all claims of dead sessions.
    /// Returns whether any session was dead.
    fn remove_dead(
        &self,
        queue: &mut Queue,
        now: u64,
        which: impl Fn(usize, &Entry) -> bool,
        is_dead: impl Fn(&str) -> bool,
    ) -> bool {
        let mut sessions: HashSet<&str> = HashSet::new();
        for (i, e) in queue.entries().enumerate() {
            if e.state != ClaimState::Cooldown && !self.is_ours(e) && which(i, e) {
                sessions.insert(&e.session);
            }
        }
        let dead: HashSet<String> =
            sessions.into_iter().filter(|s| is_dead(s)).map(ToOwned::to_owned).collect();
        if dead.is_empty() {
            return false;
        }
        queue.retain(now, |e| e.state == ClaimState::Cooldown || !dead.contains(&e.session));
        true
    }

    fn remove_all_dead(&self, queue: &mut Queue, now: u64) -> bool {
        // There may be many sessions, unknown to this client, so their FIFOs are not kept open.
        self.remove_dead(queue, now, |_, _| true, |s| matches!(self.clients.probe(s), Life::Dead))
    }

    /// Removes dead claims among the holders and the waiter's predecessor.
    fn remove_dead_before(&self, queue: &mut Queue, now: u64, id: ClaimId) -> bool {
        let Some(mine) = queue.position(id) else { return false };
        let before =
            |i: usize, e: &Entry| i + 1 == mine || (i < mine && e.state == ClaimState::Holding);
        self.remove_dead(queue, now, before, |s| matches!(self.waiters.probe(s), Life::Dead))
    }

    /// Returns the sessions whose death this waiter must notice.
    fn blockers(&self, queue: &Queue, id: ClaimId) -> Vec<String> {
        let Some(mine) = queue.position(id) else { return Vec::new() };
        let first_waiting = queue.entries().position(|e| e.state == ClaimState::Waiting);
        let watched = |i: usize| first_waiting == Some(mine) || i + 1 == mine;
        let mut sessions: Vec<String> = Vec::new();
        for (_, e) in queue.entries().take(mine).enumerate().filter(|(i, _)| watched(*i)) {
            if e.state != ClaimState::Cooldown && !self.is_ours(e) {
                sessions.push(e.session.clone());
            }
        }
        sessions.sort_unstable();
        sessions.dedup();
        sessions
    }

    /// Joins the queue, and tries again as long as the claims in the way are dead.
    fn join_living(
        &self,
        queue: &mut Queue,
        now: u64,
        claim: &Claim,
        mode: Mode,
    ) -> std::result::Result<Joined, Mismatch> {
        loop {
            let at = StoreTime { now, stamp: now };
            let joined = queue.join(claim, mode, at, self.session.id());
            let again = match &joined {
                Ok(Joined::Holding { .. }) => false,
                Ok(Joined::Waiting(_)) => self.remove_dead_before(queue, now, claim.id),
                Ok(Joined::Busy { .. }) | Err(_) => self.remove_all_dead(queue, now),
            };
            if !again {
                return joined;
            }
        }
    }

    /// Raises the durable ceiling, so that `token` may be returned, without blocking this thread on
    /// the disk.
    async fn raise_ceiling(&self, token: u64) -> Result<()> {
        let controls = self.controls.clone();
        let raised = self.runtime.spawn_blocking(move || controls.tokens.raise_ceiling(token));
        raised.await.unwrap_or_else(|_| {
            let what = "the runtime of this client was shut down";
            Err(Error::new(ErrorKind::Closed, what).with_hint("connect again"))
        })
    }

    async fn join_now(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        if !claim.lock_delay.is_zero() {
            let what = "lock_delay is not supported by file:, whose locks have no leases";
            let hint = "remove lock_delay, or use sqlite:, postgres:, mysql:, redis: or etcd:";
            return Err(Error::new(ErrorKind::Unsupported, what).with_hint(hint));
        }
        self.session.check()?;
        loop {
            let mut blockers = Vec::new();
            let mut too_high = 0;
            let attempt = |controls: &Controls| {
                controls.enter(&claim.name, true, |queue| {
                    let mut joined = self.changing(queue, Some(claim.id), |queue, now| {
                        self.join_living(queue, now, claim, mode)
                    });
                    // If a granted waiter is dead, the lock may be granted to this claim instead.
                    // No other client sends a notification of what this section did.
                    if let (Ok(Joined::Waiting(_)), _) = &joined {
                        let held = |e: &&Entry| e.id == claim.id && e.state == ClaimState::Holding;
                        if let Some(token) = queue.entries().find(held).map(|e| e.token) {
                            joined.0 = Ok(Joined::Holding { token, remaining: None });
                        }
                    }
                    if queue.last_token() > controls.tokens.ceiling() {
                        too_high = queue.last_token();
                        return None;
                    }
                    if let (Ok(Joined::Waiting(_)), _) = &joined {
                        self.waiters.enlist(claim.id);
                        blockers = self.blockers(queue, claim.id);
                    }
                    Some(joined)
                })
            };
            let done = self.section(&claim.name, attempt).await?;
            let Some((joined, news)) = done.flatten() else {
                self.raise_ceiling(too_high).await?;
                continue;
            };
            match self.spread(news, joined) {
                Ok(Joined::Waiting(_)) if !self.waiters.watch(claim.id, blockers) => {}
                Ok(Joined::Waiting(place)) => return Ok(Joined::Waiting(place)),
                Ok(other) => {
                    self.waiters.dismiss(claim.id);
                    return Ok(other);
                }
                Err(m) => return Err(mismatch(claim, m.kind, m.capacity)),
            }
        }
    }

    /// Returns the current queue of one lock, for status output.
    async fn look(&self, name: &Name) -> Result<Option<LockInfo>> {
        let read = self.section(name, |controls| {
            controls.visit(name, |queue| {
                self.changing(queue, None, |queue, now| {
                    queue.settle(now);
                    self.remove_all_dead(queue, now);
                    LockInfo::new(name.clone(), queue.kind(), queue.capacity(), queue.claims(now))
                })
            })
        });
        let read = read.await.map_err(|e| e.with_lock(name).with_store(&self.info.url))?;
        let info = read.map(|(info, news)| self.spread(news, info));
        Ok(info.filter(|info| !info.claims.is_empty()))
    }

    /// Pauses after a read. A client that reads in a loop must not keep other clients from the
    /// flock.
    async fn let_others_in(&self) {
        self.pause(Duration::from_millis(1)).await;
    }

    async fn pause(&self, time: Duration) {
        let pause = {
            // The caller's runtime may have no timer.
            let _context = self.runtime.enter();
            tokio::time::sleep(time)
        };
        pause.await;
    }

    /// Renews the claims on one name in one section.
    async fn renew_on(&self, name: &Name, renewals: &[&Renew]) -> Result<Vec<Renewal>> {
        let mut watch: Vec<(ClaimId, Vec<String>)> = Vec::new();
        let renewed = self.with_queue(name, |queue, now| {
            watch.clear();
            let one = |r: &&Renew| match queue.renew(&r.claim, r.lease, now) {
                Renewal::Waiting(_) => {
                    self.remove_dead_before(queue, now, r.claim.id);
                    let renewal = queue.renew(&r.claim, r.lease, now);
                    if let Renewal::Waiting(_) = renewal {
                        watch.push((r.claim.id, self.blockers(queue, r.claim.id)));
                    }
                    renewal
                }
                other => other,
            };
            renewals.iter().map(one).collect()
        });
        let renewed = renewed.await?;
        for (id, blockers) in watch {
            if !self.waiters.watch(id, blockers) {
                self.waiters.notify(id, Signal::Ask);
            }
        }
        Ok(renewed.unwrap_or_else(|| vec![Renewal::Lost; renewals.len()]))
    }
}

/// Notifications to send: the claim, its session, the signal, and the session's inbox if it is
/// already open.
type News = Vec<(ClaimId, String, Signal, Option<WriteEnd>)>;

fn claim_states(queue: &Queue) -> impl Iterator<Item = (ClaimId, bool)> {
    queue.entries().map(|e| (e.id, e.state == ClaimState::Waiting))
}

/// Returns the waiters that must watch a different session now. `before` contains the earlier
/// claims, and whether they waited.
fn must_watch_anew<'a>(
    before: &[(ClaimId, bool)],
    queue: &'a Queue,
    some_granted: bool,
) -> impl Iterator<Item = &'a Entry> {
    let mut asked: Vec<&Entry> = Vec::new();
    let mut old = before.iter().enumerate();
    let mut previous: Option<&Entry> = None;
    let mut first_waiting = true;
    for e in queue.entries() {
        // The order never changes, so one parallel pass finds each claim's earlier position.
        let was = old.find(|(_, (id, _))| *id == e.id).map(|(i, _)| i);
        let predecessor_was = was.and_then(|i| before.get(i.checked_sub(1)?));
        if e.state == ClaimState::Waiting {
            let left = predecessor_was.is_some_and(|(id, waited)| {
                *waited && previous.is_none_or(|previous| previous.id != *id)
            });
            let now_first = first_waiting && some_granted && was.is_some() && {
                let watched = previous.map(|p| &p.session);
                queue
                    .entries()
                    .any(|h| h.state == ClaimState::Holding && Some(&h.session) != watched)
            };
            if left || now_first {
                asked.push(e);
            }
            first_waiting = false;
        }
        previous = Some(e);
    }
    asked.into_iter()
}

/// Returns the reason and the hint of an error on one line.
fn on_one_line(error: &Error) -> String {
    match error.hint() {
        Some(hint) => format!("{} ({hint})", error.reason()),
        None => error.reason(),
    }
}

/// Opens the store of a URL, for a [`Registry`](leasehold_core::Registry).
pub fn open(url: String, runtime: Handle) -> Opening {
    // Opening may wait for the disk.
    let handle = runtime.clone();
    let opened = runtime.spawn_blocking(move || FileStore::open(&url, &handle));
    Box::pin(async move {
        match opened.await {
            Ok(store) => store.map(|store| store as Arc<dyn Store>),
            Err(_) => {
                Err(Error::new(ErrorKind::Closed, "the client was closed while it connected"))
            }
        }
    })
}

#[async_trait]
impl Store for FileStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    /// Returns a different shard for each lock, because each lock has its own file and another
    /// process may keep that file locked.
    fn shard(&self, name: &Name) -> u64 {
        let mut hasher = DefaultHasher::new();
        name.as_str().hash(&mut hasher);
        hasher.finish()
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let (root, now) = (self.directory().to_owned(), (self.wall)());
        let looked = self.runtime.spawn_blocking(move || doctor::diagnose(&root, now)).await;
        looked
            .map_err(|_| Error::new(ErrorKind::Closed, "the runtime of this client was shut down"))
    }

    fn on_eviction(&self, listener: Weak<dyn EvictionListener>) {
        self.inbox.on_eviction(listener);
    }

    fn lifeline(&self) -> Option<BorrowedFd<'_>> {
        Some(self.session.lifeline())
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let joined = self.join_now(claim, mode).await;
        joined.map_err(|e| e.with_lock(&claim.name).with_store(&self.info.url))
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let mut by_name: HashMap<&Name, Vec<usize>> = HashMap::new();
        for (i, r) in renewals.iter().enumerate() {
            by_name.entry(&r.claim.name).or_default().push(i);
        }
        let mut answers = vec![Renewal::Lost; renewals.len()];
        // Other clients consider this one dead or cannot see it, and grant its locks to others.
        if self.session.is_gone() {
            return Ok(answers);
        }
        for (name, indices) in by_name {
            let some: Vec<&Renew> = indices.iter().filter_map(|&i| renewals.get(i)).collect();
            let renewed = self.renew_on(name, &some).await;
            let renewed = renewed.map_err(|e| e.with_lock(name).with_store(&self.info.url))?;
            for (i, renewal) in indices.into_iter().zip(renewed) {
                answers[i] = renewal;
            }
        }
        Ok(answers)
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        let left = self.with_queue(&claim.name, |queue, now| queue.leave(claim.id, keep, now));
        let left = left.await.map_err(|e| e.with_lock(&claim.name).with_store(&self.info.url))?;
        self.waiters.dismiss(claim.id);
        Ok(left.unwrap_or(false))
    }

    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        // Other clients consider this one dead or cannot see it, and grant its locks to others.
        if self.session.is_gone() {
            return Ok(Converted::Lost);
        }
        let converted = self.with_queue(&claim.name, |queue, now| {
            loop {
                let converted = queue.convert(claim, now);
                if converted != Converted::Busy || !self.remove_all_dead(queue, now) {
                    return converted;
                }
            }
        });
        let converted =
            converted.await.map_err(|e| e.with_lock(&claim.name).with_store(&self.info.url))?;
        Ok(converted.unwrap_or(Converted::Lost))
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        let _waiting = self.inbox.waiting();
        let mut news = pin!(self.waiters.news(claim.id));
        poll_fn(|context| {
            // A waiter that cannot be notified polls with its heartbeats.
            let _ = self.inbox.read_or_listen(context);
            news.as_mut().poll(context).map(Ok)
        })
        .await
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        let info = self.look(name).await;
        self.let_others_in().await;
        info
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let names = self.controls.names().map_err(|e| e.with_store(&self.info.url))?;
        let mut locks = Vec::new();
        for name in names.iter().filter(|n| n.as_str().starts_with(prefix)) {
            // An unreadable lock does not hide the others.
            let looked = self.look(name).await;
            let as_unreadable =
                |e: Error| Some(LockInfo::unreadable(name.clone(), on_one_line(&e)));
            locks.extend(looked.unwrap_or_else(as_unreadable));
        }
        self.let_others_in().await;
        Ok(locks)
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        let mut gone = News::new();
        let evicted = self.with_queue(name, |queue, now| {
            queue.settle(now);
            self.remove_all_dead(queue, now);
            let evicted = queue.evict(which, now);
            gone = evicted.into_iter().map(|e| (e.id, e.session, Signal::Ask, None)).collect();
            gone.len()
        });
        let evicted = evicted.await;
        self.spread(gone, ());
        let evicted = match evicted {
            Err(e) if e.kind() == ErrorKind::Corrupt && which == Evict::Holders => {
                let repaired = self.section(name, |controls| controls.repair(name)).await;
                // All claims in the damaged file are evicted. Their number is unknown.
                repaired.map(|repaired| repaired.map(usize::from))
            }
            other => other,
        };
        Ok(evicted.map_err(|e| e.with_lock(name).with_store(&self.info.url))?.unwrap_or(0))
    }
}

impl fmt::Debug for FileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileStore").field("url", &self.info.url).finish_non_exhaustive()
    }
}

fn url_of(root: &Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    let mut url = "file:".to_owned();
    for &byte in root.as_os_str().as_bytes() {
        match byte {
            b'%' | b'?' | b'#' | 0..=b' ' | 0x7f.. => url.push_str(&format!("%{byte:02x}")),
            _ => url.push(char::from(byte)),
        }
    }
    url
}

fn guarantees() -> Guarantees {
    let mut promised = Guarantees::least();
    promised.kinds = Cow::Borrowed(ALL_KINDS);
    promised.fifo = true;
    promised.wakeup = Wakeup::Push;
    promised.evicted = Wakeup::Push;
    promised.liveness = Liveness::Process;
    promised.clock = ClockModel::None;
    promised.lock_delay = false;
    promised.min_hold = true;
    promised.downgrades = true;
    promised.upgrades = true;
    promised.grant = Durability::Machine;
    promised.token = Durability::Disk;
    promised.on_pause = Survival::Exclusive;
    promised.on_clock_step = Survival::Exclusive;
    promised.on_store_crash = Survival::Exclusive;
    promised.on_failover = Survival::NotApplicable;
    promised.on_partition = Survival::NotApplicable;
    promised.stall = Stall::Everybody;
    promised.recovery = Duration::from_millis(10);
    promised.recovery_leases = 0;
    promised.notes = Cow::Borrowed(&[
        Cow::Borrowed(
            "Only programs on one machine that can write to the directory see the locks.",
        ),
        Cow::Borrowed(
            "Holds have no lease. A hold ends when it is released, its process exits or an operator evicts \
                 it. A paused or hanging process keeps holding.",
        ),
        Cow::Borrowed(
            "A child that was forked without exec shares its parent's holds and keeps them until it \
                 exits. exec ends its share.",
        ),
        Cow::Borrowed(
            "Deleting a lock file evicts its holders and waiters. Deleting, moving or replacing the directory \
                 evicts all of them. Holders find out at their next renewal.",
        ),
        Cow::Borrowed(
            "Every user that can lock can also evict. The directory's permissions keep all other users out.",
        ),
        Cow::Borrowed(
            "The cooldown of min_hold is measured by the wall clock. It survives a restart of the machine, \
                 but not every power cut.",
        ),
        Cow::Borrowed(
            "Each operation reads and writes the whole queue of its lock, so it takes longer the more \
                 claims the queue has.",
        ),
    ]);
    promised
}
