//! Acquisition: one attempt sends a request to all nodes at once and counts the votes.
//!
//! - *A node is slow.* After its time limit it counts as silent. A request that was sent still
//!   reaches it. Its late vote counts as an additional vote, or is released with the others,
//!   because the release follows the request on the same connection. A request that was *not* sent
//!   yet when the attempt ended or the claim was given up is never sent, because it would arrive
//!   after the release. (The client was still connecting, or the node did not know the script.)
//! - *A connection is given up* while the network delays a request on it. The release uses a new
//!   connection and can overtake that request. The late vote is never counted, because the attempt
//!   is over. It occupies its node until its lease expires there.
//! - *There is no majority.* The votes are released immediately on every node that may have given
//!   one, so that faster clients find a majority.
//! - *Two attempts collide* and each gets some nodes. Both release them. The client that has waited
//!   longest according to the nodes retries soon, after random and growing pauses. The others back
//!   off.
//! - *The caller's future is dropped* during the requests. The attempt continues in its own task,
//!   and releases what it acquired if the claim was given up meanwhile.
//! - *The client crashes.* Each vote expires with its lease.

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::mpsc;

use super::claims::Entry;
use super::node::{Problem, Trouble};
use super::round::{self, Answer, Decision, Round, Tally, majority};
use super::scripts::{self, Elements};
use super::shared::Shared;
use leasehold_core::kit::{drift, wall_micros};
use leasehold_core::{Claim, Error, ErrorKind, Holder, HolderInfo, Moment, Token};

/// Additional time for which a request to a slow node continues.
pub(super) const LATE: Duration = Duration::from_millis(1_500);

/// Result of an attempt.
#[derive(Debug)]
pub(super) enum Outcome {
    Held {
        token: Token,
        value: String,
        start: Moment,
    },
    Busy(Busy),
    /// Too few nodes can vote, or the grant came too late.
    Failed(Error),
}

/// State of a lock that other claims hold.
#[derive(Debug)]
pub(super) struct Busy {
    pub(super) holders: Vec<HolderInfo>,
    /// Whether one holder has a majority, rather than several claims with some nodes each.
    pub(super) decided: bool,
    pub(super) ahead: usize,
    pub(super) head_remaining: Option<Duration>,
    /// Duration of the attempt.
    pub(super) took: Duration,
}

/// Vote of one node.
#[derive(Debug)]
enum Vote {
    Granted { stored: bool, last: u64 },
    Busy(Other),
}

impl Vote {
    /// Parses a node's reply to a ballot with this proposal.
    fn read(answer: &mut Elements, proposal: u64) -> Result<Self, Trouble> {
        let vote = match answer.text().as_deref() {
            Some("forgot") => return Err(Trouble::Forgot),
            Some("stored") => Some(Self::Granted { stored: true, last: proposal }),
            Some("granted") => {
                let numbers = answer.natural().zip(answer.natural());
                numbers.map(|(stored, last)| Self::Granted { stored: stored == 1, last })
            }
            Some("busy") => Other::read(answer).map(Self::Busy),
            _ => None,
        };
        vote.ok_or(Trouble::Strange)
    }
}

/// Claim to which a node has given its vote.
#[derive(Debug)]
struct Other {
    value: String,
    /// Remaining time of the key, or `None` if it never expires.
    left: Option<Duration>,
    rank: usize,
    last: u64,
    holder: Option<HolderInfo>,
}

impl Other {
    fn read(answer: &mut Elements) -> Option<Self> {
        let value = answer.text()?;
        let left = u64::try_from(answer.number()?).ok().map(Duration::from_millis);
        let rank = usize::try_from(answer.natural()?).ok()?;
        let (last, token) = (answer.natural()?, answer.natural()?);
        let holder: Option<Holder> = serde_json::from_str(&answer.text()?).ok();
        let since = Duration::from_millis(answer.natural()?);
        let holder = holder.zip(Token::new(token));
        let holder = holder.map(|(holder, token)| HolderInfo::new(holder, token, since));
        Some(Self { value, left, rank, last, holder })
    }
}

/// Receiver of the nodes' results, which gets one result per node.
pub(super) type Answers<T> = mpsc::UnboundedReceiver<(usize, Result<T, Trouble>)>;

