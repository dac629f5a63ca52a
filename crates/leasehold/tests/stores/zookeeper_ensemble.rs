//! The ZooKeeper store on three members that are killed, stopped and cut off.

#![cfg(feature = "zookeeper")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::zookeeper_common::*;
use leasehold::{ErrorKind, Leasehold, LostReason, State};
use testbed::{Cut, Proxy, ZooKeeper, ZooKeeperSetup, ZooKeepers, in_own_network};

/// A client that knows one member only.
async fn connect_to(member: &ZooKeeper, rest: &str) -> Leasehold {
    connect(&format!("{}{rest}", member.url())).await
}

/// Somebody waits elsewhere while the holder's member is broken: the holder must know first.
async fn lost_before_the_next_holds(
    held: &Leasehold,
    other: &Leasehold,
    name: &str,
    breaking: impl FnOnce(),
) {
    let (guard, next) = loop {
        let guard = held.mutex(name).lock_timeout(PATIENCE).await.unwrap();
        let next = tokio::spawn({
            let lock = other.mutex(name);
            async move { lock.lock_timeout(PATIENCE).await }
        });
        until("the other to wait", async || {
            let info = other.read(name).await.unwrap();
            next.is_finished() || info.is_some_and(|info| info.waiters().count() == 1)
        })
        .await;
        // So that what the leader knows is as old as it usually is.
        tokio::time::sleep(Duration::from_millis(700)).await;
        if guard.is_held() {
            break (guard, next);
        }
        // On a machine that stood still, the lease is over before anything is broken.
        release(next.await.unwrap().unwrap()).await;
    };
    breaking();
    let next = next.await.unwrap().unwrap();
    assert!(!guard.is_held(), "two holders: {guard:?} and {next:?}");
    assert_eq!(guard.state(), State::Lost(LostReason::Expired));
    assert!(next.token() > guard.token());
    release(next).await;
}

#[test]
fn s72_a_follower_that_is_stopped_or_cut_off_keeps_nobody_believing() {
    run(async {
        let all = ZooKeepers::with(&ZooKeeperSetup::new().links());
        let (leader, followers) = (all.leader(), all.followers());
        let other = connect_to(leader, "?session=30s").await;
        let held = connect_to(followers[0], "?session=4s").await;
        lost_before_the_next_holds(&held, &other, "stopped", || followers[0].stop()).await;
        followers[0].cont();
        // With only two members left, cutting one off would leave no majority.
        until("all to follow", async || leader.metric("zk_synced_followers") == 2).await;
        // This one goes on answering its clients, for five seconds (syncLimit).
        let held = connect_to(followers[1], "?session=4s").await;
        lost_before_the_next_holds(&held, &other, "cut-off", || all.cut_off(followers[1])).await;
        all.mend(followers[1]);
    });
}

#[test]
fn s72_one_way_silence_is_lost_before_another_holds() {
    run(async {
        let server = ZooKeeper::start();
        let other = connect_to(&server, "?session=30s").await;
        let ways: [fn(&Proxy); 2] = [Proxy::hold_requests, Proxy::hold_replies];
        for (name, silence) in ["requests", "replies"].into_iter().zip(ways) {
            let proxy = Proxy::before(server.port());
            let url = format!("zookeeper://127.0.0.1:{}?session=4s", proxy.port());
            let held = connect(&url).await;
            lost_before_the_next_holds(&held, &other, name, || silence(&proxy)).await;
            proxy.thaw();
            release(held.mutex(name).lock_timeout(PATIENCE).await.unwrap()).await;
        }
    });
}

/// Between members, in one way only; their clients stay connected.
#[test]
fn s72_a_member_that_is_mute_or_deaf_keeps_nobody_believing() {
    in_own_network(
        "zookeeper_ensemble::s72_a_member_that_is_mute_or_deaf_keeps_nobody_believing",
        || {
            run(async {
                let all = ZooKeepers::separable();
                for cut in [Cut::Mute, Cut::Deaf] {
                    for leads in [false, true] {
                        let (leader, follower) = (all.leader(), all.followers()[0]);
                        let (member, rest) =
                            if leads { (leader, follower) } else { (follower, leader) };
                        let other = connect_to(rest, "?session=30s").await;
                        let held = connect_to(member, "?session=4s").await;
                        let name = format!("{cut:?}-{leads}");
                        lost_before_the_next_holds(&held, &other, &name, || all.cut(member, cut))
                            .await;
                        all.uncut();
                        release(held.mutex(name).lock_timeout(PATIENCE).await.unwrap()).await;
                    }
                }
            });
        },
    );
}

/// Whichever member says nothing any more, the clients that know the others go to them in time.
#[test]
fn paused_members_cost_no_lease() {
    run(async {
        let all = ZooKeepers::start();
        // The leader last: after it there is another one, but the election takes its time.
        let leader = all.leader();
        let followers = all.followers().into_iter().map(|member| (member, ""));
        let members = followers.chain([(leader, "?session=20s")]);
        for (round, (member, rest)) in members.enumerate() {
            let mut clients = Vec::new();
            for _ in 0..6 {
                clients.push(connect(&format!("{}{rest}", all.url())).await);
            }
            let (mut held, mut waiting) = (Vec::new(), Vec::new());
            for (n, locks) in clients.iter().enumerate() {
                let name = format!("paused-{round}-{n}");
                held.push(locks.mutex(&name).lock().await.unwrap());
                let lock = clients[(n + 1) % clients.len()].mutex(&name);
                waiting.push(tokio::spawn(async move { lock.lock_timeout(PATIENCE).await }));
                until_waiting(locks, &name, 1).await;
            }
            member.stop();
            // Longer than a lease lasts unrenewed.
            tokio::time::sleep(Duration::from_secs(16)).await;
            assert!(held.iter().all(leasehold::Guard::is_held), "{held:?}");
            for guard in held {
                release(guard).await;
            }
            for task in waiting {
                release(task.await.unwrap().unwrap()).await;
            }
            member.cont();
        }
    });
}

