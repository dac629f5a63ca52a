//! Sessions and one lock in cells, explored to the end: who lives, and who is taken for dead, in a system that can
//! do no more than write one value if it is still what was read (`leasehold-cell`).
//!
//! # What is modelled
//! - *The lock* is one cell: a list of claims, each with the session of its client, and whoever stands in
//!   front holds. (That the rule of the queue is right has other tests, `model.rs` among them.) It is written
//!   only if it is still what was looked at, and such a write may arrive at any time later, when its sender
//!   has long given it up. A look that is behind tells nothing that an answer which took its time would not
//!   have told.
//! - *A session* is a cell of its client, touched again and again. It lives for [`Model::life`] ticks, and
//!   its client counts on that since it *sent* the touch, less the grain. A touch is under way for as long as
//!   it likes, and so is its answer; either may be lost. Of one client several may be on their way.
//! - *Three systems* ([`System`]): one where a cell ends by the server's clock, up to the grain too early;
//!   the same where a touch is a write and a look may be behind; and objects, which nothing ends, so that
//!   whoever looks judges: by its own clock since it first saw this version, or by the servers' stamps, which
//!   are in whole seconds (of two ticks) and of clocks that are apart.
//! - *Whoever looks* does it in steps, between which anything may happen: it looks at the lock, asks for the session
//!   in front, waits for as long as it likes for that answer, puts [`Cell::Gone`] in its place, and writes the
//!   lock without it. A look that is behind may say of any session that it is over; that is worse than any real one.
//! - *Pauses and death* need no action of their own: nothing forces a client to do anything while time goes on.
//! - *Clocks.* Time is discrete. The clock of a client with a session may miss a tick, which the drift covers.
//!
//! What a client holds is what it was told under a session that is certain: its lease is not modelled, and only
//! ends sooner.
//!
//! # Bounds, and why they suffice
//! All times are kept as ages, and those that are over are the same. Which version something was is kept as
//! whether it is still the one that is there, for no version comes again. So all is finite without a bound on
//! time, and is explored completely. Bounded are the clients: two or three, of which one has a session that
//! may end (of the other it is always certain, which is to believe more than any real one); the sessions that
//! it has, one after the other; and how many of its touches are on their way. One more exploration has two
//! whose sessions end.
//!
//! # Controls
//! With any one rule taken away there must be a history in which two believe, or in which one that is dead
//! is not found dead; and with the servers' clocks further apart than is allowed for as well.
//!
//! # What it does not show
//! A system that forgets (`epoch.rs` there, whose tests forget), and a server that reckons with a time that is past.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use leasehold_model::is_long;
use stateright::{Checker, HasDiscoveries, Model as _, Property};

const CLIENTS: usize = 3;
const SESSIONS: usize = 2;
/// How many ticks a stamp's second has.
const SECOND: u8 = 2;
const DRIFT: u8 = 1;
/// In the place of how long a session is certain: it is just being made.
const OPENING: u8 = u8::MAX;

#[derive(Clone, Copy, Debug, PartialEq)]
enum System {
    /// Cells end by the server's clock; looks show what is.
    Expiring,
    /// The same; a touch is a write, and a look may be behind.
    Stream,
    /// Nothing ends. Whether the servers stamp what they tell.
    Objects { stamps: bool },
}

/// The rules under test. [`Rules::ALL`] is the design; each control takes one away.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Rules {
    /// A life is counted from before the touch was sent, not from its answer.
    from_sending: bool,
    /// A session's client does not count on the grain: the earlier end, the skew of the stamps.
    grain: bool,
    /// Who finds a session gone by a look that may be behind puts something in its place.
    makes_sure: bool,
    /// And only if it is still what was seen.
    compares: bool,
    /// A second is taken off what the stamps say.
    whole_seconds: bool,
    /// What was seen is counted from when it came, not from when it was asked for.
    first_from_answer: bool,
    /// What was seen before is kept in mind.
    remembers: bool,
    /// The drift of its client's clock is taken off.
    drift: bool,
    /// The end of what was certain is the end: nobody goes on under a session whose end was not told.
    ends: bool,
    /// The lock is written only if it is what was looked at.
    refuses: bool,
    /// Who leaves, and whose last write has no answer, writes the cell even where it finds nothing of it.
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

