//! Metrics and events, for operators.
//!
//! With the feature `metrics`, metrics go to the [`metrics`](https://docs.rs/metrics) facade. With
//! the feature `tracing`, events and spans go to [`tracing`](https://docs.rs/tracing). Install a
//! recorder and a subscriber of your choice.
//!
//! # Metrics
//! Each metric starts at zero when a client connects, so rates and alerts see the first event.
//!
//! | metric | kind | labels | meaning |
//! |---|---|---|---|
//! | `leasehold_held` | gauge | `kind` | locks held now |
//! | `leasehold_waiting` | gauge | `kind` | calls waiting in a queue now |
//! | `leasehold_oldest_wait_timestamp_seconds` | gauge | `kind` | Unix time at which the longest current wait began, or 0 if no call waits |
//! | `leasehold_acquired_total` | counter | `kind` | locks acquired |
//! | `leasehold_acquire_seconds` | histogram | `kind` | time from requesting a lock to holding it |
//! | `leasehold_not_acquired_total` | counter | `kind`, `reason` | calls that did not acquire a lock |
//! | `leasehold_released_total` | counter | `kind` | locks released, by `release` or by drop |
//! | `leasehold_releases_owed_total` | counter | `kind` | releases that the store did not confirm in time ([`Released::Pending`](crate::Released::Pending)) |
//! | `leasehold_lost_total` | counter | `kind`, `reason` | holds that ended without a release: **alert on any increase** |
//! | `leasehold_renewals_total` | counter | | claims renewed, including heartbeats of waiters |
//! | `leasehold_renewal_failures_total` | counter | | failed renewals, counted per claim |
//! | `leasehold_fence_refused_total` | counter | | requests that `fence::http` rejected because of a stale token |
//! | `leasehold_fence_failures_total` | counter | | requests that `fence::http` rejected because its token storage failed |
//!
//! `kind` is `mutex`, `rwlock` or `semaphore`. For a lock that was not acquired, `reason` is
//! [`ErrorKind::as_str`](crate::ErrorKind::as_str) (`contended`, `timeout`, `unreachable`, …). For
//! a lost lock, `reason` is [`LostReason::as_str`](crate::LostReason::as_str) (`expired`, `gone`,
//! `max_hold`, `closed`). Lock names are not labels, because their number is unlimited.
//! [`label_names`] adds them for a limited number of names.
//!
//! # Events and spans
//! The field `name` contains the quoted name of the lock. The field `error` contains the error on
//! one line. No field contains the secret ID of a claim.
//!
//! | level | event |
//! |---|---|
//! | `WARN` | `lock lost`, with the `reason`; `renewal failed; …`; `release failed; …`; `release pending; …`; `waiting for a lock that this client already holds; …`; `stale token rejected`; problems that a store finds |
//! | `DEBUG` | `acquired`, with the time waited; `not acquired`, with the error; `released` |
//! | `TRACE` | `renewed`, with the number of claims |
//!
//! | level | span | fields | from, to |
//! |---|---|---|---|
//! | `DEBUG` | `wait` | `operation`, `name` | the request for a lock, by any method; the result |
//! | `DEBUG` | `hold` | `name`, `kind`, `token` | the grant; the release or the loss |
//! | `TRACE` | `call` | `what`: `join`, `renew`, `leave` | each request to the store |
//!
//! The span of a hold is a sibling of the span of its wait, and contains only calls for this hold alone.
//! Batched renewals and releases by drop have spans of their own.

#![cfg_attr(not(all(feature = "metrics", feature = "tracing")), allow(unused_variables))]

use std::time::Duration;

#[cfg(feature = "metrics")]
use super::labels::{self, kind_of};

use crate::types::claim::{Claim, Kind};
#[cfg(feature = "metrics")]
use crate::types::error::ErrorKind;
use crate::types::error::{Error, LostReason};
use crate::types::token::{FencingToken, Token};

/// The target of all events, whichever package emits them. Filters use it.
#[cfg(feature = "tracing")]
pub(super) const TARGET: &str = "leasehold::telemetry";

/// Adds the label `name` to the metrics of locks, for the first `most` names of each kind that this
/// process uses. All others share `name="other"`.
///
/// Without this call, and with 0, there is no such label. The number of names is unlimited, and
/// each is a time series in your database. (Values that were counted before a lock is named, and
/// the initial zeros, do not have the label.)
///
/// The limit applies to all clients of the process. Call this function before the first one
/// connects.
///
/// ```
/// leasehold::telemetry::label_names(50);
/// ```
#[cfg(feature = "metrics")]
#[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
pub fn label_names(most: usize) {
    labels::most(most);
}

/// Returns the labels of a lock's metrics.
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

/// Adds a reason to the labels.
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

/// Counts one lock or call in a gauge until it ends, or until this value is dropped.
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
    /// Counts a lock that is held.
    pub(crate) fn held(claim: &Claim) -> Self {
        #[cfg(feature = "metrics")]
        return Self::counted(HELD, claim, None);
        #[cfg(not(feature = "metrics"))]
        Self {}
    }

    /// Counts a call that waits in a queue.
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

    /// Ends the count. A second call has no effect.
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

