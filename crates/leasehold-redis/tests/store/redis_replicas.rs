//! Grants that replicas confirm: too few replicas, other replicas, and servers that are unreachable
//! meanwhile.

use std::time::{Duration, Instant};

use crate::redis_common::*;
use leasehold::store::{Claim, Guarantee, Joined, Mode, Renew, Renewal};
use leasehold::{ErrorKind, Kind, Name};
use leasehold_test_support::*;
use testbed::{Cluster, Proxy, Redis, Setup};

// R30, S23
#[test]
fn tokens_rise_if_an_unconfirmed_replica_is_promoted() {
    run(async {
        let master = fast();
        let _fresh = Redis::replica_of(master.port(), Setup::new().fast());
        let stale = Redis::replica_of(master.port(), Setup::new().fast());
        master.wait_for_replicas(2);
        // This replica receives no later writes.
        stale.command(&["REPLICAOF", "NO", "ONE"]);
        let locks = connect(&format!("{}?replicas=1&replicas_ms=20000", master.url())).await;
        let guard = locks.mutex("lost").lease(PATIENCE).lock().await.unwrap();
        let notes = locks.guarantees().notes.join("\n");
        assert!(notes.contains("A fail-over may promote another replica"), "{notes}");
        assert!(!locks.guarantees().meets(Guarantee::ExclusiveOnStoreCrash));
        let other = connect(&stale.url()).await;
        // Exclusion is not guaranteed here, and both clients hold the lock. But the order of the
        // tokens is kept.
        let second = other.mutex("lost").try_lock().await.unwrap();
        assert!(guard.is_held() && second.token() > guard.token());
        release(second).await;
    });
}

// R30, S23
/// A fail-over happens between grant and confirmation. The new master has another client's hold.
#[test]
fn hold_of_another_client_confirms_no_grant() {
    run(async {
        let master = fast();
        let _replica = Redis::replica_of(master.port(), Setup::new().fast());
        master.wait_for_replicas(1);
        let proxy = Proxy::before(master.port());
        let url = proxy.in_front_of(master.port(), &master.url());
        let locks = connect(&format!("{url}?replicas=1&replicas_ms=20000")).await;
        release(locks.mutex("warm").lease(PATIENCE).lock().await.unwrap()).await;
        proxy.hold_replies();
        let taking = tokio::spawn({
            let mutex = locks.mutex("taken").lease(PATIENCE);
            async move { mutex.try_lock().await }
        });
        until("the master has the grant", async || master.command(&["EXISTS", "taken"]) == "1")
            .await;
        master.command(&["SET", "taken", "another", "PX", "60000"]);
        proxy.thaw();
        let error = taken(taking.await.unwrap());
        assert_eq!(error.kind(), ErrorKind::Unconfirmed, "{error}");
        assert_eq!(master.command(&["GET", "taken"]), "another");
    });
}

fn taken(got: leasehold::Result<leasehold::MutexGuard>) -> leasehold::Error {
    match got {
        Ok(guard) => panic!("granted while another client holds the lock: token {}", guard.token()),
        Err(error) => error,
    }
}

