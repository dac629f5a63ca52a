//! A cluster whose slots move, whose nodes are paused, or that is down completely.

use std::time::Duration;

use crate::redis_common::*;
use leasehold::store::{Joined, Renew, Renewal};
use leasehold::{ErrorKind, LostReason, State};
use leasehold_test_support::*;
use testbed::{Cluster, Redis, Setup};

// S26
#[test]
#[ignore = "runs with ./test.sh --all"]
fn migrating_slot_costs_no_lease() {
    run(async {
        let cluster = testbed::cluster();
        let (locks, other) = (connect(&cluster.url()).await, connect(&cluster.url()).await);
        let lease = Duration::from_secs(6);
        // Clusters hash these names in unusual ways.
        for (n, name) in ["b", "a}b", "{}x", "x{y}z"].into_iter().enumerate() {
            let slot: u16 =
                cluster.nodes()[0].command(&["CLUSTER", "KEYSLOT", name]).parse().unwrap();
            let owner = |slot: u16| {
                let mut nodes = cluster.nodes().iter();
                let owns = |node: &Redis| {
                    !node
                        .command(&["CLUSTER", "COUNTKEYSINSLOT", &slot.to_string()])
                        .starts_with('0')
                };
                nodes.position(owns)
            };
            let guard = locks.mutex(name).lease(lease).lock().await.unwrap();
            let waiter = tokio::spawn({
                let mutex = other.mutex(name).lease(lease);
                async move { mutex.lock().await }
            });
            until_waiting(&locks, name, 1).await;
            let from = owner(slot).expect("no node has the lock's key");
            let to = (from + 1) % 3;
            cluster.begin_move(slot, from, to);
            // Some of the keys are on each node for longer than a lease.
            cluster.move_keys(slot, from, to, 1 + n % 3);
            tokio::time::sleep(lease * 3 / 2).await;
            assert!(guard.is_held(), "{name:?} was lost while its slot moved");
            while cluster.move_keys(slot, from, to, 100) > 0 {}
            cluster.end_move(slot, to);
            let first = guard.token();
            release(guard).await;
            let next = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
            assert!(next.token() > first);
            release(next).await;
        }
    });
}

// S26
/// One script renews all locks of a slot. It must not wait while only some of their keys have
/// moved, because moving the slot may take longer than a lease.
#[test]
fn locks_of_one_slot_are_renewed_while_only_one_has_migrated() {
    run(async {
        let cluster = testbed::cluster();
        let locks = connect(&cluster.url()).await;
        let (a, b) = (mutex("{review}a"), mutex("{review}b"));
        for claim in [&a, &b] {
            assert!(matches!(join(&locks, claim).await, Joined::Holding { .. }));
        }
        let nodes = cluster.nodes();
        let slot = nodes[0].command(&["CLUSTER", "KEYSLOT", "{review}a"]);
        let keys = |node: &Redis| node.command(&["CLUSTER", "COUNTKEYSINSLOT", &slot]);
        let from =
            nodes.iter().take(3).position(|node| keys(node) != "0").expect("no node has the keys");
        let (to, slot) = ((from + 1) % 3, slot.parse().unwrap());
        cluster.begin_move(slot, from, to);
        let port = nodes[to].port().to_string();
        nodes[from].command(&["MIGRATE", "127.0.0.1", &port, "{review}a", "0", "5000"]);
        let renewed = locks.store();
        let all: Vec<Renew> =
            [&a, &b].map(|c| Renew { claim: c.clone(), lease: c.lease }).into_iter().collect();
        let renewed = renewed.renew(&all).await;
        // The cluster is always restored for the other cases.
        while cluster.move_keys(slot, from, to, 100) > 0 {}
        cluster.end_move(slot, to);
        let renewed = renewed.unwrap_or_else(|error| panic!("{error}"));
        assert!(renewed.iter().all(|r| matches!(r, Renewal::Holding { .. })), "{renewed:?}");
    });
}

// S26
/// One batch renews all locks. It contains a semaphore in a slot that is being moved, which cannot
/// be renewed.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn semaphore_in_a_migrating_slot_does_not_stop_mutex_renewals() {
    run(async {
        let cluster = Cluster::unbroken();
        let locks = connect(&cluster.url()).await;
        let slot_of = |name: &str| -> u16 {
            cluster.nodes()[0].command(&["CLUSTER", "KEYSLOT", name]).parse().unwrap()
        };
        let moving = slot_of("permits");
        let node = usize::from(moving) * 3 / 16_384;
        let beside = |name: &String| {
            let slot = slot_of(name);
            slot != moving && usize::from(slot) * 3 / 16_384 == node
        };
        let names: Vec<String> = (0..).map(|n| format!("m{n}")).filter(beside).take(10).collect();
        // The connections are open, so that all locks are acquired and renewed at the same time.
        release(locks.mutex(&names[0]).lock().await.unwrap()).await;
        let lease = Duration::from_secs(6);
        let mut taking = tokio::task::JoinSet::new();
        for name in &names {
            let mutex = locks.mutex(name).lease(lease);
            taking.spawn(async move { mutex.lock().await });
        }
        let permit = locks.semaphore("permits", 3).lease(lease).acquire().await.unwrap();
        let held: Vec<_> = taking.join_all().await.into_iter().map(Result::unwrap).collect();
        cluster.begin_move(moving, node, (node + 1) % 3);
        tokio::time::sleep(lease * 3 / 2).await;
        for guard in &held {
            assert!(guard.is_held(), "{} was lost with a lock in another slot", guard.name());
        }
        // The semaphore has several keys. It is lost, and reports that.
        assert_eq!(permit.state(), State::Lost(LostReason::Expired));
        for end in [node, (node + 1) % 3] {
            let slot = moving.to_string();
            cluster.nodes()[end].command(&["CLUSTER", "SETSLOT", &slot, "STABLE"]);
        }
        release(locks.semaphore("permits", 3).acquire().await.unwrap()).await;
        for guard in held {
            release(guard).await;
        }
    });
}

