//! What operators see: metrics through the [`metrics`](https://docs.rs/metrics) facade (feature
//! `metrics`), events through [`tracing`](https://docs.rs/tracing) (feature `tracing`). Install a
//! recorder and a subscriber of your choice; without the features everything here compiles to nothing.
//!
//! # Metrics
//! Each is described to the recorder when a client connects, and begins at zero there: a rate, or an alert on a first
//! loss, needs something that it rises from.
//!
//! | metric | kind | labels | what it counts |
//! |---|---|---|---|
//! | `leasehold_held` | gauge | `kind` | locks that are held now |
//! | `leasehold_waiting` | gauge | `kind` | calls that stand in a queue now |
//! | `leasehold_oldest_wait_timestamp_seconds` | gauge | `kind` | when the longest of these began, since 1970; 0: nobody waits |
//! | `leasehold_acquired_total` | counter | `kind` | locks taken |
//! | `leasehold_acquire_seconds` | histogram | `kind` | from asking for a lock to holding it |
//! | `leasehold_not_acquired_total` | counter | `kind`, `reason` | calls that did not get one |
//! | `leasehold_released_total` | counter | `kind` | locks given back, by `release` and by drop |
//! | `leasehold_releases_owed_total` | counter | `kind` | of these, told the caller as [`Released::Owed`](crate::Released::Owed) |
//! | `leasehold_lost_total` | counter | `kind`, `reason` | holds that ended without being released: **alert on it** |
//! | `leasehold_renewals_total` | counter | | claims renewed; waiters' heartbeats are renewals, too |
//! | `leasehold_renewal_failures_total` | counter | | claims whose renewal failed, each time |
//! | `leasehold_fence_refused_total` | counter | | requests that `fence::http` refused as stale |
//! | `leasehold_fence_failures_total` | counter | | requests that it refused because its memory failed |
//!
//! `kind` is `mutex`, `rwlock` or `semaphore`. `reason` is one word: for what was not acquired
//! [`ErrorKind::as_str`](crate::ErrorKind::as_str) (`contended`, `timeout`, `unreachable`, …), for what
//! was lost [`LostReason::as_str`](crate::LostReason::as_str)
//! (`expired`, `gone`, `max_hold`, `closed`). Names of locks are no labels, since there is no end to
//! them, unless you say of how many ([`label_names`]).
//!
//! # Events and spans
//! A lock's name is in the field `name`, quoted; ids of claims, which are secret, are in
//! none.
//!
//! | level | event |
//! |---|---|
//! | `WARN` | `lock lost`, with the `reason`; `renewal failed; …`; `release failed; …`; `release owed; …`; `waits for a lock that this client holds itself; …`; `stale token refused`; what a store finds wrong |
//! | `DEBUG` | `acquired` (after how long), `not acquired` (why), `released` |
//! | `TRACE` | `renewed` (how many) |
//!
//! | level | span | fields | from, to |
//! |---|---|---|---|
//! | `DEBUG` | `wait` | `operation`, `name` | asking for a lock, by whatever method; the answer |
//! | `DEBUG` | `hold` | `name`, `kind`, `token` | holding it; its release or its loss |
//! | `TRACE` | `call` | `what`: `join`, `renew`, `leave` | each request to the store |
//!
//! A hold is a value that moves between tasks and threads, and no scope of code: its span is opened where the lock was
//! taken, as a sibling of the wait, and nobody is in it but the calls that are for it alone. Renewals that were
//! put together with others', and releases by drop, are calls of their own.

#![cfg_attr(not(all(feature = "metrics", feature = "tracing")), allow(unused_variables))]

use std::time::Duration;

#[cfg(feature = "metrics")]
use super::labels::{self, kind_of};

use crate::words::claim::{Claim, Kind};
#[cfg(feature = "metrics")]
use crate::words::error::ErrorKind;
use crate::words::error::{Error, LostReason};
use crate::words::token::Token;

/// Where events come from, whichever package tells them: filters name it.
#[cfg(feature = "tracing")]
pub(super) const TARGET: &str = "leasehold::telemetry";

/// The metrics of locks have a label `name` from now on, for the first `most` names that this process uses of
/// each kind; all others share `name="other"`. Without this, and with 0, there is none: there is no end to
/// names, and each is a series in your database. (What is counted before any lock is named, and the zeros
/// that all begin with, has no such label.)
///
/// For all clients of the process, as the recorder is. Call it before the first of them connects.
///
/// ```
/// leasehold::telemetry::label_names(50);
/// ```
#[cfg(feature = "metrics")]
#[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
pub fn label_names(most: usize) {
    labels::most(most);
}

/// The labels of a lock's metrics.
#[cfg(feature = "metrics")]
fn labels_of(kind: Kind, name: Option<&crate::Name>) -> Vec<metrics::Label> {
    let (labels, is_new) = labels::of(kind, name);
    if is_new {
        begin_lost_at_zero(&labels);
    }
    labels
}

