//! Explores every history of a small system completely: clients, a store, a fenced resource.
//!
//! # What is modelled
//! - *The store* is the real [`Queue`], inside the state. Its calls settle first. It may also
//!   settle on its own at any time. A waiter that is granted gets a push message.
//! - *The clients* follow the deadlines of the design. A deadline is counted from **before** the
//!   request was sent, minus the drift. The deadline of a pushed grant is counted from the last
//!   answered heartbeat. An answer that arrives too late changes nothing. `is_held` checks only the
//!   client's own clock.
//! - *The network* delays, reorders, duplicates and loses messages arbitrarily.
//! - *Pauses* need no action of their own. No client or message is forced to move while time
//!   passes. So a client may be paused anywhere for any time. In particular, it may be paused
//!   between its check of `is_held` and the arrival of the write that it considered safe.
//! - *Clocks.* Time is discrete. A client's clock may lose one tick against the store's, which is
//!   as much as the drift allows for within a lease.
//! - *The resource* is a counter. It is incremented by reading it and writing back one more. Read
//!   and write are messages with the token. The resource refuses tokens below the highest token
//!   seen.
//!
//! # Bounds, and why they suffice
//! Times count only as differences, and tokens only by their order. So states that differ in
//! nothing else are one state. The same applies to states that differ only in the clients' names
//! ([`Key`]). A test shows that states with one key have the same successors. The result is finite
//! without a bound on time or on the total number of messages, and is explored completely. These
//! quantities are bounded:
//! - The clients: three, because one has lost its lease, one holds and one comes next. Each makes
//!   one claim. A run with two claims each has two clients.
//! - The number of lease protocol messages in flight. With two, messages can overtake each other. A
//!   third is needed for a duplicate of a join that outlives the place that it made, in addition to
//!   a push and a heartbeat. That run has two clients. Messages to the resource are not bounded, so
//!   each write may arrive late and repeatedly.
//! - Ticks: a lease of 3, a waiter's lease of 2 and a drift of 1. These are the smallest values for
//!   which each difference in the rules is above zero, so that each can just suffice or just fail.
//!   With `./test.sh --long` the same runs have longer leases and more messages.
//!
//! # Controls
//! A model that cannot fail shows nothing. The same model without one rule must find a
//! counterexample. The controls are: no fencing (R40), reads without a token (R50), deadlines
//! counted from receipt, pushed grants counted from receipt, no allowance for drift, late answers
//! that revive, and pushes accepted for any place. Also, every [`Event`] of the model has to occur
//! in it.
//!
//! # What it does not show
//! - Capacities above one, lock-delays and `keep`, which the queue's property tests cover.
//! - Stores that forget, which have their own tests.
//! - That a waiter is granted in the end (P6), which the conformance suite covers. The model shows
//!   only that it is possible.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leasehold::store::queue::{Queue, StoreTime};
use leasehold::store::{Claim, ClaimId, ClaimState, Evict, Joined, Mode, Place, Renewal};
use leasehold::{Kind, Name};
use leasehold_model::is_long;
use stateright::{Checker, HasDiscoveries, Model as _, Property};

const DRIFT: u64 = 1;
/// Start time. It is large enough that a mere duration (see [`Model::holding`]) is never taken for
/// a time.
const START: u64 = 100;
const MOST: usize = 3;

/// The rules under test. [`Rules::ALL`] is the design. Each control removes one rule.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Rules {
    /// The resource refuses writes below the highest token seen.
    writes_fenced: bool,
    /// Reads carry the token too. The resource records it, and refuses old ones.
    reads_fenced: bool,
    /// Deadlines count from before the request was sent, not from the receipt of the answer.
    from_sending: bool,
    /// A pushed grant counts from the last answered heartbeat, not from the receipt of the push.
    push_from_heartbeat: bool,
    /// The drift is subtracted.
    drift: bool,
    /// A message about a place with another token does not apply to this claim.
    tokens_compared: bool,
    /// A lost guard stays lost, whatever messages arrive.
    loss_is_final: bool,
}

impl Rules {
    const ALL: Self = Self {
        writes_fenced: true,
        reads_fenced: true,
        from_sending: true,
        push_from_heartbeat: true,
        drift: true,
        tokens_compared: true,
        loss_is_final: true,
    };
}

/// An event that must occur somewhere in an exploration. Otherwise the exploration shows nothing.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A client believes in its grant because of an answer.
    HeldByAnswer,
    /// A client believes in its grant because of a push.
    HeldByPush,
    /// A push arrived too long after the last answered heartbeat to be accepted.
    PushTooOld,
    /// A push was about an earlier place of the claim.
    PushOfAnotherPlace,
    /// The answer `Holding` arrived after its own deadline.
    AnswerTooOld,
    /// A renewal extended a deadline.
    Renewed,
    /// A guard was lost by the client's own clock.
    LostByClock,
    /// An answer reported that a guard is lost.
    LostByAnswer,
    /// The store removed an expired holder.
    HolderExpired,
    /// The store removed an expired waiter.
    WaiterExpired,
    /// The store received a join of a client that has left already (scenario 5).
    JoinAfterLeaving,
    /// A message arrived, and may arrive again.
    Duplicate,
    /// A write was accepted.
    Accepted,
    /// A write was refused.
    Refused,
    /// A read was refused.
    ReadRefused,
    /// A write was in flight when its sender no longer held the lock.
    LateWrite,
}

