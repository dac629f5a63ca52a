//! One change of one queue: look, apply the rule, write if nothing changed, else again.
//!
//! - *What is atomic*: the write. It is refused unless the cell is what was looked at, so what was worked out
//!   from that is right or comes to nothing. Versions never come again, so a write that arrives late is
//!   refused too as soon as anybody has written since.
//! - *A conflict* is a race that somebody else won: so somebody always gets on. The loser looks again, after
//!   a random pause that grows with each time. Whoever takes a lock again and again, without a look, could
//!   keep all others from ever finding it as they left it. So who comes in vain *knocks*: a cell beside the
//!   lock's, at which those look who write by guess, and then let others go first for a moment. Who leaves
//!   others behind knows better than all of them what is there, and would be the first to join again: where a
//!   write takes long, and nobody is told of a turn, it lets them go first without a knock. Where nothing is
//!   forgotten, who was refused once writes and looks in one round trip from then on, and tries again with
//!   what it saw.
//! - *The reply is lost, the future is dropped, we die*: it is unknown whether the write was done, and a look
//!   tells, by the claim's id. It may still be done later, as long as the cell stays what it was: who
//!   must be certain that it will not, writes the cell anew as it is.
//! - *The write is refused, and was done*: a proxy before the store may repeat it, and pass on the answer to the
//!   repetition. So a refusal never proves that nothing was done; what is in the cell decides. An adapter recognizes its
//!   own write where it can (`lasting.rs`). Here the claim's id decides: a join finds its place, a session its cell,
//!   an eviction removes none but those that it saw first. A departure whose claim stood there at a look of the
//!   same call, and is gone at the next, is one: it was held until the call began. One by guess is one
//!   only if the adapter says that the write is in doubt, for otherwise another client evicted it since.
//! - *A stale look* comes to nothing where it writes. Where it only tells (a waiter's place) it is as true as
//!   any answer that took its time.
//! - *The dead*: before the rule is applied, those in front whose sessions are gone are removed, as many
//!   rounds as it takes. Those further back are found when they come near.
//! - *A session is looked at* no sooner than it could be found gone: a session that was seen alive cannot be over before
//!   what was left of its life then has passed (less what clocks may be wrong by). So the sessions of a crowd cost
//!   a look each in several seconds, and no dead holder is found later because of that. Only a client that
//!   removed its session itself while claims of it stood is found a few seconds later. A join that fits beside all
//!   that hold, and a release that no claim waits for, need none of these looks.
//! - *Who is let in* is told by whoever wrote that it is: at once where it is one of our own, by a
//!   [bell](crate::Bells) where there are any. If we die before, it finds out at its next look.

use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_core::kit::{locked, spawn_on};
use leasehold_core::queue::{Queue, StoreTime, granted};
use leasehold_core::store::{Ears, Signal, Standing};
use leasehold_core::{Claim, ClaimId, Clock, Error, ErrorKind, Kind, Moment, Name, Result};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use crate::cells::{Answer, Cells, Request};
use crate::claims::Claims;
use crate::epoch::Epochs;
use crate::keys::Keys;
use crate::known::{Alive, Guess, Known, Seen};
use crate::session::Sessions;
use crate::text;

/// How long it is to be seen that a session is gone: for longer than any call that found it so.
const GONE_FOR: Duration = Duration::from_secs(60);
/// So many times as long as an empty queue one stays in which somebody stands.
const STOOD_IN: u32 = 7;
/// After so many conflicts one who joins knocks.
const IN_VAIN: u32 = 1;
/// So often one who is refused begins anew.
const KNOCKS: u32 = 8;
/// How long a knock is to be heard.
const KNOCK: Duration = Duration::from_secs(2);
/// How long whoever has heard it lets others go first.
const POLITE: Duration = Duration::from_millis(200);
/// How long others go first, about.
const AFTER_YOU: Duration = Duration::from_millis(8);
/// The longest time for which a session is not looked at that was seen alive, where few are in front.
const LOOKED_AT: Duration = Duration::from_secs(5);
/// So many in front are few.
const FEW: usize = 8;
/// How often who joins many looks whether they live.
const SWEEP: f64 = 0.125;
/// The longest pause after a conflict.
const LONGEST_PAUSE: Duration = Duration::from_millis(60);