#[test]
fn locks_stay_exclusive_while_slots_migrate() {
    run(async {
        let cluster = testbed::cluster();
        let clients = [connect(&cluster.url()).await, connect(&cluster.url()).await];
        let slot: u16 =
            cluster.nodes()[0].command(&["CLUSTER", "KEYSLOT", "moving"]).parse().unwrap();
        let home = usize::from(slot) * 3 / 16_384;
        let breaking = move || {
            for round in 0..6 {
                let (from, to) = ((home + round) % 3, (home + round + 1) % 3);
                cluster.begin_move(slot, from, to);
                while cluster.move_keys(slot, from, to, 100) > 0 {}
                cluster.end_move(slot, to);
            }
        };
        hammer_while(&clients, "moving", 4, 10, breaking).await;
    });
}

#[test]
fn paused_node_costs_only_its_own_leases() {
    run(async {
        // Otherwise the other nodes soon refuse all requests, too.
        let setup = Setup::new().fast().arg("--cluster-require-full-coverage").arg("no");
        let cluster = Cluster::with(3, 0, setup);
        let locks = connect(&cluster.url()).await;
        let (stopped, living) = ("b", "a");
        let lease = Duration::from_secs(6);
        // The lock on the live node is acquired first. Without renewals it would be lost before the
        // other one.
        let on_living = locks.mutex(living).lease(lease).lock().await.unwrap();
        let on_stopped = locks.mutex(stopped).lease(lease).lock().await.unwrap();
        cluster.nodes()[0].stop();
        assert_eq!(on_stopped.lost().await, LostReason::Expired);
        assert!(on_living.is_held());
        cluster.nodes()[0].cont();
        release(on_living).await;
    });
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn cluster_that_is_down_is_reported() {
    run(async {
        let cluster = Cluster::unbroken();
        let locks = connect(&cluster.url()).await;
        release(locks.mutex("b").lock().await.unwrap()).await;
        for node in cluster.nodes() {
            node.command(&["CLUSTER", "DELSLOTSRANGE", "0", "5460"]);
        }
        let check = |error: &leasehold::Error| {
            assert_told(error, ErrorKind::Unreachable, "secret");
            let text = format!("{error:#}");
            assert!(text.contains("CLUSTER INFO") && text.contains("CLUSTERDOWN"), "{text}");
        };
        check(&locks.mutex("b").try_lock().await.unwrap_err());
        // A client that connects now finds no node for the slot in the map.
        let late = leasehold::connect(&cluster.url()).await.unwrap();
        check(&late.mutex("b").try_lock().await.unwrap_err());
        // This server is in cluster mode, but no cluster has been created.
        let setup = Setup::new().fast().arg("--cluster-enabled").arg("yes");
        let bare = Redis::with(setup.arg("--cluster-port").arg(unused_port().to_string()));
        let url = format!("redis+cluster://127.0.0.1:{}/", bare.port());
        check(&leasehold::connect(&url).await.unwrap_err());
    });
}

/// The address now belongs to a node of another cluster, which is up and has the same slots.
#[test]
fn node_of_another_cluster_at_a_known_address_grants_nothing() {
    run(async {
        let setup = || Setup::new().arg("--cluster-require-full-coverage").arg("no");
        let (ours, theirs) = (Cluster::with(3, 0, setup()), Cluster::with(3, 0, setup()));
        let locks = connect(&ours.url()).await;
        let [node, stranger] = [&ours.nodes()[0], &theirs.nodes()[0]];
        let is_there = |name: &String| {
            let slot: usize = node.command(&["CLUSTER", "KEYSLOT", name]).parse().unwrap();
            slot * 3 / 16_384 == 0
        };
        let name = (0..).map(|n| format!("job{n}")).find(is_there).unwrap();
        release(locks.mutex(&name).lock().await.unwrap()).await;
        node.kill();
        stranger.listen_at(node.port());
        let refused = locks.mutex(&name).lease(PATIENCE).try_lock().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unreachable, "{refused}");
        let expected = format!("127.0.0.1:{} does not belong to the Redis Cluster", node.port());
        assert!(format!("{refused:#}").contains(&expected), "{refused:#}");
        // The waiter waits until its own cluster has that node again.
        let waiter = tokio::spawn({
            let mutex = locks.mutex(&name).lease(PATIENCE);
            async move { mutex.lock().await }
        });
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert!(!waiter.is_finished());
        assert_eq!(stranger.command(&["EXISTS", &name]), "0");
        stranger.listen_at(stranger.port());
        node.restart();
        let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap();
        release(guard.unwrap_or_else(|error| panic!("{error}"))).await;
    });
}
