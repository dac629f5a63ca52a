//! Every history of a small system, explored to the end: clients, a store, a fenced resource.
//!
//! # What is modelled
//! - *The store* is the real [`Queue`], inside the state. Its calls settle first; besides it may
//!   settle by itself at any time. Who is granted while waiting gets a push message.
//! - *The clients* follow the deadlines of the design. A deadline is counted from **before** the
//!   request was sent, minus the drift; a pushed grant from the last answered heartbeat; an answer
//!   that comes too late changes nothing; `is_held` is a look at the client's own clock.
//! - *The network* delays, reorders, duplicates and loses at will.
//! - *Pauses* need no action of their own. Nothing ever forces a client or a message to move while
//!   time goes on, so a client may stop anywhere for any time, in particular between its look at
//!   `is_held` and the arrival of the write that it thought safe.
//! - *Clocks.* Time is discrete. A client's clock may lose one tick against the store's: as much
//!   as the drift allows for within a lease.
//! - *The resource* is a counter, incremented by reading it and writing back one more. Read and
//!   write are messages that carry the token; it refuses what is below the highest that it saw.
//!
//! # Bounds, and why they suffice
//! Times count only as differences and tokens only by their order, so states that differ in
//! nothing else are one state, and so are those that differ in the clients' names. What is left is
//! finite without any bound on time or on the number of messages ever sent; it is explored
//! completely. Bounded are only the clients (3: one whose lease ended, one who holds, one who
//! comes next), the claims of each, and how many messages of the lease protocol are on their way
//! at once ([`Model::in_flight`]): a pair of messages can overtake each other, and a duplicate
//! needs one more place. A lease of 4 ticks, a waiter's of 3 and a drift of 1 are the smallest
//! numbers at which all the differences in play (2, 3, 4 and 1 tick) are distinct.
//!
//! # Controls
//! A model that cannot fail shows nothing. The same model with one rule taken away must find its
//! counterexample: no fencing (R40), reads without a token, deadlines counted from receipt, pushed
//! grants counted from receipt, no allowance for drift, late answers that revive. And everything
//! that the model is about has to happen in it ([`Event`]).

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leasehold::queue::{At, Queue};
use leasehold::store::{Joined, Mode, Place, Renewal, Standing};
use leasehold::{Claim, ClaimId, Kind, Name};
use stateright::{Checker, Property};

const DRIFT: u64 = 1;
/// Late enough that a mere duration (see [`Model::holding`]) is never taken for a time.
const START: u64 = 100;
const MOST: usize = 3;

/// The rules under test. [`Rules::ALL`] is the design; each control takes one away.
#[derive(Clone, Copy, Debug)]
struct Rules {
    /// The resource refuses writes below the highest token that it saw.
    writes_fenced: bool,
    /// Reads carry the token too: the resource takes note of it, and refuses old ones.
    reads_fenced: bool,
    /// Deadlines count from before the request was sent, not from the answer's receipt.
    from_sending: bool,
    /// A pushed grant counts from the last answered heartbeat, not from the push's receipt.
    push_from_heartbeat: bool,
    /// The drift is taken off.
    drift: bool,
    /// What is told of a place under another token is not about this one.
    tokens_compared: bool,
    /// A lost guard stays lost whatever comes in.
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

/// What has to happen somewhere in an exploration, or it shows nothing.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A client believes in its grant because of an answer.
    HeldByAnswer,
    /// A client believes in its grant because of a push.
    HeldByPush,
    /// A push came too long after the last answered heartbeat to be believed.
    PushTooOld,
    /// A push told of a place that the claim had earlier.
    PushOfAnotherPlace,
    /// The answer "you hold" came after its own deadline.
    AnswerTooOld,
    /// A deadline was moved on by a renewal.
    Renewed,
    /// A guard was lost by its own clock.
    LostByClock,
    /// A guard was told that it is lost.
    LostByAnswer,
    /// The store removed an expired holder.
    HolderExpired,
    /// The store removed an expired waiter.
    WaiterExpired,
    /// The store was asked to join by a client that has left already (scenario 5).
    JoinAfterLeaving,
    /// A message arrived, and stays to arrive again.
    Duplicate,
    /// A write was accepted.
    Accepted,
    /// A write was refused.
    Refused,
    /// A read was refused.
    ReadRefused,
    /// A write was on its way while its sender did not hold any more.
    LateWrite,
}