impl Shared {
    /// Sends a request to every node at once. Each node has `limit` to reply.
    ///
    /// Requests without a reply continue for `late` longer. If a request that was not sent yet were
    /// dropped, its vote or release would be missing. One task with one timer handles all nodes,
    /// because a task costs as much as a request.
    pub(super) fn ask_each<T, F>(
        &self,
        limit: Duration,
        late: Duration,
        ask: impl Fn(usize) -> F,
    ) -> Answers<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Trouble>> + Send + 'static,
    {
        let (sender, answers) = mpsc::unbounded_channel();
        let mut asked: Vec<_> = (0..self.nodes.len()).map(|i| Some(Box::pin(ask(i)))).collect();
        self.runtime.spawn(async move {
            let on_answer = |i, answer| drop(sender.send((i, answer)));
            if tokio::time::timeout(limit, all(&mut asked, on_answer)).await.is_ok() {
                return;
            }
            for (i, _) in asked.iter().enumerate().filter(|(_, work)| work.is_some()) {
                on_answer(i, Err(Trouble::Slow(limit)));
            }
            drop(tokio::time::timeout(late, all(&mut asked, |_, _| ())).await);
        });
        answers
    }

    /// Returns an earlier address in the URL that leads to the same server.
    pub(super) fn twin_of(&self, node: usize) -> Option<Trouble> {
        let run = self.nodes.get(node)?.run()?;
        let twin =
            self.nodes.iter().take(node).find(|n| n.run().is_some_and(|r| r.id == run.id))?;
        Some(Trouble::Twin(twin.address().clone()))
    }

    /// Makes one attempt. `waits` registers the claim as a waiter that is notified when a node
    /// becomes free.
    pub(super) async fn attempt(
        self: &Arc<Self>,
        claim: &Claim,
        entry: &Arc<Entry>,
        waits: bool,
    ) -> Outcome {
        let number = entry.next_attempt();
        let value = format!("{}.{number}", claim.id.to_hex());
        let proposal = round::proposal(wall_micros(), claim.seen.max(entry.seen()));
        let start = self.claims.now();
        let ballot = Arc::new(self.ballot(claim, entry, number, proposal, waits));
        let mut answers = self.ask_each(self.node_timeout, LATE, |i| {
            let (shared, ballot) = (self.clone(), ballot.clone());
            async move { shared.vote(i, &ballot).await }
        });
        let mut round = Round::new(self.nodes.len(), proposal);
        let mut others: Vec<Option<Other>> = self.nodes.iter().map(|_| None).collect();
        let mut troubles = Vec::new();
        let decision = loop {
            match round.decision() {
                Decision::Open => {}
                decided => break decided,
            }
            // A majority has accepted the attempt, but some of these nodes know a higher token. The
            // other nodes get as much time again, because their votes may make a write-back
            // unnecessary.
            let elapsed = self.claims.now().since(start);
            let answer = match round.write_back() {
                None => answers.recv().await,
                Some(token) => match tokio::time::timeout(elapsed, answers.recv()).await {
                    Ok(answer) => answer,
                    Err(_) => break Decision::WriteBack(token),
                },
            };
            let Some((i, answer)) = answer else { break Decision::Failed };
            round.add_answer(i, self.read_answer(entry, i, answer, &mut others, &mut troubles));
        };
        let mut refused: Vec<bool> = others.iter().map(Option::is_some).collect();
        for (i, _) in troubles.iter().filter(|(_, trouble)| trouble.undone()) {
            refused[*i] = true;
        }
        let token = match decision {
            Decision::Token(token) => Some(token),
            Decision::WriteBack(token) => self.write_back(claim, entry, &value, token).await,
            Decision::Open | Decision::Failed => None,
        };
        let elapsed = self.claims.now().since(start);
        let valid = !round::validity(claim.lease, elapsed, drift(claim.lease)).is_zero();
        match token.and_then(Token::new) {
            Some(token) if valid && !entry.has_left() => {
                return Outcome::Held { token, value, start };
            }
            _ => {
                ballot.over.store(true, Ordering::SeqCst);
                self.release_some(claim, number, |i| !refused[i]);
            }
        }
        if token.is_some() && !valid {
            let what = format!(
                "a majority granted the lock after {elapsed:?}, which is too late for a lease of \
                 {:?}, so it was released",
                claim.lease
            );
            let error = Error::new(ErrorKind::Unreachable, what).with_hint("use a longer lease");
            return Outcome::Failed(error);
        }
        self.not_held(round, others, troubles, elapsed)
    }

