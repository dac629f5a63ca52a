//! Explores Redlock's tokens completely: three nodes, two or three clients, an unreliable network.
//!
//! # What is modelled
//! - *The nodes* are the real [`Node`]. The clients decide by the real [`Round`], [`Tally`] and
//!   [`recollect`]. Another test compares the scripts with [`Node`]
//!   (`crates/leasehold-redlock/src/tests.rs`).
//! - *The network* delays and reorders messages arbitrarily. A lost message is one that never
//!   arrives. A client may abandon an attempt at any time and begin another. So answers arrive
//!   late, and so do requests of attempts that are over.
//! - *Clocks*. Time is discrete. A client proposes its clock, which may be any amount ahead or
//!   behind. Leases count in a time that is the same for all, because the general model
//!   (`tests/model.rs`) covers the drift. A client may be paused anywhere for any time.
//! - *Crashes*: a node restarts with its data, or without.
//! - *Belief*: a client believes that it holds from its decision until its deadline.
//!
//! # Bounds
//! Ticks, attempts of a client and crashes are bounded. Everything else is explored completely. A
//! lease of 2 ticks is the shortest in which an answer can be late and in time. Nodes have no
//! names, so states that differ only in the order of nodes are one.
//!
//! # Controls
//! The same model without one rule must find a counterexample. The last controls are not mistakes
//! of an implementation, but the limits that the documentation states.

use std::collections::BTreeSet;
use std::time::Duration;

use leasehold::store::redlock::round::{
    Answer, Attempt, Decision, Known, Node, Round, Tally, majority, recollect, validity,
};
use leasehold_model::is_long;
use stateright::{Checker, HasDiscoveries, Model as _, Property};

const NODES: usize = 3;

/// The rules under test. [`Rules::ALL`] is the design.
#[derive(Clone, Copy, Debug)]
struct Rules {
    /// A token counts only when a majority has stored it. Without this rule, the highest answer
    /// plus one is used directly.
    stored: bool,
    /// A node stores only tokens above the highest that it remembers.
    rising: bool,
    /// Answers count only for the attempt that sent the request.
    own_answers: bool,
    /// Deadlines count from before the first request.
    from_sending: bool,
    /// The remaining validity is checked after the write-back.
    validity_last: bool,
    /// A majority is required, not just half of the nodes.
    majority: bool,
    /// A node that restarted without its data waits for the length of a lease before it votes.
    delay: bool,
    /// After that, the node recovers its tokens from the other nodes.
    recollects: bool,
    /// If the record of a name is gone, the highest token of all names counts for it. Without this
    /// rule, an outdated value counts.
    falls_back: bool,
}

impl Rules {
    const ALL: Self = Self {
        stored: true,
        rising: true,
        own_answers: true,
        from_sending: true,
        validity_last: true,
        majority: true,
        delay: true,
        recollects: true,
        falls_back: true,
    };
}

#[derive(Clone, Debug)]
struct Model {
    /// Number of attempts of each client.
    attempts: Vec<u64>,
    ticks: u64,
    /// Number of restarts that lose the node's data.
    losses: u8,
    /// Number of restarts that keep the node's data.
    restarts: u8,
    /// How often a node's clock jumps forward and back while no client holds or makes a request.
    /// Keys that expire by the clock are gone, but no time has passed.
    jumps: u8,
    /// How often a holder extends its lease.
    extensions: u8,
    /// How far each client's clock is ahead.
    ahead: [u64; CLIENTS],
    /// The time from which each client begins.
    starts: [u64; CLIENTS],
    /// A token that only the first node remembers, from an earlier failed attempt.
    remembered: u64,
    rules: Rules,
}