const EVENTS: usize = Event::LateWrite as usize + 1;

struct Model {
    clients: usize,
    /// How many claims each client makes, one after the other.
    claims_each: u8,
    /// In ticks.
    lease: u64,
    waiter_lease: u64,
    /// How many messages of the lease protocol are on their way at once.
    in_flight: usize,
    /// How many of these are one client's.
    in_flight_each: usize,
    /// How many clients' clocks lose a tick.
    slow: u64,
    /// Whether they use the resource too.
    resource: bool,
    rules: Rules,
    claims: Vec<Claim>,
    events: Arc<[AtomicU64; EVENTS]>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// Has not asked yet.
    Out,
    /// Sends its claim until it is answered, the first time at `first`.
    Joining { first: u64 },
    /// Stands in the queue under this token; the last heartbeat that was answered "waiting" was
    /// sent at `base`, unless that is so long ago that it is worth nothing.
    Waiting { token: u64, base: Option<u64> },
    /// Has a guard.
    Held { token: u64, until: u64 },
    /// Its guard is lost, or it left.
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
    /// By how much its clock is behind.
    lag: u64,
    phase: Phase,
    work: Work,
}

/// A message, of or to `client` about its claim number `claim`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Message {
    client: usize,
    claim: u8,
    what: What,
}

/// `sent` and `until` are times on the client's clock.
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
    /// Times that are this long ago are all the same: nothing counted from them is still good.
    oldest: u64,
    queue: Queue,
    clients: [Client; MOST],
    messages: Vec<Message>,
    /// The resource: its value, the highest token it saw, how many writes it accepted.
    value: u8,
    highest: u64,
    accepted: u8,
    /// The token of the newest grant at the store, and of the newest that a client believed in.
    granted: u64,
    believed: u64,
    disorder: bool,
    revived: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Action {
    /// Time goes on; one client's clock may miss it.
    Tick {
        slow: Option<usize>,
    },
    /// The store settles by itself.
    Settle,
    Join(usize),
    Renew(usize),
    Leave(usize),
    /// Looks at `is_held`, then sends the read.
    Read(usize),
    /// Looks at `is_held`, then sends the write.
    Write(usize),
    Arrive {
        message: usize,
        again: bool,
    },
    Lose {
        message: usize,
    },
}