    /// Converts a node's reply to an answer for the round, and records its other information.
    fn read_answer(
        self: &Arc<Self>,
        entry: &Entry,
        node: usize,
        answer: Result<Vote, Trouble>,
        others: &mut [Option<Other>],
        troubles: &mut Vec<(usize, Trouble)>,
    ) -> Answer {
        match answer {
            Ok(Vote::Granted { stored, last }) => {
                entry.saw(last);
                Answer::Granted { stored, last }
            }
            Ok(Vote::Busy(other)) => {
                entry.saw(other.last);
                if let Some(slot) = others.get_mut(node) {
                    *slot = Some(other);
                }
                Answer::Refused
            }
            Err(trouble) => {
                let abstains = matches!(trouble, Trouble::Forgot);
                if abstains {
                    self.restore_later(node);
                }
                troubles.push((node, trouble));
                if abstains { Answer::Abstained } else { Answer::Silent }
            }
        }
    }

    /// Returns the outcome of an attempt that does not hold the lock.
    fn not_held(
        &self,
        round: Round,
        others: Vec<Option<Other>>,
        troubles: Vec<(usize, Trouble)>,
        took: Duration,
    ) -> Outcome {
        let needed = majority(self.nodes.len());
        let granted = round
            .answers()
            .iter()
            .flatten()
            .filter(|a| matches!(a, Answer::Granted { .. }))
            .count();
        let mut busy: Vec<Other> = others.into_iter().flatten().collect();
        let unheard = self.nodes.len() - granted - busy.len() - troubles.len();
        if granted + busy.len() + unheard < needed || busy.is_empty() {
            return Outcome::Failed(self.too_few(granted, busy.len(), troubles));
        }
        busy.sort_by_key(|other| other.left.unwrap_or(Duration::MAX));
        let lasting = busy.iter().filter(|other| other.left.is_none()).count();
        if self.nodes.len() - lasting < needed {
            let what = "the lock's key never expires, so it was not set by a Redlock client";
            let hint = "find the program that set it; then delete the key, or run `leasehold evict \
                        NAME`";
            return Outcome::Failed(Error::new(ErrorKind::Corrupt, what).with_hint(hint));
        }
        let mut votes: HashMap<&str, (usize, Option<&HolderInfo>)> = HashMap::new();
        for other in &busy {
            let (count, holder) = votes.entry(&other.value).or_default();
            *count += 1;
            // The holder that the nodes know with the highest token is the most reliable one.
            *holder = holder.max_by_token(other.holder.as_ref());
        }
        let most = votes.values().max_by_key(|(count, _)| *count);
        let decided = most.is_some_and(|(count, _)| *count >= needed);
        let holders = most.and_then(|(_, holder)| holder.cloned()).into_iter().collect();
        let ahead = busy.iter().map(|other| other.rank).max().unwrap_or(0) + 1;
        // The time after which enough keys have expired that, with the free nodes, a majority is
        // free.
        let missing = needed.saturating_sub(granted + 1);
        let head_remaining = busy.get(missing).and_then(|o| o.left).filter(|_| ahead == 1);
        Outcome::Busy(Busy { holders, decided, ahead, head_remaining, took })
    }

