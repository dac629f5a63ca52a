//! PURE: one round of requests to all nodes, and the result of its answers. No I/O and no clock.
//!
//! Redlock has no common order of events, because its servers do not know each other. This module
//! establishes one for the fencing tokens of one lock. [`Round`] is the client's half and runs in
//! the store. [`Node`] is the server's half, which the scripts implement (a test compares them).
//! The model checker runs both (`crates/leasehold-model/tests/redlock_model.rs`).
//!
//! # The protocol
//! 1. The client sends its attempt to all nodes at once, with a *proposal*. That is a token above
//!    all tokens that the client has seen, and not below the client's clock.
//! 2. A node whose key is free accepts the attempt. If the proposal is above the last token that it
//!    remembers for the name, it *stores* the proposal. Otherwise it only returns what it
//!    remembers.
//! 3. Once a majority has stored the proposal, the proposal is the token. This takes one round trip
//!    and is the usual case.
//! 4. If a majority accepted the attempt but the proposal was too low for some nodes, the client
//!    writes back a token above all that were returned. A node stores it if its key still belongs
//!    to this attempt and it remembers a lower token. The token is valid once a majority has stored
//!    it.
//! 5. In either case the grant is valid for the lease, minus the time since *before the first
//!    request was sent*, minus the drift. If no time is left, there is no grant (scenario 30).
//!
//! # Why there is one holder
//! Two majorities have a node in common, and its key belongs to one attempt at a time. So B's
//! majority contains a node from which A's key was gone before B's key was set. Either A released
//! it, or A's lease expired *there*, which is after A's own deadline. An extension counts only
//! nodes that still have the key. Nodes that have lost the key get it again only after a majority
//! has extended it.
//!
//! # Why tokens rise
//! Let A's grant be complete (stored by a majority) before B's is, and consider a node that stored
//! both tokens. If it stored A's token first, B's is greater, because a node only stores greater
//! tokens. If it stored B's first, its key belonged to B and later to A, all before B's grant was
//! complete. So B's lease there ended before B knew of its grant, B's deadline had passed, and B
//! has no such grant. This needs no clock. Clocks only make the proposal high enough in the first
//! round.
//!
//! A node keeps a name's last token in a record that expires by the node's clock, and clocks can be
//! set. So without the record, a node uses the highest token that it stored for *any* name. That is
//! never too low, however the record was lost.
//!
//! The rule about storing is essential. A common suggestion is to take the greatest answer plus
//! one. But the majority does not know that token, so the next holder may get a lower one. The
//! model finds this in seconds.
//!
//! # When a node forgets
//! Both arguments need nodes that keep what they knew. A node that restarted without its data, or
//! with old data, has forgotten keys and tokens. Three rules handle that:
//! - *Delayed restart*: the node does not vote for longer than the longest lease, so that each
//!   grant that it has forgotten has expired. The delay begins when the node starts. If it may have
//!   forgotten for another reason (it was emptied, or another server has its address), the delay
//!   begins when that is detected. Holders keep sending it their keys meanwhile.
//! - *Recollection*: after the delay, the node still does not vote until a client has sent it the
//!   highest token of a majority of the *other* nodes, which remember ([`recollect`]). Every
//!   completed token is known to one of these. This needs no clock either.
//! - *More than a minority has forgotten* (all nodes are new, or the power failed): no majority is
//!   left that remembers. The nodes then start at the highest of all reported tokens, the client's
//!   clock and their own clocks. Tokens rise if these clocks are not behind the last lost token.
//!   This is the only case that depends on clocks, as the model shows.
//!
//! Without the delay there may be two holders, and no order between them. That is the case if nodes
//! vote immediately after losing data, or leases are longer than the delay. The model shows that as
//! well.

use std::time::Duration;

/// Returns how many nodes must agree.
pub const fn majority(nodes: usize) -> usize {
    nodes / 2 + 1
}

/// Highest proposal. Scripts count in doubles, which are exact below 2^53. A clock reaches this
/// value in the year 2112. Tokens that are written back go above it, one at a time.
pub const MAX_PROPOSAL: u64 = 1 << 52;

/// Returns a client's proposal, which is not below its clock in microseconds and above all tokens
/// that it has seen.
pub fn proposal(clock: u64, seen: u64) -> u64 {
    clock.max(seen.saturating_add(1)).clamp(1, MAX_PROPOSAL)
}