const CLIENTS: usize = 3;
const LEASE: u64 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Phase {
    Out,
    Asking { start: u64, proposal: u64 },
    Writing { start: u64, token: u64 },
    Held { until: u64, asked: Option<u64> },
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Client {
    attempt: u64,
    extended: u8,
    phase: Phase,
}

/// A message between an attempt of a client and one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Message {
    client: usize,
    attempt: u64,
    what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum What {
    Take(u64),
    Write(u64),
    Extend(u64),
    Heal,
    Release,
    Answered(Answer),
    Wrote(bool),
    /// The answer to the extension that was sent at that time.
    Extended(u64, bool),
}

/// The state of one node: the node itself, its answers to the clients in their present phase, and
/// the messages in flight.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Place {
    node: Node,
    /// The time from which it votes and may receive the token that it forgot.
    from: u64,
    answers: [Option<Answer>; CLIENTS],
    votes: [Option<bool>; CLIENTS],
    messages: Vec<Message>,
    /// This node's answer to the client that restores another node's token.
    known: Option<Known>,
    is_told: bool,
}

/// The state of the system. Nodes have no names, and are kept in a canonical order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    now: u64,
    places: [Place; NODES],
    clients: Vec<Client>,
    losses: u8,
    restarts: u8,
    jumps: u8,
    /// The highest token with which a client has held.
    highest: u64,
    inverted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Action {
    Tick,
    Begin(usize),
    /// Begins another attempt, whatever the state of this one.
    GiveUp(usize),
    /// Does not wait for the last answers.
    WriteBack(usize),
    Extend(usize),
    Release(usize),
    Arrive(usize, Message),
    Lose(usize),
    /// Restarts a node with its key and its tokens. It is unknown whether the tokens are the
    /// latest.
    Restart(usize),
    Jump(usize),
    /// Begins to find out what this node forgot.
    Recollect(usize),
    /// Receives the answer of another node.
    Hear(usize),
    /// Sends the token to the node that forgot it.
    Tell,
}

fn ticks(n: u64) -> Duration {
    Duration::from_micros(n)
}

fn left(elapsed: u64) -> bool {
    !validity(ticks(LEASE), ticks(elapsed), Duration::ZERO).is_zero()
}

impl Model {
    fn new(attempts: &[u64], ticks: u64) -> Self {
        Self {
            attempts: attempts.to_vec(),
            ticks,
            losses: 0,
            restarts: 0,
            jumps: 0,
            extensions: 0,
            ahead: [0; CLIENTS],
            starts: [0; CLIENTS],
            remembered: 0,
            rules: Rules::ALL,
        }
    }

    fn to_all(&self, s: &mut State, client: usize, what: What) {
        let attempt = s.clients[client].attempt;
        for place in &mut s.places {
            // A node that is known to have just restarted gets no requests.
            let young = self.rules.delay && s.now < place.from;
            if matches!(what, What::Take(_)) && young {
                place.answers[client] = Some(Answer::Silent);
            } else {
                place.messages.push(Message { client, attempt, what });
            }
        }
    }

    fn enter(&self, s: &mut State, c: usize, phase: Phase) {
        s.clients[c].phase = phase;
        for place in &mut s.places {
            (place.answers[c], place.votes[c]) = (None, None);
        }
    }

    fn begin(&self, s: &mut State, c: usize) {
        s.clients[c].attempt += 1;
        // The client has seen no token yet. A seen token could only raise its proposal.
        let proposal = 1 + self.ahead[c] + s.now;
        self.enter(s, c, Phase::Asking { start: s.now, proposal });
        self.to_all(s, c, What::Take(proposal));
    }

    fn end(&self, s: &mut State, c: usize) {
        self.enter(s, c, Phase::Over);
        self.to_all(s, c, What::Release);
    }

    fn round(&self, s: &State, c: usize, proposal: u64) -> Round {
        let mut round = Round::new(NODES, proposal);
        for (i, place) in s.places.iter().enumerate() {
            if let Some(answer) = place.answers[c] {
                round.add_answer(i, answer);
            }
        }
        round
    }

