//! Taking: one attempt asks all nodes at once and counts.
//!
//! - *A node is slow*: after its time it counts as silent. What was sent to it goes on its way, and a
//!   vote that it gives later is one more vote, or is released with the others: a release follows the
//!   request on the same connection. What was *not* sent yet (the node was being met, or did not know
//!   the script) when the attempt is over or the claim was given up is not sent any more: it would
//!   come after the release.
//! - *No majority*: what was got is released on every node that may have given it, at once, so that
//!   those who were faster find a majority.
//! - *Two meet* and each gets some nodes: both release. Who has waited longest, as the nodes tell
//!   it, tries again at once, after times at random that grow; the others step back.
//! - *The caller is dropped* while we ask: the attempt goes on in its own task, and gives back what
//!   it got if the claim was given up meanwhile.
//! - *We die*: each vote ends with its lease.

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

/// For how long what was sent to a slow node is followed.
pub(super) const LATE: Duration = Duration::from_millis(1_500);

/// What an attempt came to.
#[derive(Debug)]
pub(super) enum Outcome {
    Held {
        token: Token,
        value: String,
        start: Moment,
    },
    Busy(Busy),
    /// Too few nodes can vote; or the grant came too late.
    Failed(Error),
}

/// Others have it.
#[derive(Debug)]
pub(super) struct Busy {
    pub(super) holders: Vec<HolderInfo>,
    /// One holder has a majority, and not several some nodes each.
    pub(super) decided: bool,
    pub(super) ahead: usize,
    pub(super) head_remaining: Option<Duration>,
    /// How long it took to find out.
    pub(super) took: Duration,
}

/// One node's vote.
#[derive(Debug)]
enum Vote {
    Granted { stored: bool, last: u64 },
    Busy(Other),
}

impl Vote {
    /// What a node answers to a ballot with this proposal.
    fn read(answer: &mut Elements, proposal: u64) -> Result<Self, Trouble> {
        let vote = match answer.text().as_deref() {
            Some("forgot") => return Err(Trouble::Forgot),
            Some("stored") => Some(Self::Granted { stored: true, last: proposal }),
            Some("granted") => {
                let said = answer.natural().zip(answer.natural());
                said.map(|(stored, last)| Self::Granted { stored: stored == 1, last })
            }
            Some("busy") => Other::read(answer).map(Self::Busy),
            _ => None,
        };
        vote.ok_or(Trouble::Strange)
    }
}

