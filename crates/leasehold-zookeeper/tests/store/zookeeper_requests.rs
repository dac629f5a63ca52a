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

/// With others in the queue as without them: a creation and a deletion a turn, and no reading.
#[test]
fn a_turn_is_two_requests() {
    run(async {
        let server = ZooKeeper::start();
        let url = format!("{}?session=60s", server.url());
        let clients = [connect(&url).await, connect(&url).await, connect(&url).await];
        let mut all: Vec<Claim> = (0..9).map(|_| patient("turns")).collect();
        holds(clients[0].store(), &all[0]).await;
        for (n, one) in all.iter().enumerate().skip(1) {
            waits(clients[n % 3].store(), one, n).await;
        }
        let mut least = i64::MAX;
        for turn in 0..8 {
            let before = server.metric("zk_packets_received");
            leaves(clients[turn % 3].store(), &all[turn]).await;
            let told = clients[(turn + 1) % 3].store().changed(&all[turn + 1]);
            let told = tokio::time::timeout(PATIENCE, told).await.unwrap().unwrap();
            assert!(matches!(told, Signal::Granted(_)), "{told:?}");
            all.push(patient("turns"));
            waits(clients[turn % 3].store(), &all[turn + 9], 8).await;
            least = least.min(server.metric("zk_packets_received") - before);
        }
        // And what asks for the number.
        assert!(least <= 3, "{least} requests for one turn");
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
