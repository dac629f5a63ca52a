//! What a pair, a turn, a failed try and a heartbeat cost: round trips, packets and bytes.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::zookeeper_common::*;
use leasehold::store::{Joined, Mode, Signal};
use leasehold::{Claim, ErrorKind};
use testbed::{Proxy, ZooKeeper, zookeeper};
use tokio::task::JoinSet;

#[test]
fn a_free_lock_is_one_round_trip_to_take_and_one_to_release() {
    run(async {
        let proxy = Proxy::before(zookeeper().port());
        // Pulses are 6 s apart in such a session.
        let locks = connect(&through(&proxy, "?session=60s&naming=kazoo")).await;
        release(locks.mutex("round-trips").lock().await.unwrap()).await;
        // What is sent without waiting for an answer then arrives before there is one.
        proxy.delay(Duration::from_millis(20));
        let mut batches = Vec::new();
        // A pulse adds one, and so does a client that is paused between two requests. On a busy machine
        // most batches have such an addition, so batches are counted until one has none.
        let end = std::time::Instant::now() + PATIENCE;
        while batches.last() != Some(&10) && std::time::Instant::now() < end {
            let before = proxy.round_trips();
            for _ in 0..5 {
                release(locks.mutex("round-trips").lock().await.unwrap()).await;
            }
            batches.push(proxy.round_trips() - before);
        }
        // A node of kazoo's naming is not reaped, so that nothing else is sent.
        assert_eq!(batches.iter().min(), Some(&10), "{batches:?} round trips for 5 pairs each");
    });
}

#[test]
fn a_failed_try_writes_nothing() {
    run(async {
        let (holds, tries) = (connect(&url("")).await, connect(&url("")).await);
        let raw = raw(zookeeper().port()).await;
        let guard = holds.mutex("tried").lock().await.unwrap();
        let made = async || raw.check_stat("/leasehold/tried").await.unwrap().unwrap().cversion;
        let before = made().await;
        for _ in 0..3 {
            let contended = tries.mutex("tried").try_lock().await.unwrap_err();
            assert_eq!(contended.kind(), ErrorKind::Contended, "{contended}");
            assert!(contended.holders().iter().any(|h| h.token == guard.token()), "{contended}");
        }
        assert_eq!(made().await, before);
        release(guard).await;
        release(tries.mutex("tried").try_lock().await.unwrap()).await;
    });
}

/// The first shows that the lock's node is not there; nothing else has to be heard before the child is
/// there.
#[test]
fn a_reaped_lock_is_two_round_trips() {
    run(async {
        let proxy = Proxy::before(zookeeper().port());
        let locks = connect(&through(&proxy, "?session=60s")).await;
        let raw = raw(zookeeper().port()).await;
        let mut made = false;
        // A pulse's answer may be one of those that pass, but not each time.
        for round in 0..5 {
            let name = format!("reaped-{round}");
            proxy.drop_replies_after(2);
            let lock = locks.mutex(&name);
            let taking = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
            let end = Instant::now() + Duration::from_secs(2);
            while !made && Instant::now() < end {
                tokio::time::sleep(Duration::from_millis(10)).await;
                made = children(&raw, &format!("/leasehold/{name}")).await.len() == 1;
            }
            proxy.pass_replies();
            proxy.cut();
            release(taking.await.unwrap().unwrap()).await;
            if made {
                return;
            }
        }
        panic!("the child is made only after its lock's node was answered");
    });
}

/// The fewest packets that the server received and sent in one turn of so many clients. Each client
/// has a connection of its own. In a turn the holder releases, the next client is notified, and the
/// former holder queues again. Heartbeats add packets to some turns, so the fewest count.
async fn packets_of_a_turn(clients: usize) -> (i64, i64) {
    let server = ZooKeeper::start();
    let url = format!("{}?session=60s", server.url());
    let mut all: Vec<Claim> = (0..clients).map(|_| patient("turns")).collect();
    let mut opened = Vec::new();
    for (n, one) in all.iter().enumerate() {
        opened.push(connect(&url).await);
        match n {
            0 => holds(opened[n].store(), one).await,
            n => waits(opened[n].store(), one, n).await,
        }
    }
    // One answer has both numbers; asking for it counts too.
    let packets = || {
        let answer = || Some(server.ask("mntr")).filter(|told| !told.is_empty());
        let told = (0..100).find_map(|_| answer()).expect("an answer");
        let number = |name: &str| -> i64 {
            told.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok()).unwrap()
        };
        (number("zk_packets_received"), number("zk_packets_sent"))
    };
    let (once, twice) = (packets(), packets());
    let asking = (twice.0 - once.0, twice.1 - once.1);
    let mut fewest = (i64::MAX, i64::MAX);
    for turn in 0..20 {
        let (holder, next) = (turn % clients, (turn + 1) % clients);
        let before = packets();
        leaves(opened[holder].store(), &all[turn]).await;
        let told = opened[next].store().changed(&all[turn + 1]);
        let told = tokio::time::timeout(PATIENCE, told).await.unwrap().unwrap();
        assert!(matches!(told, Signal::Granted(_)), "{told:?}");
        all.push(patient("turns"));
        waits(opened[holder].store(), &all[turn + clients], clients - 1).await;
        let after = packets();
        let spent = (after.0 - before.0 - asking.0, after.1 - before.1 - asking.1);
        // The first two turns are of clients that have not queued again yet.
        if turn >= 2 {
            fewest = (fewest.0.min(spent.0), fewest.1.min(spent.1));
        }
    }
    fewest
}