const EVENTS: usize = Event::LateWrite as usize + 1;

struct Model {
    clients: usize,
    /// Number of claims that each client makes, one after the other.
    claims_each: u8,
    /// Leases in ticks.
    lease: u64,
    waiter_lease: u64,
    /// Maximum number of lease protocol messages in flight.
    in_flight: usize,
    /// Maximum number of these messages per client.
    in_flight_each: usize,
    /// Number of clients whose clocks lose a tick.
    slow: u64,
    /// Whether the clients also use the resource.
    resource: bool,
    /// Whether a client may also leave voluntarily, and not only by losing its lease.
    leaves: bool,
    /// How often an operator evicts the holder, alive or not.
    evictions: u8,
    rules: Rules,
    claims: Vec<Claim>,
    events: Arc<[AtomicU64; EVENTS]>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// Has not sent a request yet.
    Out,
    /// Sends its claim until it is answered. The first time was at `first`.
    Joining { first: u64 },
    /// Waits in the queue with this token. `base` is when the last heartbeat that was answered
    /// "waiting" was sent. It is `None` if that is too long ago to matter.
    Waiting { token: u64, base: Option<u64> },
    /// Has a guard.
    Held { token: u64, until: u64 },
    /// Has lost its guard, or has left.
    Over { lost: Option<u64> },
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Work {
    Nothing,
    Reading,
    Read(u8),
    Wrote,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Client {
    claim: u8,
    /// How far its clock is behind.
    lag: u64,
    phase: Phase,
    work: Work,
}

/// A message from or to `client` about its claim number `claim`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Message {
    client: usize,
    claim: u8,
    what: What,
}

/// The contents of a message. `sent` and `until` are times on the client's clock.
#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    Join { sent: u64 },
    Renew { sent: u64 },
    Leave,
    Holding { token: u64, until: u64 },
    Waiting { sent: u64, token: u64 },
    Lost,
    Push { token: u64 },
    Read { token: u64 },
    Write { token: u64, value: u8, accepted: bool },
}

impl What {
    fn to_resource(self) -> bool {
        matches!(self, Self::Read { .. } | Self::Write { .. })
    }
}

#[derive(Clone, Debug)]
struct State {
    now: u64,
    /// Times at least this long ago are equivalent, because no deadline counted from them is still
    /// valid.
    oldest: u64,
    queue: Queue,
    clients: [Client; MOST],
    messages: Vec<Message>,
    /// The resource: its value, the highest token seen, and the number of writes that it accepted.
    value: u8,
    highest: u64,
    accepted: u8,
    /// The token of the newest grant of the store, and of the newest grant that a client accepted.
    granted: u64,
    believed: u64,
    disorder: bool,
    belief_in_disorder: bool,
    revived: bool,
    evicted: u8,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Action {
    /// Time passes. One client's clock may miss the tick.
    Tick {
        slow: Option<usize>,
    },
    /// The store settles on its own.
    Settle,
    /// An operator evicts the holder.
    Evict,
    Join(usize),
    Renew(usize),
    Leave(usize),
    /// Checks `is_held`, then sends the read.
    Read(usize),
    /// Checks `is_held`, then sends the write.
    Write(usize),
    Arrive {
        message: usize,
        again: bool,
    },
    Lose {
        message: usize,
    },
}

/// Returns the ID of a client's claim number `claim`.
fn id_of(client: usize, claim: u8) -> ClaimId {
    ClaimId::from_u128((client as u128) << 8 | u128::from(claim))
}

fn whose(id: ClaimId) -> (usize, u8) {
    let id = id.as_u128();
    (usize::try_from(id >> 8).unwrap(), u8::try_from(id & 0xff).unwrap())
}

fn waiting(sent: u64, place: Place) -> What {
    What::Waiting { sent, token: place.token.unwrap().get() }
}

fn ticks(n: u64) -> Duration {
    Duration::from_micros(n)
}

impl Model {
    fn new(clients: usize, claims_each: u8, lease: u64, waiter_lease: u64) -> Self {
        let all = (0..clients).flat_map(|c| (0..claims_each).map(move |n| id_of(c, n)));
        let claims = all.map(|id| {
            let name = Name::new("model").unwrap();
            let mut claim = Claim::new(name, Kind::Mutex, 1, 1).unwrap();
            claim.id = id;
            (claim.lease, claim.waiter_lease) = (ticks(lease), ticks(waiter_lease));
            claim
        });
        Self {
            clients,
            claims_each,
            lease,
            waiter_lease,
            in_flight: 2,
            in_flight_each: 2,
            slow: 0,
            resource: true,
            leaves: true,
            evictions: 0,
            rules: Rules::ALL,
            claims: claims.collect(),
            events: Arc::default(),
        }
    }

    fn claim(&self, client: usize, claim: u8) -> &Claim {
        &self.claims[client * usize::from(self.claims_each) + usize::from(claim)]
    }