/// Answer of one node to an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Answer {
    /// The node accepted the attempt: its key for the lock now belongs to this attempt.
    Granted {
        /// Whether the node stored the proposal.
        stored: bool,
        /// The last token that the node remembers for the name. This is the proposal if the node
        /// stored it.
        last: u64,
    },
    /// The node's key belongs to another claim, or to a later attempt of this claim.
    Refused,
    /// The node does not vote, because it has forgotten its data.
    Abstained,
    /// The node did not answer in time, or not at all.
    Silent,
}

/// Result of a round so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// More answers are needed.
    Open,
    /// A majority stored this token.
    Token(u64),
    /// A majority accepted the attempt, but a majority must store this token first.
    WriteBack(u64),
    /// No majority is possible.
    Failed,
}

/// One attempt of one client, while the answers arrive.
#[derive(Clone, Debug)]
pub struct Round {
    proposal: u64,
    answers: Vec<Option<Answer>>,
}

impl Round {
    /// Creates a round with this number of nodes.
    pub fn new(nodes: usize, proposal: u64) -> Self {
        Self { proposal, answers: vec![None; nodes] }
    }

    /// Records an answer of this round. Only a node's first answer counts.
    pub fn add_answer(&mut self, node: usize, answer: Answer) {
        if let Some(slot) = self.answers.get_mut(node) {
            slot.get_or_insert(answer);
        }
    }

    /// Returns the answers so far, by node.
    pub fn answers(&self) -> &[Option<Answer>] {
        &self.answers
    }

    /// Returns whether every node has answered or was given up.
    pub fn is_complete(&self) -> bool {
        self.answers.iter().all(Option::is_some)
    }

    fn count(&self, which: impl Fn(&Answer) -> bool) -> usize {
        self.answers.iter().flatten().filter(|a| which(a)).count()
    }

    /// Returns the decision that follows from the answers so far.
    pub fn decision(&self) -> Decision {
        let needed = majority(self.answers.len());
        let open = self.answers.len() - self.answers.iter().flatten().count();
        let stored = self.count(|a| matches!(a, Answer::Granted { stored: true, .. }));
        let granted = self.count(|a| matches!(a, Answer::Granted { .. }));
        if stored >= needed {
            return Decision::Token(self.proposal);
        }
        if granted + open < needed {
            return Decision::Failed;
        }
        match self.write_back() {
            Some(token) if stored + open < needed => Decision::WriteBack(token),
            _ => Decision::Open,
        }
    }

    /// Returns a token that can already be written back, for a client that does not wait for the
    /// last answers. Returns `None` unless a majority has accepted the attempt.
    pub fn write_back(&self) -> Option<u64> {
        let last = self.answers.iter().flatten().filter_map(|a| match a {
            Answer::Granted { last, .. } => Some(*last),
            _ => None,
        });
        let granted = last.clone().count();
        let highest = last.fold(self.proposal, u64::max);
        (granted >= majority(self.answers.len())).then(|| highest.saturating_add(1))
    }
}

/// Votes on a yes-or-no question: a write-back, an extension or a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tally {
    nodes: usize,
    yes: usize,
    no: usize,
    silent: usize,
}

impl Tally {
    /// Creates a tally without any votes.
    pub const fn new(nodes: usize) -> Self {
        Self { nodes, yes: 0, no: 0, silent: 0 }
    }

    /// Counts the vote of one more node. `None` means that the node will not answer.
    pub fn count(&mut self, vote: Option<bool>) {
        match vote {
            Some(true) => self.yes += 1,
            Some(false) => self.no += 1,
            None => self.silent += 1,
        }
    }

    /// Returns whether a majority voted yes.
    pub const fn passed(&self) -> bool {
        self.yes >= majority(self.nodes)
    }

    /// Returns whether no majority can vote yes any more, whatever the silent nodes know.
    pub const fn denied(&self) -> bool {
        self.nodes - self.no < majority(self.nodes)
    }

    /// Returns whether every node has answered or was given up.
    pub const fn is_complete(&self) -> bool {
        self.yes + self.no + self.silent >= self.nodes
    }

    /// Returns how many nodes have answered.
    pub const fn answer_count(&self) -> usize {
        self.yes + self.no
    }
}

/// Returns how long a grant of `lease` is still valid, when `elapsed` has passed since before its
/// first request was sent.
///
/// If the result is zero, the grant must be released. `drift` is the maximum difference of two
/// clocks over the lease.
pub fn validity(lease: Duration, elapsed: Duration, drift: Duration) -> Duration {
    lease.saturating_sub(elapsed).saturating_sub(drift)
}