/// What all calls share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) cells: Arc<dyn Cells>,
    pub(crate) runtime: Handle,
    pub(crate) clock: Clock,
    pub(crate) keys: Keys,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) epochs: Epochs,
    pub(crate) claims: Claims,
    pub(crate) known: Known,
    pub(crate) alive: Alive,
    /// Whether the fronts of queues are being looked at.
    pub(crate) is_clearing: AtomicBool,
    /// How many claims that were given up may be taken out at once.
    pub(crate) reaping: Semaphore,
    /// The longest pause between two looks of a waiter.
    pub(crate) poll: Duration,
    /// Who is told of evictions.
    pub(crate) ears: Ears,
    /// By chance, so that not all come at once.
    pub(crate) dice: Mutex<fastrand::Rng>,
}

/// What became of a write.
enum Written {
    Yes,
    /// It was refused; what is there, if that was asked for.
    No(Option<Seen>),
}

/// What is made of a queue.
pub(crate) enum Turn<T> {
    /// Nothing was changed.
    Told(T),
    /// It is to be written.
    Write(T),
}

/// What a write was worked out from.
pub(crate) enum Because {
    /// What we wrote last.
    Guessed,
    /// A look.
    Looked,
    /// The same, while the system knew what it had known since this epoch began.
    LookedIn(String),
}

/// How certain it must be of a session that it is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proof {
    /// For people: a look is enough, and nothing is written.
    Shown,
    /// For good.
    Sure,
}

/// What a claim needs of a queue.
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

    /// Whether it fits beside all that stand there, dead or alive.
    fn is_beside(self, queue: &Queue) -> bool {
        let held: u64 = queue.entries().map(|entry| u64::from(entry.weight)).sum();
        let is_same = queue.kind() == self.kind && queue.capacity() == self.capacity;
        is_same && held + u64::from(self.weight) <= u64::from(self.capacity)
    }
}

/// Whose claim a write is about, and what it does to it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum About {
    Joins(ClaimId, Fit),
    Leaves(ClaimId),
    Nobody,
}

impl About {
    /// What may be guessed at before it.
    fn guess(self) -> Option<Guess> {
        match self {
            Self::Joins(..) => Some(Guess::Free),
            Self::Leaves(_) => Some(Guess::Alone),
            Self::Nobody => None,
        }
    }
}

impl Shared {
    pub(crate) fn time(&self) -> StoreTime {
        let now = self.cells.wall_micros();
        StoreTime { now, stamp: now }
    }

    /// A number from 0 to 1.
    pub(crate) fn chance(&self) -> f64 {
        locked(&self.dice).f64()
    }

    /// On the client's own runtime: the caller's may have no timer.
    pub(crate) async fn sleep(&self, pause: Duration) {
        // Made there too: a timer belongs to the runtime in which it was made, which may end before it does.
        let slept = self.runtime.spawn(async move { tokio::time::sleep(pause).await }).await;
        if slept.is_err() {
            // Our runtime has ended, and nothing comes of this any more: whoever waits must not spin.
            std::future::pending::<()>().await;
        }
    }

    /// Does something to a queue. `guess`: what it is believed to be. One round trip with a guess that is
    /// right, two without, and one more to ask for the sessions of those in front.
    pub(crate) async fn change<T>(
        &self,
        name: &Name,
        about: About,
        mut guess: Option<Seen>,
        mut work: impl FnMut(&mut Queue) -> Turn<T> + Send,
    ) -> Result<T> {
        let mut conflicts = 0;
        let mut since: Option<Seen> = None;
        // Who was seen alive a few conflicts ago is not asked for again.
        let mut alive = HashSet::new();
        loop {
            let guessed = guess.take();
            let is_guess = guessed.is_some();
            let (mut seen, epoch) = match guessed.or_else(|| since.take()) {
                Some(seen) => (seen, None),
                None => self.look_to_write(name, about, conflicts).await?,
            };
            if let Some(guess) = about.guess().filter(|_| !is_guess) {
                self.known.looked(name, guess, &seen);
            }
            if conflicts % KNOCKS == 0 {
                alive.clear();
            }
            let settled = !is_guess
                && self.must_settle(about, &seen.queue)
                && self.settle_but(&mut seen.queue, Proof::Sure, &mut alive).await?;
            let done = match work(&mut seen.queue) {
                Turn::Told(told) if !settled => return Ok(told),
                Turn::Told(done) | Turn::Write(done) => done,
            };
            let because = match epoch {
                _ if is_guess => Because::Guessed,
                Some(epoch) => Because::LookedIn(epoch),
                None => Because::Looked,
            };
            // Now and then it begins anew, and knocks again. A guess is looked at where that costs nothing.
            let is_free = is_guess && self.cells.bells().is_none();
            let looks = (is_free || conflicts % KNOCKS != 0) && !self.cells.system().forgets;
            let tried = seen.version.clone();
            match self.write_and_look(name, about, seen, because, looks).await? {
                Written::Yes => return Ok(done),
                Written::No(seen) => since = seen,
            }
            if since.as_ref().is_some_and(|seen| seen.version == tried) {
                // The look is older than the refusal, or nothing can be written for now: not again at once.
                since = None;
                self.sleep(longest_pause_after(conflicts + 3).mul_f64(0.5 + self.chance())).await;
            }
            match about.guess().filter(|_| is_guess) {
                Some(guess) => self.known.was_wrong(name, guess),
                None => {
                    conflicts += 1;
                    // Where who is next is told, all wait for who leaves.
                    let hurries = matches!(about, About::Leaves(_)) && self.cells.bells().is_some();
                    if since.is_none() && !hurries {
                        self.sleep(longest_pause_after(conflicts).mul_f64(self.chance())).await;
                    }
                }
            }
        }
    }

