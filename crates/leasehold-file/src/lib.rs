//! The `file:` store: locks on one machine, kept by its kernel, without any server.
//!
//! Each lock name has a *control file* with its [`Queue`] in it, and each client a *session*: a
//! FIFO whose read end only that client has. A claim in a queue counts for as long as its session
//! lives. There are no leases: a hold ends when it is released, when its process ends (however it
//! ends), or when a person evicts it, and never because somebody was slow.
//!
//! ```text
//! ROOT/locks/NAME.lock   the queue, as JSON for people to read   (control.rs, text.rs, path.rs)
//! ROOT/clients/ID        a session: sign of life and inbox       (session.rs, peers.rs, inbox.rs)
//! ROOT/tokens[.boot]     what makes tokens rise over restarts    (tokens.rs)
//! ```
//! To whom all that is open, the directory says (rights.rs); what the dead leave is cleared up a
//! little at a time (sweep.rs).
//!
//! # One call
//! Every call is one *section*: it takes the control file's flock, reads the queue, removes what is
//! over, does its work, writes the queue and unlocks. No section awaits anything, so every call is
//! atomic to all clients, and dropping its future leaves either nothing or everything done. If the
//! flock is taken, the call yields a few times, then sleeps about a millisecond between tries, and
//! after two seconds says which file is stuck.
//!
//! # Who is dead
//! A section looks at the sessions that matter to its answer and removes the claims of the dead:
//! - one that would be answered "busy" or "mismatch" looks at everybody in the queue;
//! - one that is answered "waiting" looks at the holders and at its predecessor;
//! - one that grants to a waiter looks at that waiter, and goes on to the next if it died.
//!
//! # Who wakes whom
//! After its section the caller tells those that it granted, through their inboxes. Deaths tell
//! themselves: the first claim that does not fit watches the sessions of *all* that hold (any of
//! them may make room), each other waiter that of its predecessor. Every change of what a waiter
//! must watch is told to it, and it asks again:
//! - its predecessor left the queue while waiting: it has another one;
//! - it became the first that does not fit, by somebody's grant, and somebody else than its
//!   predecessor holds (only with a capacity above 1).
//!
//! Who is evicted is told by whoever evicts it, in the same way: its client asks then, and finds itself gone.
//!
//! A session cannot die unseen between two looks: dead is for ever, and who starts to watch one
//! that is dead already is told so and asks again. What is kept closed for a time after its holder
//! left is told as [`Place::head_remaining`](leasehold_core::store::Place), and the heartbeat is the fallback for
//! all of it (a granting client that is stopped between its section and its telling).
//!
//! # Which directory
//! All meet by a path, and a path can lead elsewhere tomorrow: the directory is moved and another
//! one made, something is mounted over it, a copy is put in its place. Each section therefore looks
//! whether the control file that it has locked is the one that the path leads to, and each join and
//! each renewal whether our own sign of life is where others look for it. If not, nothing is
//! granted any more, and what we hold is lost: others cannot know of it. Who replaces a directory
//! lets others in at once, and those who hold in the old one find out at their next renewal.
//!
//! # Upgrades
//! Control files and `tokens` begin with the number of their format. A later version works with the
//! formats before its own; an earlier one leaves what is later than itself as it is, says so, and
//! never advises to delete it or to go elsewhere, since that would make two holders while programs
//! are upgraded one after the other. What changes in a control file is a new format, be it only one
//! field: who writes a queue back would drop what he does not know. In `tokens` and `tokens.boot`
//! unknown fields are kept.
//!
//! # Whose clock
//! No clock judges a hold. The wall clock stamps tokens, which rise even if it is set back (see
//! `tokens.rs`), and ends what `at_least` keeps closed, which therefore survives a restart of the
//! machine and moves with the clock.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod control;
mod doctor;
mod fault;
mod held;
mod inbox;
mod path;
mod peers;
mod place;
mod rights;
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

use self::control::{Controls, Turn};
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
    ALL_KINDS, ClockModel, Durability, Ear, Evict, Guarantees, Joined, Liveness, LockInfo, Mode,
    Renew, Renewal, Reweighed, Signal, Stall, Standing, Store, StoreInfo, Survival, Wakeup,
    mismatch,
};
use leasehold_core::{Claim, ClaimId, Error, ErrorKind, Name, Result};

/// For how long a control file that somebody else has locked is tried again.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often it was tried by then, at least: a tenth of what fits in.
const ENOUGH_PAUSES: u32 = 200;
/// How often it is tried in a row before sleeping: sections are short, and somebody who enters one
/// after the other leaves gaps that a single try hardly ever meets.
const EAGER_TRIES: u32 = 24;

