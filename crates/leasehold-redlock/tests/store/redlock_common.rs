//! Helpers of the Redlock tests.

use std::time::{Duration, Instant};

use leasehold::store::{Claim, Joined};
use leasehold::{Kind, Name, Token};
pub(crate) use leasehold_test_support::{PATIENCE, connect, until};
use testbed::{Proxy, Redis, Redlock, Setup, redlock_url};

/// URL parameters without a delay after a restart, and with enough time for a slow machine.
pub(crate) const SOON: &str = "?restart_delay_ms=0&node_timeout_ms=1000";

/// Starts this number of independent servers.
pub(crate) fn servers(count: usize) -> Redlock {
    Redlock::with(count, Setup::new().fast())
}

/// Starts a proxy in front of each node. Returns the proxies and a URL that uses them.
pub(crate) fn proxied(servers: &Redlock) -> (Vec<Proxy>, String) {
    let proxies: Vec<Proxy> = servers.nodes().iter().map(|n| Proxy::before(n.port())).collect();
    let url = redlock_url(proxies.iter().map(Proxy::port));
    (proxies, url)
}

pub(crate) async fn refused(url: &str) -> leasehold::Error {
    match leasehold::connect(url).await {
        Err(error) => {
            assert_eq!(format!("{error:#}").lines().count(), 1, "{error}");
            error
        }
        Ok(_) => panic!("{url} was accepted"),
    }
}

pub(crate) fn claim(name: &str, lease: Duration) -> Claim {
    let mut claim = Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
    claim.lease = lease;
    claim
}

pub(crate) fn holding(joined: &Joined) -> Token {
    match joined {
        Joined::Holding { token, .. } => *token,
        other => panic!("expected a hold, got {other:?}"),
    }
}

/// Repeats a call as long as the nodes do not respond in time.
pub(crate) async fn patiently<T>(mut ask: impl AsyncFnMut() -> leasehold::Result<T>) -> T {
    let start = Instant::now();
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
        }
    }
}

pub(crate) fn has_key(node: &Redis, name: &str) -> bool {
    node.command(&["EXISTS", name]) == "1"
}