/// The id of a client's claim number `claim`.
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

    /// Puts a message on its way; it is lost where there is no room.
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
        let at = At { now: s.now, stamp: 0 };
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
                    Joined::Busy { .. } => unreachable!("nothing departs without a lock-delay"),
                }
            }
            What::Renew { sent } => match s.queue.renew(claim, claim.lease, s.now) {
                Renewal::Holding { token, remaining } => {
                    Some(self.holding(sent, token.get(), remaining.unwrap()))
                }
                Renewal::Waiting(place) => Some(waiting(sent, place)),
                Renewal::Lost => Some(What::Lost),
            },
            What::Leave => {
                s.queue.leave(claim.id, None, s.now);
                None
            }
            _ => unreachable!("not for the store"),
        };
        self.after_store(s);
        answer
    }

    /// "You hold", as it will be counted: `until` is from sending, or else a mere duration.
    fn holding(&self, sent: u64, token: u64, remaining: Duration) -> What {
        let remaining = u64::try_from(remaining.as_micros()).unwrap();
        let base = if self.rules.from_sending { sent } else { 0 };
        What::Holding { token, until: base + remaining - self.drift() }
    }

    fn count_expired(&self, s: &State) {
        for e in s.queue.entries().filter(|e| e.expires.is_some_and(|t| t <= s.now)) {
            self.happened(match e.standing {
                Standing::Waiting => Event::WaiterExpired,
                _ => Event::HolderExpired,
            });
        }
    }

    /// Wakes whom it granted, and writes the grants' order down.
    fn after_store(&self, s: &mut State) {
        let fresh = s.queue.take_fresh_grants();
        for id in fresh {
            let (client, claim) = whose(id);
            let entry = s.queue.entries().find(|e| e.id == id);
            let token = entry.map(|e| e.token.get()).unwrap();
            self.send(s, client, claim, What::Push { token });
        }
        let holder = s.queue.entries().find(|e| e.standing == Standing::Holding);
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

    fn hold(&self, s: &mut State, client: usize, token: u64, until: u64) {
        s.disorder |= token <= s.believed;
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
            (Phase::Waiting { token: told, .. }, What::Holding { token, .. }) if told != token => {
                // The place that was ours is gone, and a late duplicate has made another.
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
            (Phase::Waiting { token, base }, What::Waiting { sent, token: told }) => {
                s.clients[m.client].phase = match token == told || !self.rules.tokens_compared {
                    true => Phase::Waiting { token, base: base.max(Some(sent)) },
                    false => Phase::Over { lost: None },
                };
            }
            (Phase::Waiting { token: told, base }, What::Push { token }) => {
                let worth = self.waiter_lease - self.drift();
                let until = match self.rules.push_from_heartbeat {
                    true => base.map(|b| b + worth),
                    false => Some(clock + worth),
                };
                if token != told && self.rules.tokens_compared {
                    self.happened(Event::PushOfAnotherPlace);
                } else if let Some(until) = until.filter(|&t| clock < t) {
                    self.happened(Event::HeldByPush);
                    self.hold(s, m.client, token, until);
                } else {
                    self.happened(Event::PushTooOld);
                }
            }
            (Phase::Held { token, until }, What::Holding { token: told, until: new }) => {
                let new = if self.rules.from_sending { new } else { clock + new };
                if told == token {
                    if new > until {
                        self.happened(Event::Renewed);
                    }
                    let until = until.max(new);
                    s.clients[m.client].phase = Phase::Held { token, until };
                } else {
                    // A grant under another token is not this guard's.
                    self.happened(Event::LostByAnswer);
                    s.clients[m.client].phase = Phase::Over { lost: None };
                }
            }
            (Phase::Over { lost: Some(_) }, What::Holding { token, .. })
                if !self.rules.loss_is_final =>
            {
                // The naive client: "the renewal succeeded, so I hold".
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
                // It stays, to arrive again: a duplicate must do no harm either.
                s.messages[i].what = What::Write { token, value, accepted: true };
            }
            _ => unreachable!("not for the resource"),
        }
    }

    // -- what can make no difference any more ---------------------------------------------------

    /// Guards end by their clients' clocks, and messages that nobody will ever act upon go. What
    /// is dropped here does nothing whenever it arrives, so dropping it loses no behaviour.
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
                What::Holding { until, token } => {
                    let open = !self.rules.from_sending || clock < until;
                    let other = match client.phase {
                        Phase::Waiting { token: own, .. } => own != token,
                        Phase::Held { token: own, .. } => own != token,
                        _ => false,
                    };
                    let useful = (joining || waits || held) && (open || other);
                    if (joining || waits) && !useful {
                        self.happened(Event::AnswerTooOld);
                    }
                    useful || (held || revivable) && !self.rules.loss_is_final
                }
                What::Waiting { sent, .. } => joining || waits && clock < sent + worth,
                What::Lost => waits || held,
                What::Push { .. } => joining || waits,
                // Nothing is there that it could renew or remove, nor will be.
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
            revived: false,
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
        for c in 0..self.clients {
            let client = &s.clients[c];
            let room = self.room(s, c);
            match client.phase {
                Phase::Out if room => actions.push(Action::Join(c)),
                Phase::Over { .. } if room && client.claim + 1 < self.claims_each => {
                    actions.push(Action::Join(c));
                }
                // Only while no grant can have come and expired unseen (P8); then the id is left.
                Phase::Joining { first } => {
                    if room && self.clock(s, c) < first + self.waiter_lease - self.drift() {
                        actions.push(Action::Join(c));
                    }
                    actions.push(Action::Leave(c));
                }
                Phase::Waiting { .. } | Phase::Held { .. } => {
                    if room {
                        actions.push(Action::Renew(c));
                    }
                    actions.push(Action::Leave(c));
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
        vec![
            Property::always(EXCLUSION, |m: &Model, s: &State| {
                (0..m.clients).filter(|&c| m.is_held(s, c)).count() <= 1
            }),
            Property::always(BELIEF, |m: &Model, s: &State| {
                (0..m.clients).filter(|&c| m.is_held(s, c)).all(|c| {
                    let id = m.claim(c, s.clients[c].claim).id;
                    let Phase::Held { token, .. } = s.clients[c].phase else { return false };
                    s.queue.entries().any(|e| {
                        let lives = e.expires.is_some_and(|t| t > s.now);
                        e.id == id
                            && e.token.get() == token
                            && e.standing == Standing::Holding
                            && lives
                    })
                })
            }),
            Property::always(ORDER, |_, s: &State| !s.disorder),
            Property::always(NO_LOST_UPDATE, |_, s: &State| s.value == s.accepted),
            Property::always(FINAL, |_, s: &State| !s.revived),
            Property::sometimes(ALL_UPDATED, |m: &Model, s: &State| {
                !m.resource || usize::from(s.accepted) == m.claims.len()
            }),
        ]
    }
}

const EXCLUSION: &str = "at most one client's is_held() is true";
const BELIEF: &str = "who believes that it holds does hold at the store, under its token";
const ORDER: &str = "grants take effect in the order of their tokens";
const NO_LOST_UPDATE: &str = "the resource keeps the effect of each accepted write";
const FINAL: &str = "a lost guard is never held again";
const ALL_UPDATED: &str = "every claim can get its update through";

// ---------------------------------------------------------------------------------------------
// When two states are the same: times are ages, tokens are ranks, clients have no names.

/// A client with all that belongs to it, in bytes.
type Key = [u8; 46];

impl State {
    /// All tokens in the state, in order.
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

    fn keys(&self) -> ([Key; MOST], [u8; 7]) {
        let tokens = self.tokens();
        let rank = |token: u64| u8::try_from(tokens.partition_point(|&t| t < token)).unwrap();
        // Of a time that is over, only that it is over counts.
        let ahead = |time: u64, clock: u64| u8::try_from(time.saturating_sub(clock)).unwrap();
        let age = |time: u64, clock: u64| u8::try_from((clock - time).min(self.oldest)).unwrap();
        let mut keys = [[0; 46]; MOST];
        let claims = self.queue.entries().len();
        assert!(claims <= 5, "a key has room for five places");
        for (c, key) in keys.iter_mut().enumerate() {
            let client = &self.clients[c];
            let clock = self.now - client.lag;
            let phase = match client.phase {
                Phase::Out => [0, 0, 0],
                Phase::Joining { first } => [1, age(first, clock), 0],
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
            let over =
                |m: &Message| client.claim != m.claim || client.phase == Phase::Over { lost: None };
            let mut messages: Vec<[u8; 4]> = Vec::new();
            for m in self.messages.iter().filter(|m| m.client == c) {
                let [kind, a, b] = match m.what {
                    // Of a claim that is over nobody will count the answer.
                    What::Join { .. } if over(m) => [1, 99, 0],
                    What::Renew { .. } if over(m) => [2, 99, 0],
                    What::Join { sent } => [1, age(sent, clock), 0],
                    What::Renew { sent } => [2, age(sent, clock), 0],
                    What::Leave => [3, 0, 0],
                    // A duration is no time on the clock, and smaller than any.
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
            let standing = if e.standing == Standing::Waiting { 1 } else { 2 };
            let bytes = [
                claim + 1,
                standing,
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
            u8::from(self.revived),
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

#[test]
fn probe() {
    let n = |k: &str, d: usize| std::env::var(k).ok().and_then(|v| v.parse().ok()).unwrap_or(d);
    let model = Model {
        in_flight: n("F", 2),
        in_flight_each: n("E", 2),
        slow: n("S", 0) as u64,
        resource: n("R", 1) == 1,
        rules: Rules { tokens_compared: n("TC", 1) == 1, ..Rules::ALL },
        ..Model::new(n("C", 2), n("K", 1) as u8, n("L", 4) as u64, n("W", 3) as u64)
    };
    let events = Arc::clone(&model.events);
    let start = std::time::Instant::now();
    use stateright::Model as _;
    let c = model
        .checker()
        .threads(2)
        .timeout(Duration::from_secs(n("T", 60) as u64))
        .spawn_bfs()
        .join();
    println!(
        "{} unique, {} generated, depth {}, {:?}, done {}",
        c.unique_state_count(),
        c.state_count(),
        c.max_depth(),
        start.elapsed(),
        c.is_done()
    );
    for (name, path) in c.discoveries() {
        println!("{name}: {:?}", path.into_actions());
    }
    println!("{:?}", events.iter().map(|e| e.load(Ordering::Relaxed)).collect::<Vec<_>>());
}
