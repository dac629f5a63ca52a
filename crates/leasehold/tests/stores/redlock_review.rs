//! What a reviewer tried on the Redlock store.

#![cfg(feature = "redlock")]

use std::time::{Duration, Instant};

use leasehold::store::{Joined, Mode, Renew, Renewal};
use leasehold::{Claim, ErrorKind, Kind, Name};
use testbed::{Proxy, Redlock, Setup, redlock_url};

const PATIENCE: Duration = Duration::from_secs(60);

/// A release that was done, and not answered, is sent again, and finds nothing any more. That is not
/// the loss of the lock.
#[tokio::test]
async fn s07_a_release_whose_answers_are_lost_is_a_release() {
    let servers = Redlock::with(3, Setup::new().fast());
    let proxies: Vec<Proxy> = servers.nodes().iter().map(|n| Proxy::before(n.port())).collect();
    let url = redlock_url(proxies.iter().map(Proxy::port));
    let url = format!("{url}?restart_delay_ms=0&node_timeout_ms=20000&max_lease_ms=60000");
    let locks = leasehold::connect(&url).await.unwrap();
    // The scripts are known to the servers after this.
    locks.mutex("warm").try_lock().await.unwrap().release().await.unwrap();
    let lock = locks.mutex("s07").lease(Duration::from_secs(60));
    let guard = lock.try_lock().await.unwrap();
    proxies.iter().for_each(Proxy::hold_replies);
    let releasing = tokio::spawn(guard.release());
    let end = Instant::now() + PATIENCE / 2;
    while servers.nodes().iter().any(|node| node.command(&["EXISTS", "s07"]) == "1") {
        assert!(Instant::now() < end, "never released");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    proxies.iter().for_each(Proxy::cut);
    proxies.iter().for_each(Proxy::thaw);
    releasing.await.unwrap().expect("a release is told as a loss");
}

/// One waiter's trouble was told as an error of the whole call, that of holds which were extended too.
#[tokio::test]
async fn a_damaged_lock_costs_no_other_its_renewal() {
    let servers = Redlock::with(3, Setup::new().fast());
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=20000";
    let (locks, other) = (leasehold::connect(&url).await.unwrap(), leasehold::connect(&url).await);
    let (store, other) = (locks.store(), other.unwrap());
    let claim = |name: &str| Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
    let renew = |claim: &Claim| Renew { lease: claim.lease, claim: claim.clone() };
    let (holds, waits) = (claim("good"), claim("odd"));
    let guard = other.mutex("odd").try_lock().await.unwrap();
    assert!(matches!(store.join(&holds, Mode::Try).await.unwrap(), Joined::Holding { .. }));
    assert!(matches!(store.join(&waits, Mode::Wait).await.unwrap(), Joined::Waiting(_)));
    for node in servers.nodes() {
        node.command(&["DEL", "odd"]);
        node.command(&["LPUSH", "odd", "x"]);
    }
    let told = store.renew(&[renew(&holds), renew(&waits)]).await.unwrap();
    let [Renewal::Holding { .. }, Renewal::Unknown { kind, why }] = &told[..] else {
        panic!("{told:?}");
    };
    assert_eq!(*kind, ErrorKind::Corrupt, "{why}");
    // Where nothing was learnt of any, it is an error as ever.
    let error = store.renew(&[renew(&waits)]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    drop(guard);
}