/// Locks on one machine. See the module's documentation.
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
    /// It creates the directory if necessary, and reads its inbox on `runtime`. It can block on the
    /// disk, so do not call it on a thread that runs other tasks.
    ///
    /// # Errors
    /// An error with the path and a hint if the URL does not name a writable directory on a local
    /// disk.
    pub fn open(url: &str, runtime: &Handle) -> Result<Arc<Self>> {
        Self::open_with(url, runtime, boot_id(), wall_micros).map(Arc::new).map_err(|e| e.at(url))
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
        // Whatever fails is left to who comes later.
        let _ = store.sweep();
        Ok(store)
    }

    /// Returns the store's directory.
    pub fn directory(&self) -> &Path {
        self.clients.dir.parent().unwrap_or(Path::new("/"))
    }

    /// Clears up some of what the dead left, if it is our turn: see `sweep`.
    fn sweep(&self) -> Result<()> {
        let tokens = &self.controls.tokens;
        let now = (self.wall)();
        let Some(mut from) = tokens.begin_sweep(now)? else { return Ok(()) };
        // With the dot, also where the root is a symbolic link.
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
            // What somebody works on is in use; what cannot be read is `ls`'s to tell of.
            if let Ok(Turn::Done(news)) = self.tidy(name) {
                self.spread(news, ());
            }
        }
        from.locks = reached;
        tokens.end_sweep(from)
    }

    /// Removes the dead from one lock's queue, and its file if nobody is in it then.
    fn tidy(&self, name: &Name) -> Result<Turn<News>> {
        self.controls.visit(name, |queue| {
            let ((), news) = self.changing(queue, None, |queue, now| {
                queue.settle(now);
                self.bury_all(queue, now);
            });
            news
        })
    }

    /// Works on the queue of `name` in one section, trying until it is our turn.
    async fn section<T>(
        &self,
        name: &Name,
        mut attempt: impl FnMut(&Controls) -> Result<Turn<T>>,
    ) -> Result<Option<T>> {
        let started = Instant::now();
        let (mut tries, mut pauses) = (0_u32, 0_u32);
        loop {
            match attempt(&self.controls)? {
                Turn::Done(done) => return Ok(Some(done)),
                Turn::Absent => return Ok(None),
                Turn::Locked => tries += 1,
            }
            if !tries.is_multiple_of(EAGER_TRIES) {
                std::thread::yield_now();
                continue;
            }
            // Who stood still himself has not tried for all that time.
            if started.elapsed() > PATIENCE && pauses >= ENOUGH_PAUSES {
                return Err(tokens::stuck(&self.controls.path(name)));
            }
            // Spread, so that those who met once do not meet for ever.
            let spread = u64::from(started.elapsed().subsec_nanos() / 64 % 1_000);
            self.pause(Duration::from_micros(500 + spread)).await;
            pauses += 1;
        }
    }

    /// Works on a queue, and passes on what the work changed for others.
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

    /// Does the work inside a section, settles what follows from it, and tells whom to tell.
    fn changing<T>(
        &self,
        queue: &mut Queue,
        me: Option<ClaimId>,
        work: impl FnOnce(&mut Queue, u64) -> T,
    ) -> (T, News) {
        let now = (self.wall)();
        let before: Vec<(ClaimId, bool)> = standings(queue).collect();
        let done = work(queue, now);
        let mut news = self.granted(queue, now);
        if before.len() > 1 {
            let asked = must_watch_anew(&before, queue, !news.is_empty());
            news.extend(asked.map(|e| (e.id, e.session.clone(), Signal::Ask, None)));
        }
        news.retain(|(id, ..)| Some(*id) != me);
        (done, news)
    }

    /// Those whom the section granted, and who live. The dead among them are removed, and the
    /// next in line granted instead.
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
                queue.retain(now, |e| e.standing == Standing::Departed || !dead(&e.session));
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

    /// After the section: everybody is told what concerns them.
    fn spread<T>(&self, news: News, done: T) -> T {
        let mut inboxes: HashMap<String, Option<WriteEnd>> = HashMap::new();
        for (id, session, signal, inbox) in news {
            if session == self.session.id() {
                if !self.waiters.tell(id, signal) && signal == Signal::Ask {
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
                session::tell(fifo, id, signal);
            }
        }
        done
    }

    fn is_ours(&self, entry: &Entry) -> bool {
        entry.session == self.session.id()
    }

    /// Removes the claims of the dead among `entries`; tells whether there were any.
    fn bury(
        &self,
        queue: &mut Queue,
        now: u64,
        which: impl Fn(usize, &Entry) -> bool,
        is_dead: impl Fn(&str) -> bool,
    ) -> bool {
        let mut sessions: HashSet<&str> = HashSet::new();
        for (i, e) in queue.entries().enumerate() {
            if e.standing != Standing::Departed && !self.is_ours(e) && which(i, e) {
                sessions.insert(&e.session);
            }
        }
        let dead: HashSet<String> =
            sessions.into_iter().filter(|s| is_dead(s)).map(ToOwned::to_owned).collect();
        if dead.is_empty() {
            return false;
        }
        queue.retain(now, |e| e.standing == Standing::Departed || !dead.contains(&e.session));
        true
    }

    fn bury_all(&self, queue: &mut Queue, now: u64) -> bool {
        // They may be many and strangers: not worth being kept.
        self.bury(queue, now, |_, _| true, |s| matches!(self.clients.probe(s), Life::Dead))
    }

    /// Removes the dead that this waiter waits for.
    fn bury_before(&self, queue: &mut Queue, now: u64, id: ClaimId) -> bool {
        let Some(mine) = queue.position(id) else { return false };
        let before =
            |i: usize, e: &Entry| i + 1 == mine || (i < mine && e.standing == Standing::Holding);
        self.bury(queue, now, before, |s| matches!(self.waiters.probe(s), Life::Dead))
    }

    /// The sessions whose death this waiter must hear of.
    fn blockers(&self, queue: &Queue, id: ClaimId) -> Vec<String> {
        let Some(mine) = queue.position(id) else { return Vec::new() };
        let first_waiting = queue.entries().position(|e| e.standing == Standing::Waiting);
        let watched = |i: usize| first_waiting == Some(mine) || i + 1 == mine;
        let mut sessions: Vec<String> = Vec::new();
        for (_, e) in queue.entries().take(mine).enumerate().filter(|(i, _)| watched(*i)) {
            if e.standing != Standing::Departed && !self.is_ours(e) {
                sessions.push(e.session.clone());
            }
        }
        sessions.sort_unstable();
        sessions.dedup();
        sessions
    }

    /// The work of a join: asks, and asks again for as long as what is in the way is dead.
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
                Ok(Joined::Waiting(_)) => self.bury_before(queue, now, claim.id),
                Ok(Joined::Busy { .. }) | Err(_) => self.bury_all(queue, now),
            };
            if !again {
                return joined;
            }
        }
    }

    /// Makes it right to answer `token`, without holding up this thread while the disk works.
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
                    // Passing over a dead waiter that was granted may have granted us; nobody else
                    // tells us of what our own section did.
                    if let (Ok(Joined::Waiting(_)), _) = &joined {
                        let held = |e: &&Entry| e.id == claim.id && e.standing == Standing::Holding;
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
            let turn = self.section(&claim.name, attempt).await?;
            let Some((joined, news)) = turn.flatten() else {
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

    /// The queue of one lock, settled, for people.
    async fn look(&self, name: &Name) -> Result<Option<LockInfo>> {
        let read = self.section(name, |controls| {
            controls.visit(name, |queue| {
                self.changing(queue, None, |queue, now| {
                    queue.settle(now);
                    self.bury_all(queue, now);
                    LockInfo::new(name.clone(), queue.kind(), queue.capacity(), queue.claims(now))
                })
            })
        });
        let read = read.await.map_err(|e| e.on(name).at(&self.info.url))?;
        let info = read.map(|(info, news)| self.spread(news, info));
        Ok(info.filter(|info| !info.claims.is_empty()))
    }

    /// Pauses after a look: who looks in a loop must not keep the flock from those who want in.
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

    /// Renews those of `renewals` that are on one name, in one section.
    async fn renew_on(&self, name: &Name, renewals: &[&Renew]) -> Result<Vec<Renewal>> {
        let mut watch: Vec<(ClaimId, Vec<String>)> = Vec::new();
        let renewed = self.with_queue(name, |queue, now| {
            watch.clear();
            let one = |r: &&Renew| match queue.renew(&r.claim, r.lease, now) {
                Renewal::Waiting(_) => {
                    self.bury_before(queue, now, r.claim.id);
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
                self.waiters.tell(id, Signal::Ask);
            }
        }
        Ok(renewed.unwrap_or_else(|| vec![Renewal::Lost; renewals.len()]))
    }
}

/// Claims, their sessions, what they are told, and the inbox where it was opened already.
type News = Vec<(ClaimId, String, Signal, Option<WriteEnd>)>;

fn standings(queue: &Queue) -> impl Iterator<Item = (ClaimId, bool)> {
    queue.entries().map(|e| (e.id, e.standing == Standing::Waiting))
}

/// The waiters that must watch another session than before, because of what changed between
/// `before` (claims, and whether they waited) and now.
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
        // Nobody ever changes the order, so one walk along both finds each where it was.
        let was = old.find(|(_, (id, _))| *id == e.id).map(|(i, _)| i);
        let predecessor_was = was.and_then(|i| before.get(i.checked_sub(1)?));
        if e.standing == Standing::Waiting {
            let left = predecessor_was.is_some_and(|(id, waited)| {
                *waited && previous.is_none_or(|previous| previous.id != *id)
            });
            let now_first = first_waiting && some_granted && was.is_some() && {
                let watched = previous.map(|p| &p.session);
                queue
                    .entries()
                    .any(|h| h.standing == Standing::Holding && Some(&h.session) != watched)
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

/// Cause and hint of an error.
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

    /// Each lock has a file of its own, which somebody may keep locked without an end.
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

    fn hear(&self, ear: Weak<dyn Ear>) {
        self.inbox.hear(ear);
    }

    fn lifeline(&self) -> Option<BorrowedFd<'_>> {
        Some(self.session.lifeline())
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let joined = self.join_now(claim, mode).await;
        joined.map_err(|e| e.on(&claim.name).at(&self.info.url))
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let mut by_name: HashMap<&Name, Vec<usize>> = HashMap::new();
        for (i, r) in renewals.iter().enumerate() {
            by_name.entry(&r.claim.name).or_default().push(i);
        }
        let mut answers = vec![Renewal::Lost; renewals.len()];
        // Others take us for dead, or cannot see us: they let somebody else in.
        if self.session.is_gone() {
            return Ok(answers);
        }
        for (name, indices) in by_name {
            let some: Vec<&Renew> = indices.iter().filter_map(|&i| renewals.get(i)).collect();
            let renewed = self.renew_on(name, &some).await;
            let renewed = renewed.map_err(|e| e.on(name).at(&self.info.url))?;
            for (i, renewal) in indices.into_iter().zip(renewed) {
                answers[i] = renewal;
            }
        }
        Ok(answers)
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        let left = self.with_queue(&claim.name, |queue, now| queue.leave(claim.id, keep, now));
        let left = left.await.map_err(|e| e.on(&claim.name).at(&self.info.url))?;
        self.waiters.dismiss(claim.id);
        Ok(left.unwrap_or(false))
    }

    async fn reweigh(&self, claim: &Claim) -> Result<Reweighed> {
        // Others take us for dead, or cannot see us: they let somebody else in.
        if self.session.is_gone() {
            return Ok(Reweighed::Lost);
        }
        let reweighed = self.with_queue(&claim.name, |queue, now| {
            loop {
                let reweighed = queue.reweigh(claim, now);
                if reweighed != Reweighed::Busy || !self.bury_all(queue, now) {
                    return reweighed;
                }
            }
        });
        let reweighed = reweighed.await.map_err(|e| e.on(&claim.name).at(&self.info.url))?;
        Ok(reweighed.unwrap_or(Reweighed::Lost))
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        let _waiting = self.inbox.waiting();
        let mut news = pin!(self.waiters.news(claim.id));
        poll_fn(|context| {
            // Who cannot be told asks by heartbeats.
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
        let names = self.controls.names().map_err(|e| e.at(&self.info.url))?;
        let mut locks = Vec::new();
        for name in names.iter().filter(|n| n.as_str().starts_with(prefix)) {
            // One that cannot be read hides no other.
            let looked = self.look(name).await;
            let told = |e: Error| Some(LockInfo::unreadable(name.clone(), on_one_line(&e)));
            locks.extend(looked.unwrap_or_else(told));
        }
        self.let_others_in().await;
        Ok(locks)
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        let mut gone = News::new();
        let evicted = self.with_queue(name, |queue, now| {
            queue.settle(now);
            self.bury_all(queue, now);
            let evicted = queue.evict(which, now);
            gone = evicted.into_iter().map(|e| (e.id, e.session, Signal::Ask, None)).collect();
            gone.len()
        });
        let evicted = evicted.await;
        self.spread(gone, ());
        let evicted = match evicted {
            Err(e) if e.kind() == ErrorKind::Corrupt && which == Evict::Holders => {
                let mended = self.section(name, |controls| controls.mend(name)).await;
                // Whoever was in it is out now: nobody can tell how many they were.
                mended.map(|mended| mended.map(usize::from))
            }
            other => other,
        };
        Ok(evicted.map_err(|e| e.on(name).at(&self.info.url))?.unwrap_or(0))
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
    promised.at_least = true;
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
            "The cooldown of at_least is measured by the wall clock. It survives a restart of the machine, \
                 but not every power cut.",
        ),
        Cow::Borrowed(
            "Each operation reads and writes the whole queue of its lock, so it takes longer the more \
                 claims the queue has.",
        ),
    ]);
    promised
}
