//! Redis with sentinels and as a cluster: masters killed and stopped, slots moved.

#![cfg(feature = "redis")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::*;
use leasehold::store::{Guarantee, Joined, Mode, Renew, Renewal};
use leasehold::{Claim, ErrorKind, Guard, Kind, Leasehold, LostReason, Name, State};
use testbed::{Cluster, Redis, Sentinel, Setup};

const LEASE: Duration = Duration::from_millis(1_500);

/// Counts under a lock while something is broken, until that is over. After a fail-over two may hold
/// until a lease is over: only the tokens keep order, so that is what is looked at.
async fn tokens_rise_while(
    clients: &[Leasehold],
    name: &str,
    breaking: impl FnOnce() + Send + 'static,
) {
    let breaking = tokio::task::spawn_blocking(breaking);
    let mut last = 0;
    let mut rounds = 0;
    loop {
        for client in clients {
            let guard = client.mutex(name).lease(LEASE).lock().await;
            let guard = match guard {
                Ok(guard) => guard,
                // The servers took longer over it than a caller is patient: truthful, at least.
                Err(error) if error.kind() == ErrorKind::Unreachable => continue,
                Err(error) => panic!("{error}"),
            };
            assert!(guard.token().get() > last, "token {} after {last}", guard.token());
            last = guard.token().get();
            rounds += 1;
            match guard.release().await {
                Ok(_) => {}
                // The grant was lost with the old master, and the release tells.
                Err(error) if error.kind() == ErrorKind::Lost => {}
                Err(error) => assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}"),
            }
        }
        // On a slow machine it may be over before anything was tried.
        if breaking.is_finished() && rounds > clients.len() {
            break;
        }
    }
    breaking.await.expect("it was broken as planned");
}