    /// The queue as it is; the epoch too where it matters. Who has come in vain before knocks.
    async fn look_to_write(
        &self,
        name: &Name,
        about: About,
        conflicts: u32,
    ) -> Result<(Seen, Option<String>)> {
        let joins = matches!(about, About::Joins(..));
        let asks_epoch = joins && self.cells.system().forgets;
        let mut requests = vec![Request::Get { key: self.keys.lock(name) }];
        requests.extend(asks_epoch.then(|| self.epochs.get()));
        if joins && conflicts >= IN_VAIN {
            let (key, lives) = (self.keys.knock(name), Some(KNOCK));
            requests.push(Request::Create { key, value: Vec::new(), lives });
        }
        // Where who is next is told, turns come so quickly that who comes in vain may come in vain for long.
        let minds_others = joins && conflicts == 0 && self.cells.bells().is_some() && !asks_epoch;
        if minds_others {
            requests.push(Request::Get { key: self.keys.knock(name) });
        }
        let sent = self.clock.now();
        let mut answers = self.cells.run(requests).await?.into_iter();
        let mut cell = answers.next().unwrap_or(Answer::Absent);
        if minds_others && matches!(answers.next(), Some(Answer::Found(_))) {
            // For as long as a look and a write take.
            let once = self.clock.now().since(sent);
            self.sleep((once * 2).max(AFTER_YOU).mul_f64(0.5 + self.chance())).await;
            let get = Request::Get { key: self.keys.lock(name) };
            cell = self.cells.run(vec![get]).await?.pop().unwrap_or(Answer::Absent);
        }
        let epoch = match answers.next().filter(|_| asks_epoch) {
            Some(epoch) => Some(self.epochs.open(&*self.cells, epoch).await?),
            None => None,
        };
        Ok((seen(name, cell)?, epoch))
    }

    /// The queue as it is.
    pub(crate) async fn look(&self, name: &Name) -> Result<Seen> {
        let get = Request::Get { key: self.keys.lock(name) };
        let answer = self.cells.run(vec![get]).await?.pop();
        seen(name, answer.unwrap_or(Answer::Absent))
    }

    /// Whether it matters to this change who in front is dead.
    fn must_settle(&self, about: About, queue: &Queue) -> bool {
        let waits = queue.entries().any(|entry| entry.standing == Standing::Waiting);
        let is_clear = match about {
            About::Joins(id, fit) => {
                // The dead among many are removed occasionally, so that they do not fill the queue.
                let is_swept = queue.entries().len() > FEW && self.chance() < SWEEP;
                fit.is_beside(queue) && !is_swept && queue.entries().all(|entry| entry.id != id)
            }
            About::Leaves(_) => true,
            About::Nobody => false,
        };
        waits || !is_clear
    }

    /// Removes those in front whose sessions are gone, and grants what then fits. Whether there were any.
    pub(crate) async fn settle(&self, queue: &mut Queue, proof: Proof) -> Result<bool> {
        self.settle_but(queue, proof, &mut HashSet::new()).await
    }

    /// Until when a session need not be looked at that was seen alive now, with so much of its life left.
    fn alive_until(&self, remaining: Option<Duration>, front: usize) -> Moment {
        let now = self.clock.now();
        let Some(remaining) = remaining else { return now };
        let left = remaining.saturating_sub(Duration::from_secs(1) + self.cells.system().grain);
        now.plus(if front > FEW { left } else { left.min(LOOKED_AT) })
    }

