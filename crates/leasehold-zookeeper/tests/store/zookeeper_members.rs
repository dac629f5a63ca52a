//! Several members: killed, paused, partitioned, silent, slow. Sessions that move between members.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::zookeeper_common::*;
use leasehold::{Client, ErrorKind, LostReason, MutexGuard};
use testbed::{Cut, Proxy, ZooKeeperSetup, ZooKeepers, in_own_network};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

// S72
#[test]
#[ignore = "runs with ./test.sh --all"]
fn holder_on_a_paused_or_isolated_follower_loses_in_time() {
    run(async {
        let all = ZooKeepers::with(&ZooKeeperSetup::new().links());
        let (leader, followers) = (all.leader(), all.followers());
        let other = connect_to(leader, "?session=30s").await;
        let held = connect_to(followers[0], "?session=4s").await;
        lost_before_the_next_holds(&held, &other, "stopped", || followers[0].stop()).await;
        followers[0].cont();
        // With only two members left, cutting off another one would leave no majority.
        until("all members follow the leader", async || leader.metric("zk_synced_followers") == 2)
            .await;
        // This member still answers its clients, for five seconds (syncLimit).
        let held = connect_to(followers[1], "?session=4s").await;
        lost_before_the_next_holds(&held, &other, "cut-off", || all.cut_off(followers[1])).await;
        all.heal(followers[1]);
    });
}

// S72
/// The partition is between members, in one direction only. Their clients stay connected.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn holder_on_a_half_partitioned_member_loses_in_time() {
    in_own_network("zookeeper_members::holder_on_a_half_partitioned_member_loses_in_time", || {
        run(async {
            let all = ZooKeepers::separable(&ZooKeeperSetup::new());
            for cut in [Cut::Mute, Cut::Deaf] {
                for leads in [false, true] {
                    let (leader, follower) = (all.leader(), all.followers()[0]);
                    let (member, rest) =
                        if leads { (leader, follower) } else { (follower, leader) };
                    let other = connect_to(rest, "?session=30s").await;
                    let held = connect_to(member, "?session=4s").await;
                    let name = format!("{cut:?}-{leads}");
                    lost_before_the_next_holds(&held, &other, &name, || all.cut(member, cut)).await;
                    all.uncut();
                    release(held.mutex(name).lock_timeout(PATIENCE).await.unwrap()).await;
                }
            }
        });
    });
}

