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
//! - *A stale look* comes to nothing where it writes. Where it only tells (a waiter's place) it is as true as
//!   any answer that took its time.
//! - *The dead*: before the rule is applied, those in front whose sessions are gone are removed, as many
//!   rounds as it takes. Those further back are found when they come near.
//! - *Who is let in* is told by whoever wrote that it is: at once where it is one of our own, by a
//!   [bell](crate::Bells) where there are any. If we die before, it finds out at its next look.

use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_core::kit::locked;
use leasehold_core::queue::{Queue, StoreTime, granted};
use leasehold_core::store::{Ears, Signal};
use leasehold_core::{ClaimId, Clock, Error, ErrorKind, Kind, Name, Result};
use tokio::runtime::Handle;

use crate::cells::{Answer, Cells, Request};
use crate::claims::Claims;
use crate::epoch::Epochs;
use crate::keys::Keys;
use crate::known::{Guess, Known, Seen};
use crate::session::Sessions;
use crate::text;

/// How long it is to be seen that a session is gone: for longer than any call that found it so.
const GONE_FOR: Duration = Duration::from_secs(60);
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

/// Whose claim a write is about, and what it does to it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum About {
    Joins(ClaimId),
    Leaves(ClaimId),
    Nobody,
}

impl About {
    /// What may be guessed at before it.
    fn guess(self) -> Option<Guess> {
        match self {
            Self::Joins(_) => Some(Guess::Free),
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
        let _ = self.runtime.spawn(tokio::time::sleep(pause)).await;
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
            let settled =
                !is_guess && self.settle_but(&mut seen.queue, Proof::Sure, &mut alive).await?;
            let done = match work(&mut seen.queue) {
                Turn::Told(told) if !settled => return Ok(told),
                Turn::Told(done) | Turn::Write(done) => done,
            };
            let because = match epoch {
                _ if is_guess => Because::Guessed,
                Some(epoch) => Because::LookedIn(epoch),
                None => Because::Looked,
            };
            // Now and then it begins anew, and knocks again.
            let looks = conflicts % KNOCKS != 0 && !self.cells.system().forgets;
            match self.write_and_look(name, about, seen, because, looks).await? {
                Written::Yes => return Ok(done),
                Written::No(seen) => since = seen,
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
        let joins = matches!(about, About::Joins(_));
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

    /// Removes those in front whose sessions are gone, and grants what then fits. Whether there were any.
    pub(crate) async fn settle(&self, queue: &mut Queue, proof: Proof) -> Result<bool> {
        self.settle_but(queue, proof, &mut HashSet::new()).await
    }

    /// The same, without a look at those that are known to be alive.
    async fn settle_but(
        &self,
        queue: &mut Queue,
        proof: Proof,
        alive: &mut HashSet<String>,
    ) -> Result<bool> {
        let now = self.clock.now();
        let ours = self.sessions.current().filter(|session| session.certain() > now);
        alive.extend(ours.map(|session| session.id.clone()));
        let mut settled = false;
        loop {
            let fit = granted(queue.entries().map(|e| e.weight), queue.capacity());
            // And the first that does not fit, who must not be in everybody's way when its turn comes.
            let front: BTreeSet<&str> =
                queue.entries().take(fit + 1).map(|e| e.session.as_str()).collect();
            let ask: Vec<String> = front
                .into_iter()
                .filter(|session| !alive.contains(*session))
                .map(str::to_owned)
                .collect();
            if ask.is_empty() {
                return Ok(settled);
            }
            let gets = ask.iter().map(|id| Request::Get { key: self.keys.session(id) });
            let answers = self.cells.run(gets.collect()).await?;
            let found = ask.into_iter().zip(answers);
            let mut gone: HashSet<String> = HashSet::new();
            let mut absent: Vec<String> = Vec::new();
            for (id, answer) in found {
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
            if matches!(about, About::Joins(ours) if ours == id) {
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
        let lives = if seen.queue.is_empty() { system.idle } else { None };
        let key = self.keys.lock(name);
        let write = match seen.version.take() {
            Some(version) => Request::Replace { key, value, version, lives },
            None => Request::Create { key, value, lives },
        };
        let is_new = matches!(write, Request::Create { .. });
        let look = Request::Get { key: write.key().to_owned() };
        let mut requests = vec![write];
        let joins = matches!(about, About::Joins(_));
        match &because {
            Because::LookedIn(_) if is_new => requests.push(self.epochs.get()),
            // In the same round trip.
            Because::Guessed if joins => {
                requests.push(Request::Get { key: self.keys.knock(name) });
                requests.extend(system.forgets.then(|| self.epochs.get()));
            }
            Because::Looked if looks => requests.push(look),
            _ => {}
        }
        self.is_sent(about);
        let sent = self.clock.now();
        let mut answers = match self.cells.run(requests).await {
            Ok(answers) => answers.into_iter(),
            Err(error) => return Err(self.was_not_kept(error).await),
        };
        let Some(Answer::Written(version)) = answers.next() else {
            self.is_refused(about);
            let now = answers.next().filter(|_| looks && matches!(because, Because::Looked));
            return Ok(Written::No(now.map(|now| self::seen(name, now)).transpose()?));
        };
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
    /// it is as if it had lost all.
    async fn was_not_kept(&self, error: Error) -> Error {
        if error.kind() == ErrorKind::Full && self.cells.system().forgets {
            self.epochs.end(&*self.cells).await;
        }
        error
    }

    fn is_sent(&self, about: About) {
        match about {
            About::Joins(id) => self.claims.doubt(id),
            About::Leaves(id) => self.claims.leaves(id, true),
            About::Nobody => {}
        }
    }

    fn is_refused(&self, about: About) {
        match about {
            About::Joins(id) => self.claims.is_certain(id),
            About::Leaves(id) => self.claims.leaves(id, false),
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