    fn tally(&self, s: &State, c: usize) -> Tally {
        let mut tally = Tally::new(NODES);
        s.places.iter().filter(|p| p.votes[c].is_some()).for_each(|p| tally.count(p.votes[c]));
        tally
    }

    /// Evaluates the answers. `now` means that the client does not wait for more.
    fn decide(&self, s: &mut State, c: usize, now: bool) {
        let Phase::Asking { start, proposal } = s.clients[c].phase else { return };
        let round = self.round(s, c, proposal);
        let decision = match round.write_back() {
            Some(token) if now => Decision::WriteBack(token),
            _ if !self.rules.majority => half(&round),
            _ => round.decision(),
        };
        match decision {
            Decision::Open => {}
            Decision::Failed => self.end(s, c),
            Decision::Token(token) => self.hold(s, c, token, start),
            Decision::WriteBack(token) if !self.rules.stored => self.hold(s, c, token, start),
            Decision::WriteBack(token) => {
                if !left(s.now - start) {
                    return self.end(s, c);
                }
                // Without the rule, the validity is checked now and not again later.
                let start = if self.rules.validity_last { start } else { s.now };
                self.enter(s, c, Phase::Writing { start, token });
                self.to_all(s, c, What::Write(token));
            }
        }
    }

    fn hold(&self, s: &mut State, c: usize, token: u64, start: u64) {
        let start = if self.rules.from_sending { start } else { s.now };
        if !left(s.now - start) {
            return self.end(s, c);
        }
        s.inverted |= token <= s.highest;
        s.highest = s.highest.max(token);
        self.enter(s, c, Phase::Held { until: start + LEASE, asked: None });
    }

    fn restart(&self, s: &mut State, at: usize) {
        let place = &mut s.places[at];
        place.node.remembers = !self.rules.recollects;
        // The delay is longer than any lease that the node may have forgotten.
        place.from = if self.rules.delay { s.now + LEASE } else { s.now };
        place.is_told = false;
    }

    fn believes(&self, s: &State, c: usize) -> bool {
        matches!(s.clients[c].phase, Phase::Held { until, .. } if s.now < until)
    }

    fn at_node(&self, s: &mut State, at: usize, m: Message) -> Option<What> {
        let until = s.now + LEASE;
        let node = &mut s.places[at].node;
        node.settle(s.now);
        let who = Attempt { claim: m.client as u128, number: m.attempt };
        Some(match m.what {
            What::Take(proposal) => {
                let before = *node;
                if !self.rules.rising {
                    (node.last, node.highest) = (None, 0);
                }
                let answer = node.take(who, until, proposal);
                if answer == Answer::Refused {
                    *node = before;
                }
                What::Answered(answer)
            }
            What::Write(token) => What::Wrote(node.write_back(who, token)),
            What::Extend(sent) => What::Extended(sent, node.extend(who, until)),
            What::Heal => {
                node.heal(who, until);
                return None;
            }
            What::Release => {
                node.release(who);
                return None;
            }
            What::Answered(_) | What::Wrote(_) | What::Extended(..) => {
                unreachable!("this message is not for a node")
            }
        })
    }

    fn at_client(&self, s: &mut State, at: usize, m: Message) {
        let c = m.client;
        match (s.clients[c].phase, m.what) {
            (Phase::Asking { .. }, What::Answered(answer)) => {
                s.places[at].answers[c].get_or_insert(answer);
                self.decide(s, c, false);
            }
            (Phase::Writing { start, token }, What::Wrote(yes)) => {
                s.places[at].votes[c].get_or_insert(yes);
                let tally = self.tally(s, c);
                if tally.passed() {
                    self.hold(s, c, token, start);
                } else if tally.denied() {
                    self.end(s, c);
                }
            }
            (Phase::Held { until, asked: Some(asked) }, What::Extended(sent, yes))
                if asked == sent =>
            {
                s.places[at].votes[c].get_or_insert(yes);
                let tally = self.tally(s, c);
                // A late answer must not revive a hold.
                if tally.passed() && s.now < until {
                    let until = until.max(sent + LEASE);
                    s.clients[c].phase = Phase::Held { until, asked: Some(asked) };
                    for place in &mut s.places {
                        let heal = Message { what: What::Heal, ..m };
                        if place.votes[c] == Some(false) && !place.messages.contains(&heal) {
                            place.messages.push(heal);
                        }
                    }
                } else if tally.denied() {
                    self.end(s, c);
                }
            }
            _ => {}
        }
    }