// R30
#[test]
#[ignore = "runs with ./test.sh --all"]
fn lock_with_too_few_replicas_is_released_or_accepted() {
    run(async {
        let master = fast();
        let replica = Redis::replica_of(master.port(), Setup::new().fast());
        master.wait_for_replicas(1);
        let two = format!("{}?replicas=2&replicas_ms=100", master.url());
        let error = connect(&two).await.mutex("short").try_lock().await.unwrap_err();
        assert_told(&error, ErrorKind::Unconfirmed, "secret");
        assert_eq!(
            master.command(&["EXISTS", "short"]),
            "0",
            "the unconfirmed lock was not released"
        );
        // The time suffices for the existing replica. A replica that has just synchronized is slow
        // to report that.
        let patient = connect(&format!("{}?replicas=1&replicas_ms=20000", master.url())).await;
        release(patient.mutex("first").lease(PATIENCE).lock().await.unwrap()).await;
        let two = format!("{}?replicas=2&replicas_ms=4000", master.url());
        let accepting = connect(&format!("{two}&replicas_short=accept")).await;
        let guard = accepting.mutex("short").lock().await.unwrap();
        assert_eq!(guard.replicas(), Some(1), "replicas that confirmed the grant");
        release(guard).await;
        let unasked = connect(&master.url()).await;
        let guard = unasked.mutex("short").try_lock().await.unwrap();
        assert_eq!(guard.replicas(), None);
        release(guard).await;
        // A pushed grant also counts only after it is confirmed.
        let one = connect(&format!("{}?replicas=1&replicas_ms=5000", master.url())).await;
        let guard = one.mutex("pushed").lock().await.unwrap();
        let waiter = tokio::spawn({
            let one = one.clone();
            async move { one.mutex("pushed").lock().await }
        });
        until_waiting(&one, "pushed", 1).await;
        replica.stop();
        release(guard).await;
        let refused = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap();
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unconfirmed);
        // The confirmation may take longer than any reply, and may wait for an earlier
        // confirmation.
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

// R30
#[test]
#[ignore = "runs with ./test.sh --all"]
fn paused_master_is_not_mistaken_for_missing_replicas() {
    run(async {
        let master = fast();
        let replica = Redis::replica_of(master.port(), Setup::new().fast());
        master.wait_for_replicas(1);
        let locks = connect(&format!("{}?replicas=1", master.url())).await;
        // A lease that expires before the shortage is detected could never be held.
        let accepting = format!("{}?replicas=2&replicas_short=accept", master.url());
        let short = connect(&accepting).await.mutex("short").lease(Duration::from_secs(2));
        assert_told(&short.lock().await.unwrap_err(), ErrorKind::Config, "secret");
        // The master is paused for longer than its wait for the replica may take.
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

// R30
/// The master is demoted while it waits for its replicas, and the next master is queried.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn grant_waits_for_a_failover_during_replica_confirmation() {
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
        // The replica has the grant, and the master waits for a second replica.
        let known = || replica.command(&["DBSIZE"]) != "0";
        while !known() || !master.command(&["CLIENT", "LIST"]).contains("cmd=wait") {
            assert!(Instant::now() < end, "no client waits for replicas");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(replica.command(&["CLUSTER", "FAILOVER"]), "OK");
        let guard = tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap().unwrap();
        assert!(guard.replicas() < Some(2), "{:?}", guard.replicas());
        assert!(replica.command(&["ROLE"]).starts_with("master"));
        release(guard).await;
    });
}

// R30
/// One heartbeat confirms all claims. Each claim gets its own result, all within one wait.
#[test]
fn missing_replicas_are_reported_to_each_of_many_waiters() {
    const MANY: usize = 50;
    run(async {
        let master = fast();
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
        // Claims without a result within a heartbeat's time are queried again.
        let is_open = |renewal: &Renewal| {
            matches!(renewal, Renewal::Unknown { kind: ErrorKind::Unreachable, .. })
        };
        let mut renewed = store.renew(&all).await.unwrap();
        while renewed.iter().any(is_open) {
            let open = all.iter().zip(&renewed).filter(|(_, renewed)| is_open(renewed));
            let open: Vec<Renew> = open.map(|(renew, _)| renew.clone()).collect();
            let again = store.renew(&open).await;
            // A single claim returns an error.
            let mut again = again.unwrap_or_else(|e| vec![Renewal::unknown(&e)]).into_iter();
            for renewed in renewed.iter_mut().filter(|renewed| is_open(renewed)) {
                *renewed = again.next().unwrap();
            }
        }
        // Sequential confirmations would take two hundred seconds.
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
        // The claim that was confirmed before is still renewed.
        assert!(matches!(renewed.pop(), Some(Renewal::Holding { .. })));
        replica.cont();
        for (renewal, claim) in renewed.into_iter().zip(&waiting) {
            let error = renewal.known().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unconfirmed, "{error}");
            // The replica is back. Other calls for this claim still get the same result, and do not
            // hold the lock that the first call releases.
            let again = [Renew { claim: claim.clone(), lease: claim.lease }];
            let error = store.renew(&again).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unconfirmed, "{error}");
            assert!(
                store.leave(claim, None).await.unwrap(),
                "the claim was not at the server when it was released"
            );
        }
    });
}
