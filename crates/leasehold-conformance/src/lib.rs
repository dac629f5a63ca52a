//! The suite that every store passes, including your own (feature `conformance`).
//!
//! ```text
//! // tests/my_store.rs
//! leasehold::conformance_suite!(my_store, async {
//!     let store = MyStore::connect("…").await.unwrap();
//!     leasehold::Client::with_store(std::sync::Arc::new(store)).unwrap()
//! });
//! ```
//!
//! The expression creates a client. It is evaluated for each client that a case needs, and all of
//! them must see the same locks. Every case becomes a `#[test]` that is named after what it checks:
//! a promise (P1–P9), a scenario (s01–s19, s90) or a row (R1–R52). Cases that the store's
//! [`Guarantees`] do not claim are skipped, and the case prints that.
//!
//! Some cases send many clients to one lock, or make thousands of requests. For stores whose
//! servers are slow, such as object stores, `conformance_suite!(my_store, slow, …)` reduces that to
//! a third. A suite on a second deployment of a store can be ignored unless all tests run:
//! `conformance_suite!(my_cluster, ignored, …)`.
//!
//! Cases never assert that something was *fast*. They assert that it did not happen too early, or
//! that it did happen within [`PATIENCE`]. Names are random, so cases can run concurrently and on a
//! store that is in use.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::store::Guarantees;
use leasehold_core::{Builder, ClaimId, Client};
use tokio::sync::Semaphore;

#[doc(hidden)]
pub mod cases;
mod reference;

pub use leasehold_core::testing::{Fault, Faults, Faulty, Op};

/// Time limit of a case for an event that must happen.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// The lease of cases in which leases expire. It is nearly twice as long for a slow store.
pub const LEASE: Duration = Duration::from_millis(900);

type Connect = Box<dyn Fn() -> Pin<Box<dyn Future<Output = Client> + Send>> + Send + Sync>;

/// The store under test, as a case sees it.
pub struct Subject {
    connect: Connect,
    prefix: String,
    guarantees: Guarantees,
    slow: bool,
}

impl std::fmt::Debug for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subject").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl Subject {
    /// Creates another client.
    pub async fn client(&self) -> Client {
        (self.connect)().await
    }

    /// Creates another client, whose store fails as configured by the returned [`Faults`].
    pub async fn faulty(&self) -> (Client, Arc<Faults>) {
        self.faulty_with(Builder::default()).await
    }

    /// Like [`faulty`](Self::faulty), with options.
    pub async fn faulty_with(&self, builder: Builder) -> (Client, Arc<Faults>) {
        let store = Faulty::around(self.client().await);
        let faults = store.faults();
        match builder.store(Arc::new(store)) {
            Ok(locks) => (locks, faults),
            Err(error) => panic!("{error}"),
        }
    }

    /// Returns a lock name that no other case uses.
    pub fn name(&self, what: &str) -> String {
        format!("{}{what}", self.prefix)
    }

    /// Returns the prefix of this case's names.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns the store's guarantees.
    pub fn guarantees(&self) -> &Guarantees {
        &self.guarantees
    }

    /// Returns the lease of cases in which leases expire. It is longer for a slow store.
    pub(crate) fn lease(&self) -> Duration {
        if self.slow { LEASE * 7 / 4 } else { LEASE }
    }

    /// Returns `many`, or a third of it for a slow store.
    pub(crate) fn many(&self, many: usize) -> usize {
        if self.slow { many.div_ceil(3) } else { many }
    }

    /// Returns whether the case applies. Prints a message if not.
    pub fn claims(&self, what: &str, claimed: bool) -> bool {
        if !claimed {
            println!("skipped: this store does not promise {what}");
        }
        claimed
    }

    /// Returns whether holds of this store are leases. Prints a message if not.
    pub fn claims_leases(&self) -> bool {
        self.claims("leases", self.guarantees.has_leases())
    }
}

/// Limits how many cases of slow stores run at once. Their emulators need much processor time for
/// each request. With more cases, requests wait for each other until leases expire.
static SLOW_CASES: Semaphore = Semaphore::const_new(4);

/// Runs one case. The suite's tests call this. A slow store gets a smaller load.
///
/// # Panics
/// If the store fails the case.
pub fn run<C, F>(slow: bool, connect: C, case: impl AsyncFnOnce(&Subject))
where
    C: Fn() -> F + Send + Sync + 'static,
    F: Future<Output = Client> + Send + 'static,
{
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = match builder.worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => panic!("cannot build a runtime: {error}"),
    };
    runtime.block_on(async {
        let _permit = if slow { SLOW_CASES.acquire().await.ok() } else { None };
        let connect: Connect = Box::new(move || Box::pin(connect()));
        let guarantees = connect().await.guarantees().clone();
        let Ok(id) = ClaimId::random() else { panic!("cannot get random numbers") };
        let prefix = format!("conformance-{:08x}-", id.as_u128() as u32);
        let subject = Subject { connect, prefix, guarantees, slow };
        let limit = PATIENCE * 20;
        if tokio::time::timeout(limit, case(&subject)).await.is_err() {
            panic!("the case was not done within {limit:?}");
        }
    });
}