    /// Removes everything that has no effect any more, and puts the nodes into a canonical order.
    fn tidy(&self, s: &mut State) {
        let (now, clients) = (s.now, &s.clients);
        let nothing_left = clients
            .iter()
            .zip(&self.attempts)
            .all(|(c, most)| c.attempt == *most && matches!(c.phase, Phase::Over));
        for place in &mut s.places {
            place.node.settle(now);
            place.from = place.from.max(now);
            let key = place.node.key.map(|(who, _)| (who.claim as usize, who.number));
            let all = std::mem::take(&mut place.messages);
            let coming = |m: &Message| {
                let take = |t: &&Message| (t.client, t.attempt) == (m.client, m.attempt);
                let takes = |t: &&Message| matches!(t.what, What::Take(_) | What::Heal);
                all.iter().filter(take).any(|t| takes(&t))
            };
            let matters = |m: &Message| match m.what {
                _ if nothing_left => false,
                // The message of its attempt may still arrive at the node.
                What::Write(_) | What::Extend(_) | What::Release => {
                    key == Some((m.client, m.attempt)) || coming(m)
                }
                What::Take(_) | What::Heal => true,
                // The client no longer waits for this.
                What::Answered(_) => {
                    matches!(clients[m.client].phase, Phase::Asking { .. })
                        && (clients[m.client].attempt == m.attempt || !self.rules.own_answers)
                        && place.answers[m.client].is_none()
                }
                What::Wrote(_) | What::Extended(..) => {
                    clients[m.client].attempt == m.attempt && place.votes[m.client].is_none()
                }
            };
            place.messages = all.iter().filter(|m| matters(m)).copied().collect();
            place.messages.sort_unstable();
            place.messages.dedup();
        }
        s.places.sort_unstable();
    }
}

/// Returns the decision if half of the nodes were enough.
fn half(round: &Round) -> Decision {
    let granted = round.answers().iter().flatten().filter_map(|a| match a {
        Answer::Granted { last, .. } => Some(*last),
        _ => None,
    });
    match granted.clone().count() >= majority(NODES) - 1 {
        true => granted.max().map_or(Decision::Open, Decision::Token),
        false => round.decision(),
    }
}

