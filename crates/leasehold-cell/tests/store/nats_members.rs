//! A cluster of three NATS servers, which are killed, paused or partitioned while locks are held
//! and waited for.

use std::sync::Arc;
use std::time::{Duration, Instant};

// The servers may be electing a leader.
use leasehold::store::Survival;
use leasehold::{Client, ErrorKind, LostReason, MutexGuard, State};
use leasehold_test_support::*;
use testbed::{Cut, NatsCluster, in_own_network};

const STREAM: &str = "KV_leasehold";
/// Long enough for elections, which take up to ten seconds.
const LEASE: Duration = Duration::from_secs(60);
const LONG: &str = "/?session_ms=60000";

/// The leader is killed or paused while one client holds and another waits. Neither of them loses
/// anything, and the cluster continues.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn killed_or_paused_leader_costs_no_hold_and_no_queue_position() {
    run(async {
        let cluster = Arc::new(NatsCluster::start());
        let url = cluster.url() + LONG;
        let mut clients = Vec::new();
        for _ in 0..3 {
            clients.push(connect(&url).await);
        }
        let promises = clients[0].guarantees();
        assert_eq!(promises.on_failover, Survival::Fenced);
        let mut last = 0;
        for round in 0..4 {
            let lock = clients[0].mutex("kept").lease(LEASE);
            let guard = lock.lock_timeout(PATIENCE).await.unwrap();
            assert!(guard.token().get() > last);
            last = guard.token().get();
            let lock = clients[1].mutex("kept").lease(LEASE);
            let waiting = tokio::spawn(async move { lock.lock_timeout(2 * PATIENCE).await });
            until_queued(&clients[2], "kept", 2).await;
            let leader = cluster.leader(STREAM);
            let began = Instant::now();
            if round % 2 == 0 {
                cluster.kill(leader)
            } else {
                cluster.stop(leader)
            }
            until("another leader replies", async || clients[2].inspect("kept").await.is_ok())
                .await;
            println!("round {round}: the new leader replies after {:?}", began.elapsed());
            assert!(guard.is_held() && !waiting.is_finished());
            release(guard).await;
            let next = waiting.await.unwrap().unwrap();
            assert!(next.token().get() > last);
            last = next.token().get();
            if round % 2 == 0 {
                cluster.restart(leader)
            } else {
                cluster.cont(leader)
            }
            assert!(next.is_held());
            release(next).await;
        }
        hammer(&clients, "counted", 6, 5).await;
    });
}

/// A holder's server is partitioned from the others. The holder relies on its hold at most until
/// the next client holds. What that server reports about other sessions grants nothing.
#[test]
fn isolated_member_grants_nothing_and_its_holder_notices_the_loss() {
    let name = "nats_members::isolated_member_grants_nothing_and_its_holder_notices_the_loss";
    in_own_network(name, || {
        run(async {
            let cluster = NatsCluster::separable();
            let session = "/?session_ms=4000";
            let first = connect(&(cluster.url() + session)).await;
            release(first.mutex("first").lock_timeout(PATIENCE).await.unwrap()).await;
            for cut in [Cut::Off, Cut::Mute] {
                let leader = cluster.leader(STREAM);
                let of = |n: usize| format!("nats://127.0.0.1:{}{session}", cluster.port(n));
                // One client uses the leader, which is partitioned. The others use the other
                // servers.
                let parted = connect(&of(leader)).await;
                let other = connect(&of((leader + 1) % 3)).await;
                let third = connect(&of((leader + 2) % 3)).await;
                let name = format!("{cut:?}");
                let guard = parted.mutex(&*name).lock_timeout(PATIENCE).await.unwrap();
                let watch = guard.watch();
                let lock = other.mutex(&*name);
                let waiting = tokio::spawn(async move {
                    let next = lock.lock_timeout(2 * PATIENCE).await.unwrap();
                    (next, watch.state())
                });
                until_queued(&third, &name, 2).await;
                cluster.cut(leader, cut);
                let (next, state) = waiting.await.unwrap();
                assert_eq!(
                    state,
                    State::Lost(LostReason::Expired),
                    "{name}: two clients hold the lock"
                );
                assert!(next.token() > guard.token());
                // The partitioned server may consider the new holder's session dead, which grants
                // nothing.
                let end = Instant::now() + Duration::from_secs(8);
                while Instant::now() < end {
                    let error = parted.mutex(&*name).try_lock().await.unwrap_err();
                    assert_ne!(error.kind(), ErrorKind::Lost, "{error}");
                    assert!(next.is_held(), "{next:?}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                cluster.heal();
                release(next).await;
                release(parted.mutex(&*name).lock_timeout(PATIENCE).await.unwrap()).await;
            }
        });
    });
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn nats_without_a_majority_grants_nothing_and_reports_it() {
    run(async {
        let cluster = NatsCluster::start();
        let locks = connect(&(cluster.url() + "/?session_ms=4000")).await;
        let guard = locks.mutex("m").lock_timeout(PATIENCE).await.unwrap();
        cluster.kill(0);
        cluster.kill(1);
        let error = locks.mutex("other").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        let reason = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
        assert_eq!(reason, LostReason::Expired);
        // The last server takes a while to notice that it is alone. Until then a client can
        // connect, but not acquire a lock.
        let error = match leasehold::connect(cluster.url()).await {
            Err(error) => error,
            Ok(fresh) => fresh.mutex("other").try_lock().await.unwrap_err(),
        };
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert_eq!(format!("{error:#}").lines().count(), 1, "{error}");
        cluster.restart(0);
        until("the lock is granted again", async || {
            let got: Option<MutexGuard> = again(&locks).await;
            got.is_some()
        })
        .await;
    });
}

async fn again(locks: &Client) -> Option<MutexGuard> {
    locks.mutex("m").lock_timeout(PATIENCE / 6).await.ok()
}
