//! The ZooKeeper store on one server: what is on the wire, lost replies, cut connections, bad input.

#![cfg(feature = "zookeeper")]

use std::path::Path;
use std::pin::pin;
use std::time::{Duration, Instant};

use crate::zookeeper_common::*;
use leasehold::store::{Evict, Joined, Mode, Renew, Renewal, Signal};
use leasehold::{Claim, ErrorKind, Kind, LostReason, Name, State};
use testbed::{Proxy, ZooKeeper, ZooKeeperSetup, zookeeper};
use zookeeper_client::{Acls, AuthId, CreateMode, Permission};

fn url(rest: &str) -> String {
    format!("{}{rest}", zookeeper().url())
}

fn through(proxy: &Proxy, rest: &str) -> String {
    format!("zookeeper://127.0.0.1:{}{rest}", proxy.port())
}

fn claim(name: &str) -> Claim {
    Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap()
}

/// A claim that needs no heartbeat in a test's time, in a session of 60 s.
fn patient(mut claim: Claim) -> Claim {
    let long = Duration::from_secs(40);
    (claim.lease, claim.waiter_lease) = (long, long);
    claim
}

#[test]
fn s76_what_is_on_the_wire() {
    run(async {
        let raw = raw(zookeeper().port()).await;
        for (naming, pattern) in [("curator", "-lock-"), ("kazoo", "__lock__")] {
            let locks = connect(&url(&format!("/wire-{naming}?create=yes&naming={naming}"))).await;
            let path = format!("/wire-{naming}/a%2fb:c");
            let guard = locks.mutex("a/b:c").label("the label").lock().await.unwrap();
            let all = children(&raw, &path).await;
            assert_eq!(all.len(), 1);
            assert!(all[0].contains(pattern) && all[0].ends_with("0000000000"), "{all:?}");
            let (data, stat) = raw.get_data(&format!("{path}/{}", all[0])).await.unwrap();
            let data: serde_json::Value = serde_json::from_slice(&data).unwrap();
            assert_eq!(data["label"], "the label");
            assert_eq!(data["pid"], std::process::id());
            assert_eq!(u64::try_from(stat.czxid).unwrap(), guard.token().get());
            assert!(stat.ephemeral_owner != 0);
            release(guard).await;
            assert_eq!(children(&raw, &path).await, [""; 0]);
        }
    });
}

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
        for _ in 0..8 {
            let before = proxy.round_trips();
            for _ in 0..5 {
                release(locks.mutex("round-trips").lock().await.unwrap()).await;
            }
            batches.push(proxy.round_trips() - before);
        }
        // A pulse adds one, and whoever stands still between two requests another; neither does so each
        // time. (A node of kazoo's naming is not reaped.)
        assert_eq!(batches.iter().min(), Some(&10), "{batches:?} round trips for 5 pairs each");
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

#[test]
fn s70_a_creation_whose_reply_is_lost_is_found_again() {
    run(async {
        let proxy = Proxy::before(zookeeper().port());
        // A node of kazoo's naming is not reaped.
        let locks = connect(&through(&proxy, "?naming=kazoo")).await;
        let raw = raw(zookeeper().port()).await;
        release(locks.mutex("s70").lock().await.unwrap()).await;
        let made = raw.check_stat("/leasehold/s70").await.unwrap().unwrap().cversion;
        proxy.hold_replies();
        let taking = tokio::spawn({
            let lock = locks.mutex("s70");
            async move { lock.lock_timeout(PATIENCE).await }
        });
        until("the child", async || children(&raw, "/leasehold/s70").await.len() == 1).await;
        proxy.cut();
        proxy.thaw();
        let guard = taking.await.unwrap().unwrap();
        assert!(guard.is_held());
        let (all, stat) = raw.get_children("/leasehold/s70").await.unwrap();
        assert_eq!(all.len(), 1);
        assert_eq!(stat.cversion, made + 1, "made more than once");
        release(guard).await;
    });
}

