//! Helpers of the Redis store's tests.

use std::time::Duration;

use leasehold::store::{Claim, Joined, Mode, Renew, Renewal, Signal};
use leasehold::{Client, Error, ErrorKind, Kind, Name};
use leasehold_test_support::*;
use testbed::{Redis, Setup};

/// Lease that is so short that a test can wait for its expiry.
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

/// Creates a claim on a mutex with this lease for holding and waiting.
pub(crate) fn leased(name: &str, lease: Duration) -> Claim {
    let mut claim = mutex(name);
    (claim.lease, claim.waiter_lease) = (lease, lease);
    claim
}

pub(crate) async fn join(locks: &Client, claim: &Claim) -> Joined {
    locks.store().join(claim, Mode::Wait).await.unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) async fn hold(locks: &Client, claim: &Claim) {
    let joined = join(locks, claim).await;
    assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
}

pub(crate) async fn wait(locks: &Client, claim: &Claim) {
    let joined = join(locks, claim).await;
    assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
}

pub(crate) async fn renew(locks: &Client, claims: &[&Claim]) -> Vec<Renewal> {
    let renewals: Vec<Renew> =
        claims.iter().map(|c| Renew { claim: Claim::clone(c), lease: c.lease }).collect();
    locks.store().renew(&renewals).await.unwrap_or_else(|error| panic!("{error}"))
}

/// Waits until the claim is notified of its grant. That happens by a message, or by a poll after a
/// reconnect, because messages before it were lost.
pub(crate) async fn wait_for_grant(locks: &Client, claim: &Claim) {
    loop {
        let signal = locks.store().changed(claim).await.unwrap();
        if matches!(signal, Signal::Granted(_)) || holds(locks, claim).await {
            return;
        }
    }
}

async fn holds(locks: &Client, claim: &Claim) -> bool {
    matches!(renew(locks, &[claim]).await[..], [Renewal::Holding { .. }])
}

/// Asserts that the error is one line of this kind that contains the text, but not the password.
#[track_caller]
pub(crate) fn assert_says(error: &Error, kind: ErrorKind, what: &str) {
    assert_told(error, kind, "s3cret");
    assert!(format!("{error:#}").contains(what), "{what:?} is not in: {error}");
}

/// Returns a port without a listener.
pub(crate) fn unused_port() -> u16 {
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    taken.local_addr().unwrap().port()
}
