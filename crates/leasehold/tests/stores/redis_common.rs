//! What the tests of the Redis store share.

#![cfg(feature = "redis")]

use std::time::{Duration, Instant};

use crate::common::*;
use leasehold::store::{Joined, Mode, Renew, Renewal, Signal};
use leasehold::{Claim, Error, ErrorKind, Kind, Leasehold, Name};
use testbed::{Redis, Setup};

/// So short that a test can wait for its end.
pub(crate) const LEASE: Duration = Duration::from_millis(1_500);

pub(crate) fn fast() -> Redis {
    Redis::with(Setup::new().fast())
}

pub(crate) fn claim(name: &str, kind: Kind, capacity: u32) -> Claim {
    let mut claim = Claim::new(Name::new(name).unwrap(), kind, 1, capacity).unwrap();
    (claim.lease, claim.waiter_lease) = (PATIENCE, PATIENCE);
    claim
}

pub(crate) fn mutex(name: &str) -> Claim {
    claim(name, Kind::Mutex, 1)
}

/// A claim of a mutex that has so much time, to hold and to wait.
pub(crate) fn leased(name: &str, lease: Duration) -> Claim {
    let mut claim = mutex(name);
    (claim.lease, claim.waiter_lease) = (lease, lease);
    claim
}

pub(crate) async fn join(locks: &Leasehold, claim: &Claim) -> Joined {
    locks.store().join(claim, Mode::Wait).await.unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) async fn hold(locks: &Leasehold, claim: &Claim) {
    let joined = join(locks, claim).await;
    assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
}

pub(crate) async fn wait(locks: &Leasehold, claim: &Claim) {
    let joined = join(locks, claim).await;
    assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
}

pub(crate) async fn renew(locks: &Leasehold, claims: &[&Claim]) -> Vec<Renewal> {
    let renewals: Vec<Renew> =
        claims.iter().map(|c| Renew { claim: Claim::clone(c), lease: c.lease }).collect();
    locks.store().renew(&renewals).await.unwrap_or_else(|error| panic!("{error}"))
}

/// Waits until it is so.
pub(crate) async fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !so() {
        assert!(Instant::now() < end, "never came: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until so many wait.
pub(crate) async fn until_waiting(locks: &Leasehold, name: &str, count: usize) {
    let end = Instant::now() + PATIENCE;
    loop {
        let info = locks.read(name).await.unwrap();
        if info.is_some_and(|info| info.waiters().count() == count) {
            return;
        }
        assert!(Instant::now() < end, "{count} never waited");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Resolves when the claim is told of its grant: by a message, or by being told to ask, as after a connection was
/// made anew, which heard nothing of what was said before.
pub(crate) async fn told(locks: &Leasehold, claim: &Claim) {
    loop {
        let signal = locks.store().changed(claim).await.unwrap();
        if matches!(signal, Signal::Granted(_)) || holds(locks, claim).await {
            return;
        }
    }
}

async fn holds(locks: &Leasehold, claim: &Claim) -> bool {
    matches!(renew(locks, &[claim]).await[..], [Renewal::Holding { .. }])
}

/// One line of this kind that says so, without the password.
#[track_caller]
pub(crate) fn assert_says(error: &Error, kind: ErrorKind, what: &str) {
    assert_told(error, kind, "s3cret");
    assert!(format!("{error:#}").contains(what), "{what:?} is not in: {error}");
}

/// A port where nobody listens.
pub(crate) fn unused_port() -> u16 {
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    taken.local_addr().unwrap().port()
}