#[test]
fn s71_a_new_session_inherits_nothing() {
    run(async {
        let server = ZooKeeper::start();
        let proxy = Proxy::before(server.port());
        let locks = connect(&through(&proxy, "?session=4s")).await;
        let raw = raw(server.port()).await;
        let guard = loop {
            match locks.mutex("s71").lock().await {
                Ok(guard) => break guard,
                // A grant that came too late is said to have been lost.
                Err(e) => assert!(e.is_retryable(), "{e}"),
            }
        };
        let lost = patient(claim("s71b"));
        proxy.refuse(true);
        // Sent into a session that will not come back: it may or may not be there.
        let store = locks.store().clone();
        let asked = tokio::spawn({
            let lost = lost.clone();
            async move { store.join(&lost, Mode::Wait).await }
        });
        until("the session ends", async || children(&raw, "/leasehold/s71").await.is_empty()).await;
        assert!(!guard.is_held(), "believed for longer than the session");
        // What the old session's child looks like as long as a member has not heard of its end.
        let hex = lost.id.to_hex();
        let guid = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
        make(&raw, "/leasehold/s71b").await;
        make_child(&raw, &format!("/leasehold/s71b/_c_{guid}-lock-")).await;
        proxy.refuse(false);
        assert_eq!(asked.await.unwrap().unwrap_err().kind(), ErrorKind::Unreachable);
        // The first may meet the end of the old session.
        let mut again = locks.store().join(&lost, Mode::Wait).await;
        while again.as_ref().is_err_and(|e| e.kind() == ErrorKind::Unreachable) {
            again = locks.store().join(&lost, Mode::Wait).await;
        }
        let again = again.unwrap();
        assert!(matches!(again, Joined::Busy { .. }), "{again:?}");
        assert_eq!(guard.state(), State::Lost(LostReason::Expired));
        let next = locks.mutex("s71").lock_timeout(PATIENCE).await.unwrap();
        assert!(next.token() > guard.token());
    });
}

#[test]
fn s72_who_is_cut_off_has_lost_before_anybody_else_holds() {
    run(async {
        let server = ZooKeeper::start();
        let proxy = Proxy::before(server.port());
        for session in ["4s", "8s"] {
            let cut = connect(&through(&proxy, &format!("?session={session}"))).await;
            let other = connect(&server.url()).await;
            let guard = cut.mutex("s72").lock().await.unwrap();
            let mut watch = guard.watch();
            let next = tokio::spawn({
                let lock = other.mutex("s72");
                async move { lock.lock_timeout(PATIENCE).await }
            });
            // On a machine that stood still, the other holds by now.
            until("the other to wait", async || {
                let info = other.read("s72").await.unwrap();
                next.is_finished() || info.is_some_and(|info| info.waiters().count() == 1)
            })
            .await;
            proxy.freeze();
            loop {
                match guard.state() {
                    State::Held => {
                        watch.changed().await;
                    }
                    // Or over already, on such a machine.
                    State::AtRisk(_) | State::Lost(LostReason::Expired) => break,
                    state => panic!("{state:?} before it was at risk"),
                }
            }
            let next = next.await.unwrap().unwrap();
            assert!(!guard.is_held(), "two holders");
            assert_eq!(guard.state(), State::Lost(LostReason::Expired));
            assert!(next.token() > guard.token());
            proxy.thaw();
            proxy.cut();
            release(next).await;
        }
    });
}

#[test]
fn s73_numbers_that_run_out_are_told_and_begin_anew_when_the_lock_is_free() {
    run(async {
        let setup = ZooKeeperSetup::new()
            .sequences_at("/late", 1 << 30)
            .sequences_at("/last", i32::MAX - 500_000)
            .sequences_at("/over", i32::MIN + 7);
        let server = ZooKeeper::with(&setup);
        let locks = connect(&format!("{}/?session=60s", server.url())).await;
        let raw = raw(server.port()).await;
        let guard = locks.mutex("late").lock().await.unwrap();
        assert!(children(&raw, "/late").await[0].ends_with("-lock-1073741824"));
        let before = guard.token();
        release(guard).await;
        assert_eq!(raw.check_stat("/late").await.unwrap(), None, "nobody stood there");
        let guard = locks.mutex("late").lock().await.unwrap();
        assert!(children(&raw, "/late").await[0].ends_with("-lock-0000000000"));
        assert!(guard.token() > before);
        for name in ["last", "over"] {
            // As long as somebody stands there, nobody joins.
            let foreign = make_child(&raw, &format!("/{name}/_c_x-lock-")).await;
            let refused = locks.store().join(&patient(claim(name)), Mode::Try).await;
            let refused = refused.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Full, "{refused}");
            let alone = async || children(&raw, &format!("/{name}")).await.len() == 1;
            until("nothing of ours", alone).await;
            raw.delete(&foreign, None).await.unwrap();
            let guard = locks.mutex(name).lock_timeout(PATIENCE).await.unwrap();
            assert!(children(&raw, &format!("/{name}")).await[0].ends_with("-lock-0000000000"));
            release(guard).await;
        }
    });
}

