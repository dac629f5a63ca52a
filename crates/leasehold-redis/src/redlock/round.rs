//! PURE: one round of questions to all nodes, and what its answers come to. No I/O, no clock.
//!
//! Redlock has no common order of events: five servers know nothing of each other. This module
//! makes one all the same, for the fencing tokens of one lock. The [`Round`] is the client's half
//! and runs in the store; the [`Node`] is the server's half: the scripts do what it does (a test
//! compares them), and the model checker runs both (`crates/leasehold-model/tests/redlock_model.rs`).
//!
//! # The protocol
//! 1. The client sends its attempt to all nodes at once, with a *proposal*: a token above all that
//!    it has seen, and not below its clock.
//! 2. A node whose key is free takes the attempt. If the proposal is above the last token that it
//!    remembers for the name, it *stores* the proposal; else it only tells what it remembers.
//! 3. Once a majority has stored the proposal, that is the token: one round trip, the usual case.
//! 4. If a majority took the attempt but the proposal was too low for some, the client writes back
//!    a token above all that it was told. A node stores it if its key is still this attempt's and
//!    what it remembers is lower. A majority must have stored it.
//! 5. In either case the grant is good for the lease less the time since *before the first request
//!    was sent*, less the drift. If nothing is left of that, there is no grant (scenario 30).
//!
//! # Why there is one holder
//! Two majorities have a node in common, and its key is one attempt's at a time. So B's majority
//! has a node that A's key had left before B's came: by A's release, or because A's lease was over
//! *there*, which is after A's own deadline. An extension counts only nodes that still have the key; on those that
//! have lost it, it is set again after a majority was extended.
//!
//! # Why tokens rise
//! Let A's grant be complete (stored by a majority) before B's is, and look at a node that stored
//! both tokens. If it stored A's first, B's is greater: a node only stores what is greater. If it
//! stored B's first, then its key was B's then and A's later, all before B's grant was complete; so
//! B's lease there was over before B knew of its grant, B's deadline had passed, and there is no
//! such grant. No clock is needed for this; clocks only make the proposal high enough at once.
//!
//! A node keeps a name's last token in a record that goes away by the node's clock, and clocks are
//! stepped. So where the record is missing, it takes the highest token that it stored for *any* name
//! for the name's last: that is never too low, whatever became of the record.
//!
//! Without the word "stored" it fails: the greatest of the answers plus one, as it is often
//! proposed, is not known to the majority, and the next holder may be told less (the model finds
//! it in seconds).
//!
//! # When a node forgets
//! Both arguments need nodes that keep what they knew. One that restarted without its data, or with
//! old data, has forgotten keys and tokens. What is done about it:
//! - *Delayed restart*: it does not vote for longer than the longest lease, so that each grant that it
//!   has forgotten is over: since it started, or, if it may have forgotten by something else (it was
//!   emptied; another server has its address), since that was found out. Holders keep telling it of
//!   their keys meanwhile.
//! - *Recollection*: after that it still does not vote until a client has told it the highest token
//!   that a majority of the *other* kind, nodes that remember, knows ([`recollect`]). Every token
//!   that was ever complete is known to one of these: clocks are not needed here either.
//! - *More than a minority has forgotten* (all nodes are new; the power failed): there is nobody to
//!   ask. The nodes then begin at the highest of what anybody says, the client's clock and theirs.
//!   Tokens rise as long as these clocks are not behind the last lost token. This is the one case
//!   that depends on clocks, and the model shows that it does.
//!
//! Without the delay (nodes that vote at once after losing data, or leases longer than the delay)
//! there may be two holders, and no order between them. The model shows that as well.

use std::time::Duration;

/// How many nodes must agree.
pub const fn majority(nodes: usize) -> usize {
    nodes / 2 + 1
}

/// The highest proposal. Scripts count in doubles, which are exact below 2^53; a clock reaches this
/// in the year 2112. What is written back goes above it, one by one.
pub const MAX_PROPOSAL: u64 = 1 << 52;

/// What a client proposes: not below its clock in microseconds, above all that it has seen.
pub fn proposal(clock: u64, seen: u64) -> u64 {
    clock.max(seen.saturating_add(1)).clamp(1, MAX_PROPOSAL)
}

/// What one node answers to an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Answer {
    /// Its key is this attempt's.
    Granted {
        /// Whether it stored the proposal.
        stored: bool,
        /// The last token that it remembers for the name: the proposal, if it stored that.
        last: u64,
    },
    /// Its key is somebody else's.
    Refused,
    /// It does not vote: it has forgotten what it knew.
    Abstained,
    /// It did not answer in time, or not at all.
    Silent,
}

/// What a round has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// More answers are needed.
    Open,
    /// A majority stored this token.
    Token(u64),
    /// A majority took the attempt, but this token must be stored by a majority first.
    WriteBack(u64),
    /// There is no majority for it.
    Failed,
}

/// One attempt of one client, while the answers come in.
#[derive(Clone, Debug)]
pub struct Round {
    proposal: u64,
    answers: Vec<Option<Answer>>,
}

impl Round {
    /// A round that asks so many nodes.
    pub fn new(nodes: usize, proposal: u64) -> Self {
        Self { proposal, answers: vec![None; nodes] }
    }