    fn too_few(&self, granted: usize, busy: usize, mut troubles: Vec<(usize, Trouble)>) -> Error {
        let needed = majority(self.nodes.len());
        let answered = granted + busy;
        // These nodes have not replied yet, but are known to have no vote.
        let now = self.claims.now();
        for (i, node) in self.nodes.iter().enumerate() {
            let left = node.run().map(|run| run.votes_from().since(now)).unwrap_or_default();
            if !left.is_zero() && troubles.iter().all(|(other, _)| *other != i) {
                troubles.push((i, Trouble::Young(left)));
            }
        }
        let mut young: Vec<Duration> = troubles.iter().filter_map(|(_, t)| t.votes_in()).collect();
        young.sort_unstable();
        // A majority needs at least this number of them, even if all other nodes come back.
        let without = needed.saturating_sub(self.nodes.len() - young.len());
        let again = match without.checked_sub(1) {
            Some(last) => young.get(last).copied(),
            // The other nodes would be sufficient, and may come back at any time. If they do not,
            // the young nodes are sufficient.
            None => (answered + young.len() >= needed).then_some(Duration::ZERO),
        };
        let what = format!(
            "{granted} of {} servers voted for this client, but it needs {needed} votes",
            self.nodes.len()
        );
        let error = self.in_trouble(what, &troubles);
        match again {
            Some(again) => error.with_retry_after(again),
            None => error,
        }
    }

    /// Builds an error about some nodes. Each problem is listed once, and the first hint becomes
    /// the hint of the error.
    pub(super) fn in_trouble(&self, what: String, troubles: &[(usize, Trouble)]) -> Error {
        let mut listed: Vec<(Problem, Vec<String>)> = Vec::new();
        // All nodes that do not vote yet are listed with the longest time of any of them.
        let longest = troubles.iter().filter_map(|(_, trouble)| trouble.votes_in()).max();
        for (i, trouble) in troubles {
            let problem = match (trouble.votes_in(), longest) {
                (Some(_), Some(longest)) => Trouble::Young(longest).problem(),
                _ => trouble.problem(),
            };
            let node = self.nodes[*i].address().to_string();
            match listed.iter_mut().find(|(other, _)| other.what == problem.what) {
                Some((_, nodes)) => nodes.push(node),
                None => listed.push((problem, vec![node])),
            }
        }
        let passing = listed.iter().any(|(problem, _)| problem.kind == ErrorKind::Unreachable);
        let kind = match listed.first() {
            Some((problem, _)) if !passing => problem.kind,
            _ => ErrorKind::Unreachable,
        };
        let mut error = Error::new(kind, what);
        if let Some(hint) = listed.iter().find_map(|(problem, _)| problem.hint.as_deref()) {
            error = error.with_hint(hint);
        }
        let listed: Vec<String> = listed
            .into_iter()
            .map(|(problem, nodes)| format!("{}: {}", nodes.join(", "), problem.what))
            .collect();
        if listed.is_empty() { error } else { error.with_source(listed.join("; ")) }
    }

    async fn vote(&self, node: usize, ballot: &Ballot) -> Result<Vote, Trouble> {
        let at = &self.nodes[node];
        at.met(false).await?;
        if let Some(twin) = self.twin_of(node) {
            return Err(twin);
        }
        let fill = |call| ballot.fill(call, &at.channel());
        let mut answer = at.take(fill, || ballot.is_over()).await?;
        let vote = Vote::read(&mut answer, ballot.proposal);
        if !matches!(vote, Err(Trouble::Forgot)) {
            at.has_voted();
        }
        vote
    }

    fn ballot(
        &self,
        claim: &Claim,
        entry: &Arc<Entry>,
        number: u64,
        proposal: u64,
        waits: bool,
    ) -> Ballot {
        Ballot {
            keys: self.keys(&claim.name),
            claim: claim.id.to_hex(),
            number,
            lease: millis(claim.lease),
            proposal,
            holder: serde_json::to_string(&*claim.holder).unwrap_or_default(),
            waits: waits.then(|| (entry.waited(), millis(claim.waiter_lease))),
            entry: entry.clone(),
            over: AtomicBool::new(false),
        }
    }

