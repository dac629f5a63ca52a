//! Explores sessions and one lock in cells completely. It shows which clients live and which are
//! considered dead. The system can do no more than write one value if it is unchanged since it was
//! read (`leasehold-cell`).
//!
//! # What is modelled
//! - *The lock* is one cell with a list of claims, each with the session of its client. The first
//!   claim holds. (Other tests cover the rule of the queue, such as `model.rs`.) The lock is
//!   written only if it is unchanged since the read. Such a write may arrive at any time later,
//!   when its sender has abandoned it. A stale read shows nothing that a slow answer would not also
//!   have shown.
//! - *A session* is a cell of its client, which is touched repeatedly. It lives for [`Model::life`]
//!   ticks. Its client counts that from when it *sent* the touch, minus the grain. A touch may be
//!   in flight for any time, and so may its answer. Either may be lost. One client may have several
//!   in flight.
//! - *Three systems* ([`System`]). In the first, a cell expires by the server's clock, up to the
//!   grain too early. In the second, a touch is also a write, and a read may be stale. The third
//!   has objects, which never expire, so observers decide. They use their own clock since they
//!   first saw this version, or the servers' timestamps. The timestamps have whole seconds (of two
//!   ticks), and the servers' clocks differ.
//! - *Observers* work in steps, between which anything may happen. An observer reads the lock,
//!   requests the first session, waits for the answer for any time, replaces the session by
//!   [`Cell::Gone`], and writes the lock without it. A stale read may report any session as
//!   expired, which is worse than any real one.
//! - *Pauses and crashes* need no action of their own, because no client is forced to act while
//!   time passes.
//! - *Clocks.* Time is discrete. The clock of a client with a session may miss a tick, which the
//!   drift covers.
//!
//! A client holds what it was granted under a session that is certainly alive. Its lease is not
//! modelled, because it could only end sooner.
//!
//! # Bounds, and why they suffice
//! All times are kept as ages, and those that have passed are equivalent. A version is kept as
//! whether it is still the current one, because no version comes back. So the state space is finite
//! without a bound on time, and is explored completely. The clients are bounded: two or three, one
//! of which has a session that may end. The others' sessions are always certain, which is more than
//! any real client may assume. Also bounded are the sessions of that client, one after the other,
//! and its touches in flight. One more exploration has two clients whose sessions end.
//!
//! # Controls
//! Without any one rule there must be a history in which two clients believe that they hold, or in
//! which a dead client is not detected. The same applies if the servers' clocks differ by more than
//! is allowed for.
//!
//! # What it does not show
//! A system that forgets (`epoch.rs` there, whose tests forget), and a server whose clock goes
//! back.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use leasehold_model::is_long;
use stateright::{Checker, HasDiscoveries, Model as _, Property};

const CLIENTS: usize = 3;
const SESSIONS: usize = 2;
/// Number of ticks in a timestamp's second.
const SECOND: u8 = 2;
const DRIFT: u8 = 1;
/// Value of [`Session::certain`] while the session is being created.
const OPENING: u8 = u8::MAX;

#[derive(Clone, Copy, Debug, PartialEq)]
enum System {
    /// Cells expire by the server's clock. Reads show the current state.
    Expiring,
    /// Like `Expiring`, but a touch is a write, and a read may be stale.
    Stream,
    /// Cells never expire. `stamps` is whether the servers' answers have timestamps.
    Objects { stamps: bool },
}

/// The rules under test. [`Rules::ALL`] is the design. Each control removes one rule.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Rules {
    /// A life is counted from before the touch was sent, not from its answer.
    from_sending: bool,
    /// The client subtracts the grain from its session's life. It covers an early expiry and the
    /// skew of the timestamps.
    grain: bool,
    /// An observer that finds a session gone by a possibly stale read replaces its cell.
    makes_sure: bool,
    /// The replacement requires that the cell is unchanged since the read.
    compares: bool,
    /// A second is subtracted from ages by timestamps.
    whole_seconds: bool,
    /// The age of an observed version counts from when the answer arrived, not from when the
    /// request was sent.
    first_from_answer: bool,
    /// Earlier observations are remembered.
    remembers: bool,
    /// The drift of the client's clock is subtracted.
    drift: bool,
    /// A client stops when its certain time ends. It does not continue under a session whose end
    /// was not reported.
    ends: bool,
    /// The lock is written only if it is unchanged since the read.
    refuses: bool,
    /// A client that leaves while its last write is unanswered writes the cell even if it finds no
    /// claim of its own there.
    doubts: bool,
}

impl Rules {
    const ALL: Self = Self {
        from_sending: true,
        grain: true,
        makes_sure: true,
        compares: true,
        whole_seconds: true,
        first_from_answer: true,
        remembers: true,
        drift: true,
        ends: true,
        refuses: true,
        doubts: true,
    };
}