    /// Takes in an answer of this round. A node's first word counts.
    pub fn hear(&mut self, node: usize, answer: Answer) {
        if let Some(slot) = self.answers.get_mut(node) {
            slot.get_or_insert(answer);
        }
    }

    /// The answers so far, by node.
    pub fn answers(&self) -> &[Option<Answer>] {
        &self.answers
    }

    /// Whether every node was heard, or given up.
    pub fn is_complete(&self) -> bool {
        self.answers.iter().all(Option::is_some)
    }

    fn count(&self, which: impl Fn(&Answer) -> bool) -> usize {
        self.answers.iter().flatten().filter(|a| which(a)).count()
    }

    /// What the answers so far come to.
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

    /// What may be written back already, for who does not want to wait for the last answers: a
    /// majority took the attempt.
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

/// Votes on a question of yes or no: a write-back, an extension, a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tally {
    nodes: usize,
    yes: usize,
    no: usize,
    silent: usize,
}

impl Tally {
    /// Nobody has answered yet.
    pub const fn new(nodes: usize) -> Self {
        Self { nodes, yes: 0, no: 0, silent: 0 }
    }

    /// One more node has answered, or (`None`) will not.
    pub fn count(&mut self, vote: Option<bool>) {
        match vote {
            Some(true) => self.yes += 1,
            Some(false) => self.no += 1,
            None => self.silent += 1,
        }
    }

    /// A majority said yes.
    pub const fn passed(&self) -> bool {
        self.yes >= majority(self.nodes)
    }

    /// So many said no that no majority can say yes, whatever the silent ones know.
    pub const fn denied(&self) -> bool {
        self.nodes - self.no < majority(self.nodes)
    }

    /// Whether every node was heard, or given up.
    pub const fn is_complete(&self) -> bool {
        self.yes + self.no + self.silent >= self.nodes
    }

    /// How many said anything at all.
    pub const fn heard(&self) -> usize {
        self.yes + self.no
    }
}

/// What a grant of `lease` is still good for when `elapsed` has passed since before its first
/// request was sent; zero: nothing, it must be given back. `drift` is what two clocks may differ by
/// over the lease.
pub fn validity(lease: Duration, elapsed: Duration, drift: Duration) -> Duration {
    lease.saturating_sub(elapsed).saturating_sub(drift)
}

/// What a node that has forgotten is told: the highest token that any node may have stored. `known`
/// has for every node what it remembers, if it remembers; `clocks` are the client's and the
/// nodes', used only if fewer than a majority remember. `None`: too few have answered to tell.
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

/// What a node knows of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Known {
    /// It has never forgotten anything below this, the highest token that it stored for any name.
    Remembers(u64),
    /// It has restarted, or is new: this is what is left, perhaps nothing.
    Forgot(u64),
    /// It does not answer.
    Silent,
}

/// Who a node's key belongs to: the claim, and which of its attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attempt {
    /// The claim.
    pub claim: u128,
    /// The number of the attempt, rising.
    pub number: u64,
}

/// What a node keeps for one name, and its rule: what the scripts do, without Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node {
    /// Whose the key is, and until when.
    pub key: Option<(Attempt, u64)>,
    /// The last token of the name, as its record has it: gone when the record is.
    pub last: Option<u64>,
    /// The highest token that it stored for any name, or was told.
    pub highest: u64,
    /// Whether it remembers, and so votes.
    pub remembers: bool,
}

impl Node {
    /// A node that knows of nobody, and remembers that.
    pub const fn new() -> Self {
        Self { key: None, last: None, highest: 0, remembers: true }
    }

    /// Lets the key expire.
    pub fn settle(&mut self, now: u64) {
        self.key = self.key.filter(|(_, until)| *until > now);
    }

    /// What the next token must be above. Where the record is gone, whatever took it away, nothing
    /// below the highest token of all names is certain to be new.
    pub fn floor(&self) -> u64 {
        self.last.unwrap_or(self.highest)
    }

    /// Is told what it forgot, and votes again.
    pub fn recollect(&mut self, token: u64) {
        self.last = self.last.map(|last| last.max(token));
        self.highest = self.highest.max(token);
        self.remembers = true;
    }

    /// The attempt, until `until`. A later attempt of the same claim takes the key of an earlier one
    /// over; a late earlier one gets nothing.
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

    /// Stores a token that is written back; tells whether it did.
    pub fn write_back(&mut self, attempt: Attempt, token: u64) -> bool {
        let ours = self.key.is_some_and(|(at, _)| at == attempt);
        let stores = ours && token > self.floor();
        if stores {
            self.last = Some(token);
            self.highest = self.highest.max(token);
        }
        stores
    }

    /// Extends the key, never shortens it. Tells whether the key is the attempt's; what is gone is
    /// not taken anew.
    pub fn extend(&mut self, attempt: Attempt, until: u64) -> bool {
        let Some((_, before)) = self.key.filter(|(at, _)| *at == attempt) else { return false };
        self.key = Some((attempt, until.max(before)));
        true
    }

    /// Sets a key that this node has lost, of an attempt that a majority has just extended.
    pub fn heal(&mut self, attempt: Attempt, until: u64) {
        self.key.get_or_insert((attempt, until));
    }

    /// Removes the key of this attempt, or of an earlier one of the claim.
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