#[cfg(feature = "metrics")]
fn labels(claim: &Claim) -> Vec<metrics::Label> {
    labels_of(claim.kind, Some(&claim.name))
}

/// The same, with a reason.
#[cfg(feature = "metrics")]
fn because(mut labels: Vec<metrics::Label>, reason: &'static str) -> Vec<metrics::Label> {
    labels.push(metrics::Label::from_static_parts("reason", reason));
    labels
}

#[cfg(feature = "metrics")]
const HELD: &str = "leasehold_held";
#[cfg(feature = "metrics")]
const WAITING: &str = "leasehold_waiting";
#[cfg(feature = "metrics")]
const OLDEST_WAIT: &str = "leasehold_oldest_wait_timestamp_seconds";

/// One in a gauge, until that is over: by what ends it, or at the latest when it is dropped.
#[derive(Debug)]
pub(crate) struct Gauged {
    #[cfg(feature = "metrics")]
    gauge: metrics::Gauge,
    #[cfg(feature = "metrics")]
    over: std::sync::atomic::AtomicBool,
    #[cfg(feature = "metrics")]
    _wait: Option<super::oldest::Wait>,
}

impl Gauged {
    /// A lock that is held.
    pub(crate) fn held(claim: &Claim) -> Self {
        #[cfg(feature = "metrics")]
        return Self::counted(HELD, claim, None);
        #[cfg(not(feature = "metrics"))]
        Self {}
    }

    /// A call that stands in a queue.
    pub(crate) fn waiting(claim: &Claim) -> Self {
        #[cfg(feature = "metrics")]
        return Self::counted(WAITING, claim, Some(Self::wait(claim)));
        #[cfg(not(feature = "metrics"))]
        Self {}
    }

    #[cfg(feature = "metrics")]
    fn counted(gauge: &'static str, claim: &Claim, wait: Option<super::oldest::Wait>) -> Self {
        let gauge = metrics::gauge!(gauge, labels(claim));
        gauge.increment(1.0);
        Self { gauge, over: false.into(), _wait: wait }
    }

    #[cfg(feature = "metrics")]
    fn wait(claim: &Claim) -> super::oldest::Wait {
        super::oldest::Wait::begin(claim.kind, claim.holder.pid, |kind, since| {
            metrics::gauge!(OLDEST_WAIT, "kind" => kind_of(kind)).set(since);
        })
    }

    /// It is over; the second time, nothing.
    pub(crate) fn over(&self) {
        #[cfg(feature = "metrics")]
        if !self.over.swap(true, std::sync::atomic::Ordering::Relaxed) {
            self.gauge.decrement(1.0);
        }
    }
}

impl Drop for Gauged {
    fn drop(&mut self) {
        self.over();
    }
}

/// Tells the recorder what the metrics are.
pub(crate) fn describe() {
    #[cfg(feature = "metrics")]
    {
        use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
        describe_gauge!(HELD, Unit::Count, "Locks that are held.");
        describe_gauge!(WAITING, Unit::Count, "Calls that stand in a queue.");
        let what = "When the longest wait began, since 1970; 0: nobody waits.";
        describe_gauge!(OLDEST_WAIT, Unit::Seconds, what);
        for (counter, what) in [
            ("leasehold_acquired_total", "Locks taken."),
            ("leasehold_not_acquired_total", "Calls that did not get a lock, by reason."),
            ("leasehold_released_total", "Locks given back."),
            ("leasehold_releases_owed_total", "Releases that the store did not answer in time."),
            ("leasehold_lost_total", "Holds that ended without being released, by reason."),
            ("leasehold_renewals_total", "Claims renewed, heartbeats of waiters among them."),
            ("leasehold_renewal_failures_total", "Claims whose renewal failed, each time."),
            ("leasehold_fence_refused_total", "HTTP requests refused for a stale token."),
            ("leasehold_fence_failures_total", "HTTP requests refused as the fence failed."),
        ] {
            describe_counter!(counter, Unit::Count, what);
        }
        let what = "From asking for a lock to holding it.";
        describe_histogram!("leasehold_acquire_seconds", Unit::Seconds, what);
        begin_at_zero();
    }
}

/// What is counted with labels that are known beforehand, and is worth an alert.
#[cfg(feature = "metrics")]
fn begin_at_zero() {
    for kind in [Kind::Mutex, Kind::RwLock, Kind::Semaphore].map(kind_of) {
        for gauge in [HELD, WAITING, OLDEST_WAIT] {
            metrics::gauge!(gauge, "kind" => kind).increment(0.0);
        }
        for counter in [
            "leasehold_acquired_total",
            "leasehold_released_total",
            "leasehold_releases_owed_total",
        ] {
            metrics::counter!(counter, "kind" => kind).increment(0);
        }
        begin_lost_at_zero(&[metrics::Label::from_static_parts("kind", kind)]);
        for reason in [ErrorKind::Contended, ErrorKind::Timeout, ErrorKind::Unreachable] {
            let reason = reason.as_str();
            metrics::counter!("leasehold_not_acquired_total", "kind" => kind, "reason" => reason)
                .increment(0);
        }
    }
    for counter in [
        "leasehold_renewals_total",
        "leasehold_renewal_failures_total",
        "leasehold_fence_refused_total",
        "leasehold_fence_failures_total",
    ] {
        metrics::counter!(counter).increment(0);
    }
}