    fn happened(&self, event: Event) {
        self.events[event as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn drift(&self) -> u64 {
        if self.rules.drift { DRIFT } else { 0 }
    }

    fn room(&self, s: &State, client: usize) -> bool {
        let own = |m: &&Message| !m.what.to_resource();
        s.messages.iter().filter(own).count() < self.in_flight
            && s.messages.iter().filter(own).filter(|m| m.client == client).count()
                < self.in_flight_each
    }

    /// Sends a message. The message is lost if there are too many in flight.
    fn send(&self, s: &mut State, client: usize, claim: u8, what: What) {
        let message = Message { client, claim, what };
        let resource = what.to_resource();
        if resource || (!s.messages.contains(&message) && self.room(s, client)) {
            s.messages.push(message);
        }
    }

    // -- the store ----------------------------------------------------------------------------

    fn at_store(&self, s: &mut State, m: Message) -> Option<What> {
        self.count_expired(s);
        let claim = self.claim(m.client, m.claim);
        let at = StoreTime { now: s.now, stamp: 0 };
        let answer = match m.what {
            What::Join { sent } => {
                let client = &s.clients[m.client];
                let left = client.claim != m.claim || matches!(client.phase, Phase::Over { .. });
                if left && s.queue.position(claim.id).is_none() {
                    self.happened(Event::JoinAfterLeaving);
                }
                match s.queue.join(claim, Mode::Wait, at, "").unwrap() {
                    Joined::Holding { token, remaining } => {
                        Some(self.holding(sent, token.get(), remaining.unwrap()))
                    }
                    Joined::Waiting(place) => Some(waiting(sent, place)),
                    Joined::Busy { .. } => {
                        unreachable!("a cooldown needs a lock_delay")
                    }
                }
            }
            What::Renew { sent } => match s.queue.renew(claim, claim.lease, s.now) {
                Renewal::Holding { token, remaining } => {
                    Some(self.holding(sent, token.get(), remaining.unwrap()))
                }
                Renewal::Waiting(place) => Some(waiting(sent, place)),
                Renewal::Lost => Some(What::Lost),
                Renewal::Unknown { .. } => unreachable!("a queue knows all its claims"),
            },
            What::Leave => {
                s.queue.leave(claim.id, None, s.now);
                None
            }
            _ => unreachable!("this message is not for the store"),
        };
        self.after_store(s);
        answer
    }

    /// Returns the answer `Holding`. `until` is counted from sending, or is a mere duration without
    /// that rule.
    fn holding(&self, sent: u64, token: u64, remaining: Duration) -> What {
        let remaining = u64::try_from(remaining.as_micros()).unwrap();
        let base = if self.rules.from_sending { sent } else { 0 };
        What::Holding { token, until: base + remaining - self.drift() }
    }

    fn count_expired(&self, s: &State) {
        for e in s.queue.entries().filter(|e| e.expires.is_some_and(|t| t <= s.now)) {
            self.happened(match e.state {
                ClaimState::Waiting => Event::WaiterExpired,
                _ => Event::HolderExpired,
            });
        }
    }

    /// Sends pushes for new grants, and records the order of grants.
    fn after_store(&self, s: &mut State) {
        let fresh = s.queue.take_fresh_grants();
        for id in fresh {
            let (client, claim) = whose(id);
            let entry = s.queue.entries().find(|e| e.id == id);
            let token = entry.map(|e| e.token.get()).unwrap();
            self.send(s, client, claim, What::Push { token });
        }
        let holder = s.queue.entries().find(|e| e.state == ClaimState::Holding);
        if let Some(token) = holder.map(|e| e.token.get()) {
            s.disorder |= token < s.granted;
            s.granted = token;
        }
    }

    // -- the client ---------------------------------------------------------------------------

    fn clock(&self, s: &State, client: usize) -> u64 {
        s.now - s.clients[client].lag
    }

    fn is_held(&self, s: &State, client: usize) -> bool {
        matches!(s.clients[client].phase, Phase::Held { until, .. } if self.clock(s, client) < until)
    }

    /// Returns whether the store agrees with a client that believes that it holds.
    fn is_right(&self, s: &State, client: usize) -> bool {
        let id = self.claim(client, s.clients[client].claim).id;
        let Phase::Held { token, .. } = s.clients[client].phase else { return false };
        s.queue.entries().any(|e| {
            let lives = e.expires.is_some_and(|t| t > s.now);
            e.id == id && e.token.get() == token && e.state == ClaimState::Holding && lives
        })
    }

    fn hold(&self, s: &mut State, client: usize, token: u64, until: u64) {
        s.belief_in_disorder |= token <= s.believed;
        s.believed = s.believed.max(token);
        s.clients[client].phase = Phase::Held { token, until };
    }

    fn at_client(&self, s: &mut State, m: Message) {
        let clock = self.clock(s, m.client);
        let Client { claim, phase, .. } = s.clients[m.client];
        if claim != m.claim {
            return;
        }
        match (phase, m.what) {
            (Phase::Waiting { token: reported, .. }, What::Holding { token, .. })
                if reported != token =>
            {
                // This client's place is gone, and a late duplicate has made another one.
                self.happened(Event::LostByAnswer);
                s.clients[m.client].phase = Phase::Over { lost: None };
            }
            (Phase::Joining { .. } | Phase::Waiting { .. }, What::Holding { token, until }) => {
                let until = if self.rules.from_sending { until } else { clock + until };
                self.happened(Event::HeldByAnswer);
                self.hold(s, m.client, token, until);
            }
            (Phase::Joining { .. }, What::Waiting { sent, token }) => {
                s.clients[m.client].phase = Phase::Waiting { token, base: Some(sent) };
            }
            (Phase::Waiting { token, base }, What::Waiting { sent, token: reported }) => {
                s.clients[m.client].phase = match token == reported || !self.rules.tokens_compared {
                    true => Phase::Waiting { token, base: base.max(Some(sent)) },
                    false => Phase::Over { lost: None },
                };
            }
            (Phase::Waiting { token: reported, base }, What::Push { token }) => {
                let worth = self.waiter_lease - self.drift();
                let until = match self.rules.push_from_heartbeat {
                    true => base.map(|b| b + worth),
                    false => Some(clock + worth),
                };
                if token != reported && self.rules.tokens_compared {
                    self.happened(Event::PushOfAnotherPlace);
                } else if let Some(until) = until.filter(|&t| clock < t) {
                    self.happened(Event::HeldByPush);
                    self.hold(s, m.client, token, until);
                } else {
                    self.happened(Event::PushTooOld);
                }
            }
            (Phase::Held { token, until }, What::Holding { token: reported, until: new }) => {
                let new = if self.rules.from_sending { new } else { clock + new };
                if reported == token {
                    if new > until {
                        self.happened(Event::Renewed);
                    }
                    let until = until.max(new);
                    s.clients[m.client].phase = Phase::Held { token, until };
                } else {
                    // A grant with another token does not belong to this guard.
                    self.happened(Event::LostByAnswer);
                    s.clients[m.client].phase = Phase::Over { lost: None };
                }
            }
            (Phase::Over { lost: Some(_) }, What::Holding { token, .. })
                if !self.rules.loss_is_final =>
            {
                // A naive client concludes from a successful renewal that it holds.
                s.revived = true;
                let until = clock + self.lease - self.drift();
                s.clients[m.client].phase = Phase::Held { token, until };
            }
            (Phase::Waiting { .. } | Phase::Held { .. }, What::Lost) => {
                self.happened(Event::LostByAnswer);
                s.clients[m.client].phase = Phase::Over { lost: None };
            }
            _ => {}
        }
    }

    // -- the resource -------------------------------------------------------------------------

    fn at_resource(&self, s: &mut State, i: usize) {
        let m = s.messages[i];
        match m.what {
            What::Read { token } => {
                let refused = self.rules.reads_fenced && token < s.highest;
                if self.rules.reads_fenced {
                    s.highest = s.highest.max(token);
                }
                let client = &mut s.clients[m.client];
                if refused {
                    self.happened(Event::ReadRefused);
                } else if client.claim == m.claim && client.work == Work::Reading {
                    client.work = Work::Read(s.value);
                }
                s.messages.remove(i);
            }
            What::Write { token, value, accepted } => {
                if self.rules.writes_fenced && token < s.highest {
                    self.happened(Event::Refused);
                    s.messages.remove(i);
                    return;
                }
                let current = s.clients[m.client].claim == m.claim;
                if !(current && self.is_held(s, m.client)) {
                    self.happened(Event::LateWrite);
                }
                self.happened(Event::Accepted);
                s.highest = s.highest.max(token);
                s.value = value;
                s.accepted += u8::from(!accepted);
                // The message stays and may arrive again, because a duplicate must be harmless too.
                s.messages[i].what = What::Write { token, value, accepted: true };
            }
            _ => unreachable!("this message is not for the resource"),
        }
    }

    // -- removal of irrelevant state ------------------------------------------------------------

    /// Ends guards by their clients' clocks, and removes messages that have no effect whenever they
    /// arrive. So the removal loses no behavior.
    fn tidy(&self, s: &mut State) {
        let worth = self.waiter_lease - self.drift();
        for c in 0..self.clients {
            let clock = self.clock(s, c);
            let client = &mut s.clients[c];
            match client.phase {
                Phase::Held { token, until } if until <= clock => {
                    self.happened(Event::LostByClock);
                    let lost = Some(token).filter(|_| !self.rules.loss_is_final);
                    client.phase = Phase::Over { lost };
                }
                Phase::Waiting { token, base: Some(base) } if base + worth <= clock => {
                    client.phase = Phase::Waiting { token, base: None };
                }
                _ => {}
            }
            if !matches!(client.phase, Phase::Held { .. }) {
                client.work = Work::Nothing;
            }
        }
        let mut messages = std::mem::take(&mut s.messages);
        for m in &mut messages {
            let client = &s.clients[m.client];
            let current = client.claim == m.claim;
            // A deadline counted from a time before `earliest` has passed, or does not extend the
            // current one. And an answer to a claim that is over has no receiver.
            let earliest = match client.phase {
                Phase::Held { until, .. } if current && self.rules == Rules::ALL => until,
                _ => self.clock(s, m.client),
            } - s.oldest;
            let over = !current || client.phase == Phase::Over { lost: None };
            if let What::Join { sent } | What::Renew { sent } | What::Waiting { sent, .. } =
                &mut m.what
            {
                *sent = if over { earliest } else { earliest.max(*sent) };
            }
            // A message about another place means that the client's own place is lost.
            if let (Phase::Waiting { token, .. }, What::Waiting { token: reported, .. })
            | (
                Phase::Waiting { token, .. } | Phase::Held { token, .. },
                What::Holding { token: reported, .. },
            ) = (client.phase, m.what)
                && current
                && reported != token
                && self.rules.tokens_compared
            {
                m.what = What::Lost;
            }
        }
        // Of two equal messages one is enough, because it can arrive again.
        let mut distinct: Vec<Message> = Vec::with_capacity(messages.len());
        for m in messages {
            if m.what.to_resource() || !distinct.contains(&m) {
                distinct.push(m);
            }
        }
        let mut messages = distinct;
        let joins: Vec<(usize, u8)> = messages
            .iter()
            .filter(|m| matches!(m.what, What::Join { .. }))
            .map(|m| (m.client, m.claim))
            .collect();
        messages.retain(|m| {
            let client = &s.clients[m.client];
            let clock = self.clock(s, m.client);
            let current = client.claim == m.claim;
            let joining = current && matches!(client.phase, Phase::Joining { .. });
            let waits = current && matches!(client.phase, Phase::Waiting { .. });
            let held = current && matches!(client.phase, Phase::Held { .. });
            let revivable = current && matches!(client.phase, Phase::Over { lost: Some(_) });
            match m.what {
                What::Holding { until, .. } => {
                    let news = match client.phase {
                        Phase::Held { until: have, .. } if self.rules == Rules::ALL => have < until,
                        _ => !self.rules.from_sending || clock < until,
                    };
                    if (joining || waits) && !news {
                        self.happened(Event::AnswerTooOld);
                    }
                    (joining || waits || held) && news
                        || (held || revivable) && !self.rules.loss_is_final
                }
                What::Waiting { sent, .. } => joining || waits && clock < sent + worth,
                What::Lost => waits || held,
                What::Push { .. } => joining || waits,
                // The store has no place that it could renew or remove, and no message in flight
                // makes one.
                What::Renew { .. } | What::Leave if !(joining || waits || held || revivable) => {
                    let id = self.claim(m.client, m.claim).id;
                    s.queue.position(id).is_some() || joins.contains(&(m.client, m.claim))
                }
                _ => true,
            }
        });
        s.messages = messages;
    }
}

impl stateright::Model for Model {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let client = Client { claim: 0, lag: 0, phase: Phase::Out, work: Work::Nothing };
        vec![State {
            now: START,
            oldest: self.lease - DRIFT,
            queue: Queue::new(Kind::Mutex, 1, true),
            clients: [client; MOST],
            messages: Vec::new(),
            value: 0,
            highest: 0,
            accepted: 0,
            granted: 0,
            believed: 0,
            disorder: false,
            belief_in_disorder: false,
            revived: false,
            evicted: 0,
        }]
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        actions.push(Action::Tick { slow: None });
        let lags: u64 = s.clients.iter().map(|c| c.lag).sum();
        for c in (0..self.clients).filter(|&c| lags < self.slow && s.clients[c].lag == 0) {
            actions.push(Action::Tick { slow: Some(c) });
        }
        if s.queue.entries().any(|e| e.expires.is_some_and(|t| t <= s.now)) {
            actions.push(Action::Settle);
        }
        if s.evicted < self.evictions && !s.queue.is_empty() {
            actions.push(Action::Evict);
        }
        for c in 0..self.clients {
            let client = &s.clients[c];
            let room = self.room(s, c);
            match client.phase {
                Phase::Out if room => actions.push(Action::Join(c)),
                Phase::Over { .. } if room && client.claim + 1 < self.claims_each => {
                    actions.push(Action::Join(c));
                }
                // This is allowed only while no grant can have expired unnoticed (P8). After that
                // the client abandons the ID.
                Phase::Joining { first } => {
                    if room && self.clock(s, c) < first + self.waiter_lease - self.drift() {
                        actions.push(Action::Join(c));
                    }
                    if self.leaves {
                        actions.push(Action::Leave(c));
                    }
                }
                Phase::Waiting { .. } | Phase::Held { .. } => {
                    if room {
                        actions.push(Action::Renew(c));
                    }
                    if self.leaves {
                        actions.push(Action::Leave(c));
                    }
                }
                _ => {}
            }
            if self.resource && self.is_held(s, c) {
                match client.work {
                    Work::Nothing => actions.push(Action::Read(c)),
                    Work::Read(_) => actions.push(Action::Write(c)),
                    Work::Reading | Work::Wrote => {}
                }
            }
        }
        for (message, m) in s.messages.iter().enumerate() {
            actions.push(Action::Arrive { message, again: false });
            if !m.what.to_resource() {
                actions.push(Action::Arrive { message, again: true });
                actions.push(Action::Lose { message });
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        let s = &mut state;
        match action {
            Action::Tick { slow } => {
                s.now += 1;
                if let Some(c) = slow {
                    s.clients[c].lag += 1;
                }
            }
            Action::Settle => {
                self.count_expired(s);
                s.queue.settle(s.now);
                self.after_store(s);
            }
            Action::Evict => {
                s.evicted += 1;
                s.queue.evict(Evict::Holders, s.now);
                self.after_store(s);
            }
            Action::Join(c) => {
                let client = &mut s.clients[c];
                if let Phase::Over { .. } = client.phase {
                    client.claim += 1;
                    client.phase = Phase::Out;
                }
                let sent = s.now - client.lag;
                if client.phase == Phase::Out {
                    client.phase = Phase::Joining { first: sent };
                }
                let claim = client.claim;
                self.send(s, c, claim, What::Join { sent });
            }
            Action::Renew(c) => {
                let (claim, sent) = (s.clients[c].claim, self.clock(s, c));
                self.send(s, c, claim, What::Renew { sent });
            }
            Action::Leave(c) => {
                s.clients[c].phase = Phase::Over { lost: None };
                let claim = s.clients[c].claim;
                self.send(s, c, claim, What::Leave);
            }
            Action::Read(c) => {
                let Phase::Held { token, .. } = s.clients[c].phase else { return None };
                s.clients[c].work = Work::Reading;
                let claim = s.clients[c].claim;
                self.send(s, c, claim, What::Read { token });
            }
            Action::Write(c) => {
                let Phase::Held { token, .. } = s.clients[c].phase else { return None };
                let Work::Read(value) = s.clients[c].work else { return None };
                s.clients[c].work = Work::Wrote;
                let claim = s.clients[c].claim;
                self.send(s, c, claim, What::Write { token, value: value + 1, accepted: false });
            }
            Action::Lose { message } => {
                s.messages.remove(message);
            }
            Action::Arrive { message, again } => {
                let m = s.messages[message];
                if again {
                    self.happened(Event::Duplicate);
                } else if !m.what.to_resource() {
                    s.messages.remove(message);
                }
                match m.what {
                    What::Join { .. } | What::Renew { .. } | What::Leave => {
                        if let Some(answer) = self.at_store(s, m) {
                            self.send(s, m.client, m.claim, answer);
                        }
                    }
                    What::Read { .. } | What::Write { .. } => self.at_resource(s, message),
                    _ => self.at_client(s, m),
                }
            }
        }
        self.tidy(s);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always(ORDER, |_, s: &State| !s.disorder),
            Property::always(NO_LOST_UPDATE, |_, s: &State| s.value == s.accepted),
            Property::always(FINAL, |_, s: &State| !s.revived),
        ];
        // An evicted holder finds out at its next renewal and believes until then that it holds.
        // The operator accepts that. The resource must be safe anyway.
        if self.evictions == 0 {
            properties.extend([
                Property::always(EXCLUSION, |m: &Self, s: &State| {
                    (0..m.clients).filter(|&c| m.is_held(s, c)).count() <= 1
                }),
                Property::always(BELIEF, |m: &Self, s: &State| {
                    (0..m.clients).filter(|&c| m.is_held(s, c)).all(|c| m.is_right(s, c))
                }),
                Property::always(BELIEF_ORDER, |_, s: &State| !s.belief_in_disorder),
            ]);
        }
        if self.resource {
            properties.push(Property::sometimes(ALL_UPDATED, |m: &Self, s: &State| {
                usize::from(s.accepted) == m.claims.len()
            }));
        }
        properties
    }
}

const EXCLUSION: &str = "at most one client's is_held() is true";
const BELIEF: &str = "a client that believes it holds is a holder at the store, with its token";
const ORDER: &str = "the store grants in the order of the tokens";
const BELIEF_ORDER: &str = "the clients hold in the order of the tokens";
const NO_LOST_UPDATE: &str = "the resource keeps the effect of each accepted write";
const FINAL: &str = "a lost guard is never held again";
const ALL_UPDATED: &str = "every claim can get its update through";

// ---------------------------------------------------------------------------------------------
// When two states are the same: times are ages, tokens are ranks, clients have no names.

/// All state of one client, in bytes.
type Key = [u8; 46];

impl State {
    /// Returns all tokens in the state, in order.
    fn tokens(&self) -> Vec<u64> {
        let mut tokens = vec![0, self.highest, self.granted, self.believed];
        tokens.extend(self.queue.entries().map(|e| e.token.get()));
        for c in &self.clients {
            if let Phase::Waiting { token, .. }
            | Phase::Held { token, .. }
            | Phase::Over { lost: Some(token) } = c.phase
            {
                tokens.push(token);
            }
        }
        for m in &self.messages {
            if let What::Holding { token, .. }
            | What::Waiting { token, .. }
            | What::Push { token }
            | What::Read { token }
            | What::Write { token, .. } = m.what
            {
                tokens.push(token);
            }
        }
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }

    fn keys(&self) -> ([Key; MOST], [u8; 9]) {
        let tokens = self.tokens();
        let rank = |token: u64| u8::try_from(tokens.partition_point(|&t| t < token)).unwrap();
        // Times that have passed are equivalent.
        let ahead = |time: u64, clock: u64| u8::try_from(time.saturating_sub(clock)).unwrap();
        let age = |time: u64, clock: u64| u8::try_from(clock - time).unwrap();
        let mut keys = [[0; 46]; MOST];
        let claims = self.queue.entries().len();
        assert!(claims <= 5, "a key has room for five claims");
        for (c, key) in keys.iter_mut().enumerate() {
            let client = &self.clients[c];
            let clock = self.now - client.lag;
            let phase = match client.phase {
                Phase::Out => [0, 0, 0],
                Phase::Joining { first } => [1, age(first.max(clock - self.oldest), clock), 0],
                Phase::Waiting { token, base } => {
                    [4, base.map_or(9, |b| age(b, clock)), rank(token)]
                }
                Phase::Held { token, until } => [2, ahead(until, clock), rank(token)],
                Phase::Over { lost } => [3, 0, lost.map_or(0, rank)],
            };
            let work = match client.work {
                Work::Nothing => 0,
                Work::Reading => 1,
                Work::Wrote => 2,
                Work::Read(value) => 3 + value,
            };
            key[..3].copy_from_slice(&phase);
            key[3..6].copy_from_slice(&[client.claim, u8::try_from(client.lag).unwrap(), work]);
            let mut messages: Vec<[u8; 4]> = Vec::new();
            for m in self.messages.iter().filter(|m| m.client == c) {
                let [kind, a, b] = match m.what {
                    What::Join { sent } => [1, age(sent, clock), 0],
                    What::Renew { sent } => [2, age(sent, clock), 0],
                    What::Leave => [3, 0, 0],
                    // A duration is not a time on the clock. It is smaller than any time.
                    What::Holding { token, until } if until < START / 2 => {
                        [4, u8::try_from(until).unwrap(), rank(token)]
                    }
                    What::Holding { token, until } => [5, ahead(until, clock), rank(token)],
                    What::Waiting { sent, token } => [6, age(sent, clock), rank(token)],
                    What::Lost => [7, 0, 0],
                    What::Push { token } => [8, 0, rank(token)],
                    What::Read { token } => [9, 0, rank(token)],
                    What::Write { token, value, accepted } => {
                        [10 + u8::from(accepted), value, rank(token)]
                    }
                };
                messages.push([kind, a, b, m.claim]);
            }
            assert!(messages.len() <= 5, "a key has room for five messages");
            messages.sort_unstable();
            for (at, message) in messages.iter().enumerate() {
                key[6 + 4 * at..10 + 4 * at].copy_from_slice(message);
            }
        }
        for (place, e) in self.queue.entries().enumerate() {
            let (c, claim) = whose(e.id);
            let claim_state = if e.state == ClaimState::Waiting { 1 } else { 2 };
            let bytes = [
                claim + 1,
                claim_state,
                e.expires.map_or(0, |t| ahead(t, self.now)),
                rank(e.token.get()),
            ];
            keys[c][26 + 4 * place..][..4].copy_from_slice(&bytes);
        }
        keys.sort_unstable();
        let rest = [
            self.value,
            self.accepted,
            rank(self.highest),
            rank(self.granted),
            rank(self.believed),
            u8::from(self.disorder),
            u8::from(self.belief_in_disorder),
            u8::from(self.revived),
            self.evicted,
        ];
        (keys, rest)
    }
}

impl Hash for State {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let (keys, rest) = self.keys();
        for key in keys {
            hasher.write(&key);
        }
        hasher.write(&rest);
    }
}

impl PartialEq for State {
    fn eq(&self, other: &Self) -> bool {
        self.keys() == other.keys()
    }
}

// ---------------------------------------------------------------------------------------------
// Explorations.

use Event::*;

/// Explores everything and prints the numbers of states and steps. Fails if an event of
/// `must_happen` did not occur.
fn holds(what: &str, model: Model, must_happen: &[Event]) {
    let resource = model.resource;
    let events = Arc::clone(&model.events);
    let checker = model.checker().threads(2).spawn_bfs().join();
    println!(
        "{what}: {} states, {} steps, up to {} steps deep",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth()
    );
    assert!(checker.is_done());
    for (property, path) in checker.discoveries() {
        assert_eq!(property, ALL_UPDATED, "{what}: broken by {:#?}", path.into_actions());
    }
    assert!(!resource || checker.discovery(ALL_UPDATED).is_some(), "{what}: {ALL_UPDATED}");
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

/// Three clients with a resource, each with at most one message in flight, and two in all.
fn three() -> Model {
    Model { in_flight_each: 1, ..Model::new(3, 1, 3, 2) }
}

/// Two clients without a resource.
fn two() -> Model {
    Model { resource: false, ..Model::new(2, 1, 3, 2) }
}

/// Two clients with three messages in flight, of one client or of both.
fn two_with_duplicates() -> Model {
    Model { in_flight: 3, in_flight_each: 3, ..two() }
}

// R1, R35
#[test]
fn three_clients_exclude_each_other_and_lose_no_update() {
    let happened = [
        HeldByAnswer,
        HeldByPush,
        PushTooOld,
        AnswerTooOld,
        Renewed,
        LostByClock,
        LostByAnswer,
        HolderExpired,
        WaiterExpired,
        JoinAfterLeaving,
        Duplicate,
        Accepted,
        Refused,
        ReadRefused,
        LateWrite,
    ];
    holds("three clients and a resource", three(), &happened);
    if is_long() {
        let model = Model { in_flight_each: 2, ..three() };
        holds("the same with two messages of one client", model, &happened);
    }
}

// S02, S19
#[test]
fn three_clients_exclude_each_other_despite_reordered_messages() {
    let model = Model { resource: false, ..Model::new(3, 1, 3, 2) };
    let happened = [HeldByPush, PushTooOld, AnswerTooOld, Renewed, Duplicate, PushOfAnotherPlace];
    holds("three clients, two messages of one", model, &happened);
    if is_long() {
        let model = Model { resource: false, ..Model::new(3, 1, 4, 3) };
        holds("the same with longer leases", model, &happened);
    }
}

// P1
#[test]
fn a_slow_clock_is_covered_by_the_drift() {
    let happened = [HeldByAnswer, HeldByPush, Renewed, LostByClock];
    holds("two clients, one of them slow", Model { slow: 1, ..two() }, &happened);
    if is_long() {
        let model = Model { slow: 1, ..Model::new(2, 1, 4, 3) };
        holds("the same with longer leases and a resource", model, &happened);
    }
}

// P8
#[test]
fn late_duplicate_acquire_does_not_break_exclusion() {
    let happened = [PushOfAnotherPlace, JoinAfterLeaving, WaiterExpired, HeldByPush, Duplicate];
    holds("two clients, three messages", two_with_duplicates(), &happened);
    if is_long() {
        let model =
            Model { in_flight: 3, in_flight_each: 3, resource: false, ..Model::new(2, 1, 4, 3) };
        holds("the same with longer leases", model, &happened);
    }
}

// S03
#[test]
fn client_that_lost_the_lock_reacquires_with_a_new_token() {
    let model = Model { in_flight: 1, resource: is_long(), ..Model::new(2, 2, 3, 2) };
    let happened = [HeldByAnswer, HeldByPush, LostByClock, LostByAnswer, JoinAfterLeaving];
    holds("two clients with two claims each", model, &happened);
}

// P2
#[test]
fn resource_is_safe_when_a_live_holder_is_evicted() {
    let model = Model { evictions: 1, in_flight_each: 1, ..Model::new(2, 1, 3, 2) };
    let happened = [Accepted, Refused, ReadRefused, LostByAnswer, LateWrite];
    holds("two clients and an eviction", model, &happened);
}

// R40
/// The history of R40. No client leaves, so one client follows another only when a lease expires.
/// And the first client's write was safe when it checked.
#[test]
fn without_fencing_an_update_is_lost() {
    let rules = Rules { writes_fenced: false, reads_fenced: false, ..Rules::ALL };
    let path = breaks(NO_LOST_UPDATE, Model { rules, leaves: false, ..three() });
    let waited = path.iter().filter(|a| matches!(a, Action::Tick { .. })).count();
    assert!(waited >= 3, "no lease expired: {path:?}");
}

// R50
/// The next holder has read, but has not written yet. So the resource does not know its token.
#[test]
fn unfenced_read_allows_a_lost_update() {
    let rules = Rules { reads_fenced: false, ..Rules::ALL };
    breaks(NO_LOST_UPDATE, Model { rules, leaves: false, resource: true, ..two() });
}

// S01
#[test]
fn a_deadline_counted_from_receipt_breaks_exclusion() {
    let rules = Rules { from_sending: false, ..Rules::ALL };
    breaks(EXCLUSION, Model { rules, ..two() });
}

// S19
#[test]
fn a_pushed_grant_counted_from_receipt_breaks_exclusion() {
    let rules = Rules { push_from_heartbeat: false, ..Rules::ALL };
    breaks(EXCLUSION, Model { rules, ..two() });
}

// P1
#[test]
fn without_the_drift_a_slow_clock_breaks_exclusion() {
    let rules = Rules { drift: false, ..Rules::ALL };
    breaks(EXCLUSION, Model { rules, slow: 1, ..two() });
}

// S02
#[test]
fn late_reply_that_revives_a_hold_breaks_exclusion() {
    let rules = Rules { loss_is_final: false, ..Rules::ALL };
    breaks(EXCLUSION, Model { rules, ..two() });
}

// P8
#[test]
fn accepting_a_push_for_an_earlier_position_breaks_exclusion() {
    let rules = Rules { tokens_compared: false, ..Rules::ALL };
    breaks(EXCLUSION, Model { rules, ..two_with_duplicates() });
}

/// Only one of several states with equal keys is explored, which requires that they have the same
/// successors. This test checks that for many pairs, of each kind of equality.
#[test]
fn states_with_equal_keys_have_the_same_successors() {
    for model in [three(), Model { slow: 1, ..two() }, two_with_duplicates()] {
        let follow = |s: &State| model.next_states(s).iter().map(State::keys).collect();
        let mut known: HashMap<_, BTreeSet<_>> = HashMap::new();
        let mut pending = VecDeque::from(model.init_states());
        let mut pairs = 0;
        let enough = if is_long() { 500_000 } else { 25_000 };
        while let Some(state) = pending.pop_front().filter(|_| pairs < enough) {
            let next = follow(&state);
            if let Some(first) = known.get(&state.keys()) {
                assert_eq!(first, &next, "two different states have the same key: {state:?}");
                pairs += 1;
            } else {
                known.insert(state.keys(), next);
                pending.extend(model.next_states(&state));
            }
        }
        assert!(pairs >= 25_000, "too few pairs: {pairs}");
    }
}
