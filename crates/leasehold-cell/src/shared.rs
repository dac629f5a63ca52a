//! Changes of a queue: read it, apply the change, write it if the cell has not changed, and
//! otherwise start again.
//!
//! - *Atomicity.* The write is atomic. It is refused unless the cell is in the state that was read,
//!   so the computed queue is either right or discarded. Versions are never reused. So a late write
//!   is refused once another client has written.
//! - *Conflicts.* A conflict is a race that another client has won, so some client always makes
//!   progress. The loser reads again after a random pause that grows each time.
//! - *Starvation.* A client that takes a lock repeatedly by a guess, without a read, could keep the
//!   others from ever winning. So a client that loses a race writes a contention marker next to the
//!   lock. A client that writes by a guess also reads the marker. If the marker exists, the client
//!   pauses before each of its next joins.
//! - *Priority of waiters.* A client that has just released the lock knows the state better than
//!   all others, and would be the first to join again. If other claims remain, it pauses before its
//!   next joins even without a marker. This applies to systems that do not lose their data and have
//!   no messages between clients.
//! - *Retries.* If the system does not lose its data, a client that was refused writes and reads in
//!   one round trip from then on. It tries again with the queue that it has read.
//! - *Lost replies, dropped futures, crashes.* It is unknown whether the write was done. The next
//!   read shows it by the claim's ID. The write may still be done later if the cell has not changed
//!   by then. To rule that out, a client writes the cell again unchanged.
//! - *Writes that are refused although they were done.* A proxy before the store may repeat a
//!   write, and return the answer to the repetition. So a refusal never proves that nothing was
//!   done, and the content of the cell decides. An adapter recognizes its own write if it can
//!   (`lasting.rs`). Otherwise the claim's ID decides. A join finds its claim, a session finds its
//!   cell, and an eviction removes only the claims that its first read showed.
//! - *Releases.* If one read of a call finds the claim and the next one does not, the release has
//!   succeeded, because the claim was still in the queue after the call began. After a guess, this
//!   is so only if the adapter reports the write as in doubt. Otherwise another client has evicted
//!   the claim since this client last wrote.
//! - *Stale reads.* A write that is based on a stale read is refused. If nothing is written, as for
//!   a waiter's position, the result is as current as that of a slow reply.
//! - *Dead clients.* Before a change is applied, claims at the front whose sessions are gone are
//!   removed, in as many rounds as necessary. Dead claims further back are found when they come
//!   near the front.
//! - *Reads of sessions.* A session that was seen alive cannot expire before the rest of its
//!   lifetime has passed, minus the error of clocks. It is not read again before then. So a session
//!   in a large queue costs one read every several seconds, and no dead holder is found later
//!   because of this. Only a client that ends its session while it has claims is found a few
//!   seconds later. A join that fits in addition to all claims, and a release without waiters, need
//!   no such reads.
//! - *Notification.* The client that writes a grant also notifies the new holder. Within one client
//!   this is immediate. For other clients it takes a [message](crate::Messenger), if the system
//!   supports messages. If the client crashes before it sends the message, the new holder finds out
//!   at its next poll.

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_core::kit::{locked, spawn_on};
use leasehold_core::queue::{Queue, StoreTime, granted};
use leasehold_core::store::{ClaimState, EvictionListeners, Signal};
use leasehold_core::{Claim, ClaimId, Clock, Error, ErrorKind, Kind, Moment, Name, Result};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use crate::cells::{Answer, Cells, Request};
use crate::claims::Claims;
use crate::epoch::Epochs;
use crate::keys::Keys;
use crate::last_writes::{AliveSessions, CellSnapshot, Guess, LastWrites};
use crate::session::Sessions;
use crate::text;

/// Lifetime of the marker of a dead session. Longer than any call that found the session missing.
const GONE_FOR: Duration = Duration::from_secs(60);
/// Factor by which a queue with claims is kept longer than an empty one.
const STRETCH: u32 = 7;
/// Number of conflicts after which a joining client writes a contention marker.
const MARKER_AFTER: u32 = 1;
/// Number of conflicts after which a client pauses, reads and writes the marker again.
const RETRIES_PER_MARKER: u32 = 8;
/// Lifetime of a contention marker.
const MARKER_LIFETIME: Duration = Duration::from_secs(2);
/// How long a client that has seen a marker lets other clients join first.
const YIELD_TIME: Duration = Duration::from_millis(200);
/// Approximate pause before each join while other clients may join first.
const YIELD_PAUSE: Duration = Duration::from_millis(8);
/// Maximum time for which a session that was seen alive is not read again, if the front is short.
const TRUST_SESSION_FOR: Duration = Duration::from_secs(5);
/// Maximum number of claims in a short queue or front.
const FEW: usize = 8;
/// Probability that a join to a long queue checks whether the other claims are alive.
const SWEEP: f64 = 0.125;
/// The longest pause after a conflict.
const LONGEST_PAUSE: Duration = Duration::from_millis(60);

