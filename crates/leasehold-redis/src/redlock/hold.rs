//! Holding and leaving: extensions, keys set again, releases.
//!
//! - *An extension* needs a majority of nodes that still have the key. With less it changes nothing:
//!   the nodes that extended stay extended, the old validity stands, and it is asked again
//!   (scenario 31). If so many have lost the key that no majority can have it, the lock is lost.
//! - *Nodes that have lost the key* (they restarted, or were out of reach when it was taken) get it
//!   again once a majority was extended, so that the next failure finds all of them. Who renewed does
//!   not wait for them, and they are listened to all the same: a node that is always the last to
//!   answer would never get it otherwise.
//! - *A release* goes to all nodes, always, also where the vote seemed to fail, and is repeated for
//!   each that does not answer, until the lease is over there by itself. The first one to each server
//!   carries its script, so that one message is all that it needs. Who releases goes on when a
//!   majority has answered; a client that ends then ([`Store::disconnect`]) waits a little for the rest.
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

/// What one node says of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Ours,
    Free,
    Others,
}

/// What was heard of one hold.
#[derive(Clone, Debug)]
struct Count {
    tally: Tally,
    /// The nodes that have lost its key.
    free: Vec<usize>,
}

impl Count {
    fn new(nodes: usize) -> Self {
        Self { tally: Tally::new(nodes), free: Vec::new() }
    }

    fn hear(&mut self, node: usize, key: Option<Key>) {
        self.tally.count(key.map(|key| key == Key::Ours));
        if key == Some(Key::Free) {
            self.free.push(node);
        }
    }
}

/// How much longer than one call a node may take for each that comes with it.
const EACH: Duration = Duration::from_micros(200);
/// How long a release that was not answered waits before it is sent again.
const AGAIN: Duration = Duration::from_millis(200);

impl Shared {
    /// Extends many holds with one pipeline to each node.
    ///
    /// # Errors
    /// If nothing is known of any of them: of one that is neither extended nor lost while others
    /// are, what is told is what is left of it.
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
            counts.iter_mut().zip(keys).for_each(|(count, key)| count.hear(i, key));
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
            return Err(self.in_trouble(what, &troubles).but(ErrorKind::Unreachable));
        }
        let extended = |(hold, count)| self.extended(hold, count, sent);
        let renewals = holds.iter().zip(&counts).map(extended).collect();
        self.heal_the_last(holds, counts, answers);
        Ok(renewals)
    }

    /// Heals the nodes that answer after all was decided.
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

    /// Sets the key again where it is missing, if it is held still. Nobody waits for it.
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
            // It was released meanwhile: then this key too.
            if entry.has_left() {
                shared.release_some(&claim, u64::MAX, |i| i == node);
            }
        });
    }

    /// Releases everything of the claim on all nodes; tells whether it was held or waited.
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
        if tally.heard() < majority(self.nodes.len()) {
            let what = "too few servers confirmed the release; the lock will be free when its \
                        lease expires";
            return Err(self.in_trouble(what.into(), &troubles).but(ErrorKind::Unreachable));
        }
        // In doubt: the silent ones may have had it.
        Ok(true)
    }

    /// Releases attempts up to this one where `which` says. Nobody waits for it.
    pub(super) fn release_some(
        self: &Arc<Self>,
        claim: &Claim,
        up_to: u64,
        which: impl Fn(usize) -> bool,
    ) {
        self.release_on(claim, up_to, false, which);
    }

    /// Takes a claim that was refused for good from among those who wait, and releases what nodes
    /// may still give it. Nobody waits for it.
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

    /// The call that releases at one node, and takes the claim from among those who wait.
    fn release_call(&self, released: &Released, up_to: u64, node: usize, waits: bool) -> Cmd {
        let Released { keys, id, holder } = released;
        let mut call = self.scripts.release.call(4);
        call.arg(&[&keys[0], &keys[1], &keys[3], &keys[4]]).arg(id);
        // Beyond 2^53 Lua would not count exactly.
        call.arg(up_to.min(1 << 52));
        if waits {
            call.arg(waiter(id, &self.nodes[node].channel(), holder));
        }
        call
    }

    /// Releases at one node; what is not answered is owed to it.
    fn release_at(
        self: Arc<Self>,
        i: usize,
        call: Cmd,
        lease: Duration,
    ) -> impl Future<Output = Result<bool, Trouble>> + Send + 'static {
        let until = self.claims.now().plus(lease + drift(lease));
        // From now on, not from when this is polled first.
        let under_way = UnderWay::begin(&self.releases);
        async move {
            let _under_way = under_way;
            match self.release_once(i, &call).await {
                Err(Trouble::Strange) => Err(Trouble::Strange),
                Err(trouble) => {
                    self.owe(i, call, until);
                    Err(trouble)
                }
                released => released,
            }
        }
    }

    /// Returns when no release is under way any more that was not tried at least once; a server that
    /// hangs is waited for as long as people wait for one.
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

    /// Has the release sent again until the node answers or the lease is over there by itself: one
    /// task for each node, however much is owed to it.
    fn owe(self: &Arc<Self>, i: usize, call: Cmd, until: Moment) {
        if !self.nodes[i].owe(call, until) {
            return;
        }
        let shared = self.clone();
        self.runtime.spawn(async move {
            let node = &shared.nodes[i];
            let mut pause = AGAIN;
            loop {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(AGAIN * 10);
                while let Some(call) = node.owed(shared.claims.now()) {
                    match shared.release_once(i, &call).await {
                        Ok(_) | Err(Trouble::Strange) => node.paid(),
                        Err(_) => break,
                    }
                    pause = AGAIN;
                }
                if node.owes_nothing() {
                    return;
                }
            }
        });
    }
}

/// What all nodes are told of a claim that is released.
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

/// Counts a release for as long as it is under way.
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

/// One claim that waits.
#[derive(Debug)]
pub(super) struct Wait {
    pub(super) claim: Claim,
    pub(super) entry: Arc<Entry>,
}

/// Renewals of claims that hold and of claims that wait, apart. Those that nobody knows are neither.
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