/// An event that must occur somewhere in an exploration. Otherwise the exploration shows nothing.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A touch extended a session's life.
    Touched,
    /// A touch was answered when its session was over for its client.
    AnswerTooLate,
    /// A touch arrived whose session was over for its client by then.
    LateTouch,
    /// A touch was refused because an answer to the one before was lost.
    TouchRefused,
    /// A session was over for its client by its clock alone.
    OverByClock,
    /// An observer found a session gone that was over for its client.
    FoundGone,
    /// A stale read reported an existing session as gone.
    StaleLook,
    /// A session that was to be replaced still existed.
    ThereAfterAll,
    /// A session's cell was replaced.
    PutGone,
    /// A session was known to be over by the observer's own clock.
    ByOwnClock,
    /// A session was known to be over by timestamps, at the first read.
    ByStamps,
    /// A dead client's claim was replaced.
    TakenOver,
    /// A write of the lock was in flight when another arrived before it. It will be refused.
    WriteRefused,
    /// A write of the lock arrived that its sender had abandoned.
    LateWrite,
    /// A client came back with a new session.
    CameBack,
    /// A client left without knowing whether its claim is in the queue.
    LeftInDoubt,
}

const EVENTS: usize = Event::LeftInDoubt as usize + 1;

struct Model {
    system: System,
    clients: usize,
    /// Number of clients whose session may end.
    mortal: usize,
    sessions: u8,
    life: u8,
    grain: u8,
    /// By how much the clocks of the servers with timestamps differ.
    apart: u8,
    /// Whether reads of sessions may be stale.
    behind: bool,
    /// Whether clients leave.
    leaves: bool,
    /// Maximum number of one client's touches and answers in flight.
    in_flight: usize,
    /// Number of ticks that clocks may miss.
    slow: u8,
    rules: Rules,
    events: Arc<[AtomicU64; EVENTS]>,
}

/// A session's cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Cell {
    /// Not created yet.
    Not,
    /// Written `age` ticks ago. Its timestamp is `stamped` seconds ago.
    There {
        age: u8,
        stamped: i8,
    },
    Ended,
    /// Replaced by an observer that considered it gone.
    Gone,
}

/// A touch or a creation of a session in flight, or its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Touch {
    session: u8,
    /// How long ago it was sent, by its client's clock.
    ago: u8,
    way: Way,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Way {
    Creates,
    /// Whether its version is the current one.
    Touches {
        is_current: bool,
    },
    /// It succeeded. `is_current` is whether the returned version is still the current one.
    Done {
        is_current: bool,
    },
    Refused,
    Absent,
}

/// A client's own session, as the client knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Session {
    number: u8,
    /// For how long it is certain, by the client's own clock. 0 means that it is over.
    certain: u8,
    /// Whether the version that it knows is the current one.
    is_current: bool,
}

/// A request for another client's session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Asked {
    /// For how long a version was known at that time, if it is still the current one.
    known: Option<u8>,
    /// How long ago it was sent, if that matters.
    ago: u8,
}

/// A client's knowledge of another client's session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Watch {
    asked: Option<Asked>,
    /// How long ago the current version was first seen.
    first: Option<u8>,
    /// It seems to be over. The value is whether the observed version is the current one.
    over: Option<bool>,
    /// It is certainly gone.
    gone: bool,
}