/// Describes the metrics to the recorder, and starts them at zero.
pub(crate) fn describe() {
    #[cfg(feature = "metrics")]
    {
        use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
        describe_gauge!(HELD, Unit::Count, "Locks held now.");
        describe_gauge!(WAITING, Unit::Count, "Calls waiting in a queue now.");
        let what = "Unix time at which the longest current wait began, or 0 if no call waits.";
        describe_gauge!(OLDEST_WAIT, Unit::Seconds, what);
        for (counter, what) in [
            ("leasehold_acquired_total", "Locks acquired."),
            ("leasehold_not_acquired_total", "Calls that did not acquire a lock, by reason."),
            ("leasehold_released_total", "Locks released."),
            ("leasehold_releases_owed_total", "Releases that the store did not confirm in time."),
            ("leasehold_lost_total", "Holds that ended without a release, by reason."),
            ("leasehold_renewals_total", "Claims renewed, including heartbeats of waiters."),
            ("leasehold_renewal_failures_total", "Failed renewals, counted per claim."),
            ("leasehold_fence_refused_total", "HTTP requests rejected because of a stale token."),
            ("leasehold_fence_failures_total", "HTTP requests rejected because the fence failed."),
        ] {
            describe_counter!(counter, Unit::Count, what);
        }
        let what = "Time from requesting a lock to holding it.";
        describe_histogram!("leasehold_acquire_seconds", Unit::Seconds, what);
        begin_at_zero();
    }
}

/// Starts the metrics that are worth an alert at zero, as far as their labels are known in advance.
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
    tracing::debug!(target: TARGET, error = %one_line(error), "not acquired");
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

/// Returns the full error in one line.
#[cfg(feature = "tracing")]
fn one_line(error: &Error) -> impl std::fmt::Display + '_ {
    std::fmt::from_fn(move |f| write!(f, "{error:#}"))
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
    tracing::warn!(
        target: TARGET,
        claims,
        error = %one_line(error),
        "renewal failed; retrying until the lease expires"
    );
}

/// Warns that a client has waited as long as a waiter's lease for a lock that it holds itself. If
/// the same task holds the lock and waits for it, it waits forever.
pub(crate) fn waits_behind_itself(claim: &Claim) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: TARGET,
        name = %claim.name,
        "waiting for a lock that this client already holds; if the same task holds it, this is a \
         deadlock: release it first, or use an Owner"
    );
}

/// Reports a pending release. The caller of the release got `Released::Pending`.
pub(crate) fn release_owed(claim: &Claim, token: Token, error: &Error) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_releases_owed_total", labels(claim)).increment(1);
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: TARGET,
        name = %claim.name,
        %token,
        error = %one_line(error),
        "release pending; retrying in the background"
    );
}

pub(crate) fn leave_failed(claim: &Claim, error: &Error) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, name = %claim.name, error = %one_line(error), "release failed; retrying");
}

/// Reports that a fence rejected a stale token.
pub fn fence_refused(resource: &crate::Name, seen: FencingToken, offered: FencingToken) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_fence_refused_total").increment(1);
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, %resource, %seen, %offered, "stale token rejected");
}

/// Reports that a fence failed.
pub fn fence_failed(resource: &crate::Name, error: &Error) {
    #[cfg(feature = "metrics")]
    metrics::counter!("leasehold_fence_failures_total").increment(1);
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, %resource, error = %one_line(error), "fence unavailable; request rejected");
}

/// Reports that the work of an idempotency key is done, but its outcome could not be stored.
pub fn outcome_lost(key: &crate::Name, error: &Error) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, %key, error = %one_line(error), "work done, but its outcome could not be stored");
}

/// Reports that the store may evict data that must be kept.
pub fn evicting(policy: &str) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, policy, "the Redis server may evict keys, including locks: set maxmemory-policy to noeviction");
}

/// Reports that the database file with the locks contains tables that are not leasehold's.
pub fn shared_file(store: &str, table: &str) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: TARGET,
        store,
        table,
        "the database file contains other tables, and writes to them delay lease renewals: use a \
         separate file for leasehold"
    );
}

/// Reports that the store behind a URL was moved, removed or replaced while a client used it.
pub fn store_changed(store: &str) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: TARGET,
        store,
        "the store was moved, removed or replaced while this client used it: the locks that it held there are lost"
    );
}

/// Reports that the sequence numbers by which a store orders a queue are running out.
pub fn sequences_run_out(lock: &str, last: i64) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: TARGET,
        lock = %lock.escape_debug(),
        last,
        "the lock's node is running out of sequence numbers (the last one is 2147483647): leave the \
         lock idle for a minute, or delete the node while it has no children"
    );
}

/// Reports that a waiter's queue position was given up, and why.
pub fn place_given_up(claim: &Claim, error: &Error) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: TARGET,
        name = %claim.name,
        error = %one_line(error),
        "queue position given up; joining the queue again"
    );
}
