//! Several members: killed, stopped, cut off, silent, slow; and sessions that move between them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::zookeeper_common::*;
use leasehold::{ErrorKind, Guard, Leasehold, LostReason};
use testbed::{Cut, Proxy, ZooKeeperSetup, ZooKeepers, in_own_network};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

#[test]
#[ignore = "runs with ./test.sh --all"]
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

/// Between members, in one way only; their clients stay connected.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn s72_a_member_that_is_mute_or_deaf_keeps_nobody_believing() {
    in_own_network(
        "zookeeper_members::s72_a_member_that_is_mute_or_deaf_keeps_nobody_believing",
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
#[ignore = "runs with ./test.sh --all"]
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
#[ignore = "runs with ./test.sh --all"]
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
#[ignore = "runs with ./test.sh --all"]
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
#[ignore = "runs with ./test.sh --all"]
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

/// What one silent member may cost anybody: two seconds, and what a busy machine adds.
const NOTICED: Duration = Duration::from_secs(4);

/// Holders, and one waiter for each, on clients that are spread over all members.
struct Crowd {
    clients: Vec<Leasehold>,
    held: Vec<Guard>,
    waiting: JoinSet<(Guard, Instant)>,
}

impl Crowd {
    async fn gather(url: &str, round: &str) -> Self {
        let mut clients = Vec::new();
        for _ in 0..6 {
            clients.push(connect(url).await);
        }
        let (mut held, mut waiting) = (Vec::new(), JoinSet::new());
        for (n, locks) in clients.iter().enumerate() {
            let name = format!("{round}-{n}");
            held.push(locks.mutex(&name).lock().await.unwrap());
            let lock = clients[(n + 1) % clients.len()].mutex(&name);
            waiting.spawn(async move {
                let guard = lock.lock_timeout(PATIENCE).await.unwrap();
                (guard, Instant::now())
            });
            until_waiting(locks, &name, 1).await;
        }
        Self { clients, held, waiting }
    }

    /// A member has just gone silent: what that costs those who take, hand over and are handed locks.
    async fn serve_within_limits(self, url: &str, round: &str) {
        let silent = Instant::now();
        let mut taking = JoinSet::new();
        for (n, locks) in self.clients.iter().enumerate() {
            let lock = locks.mutex(format!("{round}-fresh-{n}"));
            taking.spawn(async move { drop(lock.lock_timeout(PATIENCE).await.unwrap()) });
        }
        let url = url.to_owned();
        taking.spawn(async move { drop(connect(&url).await) });
        for guard in self.held {
            taking.spawn(async move { guard.release().await.map(|_| ()).unwrap() });
        }
        taking.join_all().await;
        let taken = silent.elapsed();
        assert!(taken < NOTICED, "{round}: taking and giving back took {taken:?}");
        for (guard, granted) in self.waiting.join_all().await {
            let waited = granted.duration_since(silent);
            assert!(waited < NOTICED, "{round}: handed over after {waited:?}");
            release(guard).await;
        }
    }
}

async fn a_stopped_follower_costs_nobody_more_than_a_moment(members: usize) {
    let all = ZooKeepers::with(&ZooKeeperSetup::new().members(members));
    for rest in ["", "?session=60s"] {
        let url = format!("{}{rest}", all.url());
        for round in 0..3 {
            let round = format!("stopped{}-{round}", rest.len());
            let crowd = Crowd::gather(&url, &round).await;
            let (leader, followers) = (all.leader(), all.followers());
            followers[0].stop();
            crowd.serve_within_limits(&url, &round).await;
            followers[0].cont();
            let followers = members as i64 - 1;
            let all_follow = async || leader.metric("zk_synced_followers") == followers;
            until("all to follow", all_follow).await;
        }
    }
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn f08_a_stopped_follower_of_three_costs_nobody_more_than_a_moment() {
    run(a_stopped_follower_costs_nobody_more_than_a_moment(3));
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn f08_a_stopped_follower_of_five_costs_nobody_more_than_a_moment() {
    run(a_stopped_follower_costs_nobody_more_than_a_moment(5));
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn f08_a_member_behind_a_silent_network_costs_nobody_more_than_a_moment() {
    run(async {
        let all = ZooKeepers::start();
        let proxies: Vec<Proxy> = all.members().iter().map(|m| Proxy::before(m.port())).collect();
        let hosts: Vec<String> =
            proxies.iter().map(|proxy| format!("127.0.0.1:{}", proxy.port())).collect();
        for rest in ["", "?session=60s"] {
            let url = format!("zookeeper://{}{rest}", hosts.join(","));
            // All of it, what goes there, and a firewall that has forgotten what there was.
            let ways: [fn(&Proxy); 3] = [Proxy::freeze, Proxy::hold_requests, Proxy::silence];
            for (way, (silence, proxy)) in ways.into_iter().zip(&proxies).enumerate() {
                let round = format!("network{}-{way}", rest.len());
                let crowd = Crowd::gather(&url, &round).await;
                silence(proxy);
                crowd.serve_within_limits(&url, &round).await;
                proxy.thaw();
            }
        }
    });
}

/// Nobody leaves a slow ensemble for ever and ever, and gets nothing done.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn f08_a_slow_ensemble_is_used_all_the_same() {
    run(async {
        let all = ZooKeepers::start();
        let proxies: Vec<Proxy> = all.members().iter().map(|m| Proxy::before(m.port())).collect();
        let hosts: Vec<String> =
            proxies.iter().map(|proxy| format!("127.0.0.1:{}", proxy.port())).collect();
        let locks = connect(&format!("zookeeper://{}?session=60s", hosts.join(","))).await;
        release(locks.mutex("slow").lock().await.unwrap()).await;
        for proxy in &proxies {
            proxy.delay(Duration::from_millis(900));
        }
        let lock = locks.mutex("slow").lease(Duration::from_secs(40));
        let guard = lock.lock_timeout(PATIENCE).await.unwrap();
        assert!(guard.is_held());
        for proxy in &proxies {
            proxy.delay(Duration::ZERO);
        }
        drop(guard);
    });
}

/// Moves the session of this answer to another member, as an old request of its client's would that
/// was on its way for long.
async fn move_session(answer: &[u8], port: u16) -> TcpStream {
    // Length, version, time, id; length and bytes of the password.
    let (time, id, password) = (&answer[8..12], &answer[12..20], &answer[24..40]);
    let mut request = Vec::new();
    request.extend(45_u32.to_be_bytes());
    request.extend([0; 12]);
    request.extend(time);
    request.extend(id);
    request.extend(16_u32.to_be_bytes());
    request.extend(password);
    request.push(0);
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    stream.write_all(&request).await.unwrap();
    let mut told = vec![0; 20];
    stream.read_exact(&mut told).await.unwrap();
    assert_eq!(&told[12..20], id, "not moved");
    stream
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn f48_a_session_that_was_moved_is_not_lost() {
    run(async {
        let all = ZooKeepers::start();
        let followers = all.followers();
        let (port, heard) = listening_in(followers[0].port()).await;
        let locks = connect(&format!("zookeeper://127.0.0.1:{port}?session=30s")).await;
        let guard = locks.mutex("moved").lease(Duration::from_secs(6)).lock().await.unwrap();
        let first = heard.first.lock().unwrap()[0].clone();
        let came = || {
            let all = heard.first.lock().unwrap();
            all.iter().filter(|answer| answer[12..20] == first[12..20]).count()
        };
        for _ in 0..3 {
            let before = came();
            let _stale = move_session(&first, followers[1].port()).await;
            // The next renewal is refused there, and moves it back.
            until("to be moved back", async || {
                assert!(guard.is_held(), "{guard:?}");
                came() > before
            })
            .await;
            release(locks.mutex("beside").lock_timeout(PATIENCE).await.unwrap()).await;
        }
        assert!(guard.is_held(), "{guard:?}");
        release(guard).await;
    });
}