#[test]
fn r42_s25_sentinels_fail_over_from_a_killed_master() {
    run(async {
        let set = Arc::new(Sentinel::start());
        let url = set.url();
        let clients = [connect_patiently(&url).await, connect_patiently(&url).await];
        let guarantees = clients[0].guarantees();
        assert!(!guarantees.meets(Guarantee::ExclusiveOnFailover));
        let error = leasehold::builder().require(Guarantee::ExclusiveOnFailover);
        let error = error.connect(set.url()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        let breaking = set.clone();
        tokens_rise_while(&clients, "counted", move || {
            std::thread::sleep(Duration::from_millis(200));
            breaking.servers()[0].kill();
            breaking.servers()[1].wait_for_master();
        })
        .await;
        assert_eq!(set.servers()[1].info("replication", "role"), "master");
        // One of the sentinels may be away.
        set.kill_sentinel(0);
        let third = connect_patiently(&url).await;
        hammer(&[clients, [third.clone(), third]].concat(), "after", 2, 10).await;
    });
}

/// Connects in the middle of a fail-over, which is waited for, though not for ever: so a few tries
/// last longer than it, however slow the machine is, and many would not if nobody waited.
async fn connect_in_mid_failover(url: &str) -> Leasehold {
    for _ in 0..20 {
        match leasehold::connect(url).await {
            Ok(locks) => return locks,
            Err(error) => assert_told(&error, ErrorKind::Unreachable, "secret"),
        }
    }
    panic!("the fail-over was not waited for");
}

#[test]
fn s25_who_connects_in_mid_failover_waits_for_it() {
    run(async {
        let set = Sentinel::start();
        set.servers()[0].kill();
        // Named still, and gone.
        let locks = connect_in_mid_failover(&set.url()).await;
        let lease = Duration::from_secs(60);
        release(locks.mutex("early").lease(lease).lock().await.unwrap()).await;
        let cluster = Cluster::with(3, 1, Setup::new().fast());
        cluster.nodes()[0].kill();
        let locks = connect_in_mid_failover(&cluster.url()).await;
        release(locks.mutex("b").lease(lease).lock().await.unwrap()).await;
        // But whom nobody answers is told so at once.
        let url = format!("redis+sentinel://127.0.0.1:{}/mymaster", unused_port());
        let begun = Instant::now();
        assert_told(&leasehold::connect(&url).await.unwrap_err(), ErrorKind::Unreachable, "secret");
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    });
}

#[test]
fn s25_sentinels_fail_over_from_a_stopped_master_in_mid_wait() {
    run(async {
        let set = Sentinel::start();
        let url = set.url();
        let (holder, waiting) = (connect_patiently(&url).await, connect_patiently(&url).await);
        let lease = Duration::from_secs(45);
        let guard = holder.mutex("held").lease(lease).lock().await.unwrap();
        let waiter = tokio::spawn(async move { waiting.mutex("held").lock().await });
        let end = Instant::now() + PATIENCE;
        // Both the grant and the place are known to the replica.
        while set.servers()[1].command(&["EXISTS", "held", "leasehold:w:held"]) != "2" {
            assert!(Instant::now() < end, "never replicated");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let old = set.servers()[0].port();
        set.servers()[0].stop();
        set.wait_for_failover(old);
        // It never answers: whoever asked it must find the other by themselves, and renew there.
        let left = || set.servers()[1].command(&["PTTL", "held"]).parse::<u64>().unwrap();
        let mut before = left();
        while left() <= before {
            before = left();
            assert!(guard.is_held(), "lost, though the new master has it");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let first = guard.token();
        release(guard).await;
        let next = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
        assert!(next.token() > first);
        release(next).await;
        set.servers()[0].cont();
    });
}

#[test]
fn r30_s23_wait_was_satisfied_and_another_replica_is_promoted() {
    run(async {
        let master = Redis::with(Setup::new().fast());
        let _fresh = Redis::replica_of(master.port(), Setup::new().fast());
        let stale = Redis::replica_of(master.port(), Setup::new().fast());
        master.wait_for_replicas(2);
        // This one hears nothing of what follows.
        stale.command(&["REPLICAOF", "NO", "ONE"]);
        let locks = connect(&format!("{}?replicas=1&replicas_ms=20000", master.url())).await;
        let guard = locks.mutex("lost").lease(PATIENCE).lock().await.unwrap();
        let notes = locks.guarantees().notes.join("\n");
        assert!(notes.contains("the replica that is promoted may be another"), "{notes}");
        assert!(!locks.guarantees().meets(Guarantee::ExclusiveOnStoreCrash));
        let other = connect(&stale.url()).await;
        // No claim of safety: both hold. But the order of the tokens holds too.
        let second = other.mutex("lost").try_lock().await.unwrap();
        assert!(guard.is_held() && second.token() > guard.token());
        release(second).await;
    });
}

#[test]
fn r30_too_few_replicas_give_the_lock_back_or_are_accepted() {
    run(async {
        let master = Redis::with(Setup::new().fast());
        let replica = Redis::replica_of(master.port(), Setup::new().fast());
        master.wait_for_replicas(1);
        let two = format!("{}?replicas=2&replicas_ms=100", master.url());
        let error = connect(&two).await.mutex("short").try_lock().await.unwrap_err();
        assert_told(&error, ErrorKind::Unconfirmed, "secret");
        assert_eq!(master.command(&["EXISTS", "short"]), "0", "it was not given back");
        // Time enough for the one that there is: a replica that has just synced is slow to say so.
        let patient = connect(&format!("{}?replicas=1&replicas_ms=20000", master.url())).await;
        release(patient.mutex("first").lease(PATIENCE).lock().await.unwrap()).await;
        let two = format!("{}?replicas=2&replicas_ms=4000", master.url());
        let accepting = connect(&format!("{two}&replicas_short=accept")).await;
        let guard = accepting.mutex("short").lock().await.unwrap();
        assert_eq!(guard.replicas(), Some(1), "of the two that were wished for");
        release(guard).await;
        let unasked = connect(&master.url()).await;
        let guard = unasked.mutex("short").try_lock().await.unwrap();
        assert_eq!(guard.replicas(), None);
        release(guard).await;
        // A pushed grant counts only once it is confirmed, too.
        let one = connect(&format!("{}?replicas=1&replicas_ms=5000", master.url())).await;
        let guard = one.mutex("pushed").lock().await.unwrap();
        let waiter = tokio::spawn({
            let one = one.clone();
            async move { one.mutex("pushed").lock().await }
        });
        while one.read("pushed").await.unwrap().is_none_or(|info| info.waiters().count() == 0) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        replica.stop();
        release(guard).await;
        let refused = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap();
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unconfirmed);
        // It may take longer than any server's answer, and wait for what was asked before.
        let slow = connect(&format!("{}?replicas=1&replicas_ms=8000", master.url())).await;
        let joined = ["joined", "joined too"].map(|name| slow.mutex(name).lease(PATIENCE));
        let [first, second] = &joined;
        let both = tokio::join!(first.try_lock(), second.try_lock());
        for refused in [both.0, both.1] {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unconfirmed, "{error}");
        }
        replica.cont();
        hammer(&[one], "confirmed", 8, 10).await;
    });
}

#[test]
fn r30_a_server_that_is_away_is_not_taken_for_replicas() {
    run(async {
        let master = Redis::with(Setup::new().fast());
        let replica = Redis::replica_of(master.port(), Setup::new().fast());
        master.wait_for_replicas(1);
        let locks = connect(&format!("{}?replicas=1", master.url())).await;
        // A lease that is over before it is clear that there are too few could never be held.
        let accepting = format!("{}?replicas=2&replicas_short=accept", master.url());
        let short = connect(&accepting).await.mutex("short").lease(Duration::from_secs(2));
        assert_told(&short.lock().await.unwrap_err(), ErrorKind::Config, "secret");
        // While the master waits for its replica, it stands still for longer than that may take.
        replica.stop();
        let waiting = tokio::spawn({
            let mutex = locks.mutex("stands still").lease(PATIENCE);
            async move { mutex.lock().await }
        });
        while master.command(&["EXISTS", "stands still"]) == "0" {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        master.stop();
        replica.cont();
        tokio::time::sleep(Duration::from_secs(4)).await;
        master.cont();
        release(waiting.await.unwrap().unwrap()).await;
        master.kill();
        let error = locks.mutex("dead").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    });
}

/// The server that was asked is demoted while it waits for its replicas, and the next one is asked.
#[test]
fn r30_a_failover_while_replicas_are_waited_for_is_waited_for() {
    run(async {
        let cluster = Cluster::with(3, 1, Setup::new().fast());
        let [master, replica] = [0, 3].map(|node| &cluster.nodes()[node]);
        let url = format!("{}?replicas=2&replicas_ms=15000&replicas_short=accept", cluster.url());
        let locks = connect(&url).await;
        let waiting = tokio::spawn({
            let mutex = locks.mutex("b").lease(Duration::from_secs(120));
            async move { mutex.lock().await }
        });
        let end = Instant::now() + PATIENCE;
        // The grant is known to the replica, and the master waits for a second one.
        let known = || replica.command(&["DBSIZE"]) != "0";
        while !known() || !master.command(&["CLIENT", "LIST"]).contains("cmd=wait") {
            assert!(Instant::now() < end, "nothing waits for replicas");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(replica.command(&["CLUSTER", "FAILOVER"]), "OK");
        let guard = tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap().unwrap();
        assert!(guard.replicas() < Some(2), "{:?}", guard.replicas());
        assert!(replica.command(&["ROLE"]).starts_with("master"));
        release(guard).await;
    });
}

/// One heartbeat asks for all of them: each is told for itself, and all within one wait.
#[test]
fn r30_too_few_replicas_are_told_to_each_of_many_waiters() {
    const MANY: usize = 50;
    run(async {
        let master = Redis::with(Setup::new().fast());
        let replica = Redis::replica_of(master.port(), Setup::new().fast());
        master.wait_for_replicas(1);
        let locks = connect(&format!("{}?replicas=1&replicas_ms=4000", master.url())).await;
        let store = locks.store();
        let claim = |name: String| Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
        let held: Vec<Claim> = (0..MANY).map(|n| claim(format!("many {n}"))).collect();
        let waiting: Vec<Claim> = held.iter().map(|c| claim(c.name.as_str().to_owned())).collect();
        let steady = claim("steady".into());
        for claim in held.iter().chain([&steady]) {
            let joined = store.join(claim, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
        }
        for claim in &waiting {
            let joined = store.join(claim, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
        }
        replica.stop();
        for claim in &held {
            assert!(store.leave(claim, None).await.unwrap());
        }
        let all = waiting.iter().chain([&steady]);
        let all: Vec<Renew> = all.map(|c| Renew { claim: c.clone(), lease: c.lease }).collect();
        let begun = Instant::now();
        // Those that have not been answered within a heartbeat's time are asked about again.
        let is_open = |renewal: &Renewal| {
            matches!(renewal, Renewal::Unknown { kind: ErrorKind::Unreachable, .. })
        };
        let mut told = store.renew(&all).await.unwrap();
        while told.iter().any(is_open) {
            let open = all.iter().zip(&told).filter(|(_, told)| is_open(told));
            let open: Vec<Renew> = open.map(|(renew, _)| renew.clone()).collect();
            let again = store.renew(&open).await;
            // Of one alone it is an error.
            let mut again = again.unwrap_or_else(|e| vec![Renewal::unknown(&e)]).into_iter();
            for told in told.iter_mut().filter(|told| is_open(told)) {
                *told = again.next().unwrap();
            }
        }
        // One by one, it would be two hundred seconds.
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
        // What was confirmed before is renewed all the same.
        assert!(matches!(told.pop(), Some(Renewal::Holding { .. })));
        replica.cont();
        for (renewal, claim) in told.into_iter().zip(&waiting) {
            let error = renewal.known().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unconfirmed, "{error}");
            // The replica is back: whoever else asks for this claim is told the same all the same,
            // and does not hold what the first one gives back.
            let again = [Renew { claim: claim.clone(), lease: claim.lease }];
            let error = store.renew(&again).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unconfirmed, "{error}");
            assert!(store.leave(claim, None).await.unwrap(), "it was there to be given back");
        }
    });
}

#[test]
fn s26_a_slot_that_moves_costs_no_lease() {
    run(async {
        let cluster = testbed::cluster();
        let (locks, other) = (connect(&cluster.url()).await, connect(&cluster.url()).await);
        let lease = Duration::from_secs(6);
        // Names that a cluster hashes in odd ways.
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
            while locks.read(name).await.unwrap().unwrap().waiters().count() == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let from = owner(slot).expect("the lock's key is somewhere");
            let to = (from + 1) % 3;
            cluster.begin_move(slot, from, to);
            // Some of the keys are here and some there, for longer than a lease.
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

/// One batch renews them all, and the semaphore of a slot that is half moved cannot be asked about.
#[test]
fn s26_a_semaphore_in_a_moving_slot_costs_no_mutex_its_lease() {
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
        // The connections are there: then all are taken, and due, at once.
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
            assert!(guard.is_held(), "{} was lost with its neighbour", guard.name());
        }
        // Its own keys are several: it is lost, and says so.
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
fn exact_while_slots_move_to_and_fro() {
    run(async {
        let cluster = testbed::cluster();
        let clients = [connect(&cluster.url()).await, connect(&cluster.url()).await];
        let slot: u16 =
            cluster.nodes()[0].command(&["CLUSTER", "KEYSLOT", "moving"]).parse().unwrap();
        let home = usize::from(slot) * 3 / 16_384;
        let breaking = tokio::task::spawn_blocking(move || {
            for round in 0..6 {
                let (from, to) = ((home + round) % 3, (home + round + 1) % 3);
                cluster.begin_move(slot, from, to);
                while cluster.move_keys(slot, from, to, 100) > 0 {}
                cluster.end_move(slot, to);
            }
        });
        loop {
            hammer(&clients, "moving", 4, 10).await;
            if breaking.is_finished() {
                break;
            }
        }
        breaking.await.unwrap();
    });
}

#[test]
fn a_cluster_renews_by_one_command_a_slot() {
    const SLOTS: usize = 100;
    run(async {
        let cluster = Cluster::unbroken();
        let locks = connect(&cluster.url()).await;
        let mut held = Vec::new();
        for slot in 0..SLOTS {
            for n in 0..30 {
                held.push(locks.mutex(format!("{{{slot}}} {n}")).lock().await.unwrap());
            }
        }
        // Once round, so that they are in their common batches.
        tokio::time::sleep(Duration::from_secs(5)).await;
        for node in cluster.nodes() {
            node.command(&["CONFIG", "RESETSTAT"]);
        }
        let begun = Instant::now();
        tokio::time::sleep(Duration::from_secs(10)).await;
        let calls: Vec<_> = cluster.nodes().iter().flat_map(Redis::calls).collect();
        let sent: u64 = calls.iter().filter(|(name, _)| name == "evalsha").map(|(_, n)| n).sum();
        // Locks of one slot that were taken on both sides of a grid line are renewed by two.
        let periods = begun.elapsed().as_secs_f64() / 5.0;
        let most = periods.ceil() as u64 * SLOTS as u64 * 2;
        assert!((1..=most).contains(&sent), "{sent} commands in {periods:.1} periods");
        assert!(held.iter().all(Guard::is_held));
        // It waits for a lease's time, which three thousand releases may exceed.
        let _ = locks.close().await;
    });
}

#[test]
fn a_cluster_that_is_down_is_told_of() {
    run(async {
        let cluster = Cluster::unbroken();
        let locks = connect(&cluster.url()).await;
        release(locks.mutex("b").lock().await.unwrap()).await;
        for node in cluster.nodes() {
            node.command(&["CLUSTER", "DELSLOTSRANGE", "0", "5460"]);
        }
        let told = |error: &leasehold::Error| {
            assert_told(error, ErrorKind::Unreachable, "secret");
            let text = error.to_string();
            assert!(text.contains("CLUSTER INFO") && text.contains("CLUSTERDOWN"), "{text}");
        };
        told(&locks.mutex("b").try_lock().await.unwrap_err());
        // One who comes only now finds no node for the slot on the map.
        let late = leasehold::connect(&cluster.url()).await.unwrap();
        told(&late.mutex("b").try_lock().await.unwrap_err());
        // And a cluster of which nobody has made one yet.
        let setup = Setup::new().fast().arg("--cluster-enabled").arg("yes");
        let bare = Redis::with(setup.arg("--cluster-port").arg(unused_port().to_string()));
        let url = format!("redis+cluster://127.0.0.1:{}/", bare.port());
        told(&leasehold::connect(&url).await.unwrap_err());
    });
}

/// A port where nobody listens.
fn unused_port() -> u16 {
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    taken.local_addr().unwrap().port()
}

#[test]
fn a_cluster_fails_over_from_a_killed_master() {
    run(async {
        // Else all nodes refuse everything until the replica is promoted.
        let setup = Setup::new().fast().arg("--cluster-require-full-coverage").arg("no");
        let cluster = Arc::new(Cluster::with(3, 1, setup));
        let clients = [connect(&cluster.url()).await, connect(&cluster.url()).await];
        // In the first third of the slots, on the node that is killed; and beside it.
        let (dying, living) = ("b", "a");
        let lease = Duration::from_secs(6);
        let steady = clients[0].mutex(living).lease(lease).lock().await.unwrap();
        let begun = Instant::now();
        let breaking = cluster.clone();
        tokens_rise_while(&clients, dying, move || {
            std::thread::sleep(Duration::from_millis(200));
            breaking.nodes()[0].kill();
            breaking.wait_for_failover(0);
        })
        .await;
        // However quick that was: nothing is held by now that was not renewed.
        tokio::time::sleep((lease * 3 / 2).saturating_sub(begun.elapsed())).await;
        assert!(steady.is_held(), "a node's end cost another node's lease");
        release(steady).await;
        hammer(&clients, dying, 4, 10).await;
    });
}

#[test]
fn a_stopped_node_costs_only_its_own_leases() {
    run(async {
        // Else the others soon refuse everything too.
        let setup = Setup::new().fast().arg("--cluster-require-full-coverage").arg("no");
        let cluster = Cluster::with(3, 0, setup);
        let locks = connect(&cluster.url()).await;
        let (stopped, living) = ("b", "a");
        let lease = Duration::from_secs(6);
        // The one that is to stay first: it is lost before the other, if nobody renews it.
        let on_living = locks.mutex(living).lease(lease).lock().await.unwrap();
        let on_stopped = locks.mutex(stopped).lease(lease).lock().await.unwrap();
        cluster.nodes()[0].stop();
        assert_eq!(on_stopped.lost().await, LostReason::Expired);
        assert!(on_living.is_held());
        cluster.nodes()[0].cont();
        release(on_living).await;
    });
}
