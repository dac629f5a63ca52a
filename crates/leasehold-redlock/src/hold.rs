//! Extensions, restored keys and releases of held locks.
//!
//! - *An extension* needs a majority of nodes that still have the key. With fewer nodes the old
//!   validity remains, the nodes that extended the key keep the extension, and the client retries
//!   (scenario 31). The lock is lost once the nodes that may still have the key are fewer than a
//!   majority.
//! - *Nodes that have lost the key* get it again once a majority has extended it, so that the
//!   holder has all nodes again before the next failure. (They restarted, or were unreachable when
//!   the lock was acquired.) The renewal does not wait for them, but their replies are still
//!   processed. Otherwise a node that always replies last would never get the key.
//! - *A release* is always sent to all nodes, even after a vote that seemed to fail. It is repeated
//!   for each node that does not reply, until the lease there has expired. The first release to
//!   each server contains the script, so that one message is sufficient. The caller continues when
//!   a majority has replied. A client that disconnects then ([`Store::disconnect`]) waits a short
//!   time for the rest.
//!
//! [`Store::disconnect`]: leasehold_core::store::Store::disconnect

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};

use super::attempt::{Answers, LATE, millis, waiter};
use super::claims::{Entry, Held};
use super::node::Trouble;
use super::round::{Tally, majority};
use super::shared::Shared;
use leasehold_core::kit::drift;
use leasehold_core::store::{Renew, Renewal};
use leasehold_core::{Claim, ClaimId, ErrorKind, Moment, Result};

/// One hold to be extended.
#[derive(Clone, Debug)]
pub(super) struct Hold {
    pub(super) claim: Claim,
    pub(super) lease: Duration,
    pub(super) entry: Arc<Entry>,
    pub(super) held: Held,
}

/// State of a key on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Ours,
    Free,
    Others,
}

/// Replies about one hold.
#[derive(Clone, Debug)]
struct Count {
    tally: Tally,
    /// Nodes that have lost the hold's key.
    free: Vec<usize>,
}

impl Count {
    fn new(nodes: usize) -> Self {
        Self { tally: Tally::new(nodes), free: Vec::new() }
    }

    fn add_answer(&mut self, node: usize, key: Option<Key>) {
        self.tally.count(key.map(|key| key == Key::Ours));
        if key == Some(Key::Free) {
            self.free.push(node);
        }
    }
}

/// Time by which each call in a batch extends the time limit of a node.
const EACH: Duration = Duration::from_micros(200);
/// Delay before an unanswered release is sent again.
const AGAIN: Duration = Duration::from_millis(200);

impl Shared {
    /// Extends many holds with one pipeline to each node.
    ///
    /// # Errors
    /// - [`ErrorKind::Unreachable`]: the result is unknown for every hold.
    ///
    /// If the result is known for some holds, the others are returned with their remaining
    /// validity.
    pub(super) async fn extend(self: &Arc<Self>, holds: Vec<Hold>) -> Result<Vec<Renewal>> {
        let sent = self.claims.now();
        let many = u32::try_from(holds.len()).unwrap_or(u32::MAX);
        let limit = self.node_timeout.saturating_add(EACH.saturating_mul(many));
        let call = |hold: &Hold| {
            let keys = self.keys(&hold.claim.name);
            let mut call = self.scripts.extend.call(2);
            call.arg(&keys[..2]).arg(&hold.held.value).arg(millis(hold.lease));
            call
        };
        let calls: Arc<[Cmd]> = holds.iter().map(call).collect();
        let mut answers = self.ask_each(limit, LATE, |i| {
            let (shared, calls) = (self.clone(), calls.clone());
            async move {
                let answers = shared.nodes[i].ask_all(&shared.scripts.extend, &calls).await?;
                let keys = answers.into_iter().map(|answer| match answer {
                    Value::Int(1) => Some(Key::Ours),
                    Value::Int(0) => Some(Key::Free),
                    Value::Int(_) => Some(Key::Others),
                    _ => None,
                });
                Ok::<_, Trouble>(keys.collect::<Vec<_>>())
            }
        });
        let mut counts = vec![Count::new(self.nodes.len()); holds.len()];
        let mut troubles = Vec::new();
        while let Some((i, answer)) = answers.recv().await {
            let keys = match answer {
                Ok(keys) => keys,
                Err(trouble) => {
                    troubles.push((i, trouble));
                    vec![None; holds.len()]
                }
            };
            counts.iter_mut().zip(keys).for_each(|(count, key)| count.add_answer(i, key));
            if counts.iter().all(|count| count.tally.passed() || count.tally.denied()) {
                break;
            }
        }
        if !counts.iter().any(|count| count.tally.passed() || count.tally.denied()) {
            let what = format!(
                "fewer than {} of {} servers renewed the lease; the lock is held until its \
                 current lease expires",
                majority(self.nodes.len()),
                self.nodes.len()
            );
            return Err(self.in_trouble(what, &troubles).with_kind(ErrorKind::Unreachable));
        }
        let extended = |(hold, count)| self.extended(hold, count, sent);
        let renewals = holds.iter().zip(&counts).map(extended).collect();
        self.heal_the_last(holds, counts, answers);
        Ok(renewals)
    }