/// Returns the token to send to a node that has forgotten, which is the highest token that any node
/// may have stored.
///
/// `known` contains what each node remembers. `clocks` are the client's and the nodes' clocks,
/// which are used only if fewer than a majority remember. Returns `None` if too few nodes have
/// answered.
pub fn recollect(known: &[Known], clocks: impl IntoIterator<Item = u64>) -> Option<u64> {
    let needed = majority(known.len());
    let remembered = known.iter().filter(|k| matches!(k, Known::Remembers(_)));
    let enough = remembered.count() >= needed;
    let answered = known.iter().filter(|k| !matches!(k, Known::Silent)).count();
    if !enough && answered < needed {
        return None;
    }
    let highest = known.iter().map(|k| match k {
        Known::Remembers(token) | Known::Forgot(token) => *token,
        Known::Silent => 0,
    });
    let highest = highest.max().unwrap_or(0);
    match enough {
        true => Some(highest),
        false => Some(clocks.into_iter().fold(highest, u64::max).min(MAX_PROPOSAL)),
    }
}

/// What a node knows about tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Known {
    /// The node has its data. The value is the highest token that it stored for any name, or was
    /// sent.
    Remembers(u64),
    /// The node has forgotten its data, or is new. The value is the highest token that it still
    /// knows, or zero.
    Forgot(u64),
    /// The node does not answer.
    Silent,
}

/// The owner of a node's key: the claim and its attempt number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attempt {
    /// The ID of the claim.
    pub claim: u128,
    /// The number of the attempt, which rises with each attempt of the claim.
    pub number: u64,
}

/// A node's data for one name, and its rules. The scripts implement the same in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node {
    /// The owner of the key, and the time at which the key expires.
    pub key: Option<(Attempt, u64)>,
    /// The last token recorded for the name on this node. `None` if the record is gone.
    pub last: Option<u64>,
    /// The highest token that this node has stored for any name, or was sent after it had forgotten
    /// its data.
    pub highest: u64,
    /// Whether the node still has its data, and therefore votes.
    pub remembers: bool,
}

impl Node {
    /// Creates a node without data that votes.
    pub const fn new() -> Self {
        Self { key: None, last: None, highest: 0, remembers: true }
    }

    /// Removes an expired key.
    pub fn settle(&mut self, now: u64) {
        self.key = self.key.filter(|(_, until)| *until > now);
    }

    /// Returns the token that the next one must exceed. Without the record, only tokens above the
    /// highest of all names are certain to be new.
    pub fn floor(&self) -> u64 {
        self.last.unwrap_or(self.highest)
    }

    /// Restores the forgotten token, after which the node votes again.
    pub fn recollect(&mut self, token: u64) {
        self.last = self.last.map(|last| last.max(token));
        self.highest = self.highest.max(token);
        self.remembers = true;
    }

    /// Accepts an attempt until the time `until`, if the key is free or belongs to the same claim.
    /// A later attempt of the same claim takes over the key. An earlier one that arrives late is
    /// refused.
    pub fn take(&mut self, attempt: Attempt, until: u64, proposal: u64) -> Answer {
        if !self.remembers {
            return Answer::Abstained;
        }
        if self.key.is_some_and(|(at, _)| at.claim != attempt.claim || at.number > attempt.number) {
            return Answer::Refused;
        }
        self.key = Some((attempt, until));
        let floor = self.floor();
        let last = floor.max(proposal);
        self.last = Some(last);
        self.highest = self.highest.max(last);
        Answer::Granted { stored: proposal > floor, last }
    }

    /// Stores a token that is written back. Returns whether it was stored.
    pub fn write_back(&mut self, attempt: Attempt, token: u64) -> bool {
        let ours = self.key.is_some_and(|(at, _)| at == attempt);
        let stores = ours && token > self.floor();
        if stores {
            self.last = Some(token);
            self.highest = self.highest.max(token);
        }
        stores
    }

    /// Extends the key, and never shortens it. Returns whether the key belongs to the attempt. A
    /// missing key is not set again.
    pub fn extend(&mut self, attempt: Attempt, until: u64) -> bool {
        let Some((_, before)) = self.key.filter(|(at, _)| *at == attempt) else { return false };
        self.key = Some((attempt, until.max(before)));
        true
    }

    /// Sets a key that this node has lost, for an attempt that a majority has just extended.
    pub fn heal(&mut self, attempt: Attempt, until: u64) {
        self.key.get_or_insert((attempt, until));
    }

    /// Removes the key of this attempt, or of an earlier one of the claim. Returns whether it did.
    pub fn release(&mut self, attempt: Attempt) -> bool {
        let ours = self
            .key
            .is_some_and(|(at, _)| at.claim == attempt.claim && at.number <= attempt.number);
        if ours {
            self.key = None;
        }
        ours
    }
}

impl Default for Node {
    fn default() -> Self {
        Self::new()
    }
}
