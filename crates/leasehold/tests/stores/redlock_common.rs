//! What the tests of Redlock share.

#![cfg(feature = "redlock")]

use std::time::{Duration, Instant};

pub(crate) use crate::common::{PATIENCE, connect};
use leasehold::store::Joined;
use leasehold::{Claim, Kind, Name, Token};
use testbed::{Proxy, Redis, Redlock, Setup, redlock_url};

/// No delay after a restart, and time enough for a slow machine.
pub(crate) const SOON: &str = "?restart_delay_ms=0&node_timeout_ms=1000";

/// So many independent servers.
pub(crate) fn servers(count: usize) -> Redlock {
    Redlock::with(count, Setup::new().fast())
}

/// Proxies in front of all nodes, and the URL through them.
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
        Ok(_) => panic!("{url} was not refused"),
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
        other => panic!("not held: {other:?}"),
    }
}

pub(crate) async fn eventually(what: &str, mut check: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !check().await {
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Asks again, as long as the nodes do not answer in time.
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