/// Generates a module of tests, one for each case, for the store whose client `$connect` creates.
/// See the [module](crate).
#[macro_export]
macro_rules! conformance_suite {
    ($name:ident, $connect:expr) => {
        $crate::conformance_suite!(@ $name, false, cfg(all()), $connect);
    };
    ($name:ident, slow, $connect:expr) => {
        $crate::conformance_suite!(@ $name, true, cfg(all()), $connect);
    };
    ($name:ident, ignored, $connect:expr) => {
        $crate::conformance_suite!(@ $name, false, ignore = "runs with --include-ignored", $connect);
    };
    ($name:ident, slow, ignored, $connect:expr) => {
        $crate::conformance_suite!(@ $name, true, ignore = "runs with --include-ignored", $connect);
    };
    (@ $name:ident, $slow:expr, $attribute:meta, $connect:expr) => {
        mod $name {
            #[allow(unused_imports, reason = "used by the expression")]
            use super::*;
            $crate::conformance_cases!($slow, $attribute, $connect);
        }
    };
}

macro_rules! list_cases {
    ($($case:ident),+ $(,)?) => {
        /// The names of all cases.
        pub const CASES: &[&str] = &[$(stringify!($case)),+];

        /// Generates one test for each case. Used by
        /// [`conformance_suite!`](crate::conformance_suite).
        #[doc(hidden)]
        #[macro_export]
        macro_rules! conformance_cases {
            ($slow:expr, $attribute:meta, $connect:expr) => {
                $(
                    #[test]
                    #[$attribute]
                    fn $case() {
                        $crate::run($slow, || $connect, $crate::cases::$case);
                    }
                )+
            };
        }
    };
}

list_cases![
    one_holder_at_a_time,
    readers_share_and_writers_do_not,
    permits_never_exceed_the_capacity,
    each_grant_has_a_higher_token,
    first_come_first_served,
    crashed_holder_is_replaced_when_its_lease_expires,
    expired_lease_frees_every_kind_of_lock,
    waiter_acquires_despite_lost_notifications,
    waiter_is_notified_without_a_heartbeat,
    only_the_owner_releases_or_renews,
    repeated_acquires_of_one_claim_get_one_grant,
    dropped_release_completes_in_the_background,
    owner_reenters_without_contacting_the_store,
    lease_of_a_late_grant_counts_from_before_the_request,
    late_renewal_does_not_revive_an_expired_hold,
    late_renewal_does_not_take_the_lock_from_a_waiter,
    evicted_hold_is_reported_lost_and_not_reacquired,
    release_reports_an_unnoticed_loss,
    acquire_dropped_at_any_await_leaves_no_claim,
    dropped_acquire_is_released_although_its_join_arrives_late,
    delayed_acquire_blocks_the_lock_for_at_most_a_lease,
    acquire_with_a_lost_reply_is_granted_once,
    release_with_a_lost_reply_takes_effect_once,
    repeated_release_does_not_free_the_next_hold,
    renewal_racing_a_release_does_not_restore_the_claim,
    a_blocked_executor_keeps_its_locks,
    paused_holder_detects_its_loss_on_the_first_check,
    guards_may_be_dropped_anywhere,
    panic_releases_the_lock,
    dropped_guard_does_not_block_its_own_client,
    failed_renewals_are_retried,
    lock_lost_in_a_long_outage_can_be_acquired_again,
    hold_expires_on_time_while_the_store_is_unreachable,
    lock_delay_follows_only_an_unclean_end,
    lock_delay_blocks_every_kind_of_lock,
    late_release_does_not_shorten_the_lock_delay,
    sequencer_is_valid_as_long_as_its_hold,
    sequencer_becomes_invalid_when_its_lease_expires,
    at_risk_is_reported_before_the_loss,
    using_one_name_for_two_kinds_is_a_mismatch,
    a_writer_is_not_starved,
    crashed_waiters_cost_one_lease_in_total,
    lease_of_a_late_notification_counts_from_the_last_heartbeat,
    hostile_names_are_distinct_ordinary_locks,
    many_held_locks_are_renewed_in_batches,
    min_hold_keeps_a_released_lock_unavailable,
    min_hold_keeps_every_kind_of_lock_unavailable,
    once_per_runs_on_one_client_per_period,
    max_hold_ends_a_hold,
    late_release_does_not_free_the_next_hold,
    acquire_meets_min_validity_or_fails,
    no_renewal_lets_the_lease_expire,
    manual_renewal_extends_a_hold_but_does_not_revive_it,
    queue_changes_are_reported_to_watchers,
    evicted_holder_is_notified_immediately,
    watcher_is_notified_without_polling,
    blocking_candidate_leads_until_it_resigns,
    list_filters_by_prefix_and_is_sorted,
    work_runs_under_its_lock,
    blocking_client_locks_like_the_async_client,
    namespace_isolates_its_locks_and_delivers_notifications,
    operator_sees_holders_and_waiters_and_evicts,
    holders_query_matches_the_full_queue,
    operator_evicts_a_waiter_by_its_token,
    released_permits_wake_all_waiters_that_fit,
    delayed_and_duplicated_messages_do_not_break_exclusion,
    election_continues_after_lost_terms,
    downgrade_grants_waiting_readers_up_to_the_next_writer,
    upgrade_succeeds_only_without_other_holders,
    downgrade_with_a_lost_reply_takes_effect_once,
    a_dropped_downgrade_leaves_a_reader,
    unsupported_or_lost_conversion_returns_an_error,
    lock_all_acquires_all_locks_or_none,
    multi_guard_is_lost_with_any_of_its_locks,
    lock_all_in_different_orders_never_deadlocks,
    waiting_ends_at_its_timeout,
    store_behaves_like_the_reference_queue,
];