/// The state that all calls of a client share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) cells: Arc<dyn Cells>,
    pub(crate) runtime: Handle,
    pub(crate) clock: Clock,
    pub(crate) keys: Keys,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) epochs: Epochs,
    pub(crate) claims: Claims,
    pub(crate) last_writes: LastWrites,
    pub(crate) alive_sessions: AliveSessions,
    /// Whether a task is checking the fronts of queues.
    pub(crate) is_clearing: AtomicBool,
    /// Limits the number of concurrent removals of claims that were given up.
    pub(crate) reaping: Semaphore,
    /// The longest pause between two polls of a waiter.
    pub(crate) poll: Duration,
    /// The listeners for evictions.
    pub(crate) listeners: EvictionListeners,
    /// Random numbers, so that not all clients send their requests at once.
    pub(crate) rng: Mutex<fastrand::Rng>,
}

/// The result of a write.
enum Written {
    Yes,
    /// The write was refused. Contains the current cell if it was requested.
    No(Option<CellSnapshot>),
}

/// The result of applying a change to a queue.
pub(crate) enum QueueEdit<T> {
    /// The queue was not changed.
    Unchanged(T),
    /// The queue was changed and must be written.
    Write(T),
}

/// What a write was computed from.
pub(crate) enum WriteBasis {
    /// The last write of this client.
    Guess,
    /// A read.
    Read,
    /// A read, and the ID of the epoch in which the read was done.
    ReadInEpoch(String),
}

/// The required certainty that a session is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proof {
    /// For display: a read is enough, and nothing is written.
    Shown,
    /// Final: a marker is written, so that the session cannot be renewed any more.
    Sure,
}

/// What a claim requires of a queue: its kind, its capacity, and free capacity for the weight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fit {
    kind: Kind,
    capacity: u32,
    weight: u32,
}

impl Fit {
    pub(crate) fn of(claim: &Claim) -> Self {
        Self { kind: claim.kind, capacity: claim.capacity, weight: claim.weight }
    }

    /// Returns whether the claim fits in addition to all claims in the queue, including expired
    /// ones.
    fn is_beside(self, queue: &Queue) -> bool {
        let held: u64 = queue.entries().map(|entry| u64::from(entry.weight)).sum();
        let is_same = queue.kind() == self.kind && queue.capacity() == self.capacity;
        is_same && held + u64::from(self.weight) <= u64::from(self.capacity)
    }
}

/// The claim that a write is about, and what the write does to it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ClaimEffect {
    Joins(ClaimId, Fit),
    Leaves(ClaimId),
    None,
}

impl ClaimEffect {
    /// Returns the guess that can replace the read.
    fn guess(self) -> Option<Guess> {
        match self {
            Self::Joins(..) => Some(Guess::Free),
            Self::Leaves(_) => Some(Guess::Alone),
            Self::None => None,
        }
    }
}

impl Shared {
    pub(crate) fn time(&self) -> StoreTime {
        let now = self.cells.wall_micros();
        StoreTime { now, stamp: now }
    }

    /// Returns a random number from 0 to 1.
    pub(crate) fn chance(&self) -> f64 {
        locked(&self.rng).f64()
    }

    /// Sleeps on the client's own runtime, because the caller's may have no timer.
    pub(crate) async fn sleep(&self, pause: Duration) {
        // The timer is created on that runtime too. A timer belongs to the runtime in which it was
        // created, and the caller's may end first.
        let slept = self.runtime.spawn(async move { tokio::time::sleep(pause).await }).await;
        if slept.is_err() {
            // Our runtime was shut down. The caller must not spin, so this future never completes.
            std::future::pending::<()>().await;
        }
    }