/// Whichever member becomes silent, the clients that know the others change to them in time.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn paused_members_cost_no_lease() {
    run(async {
        let all = ZooKeepers::start();
        // The leader is paused last. Then there is another one, but the election takes time.
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
            // This is longer than a lease lasts without renewal.
            tokio::time::sleep(Duration::from_secs(16)).await;
            assert!(held.iter().all(|guard| guard.is_held()), "{held:?}");
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
fn hold_survives_the_restart_of_its_leader_and_of_all_members() {
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
        // The new leader has renewed it.
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
        until("a member replies", async || other.inspect("kept").await.is_ok()).await;
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
        // Such a short lease may be over before it is released.
        drop(locks.mutex("minority").lock_timeout(PATIENCE).await.unwrap());
    });
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn locks_stay_exclusive_while_members_restart_one_by_one() {
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
                    // Whatever the last kill has broken, the tasks continue to count after it.
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
        // The counter is fenced as a resource would do it. It rejects an increment with an older
        // token.
        let counter = Arc::new(Mutex::new((0_u64, 0_u64)));
        let mut tasks = Vec::new();
        for _ in 0..3 {
            let locks = connect(&url).await;
            let (over, counter, counted) = (over.clone(), counter.clone(), counted.clone());
            tasks.push(tokio::spawn(async move {
                while !over.load(Ordering::SeqCst) {
                    let guard = match locks.mutex("counter").lock_timeout(PATIENCE).await {
                        Ok(guard) => guard,
                        // A grant that came too late is reported as lost.
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
        assert_eq!(breaking.await.unwrap(), 3, "the clients did not count after each restart");
        let counted = counted.load(Ordering::SeqCst);
        assert_eq!(counter.lock().unwrap().0, counted, "updates were lost");
        assert!(counted > 10, "only {counted} turns");
    });
}

/// How long one silent member may delay a client: two seconds, plus the delay of a busy machine.
const NOTICED: Duration = Duration::from_secs(4);

/// Holders, and one waiter for each, on clients that use different members.
struct Crowd {
    clients: Vec<Client>,
    held: Vec<MutexGuard>,
    waiting: JoinSet<(MutexGuard, Instant)>,
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

    /// Checks the delays after a member has just become silent, for acquiring, releasing and
    /// handing over locks.
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
        assert!(taken < NOTICED, "{round}: acquiring and releasing took {taken:?}");
        for (guard, granted) in self.waiting.join_all().await {
            let waited = granted.duration_since(silent);
            assert!(waited < NOTICED, "{round}: the hand-over took {waited:?}");
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
            until("all members follow the leader", all_follow).await;
        }
    }
}

// F08
#[test]
#[ignore = "runs with ./test.sh --all"]
fn paused_follower_of_three_delays_clients_only_briefly() {
    run(a_stopped_follower_costs_nobody_more_than_a_moment(3));
}

// F08
#[test]
#[ignore = "runs with ./test.sh --all"]
fn paused_follower_of_five_delays_clients_only_briefly() {
    run(a_stopped_follower_costs_nobody_more_than_a_moment(5));
}

// F08
#[test]
#[ignore = "runs with ./test.sh --all"]
fn member_behind_a_silent_network_delays_clients_only_briefly() {
    run(async {
        let all = ZooKeepers::start();
        let proxies: Vec<Proxy> = all.members().iter().map(|m| Proxy::before(m.port())).collect();
        let hosts: Vec<String> =
            proxies.iter().map(|proxy| format!("127.0.0.1:{}", proxy.port())).collect();
        for rest in ["", "?session=60s"] {
            let url = format!("zookeeper://{}{rest}", hosts.join(","));
            // The first way stops all traffic, the second the requests, and the third drops all
            // connections without an error.
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

// F08
/// A slow ensemble is not left again and again without any progress.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn slow_ensemble_is_still_used() {
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
        // On a busy machine, one attempt may end without an answer. The next ones wait longer.
        let end = Instant::now() + PATIENCE;
        let guard = loop {
            match lock.lock_timeout(PATIENCE).await {
                Ok(guard) => break guard,
                Err(error) => assert!(
                    error.kind() == ErrorKind::Unreachable && Instant::now() < end,
                    "{error}"
                ),
            }
        };
        assert!(guard.is_held());
        for proxy in &proxies {
            proxy.delay(Duration::ZERO);
        }
        drop(guard);
    });
}

/// Moves the session of this reply to another member, like an old request of its client that was
/// delayed.
async fn move_session(answer: &[u8], port: u16) -> TcpStream {
    // Length, version, time, ID; length and bytes of the password.
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
    let mut reply = vec![0; 20];
    stream.read_exact(&mut reply).await.unwrap();
    assert_eq!(&reply[12..20], id, "the session was not moved");
    stream
}

// F48
#[test]
#[ignore = "runs with ./test.sh --all"]
fn moved_session_is_not_lost() {
    run(async {
        let all = ZooKeepers::start();
        let followers = all.followers();
        let (port, recorded) = listening_in(followers[0].port()).await;
        let locks = connect(&format!("zookeeper://127.0.0.1:{port}?session=30s")).await;
        let guard = locks.mutex("moved").lease(Duration::from_secs(6)).lock().await.unwrap();
        let first = recorded.first.lock().unwrap()[0].clone();
        let came = || {
            let all = recorded.first.lock().unwrap();
            all.iter().filter(|answer| answer[12..20] == first[12..20]).count()
        };
        for _ in 0..3 {
            let before = came();
            let _stale = move_session(&first, followers[1].port()).await;
            // The next renewal is rejected there, and moves the session back.
            until("the session is moved back", async || {
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
