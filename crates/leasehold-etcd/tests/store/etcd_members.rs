//! Several members: killed, paused, partitioned, slow, unreachable, far from their leader, without
//! a vote.

use std::sync::Arc;
use std::time::{Duration, Instant};

// Members may be electing a leader.
use crate::etcd_common::*;
use leasehold::store::{Durability, Guarantee, Survival};
use leasehold::{ErrorKind, LostReason};
use testbed::{Cut, Etcd, Proxy, Setup, in_own_network};

/// One cluster gets all these faults in turn, because starting three members is expensive.
#[test]
fn locks_stay_exclusive_while_members_restart_one_by_one() {
    run(async {
        let cluster = Arc::new(Etcd::cluster());
        let url = cluster.url();
        let clients = [connect(&url).await, connect(&url).await, connect(&url).await];
        let kept = clients[0].mutex("kept").lock().await.unwrap();
        let breaking = tokio::task::spawn_blocking({
            let cluster = cluster.clone();
            move || {
                for member in 0..cluster.len() {
                    std::thread::sleep(Duration::from_millis(300));
                    cluster.kill(member);
                    std::thread::sleep(Duration::from_millis(300));
                    cluster.restart(member);
                }
            }
        });
        // The rounds continue until all members were restarted, so that some of them overlap.
        while !breaking.is_finished() {
            hammer(&clients, "counted", 6, 10).await;
        }
        breaking.await.unwrap();
        // Another round follows the last restart.
        hammer(&clients, "counted", 6, 10).await;
        assert!(kept.is_held(), "{kept:?}");
        let error = clients[1].mutex("kept").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");

        // The leader is killed while a claim waits. The holder keeps the lock, and the waiter gets
        // it later.
        let leader = cluster.leader();
        // Elections may take longer than a lease of the usual length.
        let lease = Duration::from_secs(60);
        let lock = clients[2].mutex("kept").lease(lease);
        let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
        until_queued(&clients[1], "kept", 2).await;
        cluster.kill(leader);
        let first = kept.token();
        release(kept).await;
        let next = waiting.await.unwrap().unwrap();
        assert!(next.token() > first);
        cluster.restart(leader);

        // All members restart at once. Leases, entries and tokens are still there.
        let holder = next.grant();
        let lock = clients[0].mutex("kept").lease(lease);
        let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
        until_queued(&clients[1], "kept", 2).await;
        let down = cluster.clone();
        tokio::task::spawn_blocking(move || down.restart_all()).await.unwrap();
        let mut first_reply = None;
        until("a member replies", async || {
            first_reply = clients[1].inspect("kept").await.ok();
            first_reply.is_some()
        })
        .await;
        let info = first_reply.unwrap().unwrap();
        assert_eq!(info.holders().next().unwrap().token, Some(holder));
        assert!(!waiting.is_finished());
        release(next).await;
        assert!(waiting.await.unwrap().unwrap().grant() > holder);
    });
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn paused_members_cost_no_lease_and_no_queue_position() {
    run(async {
        let cluster = Etcd::cluster();
        let url = cluster.url();
        for member in 0..cluster.len() {
            // There are enough clients that some are connected to each member. Each round uses new
            // ones with new leases. A paused leader that resumes revokes leases that it considers
            // expired, even if its successor has renewed them (etcd before 3.4.31 and 3.5.13).
            let mut clients = Vec::new();
            for _ in 0..6 {
                clients.push(connect(&url).await);
            }
            let lease = Duration::from_secs(12);
            let mut held = Vec::new();
            let mut waiting = Vec::new();
            for (n, locks) in clients.iter().enumerate() {
                let guard = locks.mutex(format!("m{member}-{n}")).lease(lease).lock().await;
                held.push(guard.unwrap());
                let next = &clients[(n + 1) % clients.len()];
                let lock = next.mutex(format!("m{member}-{n}")).lease(lease);
                waiting.push(tokio::spawn(async move { lock.lock_timeout(PATIENCE).await }));
                until_queued(locks, &format!("m{member}-{n}"), 2).await;
            }
            cluster.stop(member);
            // This is longer than a lease lasts without renewal.
            tokio::time::sleep(lease + Duration::from_secs(1)).await;
            assert!(held.iter().all(|guard| guard.is_held()), "{held:?}");
            for guard in held {
                release(guard).await;
            }
            for task in waiting {
                release(task.await.unwrap().unwrap()).await;
            }
            cluster.cont(member);
        }
    });
}

#[test]
fn partitioned_holder_loses_before_the_next_grant() {
    run(async {
        let cluster = Etcd::cluster();
        let proxies: Vec<Proxy> = (0..3).map(|n| Proxy::before(cluster.port(n))).collect();
        let hosts: Vec<String> =
            proxies.iter().map(|p| format!("127.0.0.1:{}", p.port())).collect();
        let cut_off = connect(&format!("etcd://{}", hosts.join(","))).await;
        let other = connect(&cluster.url()).await;
        let freeze = || proxies.iter().for_each(Proxy::freeze);
        let lease = Duration::from_secs(4);
        let next = lost_before_the_next_holds((&cut_off, lease), &other, "cut", freeze).await;
        for proxy in &proxies {
            proxy.thaw();
        }
        release(next).await;
        release(cut_off.mutex("cut").lock().await.unwrap()).await;
    });
}

// S82
/// The member still answers its clients as well as it can, and no connection ends.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn holder_on_an_isolated_member_loses_before_the_next_grant() {
    in_own_network(
        "etcd_members::holder_on_an_isolated_member_loses_before_the_next_grant",
        || {
            run(async {
                let (cluster, lease) = (Etcd::separable(&Setup::new()), Duration::from_secs(4));
                for cut in [Cut::Off, Cut::Mute, Cut::Deaf] {
                    for leads in [true, false] {
                        let leader = cluster.leader();
                        let member = if leads { leader } else { (leader + 1) % 3 };
                        let of = |n: usize| format!("etcd://127.0.0.1:{}", cluster.port(n));
                        let held = connect(&of(member)).await;
                        let other = connect(&of((member + 1) % 3)).await;
                        let name = format!("{cut:?}-{leads}");
                        let (held, breaking) = ((&held, lease), || cluster.cut(member, cut));
                        release(lost_before_the_next_holds(held, &other, &name, breaking).await)
                            .await;
                        // The member comes back with a later term, so there is one more election. After
                        // that, the client works as before.
                        cluster.heal();
                        release(held.0.mutex(name).lock_timeout(PATIENCE).await.unwrap()).await;
                    }
                }
            });
        },
    );
}