/// Each client that waited was sent every change of the queue: 18 packets for 8 clients, 37 for 32.
///
/// Now there are six requests: to delete a node, to create one, to list the queue, to watch two
/// nodes, and the next in line lists the queue again. Six replies, and two notifications of the
/// deleted node: to its owner and to the next in line.
#[test]
fn a_hand_over_costs_the_same_for_4_and_32_and_200_clients() {
    run(async {
        for clients in [4, 32, 200] {
            let (received, sent) = packets_of_a_turn(clients).await;
            let is_flat = received <= 6 && sent <= 8;
            assert!(is_flat, "{clients} clients: {received} requests and {sent} packets back");
        }
    });
}

/// A release woke all who had the holder among the fifty before them, and each of those looked at the
/// queue and watched all fifty anew.
#[test]
fn f45_a_release_of_fifty_permits_is_no_stampede() {
    const PERMITS: u32 = 50;
    run(async {
        let server = ZooKeeper::start();
        let locks = connect(&format!("{}?session=60s", server.url())).await;
        let all: Vec<Claim> = (0..2 * PERMITS).map(|_| permits("crowd", 1, PERMITS)).collect();
        for claim in &all {
            let joined = locks.store().join(claim, Mode::Wait).await.unwrap();
            let waits = matches!(joined, Joined::Waiting(_));
            assert_eq!(waits, server.metric("zk_ephemerals_count") > i64::from(PERMITS));
        }
        let packets = || server.metric("zk_packets_received") + server.metric("zk_packets_sent");
        let settled = async || {
            let mut before = packets();
            until("quiet", async || {
                tokio::time::sleep(Duration::from_millis(200)).await;
                let now = packets();
                // What asks for the number is counted too, and perhaps a pulse.
                let quiet = now - before < 12;
                before = now;
                quiet
            })
            .await;
            before
        };
        // The nearest of those who hold to those who wait is in the way of all of them.
        let (holders, waiters) = all.split_at(usize::try_from(PERMITS).unwrap());
        for (holder, waiter) in holders.iter().rev().zip(waiters).take(3) {
            let before = settled().await;
            assert!(locks.store().leave(holder, None).await.unwrap());
            let told = tokio::time::timeout(PATIENCE, locks.store().changed(waiter)).await;
            assert!(matches!(told, Ok(Ok(Signal::Granted(_)))), "{told:?}");
            let spent = settled().await - before;
            assert!(spent < 500, "{spent} packets for one hand-over");
        }
    });
}

/// Each heartbeat of each waiter listed all of them.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn f45_idle_waiters_do_not_list_each_other() {
    const WAITERS: usize = 40;
    run(async {
        let (port, heard) = listening_in(zookeeper().port()).await;
        let url = format!("zookeeper://127.0.0.1:{port}?session=60s");
        let holder = connect(&zookeeper().url()).await;
        let guard = holder.mutex("idle").lock().await.unwrap();
        let mut clients = Vec::new();
        let mut waiting = JoinSet::new();
        for n in 0..WAITERS {
            let locks = connect(&url).await;
            let lock = locks.mutex("idle");
            waiting.spawn(async move { lock.lock().await.map(drop) });
            until_waiting(&holder, "idle", n + 1).await;
            clients.push(locks);
        }
        // Some heartbeats until each has seen all who came.
        tokio::time::sleep(Duration::from_secs(12)).await;
        let (before, begun) = (heard.bytes.load(Ordering::SeqCst), Instant::now());
        tokio::time::sleep(Duration::from_secs(8)).await;
        let spent = heard.bytes.load(Ordering::SeqCst) - before;
        // A heartbeat comes every two seconds, and a listing has 40 names of 60 bytes.
        let beats = begun.elapsed().as_secs_f64() / 2.0 + 1.0;
        let each = spent as f64 / (beats * WAITERS as f64);
        assert!(each < 800.0, "{each} bytes for each heartbeat of a waiter");
        assert!(waiting.try_join_next().is_none());
        drop(guard);
        while let Some(done) = waiting.join_next().await {
            done.unwrap().unwrap();
        }
    });
}