    /// Has a majority store this token, and returns the token that was finally stored, or `None` if
    /// there is no majority.
    async fn write_back(
        self: &Arc<Self>,
        claim: &Claim,
        entry: &Entry,
        value: &str,
        mut token: u64,
    ) -> Option<u64> {
        // The second round is needed if a node knows a higher token than it reported, because it
        // has lost the name's record since.
        for _ in 0..2 {
            let mut answers = self.ask_each(self.node_timeout, LATE, |i| {
                let (shared, keys) = (self.clone(), self.keys(&claim.name));
                let mut call = self.scripts.write_back.call(3);
                call.arg(&keys[..3]).arg(value).arg(token);
                async move {
                    let node = &shared.nodes[i];
                    let mut answer = node.ask(&shared.scripts.write_back, &call).await?;
                    match (answer.natural(), answer.natural()) {
                        (Some(stored), Some(last)) => Ok((stored == 1, last)),
                        _ => Err(Trouble::Strange),
                    }
                }
            });
            let mut tally = Tally::new(self.nodes.len());
            let mut highest = 0;
            while let Some((_, answer)) = answers.recv().await {
                if let Ok((_, last)) = &answer {
                    highest = highest.max(*last);
                }
                tally.count(answer.ok().map(|(stored, _)| stored));
                if tally.passed() {
                    entry.saw(token);
                    return Some(token);
                }
                if tally.denied() {
                    break;
                }
            }
            if highest < token {
                return None;
            }
            token = highest + 1;
        }
        None
    }
}

/// Waits for all requests. The slot of an answered request is emptied.
async fn all<F: Future>(
    asked: &mut [Option<Pin<Box<F>>>],
    mut on_answer: impl FnMut(usize, F::Output),
) {
    poll_fn(|context| {
        for (i, slot) in asked.iter_mut().enumerate() {
            if let Some(work) = slot
                && let Poll::Ready(answer) = work.as_mut().poll(context)
            {
                *slot = None;
                on_answer(i, answer);
            }
        }
        match asked.iter().all(Option::is_none) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
}

trait MaxByToken {
    fn max_by_token(self, other: Self) -> Self;
}

impl MaxByToken for Option<&HolderInfo> {
    fn max_by_token(self, other: Self) -> Self {
        std::cmp::max_by_key(self, other, |holder| holder.map(|h| h.token))
    }
}

/// Request that an attempt sends to all nodes.
#[derive(Debug)]
struct Ballot {
    keys: [String; 5],
    claim: String,
    number: u64,
    lease: u64,
    proposal: u64,
    holder: String,
    /// For a claim that waits: how long it has waited, and for how long from now it counts as
    /// alive, in milliseconds.
    waits: Option<(u64, u64)>,
    entry: Arc<Entry>,
    over: AtomicBool,
}

impl Ballot {
    /// Returns whether the attempt has failed, or the caller has given up the claim. A vote that is
    /// requested after that might never be released.
    fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst) || self.entry.has_left()
    }

    fn fill(&self, mut call: redis::Cmd, channel: &str) -> redis::Cmd {
        call.arg(&self.keys[..]).arg("take").arg(&self.claim).arg(self.number).arg(self.lease);
        call.arg(self.proposal).arg(&self.holder).arg(self.lease.saturating_add(scripts::MEMORY));
        if let Some((waited, alive)) = self.waits {
            call.arg(waiter(&self.claim, channel, &self.holder)).arg(waited).arg(alive);
        }
        call
    }
}

/// Returns the text that registers a waiter. The scripts and [`super::inspect`] parse it.
pub(super) fn waiter(claim: &str, channel: &str, holder: &str) -> String {
    format!("{claim} {channel} {holder}")
}

/// Converts a duration to milliseconds, rounded up so that the lease at the node is never shorter
/// than the client's.
pub(super) fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::values::values;

    proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_vote_is_parsed_or_refused(answer in values(&[
            "stored", "granted", "busy", "forgot", "0123456789abcdef.1", "",
            r#"{"host":"a","pid":1,"label":""}"#,
        ])) {
            let word = Elements::of(answer.clone()).text();
            match Vote::read(&mut Elements::of(answer), 7) {
                Ok(Vote::Granted { stored, last }) => {
                    prop_assert!(matches!(word.as_deref(), Some("stored" | "granted")));
                    prop_assert!(word.as_deref() != Some("stored") || (stored && last == 7));
                }
                Ok(Vote::Busy(_)) => prop_assert_eq!(word.as_deref(), Some("busy")),
                Err(trouble) => prop_assert_eq!(trouble.problem().what.lines().count(), 1),
            }
        }
    }
}