    /// Changes a queue with `work`. `guess` is the assumed state of the queue. Takes one round trip
    /// if the guess is right, two without a guess, and one more if sessions at the front must be
    /// read.
    pub(crate) async fn change<T>(
        &self,
        name: &Name,
        about: ClaimEffect,
        mut guess: Option<CellSnapshot>,
        mut work: impl FnMut(&mut Queue) -> QueueEdit<T> + Send,
    ) -> Result<T> {
        let mut conflicts = 0;
        let mut since: Option<CellSnapshot> = None;
        // Sessions that were seen alive a few conflicts ago are not read again.
        let mut alive = HashSet::new();
        loop {
            let guessed = guess.take();
            let is_guess = guessed.is_some();
            let (mut seen, epoch) = match guessed.or_else(|| since.take()) {
                Some(seen) => (seen, None),
                None => self.read_for_write(name, about, conflicts).await?,
            };
            if let Some(guess) = about.guess().filter(|_| !is_guess) {
                self.last_writes.was_read(name, guess, &seen);
            }
            if conflicts % RETRIES_PER_MARKER == 0 {
                alive.clear();
            }
            let settled = !is_guess
                && self.must_settle(about, &seen.queue)
                && self.settle_but(&mut seen.queue, Proof::Sure, &mut alive).await?;
            let done = match work(&mut seen.queue) {
                QueueEdit::Unchanged(done) if !settled => return Ok(done),
                QueueEdit::Unchanged(done) | QueueEdit::Write(done) => done,
            };
            let basis = match epoch {
                _ if is_guess => WriteBasis::Guess,
                Some(epoch) => WriteBasis::ReadInEpoch(epoch),
                None => WriteBasis::Read,
            };
            // Every few conflicts the client starts again with a marker. After a guess, it reads in
            // the same round trip if that costs nothing extra.
            let is_free = is_guess && self.cells.messenger().is_none();
            let may_read = is_free || conflicts % RETRIES_PER_MARKER != 0;
            let reads_after = may_read && !self.cells.system().forgets;
            let tried = seen.version.clone();
            match self.write_and_read(name, about, seen, basis, reads_after).await? {
                Written::Yes => return Ok(done),
                Written::No(seen) => since = seen,
            }
            if since.as_ref().is_some_and(|seen| seen.version == tried) {
                // The read is older than the refusal, or nothing can be written now. So the client
                // pauses.
                since = None;
                self.sleep(longest_pause_after(conflicts + 3).mul_f64(0.5 + self.chance())).await;
            }
            match about.guess().filter(|_| is_guess) {
                Some(guess) => self.last_writes.was_wrong(name, guess),
                None => {
                    conflicts += 1;
                    // If new holders are notified, all waiters depend on this release, so it does
                    // not pause.
                    let leaves = matches!(about, ClaimEffect::Leaves(_));
                    let hurries = leaves && self.cells.messenger().is_some();
                    if since.is_none() && !hurries {
                        self.sleep(longest_pause_after(conflicts).mul_f64(self.chance())).await;
                    }
                }
            }
        }
    }

    /// Reads the queue, and the epoch if it matters. Writes a contention marker if earlier attempts
    /// failed.
    async fn read_for_write(
        &self,
        name: &Name,
        about: ClaimEffect,
        conflicts: u32,
    ) -> Result<(CellSnapshot, Option<String>)> {
        let joins = matches!(about, ClaimEffect::Joins(..));
        let asks_epoch = joins && self.cells.system().forgets;
        let mut requests = vec![Request::Get { key: self.keys.lock(name) }];
        requests.extend(asks_epoch.then(|| self.epochs.get()));
        if joins && conflicts >= MARKER_AFTER {
            let (key, lives) = (self.keys.contention_marker(name), Some(MARKER_LIFETIME));
            requests.push(Request::Create { key, value: Vec::new(), lives });
        }
        // If new holders are notified, hand-overs are so fast that a client may keep losing races
        // for a long time. So other clients respect its marker.
        let yields = joins && conflicts == 0 && self.cells.messenger().is_some() && !asks_epoch;
        if yields {
            requests.push(Request::Get { key: self.keys.contention_marker(name) });
        }
        let sent = self.clock.now();
        let mut answers = self.cells.run(requests).await?.into_iter();
        let mut cell = answers.next().unwrap_or(Answer::Absent);
        if yields && matches!(answers.next(), Some(Answer::Found(_))) {
            // The pause is about as long as a read and a write.
            let once = self.clock.now().since(sent);
            self.sleep((once * 2).max(YIELD_PAUSE).mul_f64(0.5 + self.chance())).await;
            let get = Request::Get { key: self.keys.lock(name) };
            cell = self.cells.run(vec![get]).await?.pop().unwrap_or(Answer::Absent);
        }
        let epoch = match answers.next().filter(|_| asks_epoch) {
            Some(epoch) => Some(self.epochs.open(&*self.cells, epoch).await?),
            None => None,
        };
        Ok((seen(name, cell)?, epoch))
    }