    /// Restores keys on the nodes that reply after the result was decided.
    fn heal_the_last(
        self: &Arc<Self>,
        holds: Vec<Hold>,
        counts: Vec<Count>,
        mut answers: Answers<Vec<Option<Key>>>,
    ) {
        let shared = self.clone();
        self.runtime.spawn(async move {
            while let Some((i, answer)) = answers.recv().await {
                for ((hold, count), key) in
                    holds.iter().zip(&counts).zip(answer.unwrap_or_default())
                {
                    if count.tally.passed() && key == Some(Key::Free) {
                        shared.heal(hold, i);
                    }
                }
            }
        });
    }

    fn extended(self: &Arc<Self>, hold: &Hold, count: &Count, sent: Moment) -> Renewal {
        let token = hold.held.token;
        if count.tally.denied() {
            hold.entry.hold(None);
            self.claims.leave(hold.claim.id);
            self.release_some(&hold.claim, u64::MAX, |_| true);
            return Renewal::Lost;
        }
        let remaining = match count.tally.passed() {
            true => {
                hold.entry.extended(sent.plus(hold.lease));
                count.free.iter().for_each(|i| self.heal(hold, *i));
                hold.lease
            }
            false => hold.held.until.since(sent),
        };
        Renewal::Holding { token, remaining: Some(remaining) }
    }

    /// Sets the key again on a node where it is missing, if the lock is still held. Runs in the
    /// background.
    fn heal(self: &Arc<Self>, hold: &Hold, node: usize) {
        let now = self.claims.now();
        if hold.entry.held().is_none_or(|held| held.until <= now) || hold.entry.has_left() {
            return;
        }
        let keys = self.keys(&hold.claim.name);
        let mut call = self.scripts.heal.call(2);
        let holder = serde_json::to_string(&*hold.claim.holder).unwrap_or_default();
        call.arg(&keys[..2]).arg(&hold.held.value).arg(millis(hold.lease));
        call.arg(hold.held.token.get()).arg(holder);
        let (shared, entry, claim) = (self.clone(), hold.entry.clone(), hold.claim.clone());
        self.runtime.spawn(async move {
            let asked = shared.nodes[node].ask(&shared.scripts.heal, &call);
            let _ = tokio::time::timeout(LATE, asked).await;
            // The lock was released meanwhile, so this key must be released as well.
            if entry.has_left() {
                shared.release_some(&claim, u64::MAX, |i| i == node);
            }
        });
    }

    /// Removes the claim's key and its registration as a waiter on all nodes. Returns whether the
    /// claim held the lock or waited.
    pub(super) async fn leave(self: &Arc<Self>, claim: &Claim) -> Result<bool> {
        let entry = self.claims.leave(claim.id);
        let entry = entry.as_deref();
        let waited = entry.filter(|entry| entry.waits.load(std::sync::atomic::Ordering::SeqCst));
        let waited = waited.is_some_and(|entry| entry.held().is_none());
        let released = Released::new(self, claim);
        let mut answers = self.ask_each(self.node_timeout, claim.lease, |i| {
            let call = self.release_call(&released, u64::MAX, i, entry.is_some());
            self.clone().release_at(i, call, claim.lease)
        });
        let mut tally = Tally::new(self.nodes.len());
        let mut troubles = Vec::new();
        while let Some((i, answer)) = answers.recv().await {
            tally.count(answer.map_err(|trouble| troubles.push((i, trouble))).ok());
            if tally.passed() {
                return Ok(true);
            }
            if tally.denied() {
                return Ok(waited);
            }
        }
        if tally.answer_count() < majority(self.nodes.len()) {
            let what = "too few servers confirmed the release; the lock will be free when its \
                        lease expires";
            return Err(self.in_trouble(what.into(), &troubles).with_kind(ErrorKind::Unreachable));
        }
        // The result is unclear, because silent nodes may have had the key.
        Ok(true)
    }

    /// Releases the claim's attempts up to the number `up_to` on the nodes that `which` selects.
    /// Runs in the background.
    pub(super) fn release_some(
        self: &Arc<Self>,
        claim: &Claim,
        up_to: u64,
        which: impl Fn(usize) -> bool,
    ) {
        self.release_on(claim, up_to, false, which);
    }

    /// Removes the registration of a claim that was refused permanently, and releases votes that
    /// nodes may still give it. Runs in the background.
    pub(super) fn withdraw(self: &Arc<Self>, claim: &Claim) {
        self.release_on(claim, u64::MAX, true, |_| true);
    }