#[test]
fn a_hold_outlives_its_leader_and_all_members() {
    run(async {
        let all = ZooKeepers::start();
        let locks = connect(&format!("{}?session=60s", all.url())).await;
        let lock = locks.mutex("kept").lease(Duration::from_secs(40));
        let guard = lock.lock().await.unwrap();
        let killed = all.leader();
        killed.kill();
        let other = connect(&all.url()).await;
        let contended = other.mutex("kept").try_lock().await.unwrap_err();
        assert_eq!(contended.kind(), ErrorKind::Contended, "{contended}");
        // Renewed by the new leader.
        let free = other.mutex("free").lock_timeout(PATIENCE).await.unwrap();
        assert!(free.token() > guard.token());
        killed.restart();
        for member in all.members() {
            member.kill();
        }
        for member in all.members() {
            member.restart_without_waiting();
        }
        for member in all.members() {
            member.until_ready();
        }
        let again = locks.mutex("again").lock_timeout(PATIENCE).await.unwrap();
        assert!(again.token() > free.token());
        assert!(guard.is_held(), "the lease was 40 s");
        until("an answer", async || other.read("kept").await.is_ok()).await;
        let contended = other.mutex("kept").try_lock().await.unwrap_err();
        assert_eq!(contended.kind(), ErrorKind::Contended, "{contended}");
        release(guard).await;
    });
}

#[test]
fn without_a_majority_nothing_is_granted() {
    run(async {
        let all = ZooKeepers::start();
        let last = &all.members()[0];
        let locks = connect_to(last, "?session=4s").await;
        let guard = locks.mutex("minority").lock().await.unwrap();
        for other in &all.members()[1..] {
            other.kill();
        }
        let lost = tokio::time::timeout(PATIENCE, guard.lost()).await;
        assert_eq!(lost.ok(), Some(LostReason::Expired));
        let error = locks.mutex("minority").lease(Duration::from_secs(1)).try_lock().await;
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Unreachable);
        let error = leasehold::connect(last.url()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        all.members()[1].restart();
        // So short a lease may be over before it is given back.
        drop(locks.mutex("minority").lock_timeout(PATIENCE).await.unwrap());
    });
}

#[test]
fn exact_while_members_are_killed_one_after_another() {
    run(async {
        let all = Arc::new(ZooKeepers::start());
        let url = format!("{}?session=6s", all.url());
        let over = Arc::new(AtomicBool::new(false));
        let counted = Arc::new(AtomicU64::new(0));
        let breaking = tokio::task::spawn_blocking({
            let (all, over, counted) = (all.clone(), over.clone(), counted.clone());
            move || {
                let mut grew = 0;
                for member in all.members() {
                    member.kill();
                    std::thread::sleep(Duration::from_millis(500));
                    member.restart();
                    // Whatever the last kill has broken, they count on after it.
                    let (before, end) = (counted.load(Ordering::SeqCst), Instant::now() + PATIENCE);
                    while counted.load(Ordering::SeqCst) <= before + 3 && Instant::now() < end {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    grew += usize::from(counted.load(Ordering::SeqCst) > before + 3);
                }
                over.store(true, Ordering::SeqCst);
                grew
            }
        });
        // Fenced, as a resource does it: an increment under an older token is refused.
        let counter = Arc::new(Mutex::new((0_u64, 0_u64)));
        let mut tasks = Vec::new();
        for _ in 0..3 {
            let locks = connect(&url).await;
            let (over, counter, counted) = (over.clone(), counter.clone(), counted.clone());
            tasks.push(tokio::spawn(async move {
                while !over.load(Ordering::SeqCst) {
                    let guard = match locks.mutex("counter").lock_timeout(PATIENCE).await {
                        Ok(guard) => guard,
                        // A grant that came too late is said to have been lost.
                        Err(e) if e.is_retryable() => continue,
                        Err(e) => panic!("{e}"),
                    };
                    let read = counter.lock().unwrap().0;
                    tokio::time::sleep(Duration::from_millis(2)).await;
                    let mut counter = counter.lock().unwrap();
                    if guard.is_held() {
                        let token = guard.token().get();
                        assert!(token > counter.1, "{token} after {}", counter.1);
                        *counter = (read + 1, token);
                        counted.fetch_add(1, Ordering::SeqCst);
                    }
                    drop(counter);
                    drop(guard);
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(breaking.await.unwrap(), 3, "nobody counted after a restart");
        let counted = counted.load(Ordering::SeqCst);
        assert_eq!(counter.lock().unwrap().0, counted, "updates were lost");
        assert!(counted > 10, "only {counted} turns");
    });
}
