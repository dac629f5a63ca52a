//! What real use broke on the ZooKeeper store: members that go silent, sessions that move, crowds, and
//! nodes that are somebody else's.

#![cfg(feature = "zookeeper")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::zookeeper_common::*;
use leasehold::store::{Durability, Evict, Guarantee, Joined, Mode, Signal, Survival};
use leasehold::{Claim, ErrorKind, Guard, Kind, Leasehold, Name, Token};
use testbed::{Proxy, ZooKeeper, ZooKeeperSetup, ZooKeepers, zookeeper};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use zookeeper_client::{Acls, CreateMode};

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
fn f08_a_stopped_follower_of_three_costs_nobody_more_than_a_moment() {
    run(a_stopped_follower_costs_nobody_more_than_a_moment(3));
}

#[test]
fn f08_a_stopped_follower_of_five_costs_nobody_more_than_a_moment() {
    run(a_stopped_follower_costs_nobody_more_than_a_moment(5));
}

#[test]
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

/// In front of one server.
#[derive(Default)]
struct Listener {
    /// The first answer of each connection.
    first: Mutex<Vec<Vec<u8>>>,
    /// How much the server has sent after it.
    bytes: AtomicUsize,
}

async fn listening_in(port: u16) -> (u16, Arc<Listener>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let here = listener.local_addr().unwrap().port();
    let heard = Arc::<Listener>::default();
    let keeping = heard.clone();
    tokio::spawn(async move {
        loop {
            let (client, _) = listener.accept().await.unwrap();
            let heard = keeping.clone();
            tokio::spawn(async move {
                let server = TcpStream::connect(("127.0.0.1", port)).await?;
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = server.into_split();
                let up = async {
                    tokio::io::copy(&mut from_client, &mut to_server).await?;
                    std::io::Result::Ok(())
                };
                let down = async {
                    let mut first = vec![0; 4];
                    from_server.read_exact(&mut first).await?;
                    let length = u32::from_be_bytes(first[..4].try_into().unwrap());
                    first.resize(4 + usize::try_from(length).unwrap(), 0);
                    from_server.read_exact(&mut first[4..]).await?;
                    to_client.write_all(&first).await?;
                    heard.first.lock().unwrap().push(first);
                    let mut buffer = [0; 4096];
                    loop {
                        let n = from_server.read(&mut buffer).await?;
                        if n == 0 {
                            return Ok(());
                        }
                        heard.bytes.fetch_add(n, Ordering::SeqCst);
                        to_client.write_all(&buffer[..n]).await?;
                    }
                };
                tokio::select! { ended = up => ended, ended = down => ended }
            });
        }
    });
    (here, heard)
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

/// With ticks of 8 s, a member tells the leader only every 4 s whom it has heard.
#[test]
fn f48_long_ticks_make_leases_short() {
    run(async {
        let second = Duration::from_secs(1);
        let setup = ZooKeeperSetup::new().tick(second * 8).sessions(second * 16, second * 160);
        let server = ZooKeeper::with(&setup);
        // What the server gives is longer than what was asked for: that tells it.
        let locks = connect(&server.url()).await;
        let certain = second * 16 - second * 10;
        assert!(locks.store().longest_lease() <= certain, "{:?}", locks.store().longest_lease());
        // It is as long as was asked for: the server is asked.
        let locks = connect(&format!("{}?session=20s", server.url())).await;
        let certain = second * 20 - second * 10;
        until("the ticks to be known", async || locks.store().longest_lease() <= certain).await;
        // With ticks as they usually are, nothing is taken off.
        let server = ZooKeeper::with(&setup.tick(second * 2).sessions(second * 4, second * 40));
        let (port, heard) = listening_in(server.port()).await;
        let locks = connect(&format!("zookeeper://127.0.0.1:{port}?session=20s")).await;
        // Two connections: its own, and the one that asks.
        until("the ticks to be known", async || heard.first.lock().unwrap().len() == 2).await;
        assert_eq!(locks.store().longest_lease(), second * 15);
    });
}

/// What the session cuts is what the lease is, for all who ask.
#[test]
fn f26_a_lease_that_the_session_cuts_is_told_as_it_is() {
    run(async {
        for (session, asked) in [("15s", 90), ("4s", 15), ("60s", 3_600)] {
            let locks = connect(&format!("{}?session={session}", zookeeper().url())).await;
            let longest = locks.store().longest_lease();
            let name = format!("cut-{session}");
            let lock = locks.mutex(&name).lease(Duration::from_secs(asked));
            let guard = lock.lock().await.unwrap();
            assert!(longest < Duration::from_secs(asked));
            assert!(guard.remaining() <= longest, "{:?} of {longest:?}", guard.remaining());
            // And it is renewed in the rhythm of that, and not of what was asked for.
            let longer = longest * 3 / 2;
            if longer < Duration::from_secs(20) {
                tokio::time::sleep(longer).await;
                assert!(guard.is_held(), "{guard:?}");
            }
            release(guard).await;
        }
    });
}

fn permit(name: &str, capacity: u32) -> Claim {
    let mut claim = Claim::new(Name::new(name).unwrap(), Kind::Semaphore, 1, capacity).unwrap();
    let long = Duration::from_secs(40);
    (claim.lease, claim.waiter_lease) = (long, long);
    claim
}

/// A release woke all who had the holder among the fifty before them, and each of those looked at the
/// queue and watched all fifty anew.
#[test]
fn f45_a_release_of_fifty_permits_is_no_stampede() {
    const PERMITS: u32 = 50;
    run(async {
        let server = ZooKeeper::start();
        let locks = connect(&format!("{}?session=60s", server.url())).await;
        let all: Vec<Claim> = (0..2 * PERMITS).map(|_| permit("crowd", PERMITS)).collect();
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

/// What ends as a lock's child does is waited for, but nobody deletes it who does not know what it is.
#[test]
fn f01_nodes_that_only_look_like_claims_are_not_deleted() {
    run(async {
        let raw = raw(zookeeper().port()).await;
        let locks = connect(&format!("{}/theirs?create=yes", zookeeper().url())).await;
        let stays = CreateMode::PersistentSequential.with_acls(Acls::anyone_all());
        for (name, child) in [("blocks", "block-"), ("locks", "lock-")] {
            let lock = format!("/theirs/{name}");
            make(&raw, &lock).await;
            let path = format!("{lock}/{child}");
            let (stat, number) = raw.create(&path, b"precious", &stays).await.unwrap();
            let token = Token::new(u64::try_from(stat.czxid).unwrap()).unwrap();
            for which in [Evict::Holders, Evict::Token(token)] {
                let error = locks.evict(name, which).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
                assert!(error.to_string().contains(&format!("{child}{number}")), "{error}");
            }
            let kept = raw.get_data(&format!("{path}{number}")).await.unwrap();
            assert_eq!(kept.0, b"precious");
        }
        // Of another client, as lock clients make them, it is taken away when a person says so.
        make(&raw, "/theirs/x").await;
        make_child(&raw, "/theirs/x/_c_01234567-89ab-cdef-0123-456789abcdef-lock-").await;
        assert_eq!(locks.evict("x", Evict::Holders).await.unwrap(), 1);
        assert!(children(&raw, "/theirs/x").await.is_empty());
    });
}

/// A lock whose numbers end deletes its node; where that is somebody's who keeps something in it, it stays.
#[test]
fn f01_a_node_with_something_in_it_is_never_deleted() {
    run(async {
        let server = ZooKeeper::with(&ZooKeeperSetup::new().sequences_at("/late", 1 << 30));
        let raw = raw(server.port()).await;
        raw.set_data("/late", b"precious", None).await.unwrap();
        let locks = connect(&format!("{}/?session=60s", server.url())).await;
        release(locks.mutex("late").lock().await.unwrap()).await;
        assert_eq!(raw.get_data("/late").await.unwrap().0, b"precious");
    });
}

/// Beside a newer version nobody is told to delete what it holds, or to go where it does not look.
#[test]
fn f44_a_newer_versions_claim_is_left_alone() {
    run(async {
        let raw = raw(zookeeper().port()).await;
        for naming in ["curator", "kazoo"] {
            let url = format!("{}/newer-{naming}?create=yes&naming={naming}", zookeeper().url());
            let locks = connect(&url).await;
            let lock = format!("/newer-{naming}/x");
            make(&raw, &lock).await;
            let guid = match naming {
                "curator" => "_c_01234567-89ab-cdef-0123-456789abcdef",
                _ => "0123456789abcdef0123456789abcdef",
            };
            let newer = make_child(&raw, &format!("{lock}/{guid}-claim-v2-s1of3-")).await;
            for error in [
                locks.mutex("x").try_lock().await.unwrap_err(),
                locks.mutex("x").lock_timeout(PATIENCE).await.unwrap_err(),
                locks.evict("x", Evict::Holders).await.unwrap_err(),
            ] {
                assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
                let shown = error.to_string();
                assert!(shown.contains("newer leasehold"), "{shown}");
                assert!(!shown.contains("delete"), "{shown}");
            }
            let there = newer.strip_prefix(&format!("{lock}/")).unwrap();
            assert_eq!(children(&raw, &lock).await, [there]);
            raw.delete(&newer, None).await.unwrap();
            // What a newer version writes into a child, for people, is passed over.
            let data = br#"{"host":"h","pid":7,"label":"l","since":"later"}"#;
            let child = format!(
                "{lock}/{}",
                match naming {
                    "curator" => format!("{guid}-lock-"),
                    _ => format!("{guid}-m__lock__"),
                }
            );
            let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
            let (_, number) = raw.create(&child, data, &options).await.unwrap();
            let error = locks.mutex("x").try_lock().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
            assert_eq!(error.holders()[0].holder.host, "h");
            raw.delete(&format!("{child}{number}"), None).await.unwrap();
        }
    });
}

#[test]
fn f46_what_is_not_kept_can_not_be_required() {
    run(async {
        let (one, all) = (zookeeper(), ZooKeepers::start());
        let promises = connect(&one.url()).await.guarantees().clone();
        assert_eq!((promises.grant, promises.token), (Durability::Disk, Durability::Disk));
        let promises = connect(&all.url()).await.guarantees().clone();
        assert_eq!((promises.grant, promises.token), (Durability::Majority, Durability::Majority));
        assert_eq!(promises.on_failover, Survival::Fenced);
        let majority = Guarantee::GrantDurability(Durability::Majority);
        for (url, wanted) in [(one.url(), majority), (all.url(), Guarantee::ExclusiveOnFailover)] {
            let refused = leasehold::builder().require(wanted).connect(&url).await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
        }
    });
}

/// One path is one kind of lock, for Curator too: of its read-write lock its own mutex sees nothing.
#[test]
fn f65_an_error_about_names_says_what_to_do_and_no_more() {
    run(async {
        let raw = raw(zookeeper().port()).await;
        let locks = connect(&format!("{}/kinds?create=yes", zookeeper().url())).await;
        make(&raw, "/kinds/x").await;
        let guid = "_c_01234567-89ab-cdef-0123-456789abcdef";
        for (marker, kind) in [("__WRIT__", "read-write"), ("__READ__", "read-write")] {
            let child = make_child(&raw, &format!("/kinds/x/{guid}-{marker}")).await;
            let error = locks.mutex("x").try_lock().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            assert!(error.to_string().contains(kind), "{error}");
            raw.delete(&child, None).await.unwrap();
        }
        let child = make_child(&raw, &format!("/kinds/x/{guid}-lock-")).await;
        let error = locks.rwlock("x").try_write().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        assert!(error.to_string().contains("mutex"), "{error}");
        raw.delete(&child, None).await.unwrap();
        // Of the other naming: that is all there is to say.
        make_child(&raw, "/kinds/x/0123456789abcdef0123456789abcdef__lock__").await;
        let error = locks.mutex("x").try_lock().await.unwrap_err().to_string();
        assert!(error.contains("naming=kazoo") && !error.contains("semaphore"), "{error}");
    });
}