/// What has to happen somewhere in an exploration, or it shows nothing.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A touch made a session live longer.
    Touched,
    /// A touch was answered when its session was over for its client.
    AnswerTooLate,
    /// A touch arrived that its client had sent under a session that was over by then.
    LateTouch,
    /// A touch was refused since an answer to the one before was lost.
    TouchRefused,
    /// A session was over for its client by its clock alone.
    OverByClock,
    /// Somebody found a session gone that was over for its client.
    FoundGone,
    /// A look that was behind said so of one that was there.
    StaleLook,
    /// Who was to be put out of the way was there after all.
    ThereAfterAll,
    /// Something was put in a session's place.
    PutGone,
    /// It was known by the observer's own clock.
    ByOwnClock,
    /// It was known at the first look.
    ByStamps,
    /// A dead client's place was taken.
    TakenOver,
    /// A write of the lock was on its way when another came before it: it will be refused.
    WriteRefused,
    /// A write of the lock arrived that its sender had given up.
    LateWrite,
    /// Somebody came back under a new session.
    CameBack,
    /// Somebody left who did not know whether it stood.
    LeftInDoubt,
}

const EVENTS: usize = Event::LeftInDoubt as usize + 1;

struct Model {
    system: System,
    clients: usize,
    /// How many of them have a session that may end.
    mortal: usize,
    sessions: u8,
    life: u8,
    grain: u8,
    /// How far the clocks of the servers that stamp are apart.
    apart: u8,
    /// Whether looks at sessions may be behind.
    behind: bool,
    /// Whether clients leave.
    leaves: bool,
    /// How many touches and answers of one client are on their way.
    in_flight: usize,
    /// How many ticks clocks may miss.
    slow: u8,
    rules: Rules,
    events: Arc<[AtomicU64; EVENTS]>,
}

/// A session's cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Cell {
    /// Not made yet.
    Not,
    /// Written so many ticks ago; stamped so many seconds ago, by now.
    There {
        age: u8,
        stamped: i8,
    },
    Ended,
    /// Something of somebody who took it for gone.
    Gone,
}

/// A touch, or what makes the session, under way, or its answer.
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
    /// Whether its version is the one that is there.
    Touches {
        is_current: bool,
    },
    /// It was done. Whether the version that it tells is still the one that is there.
    Done {
        is_current: bool,
    },
    Refused,
    Absent,
}

/// A client's own session, as it sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Session {
    number: u8,
    /// So long it is certain, by its own clock; 0: over.
    certain: u8,
    /// Whether the version that it knows is the one that is there.
    is_current: bool,
}

/// A session was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Asked {
    /// For so long a version was known by then that is still there.
    known: Option<u8>,
    /// So long ago, where that matters.
    ago: u8,
}

/// What one client knows of another's session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Watch {
    asked: Option<Asked>,
    /// So long ago a version was seen first that is still there.
    first: Option<u8>,
    /// It seemed to be over; whether what was seen is what is there.
    over: Option<bool>,
    /// It is.
    gone: bool,
}