    /// The sessions of those in front that must be looked at to know that they live.
    pub(crate) fn unsure(&self, queue: &Queue, alive: &HashSet<String>) -> Vec<String> {
        let now = self.clock.now();
        let ours = self.sessions.current().filter(|session| session.certain() > now);
        let fit = granted(queue.entries().map(|e| e.weight), queue.capacity());
        // And the first that does not fit, who must not be in everybody's way when its turn comes.
        let front: BTreeSet<&str> =
            queue.entries().take(fit + 1).map(|e| e.session.as_str()).collect();
        let is_unsure = |session: &&str| {
            ours.as_ref().is_none_or(|ours| ours.id != **session)
                && !alive.contains(*session)
                && !self.alive.is_sure(session, now)
        };
        front.into_iter().filter(is_unsure).map(str::to_owned).collect()
    }

    /// What a look showed of a session. Whether it was there, and lives.
    pub(crate) fn note_session(&self, id: &str, answer: &Answer, front: usize) -> bool {
        match answer {
            Answer::Found(found) if found.value != text::GONE => {
                self.alive.note(id, self.alive_until(found.remaining, front));
                true
            }
            _ => {
                self.alive.forget(id);
                false
            }
        }
    }

    /// The same, without a look at those that are known to be alive.
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

    /// Puts something in the place of each of these sessions, if there is nothing: none of them is touched
    /// after that. Whether there was nothing.
    async fn make_sure(&self, absent: Vec<String>) -> Result<Vec<(String, bool)>> {
        let creates = absent.iter().map(|id| {
            let (key, value) = (self.keys.session(id), text::GONE.to_vec());
            Request::Create { key, value, lives: Some(GONE_FOR) }
        });
        let answers = self.cells.run(creates.collect()).await?;
        let is_gone = answers.into_iter().map(|answer| matches!(answer, Answer::Written(_)));
        Ok(absent.into_iter().zip(is_gone).collect())
    }

    /// Tells those whom what was written lets in.
    async fn tell(&self, about: About, queue: &mut Queue) {
        for id in queue.take_fresh_grants() {
            let Some(entry) = queue.entries().find(|entry| entry.id == id) else { continue };
            if matches!(about, About::Joins(ours, _) if ours == id) {
                continue;
            }
            let is_ours = self.sessions.current().is_some_and(|ours| ours.id == entry.session);
            if is_ours {
                self.claims.tell(id, Signal::Granted(entry.token));
            } else if let Some(bells) = self.cells.bells() {
                bells.ring(&entry.session, text::rung(id, entry.token)).await;
            }
        }
    }

    /// Writes it, if it is still what was looked at. Whether it was.
    pub(crate) async fn write(
        &self,
        name: &Name,
        about: About,
        seen: Seen,
        because: Because,
    ) -> Result<bool> {
        let written = self.write_and_look(name, about, seen, because, false).await?;
        Ok(matches!(written, Written::Yes))
    }

    /// The same; and looks at once what is there if it was not, if asked to.
    async fn write_and_look(
        &self,
        name: &Name,
        about: About,
        mut seen: Seen,
        because: Because,
        looks: bool,
    ) -> Result<Written> {
        let system = self.cells.system();
        let value = text::written(name, &seen.queue, system.largest_value)?;
        // One in which only the dead stand ends too. Whoever stands there sees to it that it does not end before
        // (`renew.rs`).
        let lives = system.idle.map(|idle| idle * if seen.queue.is_empty() { 1 } else { STOOD_IN });
        let key = self.keys.lock(name);
        let write = match seen.version.take() {
            Some(version) => Request::Replace { key, value, version, lives },
            None => Request::Create { key, value, lives },
        };
        let is_new = matches!(write, Request::Create { .. });
        let look = Request::Get { key: write.key().to_owned() };
        let mut requests = vec![write];
        let joins = matches!(about, About::Joins(..));
        match &because {
            Because::LookedIn(_) if is_new => requests.push(self.epochs.get()),
            // In the same round trip.
            Because::Guessed if joins => {
                requests.push(Request::Get { key: self.keys.knock(name) });
                requests.extend(system.forgets.then(|| self.epochs.get()));
            }
            _ if looks => requests.push(look),
            _ => {}
        }
        let has_look = looks && requests.len() == 2 && requests[1].key() == requests[0].key();
        let was_leaving = self.is_sent(about);
        let sent = self.clock.now();
        let mut answers = self.kept(requests).await?.into_iter();
        let written = answers.next();
        let Some(Answer::Written(version)) = written else {
            self.is_refused(about, was_leaving || written == Some(Answer::InDoubt));
            let now = answers.next().filter(|_| has_look);
            return Ok(Written::No(now.map(|now| self::seen(name, now)).transpose()?));
        };
        if let About::Joins(id, _) = about {
            // Whatever was sent before it is refused from now on.
            self.claims.is_certain(id);
        }
        if let About::Leaves(id) = about {
            // This is done, and what it did is known; what was sent before may have been done too.
            self.claims.leaves(id, was_leaving);
        }
        seen.version = Some(version);
        let after = [answers.next(), answers.next()];
        let knocked = self.is_let_in(because, after).await?;
        self.tell(about, &mut seen.queue).await;
        let leaves = matches!(about, About::Leaves(_)) && !seen.queue.is_empty();
        self.known.keep(name, seen);
        let now = self.clock.now();
        if knocked {
            self.known.knocked(name, now.plus(POLITE), AFTER_YOU);
        } else if leaves && self.cells.bells().is_none() && !system.forgets {
            // For as long as a look, one at sessions and a write take.
            self.known.knocked(name, now.plus(POLITE), (now.since(sent) * 3).min(POLITE));
        }
        Ok(Written::Yes)
    }