impl stateright::Model for Model {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let place = Place {
            node: Node::new(),
            from: 0,
            answers: [None; CLIENTS],
            votes: [None; CLIENTS],
            messages: Vec::new(),
            known: None,
            is_told: false,
        };
        vec![State {
            now: 0,
            places: std::array::from_fn(|i| {
                let highest = if i + 1 == NODES { self.remembered } else { 0 };
                Place { node: Node { highest, ..place.node }, ..place.clone() }
            }),
            clients: vec![
                Client { attempt: 0, extended: 0, phase: Phase::Out };
                self.attempts.len()
            ],
            losses: 0,
            restarts: 0,
            jumps: 0,
            highest: 0,
            inverted: false,
        }]
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        if s.now < self.ticks {
            actions.push(Action::Tick);
        }
        for (c, client) in s.clients.iter().enumerate() {
            let again = client.attempt < self.attempts[c];
            match client.phase {
                Phase::Out | Phase::Over if again && s.now >= self.starts[c] => {
                    actions.push(Action::Begin(c));
                }
                Phase::Out | Phase::Over => {}
                Phase::Asking { proposal, .. } => {
                    if again {
                        actions.push(Action::GiveUp(c));
                    }
                    let round = self.round(s, c, proposal);
                    if round.write_back().is_some() && round.decision() == Decision::Open {
                        actions.push(Action::WriteBack(c));
                    }
                }
                Phase::Writing { .. } if again => actions.push(Action::GiveUp(c)),
                Phase::Writing { .. } => {}
                Phase::Held { asked, until } => {
                    actions.push(Action::Release(c));
                    let longer = s.now + LEASE > until && client.extended < self.extensions;
                    if asked.is_none() && longer && self.believes(s, c) {
                        actions.push(Action::Extend(c));
                    }
                }
            }
        }
        let telling = s.places.iter().any(|p| p.is_told);
        let idle = s.clients.iter().all(|c| matches!(c.phase, Phase::Out | Phase::Over));
        for (i, place) in s.places.iter().enumerate() {
            actions.extend(place.messages.iter().map(|m| Action::Arrive(i, *m)));
            if s.losses < self.losses && place.node.highest > 0 {
                actions.push(Action::Lose(i));
            }
            if s.restarts < self.restarts && place.node.highest > 0 {
                actions.push(Action::Restart(i));
            }
            if s.jumps < self.jumps && idle && place.node.last.is_some() {
                actions.push(Action::Jump(i));
            }
            if telling && place.known.is_none() {
                actions.push(Action::Hear(i));
            }
            if !telling && !place.node.remembers && s.now >= place.from {
                actions.push(Action::Recollect(i));
            }
        }
        if telling {
            actions.push(Action::Tell);
        }
    }

    fn next_state(&self, before: &State, action: Action) -> Option<State> {
        let mut state = before.clone();
        let s = &mut state;
        match action {
            Action::Tick => s.now += 1,
            Action::Begin(c) => self.begin(s, c),
            Action::GiveUp(c) | Action::Release(c) => self.end(s, c),
            Action::WriteBack(c) => self.decide(s, c, true),
            Action::Extend(c) => {
                s.clients[c].extended += 1;
                let Phase::Held { until, .. } = s.clients[c].phase else { return None };
                self.enter(s, c, Phase::Held { until, asked: Some(s.now) });
                self.to_all(s, c, What::Extend(s.now));
            }
            Action::Arrive(i, m) => {
                let found = s.places[i].messages.iter().position(|other| *other == m)?;
                s.places[i].messages.remove(found);
                match m.what {
                    What::Answered(_) | What::Wrote(_) | What::Extended(..) => {
                        self.at_client(s, i, m);
                    }
                    _ => {
                        if let Some(what) = self.at_node(s, i, m) {
                            s.places[i].messages.push(Message { what, ..m });
                        }
                    }
                }
            }
            Action::Lose(i) => {
                s.losses += 1;
                s.places[i].node = Node::new();
                self.restart(s, i);
            }
            Action::Restart(i) => {
                s.restarts += 1;
                self.restart(s, i);
            }
            Action::Jump(i) => {
                s.jumps += 1;
                let node = &mut s.places[i].node;
                node.key = None;
                node.last = (!self.rules.falls_back).then_some(0);
            }
            Action::Recollect(i) => {
                s.places.iter_mut().for_each(|p| p.known = None);
                s.places[i].is_told = true;
            }
            Action::Hear(i) => {
                let node = s.places[i].node;
                s.places[i].known = Some(match node.remembers {
                    true => Known::Remembers(node.highest),
                    false => Known::Forgot(node.highest),
                });
            }
            Action::Tell => {
                let known = s.places.each_ref().map(|p| p.known.unwrap_or(Known::Silent));
                // The client that restores the token may have the slowest clock of all.
                let token = recollect(&known, [1 + s.now])?;
                for place in &mut s.places {
                    place.known = None;
                    if std::mem::take(&mut place.is_told) && !place.node.remembers {
                        place.node.recollect(token);
                    }
                }
            }
        }
        if s.places.iter().all(|p| !p.is_told) {
            s.places.iter_mut().for_each(|p| p.known = None);
        }
        self.tidy(s);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(EXCLUSION, |m: &Self, s: &State| {
                (0..m.attempts.len()).filter(|&c| m.believes(s, c)).count() <= 1
            }),
            Property::always(ORDER, |_, s: &State| !s.inverted),
            Property::sometimes(LATE_HOLD, |m: &Self, s: &State| {
                let last = m.attempts.len() - 1;
                s.clients[last].attempt == m.attempts[last]
                    && m.believes(s, last)
                    && s.clients[0].attempt == m.attempts[0]
            }),
        ]
    }
}

