//! Events that a waiter must not miss, and events that it must not mistake for its grant.

use std::sync::Arc;
use std::time::Duration;

use crate::zookeeper_common::*;
use leasehold::store::{Claim, Joined, Mode, Renew, Renewal, Signal, Store};
use leasehold::{LockEventKind, LockEvents};
use testbed::{Proxy, ZooKeeper, zookeeper};
use zookeeper_client::{Acls, Client as RawClient, CreateMode};

/// Waits until the claim is granted, either by a notification or by a poll.
async fn gets_it(store: &Arc<dyn Store>, claim: &Claim) {
    loop {
        match tokio::time::timeout(PATIENCE, store.changed(claim))
            .await
            .expect("the claim was never granted")
        {
            Ok(Signal::Granted(_)) => return,
            Ok(Signal::Ask) => {
                let renew = Renew { claim: claim.clone(), lease: claim.lease };
                match store.renew(&[renew]).await.as_deref() {
                    Ok([Renewal::Holding { .. }]) => return,
                    Ok([Renewal::Waiting(_) | Renewal::Unknown { .. }]) | Err(_) => {}
                    lost => panic!("{lost:?}"),
                }
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Checks that the claim waits and is not notified of a grant.
async fn waits_on(store: &Arc<dyn Store>, claim: &Claim) {
    let renew = [Renew { claim: claim.clone(), lease: claim.lease }];
    loop {
        match store.renew(&renew).await.as_deref() {
            Ok([Renewal::Waiting(_)]) => break,
            // This happens as long as the connection is broken.
            Ok([Renewal::Unknown { .. }]) | Err(_) => {}
            other => panic!("{other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let signal = tokio::time::timeout(Duration::from_millis(300), store.changed(claim)).await;
    assert!(!matches!(signal, Ok(Ok(Signal::Granted(_)))), "a grant was forged");
}

async fn closed_child(client: &RawClient, prefix: &str) -> String {
    let options = CreateMode::EphemeralSequential.with_acls(Acls::creator_all());
    let (_, number) = client.create(prefix, b"secret", &options).await.unwrap();
    format!("{prefix}{number}")
}

const GUID: &str = "_c_01234567-89ab-cdef-0123-456789abcdef-lock-";

/// Servers do not notify a client of nodes that it may not read.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn unreadable_claim_is_not_overtaken() {
    run(async {
        let server = ZooKeeper::start();
        let url = format!("{}?session=60s", server.url());
        let (first, other) = (connect(&url).await, connect(&url).await);
        let theirs = raw(server.port()).await;
        theirs.auth("digest", b"they:secret").await.unwrap();
        let [holder, follows, behind] = [(); 3].map(|()| patient("unheard"));
        holds(first.store(), &holder).await;
        waits(other.store(), &follows, 1).await;
        let path = closed_child(&theirs, &format!("/leasehold/unheard/{GUID}")).await;
        waits(other.store(), &behind, 3).await;
        leaves(first.store(), &holder).await;
        gets_it(other.store(), &follows).await;
        leaves(other.store(), &follows).await;
        waits_on(other.store(), &behind).await;
        theirs.delete(&path, None).await.unwrap();
        gets_it(other.store(), &behind).await;
        leaves(other.store(), &behind).await;
    });
}

#[test]
fn changes_during_a_broken_connection_are_known_afterwards() {
    run(async {
        let server = zookeeper();
        let proxy = Proxy::before(server.port());
        let others = connect(&format!("{}?session=60s", server.url())).await;
        let url = format!("zookeeper://127.0.0.1:{}?session=60s", proxy.port());
        let cut = connect(&url).await;
        for round in 0..3 {
            let name = format!("while-cut-{round}");
            let [holder, leaver, ours, evicted, last] = [(); 5].map(|()| patient(&name));
            holds(others.store(), &holder).await;
            waits(others.store(), &leaver, 1).await;
            waits(cut.store(), &ours, 2).await;
            waits(cut.store(), &evicted, 3).await;
            let Ok(Joined::Waiting(place)) = others.store().join(&last, Mode::Wait).await else {
                panic!("granted while another client holds the lock")
            };
            assert_eq!(place.ahead, 4);
            proxy.refuse(true);
            leaves(others.store(), &leaver).await;
            let raw = raw(server.port()).await;
            evict(&raw, &name, 3).await;
            if round > 0 {
                leaves(others.store(), &holder).await;
            }
            proxy.refuse(false);
            if round == 0 {
                waits_on(cut.store(), &ours).await;
                leaves(others.store(), &holder).await;
            }
            gets_it(cut.store(), &ours).await;
            let signal = tokio::time::timeout(PATIENCE, cut.store().changed(&evicted)).await;
            assert!(matches!(signal, Ok(Ok(Signal::Ask))), "{signal:?}");
            leaves(cut.store(), &ours).await;
            gets_it(others.store(), &last).await;
            leaves(others.store(), &last).await;
        }
    });
}

/// After a break the server notifies of deleted nodes in any order. The holder's node may come
/// before the waiter's own one.
#[test]
fn a_waiter_evicted_while_the_connection_is_broken_is_never_granted() {
    run(async {
        let server = zookeeper();
        let proxy = Proxy::before(server.port());
        let others = connect(&format!("{}?session=60s", server.url())).await;
        let cut = connect(&through(&proxy, "?session=60s")).await;
        let raw = raw(server.port()).await;
        for round in 0..20 {
            let name = format!("evicted-while-cut-{round}");
            let [holder, evicted, next] = [(); 3].map(|()| patient(&name));
            holds(others.store(), &holder).await;
            waits(cut.store(), &evicted, 1).await;
            waits(others.store(), &next, 2).await;
            proxy.refuse(true);
            evict(&raw, &name, 1).await;
            leaves(others.store(), &holder).await;
            gets_it(others.store(), &next).await;
            proxy.refuse(false);
            let signal = tokio::time::timeout(PATIENCE, cut.store().changed(&evicted)).await;
            assert!(
                matches!(signal, Ok(Ok(Signal::Ask))),
                "notified with {signal:?} while another client holds the lock"
            );
            leaves(others.store(), &next).await;
        }
    });
}

/// Waits for the next event of the lock, even if the connection is broken for a while.
async fn became(changes: &mut LockEvents) -> LockEventKind {
    let signal = tokio::time::timeout(PATIENCE, async {
        loop {
            // Errors are ignored while the connection is broken.
            if let Ok(change) = changes.next().await {
                return change.became;
            }
        }
    });
    signal.await.expect("the watcher was not notified")
}

/// A follower is notified of changes while the connection was broken, and of later changes. The
/// poll interval is too long to matter.
#[test]
fn watcher_continues_after_a_broken_connection() {
    run(async {
        let server = zookeeper();
        let proxy = Proxy::before(server.port());
        let others = connect(&format!("{}?session=60s", server.url())).await;
        let cut = connect(&format!("zookeeper://127.0.0.1:{}?session=60s", proxy.port())).await;
        let mut changes = cut.watch("changes").every(PATIENCE * 20);
        for _ in 0..3 {
            let guard = others.mutex("changes").lock().await.unwrap();
            assert_eq!(became(&mut changes).await, LockEventKind::Holds);
            proxy.refuse(true);
            release(guard).await;
            proxy.refuse(false);
            assert_eq!(became(&mut changes).await, LockEventKind::Ended);
        }
    });
}

/// The lock's node is created again between two uses. The sequence numbers restart, and the state
/// of the old ones must not cause a grant.
#[test]
fn restarted_sequence_numbers_cause_no_early_grant() {
    run(async {
        let server = zookeeper();
        let url = format!("{}?session=60s&naming=kazoo", server.url());
        let (locks, others) = (connect(&url).await, connect(&url).await);
        let raw = raw(server.port()).await;
        for round in 0..4 {
            let name = format!("anew-{round}");
            let lock = format!("/leasehold/{name}");
            // This many claims have joined when the node is deleted.
            let first: Vec<Claim> = (0..=round).map(|_| patient(&name)).collect();
            holds(locks.store(), &first[0]).await;
            for (n, one) in first.iter().enumerate().skip(1) {
                waits(locks.store(), one, n).await;
            }
            for one in &first {
                leaves(locks.store(), one).await;
            }
            raw.delete(&lock, None).await.unwrap();
            let second: Vec<Claim> = (0..=round).map(|_| patient(&name)).collect();
            holds(others.store(), &second[0]).await;
            for (n, one) in second.iter().enumerate().skip(1) {
                waits(others.store(), one, n).await;
            }
            let ours = patient(&name);
            waits(locks.store(), &ours, second.len()).await;
            for one in &second {
                waits_on(locks.store(), &ours).await;
                leaves(others.store(), one).await;
            }
            gets_it(locks.store(), &ours).await;
            leaves(locks.store(), &ours).await;
        }
    });
}

/// A child that is not a claim is a mismatch for a client that already waits there, as for any
/// other.
#[test]
fn foreign_child_is_a_mismatch_even_if_clients_wait() {
    run(async {
        let server = zookeeper();
        let locks = connect(&format!("{}?session=60s", server.url())).await;
        let raw = raw(server.port()).await;
        let [holder, waiter, next] = [(); 3].map(|()| patient("foreign"));
        holds(locks.store(), &holder).await;
        waits(locks.store(), &waiter, 1).await;
        make(&raw, "/leasehold/foreign/leases").await;
        let refused = locks.store().join(&next, Mode::Wait).await.unwrap_err();
        assert_eq!(refused.kind(), leasehold::ErrorKind::Mismatch, "{refused}");
        raw.delete("/leasehold/foreign/leases", None).await.unwrap();
        leaves(locks.store(), &holder).await;
        for left in [waiter, next] {
            let _ = locks.store().leave(&left, None).await;
        }
        until("all nodes of leasehold are gone", async || {
            children(&raw, "/leasehold/foreign").await.is_empty()
        })
        .await;
    });
}