    fn release_on(
        self: &Arc<Self>,
        claim: &Claim,
        up_to: u64,
        waits: bool,
        which: impl Fn(usize) -> bool,
    ) {
        let released = Released::new(self, claim);
        for i in (0..self.nodes.len()).filter(|i| which(*i)) {
            let call = self.release_call(&released, up_to, i, waits);
            let release = self.clone().release_at(i, call, claim.lease);
            self.runtime.spawn(async move { drop(release.await) });
        }
    }

    /// Returns the call that releases the claim on one node. With `waits` it also removes the
    /// claim's registration as a waiter.
    fn release_call(&self, released: &Released, up_to: u64, node: usize, waits: bool) -> Cmd {
        let Released { keys, id, holder } = released;
        let mut call = self.scripts.release.call(4);
        call.arg(&[&keys[0], &keys[1], &keys[3], &keys[4]]).arg(id);
        // Lua counts exactly only up to 2^53.
        call.arg(up_to.min(1 << 52));
        if waits {
            call.arg(waiter(id, &self.nodes[node].channel(), holder));
        }
        call
    }

    /// Releases the claim on one node. An unanswered release is queued for repetition.
    fn release_at(
        self: Arc<Self>,
        i: usize,
        call: Cmd,
        lease: Duration,
    ) -> impl Future<Output = Result<bool, Trouble>> + Send + 'static {
        let until = self.claims.now().plus(lease + drift(lease));
        // The count begins now, not when the returned future is first polled.
        let under_way = UnderWay::begin(&self.releases);
        async move {
            let _under_way = under_way;
            match self.release_once(i, &call).await {
                Err(Trouble::Strange) => Err(Trouble::Strange),
                Err(trouble) => {
                    self.queue_release(i, call, until);
                    Err(trouble)
                }
                released => released,
            }
        }
    }

    /// Waits until every release in progress has been tried at least once. Waits for an
    /// unresponsive server no longer than `patient`.
    pub(super) async fn all_released(&self) {
        let mut releases = self.releases.subscribe();
        let none = releases.wait_for(|count| *count == 0);
        let _ = tokio::time::timeout(self.patient(), none).await;
    }

    async fn release_once(&self, i: usize, call: &Cmd) -> Result<bool, Trouble> {
        let released = self.nodes[i].release(&self.scripts.release, call);
        match tokio::time::timeout(LATE, released).await {
            Ok(answer) => answer?.natural().map(|n| n == 1).ok_or(Trouble::Strange),
            Err(_) => Err(Trouble::Slow(LATE)),
        }
    }

    /// Sends a release again until the node replies or the lease there has expired. One task per
    /// node handles all its queued releases.
    fn queue_release(self: &Arc<Self>, i: usize, call: Cmd, until: Moment) {
        if !self.nodes[i].queue_release(call, until) {
            return;
        }
        let shared = self.clone();
        self.runtime.spawn(async move {
            let node = &shared.nodes[i];
            let mut pause = AGAIN;
            loop {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(AGAIN * 10);
                while let Some(call) = node.next_release(shared.claims.now()) {
                    match shared.release_once(i, &call).await {
                        Ok(_) | Err(Trouble::Strange) => node.release_answered(),
                        Err(_) => break,
                    }
                    pause = AGAIN;
                }
                if node.is_release_queue_empty() {
                    return;
                }
            }
        });
    }
}

/// Arguments of a release for all nodes.
struct Released {
    keys: [String; 5],
    id: String,
    holder: String,
}

impl Released {
    fn new(shared: &Shared, claim: &Claim) -> Self {
        let holder = serde_json::to_string(&*claim.holder).unwrap_or_default();
        Self { keys: shared.keys(&claim.name), id: claim.id.to_hex(), holder }
    }
}

/// Guard that counts a release as long as it is in progress.
struct UnderWay(tokio::sync::watch::Sender<usize>);

impl UnderWay {
    fn begin(count: &tokio::sync::watch::Sender<usize>) -> Self {
        count.send_modify(|count| *count += 1);
        Self(count.clone())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// One waiting claim.
#[derive(Debug)]
pub(super) struct Wait {
    pub(super) claim: Claim,
    pub(super) entry: Arc<Entry>,
}

/// Separates renewals of holders from those of waiters. Unknown claims are in neither result.
pub(super) fn sorted(
    renewals: &[Renew],
    find: impl Fn(ClaimId) -> Option<Arc<Entry>>,
) -> (Vec<Hold>, Vec<Wait>) {
    let (mut holds, mut waits) = (Vec::new(), Vec::new());
    for Renew { claim, lease } in renewals {
        let Some(entry) = find(claim.id) else { continue };
        let claim = claim.clone();
        match entry.held() {
            Some(held) => holds.push(Hold { claim, lease: *lease, entry, held }),
            None => waits.push(Wait { claim, entry }),
        }
    }
    (holds, waits)
}