/// A claim: its client, and the number of the client's session.
type Entry = (u8, u8);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Seen {
    queue: Vec<Entry>,
    /// Whether it is the current value.
    is_current: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Client {
    session: Option<Session>,
    /// Number of sessions that it has had.
    had: u8,
    touches: Vec<Touch>,
    watches: [[Watch; SESSIONS]; CLIENTS],
    seen: Option<Seen>,
    /// The writes that it has sent.
    writes: Vec<Seen>,
    /// Whether it has sent a claim and does not know whether the claim is in the queue.
    doubts: bool,
    wants: Wants,
    /// Whether it was notified that it holds, under its current session.
    notified: bool,
    /// How far its clock is behind.
    lag: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Wants {
    In,
    Out,
    Left,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    /// The current tick within a second.
    tick: u8,
    lock: Vec<Entry>,
    cells: [[Cell; SESSIONS]; CLIENTS],
    clients: Vec<Client>,
    /// Whether an observer looked for a dead client for long enough and did not detect it.
    missed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Action {
    /// Time passes. One client's clock may miss the tick.
    Tick {
        slow: Option<usize>,
    },
    /// A session's cell expires, a little early.
    End {
        client: usize,
        session: usize,
    },
    Open(usize),
    Touch(usize),
    /// A touch arrives. `stamped_ahead` means that it arrives at a server whose clock is ahead.
    Arrive {
        client: usize,
        touch: usize,
        stamped_ahead: bool,
    },
    Answer {
        client: usize,
        touch: usize,
    },
    Lose {
        client: usize,
        touch: usize,
    },
    /// Reads the lock.
    Look(usize),
    /// Requests the session of the first claim that it saw.
    Ask(usize),
    /// Receives the answer, from a server whose clock is ahead or not.
    Judge {
        client: usize,
        of: Entry,
        dated_ahead: bool,
    },
    /// Receives a stale answer.
    JudgeBehind {
        client: usize,
        of: Entry,
    },
    MakeSure {
        client: usize,
        of: Entry,
    },
    /// Sends the new value that it derived from what it saw.
    Write(usize),
    ArriveWrite {
        client: usize,
        write: usize,
        is_answered: bool,
    },
    Leave(usize),
}

impl Client {
    fn watch(&self, of: Entry) -> &Watch {
        &self.watches[usize::from(of.0)][usize::from(of.1)]
    }

    fn watch_mut(&mut self, of: Entry) -> &mut Watch {
        &mut self.watches[usize::from(of.0)][usize::from(of.1)]
    }
}

impl Model {
    fn new(system: System) -> Self {
        Self {
            system,
            clients: 2,
            mortal: 1,
            sessions: 2,
            life: 4,
            grain: 1,
            apart: 1,
            behind: !matches!(system, System::Expiring),
            leaves: false,
            in_flight: 2,
            slow: 0,
            rules: Rules::ALL,
            events: Arc::default(),
        }
    }

    fn without(self, break_it: impl FnOnce(&mut Rules)) -> Self {
        let mut rules = self.rules;
        break_it(&mut rules);
        Self { rules, ..self }
    }

    fn happened(&self, event: Event) {
        self.events[event as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn is_objects(&self) -> bool {
        matches!(self.system, System::Objects { .. })
    }

    /// Returns the age at which a session is known to be over, whatever the clocks of the servers.
    fn oldest(&self) -> u8 {
        if self.is_objects() { self.life + self.apart + 2 * SECOND } else { self.life }
    }

    /// Returns for how long a touch that was just sent makes a session certain.
    fn worth(&self) -> u8 {
        self.life - if self.rules.grain { self.grain } else { 0 }
    }

    /// Returns the client's session, if it has one that is not over.
    fn session(&self, s: &State, c: usize) -> Option<u8> {
        if c >= self.mortal {
            return Some(0);
        }
        let session = s.clients[c].session;
        session.filter(|own| (1..OPENING).contains(&own.certain)).map(|own| own.number)
    }

    fn believes(&self, s: &State, c: usize) -> bool {
        let drift = if self.slow > 0 && self.rules.drift { DRIFT } else { 0 };
        let is_certain = |session: Session| session.certain > drift || !self.rules.ends;
        s.clients[c].notified && (c >= self.mortal || s.clients[c].session.is_some_and(is_certain))
    }

    // -- a session -------------------------------------------------------------------------------

    /// Records that a session has a new version, so that all known versions are outdated.
    fn is_rewritten(&self, s: &mut State, of: usize, number: usize) {
        let own = &mut s.clients[of];
        if let Some(session) = own.session.as_mut().filter(|own| usize::from(own.number) == number)
        {
            session.is_current = false;
        }
        for touch in own.touches.iter_mut().filter(|touch| usize::from(touch.session) == number) {
            if let Way::Touches { is_current } | Way::Done { is_current } = &mut touch.way {
                *is_current = false;
            }
        }
        for client in &mut s.clients {
            let watch = &mut client.watches[of][number];
            watch.first = None;
            watch.over = watch.over.map(|_| false);
            watch.asked = watch.asked.map(|asked| Asked { known: None, ..asked });
        }
    }

    fn arrive(&self, s: &mut State, c: usize, touch: usize, stamped_ahead: bool) {
        let Touch { session, way, .. } = s.clients[c].touches[touch];
        let n = usize::from(session);
        let is_let = match (s.cells[c][n], way) {
            (Cell::Not, Way::Creates) => true,
            (Cell::There { .. }, Way::Touches { is_current }) => {
                is_current || self.system == System::Expiring
            }
            _ => false,
        };
        let answer = match (is_let, self.system) {
            (true, _) => {
                if self.session(s, c) != Some(session) && way != Way::Creates {
                    self.happened(Event::LateTouch);
                }
                self.is_rewritten(s, c, n);
                let ahead = if stamped_ahead { self.apart } else { 0 };
                let stamped = -((s.tick + ahead) / SECOND).cast_signed();
                let stamped = if self.system == STAMPED { stamped } else { 0 };
                s.cells[c][n] = Cell::There { age: 0, stamped };
                Way::Done { is_current: true }
            }
            (false, System::Expiring) => Way::Absent,
            (false, _) => Way::Refused,
        };
        s.clients[c].touches[touch].way = answer;
    }

    fn answer(&self, s: &mut State, c: usize, touch: usize) {
        let Touch { session: number, ago, way } = s.clients[c].touches.remove(touch);
        let n = usize::from(number);
        let life = self.worth().saturating_sub(if self.rules.from_sending { ago } else { 0 });
        let Some(session) = s.clients[c].session.as_mut().filter(|own| own.number == number) else {
            return;
        };
        match way {
            // The first answer makes the session certain.
            Way::Done { is_current } if session.certain == OPENING => {
                *session = Session { certain: life, is_current, number };
            }
            Way::Done { .. } if session.certain == 0 => self.happened(Event::AnswerTooLate),
            Way::Done { is_current } => {
                if life > session.certain {
                    self.happened(Event::Touched);
                }
                session.certain = session.certain.max(life);
                session.is_current = is_current;
            }
            Way::Absent => session.certain = 0,
            Way::Refused => {
                // The client reads its cell again to find out whether the session is still its own.
                self.happened(Event::TouchRefused);
                match s.cells[c][n] {
                    Cell::There { .. } => session.is_current = true,
                    _ => session.certain = 0,
                }
            }
            Way::Creates | Way::Touches { .. } => {
                unreachable!("these requests have no such answer")
            }
        }
        self.end(s, c);
    }

    /// Ends a client's hold when its session is over.
    fn end(&self, s: &mut State, c: usize) {
        let client = &mut s.clients[c];
        if client.session.is_some_and(|session| session.certain == 0) && self.rules.ends {
            (client.notified, client.seen) = (false, None);
        }
    }

    // -- observers -------------------------------------------------------------------------------

    /// Returns the session that must be requested, which is that of the first claim that the client
    /// saw. `None` if that claim is its own.
    fn front(&self, s: &State, c: usize) -> Option<Entry> {
        let client = &s.clients[c];
        let first = client.seen.as_ref()?.queue.iter().find(|entry| !client.watch(**entry).gone)?;
        if usize::from(first.0) >= self.mortal {
            // This client's session never ends, and any attempt to replace it is refused.
            return None;
        }
        let own = self.session(s, c).map(|session| (c as u8, session));
        (Some(*first) != own).then_some(*first)
    }

    fn judge(&self, s: &mut State, c: usize, of: Entry, dated_ahead: bool) {
        let (client, n) = (usize::from(of.0), usize::from(of.1));
        let tick = s.tick;
        let cell = s.cells[client][n];
        let watch = &mut s.clients[c].watches[client][n];
        let asked = watch.asked.take().expect("the session was not read");
        let Cell::There { age, stamped } = cell else {
            let is_known = cell == Cell::Gone || self.system == System::Expiring;
            watch.gone |= is_known;
            watch.over = (!is_known).then_some(true);
            return self.happened(Event::FoundGone);
        };
        let System::Objects { stamps } = self.system else { return };
        watch.first = Some(watch.first.unwrap_or(asked.ago));
        let known = asked.known.filter(|_| self.rules.remembers);
        let by_own = known.is_some_and(|known| known >= self.life);
        let ahead = if dated_ahead { self.apart } else { 0 };
        let seconds = i16::from((tick + ahead) / SECOND) + i16::from(stamped);
        let off = if self.rules.whole_seconds { 1 } else { 0 };
        let by_stamps = stamps && (seconds - off) * i16::from(SECOND) >= i16::from(self.life);
        if by_own || by_stamps {
            watch.over = Some(true);
            self.happened(if by_stamps { Event::ByStamps } else { Event::ByOwnClock });
        } else if stamps {
            s.missed |= age >= self.oldest();
        } else {
            s.missed |= asked.known.is_some_and(|known| known >= self.life);
        }
    }

    fn make_sure(&self, s: &mut State, c: usize, of: Entry) {
        let (client, n) = (usize::from(of.0), usize::from(of.1));
        let watch = &mut s.clients[c].watches[client][n];
        let Some(is_current) = watch.over.take() else { return };
        if !self.rules.makes_sure {
            watch.gone = true;
            return;
        }
        let cell = s.cells[client][n];
        // Objects end only by this. In other systems the write is refused if a cell exists.
        let is_let = match cell {
            Cell::There { .. } => self.is_objects() && is_current || !self.rules.compares,
            Cell::Not | Cell::Ended | Cell::Gone => true,
        };
        if is_let {
            self.happened(Event::PutGone);
            self.is_rewritten(s, client, n);
            s.cells[client][n] = Cell::Gone;
            s.clients[c].watches[client][n] = Watch { gone: true, ..Watch::default() };
        } else {
            self.happened(Event::ThereAfterAll);
        }
    }

    /// Returns the new value that the client derives from what it saw, if it must be written.
    fn made(&self, s: &State, c: usize) -> Option<Seen> {
        let client = &s.clients[c];
        let mut seen = client.seen.clone()?;
        let before = seen.queue.clone();
        let is_gone = |entry: &Entry| client.watch(*entry).gone;
        // Only the first claims are checked.
        while seen.queue.first().is_some_and(is_gone) {
            seen.queue.remove(0);
        }
        let own = |entry: &Entry| usize::from(entry.0) == c;
        let session = self.session(s, c);
        match client.wants {
            Wants::In => {
                let place = (c as u8, session?);
                // A claim under an ended session of its own is removed, so that the client has only
                // one.
                seen.queue.retain(|entry| !own(entry) || *entry == place);
                if !seen.queue.contains(&place) {
                    seen.queue.push(place);
                }
            }
            Wants::Out => {
                seen.queue.retain(|entry| !own(entry));
                let in_doubt = client.doubts && self.rules.doubts;
                return (seen.queue != before || in_doubt).then_some(seen);
            }
            Wants::Left => return None,
        }
        (seen.queue != before).then_some(seen)
    }

    /// Handles a current value of the lock: the client holds if its claim is the first.
    fn is_told(&self, s: &mut State, c: usize, queue: &[Entry]) {
        let own = self.session(s, c).map(|session| (c as u8, session));
        if s.clients[c].wants == Wants::In && own.is_some() {
            s.clients[c].notified |= queue.first().copied() == own;
        }
    }

    fn arrive_write(&self, s: &mut State, c: usize, write: usize, is_answered: bool) {
        let write = s.clients[c].writes.remove(write);
        let is_let = write.is_current || !self.rules.refuses;
        if is_let {
            if write.queue.first() != s.lock.first()
                && s.lock.first().is_some_and(|first| usize::from(first.0) != c)
            {
                self.happened(Event::TakenOver);
            }
            if !is_answered {
                self.happened(Event::LateWrite);
            }
            s.lock.clone_from(&write.queue);
            for client in &mut s.clients {
                let seen = client.seen.iter_mut().chain(&mut client.writes);
                seen.for_each(|seen| seen.is_current = false);
            }
        } else {
            self.happened(Event::WriteRefused);
        }
        if is_answered {
            // The client waited for this answer and acts on it.
            s.clients[c].doubts = false;
            if is_let {
                self.is_told(s, c, &write.queue);
                let client = &mut s.clients[c];
                let stands = write.queue.iter().any(|entry| usize::from(entry.0) == c);
                if client.wants == Wants::Out && !stands {
                    client.wants = Wants::Left;
                }
            }
        }
    }

    fn tick(&self, s: &mut State, slow: Option<usize>) {
        let stamps = self.system == STAMPED;
        s.tick = if stamps { (s.tick + 1) % SECOND } else { 0 };
        let oldest = if self.system == UNSTAMPED { 0 } else { self.oldest() };
        for c in 0..self.mortal {
            for n in 0..SESSIONS {
                let Cell::There { age, stamped } = &mut s.cells[c][n] else { continue };
                *age = (*age + 1).min(oldest);
                let longest = (oldest / SECOND + 2).cast_signed();
                if s.tick == 0 && stamps {
                    *stamped = (*stamped + 1).min(longest);
                }
                if *age == self.life && !self.is_objects() {
                    self.is_rewritten(s, c, n);
                    s.cells[c][n] = Cell::Ended;
                }
            }
        }
        for c in 0..self.clients {
            let client = &mut s.clients[c];
            if slow == Some(c) {
                client.lag += 1;
                continue;
            }
            for touch in &mut client.touches {
                touch.ago = (touch.ago + 1).min(self.worth());
            }
            for watch in client.watches.as_flattened_mut() {
                watch.first = watch.first.map(|first| (first + 1).min(self.life));
                if let Some(asked) = watch.asked.as_mut().filter(|_| !self.rules.first_from_answer)
                {
                    asked.ago = (asked.ago + 1).min(self.life);
                }
            }
            if let Some(own) = &mut client.session
                && (1..OPENING).contains(&own.certain)
            {
                own.certain -= 1;
                if own.certain == 0 {
                    self.happened(Event::OverByClock);
                }
            }
            self.end(s, c);
        }
    }

    /// Removes everything that has no effect any more.
    fn tidy(&self, s: &mut State) {
        let is_in_queue = |s: &State, c: usize, n: usize| {
            let entry = (c as u8, n as u8);
            let all = |client: &Client| client.seen.iter().chain(&client.writes).cloned().collect();
            let mut sees = s.clients.iter().flat_map(|client| -> Vec<Seen> { all(client) });
            s.lock.contains(&entry) || sees.any(|seen| seen.queue.contains(&entry))
        };
        for client in &mut s.clients {
            if client.wants == Wants::Left {
                (client.seen, client.watches) = (None, Default::default());
            }
            for touch in &mut client.touches {
                if matches!(touch.way, Way::Refused | Way::Absent) || !self.rules.from_sending {
                    touch.ago = 0;
                }
            }
            client.doubts &= self.leaves;
            if self.rules.refuses {
                // A write that will be refused has only one effect, which is that its sender learns
                // of it.
                client.seen.take_if(|seen| !seen.is_current);
                let doubts = client.doubts;
                if client.writes.iter().any(|write| !write.is_current) {
                    self.happened(Event::WriteRefused);
                }
                client.writes.retain(|write| write.is_current || doubts);
                client.writes.dedup_by(|one, other| !one.is_current && !other.is_current);
                for write in client.writes.iter_mut().filter(|write| !write.is_current) {
                    write.queue.clear();
                }
            }
        }
        for c in 0..self.mortal {
            for n in 0..usize::from(s.clients[c].had) {
                let is_own = |c: &Client| c.session.is_some_and(|own| usize::from(own.number) == n);
                let has_left = s.clients[c].wants == Wants::Left;
                if !is_in_queue(s, c, n) && (has_left || !is_own(&s.clients[c])) {
                    s.clients[c].session.take_if(|_| has_left);
                    s.cells[c][n] = Cell::Gone;
                    s.clients[c].touches.retain(|touch| usize::from(touch.session) != n);
                    s.clients.iter_mut().for_each(|other| other.watches[c][n] = Watch::default());
                }
            }
            s.clients[c].touches.sort_unstable();
            s.clients[c].touches.dedup();
        }
    }
}

impl stateright::Model for Model {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let client = Client {
            session: None,
            had: 0,
            touches: Vec::new(),
            watches: Default::default(),
            seen: None,
            writes: Vec::new(),
            doubts: false,
            wants: Wants::In,
            notified: false,
            lag: 0,
        };
        let mut cells = [[Cell::Not; SESSIONS]; CLIENTS];
        // These sessions never end.
        for cell in &mut cells[self.mortal..] {
            cell[0] = Cell::There { age: 0, stamped: 0 };
        }
        let clients = vec![client; self.clients];
        vec![State { tick: 0, lock: Vec::new(), cells, clients, missed: false }]
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        actions.push(Action::Tick { slow: None });
        let lags: u8 = s.clients.iter().map(|client| client.lag).sum();
        for c in (0..self.mortal).filter(|_| lags < self.slow) {
            actions.push(Action::Tick { slow: Some(c) });
        }
        let heads: &[bool] = if self.system == STAMPED { &[false, true] } else { &[false] };
        for c in 0..self.clients {
            let client = &s.clients[c];
            for session in 0..SESSIONS {
                let Cell::There { age, .. } = s.cells[c][session] else { continue };
                if c < self.mortal && !self.is_objects() && age >= self.life - self.grain {
                    actions.push(Action::End { client: c, session });
                }
            }
            if c < self.mortal {
                let room = client.touches.len() < self.in_flight;
                match client.session.map_or(0, |own| own.certain) {
                    0 if room && client.had < self.sessions && client.wants == Wants::In => {
                        actions.push(Action::Open(c));
                    }
                    1.. if self.session(s, c).is_some() && room => actions.push(Action::Touch(c)),
                    _ => {}
                }
            }
            for (touch, Touch { way, .. }) in client.touches.iter().enumerate() {
                match way {
                    Way::Creates | Way::Touches { .. } => {
                        for &stamped_ahead in heads {
                            actions.push(Action::Arrive { client: c, touch, stamped_ahead });
                        }
                    }
                    _ => actions.push(Action::Answer { client: c, touch }),
                }
                actions.push(Action::Lose { client: c, touch });
            }
            let is_in = client.wants == Wants::In && self.session(s, c).is_some();
            if is_in || client.wants == Wants::Out {
                if !client.seen.as_ref().is_some_and(|seen| seen.is_current) {
                    actions.push(Action::Look(c));
                }
                if self.leaves && client.wants == Wants::In {
                    actions.push(Action::Leave(c));
                }
            }
            if let Some(of) = self.front(s, c) {
                let watch = client.watch(of);
                if watch.asked.is_none() && watch.over.is_none() && !watch.gone {
                    actions.push(Action::Ask(c));
                }
            }
            for (other, watches) in client.watches.iter().enumerate() {
                for (number, watch) in watches.iter().enumerate() {
                    let of = (other as u8, number as u8);
                    if watch.asked.is_some() {
                        for &dated_ahead in heads {
                            actions.push(Action::Judge { client: c, of, dated_ahead });
                        }
                        let is_there = matches!(s.cells[other][number], Cell::There { .. });
                        if self.behind && is_there {
                            actions.push(Action::JudgeBehind { client: c, of });
                        }
                    }
                    if watch.over.is_some() {
                        actions.push(Action::MakeSure { client: c, of });
                    }
                }
            }
            let room = if client.wants == Wants::Out { 2 } else { 1 };
            if client.writes.len() < room && self.made(s, c).is_some() {
                actions.push(Action::Write(c));
            }
            for write in 0..client.writes.len() {
                // The client gets no answers to writes that it has abandoned.
                let is_last = write + 1 == client.writes.len();
                if is_last {
                    actions.push(Action::ArriveWrite { client: c, write, is_answered: true });
                }
                actions.push(Action::ArriveWrite { client: c, write, is_answered: false });
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        let s = &mut state;
        match action {
            Action::Tick { slow } => self.tick(s, slow),
            Action::End { client, session } => {
                self.is_rewritten(s, client, session);
                s.cells[client][session] = Cell::Ended;
            }
            Action::Open(c) => {
                let client = &mut s.clients[c];
                let number = client.had;
                if number > 0 {
                    self.happened(Event::CameBack);
                }
                client.had += 1;
                (client.notified, client.seen) = (false, None);
                client.session = Some(Session { number, certain: OPENING, is_current: false });
                client.touches.push(Touch { session: number, ago: 0, way: Way::Creates });
            }
            Action::Touch(c) => {
                let client = &mut s.clients[c];
                let Session { number: session, is_current, .. } = client.session?;
                client.touches.push(Touch { session, ago: 0, way: Way::Touches { is_current } });
            }
            Action::Arrive { client, touch, stamped_ahead } => {
                self.arrive(s, client, touch, stamped_ahead);
            }
            Action::Answer { client, touch } => self.answer(s, client, touch),
            Action::Lose { client, touch } => {
                let lost = s.clients[client].touches.remove(touch);
                // The creation was lost, and another session is created.
                let own = &mut s.clients[client].session;
                if own.is_some_and(|own| own.certain == OPENING && own.number == lost.session) {
                    *own = None;
                }
            }
            Action::Look(c) => {
                let queue = s.lock.clone();
                self.is_told(s, c, &queue);
                let stands = queue.iter().any(|entry| usize::from(entry.0) == c);
                let client = &mut s.clients[c];
                client.doubts &= !stands;
                let in_doubt = client.doubts && self.rules.doubts;
                if client.wants == Wants::Out && !stands && !in_doubt {
                    client.wants = Wants::Left;
                }
                client.seen = Some(Seen { queue, is_current: true });
            }
            Action::Ask(c) => {
                let of = self.front(s, c)?;
                let watch = s.clients[c].watch_mut(of);
                watch.asked = Some(Asked { known: watch.first, ago: 0 });
            }
            Action::Judge { client, of, dated_ahead } => self.judge(s, client, of, dated_ahead),
            Action::JudgeBehind { client, of } => {
                let watch = s.clients[client].watch_mut(of);
                (watch.asked, watch.over) = (None, Some(false));
                self.happened(Event::StaleLook);
            }
            Action::MakeSure { client, of } => self.make_sure(s, client, of),
            Action::Write(c) => {
                let made = self.made(s, c)?;
                let client = &mut s.clients[c];
                let seen = client.seen.take()?;
                match client.wants {
                    Wants::In => client.doubts = true,
                    _ if seen.queue == made.queue => self.happened(Event::LeftInDoubt),
                    _ => {}
                }
                client.writes.push(made);
            }
            Action::ArriveWrite { client, write, is_answered } => {
                self.arrive_write(s, client, write, is_answered);
            }
            Action::Leave(c) => {
                let client = &mut s.clients[c];
                (client.wants, client.notified, client.seen) = (Wants::Out, false, None);
            }
        }
        self.tidy(s);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(EXCLUSION, |m: &Self, s: &State| {
                (0..m.clients).filter(|&c| m.believes(s, c)).count() <= 1
            }),
            Property::always(FOUND, |_, s: &State| !s.missed),
            Property::always(LEFT, |_, s: &State| {
                let has_left = |entry: &Entry| s.clients[usize::from(entry.0)].wants == Wants::Left;
                !s.lock.iter().any(has_left)
            }),
        ]
    }
}

const EXCLUSION: &str = "at most one client believes that it holds";
const FOUND: &str = "dead clients are found dead";
const LEFT: &str = "a claim that left is not in the queue";

// ---------------------------------------------------------------------------------------------
// Explorations.

use Event::*;

/// Explores everything and prints the numbers of states and steps. Fails if an event of
/// `must_happen` did not occur.
fn holds(what: &str, model: Model, must_happen: &[Event]) {
    let events = Arc::clone(&model.events);
    let checker = model.checker().threads(2).spawn_bfs().join();
    let (states, deep) = (checker.unique_state_count(), checker.max_depth());
    println!("{what}: {states} states, up to {deep} steps deep");
    assert!(checker.is_done());
    if let Some((property, path)) = checker.discoveries().into_iter().next() {
        panic!("{what}: {property:?} is broken by {:#?}", path.into_actions());
    }
    for &event in must_happen {
        let times = events[event as usize].load(Ordering::Relaxed);
        assert!(times > 0, "{what}: {event:?} never happened");
    }
}

/// Returns the shortest history that breaks `property`. Fails if no history does.
fn breaks(property: &'static str, model: Model) -> Vec<Action> {
    let until = HasDiscoveries::AnyOf(BTreeSet::from([property]));
    let checker = model.checker().threads(1).finish_when(until).spawn_bfs().join();
    let states = checker.unique_state_count();
    let Some(path) = checker.discovery(property) else {
        panic!("no history breaks {property:?} in {states} states");
    };
    let path = path.into_actions();
    println!("broken after {states} states: {property}\n  {path:?}");
    path
}

const STAMPED: System = System::Objects { stamps: true };
const UNSTAMPED: System = System::Objects { stamps: false };

/// Explores one session whose touches overtake each other, and two sessions one after the other.
/// With timestamps the second part runs only in long tests, like three clients.
fn all_of(what: &str, model: impl Fn() -> Model, more: &[Event]) {
    let always = [Touched, OverByClock, TakenOver, LateWrite, WriteRefused, AnswerTooLate];
    let happened = [&always[..], &[LateTouch], more].concat();
    holds(what, Model { sessions: 1, ..model() }, &happened);
    if is_long() || model().system != STAMPED {
        let happened = [&always[..], &[CameBack], more].concat();
        holds(
            &format!("{what}, and a client returns"),
            Model { in_flight: 1, ..model() },
            &happened,
        );
    }
    if is_long() {
        let model = Model { clients: 3, sessions: 1, in_flight: 1, ..model() };
        holds(&format!("{what}, three clients"), model, &always[..5]);
    }
}

#[test]
fn guarantees_hold_with_cells_expired_by_the_server() {
    all_of("cells that end", || Model::new(System::Expiring), &[FoundGone]);
}

#[test]
fn guarantees_hold_with_expiring_cells_and_stale_reads() {
    let happened = [FoundGone, StaleLook, ThereAfterAll, PutGone];
    all_of("a stream", || Model::new(System::Stream), &happened);
}

#[test]
fn guarantees_hold_with_timestamps_of_skewed_clocks() {
    let happened = [StaleLook, ThereAfterAll, PutGone, ByStamps, ByOwnClock, TouchRefused];
    all_of("stamped objects", || Model::new(STAMPED), &happened);
}

#[test]
fn guarantees_hold_with_objects_without_timestamps() {
    let happened = [StaleLook, ThereAfterAll, PutGone, ByOwnClock, TouchRefused];
    all_of("objects", || Model::new(UNSTAMPED), &happened);
}

/// The lives are longer here, so that the drift is only a part of one.
#[test]
fn a_slow_clock_is_covered_by_the_drift() {
    for system in [System::Expiring, System::Stream, STAMPED] {
        let model = Model { slow: 1, sessions: 1, in_flight: 1, ..Model::new(system) };
        holds(&format!("{system:?}, with a slow clock"), model, &[OverByClock, TakenOver]);
    }
}

/// Each client may consider the other one dead.
#[test]
fn guarantees_hold_when_two_sessions_end() {
    let small =
        |system| Model { mortal: 2, sessions: 1, in_flight: 1, life: 3, ..Model::new(system) };
    for system in [System::Expiring, System::Stream] {
        holds(&format!("{system:?}, two sessions end"), small(system), &[OverByClock, TakenOver]);
    }
}

/// It does not matter to a leaving client how sessions end. So the system with timestamps, which
/// has many times more states, runs only in long tests.
#[test]
fn released_claim_does_not_reappear() {
    let ordinary = [System::Expiring, System::Stream, UNSTAMPED];
    for system in ordinary.into_iter().chain(is_long().then_some(STAMPED)) {
        let model = Model { leaves: true, sessions: 1, in_flight: 1, ..Model::new(system) };
        holds(
            &format!("{system:?}, clients leave"),
            model,
            &[LeftInDoubt, LateWrite, WriteRefused],
        );
    }
}

// Controls.

fn one(system: System) -> Model {
    Model { sessions: 1, in_flight: 1, ..Model::new(system) }
}

#[test]
fn session_life_counted_from_receipt_breaks_exclusion() {
    for system in [System::Expiring, System::Stream, STAMPED] {
        breaks(EXCLUSION, one(system).without(|rules| rules.from_sending = false));
    }
}

#[test]
fn without_the_grain_a_session_that_ends_early_breaks_exclusion() {
    for system in [System::Expiring, System::Stream] {
        breaks(EXCLUSION, one(system).without(|rules| rules.grain = false));
    }
}

/// The skew is to objects what the grain is to cells that expire. The rest of the second covers one
/// tick of it.
#[test]
fn without_the_skew_clocks_apart_break_exclusion() {
    let model = Model { apart: 2, grain: 2, ..one(STAMPED) };
    breaks(EXCLUSION, model.without(|rules| rules.grain = false));
}

#[test]
fn clocks_further_apart_than_the_skew_break_exclusion() {
    breaks(EXCLUSION, Model { apart: 1 + SECOND, ..one(STAMPED) });
}

#[test]
fn treating_timestamps_as_exact_breaks_exclusion() {
    breaks(EXCLUSION, one(STAMPED).without(|rules| rules.whole_seconds = false));
}

/// A client reads from a stale replica, and does not replace the session's cell.
#[test]
fn trusting_a_stale_read_breaks_exclusion() {
    for system in [System::Stream, STAMPED, UNSTAMPED] {
        let path = breaks(EXCLUSION, one(system).without(|rules| rules.makes_sure = false));
        assert!(path.iter().any(|step| matches!(step, Action::JudgeBehind { .. })), "{path:?}");
    }
}

#[test]
fn unconditional_replacement_of_a_session_breaks_exclusion() {
    for system in [System::Stream, STAMPED] {
        breaks(EXCLUSION, one(system).without(|rules| rules.compares = false));
    }
}

/// The first read was slow, and showed a value that was written while it was in flight.
#[test]
fn observation_counted_from_its_request_breaks_exclusion() {
    breaks(EXCLUSION, one(UNSTAMPED).without(|rules| rules.first_from_answer = false));
}

#[test]
fn continuing_under_an_ended_session_breaks_exclusion() {
    for system in [System::Expiring, STAMPED] {
        breaks(EXCLUSION, one(system).without(|rules| rules.ends = false));
    }
}

#[test]
fn without_the_drift_a_slow_clock_breaks_exclusion() {
    let model = Model { slow: 1, ..one(System::Expiring) };
    breaks(EXCLUSION, model.without(|rules| rules.drift = false));
}

#[test]
fn unconditional_write_of_the_lock_breaks_exclusion() {
    breaks(EXCLUSION, one(System::Expiring).without(|rules| rules.refuses = false));
}

#[test]
fn observer_that_forgets_what_it_saw_detects_no_crash() {
    breaks(FOUND, one(UNSTAMPED).without(|rules| rules.remembers = false));
}

#[test]
fn release_based_on_a_read_alone_can_leave_a_claim() {
    let model = Model { leaves: true, ..one(System::Expiring) };
    breaks(LEFT, model.without(|rules| rules.doubts = false));
}