const EXCLUSION: &str = "at most one client believes that it holds";
const ORDER: &str = "each grant has a greater token than the one before";
const LATE_HOLD: &str = "the last attempt can hold after the others";

fn holds(what: &str, model: Model) {
    let start = std::time::Instant::now();
    let checker = model.checker().threads(2).spawn_bfs().join();
    println!(
        "{what}: {} states, {} steps, up to {} steps deep, {:?}",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth(),
        start.elapsed(),
    );
    assert!(checker.is_done());
    for (property, path) in checker.discoveries() {
        assert_eq!(property, LATE_HOLD, "{what}: broken by {:#?}", path.into_actions());
    }
    assert!(checker.discovery(LATE_HOLD).is_some(), "{what}: {LATE_HOLD}");
}

/// Prints the shortest history that breaks the property. Fails if no history does.
fn breaks(property: &'static str, model: Model) {
    let until = HasDiscoveries::AnyOf(BTreeSet::from([property]));
    let checker = model.checker().threads(1).finish_when(until).spawn_bfs().join();
    let states = checker.unique_state_count();
    let Some(path) = checker.discovery(property) else {
        panic!("no history breaks {property:?} in {states} states");
    };
    println!("broken after {states} states: {property}\n  {:?}", path.into_actions());
}

/// Two clients. The first one's clock is ahead.
fn two(attempts: [u64; 2], ticks: u64) -> Model {
    Model { ahead: [2, 0, 0], ..Model::new(&attempts, ticks) }
}

/// A node loses its data, once.
fn loss() -> Model {
    Model { losses: 1, ..two([1, 1], 2) }
}

// S35
#[test]
fn guarantees_hold_with_two_clients_and_skewed_clocks() {
    holds("the first clock is ahead", two([1, 1], 2));
    holds("longer", two([1, 1], 3));
    holds("the second clock is ahead", Model { ahead: [0, 2, 0], ..two([1, 1], 3) });
    holds("a write-back", Model { remembered: 9, starts: [0, 2, 0], ..two([1, 1], 2) });
    if is_long() {
        holds("write-backs, longer", Model { remembered: 9, ..two([1, 1], 3) });
    }
}

// S35
#[test]
fn guarantees_hold_with_three_clients() {
    let three = Model::new(&[1, 1, 1], 2);
    // Two clients begin when the first may have been paused for as long as its lease.
    holds("three clients", Model { starts: [0, 2, 2], ..three.clone() });
    if is_long() {
        holds("three clients, one after the other", Model { starts: [0, 1, 2], ..three });
    }
}

// S35
#[test]
fn late_messages_of_earlier_attempts_are_harmless() {
    holds("the second tries twice", two([1, 2], 0));
    if is_long() {
        holds("the second tries twice, in time", two([1, 2], 2));
    }
}

// S31
#[test]
fn extension_does_not_create_a_second_holder() {
    holds("extensions", Model { extensions: 1, starts: [0, 2, 0], ..two([1, 1], 2) });
    if is_long() {
        holds("extensions, longer", Model { extensions: 1, ..two([1, 1], 3) });
    }
}

