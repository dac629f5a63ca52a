//! What the client knows about its own claims: their latest attempts, their grants, and their
//! notifications.
//!
//! The servers store votes. Only the client that counted the votes knows that they are a grant. So
//! a granted claim is remembered here, and a repeated request extends it under the same token (P8).
//! A claim that is not remembered is lost.

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use super::round::majority;
use leasehold_core::{Claim, ClaimId, Clock, Moment, Token};
use leasehold_redis::redis::connection::PushListener;

/// One claim of this client.
#[derive(Debug)]
pub(super) struct Entry {
    /// Lock that allows one attempt or extension at a time.
    pub(super) gate: tokio::sync::Mutex<()>,
    /// Number of the last attempt.
    attempts: AtomicU64,
    left: AtomicBool,
    state: Mutex<State>,
    woken: Notify,
    /// Highest token that nodes have reported for the claim's lock.
    seen: AtomicU64,
    /// Time at which the claim was created. Nodes first notify the claim that has waited longest.
    /// Each node is sent the time waited so far, because the client's clock differs from the
    /// node's.
    since: Moment,
    /// Whether the claim is registered as a waiter.
    pub(super) waits: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    held: Option<Held>,
    /// For each node, whether it has reported that the lock is free there.
    freed: Vec<bool>,
    /// Number of claims ahead, as last reported.
    ahead: usize,
}

/// A grant.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) token: Token,
    /// Value of the main keys.
    pub(super) value: String,
    /// Time until which a majority of the nodes is known to keep the grant.
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

    /// Returns the number of a new attempt, and discards earlier reports that the lock is free.
    pub(super) fn next_attempt(&self) -> u64 {
        locked(&self.state).freed.fill(false);
        self.attempts.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Returns how many milliseconds the claim has waited.
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

    /// Returns whether the caller has given up the claim. An attempt must then release whatever it
    /// still acquires.
    pub(super) fn has_left(&self) -> bool {
        self.left.load(Ordering::SeqCst)
    }

    pub(super) fn held(&self) -> Option<Held> {
        locked(&self.state).held.clone()
    }

    pub(super) fn hold(&self, held: Option<Held>) {
        locked(&self.state).held = held;
    }

    /// Records that a majority of the nodes has extended the grant until `until`. Never shortens
    /// the grant.
    pub(super) fn extended(&self, until: Moment) {
        if let Some(held) = &mut locked(&self.state).held {
            held.until = held.until.max(until);
        }
    }

    pub(super) fn stands_behind(&self, ahead: usize) {
        locked(&self.state).ahead = ahead;
        self.waits.store(true, Ordering::SeqCst);
    }

    /// Returns how long a waiter waits for a message before it polls.
    ///
    /// The pause grows with the number of claims ahead, so that many waiters together poll no more
    /// often than a few do. The pause is random, so that clients that poll at the same time do not
    /// collide again.
    pub(super) fn pause(&self, longest: Duration) -> Duration {
        let ahead = u32::try_from(locked(&self.state).ahead).unwrap_or(u32::MAX);
        let base = SHORTEST_PAUSE.saturating_add(PAUSE_EACH.saturating_mul(ahead)).min(longest);
        base.mul_f64(0.5 + random())
    }

    /// Waits until a majority of the nodes has reported that the lock is free. After the first
    /// report, waits only briefly for the other nodes.
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

/// Pause of a waiter with no claims ahead, before random variation.
const SHORTEST_PAUSE: Duration = Duration::from_millis(60);
/// Additional pause for each claim ahead.
const PAUSE_EACH: Duration = Duration::from_millis(10);
/// Time limit after the first report for the other nodes to report that the lock is free.
const OTHERS: Duration = Duration::from_millis(5);

/// Returns a random number from 0 to 1 to spread events in time. The number is not suitable for
/// secrets.
pub(super) fn random() -> f64 {
    let mut bytes = [0; 4];
    // Without a random source all clients use the same value. The client checks for a source when
    // it connects.
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

    /// Returns the claim's entry, and creates the entry if the claim is new.
    pub(super) fn enter(&self, claim: &Claim) -> Arc<Entry> {
        let mut entries = locked(&self.entries);
        // Removes holds that expired and were never released. The check runs only when there are
        // many entries.
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

    /// Removes the claim, marks its entry as left, and returns the entry.
    pub(super) fn leave(&self, id: ClaimId) -> Option<Arc<Entry>> {
        let entry = locked(&self.entries).remove(&id)?;
        entry.left.store(true, Ordering::SeqCst);
        Some(entry)
    }
}

/// Receiver of the messages from one node.
#[derive(Debug)]
pub(super) struct NodePushListener {
    pub(super) node: usize,
    pub(super) claims: Arc<Claims>,
}

impl PushListener for NodePushListener {
    fn message(&self, text: &[u8]) {
        let id = std::str::from_utf8(text).ok().and_then(ClaimId::from_hex);
        if let Some(entry) = id.and_then(|id| self.claims.get(id)) {
            entry.freed(self.node);
        }
    }

    fn interrupted(&self) {
        // No action is needed: every waiter polls after a short time, as after any lost message.
    }
}