/// Whom a node has given its vote to.
#[derive(Debug)]
struct Other {
    value: String,
    /// `None`: it never ends by itself.
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

/// How the answers of all nodes come in: each node's first word.
pub(super) type Answers<T> = mpsc::UnboundedReceiver<(usize, Result<T, Trouble>)>;

impl Shared {
    /// Asks every node at once, each with `limit` to answer. What is not answered by then goes on
    /// for `late` longer: a request that was not sent yet would be missing from the votes, or from
    /// the releases. One task asks them all, with one timer: each costs as much as a request.
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
            let hear = |i, answer| drop(sender.send((i, answer)));
            if tokio::time::timeout(limit, all(&mut asked, hear)).await.is_ok() {
                return;
            }
            for (i, _) in asked.iter().enumerate().filter(|(_, work)| work.is_some()) {
                hear(i, Err(Trouble::Slow(limit)));
            }
            drop(tokio::time::timeout(late, all(&mut asked, |_, _| ())).await);
        });
        answers
    }

    /// Another name of the same server, earlier in the URL.
    pub(super) fn twin_of(&self, node: usize) -> Option<Trouble> {
        let run = self.nodes.get(node)?.run()?;
        let twin =
            self.nodes.iter().take(node).find(|n| n.run().is_some_and(|r| r.id == run.id))?;
        Some(Trouble::Twin(twin.address().clone()))
    }

    /// Makes one attempt; `waits` puts the claim among those who are told when a node is free.
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
            // A majority has it, but some with a token of their own: the rest may settle it if they
            // answer as fast.
            let elapsed = self.claims.now().since(start);
            let answer = match round.write_back() {
                None => answers.recv().await,
                Some(token) => match tokio::time::timeout(elapsed, answers.recv()).await {
                    Ok(answer) => answer,
                    Err(_) => break Decision::WriteBack(token),
                },
            };
            let Some((i, answer)) = answer else { break Decision::Failed };
            round.hear(i, self.heard(entry, i, answer, &mut others, &mut troubles));
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

    /// What a node's answer is for the round; what else it says is noted.
    fn heard(
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
                    self.tell_later(node);
                }
                troubles.push((node, trouble));
                if abstains { Answer::Abstained } else { Answer::Silent }
            }
        }
    }

    /// What an attempt came to that is not held.
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
            // Whom most nodes know under a token knows best.
            *holder = holder.max_by_token(other.holder.as_ref());
        }
        let most = votes.values().max_by_key(|(count, _)| *count);
        let decided = most.is_some_and(|(count, _)| *count >= needed);
        let holders = most.and_then(|(_, holder)| holder.cloned()).into_iter().collect();
        let ahead = busy.iter().map(|other| other.rank).max().unwrap_or(0) + 1;
        // When so many of them have ended that, with those that are free, a majority is.
        let missing = needed.saturating_sub(granted + 1);
        let head_remaining = busy.get(missing).and_then(|o| o.left).filter(|_| ahead == 1);
        Outcome::Busy(Busy { holders, decided, ahead, head_remaining, took })
    }

    fn too_few(&self, granted: usize, busy: usize, mut troubles: Vec<(usize, Trouble)>) -> Error {
        let needed = majority(self.nodes.len());
        let heard = granted + busy;
        // Those that were not waited for, but are known to have no vote yet.
        let now = self.claims.now();
        for (i, node) in self.nodes.iter().enumerate() {
            let left = node.run().map(|run| run.votes_from().since(now)).unwrap_or_default();
            if !left.is_zero() && troubles.iter().all(|(other, _)| *other != i) {
                troubles.push((i, Trouble::Young(left)));
            }
        }
        let mut young: Vec<Duration> = troubles.iter().filter_map(|(_, t)| t.votes_in()).collect();
        young.sort_unstable();
        // Without so many of them there is no majority, whoever else comes back.
        let without = needed.saturating_sub(self.nodes.len() - young.len());
        let again = match without.checked_sub(1) {
            Some(last) => young.get(last).copied(),
            // The others may come back before; if they do not, these will do.
            None => (heard + young.len() >= needed).then_some(Duration::ZERO),
        };
        let what = format!(
            "{granted} of {} servers voted for this client, {needed} are needed",
            self.nodes.len()
        );
        let error = self.in_trouble(what, &troubles);
        match again {
            Some(again) => error.not_before(again),
            None => error,
        }
    }

    /// An error because of some nodes. Each problem is listed once, and the first with a hint gives
    /// the error its hint.
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
        if listed.is_empty() { error } else { error.because(listed.join("; ")) }
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

    /// Has a majority store this token; tells which token that is in the end.
    async fn write_back(
        self: &Arc<Self>,
        claim: &Claim,
        entry: &Entry,
        value: &str,
        mut token: u64,
    ) -> Option<u64> {
        // A second time if a node remembers more than it told: it lost the name's record between.
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

/// Waits for all that is asked; what was answered is no more in its slot.
async fn all<F: Future>(asked: &mut [Option<Pin<Box<F>>>], mut hear: impl FnMut(usize, F::Output)) {
    poll_fn(|context| {
        for (i, slot) in asked.iter_mut().enumerate() {
            if let Some(work) = slot
                && let Poll::Ready(answer) = work.as_mut().poll(context)
            {
                *slot = None;
                hear(i, answer);
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

/// What all nodes are asked in an attempt.
#[derive(Debug)]
struct Ballot {
    keys: [String; 5],
    claim: String,
    number: u64,
    lease: u64,
    proposal: u64,
    holder: String,
    /// For how long it has waited, and for how much longer it counts as alive, in milliseconds.
    waits: Option<(u64, u64)>,
    entry: Arc<Entry>,
    over: AtomicBool,
}

impl Ballot {
    /// What it gets now would not be released any more.
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

/// How one who waits is written down: read again by the scripts and by [`super::inspect`].
pub(super) fn waiter(claim: &str, channel: &str, holder: &str) -> String {
    format!("{claim} {channel} {holder}")
}

/// Rounded up: a lease at the node is never shorter than ours.
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
        fn a_vote_from_outside_is_read_or_refused(answer in values(&[
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
