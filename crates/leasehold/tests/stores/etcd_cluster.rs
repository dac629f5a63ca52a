//! The etcd store on three real members: killed, stopped, cut off, all gone and back.

#![cfg(feature = "etcd")]

use std::sync::Arc;
use std::time::Duration;

// Members may be electing a leader.
use crate::common::connect_patiently as connect;
use crate::etcd_common::*;
use leasehold::store::{Guarantee, Survival};
use leasehold::{ErrorKind, LostReason};
use testbed::{Cut, Etcd, Proxy, in_own_network};

/// Everything that breaks a cluster is done to one, in turn: starting three members is dear.
#[test]
fn exact_while_members_are_killed_and_restarted_one_after_another() {
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
        // Rounds until the breaking is over, so that it cannot miss.
        while !breaking.is_finished() {
            hammer(&clients, "counted", 6, 10).await;
        }
        breaking.await.unwrap();
        // And once more after the last of them.
        hammer(&clients, "counted", 6, 10).await;
        assert!(kept.is_held(), "{kept:?}");
        let error = clients[1].mutex("kept").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");

        // The leader goes while one waits; the holder keeps what it has, the waiter gets it.
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

        // All members at once: leases, places and tokens are still there.
        let holder = next.token();
        let lock = clients[0].mutex("kept").lease(lease);
        let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
        until_queued(&clients[1], "kept", 2).await;
        let down = cluster.clone();
        tokio::task::spawn_blocking(move || down.restart_all()).await.unwrap();
        let mut told = None;
        until("an answer", async || {
            told = clients[1].read("kept").await.ok();
            told.is_some()
        })
        .await;
        let info = told.unwrap().unwrap();
        assert_eq!(info.holders().next().unwrap().token, Some(holder));
        assert!(!waiting.is_finished());
        release(next).await;
        assert!(waiting.await.unwrap().unwrap().token() > holder);
    });
}

#[test]
fn stopped_members_cost_no_lease_and_no_turn() {
    run(async {
        let cluster = Etcd::cluster();
        let url = cluster.url();
        for member in 0..cluster.len() {
            // Enough that some are connected to each member. New ones each time, with new leases:
            // a leader that was stopped and goes on ends leases that it believes to be over, though
            // its successor renewed them (etcd before 3.4.31 and 3.5.13).
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
            // Longer than the lease would last unrenewed.
            tokio::time::sleep(lease + Duration::from_secs(1)).await;
            assert!(held.iter().all(leasehold::Guard::is_held), "{held:?}");
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
fn who_is_cut_off_has_lost_before_another_holds() {
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

/// The member goes on answering its clients as well as it can, and no connection ends.
#[test]
fn s82_a_member_without_the_others_keeps_nobody_believing() {
    in_own_network("etcd_cluster::s82_a_member_without_the_others_keeps_nobody_believing", || {
        run(async {
            let (cluster, lease) = (Etcd::separable(), Duration::from_secs(4));
            for cut in [Cut::Off, Cut::Mute, Cut::Deaf] {
                for leads in [true, false] {
                    let leader = cluster.leader();
                    let member = if leads { leader } else { (leader + 1) % 3 };
                    let of = |n: usize| format!("etcd://127.0.0.1:{}", cluster.port(n));
                    let held = connect(&of(member)).await;
                    let other = connect(&of((member + 1) % 3)).await;
                    let name = format!("{cut:?}-{leads}");
                    let (held, breaking) = ((&held, lease), || cluster.cut(member, cut));
                    release(lost_before_the_next_holds(held, &other, &name, breaking).await).await;
                    // The member comes back with a later term, so there is one more election. After
                    // that, the client is as good as new.
                    cluster.mend();
                    release(held.0.mutex(name).lock_timeout(PATIENCE).await.unwrap()).await;
                }
            }
        });
    });
}

#[test]
fn without_a_majority_nothing_is_granted_and_it_is_told() {
    run(async {
        let cluster = Etcd::cluster();
        let locks = connect(&cluster.url()).await;
        let promises = locks.guarantees();
        // Which of the two, its version decides.
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
        assert_eq!(error.to_string().lines().count(), 1, "{error}");
    });
}
