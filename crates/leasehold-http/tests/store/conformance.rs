//! The conformance suite through one server, and through three behind proxies that break requests.

use std::sync::LazyLock;
use std::time::Duration;

use ::http::Method;

use crate::common::{Replica, url_of};
use crate::proxy::{Fault, HttpProxy};

leasehold_conformance::conformance_suite!(http, async {
    static REPLICA: LazyLock<Replica> = LazyLock::new(Replica::over_memory);
    leasehold::connect(REPLICA.url()).await.unwrap()
});

leasehold_conformance::conformance_suite!(over_redis, async {
    static REPLICA: LazyLock<Replica> = LazyLock::new(|| Replica::over(&testbed::redis().url()));
    leasehold::connect(REPLICA.url()).await.unwrap()
});

/// Runs the cases through three replicas behind faulty proxies. It leaves out cases that need
/// certainty about a release whose answer was lost, or that renew a thousand locks by one request.
macro_rules! three_replicas_behind_faulty_proxies {
    ($($case:ident,)+) => {
        mod three_replicas_behind_faulty_proxies {
            use leasehold_conformance::{cases, run};

            $(
                #[test]
                fn $case() {
                    run(true, super::connect, cases::$case);
                }
            )+
        }
    };
}

three_replicas_behind_faulty_proxies! {
    one_holder_at_a_time,
    readers_share_and_writers_do_not,
    permits_never_exceed_the_capacity,
    each_grant_has_a_higher_token,
    first_come_first_served,
    crashed_holder_is_replaced_when_its_lease_expires,
    expired_lease_frees_every_kind_of_lock,
    waiter_acquires_despite_lost_notifications,
    waiter_is_notified_without_a_heartbeat,
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
}

async fn connect() -> leasehold::Client {
    static FAULTY: LazyLock<(Vec<Replica>, Vec<HttpProxy>)> = LazyLock::new(faulty);
    let ports: Vec<u16> = FAULTY.1.iter().map(HttpProxy::port).collect();
    leasehold::connect(url_of(&ports)).await.unwrap()
}

fn faulty() -> (Vec<Replica>, Vec<HttpProxy>) {
    let replicas: Vec<Replica> = (0..3).map(|_| Replica::over(&testbed::redis().url())).collect();
    let proxies = replicas.iter().enumerate().map(|(n, replica)| {
        let proxy = HttpProxy::before(replica.port());
        let mut count = 7 * n;
        proxy.plan(move |method, path| {
            // Streams end with their connection, and evictions have no ID.
            if !path.starts_with("/v1/claims") {
                return Fault::None;
            }
            // After a lost answer, it is unknown whether a release found its claim. These cases
            // need certainty.
            let is_certain =
                ["s03b", "s07", "p8", "reference"].iter().any(|name| path.contains(name));
            if is_certain && *method == Method::DELETE {
                return Fault::None;
            }
            count += 1;
            match (count % 20, method) {
                (2, _) => Fault::LoseReply,
                (5, _) => Fault::Cut,
                (8, _) => Fault::LateReply(Duration::from_millis(20)),
                // The second answer of a release is "was not in the queue".
                (11 | 15, &Method::DELETE) => Fault::Twice,
                (11 | 15, _) => Fault::Again,
                _ => Fault::None,
            }
        });
        proxy
    });
    let proxies = proxies.collect();
    (replicas, proxies)
}
