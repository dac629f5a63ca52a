//! The cost of an acquire and release, a hand-over, a failed try and a heartbeat: round trips,
//! packets and bytes.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::zookeeper_common::*;
use leasehold::ErrorKind;
use leasehold::store::{Claim, Joined, Mode, Signal};
use testbed::{Proxy, ZooKeeper, zookeeper};
use tokio::task::JoinSet;

#[test]
fn acquire_and_release_take_one_round_trip_each() {
    run(async {
        let proxy = Proxy::before(zookeeper().port());
        // Pulses are 6 s apart in such a session.
        let locks = connect(&through(&proxy, "?session=60s&naming=kazoo")).await;
        release(locks.mutex("round-trips").lock().await.unwrap()).await;
        // With this delay, requests that are sent without waiting for a reply arrive before there
        // is one.
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
        // With kazoo's naming, the server does not delete the node, so nothing else is sent.
        assert_eq!(batches.iter().min(), Some(&10), "{batches:?} round trips, each for 5 pairs");
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
            assert!(contended.holders().iter().any(|h| h.token == guard.grant()), "{contended}");
        }
        assert_eq!(made().await, before);
        release(guard).await;
        release(tries.mutex("tried").try_lock().await.unwrap()).await;
    });
}

/// The first round trip shows that the lock's node does not exist. No other reply is needed before
/// the child exists.
#[test]
fn acquiring_a_reaped_lock_takes_two_round_trips() {
    run(async {
        let proxy = Proxy::before(zookeeper().port());
        let locks = connect(&through(&proxy, "?session=60s")).await;
        let raw = raw(zookeeper().port()).await;
        let mut made = false;
        // A pulse's reply may be one of those that pass, but not each time.
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
        panic!("the child is created only after the reply about the lock's node");
    });
}

/// Returns the fewest packets that the server received and sent in one turn of this many clients.
/// Each client has a separate connection. In a turn the holder releases, the next client is
/// notified, and the former holder queues again. Heartbeats add packets to some turns, so the
/// fewest count.
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
    // One reply has both numbers. The query itself counts too.
    let packets = || {
        let answer = || Some(server.ask("mntr")).filter(|reply| !reply.is_empty());
        let reply = (0..100).find_map(|_| answer()).expect("the server did not reply to mntr");
        let number = |name: &str| -> i64 {
            reply.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok()).unwrap()
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
        let reply = opened[next].store().changed(&all[turn + 1]);
        let reply = tokio::time::timeout(PATIENCE, reply).await.unwrap().unwrap();
        assert!(matches!(reply, Signal::Granted(_)), "{reply:?}");
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

/// Each waiting client used to be sent every change of the queue, which took 18 packets for 8
/// clients and 37 for 32.
///
/// Now there are six requests: to delete a node, to create one, to list the queue, to watch two
/// nodes, and the next in line lists the queue again. There are six replies, and two notifications
/// of the deleted node, to its owner and to the next in line.
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

// F45
/// A release used to wake all waiters that had the holder among the fifty claims ahead of them.
/// Each of them read the queue and watched all fifty again.
#[test]
fn release_among_fifty_permits_causes_no_stampede() {
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
                // The query for the number is counted too, and perhaps a pulse.
                let quiet = now - before < 12;
                before = now;
                quiet
            })
            .await;
            before
        };
        // The holder nearest to the waiters blocks all of them.
        let (holders, waiters) = all.split_at(usize::try_from(PERMITS).unwrap());
        for (holder, waiter) in holders.iter().rev().zip(waiters).take(3) {
            let before = settled().await;
            assert!(locks.store().leave(holder, None).await.unwrap());
            let signal = tokio::time::timeout(PATIENCE, locks.store().changed(waiter)).await;
            assert!(matches!(signal, Ok(Ok(Signal::Granted(_)))), "{signal:?}");
            let spent = settled().await - before;
            assert!(spent < 500, "{spent} packets for one hand-over");
        }
    });
}

/// Counts the writes and the requests that waiting clients send to a server. The last value is the
/// number of seconds.
async fn load_of_waiters(clients: usize) -> (i64, i64, f64) {
    let server = ZooKeeper::start();
    let url = format!("{}?session=60s", server.url());
    let holder = patient("idle");
    let mut opened = vec![connect(&url).await];
    holds(opened[0].store(), &holder).await;
    let mut waiting = JoinSet::new();
    for n in 0..clients {
        let locks = connect(&url).await;
        let lock = locks.mutex("idle");
        waiting.spawn(async move { lock.lock().await.map(drop) });
        until_waiting(&opened[0], "idle", n + 1).await;
        opened.push(locks);
    }
    let number = |word: &str, name: &str, radix: u32| {
        let answer = || Some(server.ask(word)).filter(|reply| !reply.is_empty());
        let reply = (0..100).find_map(|_| answer()).expect("the server did not reply to mntr");
        let line = reply.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        i64::from_str_radix(line.trim().trim_start_matches("0x"), radix).unwrap()
    };
    let load = || (number("srvr", "Zxid:", 16), number("mntr", "zk_packets_received", 10));
    let (before, begun) = (load(), Instant::now());
    tokio::time::sleep(Duration::from_secs(16)).await;
    let (after, seconds) = (load(), begun.elapsed().as_secs_f64());
    assert!(waiting.try_join_next().is_none());
    leaves(opened[0].store(), &holder).await;
    while let Some(done) = waiting.join_next().await {
        done.unwrap().unwrap();
    }
    (after.0 - before.0, after.1 - before.1, seconds)
}

/// Each waiter used to write every two seconds, which a majority had to store on disk.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn waiters_write_nothing() {
    run(async {
        let all = tokio::join!(load_of_waiters(4), load_of_waiters(60));
        for (clients, (writes, requests, seconds)) in [(4, all.0), (60, all.1)] {
            println!("{clients} waiters: {writes} writes, {requests} requests in {seconds:.1} s");
            // Each client opens and closes a session once, which shows the length of a tick.
            assert!(writes <= 3 * clients, "{writes} writes of {clients} waiters");
        }
    });
}

// F45
/// Each heartbeat of each waiter used to list all of them.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn idle_waiters_do_not_list_each_other() {
    const WAITERS: usize = 40;
    run(async {
        let (port, recorded) = listening_in(zookeeper().port()).await;
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
        // Until a client has read all claims once, its heartbeats are larger. On a busy machine, that
        // takes several of them.
        let mut least = f64::INFINITY;
        for _ in 0..8 {
            let (before, begun) = (recorded.bytes.load(Ordering::SeqCst), Instant::now());
            tokio::time::sleep(Duration::from_secs(8)).await;
            let spent = recorded.bytes.load(Ordering::SeqCst) - before;
            // A heartbeat is sent every two seconds, and a listing has 40 names of 60 bytes.
            let beats = begun.elapsed().as_secs_f64() / 2.0 + 1.0;
            least = least.min(spent as f64 / (beats * WAITERS as f64));
            if least < 800.0 {
                break;
            }
        }
        assert!(least < 800.0, "{least} bytes for each heartbeat of a waiter");
        assert!(waiting.try_join_next().is_none());
        drop(guard);
        while let Some(done) = waiting.join_next().await {
            done.unwrap().unwrap();
        }
    });
}