    /// Reads the queue.
    pub(crate) async fn read_queue(&self, name: &Name) -> Result<CellSnapshot> {
        let get = Request::Get { key: self.keys.lock(name) };
        let answer = self.cells.run(vec![get]).await?.pop();
        seen(name, answer.unwrap_or(Answer::Absent))
    }

    /// Returns whether the change `about` must first remove dead claims from the front.
    fn must_settle(&self, about: ClaimEffect, queue: &Queue) -> bool {
        let waits = queue.entries().any(|entry| entry.state == ClaimState::Waiting);
        let is_clear = match about {
            ClaimEffect::Joins(id, fit) => {
                // A long queue is checked occasionally, so that dead claims do not fill it.
                let is_swept = queue.entries().len() > FEW && self.chance() < SWEEP;
                fit.is_beside(queue) && !is_swept && queue.entries().all(|entry| entry.id != id)
            }
            ClaimEffect::Leaves(_) => true,
            ClaimEffect::None => false,
        };
        waits || !is_clear
    }

    /// Removes claims at the front whose sessions are gone, and grants the claims that then fit.
    /// Returns whether any were removed.
    pub(crate) async fn settle(&self, queue: &mut Queue, proof: Proof) -> Result<bool> {
        self.settle_but(queue, proof, &mut HashSet::new()).await
    }

    /// Returns until when a session that was just seen alive, with `remaining` of its lifetime
    /// left, need not be read again.
    fn alive_until(&self, remaining: Option<Duration>, front: usize) -> Moment {
        let now = self.clock.now();
        let Some(remaining) = remaining else { return now };
        let left = remaining.saturating_sub(Duration::from_secs(1) + self.cells.system().grain);
        now.plus(if front > FEW { left } else { left.min(TRUST_SESSION_FOR) })
    }

    /// Returns the sessions at the front whose state must be read.
    pub(crate) fn unsure(&self, queue: &Queue, alive: &HashSet<String>) -> Vec<String> {
        let now = self.clock.now();
        let ours = self.sessions.current().filter(|session| session.certain() > now);
        let fit = granted(queue.entries().map(|e| e.weight), queue.capacity());
        // The first claim that does not fit is included. If it is dead, it must not block the queue
        // when its turn comes.
        let front: BTreeSet<&str> =
            queue.entries().take(fit + 1).map(|e| e.session.as_str()).collect();
        let is_unsure = |session: &&str| {
            ours.as_ref().is_none_or(|ours| ours.id != **session)
                && !alive.contains(*session)
                && !self.alive_sessions.is_sure(session, now)
        };
        front.into_iter().filter(is_unsure).map(str::to_owned).collect()
    }

    /// Records the result of reading a session. Returns whether the session is alive.
    pub(crate) fn note_session(&self, id: &str, answer: &Answer, front: usize) -> bool {
        match answer {
            Answer::Found(found) if found.value != text::GONE => {
                self.alive_sessions.note(id, self.alive_until(found.remaining, front));
                true
            }
            _ => {
                self.alive_sessions.forget(id);
                false
            }
        }
    }

    /// Like [`settle`](Self::settle), without reading the sessions in `alive`.
    pub(crate) async fn settle_but(
        &self,
        queue: &mut Queue,
        proof: Proof,
        alive: &mut HashSet<String>,
    ) -> Result<bool> {
        let mut settled = false;
        loop {
            let ask = self.unsure(queue, alive);
            if ask.is_empty() {
                return Ok(settled);
            }
            let front = ask.len();
            let gets = ask.iter().map(|id| Request::Get { key: self.keys.session(id) });
            let answers = self.cells.run(gets.collect()).await?;
            let found = ask.into_iter().zip(answers);
            let mut gone: HashSet<String> = HashSet::new();
            let mut absent: Vec<String> = Vec::new();
            for (id, answer) in found {
                self.note_session(&id, &answer, front);
                match answer {
                    Answer::Absent => absent.push(id),
                    Answer::Found(found) if found.value == text::GONE => _ = gone.insert(id),
                    _ => _ = alive.insert(id),
                }
            }
            if self.cells.system().looks_behind && proof == Proof::Sure && !absent.is_empty() {
                for (id, is_gone) in self.make_sure(absent).await? {
                    if is_gone { &mut gone } else { &mut *alive }.insert(id);
                }
            } else {
                gone.extend(absent);
            }
            if gone.is_empty() {
                return Ok(settled);
            }
            queue.retain(self.time().now, |entry| !gone.contains(&entry.session));
            settled = true;
        }
    }