// S33
#[test]
fn node_that_lost_its_data_is_safe_after_the_delay() {
    holds("one loss", Model { starts: [0, 2, 0], ..loss() });
    if is_long() {
        holds("one loss, at any time", Model { ticks: 3, ..loss() });
    }
}

// S33
#[test]
fn restart_of_a_node_that_kept_its_data_is_safe() {
    let restart = Model { restarts: 1, ..two([1, 1], 2) };
    holds("one restart", Model { starts: [0, 2, 0], ..restart.clone() });
    // This corresponds to restart_delay_ms=0 on servers that lose nothing.
    let at_once = Rules { delay: false, ..Rules::ALL };
    let soon = Model { rules: at_once, starts: [0, 1, 0], ..two([1, 1], 1) };
    holds("one restart, without a delay", Model { restarts: 1, ..soon.clone() });
    if is_long() {
        holds("two restarts, without a delay", Model { restarts: 2, ..soon });
        holds("a restart and a loss", Model { starts: [0, 2, 0], losses: 1, ..restart.clone() });
        holds("one restart, at any time", Model { ticks: 3, ..restart });
    }
}

// F16
#[test]
fn clock_jump_while_the_lock_is_free_lowers_no_token() {
    let jumps = |attempts, jumps| Model { jumps, starts: [0, 1, 0], ..two(attempts, 1) };
    holds("one jump", jumps([1, 1], 1));
    holds("two jumps", jumps([1, 1], 2));
    if is_long() {
        holds("three jumps and another attempt", jumps([1, 2], 3));
    }
    let mut before = jumps([1, 1], 1);
    before.rules.falls_back = false;
    breaks(ORDER, before);
}

/// Each rule is needed. Without it there is a history that breaks the promise.
#[test]
fn model_detects_each_missing_rule() {
    let without = |model: Model, change: fn(&mut Rules)| {
        let mut model = model;
        change(&mut model.rules);
        model
    };
    // A node stores tokens below the highest that it remembers.
    breaks(ORDER, without(two([1, 1], 0), |r| r.rising = false));
    // A client uses the highest answer plus one, without storing it on the nodes (scenario 35).
    let small_model = Model { remembered: 3, ..Model::new(&[1, 1], 0) };
    breaks(ORDER, without(small_model, |r| r.stored = false));
    // A late answer of an earlier attempt counts for the next one.
    breaks(EXCLUSION, without(two([1, 2], 0), |r| r.own_answers = false));
    // The lease counts from the answer.
    let timed = Model { starts: [0, 1, 0], ..two([1, 1], 3) };
    breaks(EXCLUSION, without(timed, |r| r.from_sending = false));
    // The remaining validity is checked before the write-back, and not after it.
    let written = Model { remembered: 9, starts: [0, 2, 0], ..two([1, 1], 2) };
    breaks(EXCLUSION, without(written, |r| r.validity_last = false));
    breaks(EXCLUSION, without(two([1, 1], 0), |r| r.majority = false));
}

// R43
/// R43: the documented limits for nodes that lose their data.
#[test]
fn data_loss_beyond_the_limits_breaks_the_guarantees() {
    // A node votes immediately after it has lost its data.
    let early = Rules { delay: false, ..Rules::ALL };
    breaks(EXCLUSION, Model { rules: early, ticks: 0, ..loss() });
    // A node waits, and then votes without having recovered its tokens, while a clock is behind.
    let ignorant = Rules { recollects: false, ..Rules::ALL };
    breaks(ORDER, Model { rules: ignorant, starts: [0, 1, 0], ..loss() });
    // More than half of the nodes have lost their data. Then the order depends on the clocks.
    let most = Model { losses: 2, starts: [0, 2, 0], ahead: [5, 0, 0], ..loss() };
    breaks(ORDER, most.clone());
    holds("with clocks that are not behind", Model { ahead: [0; 3], ..most });
}
