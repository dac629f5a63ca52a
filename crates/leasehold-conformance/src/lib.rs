//! The suite that every store passes, ours and yours (feature `conformance`).
//!
//! ```text
//! // tests/my_store.rs
//! leasehold::conformance_suite!(my_store, async {
//!     let store = MyStore::connect("…").await.unwrap();
//!     leasehold::Leasehold::with_store(std::sync::Arc::new(store)).unwrap()
//! });
//! ```
//!
//! The expression makes one client; it is evaluated for each client that a case wants, and all of
//! them must see the same locks. Every case becomes a `#[test]` named after the promise (P1–P9) or
//! the scenario (s01–s19, s90) or the row (R1–R52) that it checks. What a store's
//! [`Guarantees`] do not claim is not asked, and the case says so.
//!
//! Some send a crowd to one lock, or ask thousands of times. Of a store whose server takes long for each request, as
//! object stores do, a third of that is asked with `conformance_suite!(my_store, slow, …)`. A suite on a second
//! deployment of a store can be ignored unless all tests run: `conformance_suite!(my_cluster, ignored, …)`.
//!
//! Cases never assert that something was *fast*: only that it did not happen too early, or that it
//! did happen within [`PATIENCE`]. Names are random, so cases can run at once and on a store that
//! is in use.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::store::Guarantees;
use leasehold_core::{Builder, ClaimId, Leasehold};

#[doc(hidden)]
pub mod cases;
mod reference;

pub use leasehold_core::testing::{Fault, Faults, Faulty, Op};

/// How long a case waits for what must happen.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// The lease of cases in which leases expire; a slow store has nearly twice as long.
pub const LEASE: Duration = Duration::from_millis(900);

type Connect = Box<dyn Fn() -> Pin<Box<dyn Future<Output = Leasehold> + Send>> + Send + Sync>;

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
    /// Another client.
    pub async fn client(&self) -> Leasehold {
        (self.connect)().await
    }

    /// Another client, whose store fails as told.
    pub async fn faulty(&self) -> (Leasehold, Arc<Faults>) {
        self.faulty_with(Builder::default()).await
    }

    /// As [`faulty`](Self::faulty), with options.
    pub async fn faulty_with(&self, builder: Builder) -> (Leasehold, Arc<Faults>) {
        let store = Faulty::around(self.client().await);
        let faults = store.faults();
        match builder.store(Arc::new(store)) {
            Ok(locks) => (locks, faults),
            Err(error) => panic!("{error}"),
        }
    }

    /// A lock name that nobody else uses.
    pub fn name(&self, what: &str) -> String {
        format!("{}{what}", self.prefix)
    }

    /// What the names of this case begin with.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// What the store claims.
    pub fn guarantees(&self) -> &Guarantees {
        &self.guarantees
    }

    /// The lease of cases in which leases expire: longer where each request takes long.
    pub(crate) fn lease(&self) -> Duration {
        if self.slow { LEASE * 7 / 4 } else { LEASE }
    }

    /// So many, or a third of it where each request takes long.
    pub(crate) fn many(&self, many: usize) -> usize {
        if self.slow { many.div_ceil(3) } else { many }
    }

    /// Whether the case applies; says so if not.
    pub fn claims(&self, what: &str, claimed: bool) -> bool {
        if !claimed {
            println!("not asked: this store does not claim {what}");
        }
        claimed
    }

    /// Whether holds of this store are leases.
    pub fn claims_leases(&self) -> bool {
        self.claims("leases", self.guarantees.has_leases())
    }
}

/// Runs one case: what the suite's tests call. Less is asked of a slow store.
///
/// # Panics
/// If the store fails it.
pub fn run<C, F>(slow: bool, connect: C, case: impl AsyncFnOnce(&Subject))
where
    C: Fn() -> F + Send + Sync + 'static,
    F: Future<Output = Leasehold> + Send + 'static,
{
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = match builder.worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => panic!("no runtime: {error}"),
    };
    runtime.block_on(async {
        let connect: Connect = Box::new(move || Box::pin(connect()));
        let guarantees = connect().await.guarantees().clone();
        let Ok(id) = ClaimId::random() else { panic!("no random numbers") };
        let prefix = format!("conformance-{:08x}-", id.as_u128() as u32);
        let subject = Subject { connect, prefix, guarantees, slow };
        let limit = PATIENCE * 6;
        if tokio::time::timeout(limit, case(&subject)).await.is_err() {
            panic!("the case was not done within {limit:?}");
        }
    });
}

