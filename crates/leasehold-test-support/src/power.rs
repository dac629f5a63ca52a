//! A check that locks survive a cut of the power of all of a store's servers.

use leasehold::{Client, ErrorKind, MutexGuard};
use testbed::{Disk, where_disks_are_possible};

use crate::{Duration, Instant, PATIENCE, connect, run, until_waiting};

/// Lease of the locks. It outlasts the restart of the servers, also on a busy machine.
const LEASE: Duration = Duration::from_secs(180);

/// Runs a case on servers that it starts on this disk. `test` is the test's name.
pub fn with_disk<F: Future<Output = ()>>(test: &str, case: impl FnOnce(Disk) -> F) {
    where_disks_are_possible(test, || run(case(Disk::new())));
}

/// Checks that acknowledged grants, a queue and the order of tokens survive a cut of the power of
/// all servers, also if it tears writes. `kill` kills all servers, and `restart` starts them again.
/// The store's sessions, if it has any, must last three minutes.
///
/// # Panics
/// If they do not survive.
pub async fn grants_survive_a_power_cut(
    disk: &Disk,
    url: &str,
    kill: impl Fn(),
    restart: impl Fn(),
) {
    // The servers were created a moment ago.
    disk.sync();
    survive(url, || {
        disk.cycle_power(&kill);
        restart();
    })
    .await;
    let mut torn = 0;
    for _ in 0..3 {
        survive(url, || {
            torn += disk.cycle_power_tearing_writes(&kill);
            restart();
        })
        .await;
    }
    println!("torn files: {torn}");
}

async fn survive(url: &str, restart: impl FnOnce()) {
    let (ours, other) = (connect(url).await, connect(url).await);
    let first = acquire(&ours, "first").await;
    let lock = other.mutex("first").lease(LEASE);
    let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
    until_waiting(&ours, "first", 1).await;
    // The servers write when the power is cut.
    let busy = connect(url).await;
    let writing = tokio::spawn(async move {
        loop {
            match busy.mutex("busy").lease(LEASE).try_lock().await {
                Ok(guard) => _ = guard.release().await,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    });
    // The power is cut immediately after this grant.
    let last = acquire(&ours, "last").await;
    tokio::task::block_in_place(restart);
    writing.abort();
    for guard in [&first, &last] {
        assert!(is_refused(&other, guard.name().as_str()).await, "two clients hold the lock");
        assert!(guard.is_held(), "the lock was lost: {:?}", guard.state());
    }
    let token = last.token();
    last.release().await.unwrap();
    let again = acquire(&other, "last").await;
    assert!(again.token() > token, "token {} after {token}", again.token());
    again.release().await.unwrap();
    let token = first.token();
    first.release().await.unwrap();
    let next = waiting.await.unwrap().unwrap();
    assert!(next.token() > token, "token {} after {token}", next.token());
    next.release().await.unwrap();
}

/// Acquires a lock, and retries while the store is unreachable.
pub async fn acquire(locks: &Client, name: &str) -> MutexGuard {
    locks.mutex(name).lease(LEASE).lock_timeout(PATIENCE).await.unwrap()
}

/// Returns whether another client is refused a lock because it is held.
pub async fn is_refused(locks: &Client, name: &str) -> bool {
    let end = Instant::now() + PATIENCE;
    loop {
        match locks.mutex(name).try_lock().await.map_err(|error| error.kind()) {
            Err(ErrorKind::Unreachable) if Instant::now() < end => {}
            tried => return tried.is_err_and(|kind| kind == ErrorKind::Contended),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