#[test]
fn s74_a_reaped_container_costs_no_order() {
    run(async {
        let locks = connect(&url("")).await;
        let raw = raw(zookeeper().port()).await;
        let mut last = 0;
        for _ in 0..2 {
            let guard = locks.mutex("s74").lock().await.unwrap();
            assert!(children(&raw, "/leasehold/s74").await[0].ends_with("-0000000000"));
            assert!(guard.token().get() > last);
            last = guard.token().get();
            release(guard).await;
            let gone = async || raw.check_stat("/leasehold/s74").await.unwrap().is_none();
            until("the server deletes the empty container", gone).await;
        }
    });
}

#[test]
fn s75_who_gives_up_while_cut_off_leaves_nothing_behind() {
    run(async {
        let proxy = Proxy::before(zookeeper().port());
        let locks = connect(&url("")).await;
        let cut = connect(&through(&proxy, "?session=60s")).await;
        let raw = raw(zookeeper().port()).await;
        let guard = locks.mutex("s75").lock().await.unwrap();
        let waiting = tokio::spawn({
            let lock = cut.mutex("s75");
            async move { lock.lock_timeout(Duration::from_secs(8)).await }
        });
        until_waiting(&locks, "s75", 1).await;
        let start = Instant::now();
        proxy.refuse(true);
        assert_eq!(waiting.await.unwrap().unwrap_err().kind(), ErrorKind::Timeout);
        assert_eq!(children(&raw, "/leasehold/s75").await.len(), 2, "it could not be told");
        proxy.refuse(false);
        until("deleted", async || children(&raw, "/leasehold/s75").await.len() == 1).await;
        assert!(start.elapsed() < Duration::from_secs(50), "that was the session's end");
        assert!(guard.is_held());
    });
}

#[test]
fn p8_calls_about_one_claim_wait_for_each_other_though_it_expires_meanwhile() {
    run(async {
        let proxy = Proxy::before(zookeeper().port());
        let locks = connect(&through(&proxy, "?naming=kazoo&session=20s")).await;
        let raw = raw(zookeeper().port()).await;
        release(locks.mutex("expired").lock().await.unwrap()).await;
        for _ in 0..5 {
            let mut claim = claim("expired");
            let short = Duration::from_millis(200);
            (claim.lease, claim.waiter_lease) = (short, short);
            proxy.hold_replies();
            let joins: Vec<_> = (0..3)
                .map(|_| {
                    let (store, claim) = (locks.store().clone(), claim.clone());
                    tokio::spawn(async move { store.join(&claim, Mode::Wait).await })
                })
                .collect();
            let made = async || !children(&raw, "/leasehold/expired").await.is_empty();
            until("the child", made).await;
            // Long enough for it to be given up while all three calls are under way.
            tokio::time::sleep(short * 2).await;
            proxy.thaw();
            let mut most = 0;
            for join in joins {
                // Whatever each is told: there is never a second child of the claim.
                let _ = join.await.unwrap();
                most = most.max(children(&raw, "/leasehold/expired").await.len());
            }
            assert!(most <= 1, "{most} children of one claim");
            let gone = async || children(&raw, "/leasehold/expired").await.is_empty();
            until("expired", gone).await;
        }
    });
}