#[test]
fn cluster_without_a_majority_grants_nothing_and_reports_it() {
    run(async {
        let cluster = Etcd::cluster();
        let locks = connect(&cluster.url()).await;
        let promises = locks.guarantees();
        // The installed version determines which of the two it is.
        assert!(matches!(promises.on_failover, Survival::Exclusive | Survival::Fenced));
        let wanted = Guarantee::GrantDurability(leasehold::store::Durability::Majority);
        leasehold::builder().require(wanted).connect(cluster.url()).await.unwrap();
        let guard = locks.mutex("m").lease(Duration::from_secs(3)).lock().await.unwrap();
        cluster.kill(0);
        cluster.kill(1);
        let error = locks.mutex("other").lease(Duration::from_secs(3)).try_lock().await;
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Unreachable);
        let reason = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
        assert_eq!(reason, LostReason::Expired);
        let error = leasehold::connect(cluster.url()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert_eq!(format!("{error:#}").lines().count(), 1, "{error}");
    });
}

/// Checks the effect of a member that neither answers nor closes its connections.
async fn one_silent_member_costs_no_hold_and_no_more_than_two_seconds(members: usize) {
    let cluster = Etcd::with(Setup::new(), members);
    let url = cluster.url();
    let mut slowest = Vec::new();
    for round in 0..3 {
        let mut clients = Vec::new();
        for _ in 0..6 {
            clients.push(connect(&url).await);
        }
        let mut held = Vec::new();
        for (n, locks) in clients.iter().enumerate() {
            for lease in [5, 15] {
                let lock = locks.mutex(format!("silent-{round}-{n}-{lease}"));
                held.push(lock.lease(Duration::from_secs(lease)).lock().await.unwrap());
            }
        }
        // The leader is not paused, because an election takes time of its own.
        let member = (cluster.leader() + 1 + round % 2) % members;
        cluster.stop(member);
        let mut took = Duration::ZERO;
        let mut taking = tokio::task::JoinSet::new();
        for (n, locks) in clients.iter().enumerate() {
            let lock = locks.mutex(format!("wanted-{round}-{n}"));
            taking.spawn(async move {
                let begun = Instant::now();
                release(lock.lock().await.unwrap()).await;
                begun.elapsed()
            });
        }
        for each in taking.join_all().await {
            took = took.max(each);
        }
        slowest.push(took);
        // This is longer than any of the leases lasts without renewal.
        tokio::time::sleep(Duration::from_secs(16)).await;
        assert!(held.iter().all(|guard| guard.is_held()), "{held:?}");
        let begun = Instant::now();
        let late = connect(&url).await;
        slowest.push(begun.elapsed());
        cluster.cont(member);
        drop((held, late));
        if slowest.iter().rev().take(2).all(|took| *took <= Duration::from_secs(2)) {
            return;
        }
    }
    // A busy machine may need a round or two more.
    panic!("no hand-over within two seconds: {slowest:?}");
}

