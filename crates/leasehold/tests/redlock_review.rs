//! What a reviewer tried on the Redlock store.

#![cfg(feature = "redlock")]

use std::time::{Duration, Instant};

use leasehold::store::{Joined, Mode};
use leasehold::{Claim, Kind, Leasehold, Name};
use testbed::{Proxy, Redlock, Setup, redlock_url};

const PATIENCE: Duration = Duration::from_secs(60);

/// A release that was done, and not answered, is sent again, and finds nothing any more. That is not
/// the loss of the lock: a call that was sent more than once says so only if it is certain.
#[tokio::test]
async fn s07_a_release_whose_answers_are_lost_is_a_release() {
    let servers = Redlock::with(3, Setup::new().fast());
    let proxies: Vec<Proxy> = servers.nodes().iter().map(|n| Proxy::before(n.port())).collect();
    let url = redlock_url(proxies.iter().map(Proxy::port));
    let url = format!("{url}?restart_delay_ms=0&node_timeout_ms=20000&max_lease_ms=60000");
    let locks = Leasehold::connect(&url).await.unwrap();
    let mut claim = Claim::new(Name::new("s07").unwrap(), Kind::Mutex, 1, 1).unwrap();
    claim.lease = Duration::from_secs(60);
    let store = locks.store().clone();
    // The scripts are known to the servers after this.
    locks.mutex("warm").try_lock().await.unwrap().release().await.unwrap();
    let joined = store.join(&claim, Mode::Try).await.unwrap();
    assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
    proxies.iter().for_each(Proxy::hold_replies);
    let leaving = tokio::spawn({
        let (store, claim) = (store.clone(), claim.clone());
        async move { store.leave(&claim, None).await }
    });
    let end = Instant::now() + PATIENCE;
    while servers.nodes().iter().any(|node| node.command(&["EXISTS", "s07"]) == "1") {
        assert!(Instant::now() < end, "never released");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    proxies.iter().for_each(Proxy::cut);
    proxies.iter().for_each(Proxy::thaw);
    assert!(leaving.await.unwrap().unwrap(), "a release is told as a loss");
}