#[test]
fn a_connection_that_breaks_costs_nothing() {
    run(async {
        let proxy = Proxy::before(zookeeper().port());
        let (locks, other) = (connect(&through(&proxy, "")).await, connect(&url("")).await);
        let guard = locks.mutex("broken").lock().await.unwrap();
        let waiting = tokio::spawn({
            let lock = locks.mutex("broken");
            async move { lock.lock_timeout(PATIENCE).await }
        });
        until_waiting(&other, "broken", 1).await;
        for _ in 0..3 {
            proxy.cut();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(guard.is_held());
        // The watch of the waiter was set again.
        release(guard).await;
        release(waiting.await.unwrap().unwrap()).await;
    });
}

#[test]
fn a_release_wakes_one_of_a_thousand() {
    run(async {
        let server = ZooKeeper::start();
        let locks = connect(&format!("{}?session=60s", server.url())).await;
        let store = locks.store();
        let all: Vec<Claim> = (0..1_001).map(|_| patient(claim("herd"))).collect();
        for claim in &all {
            store.join(claim, Mode::Wait).await.unwrap();
        }
        let sent = || server.metric("zk_packets_sent");
        let mut least = i64::MAX;
        for turn in 0..5 {
            let before = sent();
            assert!(store.leave(&all[turn], None).await.unwrap());
            let told = tokio::time::timeout(PATIENCE, store.changed(&all[turn + 1])).await;
            let Ok(Ok(Signal::Granted(token))) = told else { panic!("{told:?}") };
            let renew = Renew { claim: all[turn + 1].clone(), lease: PATIENCE };
            let renewed = store.renew(&[renew]).await.unwrap();
            assert!(matches!(renewed[..], [Renewal::Holding { token: t, .. }] if t == token));
            let sent = sent() - before;
            assert!(sent <= 100, "{sent} packets for one hand-over");
            least = least.min(sent);
        }
        // The answers to both calls, one event, and perhaps a pulse and the mntr before: more of the pulses
        // where a turn took long.
        assert!(least <= 8, "{least} packets for one hand-over");
        let mut next = pin!(store.changed(&all[6]));
        assert!(is_pending(&mut next).await, "woken too early");
        assert!(server.metric("zk_watch_count") <= 2 * 1_001);
    });
}

#[test]
fn permits_wake_who_fits_and_nobody_else() {
    run(async {
        let locks = connect(&url("?session=60s")).await;
        let store = locks.store();
        let permits = |weight| {
            let name = Name::new("permits").unwrap();
            patient(Claim::new(name, Kind::Semaphore, weight, 4).unwrap())
        };
        // Three hold; of the waiting the first wants two, the others one.
        let all = [1, 2, 1, 2, 1, 1].map(permits);
        for claim in &all {
            store.join(claim, Mode::Wait).await.unwrap();
        }
        // The one that waits for two has room only when two have left.
        assert!(store.leave(&all[0], None).await.unwrap());
        {
            let mut others: Vec<_> = all[3..].iter().map(|c| Box::pin(store.changed(c))).collect();
            tokio::time::sleep(Duration::from_millis(200)).await;
            for other in &mut others {
                assert!(is_pending(&mut other.as_mut()).await, "woken though nothing fits");
            }
        }
        assert!(store.leave(&all[2], None).await.unwrap());
        let told = tokio::time::timeout(PATIENCE, store.changed(&all[3])).await;
        assert!(matches!(told, Ok(Ok(Signal::Granted(_)))), "{told:?}");
        assert!(store.leave(&all[1], None).await.unwrap());
        for claim in &all[4..] {
            let told = tokio::time::timeout(PATIENCE, store.changed(claim)).await;
            assert!(matches!(told, Ok(Ok(Signal::Granted(_)))), "{told:?}");
        }
    });
}

#[test]
fn who_is_evicted_while_waiting_does_not_take_a_departure_for_its_turn() {
    run(async {
        let locks = connect(&url("?session=60s")).await;
        let store = locks.store();
        let [holder, evicted, behind] = [(); 3].map(|()| patient(claim("evicted")));
        store.join(&holder, Mode::Wait).await.unwrap();
        let Joined::Waiting(place) = store.join(&evicted, Mode::Wait).await.unwrap() else {
            panic!("beside a holder")
        };
        store.join(&behind, Mode::Wait).await.unwrap();
        let token = place.token.unwrap();
        assert_eq!(locks.evict("evicted", Evict::Token(token)).await.unwrap(), 1);
        assert!(store.leave(&holder, None).await.unwrap());
        let told = tokio::time::timeout(PATIENCE, store.changed(&evicted)).await;
        assert!(matches!(told, Ok(Ok(Signal::Ask))), "{told:?}");
        let renew = Renew { claim: evicted.clone(), lease: PATIENCE };
        assert!(matches!(store.renew(&[renew]).await.unwrap()[..], [Renewal::Lost]));
        let told = tokio::time::timeout(PATIENCE, store.changed(&behind)).await;
        assert!(matches!(told, Ok(Ok(Signal::Granted(_)))), "{told:?}");
    });
}

// --- bad input -----------------------------------------------------------------------------------

#[track_caller]
fn is_one_line(error: &leasehold::Error, kind: ErrorKind, says: &[&str]) {
    let shown = error.to_string();
    assert_eq!(error.kind(), kind, "{shown}");
    assert_eq!(shown.lines().count(), 1, "{shown}");
    for word in says {
        assert!(shown.contains(word), "{shown} does not say {word}");
    }
}

#[test]
fn nobody_serves() {
    run(async {
        let server = ZooKeeper::start();
        let url = server.url();
        server.kill();
        let error = leasehold::connect(&url).await.unwrap_err();
        is_one_line(&error, ErrorKind::Unreachable, &["majority", &url]);
    });
}

#[test]
fn a_chroot_that_is_not_there() {
    run(async {
        let error = leasehold::connect(url("/no/such/path")).await.unwrap_err();
        is_one_line(&error, ErrorKind::Config, &["/no/such/path", "create=yes"]);
        let locks = connect(&url("/made/here?create=yes")).await;
        release(locks.mutex("a").lock().await.unwrap()).await;
        connect(&url("/made/here")).await;
    });
}

#[test]
fn no_permission_names_the_path() {
    run(async {
        let raw = raw(zookeeper().port()).await;
        make(&raw, "/forbidden").await;
        let read = [zookeeper_client::Acl::new(Permission::READ, AuthId::anyone())];
        raw.set_acl("/forbidden", &read, None).await.unwrap();
        let locks = connect(&url("/forbidden")).await;
        let error = locks.mutex("x").lock().await.unwrap_err();
        is_one_line(&error, ErrorKind::Denied, &["/forbidden/x", "ACL"]);
    });
}

#[test]
fn s94_credentials_guard_the_nodes_and_are_never_shown() {
    run(async {
        let at = |credentials: &str, rest: &str| {
            format!("zookeeper://{credentials}@127.0.0.1:{}{rest}", zookeeper().port())
        };
        let right = connect(&at("me:s3cret", "/private?create=yes")).await;
        let guard = right.mutex("x").lock().await.unwrap();
        assert!(!format!("{right:?} {}", right.url()).contains("s3cret"));
        // Another with the same password is one of us.
        let same = connect(&at("me:s3cret", "/private")).await;
        let contended = same.mutex("x").try_lock().await.unwrap_err();
        assert_eq!(contended.kind(), ErrorKind::Contended);
        assert!(contended.holders().iter().any(|h| h.token == guard.token()), "{contended}");
        for other in [url("/private"), at("me:wr0ng", "/private")] {
            // Since 3.9 as it connects, since nobody else may even ask for the node.
            let error = match leasehold::connect(&other).await {
                Ok(locks) => locks.mutex("x").try_lock().await.unwrap_err(),
                Err(error) => error,
            };
            is_one_line(&error, ErrorKind::Denied, &["/private"]);
            assert!(!error.to_string().contains("wr0ng"));
            assert!(guard.is_held());
        }
    });
}

#[test]
fn the_session_is_what_the_server_allows_and_is_told() {
    run(async {
        let setup = ZooKeeperSetup::new().sessions(Duration::from_secs(8), Duration::from_secs(20));
        let server = ZooKeeper::with(&setup);
        for (asked, given) in [("2s", 8), ("60s", 20), ("15s", 15)] {
            let locks = connect(&format!("{}?session={asked}", server.url())).await;
            let given = Duration::from_secs(given);
            let promises = locks.guarantees();
            assert_eq!(promises.recovery, given + Duration::from_secs(3));
            let told = promises.notes.iter().any(|note| note.contains(&format!("{given:?}")));
            assert_eq!(told, asked != "15s", "{:?}", promises.notes);
            // No lease is believed in for longer than the session can vouch for.
            let guard = locks.mutex("session").lease(PATIENCE * 2).lock().await.unwrap();
            assert!(guard.remaining() < given, "{:?} of {given:?}", guard.remaining());
            assert!(guard.remaining() > given / 4, "{:?} of {given:?}", guard.remaining());
            release(guard).await;
        }
    });
}

#[test]
fn s76_children_of_others_are_a_mismatch() {
    run(async {
        let raw = raw(zookeeper().port()).await;
        let (curator, kazoo) = (
            connect(&url("/mixed?create=yes")).await,
            connect(&url("/mixed?create=yes&naming=kazoo")).await,
        );
        let guard = curator.mutex("a").lock().await.unwrap();
        let error = kazoo.mutex("a").lock().await.unwrap_err();
        is_one_line(&error, ErrorKind::Mismatch, &["/mixed/a", "naming=curator"]);
        release(guard).await;
        let guard = kazoo.mutex("b").lock().await.unwrap();
        let error = curator.mutex("b").lock().await.unwrap_err();
        is_one_line(&error, ErrorKind::Mismatch, &["/mixed/b", "naming=kazoo"]);
        release(guard).await;
        make(&raw, "/mixed/c/leases").await;
        let error = curator.mutex("c").lock().await.unwrap_err();
        is_one_line(&error, ErrorKind::Mismatch, &["/mixed/c", "leases"]);
        // Nothing of ours stayed, and a look at all of it is not stopped by what is foreign.
        assert_eq!(children(&raw, "/mixed/c").await, ["leases"]);
        let listed = curator.list("").await.unwrap();
        assert!(listed.is_empty(), "{listed:?}");
    });
}

#[test]
fn a_name_under_an_ephemeral_node_is_refused() {
    run(async {
        let raw = raw(zookeeper().port()).await;
        make(&raw, "/eph").await;
        let options = CreateMode::Ephemeral.with_acls(Acls::anyone_all());
        raw.create("/eph/x", &[], &options).await.unwrap();
        let locks = connect(&url("/eph")).await;
        let error = locks.mutex("x").lock().await.unwrap_err();
        is_one_line(&error, ErrorKind::Mismatch, &["/eph/x"]);
    });
}

#[test]
fn tls_is_verified() {
    run(async {
        let server = ZooKeeper::with(&ZooKeeperSetup::new().tls());
        let (port, certificates) = (server.tls_port(), server.certificates());
        let ca = certificates.authority().display();
        let url = format!("zookeepers://127.0.0.1:{port}/tls?create=yes");
        let locks = connect(&format!("{url}&ca={ca}")).await;
        let plain = connect(&format!("{}/tls", server.url())).await;
        // One queue, whichever way one comes.
        let guard = locks.mutex("x").lock().await.unwrap();
        let error = plain.mutex("x").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        let lock = plain.mutex("x");
        let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
        until_waiting(&locks, "x", 1).await;
        release(guard).await;
        release(waiting.await.unwrap().unwrap()).await;

        let directory = tempfile::tempdir().unwrap();
        let other = testbed::Certificates::make(directory.path());
        let refused = [
            (url.clone(), "certificate"),
            (format!("{url}&ca={}", other.authority().display()), "certificate"),
            // To the port that speaks plainly, and plainly to the one that does not.
            (format!("zookeepers://localhost:{}/tls?ca={ca}", server.port()), "localhost"),
            (format!("zookeeper://127.0.0.1:{port}"), "majority"),
        ];
        // Each gives up only after a while.
        let mut trying = tokio::task::JoinSet::new();
        for (url, says) in refused {
            trying.spawn(async move { (leasehold::connect(&url).await.unwrap_err(), says) });
        }
        for (error, says) in trying.join_all().await {
            is_one_line(&error, ErrorKind::Unreachable, &[says]);
        }
        for bad in ["/no/such/file", "/etc/hostname"] {
            let error = leasehold::connect(format!("{url}&ca={bad}")).await.unwrap_err();
            is_one_line(&error, ErrorKind::Config, &["ca=", bad]);
        }
    });
}

#[test]
fn a_server_that_wants_to_know_its_clients_is_shown_a_certificate() {
    run(async {
        let server = ZooKeeper::with(&ZooKeeperSetup::new().client_certificates());
        let (port, certificates) = (server.tls_port(), server.certificates());
        let ca = certificates.authority().display();
        let url = format!("zookeepers://127.0.0.1:{port}/tls?create=yes&ca={ca}");
        let (cert, key) = certificates.client();
        let shows = |cert: &Path, key: &Path| {
            format!("{url}&cert={}&key={}", cert.display(), key.display())
        };
        let locks = connect(&shows(cert, key)).await;
        release(locks.mutex("x").lock().await.unwrap()).await;

        let directory = tempfile::tempdir().unwrap();
        let other = testbed::Certificates::make(directory.path());
        let strange = shows(other.client().0, other.client().1);
        // Each gives up only after a while.
        let (none, strange) = tokio::join!(leasehold::connect(&url), leasehold::connect(&strange));
        for error in [none.unwrap_err(), strange.unwrap_err()] {
            is_one_line(&error, ErrorKind::Unreachable, &["ertificate"]);
        }
        let error = leasehold::connect(shows(cert, other.client().1)).await.unwrap_err();
        is_one_line(&error, ErrorKind::Config, &["does not belong to cert="]);
    });
}