#[cfg(feature = "metrics")]
fn begin_lost_at_zero(labels: &[metrics::Label]) {
    for reason in LostReason::ALL.map(LostReason::as_str) {
        metrics::counter!("leasehold_lost_total", because(labels.to_vec(), reason)).increment(0);
    }
}

#[inline]
pub(crate) fn acquired(claim: &Claim, token: Token, waited: impl FnOnce() -> Duration) {
    #[cfg(any(feature = "metrics", feature = "tracing"))]
    let waited = waited();
    #[cfg(feature = "metrics")]
    {
        let labels = labels(claim);
        metrics::counter!("leasehold_acquired_total", labels.iter()).increment(1);
        metrics::histogram!("leasehold_acquire_seconds", labels).record(waited.as_secs_f64());
    }
    #[cfg(feature = "tracing")]
    tracing::debug!(target: TARGET, name = %claim.name, %token, ?waited, "acquired");
}

#[inline]
pub(crate) fn not_acquired(kind: Kind, error: &Error) {
    #[cfg(feature = "metrics")]
    {
        let labels = because(labels_of(kind, error.name()), error.kind().as_str());
        metrics::counter!("leasehold_not_acquired_total", labels).increment(1);
    }
    #[cfg(feature = "tracing")]
    tracing::debug!(target: TARGET, %error, "not acquired");
}

#[inline]
pub(crate) fn released(claim: &Claim, token: Token) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_released_total", labels(claim)).increment(1);
    #[cfg(feature = "tracing")]
    tracing::debug!(target: TARGET, name = %claim.name, %token, "released");
}

pub(crate) fn lost(claim: &Claim, token: Token, reason: LostReason) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_lost_total", because(labels(claim), reason.as_str())).increment(1);
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, name = %claim.name, %token, %reason, "lock lost");
}

pub(crate) fn renewed(claims: usize) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_renewals_total").increment(claims as u64);
    #[cfg(feature = "tracing")]
    tracing::trace!(target: TARGET, claims, "renewed");
}

pub(crate) fn renewal_failed(claims: usize, error: &Error) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_renewal_failures_total").increment(claims as u64);
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, claims, %error, "renewal failed; trying again until the deadline");
}

/// For a waiter's lease by now: a task that holds it would wait for itself for ever.
pub(crate) fn waits_behind_itself(claim: &Claim) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: TARGET,
        name = %claim.name,
        "waits for a lock that this client holds itself; if the same task holds it, it waits for ever: \
         use an Owner, or release it first"
    );
}

/// The caller was told that the release is owed.
pub(crate) fn release_owed(claim: &Claim, token: Token, error: &Error) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_releases_owed_total", labels(claim)).increment(1);
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, name = %claim.name, %token, %error, "release owed; trying on in the background");
}

pub(crate) fn leave_failed(claim: &Claim, error: &Error) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, name = %claim.name, %error, "release failed; trying again");
}

/// A fence refused a token that is smaller than one it has seen.
pub fn fence_refused(resource: &crate::Name, seen: Token, offered: Token) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_fence_refused_total").increment(1);
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, %resource, %seen, %offered, "stale token refused");
}

/// A fence could not be asked.
pub fn fence_failed(resource: &crate::Name, error: &Error) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_fence_failures_total").increment(1);
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, %resource, %error, "the fence cannot be asked; request refused");
}

/// An idempotency key is done, and the database did not take the outcome.
pub fn outcome_lost(key: &crate::Name, error: &Error) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, %key, %error, "done once, but its outcome could not be stored");
}

/// The store may throw away what it is to keep.
pub fn evicting(policy: &str) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, policy, "the Redis server evicts keys, locks among them: set noeviction");
}

/// Locks live in a database file that has tables of somebody else's.
pub fn shared_file(store: &str, table: &str) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: TARGET,
        store,
        table,
        "the database file has other tables in it, and whoever writes there keeps leases from being \
         renewed: give leasehold a file of its own"
    );
}

/// A store's URL leads to another file or server than this client has used.
pub fn store_changed(store: &str) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: TARGET,
        store,
        "the store was moved, removed or replaced while this client used it: the locks that it held there are lost"
    );
}

/// The numbers that a store orders a queue by are running out.
pub fn sequences_run_out(lock: &str, last: i64) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: TARGET,
        lock = %lock.escape_debug(),
        last,
        "the lock's node gives out numbers up to 2147483647 only: let it be idle for a minute, or \
         delete it when it has no children"
    );
}

/// Who waits for a lock is told to join anew, and will hear why.
pub fn place_given_up(claim: &Claim, error: &Error) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, name = %claim.name, %error, "the place in the queue is given up");
}
