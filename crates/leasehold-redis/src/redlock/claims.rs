//! What this client knows of its own claims: which attempt is the last, who holds, who is woken.
//!
//! The servers keep votes; that some votes together are a grant, only the client that counted them
//! knows. So a claim that was granted is remembered here, and asking for it again extends it, under
//! the same token (P8). A claim that nobody remembers is lost.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use super::round::majority;
use crate::redis::connection::PushListener;
use leasehold_core::{Claim, ClaimId, Clock, Moment, Token};

/// One claim of this client.
#[derive(Debug)]
pub(super) struct Entry {
    /// One attempt or extension of it at a time.
    pub(super) gate: tokio::sync::Mutex<()>,
    /// The number of the last attempt.
    attempts: AtomicU64,
    left: AtomicBool,
    state: Mutex<State>,
    woken: Notify,
    /// The highest token that nodes told of this name.
    seen: AtomicU64,
    /// Since when it is here: nodes wake first who has waited longest. Each is told for how long, since
    /// our wall clock is not theirs.
    since: Moment,
    /// Whether it stands among those who wait.
    pub(super) waits: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    held: Option<Held>,
    /// Which nodes have said that they are free.
    freed: Vec<bool>,
    /// How many are before it, as was last told.
    ahead: usize,
}

/// A grant.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) token: Token,
    /// What the main keys hold.
    pub(super) value: String,
    /// Until when a majority is known to hold it.
    pub(super) until: Moment,
}

impl Entry {
    fn new(nodes: usize, since: Moment) -> Self {
        let state = State { freed: vec![false; nodes], ..State::default() };
        Self {
            gate: tokio::sync::Mutex::default(),
            attempts: AtomicU64::new(0),
            left: AtomicBool::new(false),
            state: Mutex::new(state),
            woken: Notify::new(),
            seen: AtomicU64::new(0),
            since,
            waits: AtomicBool::new(false),
        }
    }

    /// The number of a new attempt, which the news of freed nodes so far do not concern.
    pub(super) fn next_attempt(&self) -> u64 {
        locked(&self.state).freed.fill(false);
        self.attempts.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// For how many milliseconds it has waited.
    pub(super) fn waited(&self) -> u64 {
        let waited = Clock::default().now().since(self.since);
        u64::try_from(waited.as_millis()).unwrap_or(u64::MAX)
    }

    pub(super) fn saw(&self, token: u64) {
        self.seen.fetch_max(token, Ordering::SeqCst);
    }

    pub(super) fn seen(&self) -> u64 {
        self.seen.load(Ordering::SeqCst)
    }

    /// Its caller wants no more of it: whatever an attempt still gets is to be given back.
    pub(super) fn has_left(&self) -> bool {
        self.left.load(Ordering::SeqCst)
    }

    pub(super) fn held(&self) -> Option<Held> {
        locked(&self.state).held.clone()
    }

    pub(super) fn hold(&self, held: Option<Held>) {
        locked(&self.state).held = held;
    }

    /// A majority was extended; never shortens.
    pub(super) fn extended(&self, until: Moment) {
        if let Some(held) = &mut locked(&self.state).held {
            held.until = held.until.max(until);
        }
    }

    pub(super) fn stands_behind(&self, ahead: usize) {
        locked(&self.state).ahead = ahead;
        self.waits.store(true, Ordering::SeqCst);
    }

    /// How long to wait for a message before asking all the same: longer the more are before us, so
    /// that a crowd asks no more often than a few do. At random, so that those who ask at the same
    /// time do not do so again.
    pub(super) fn pause(&self, longest: Duration) -> Duration {
        let ahead = u32::try_from(locked(&self.state).ahead).unwrap_or(u32::MAX);
        let base = SHORTEST_PAUSE.saturating_add(PAUSE_EACH.saturating_mul(ahead)).min(longest);
        base.mul_f64(0.5 + random())
    }

    /// Resolves when a majority of the nodes has said that it is free, or one has and the others
    /// have had time to.
    pub(super) async fn woken(&self) {
        loop {
            let freed = locked(&self.state).freed.iter().filter(|freed| **freed).count();
            let all = locked(&self.state).freed.len();
            if freed >= majority(all) {
                return;
            }
            if freed > 0 {
                tokio::select! {
                    () = self.woken.notified() => {}
                    () = tokio::time::sleep(OTHERS) => return,
                }
            } else {
                self.woken.notified().await;
            }
        }
    }

    fn freed(&self, node: usize) {
        if let Some(freed) = locked(&self.state).freed.get_mut(node) {
            *freed = true;
        }
        self.woken.notify_one();
    }
}

/// How long one who waits waits for a message, at the least.
const SHORTEST_PAUSE: Duration = Duration::from_millis(60);
/// And how much longer for each who is before it.
const PAUSE_EACH: Duration = Duration::from_millis(10);
/// How long the other nodes have to say that they are free too.
const OTHERS: Duration = Duration::from_millis(5);

/// A number from 0 to 1, to spread things in time. Not for secrets.
pub(super) fn random() -> f64 {
    let mut bytes = [0; 4];
    // Without a random source everybody meets in the middle; connecting has checked for one.
    if getrandom::fill(&mut bytes).is_err() {
        return 0.5;
    }
    f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX)
}

/// All claims of this client.
#[derive(Debug)]
pub(super) struct Claims {
    nodes: usize,
    clock: Clock,
    entries: Mutex<HashMap<ClaimId, Arc<Entry>>>,
}

impl Claims {
    pub(super) fn new(nodes: usize) -> Self {
        Self { nodes, clock: Clock::default(), entries: Mutex::default() }
    }

    pub(super) fn now(&self) -> Moment {
        self.clock.now()
    }

    pub(super) fn get(&self, id: ClaimId) -> Option<Arc<Entry>> {
        locked(&self.entries).get(&id).cloned()
    }

    /// The claim's entry, made if it is new.
    pub(super) fn enter(&self, claim: &Claim) -> Arc<Entry> {
        let mut entries = locked(&self.entries);
        // Holds that ended by the clock and were never given back; looked for only when there are
        // many.
        if entries.len() > 1_000 && entries.len().is_power_of_two() {
            let now = self.now();
            entries.retain(|_, entry| entry.held().is_none_or(|held| held.until > now));
        }
        entries
            .entry(claim.id)
            .or_insert_with(|| Arc::new(Entry::new(self.nodes, self.now())))
            .clone()
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        locked(&self.entries).len()
    }

    /// Forgets the claim; what it was.
    pub(super) fn leave(&self, id: ClaimId) -> Option<Arc<Entry>> {
        let entry = locked(&self.entries).remove(&id)?;
        entry.left.store(true, Ordering::SeqCst);
        Some(entry)
    }
}

/// What one node's connection hears.
#[derive(Debug)]
pub(super) struct Ear {
    pub(super) node: usize,
    pub(super) claims: Arc<Claims>,
}

impl PushListener for Ear {
    fn message(&self, text: &[u8]) {
        let id = std::str::from_utf8(text).ok().and_then(ClaimId::from_hex);
        if let Some(entry) = id.and_then(|id| self.claims.get(id)) {
            entry.freed(self.node);
        }
    }

    fn interrupted(&self) {
        // Who waits asks by itself before long; a message lost here is as one lost on its way.
    }
}