    /// Creates a marker in place of each of these sessions that is missing, so that it cannot be
    /// renewed any more. Returns for each session whether it was missing.
    async fn make_sure(&self, absent: Vec<String>) -> Result<Vec<(String, bool)>> {
        let creates = absent.iter().map(|id| {
            let (key, value) = (self.keys.session(id), text::GONE.to_vec());
            Request::Create { key, value, lives: Some(GONE_FOR) }
        });
        let answers = self.cells.run(creates.collect()).await?;
        let is_gone = answers.into_iter().map(|answer| matches!(answer, Answer::Written(_)));
        Ok(absent.into_iter().zip(is_gone).collect())
    }

    /// Notifies the clients of the claims that the write has granted.
    async fn notify_granted(&self, about: ClaimEffect, queue: &mut Queue) {
        for id in queue.take_fresh_grants() {
            let Some(entry) = queue.entries().find(|entry| entry.id == id) else { continue };
            if matches!(about, ClaimEffect::Joins(ours, _) if ours == id) {
                continue;
            }
            let is_ours = self.sessions.current().is_some_and(|ours| ours.id == entry.session);
            if is_ours {
                self.claims.notify(id, Signal::Granted(entry.token));
            } else if let Some(messenger) = self.cells.messenger() {
                messenger.send(&entry.session, text::granted(id, entry.token)).await;
            }
        }
    }

    /// Writes the queue if the cell has not changed since the cell was read. Returns whether the
    /// queue was written.
    pub(crate) async fn write(
        &self,
        name: &Name,
        about: ClaimEffect,
        seen: CellSnapshot,
        basis: WriteBasis,
    ) -> Result<bool> {
        let written = self.write_and_read(name, about, seen, basis, false).await?;
        Ok(matches!(written, Written::Yes))
    }

    /// Like [`write`](Self::write). With `reads_after`, also reads the cell in case the write is
    /// refused.
    async fn write_and_read(
        &self,
        name: &Name,
        about: ClaimEffect,
        mut seen: CellSnapshot,
        basis: WriteBasis,
        reads_after: bool,
    ) -> Result<Written> {
        let system = self.cells.system();
        let value = text::written(name, &seen.queue, system.largest_value)?;
        // A queue that contains only dead claims expires too. The clients of live claims extend its
        // lifetime in time (`renew.rs`).
        let lives = system.idle.map(|idle| idle * if seen.queue.is_empty() { 1 } else { STRETCH });
        let key = self.keys.lock(name);
        let write = match seen.version.take() {
            Some(version) => Request::Replace { key, value, version, lives },
            None => Request::Create { key, value, lives },
        };
        let is_new = matches!(write, Request::Create { .. });
        let read = Request::Get { key: write.key().to_owned() };
        let mut requests = vec![write];
        let joins = matches!(about, ClaimEffect::Joins(..));
        match &basis {
            WriteBasis::ReadInEpoch(_) if is_new => requests.push(self.epochs.get()),
            // These reads are part of the same round trip.
            WriteBasis::Guess if joins => {
                requests.push(Request::Get { key: self.keys.contention_marker(name) });
                requests.extend(system.forgets.then(|| self.epochs.get()));
            }
            _ if reads_after => requests.push(read),
            _ => {}
        }
        let has_read = reads_after && requests.len() == 2 && requests[1].key() == requests[0].key();
        let was_leaving = self.is_sent(about);
        let sent = self.clock.now();
        let mut answers = self.kept(requests).await?.into_iter();
        let written = answers.next();
        let Some(Answer::Written(version)) = written else {
            self.is_refused(about, was_leaving || written == Some(Answer::InDoubt));
            let now = answers.next().filter(|_| has_read);
            return Ok(Written::No(now.map(|now| self::seen(name, now)).transpose()?));
        };
        if let ClaimEffect::Joins(id, _) = about {
            // From now on every earlier request for the claim is refused.
            self.claims.is_certain(id);
        }
        if let ClaimEffect::Leaves(id) = about {
            // The result of the current write is known. An earlier request may have removed the
            // claim as well.
            self.claims.leaves(id, was_leaving);
        }
        seen.version = Some(version);
        let after = [answers.next(), answers.next()];
        let contended = self.is_let_in(basis, after).await?;
        self.notify_granted(about, &mut seen.queue).await;
        let leaves = matches!(about, ClaimEffect::Leaves(_)) && !seen.queue.is_empty();
        self.last_writes.keep(name, seen);
        let now = self.clock.now();
        if contended {
            self.last_writes.yield_until(name, now.plus(YIELD_TIME), YIELD_PAUSE);
        } else if leaves && self.cells.messenger().is_none() && !system.forgets {
            // The pause is about as long as a read of the queue, a read of sessions, and a write.
            let pause = (now.since(sent) * 3).min(YIELD_TIME);
            self.last_writes.yield_until(name, now.plus(YIELD_TIME), pause);
        }
        Ok(Written::Yes)
    }