/// Whose claim, and under which of its sessions.
type Entry = (u8, u8);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Seen {
    queue: Vec<Entry>,
    /// Whether it is what is there.
    is_current: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Client {
    session: Option<Session>,
    /// How many it has had.
    had: u8,
    touches: Vec<Touch>,
    watches: [[Watch; SESSIONS]; CLIENTS],
    seen: Option<Seen>,
    /// What it has sent to be written.
    writes: Vec<Seen>,
    /// It has sent its place, and does not know whether it stands.
    doubts: bool,
    wants: Wants,
    /// It was told that it holds, under the session that it has.
    told: bool,
    /// Its clock is behind by this.
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
    /// Which tick of a second it is.
    tick: u8,
    lock: Vec<Entry>,
    cells: [[Cell; SESSIONS]; CLIENTS],
    clients: Vec<Client>,
    /// A dead one was looked for, for long enough, and not found.
    missed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Action {
    /// Time goes on; one client's clock may miss it.
    Tick {
        slow: Option<usize>,
    },
    /// A session's cell ends, a little early.
    End {
        client: usize,
        session: usize,
    },
    Open(usize),
    Touch(usize),
    /// A touch of its arrives; `stamped_ahead`: at a server whose clock is ahead.
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
    /// Looks at the lock.
    Look(usize),
    /// Asks for the session of who is in front of what it saw.
    Ask(usize),
    /// And is answered, by a server whose clock is ahead or not.
    Judge {
        client: usize,
        of: Entry,
        dated_ahead: bool,
    },
    /// And is answered by one that is behind.
    JudgeBehind {
        client: usize,
        of: Entry,
    },
    MakeSure {
        client: usize,
        of: Entry,
    },
    /// Sends what it makes of what it saw.
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

    /// When it is known to be over whatever the clocks of the servers.
    fn oldest(&self) -> u8 {
        if self.is_objects() { self.life + self.apart + 2 * SECOND } else { self.life }
    }

    /// For so long a touch that was just sent makes it certain.
    fn worth(&self) -> u8 {
        self.life - if self.rules.grain { self.grain } else { 0 }
    }

    /// Its session, if it has one that is not over.
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
        s.clients[c].told && (c >= self.mortal || s.clients[c].session.is_some_and(is_certain))
    }

    // -- a session -------------------------------------------------------------------------------

    /// A new version is there: nobody's is any more.
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
            // The first answer makes it certain at all.
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
                // It looks again: is it still its own?
                self.happened(Event::TouchRefused);
                match s.cells[c][n] {
                    Cell::There { .. } => session.is_current = true,
                    _ => session.certain = 0,
                }
            }
            Way::Creates | Way::Touches { .. } => unreachable!("no answer"),
        }
        self.end(s, c);
    }

    /// What is over is over.
    fn end(&self, s: &mut State, c: usize) {
        let client = &mut s.clients[c];
        if client.session.is_some_and(|session| session.certain == 0) && self.rules.ends {
            (client.told, client.seen) = (false, None);
        }
    }

    // -- who looks -------------------------------------------------------------------------------

    /// Whose session is to be asked for: who is in front of what it saw, unless that is itself.
    fn front(&self, s: &State, c: usize) -> Option<Entry> {
        let client = &s.clients[c];
        let first = client.seen.as_ref()?.queue.iter().find(|entry| !client.watch(**entry).gone)?;
        if usize::from(first.0) >= self.mortal {
            // That one is there, and whatever says otherwise is refused.
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
        let asked = watch.asked.take().expect("it was asked for");
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
        // Objects end only by this; elsewhere it is refused if anything is there.
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

    /// What it makes of what it saw, if there is anything to be written.
    fn made(&self, s: &State, c: usize) -> Option<Seen> {
        let client = &s.clients[c];
        let mut seen = client.seen.clone()?;
        let before = seen.queue.clone();
        let is_gone = |entry: &Entry| client.watch(*entry).gone;
        // Only those in front are looked at.
        while seen.queue.first().is_some_and(is_gone) {
            seen.queue.remove(0);
        }
        let own = |entry: &Entry| usize::from(entry.0) == c;
        let session = self.session(s, c);
        match client.wants {
            Wants::In => {
                let place = (c as u8, session?);
                // A place under a session of its own that is over is not taken twice.
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

    /// It was told what is there: whether it stands in front.
    fn is_told(&self, s: &mut State, c: usize, queue: &[Entry]) {
        let own = self.session(s, c).map(|session| (c as u8, session));
        if s.clients[c].wants == Wants::In && own.is_some() {
            s.clients[c].told |= queue.first().copied() == own;
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
            // It waited for this, and acts on it.
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

    /// What will never do anything is forgotten.
    fn tidy(&self, s: &mut State) {
        let standing = |s: &State, c: usize, n: usize| {
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
                // Nothing comes of what will be refused, but that its sender hears of it.
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
                if !standing(s, c, n) && (has_left || !is_own(&s.clients[c])) {
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
            told: false,
            lag: 0,
        };
        let mut cells = [[Cell::Not; SESSIONS]; CLIENTS];
        // These never end.
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
                // Of those that it gave up it hears no more.
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
                (client.told, client.seen) = (false, None);
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
                // What made it was lost, and it is another that is made.
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
                (client.wants, client.told, client.seen) = (Wants::Out, false, None);
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
const FOUND: &str = "one that is dead is found dead";
const LEFT: &str = "who has left does not stand there";

// ---------------------------------------------------------------------------------------------
// Explorations.

use Event::*;

/// Explores everything; tells how much there was. `must_happen` did, or it shows nothing.
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
        assert!(times > 0, "{what}: {event:?} never happened, so nothing is shown of it");
    }
}

/// The shortest history that breaks `property`: there has to be one.
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

/// By one session whose touches overtake each other; and by two, one after the other: with stamps that is
/// for when there is time, as three clients are.
fn all_of(what: &str, model: impl Fn() -> Model, more: &[Event]) {
    let always = [Touched, OverByClock, TakenOver, LateWrite, WriteRefused, AnswerTooLate];
    let happened = [&always[..], &[LateTouch], more].concat();
    holds(what, Model { sessions: 1, ..model() }, &happened);
    if is_long() || model().system != STAMPED {
        let happened = [&always[..], &[CameBack], more].concat();
        holds(&format!("{what}, and comes back"), Model { in_flight: 1, ..model() }, &happened);
    }
    if is_long() {
        let model = Model { clients: 3, sessions: 1, in_flight: 1, ..model() };
        holds(&format!("{what}, three of them"), model, &always[..5]);
    }
}

#[test]
fn cells_that_end_by_the_servers_clock() {
    all_of("cells that end", || Model::new(System::Expiring), &[FoundGone]);
}

#[test]
fn cells_that_end_and_looks_that_are_behind() {
    let happened = [FoundGone, StaleLook, ThereAfterAll, PutGone];
    all_of("a stream", || Model::new(System::Stream), &happened);
}

#[test]
fn objects_are_judged_by_stamps_of_clocks_that_are_apart() {
    let happened = [StaleLook, ThereAfterAll, PutGone, ByStamps, ByOwnClock, TouchRefused];
    all_of("stamped objects", || Model::new(STAMPED), &happened);
}

#[test]
fn objects_without_stamps_are_judged_by_the_observers_own_clock() {
    let happened = [StaleLook, ThereAfterAll, PutGone, ByOwnClock, TouchRefused];
    all_of("objects", || Model::new(UNSTAMPED), &happened);
}

/// Longer lives, so that the drift is no more than a part of one.
#[test]
fn a_slow_clock_is_covered_by_the_drift() {
    for system in [System::Expiring, System::Stream, STAMPED] {
        let model = Model { slow: 1, sessions: 1, in_flight: 1, ..Model::new(system) };
        holds(&format!("{system:?} and a slow clock"), model, &[OverByClock, TakenOver]);
    }
}

/// Both are taken for dead by each other.
#[test]
fn two_whose_sessions_end() {
    let small =
        |system| Model { mortal: 2, sessions: 1, in_flight: 1, life: 3, ..Model::new(system) };
    for system in [System::Expiring, System::Stream] {
        holds(&format!("{system:?}, two that end"), small(system), &[OverByClock, TakenOver]);
    }
}

/// How sessions end is nothing to who leaves: so what is told by stamps, whose states are many times more, is
/// for when there is time.
#[test]
fn who_has_left_is_not_there() {
    let ordinary = [System::Expiring, System::Stream, UNSTAMPED];
    for system in ordinary.into_iter().chain(is_long().then_some(STAMPED)) {
        let model = Model { leaves: true, sessions: 1, in_flight: 1, ..Model::new(system) };
        holds(&format!("{system:?}, who leaves"), model, &[LeftInDoubt, LateWrite, WriteRefused]);
    }
}

// Controls.

fn one(system: System) -> Model {
    Model { sessions: 1, in_flight: 1, ..Model::new(system) }
}

#[test]
fn a_life_counted_from_the_receipt_breaks_exclusion() {
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

/// The skew is to objects what the grain is to cells that end. What is left of the second makes up for one tick of it.
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
fn stamps_taken_for_exact_break_exclusion() {
    breaks(EXCLUSION, one(STAMPED).without(|rules| rules.whole_seconds = false));
}

/// Somebody looks at a replica that is behind, and nothing is put in the session's place.
#[test]
fn a_look_that_is_behind_and_believed_breaks_exclusion() {
    for system in [System::Stream, STAMPED, UNSTAMPED] {
        let path = breaks(EXCLUSION, one(system).without(|rules| rules.makes_sure = false));
        assert!(path.iter().any(|step| matches!(step, Action::JudgeBehind { .. })), "{path:?}");
    }
}

#[test]
fn what_is_put_in_the_place_of_anything_breaks_exclusion() {
    for system in [System::Stream, STAMPED] {
        breaks(EXCLUSION, one(system).without(|rules| rules.compares = false));
    }
}

/// The first look was slow, and showed what was written while it was under way.
#[test]
fn what_was_seen_counted_from_when_it_was_asked_for_breaks_exclusion() {
    breaks(EXCLUSION, one(UNSTAMPED).without(|rules| rules.first_from_answer = false));
}

#[test]
fn who_goes_on_under_a_session_that_is_over_breaks_exclusion() {
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
fn a_lock_written_whatever_is_there_breaks_exclusion() {
    breaks(EXCLUSION, one(System::Expiring).without(|rules| rules.refuses = false));
}

#[test]
fn who_forgets_what_it_saw_never_finds_the_dead() {
    breaks(FOUND, one(UNSTAMPED).without(|rules| rules.remembers = false));
}

#[test]
fn who_leaves_by_a_look_alone_may_stand_there_later() {
    let model = Model { leaves: true, ..one(System::Expiring) };
    breaks(LEFT, model.without(|rules| rules.doubts = false));
}