/// Makes a module of tests, one for each case, for the store whose client `$connect` makes. See
/// the [module](crate).
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
            #[allow(unused_imports, reason = "what the expression needs")]
            use super::*;
            $crate::conformance_cases!($slow, $attribute, $connect);
        }
    };
}

macro_rules! list_cases {
    ($($case:ident),+ $(,)?) => {
        /// The names of all cases.
        pub const CASES: &[&str] = &[$(stringify!($case)),+];

        /// One test for each case; used by [`conformance_suite!`](crate::conformance_suite).
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
    p1_one_holder_at_a_time,
    p1_readers_share_and_writers_do_not,
    p1_permits_never_exceed_the_capacity,
    p3_tokens_rise,
    p4_first_come_first_served,
    p5_a_dead_holder_is_replaced,
    p5_every_kind_is_freed_by_its_lease,
    p6_a_lost_wake_up_is_made_good,
    p6_who_waits_is_told_without_a_heartbeat,
    p7_only_the_owner_releases_or_renews,
    p8_one_claim_one_grant,
    p9_a_dropped_release_goes_on,
    r3_an_owner_reenters_without_the_store,
    s01_a_late_grant_counts_from_before_sending,
    s02_a_late_renewal_revives_nothing,
    s02_a_late_renewal_takes_nothing_from_who_waits,
    s03_a_vanished_record_is_lost_not_retaken,
    s03_a_release_tells_of_a_loss_that_nobody_had_noticed,
    s04_dropped_at_every_await_nothing_stays,
    s05_a_delayed_join_is_gone_within_a_lease,
    s06_a_lost_reply_is_recognised,
    s07_a_lost_release_reply_is_a_release,
    s07_a_second_leave_hands_over_nothing,
    s08_a_blocked_executor_keeps_its_locks,
    s09_a_paused_holder_knows_at_first_sight,
    s11_guards_may_be_dropped_anywhere,
    s12_a_panic_releases,
    who_dropped_a_guard_is_not_in_his_own_way,
    s14_failed_renewals_are_tried_again,
    s14_a_long_outage_loses_and_the_next_lock_works,
    s14_nobody_believes_beyond_the_lease_of_a_silent_store,
    s15_lock_delay_after_an_unclean_end_only,
    s15_every_kind_stays_closed_for_the_delay,
    s15_a_late_leave_does_not_shorten_the_delay,
    r34_a_sequencer_is_good_for_as_long_as_the_hold,
    r34_a_sequencer_is_lost_with_its_lease,
    r34_jeopardy_is_seen_before_the_loss,
    s16_two_kinds_of_one_name_are_a_mismatch,
    s17_a_writer_is_not_starved,
    s18_five_dead_waiters_cost_one_bound,
    s19_a_late_push_counts_from_the_last_heartbeat,
    s90_hostile_names_are_only_names,
    s92_many_held_locks_are_renewed_in_batches,
    at_least_keeps_the_lock_taken,
    at_least_keeps_every_kind_taken,
    once_per_period_by_one_of_many,
    max_hold_ends_a_hold,
    r41_a_late_release_frees_nothing_of_the_next,
    r48_min_validity_is_met,
    no_renewal_lets_the_lease_end,
    a_hold_is_renewed_by_hand,
    changes_in_queues_are_followed,
    an_evicted_holder_hears_at_once,
    who_follows_a_queue_is_told,
    a_blocking_candidate_leads_until_it_says_so,
    list_is_by_prefix_and_in_order,
    work_runs_under_its_lock,
    threads_lock_as_tasks_do,
    a_namespace_is_its_clients_own,
    people_see_and_evict,
    holders_are_those_that_the_whole_queue_shows,
    people_evict_a_waiter_by_its_token,
    permits_wake_everybody_who_fits,
    replies_delayed_and_doubled_change_nothing,
    an_election_goes_on_after_terms_that_were_lost,
    a_writer_becomes_a_reader_and_no_writer_comes_in_between,
    a_reader_becomes_a_writer_only_if_nobody_else_holds,
    a_lost_reply_of_a_downgrade_is_recognised,
    a_dropped_downgrade_leaves_a_reader,
    what_cannot_be_reweighed_is_said,
    several_locks_are_taken_together_or_not_at_all,
    several_locks_of_all_kinds_are_lost_together,
    several_locks_are_taken_in_one_order,
    waiting_ends_when_told,
    the_queue_is_the_reference_queue,
];