    /// Has a queue live on that is there.
    pub(crate) async fn prolong(&self, name: &Name, seen: &Seen) -> Result<()> {
        let (Some(idle), Some(version)) = (self.cells.system().idle, seen.version.clone()) else {
            return Ok(());
        };
        let value = text::written(name, &seen.queue, self.cells.system().largest_value)?;
        let (key, lives) = (self.keys.lock(name), idle * STOOD_IN);
        // Refused, somebody else has written it, and it lives on by that.
        self.cells.run(vec![Request::Touch { key, value, version, lives }]).await.map(drop)
    }

    /// Judges, by what was looked at together with a write, whether it stands: what the system has forgotten
    /// before it may be believed by others. Whether somebody has knocked.
    async fn is_let_in(&self, because: Because, after: [Option<Answer>; 2]) -> Result<bool> {
        match (because, after) {
            (Because::LookedIn(epoch), [Some(answer), _])
                if !self.epochs.is_still(&epoch, &answer) =>
            {
                let what = "the server was restarted or emptied and has lost its data";
                Err(Error::new(ErrorKind::Unreachable, what))
            }
            (Because::Guessed, [knock, epoch]) => {
                if let Some(epoch) = epoch {
                    self.epochs.open(&*self.cells, epoch).await?;
                }
                Ok(matches!(knock, Some(Answer::Found(_))))
            }
            _ => Ok(false),
        }
    }

    /// A system that may lose a cell which it has no room to write anew has perhaps lost one: from now on
    /// it is as if it had lost all. That is seen to also when the caller's future is dropped meanwhile.
    async fn kept(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        if !self.cells.system().forgets {
            return self.cells.run(requests).await;
        }
        let (cells, epochs) = (self.cells.clone(), self.epochs.clone());
        let writing = spawn_on(&self.runtime, async move {
            let told = cells.run(requests).await;
            if told.as_ref().is_err_and(|error| error.kind() == ErrorKind::Full) {
                epochs.end(&*cells).await;
            }
            told
        });
        let ended =
            |_| Error::new(ErrorKind::Closed, "the client's runtime has ended: connect again");
        writing.await.map_err(ended)?
    }

    /// Whether the claim may have been taken out before.
    fn is_sent(&self, about: About) -> bool {
        match about {
            About::Joins(id, _) => self.claims.doubt(id),
            About::Leaves(id) => {
                let was_leaving = self.claims.is_leaving(id);
                self.claims.leaves(id, true);
                return was_leaving;
            }
            About::Nobody => {}
        }
        false
    }

    /// The claim may have been taken out all the same, before or by this.
    fn is_refused(&self, about: About, may_have_left: bool) {
        match about {
            About::Joins(id, _) => self.claims.is_certain(id),
            About::Leaves(id) => self.claims.leaves(id, may_have_left),
            About::Nobody => {}
        }
    }
}

/// What is in a lock's cell; without one, a queue that nobody has ever stood in.
pub(crate) fn seen(name: &Name, cell: Answer) -> Result<Seen> {
    match cell {
        Answer::Found(found) => {
            let queue = text::read(name, &found.value)?;
            Ok(Seen { queue, version: Some(found.version) })
        }
        _ => Ok(Seen { queue: Queue::new(Kind::Mutex, 1, false), version: None }),
    }
}

/// Longer each time.
fn longest_pause_after(conflicts: u32) -> Duration {
    LONGEST_PAUSE.min(Duration::from_millis(1) * (1 << conflicts.min(10)))
}
