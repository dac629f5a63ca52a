//! What a reviewer tried on the ZooKeeper store.

#![cfg(feature = "zookeeper")]

mod review_common;
mod zookeeper_common;

use std::sync::mpsc;
use std::time::Duration;

use leasehold::store::zookeeper::ZooKeeperStore;
use leasehold::store::{Joined, Mode, Renew, Renewal, Signal, Store};
use leasehold::{Claim, Kind, Name};
use testbed::{Proxy, zookeeper};
use zookeeper_common::*;

fn claim(name: &str) -> Claim {
    let mut claim = Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
    let long = Duration::from_secs(40);
    (claim.lease, claim.waiter_lease) = (long, long);
    claim
}

/// A waiter counted who has left in two places: a heartbeat saw a listing without the one before it,
/// and then the news of that one's departure was taken off once more. So it held beside the holder.
/// The two come in this order to tasks of one thread when the client's runtime runs what was woken
/// last first.
#[test]
fn p1_a_departure_is_counted_once() {
    let ours = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let ours = ours.unwrap();
    run(async {
        let server = zookeeper();
        let proxy = Proxy::before(server.port());
        let others = connect(&server.url()).await;
        let url = format!("zookeeper://127.0.0.1:{}?session=60s", proxy.port());
        let store = ZooKeeperStore::open(&url, ours.handle()).await.unwrap();
        let (holds, leaves, waits) = (claim("p1"), claim("p1"), claim("p1"));
        let joined = others.store().join(&holds, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
        let joined = others.store().join(&leaves, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
        let joined = store.join(&waits, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");

        // A heartbeat: the check of the child is answered, and the listing is on its way when the one
        // in the middle leaves.
        proxy.delay(Duration::from_millis(300));
        let before = proxy.requests();
        let beating = tokio::spawn({
            let (store, waits) = (store.clone(), waits.clone());
            async move { store.renew(&[Renew { lease: waits.lease, claim: waits }]).await }
        });
        until("the listing", async || proxy.requests() >= before + 2).await;
        proxy.hold_replies();
        assert!(others.store().leave(&leaves, None).await.unwrap());
        // The listing has been answered by then; should it not, nothing is shown, and nothing fails.
        tokio::time::sleep(Duration::from_secs(1)).await;
        proxy.delay(Duration::ZERO);
        // Both pieces of news come while the client's thread is busy with something else.
        let (busy, free) = mpsc::channel::<()>();
        let (began, begins) = mpsc::channel();
        ours.spawn(async move {
            let _ = began.send(());
            let _ = free.recv();
        });
        begins.recv().unwrap();
        proxy.thaw();
        tokio::time::sleep(Duration::from_millis(300)).await;
        drop(busy);

        let beaten = beating.await.unwrap().unwrap();
        assert!(matches!(beaten[..], [Renewal::Waiting(_)]), "{beaten:?}");
        // Asked again, it waits as before: whoever was told of a grant holds by then.
        let again = [Renew { claim: waits.clone(), lease: waits.lease }];
        let again = store.renew(&again).await.unwrap();
        assert!(matches!(again[..], [Renewal::Waiting(_)]), "two hold: {again:?}");
        assert!(others.store().leave(&holds, None).await.unwrap());
        let told = tokio::time::timeout(PATIENCE, store.changed(&waits)).await.unwrap().unwrap();
        assert!(matches!(told, Signal::Granted(_)), "{told:?}");
    });
    ours.shutdown_background();
}

/// Random calls of two clients: nobody is told of a grant too early, and everybody unasked.
#[test]
fn p1_p6_what_waiters_are_told_agrees_with_the_queue() {
    run(async {
        let url = format!("{}?session=60s", zookeeper().url());
        let clients = [connect(&url).await, connect(&url).await];
        let stores = [0, 1].map(|i| clients[i].store().clone());
        let kinds = [(Kind::Mutex, 1), (Kind::Semaphore, 3), (Kind::RwLock, 1 << 20)];
        let all = (1..).zip(kinds.into_iter().cycle().take(12));
        let mut running = tokio::task::JoinSet::new();
        for (seed, lock) in all {
            let stores = stores.clone();
            running.spawn(async move {
                review_common::pushes_agree(&stores, lock, seed, 60).await;
            });
        }
        while let Some(done) = running.join_next().await {
            done.unwrap();
        }
    });
}