// F10
#[test]
#[ignore = "runs with ./test.sh --all"]
fn one_silent_member_of_three_costs_no_hold_and_no_more_than_two_seconds() {
    run(one_silent_member_costs_no_hold_and_no_more_than_two_seconds(3));
}

// F10
#[test]
#[ignore = "runs with ./test.sh --all"]
fn one_silent_member_of_five_costs_no_hold_and_no_more_than_two_seconds() {
    run(one_silent_member_costs_no_hold_and_no_more_than_two_seconds(5));
}

// F10
/// The cluster is only slow. Callers that give up early must not cost the holders their connection,
/// and the keep-alives that are under way on it.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn impatient_callers_do_not_break_connections_to_a_slow_cluster() {
    run(async {
        let cluster = Etcd::cluster();
        let proxies: Vec<Proxy> = (0..3).map(|n| Proxy::before(cluster.port(n))).collect();
        let hosts: Vec<String> =
            proxies.iter().map(|p| format!("127.0.0.1:{}", p.port())).collect();
        let locks = connect(&format!("etcd://{}", hosts.join(","))).await;
        let blocker = connect(&cluster.url()).await.mutex("f10").lock().await.unwrap();
        let held = locks.mutex("f10-held").lease(Duration::from_secs(6)).lock().await.unwrap();
        proxies.iter().for_each(|proxy| proxy.delay(Duration::from_millis(60)));
        let connections = || proxies.iter().map(Proxy::connections).sum::<usize>();
        let before = connections();
        let end = Instant::now() + Duration::from_secs(14);
        let mut impatient = tokio::task::JoinSet::new();
        for n in 0..8 {
            let lock = locks.mutex("f10");
            impatient.spawn(async move {
                while Instant::now() < end {
                    let limit = Duration::from_millis(130 + 40 * n);
                    let error = lock.lock_timeout(limit).await.unwrap_err();
                    assert!(
                        matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unreachable),
                        "{error}"
                    );
                }
            });
        }
        impatient.join_all().await;
        assert!(held.is_held(), "{held:?}");
        let more = connections() - before;
        // If the machine paused, one or two may have been replaced.
        assert!(more <= 4, "{more} new connections, although none was needed");
        release(held).await;
        drop(blocker);
    });
}

// F09
/// Each lock has its own lease, and a follower forwards the keep-alives to the leader one after the
/// other. On one stream, all of them together take longer than a keep-alive may take.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn thousands_of_locks_are_renewed_through_a_distant_follower() {
    const MANY: usize = 1_600;
    run(async {
        let cluster = Etcd::apart(Duration::from_millis(2));
        let follower = (cluster.leader() + 1) % 3;
        let locks = connect(&format!("etcd://127.0.0.1:{}", cluster.port(follower))).await;
        let mut held = Vec::new();
        for first in (0..MANY).step_by(200) {
            let mut taking = tokio::task::JoinSet::new();
            for n in first..first + 200 {
                let lock = locks.mutex(format!("f09-{n}"));
                taking.spawn(async move { lock.lock_timeout(PATIENCE).await.unwrap() });
            }
            held.extend(taking.join_all().await);
        }
        // Each lock is renewed several times.
        tokio::time::sleep(Duration::from_secs(22)).await;
        let lost = held.iter().filter(|guard| !guard.is_held()).count();
        assert_eq!(lost, 0, "lost locks of {MANY}");
        // Releasing them would wait for all of them.
        drop(held);
    });
}

// F47
/// A learner has all data but no vote, so it does not add to a majority.
#[test]
fn learner_does_not_count_as_a_member() {
    run(async {
        let server = Etcd::start();
        let add = ["member", "add", "learner", "--learner", "--peer-urls=http://127.0.0.1:1"];
        server.etcdctl(&add);
        let locks = connect(&server.url()).await;
        assert_eq!(locks.guarantees().grant, Durability::Disk);
        let found = locks.diagnose().await.unwrap();
        assert!(found.iter().any(|f| f.id == "one-member"), "{found:?}");
        assert!(found.iter().all(|f| f.id != "even"), "{found:?}");
        release(locks.mutex("f47").lock().await.unwrap()).await;
    });
}