    /// Extends the lifetime of an existing queue.
    pub(crate) async fn prolong(&self, name: &Name, seen: &CellSnapshot) -> Result<()> {
        let (Some(idle), Some(version)) = (self.cells.system().idle, seen.version.clone()) else {
            return Ok(());
        };
        let value = text::written(name, &seen.queue, self.cells.system().largest_value)?;
        let (key, lives) = (self.keys.lock(name), idle * STRETCH);
        // If the touch is refused, another client has written the queue, which also extends the
        // queue's lifetime.
        self.cells.run(vec![Request::Touch { key, value, version, lives }]).await.map(drop)
    }

    /// Returns an error if data was lost, according to what was read in the same round trip as the
    /// write, because other clients may still rely on lost holds. Otherwise returns whether there
    /// is a contention marker.
    async fn is_let_in(&self, basis: WriteBasis, after: [Option<Answer>; 2]) -> Result<bool> {
        match (basis, after) {
            (WriteBasis::ReadInEpoch(epoch), [Some(answer), _])
                if !self.epochs.is_still(&epoch, &answer) =>
            {
                let what = "the server was restarted or emptied and has lost its data";
                Err(Error::new(ErrorKind::Unreachable, what))
            }
            (WriteBasis::Guess, [marker, epoch]) => {
                if let Some(epoch) = epoch {
                    self.epochs.open(&*self.cells, epoch).await?;
                }
                Ok(matches!(marker, Some(Answer::Found(_))))
            }
            _ => Ok(false),
        }
    }

    /// Runs the requests. If a system that may lose data has no room for a write, it may have lost
    /// the cell. The system is then treated as if it had lost all data. This happens even if the
    /// caller's future is dropped.
    async fn kept(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        if !self.cells.system().forgets {
            return self.cells.run(requests).await;
        }
        let (cells, epochs) = (self.cells.clone(), self.epochs.clone());
        let writing = spawn_on(&self.runtime, async move {
            let answers = cells.run(requests).await;
            if answers.as_ref().is_err_and(|error| error.kind() == ErrorKind::Full) {
                epochs.end(&*cells).await;
            }
            answers
        });
        let ended =
            |_| Error::new(ErrorKind::Closed, "the client's runtime has ended: connect again");
        writing.await.map_err(ended)?
    }

    /// Records that a request about the claim is sent. Returns whether an earlier request may have
    /// removed the claim.
    fn is_sent(&self, about: ClaimEffect) -> bool {
        match about {
            ClaimEffect::Joins(id, _) => self.claims.doubt(id),
            ClaimEffect::Leaves(id) => {
                let was_leaving = self.claims.is_leaving(id);
                self.claims.leaves(id, true);
                return was_leaving;
            }
            ClaimEffect::None => {}
        }
        false
    }

    /// Records that the request was refused. `may_have_left` is whether this or an earlier request
    /// may have removed the claim nevertheless.
    fn is_refused(&self, about: ClaimEffect, may_have_left: bool) {
        match about {
            ClaimEffect::Joins(id, _) => self.claims.is_certain(id),
            ClaimEffect::Leaves(id) => self.claims.leaves(id, may_have_left),
            ClaimEffect::None => {}
        }
    }
}

/// Returns the queue in a lock's cell, or a new queue if the cell does not exist.
pub(crate) fn seen(name: &Name, cell: Answer) -> Result<CellSnapshot> {
    match cell {
        Answer::Found(found) => {
            let queue = text::read(name, &found.value)?;
            Ok(CellSnapshot { queue, version: Some(found.version) })
        }
        _ => Ok(CellSnapshot { queue: Queue::new(Kind::Mutex, 1, false), version: None }),
    }
}

/// Returns the longest pause after this number of conflicts.
fn longest_pause_after(conflicts: u32) -> Duration {
    LONGEST_PAUSE.min(Duration::from_millis(1) * (1 << conflicts.min(10)))
}
