//! What a reviewer tried on the Redlock store.

#![cfg(feature = "redlock")]

use std::time::{Duration, Instant};

use leasehold::Leasehold;
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
    let locks = Leasehold::connect(&url).await.unwrap();
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
