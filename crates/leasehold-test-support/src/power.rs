//! A check that locks survive a cut of the power of all of a store's servers.

use leasehold::{Client, ErrorKind, Kind, MutexGuard};
use testbed::{Disk, in_own_network};

use crate::{Duration, Instant, PATIENCE, connect, run};

/// Lease of the locks. It outlasts the restart of the servers.
const LEASE: Duration = Duration::from_secs(60);

/// Servers that are on a [`Disk`].
pub struct OnDisk {
    /// The URL of the store. Sessions must outlast the restart.
    pub url: String,
    /// Kills all servers.
    pub kill: Box<dyn Fn() + Send>,
    /// Starts all servers again, and waits until they are ready.
    pub start: Box<dyn Fn() + Send>,
}

impl OnDisk {
    /// Cuts the power of all servers, restores it, and starts them again.
    pub fn lose_power(&self, disk: &Disk) {
        tokio::task::block_in_place(|| {
            disk.cut_power();
            (self.kill)();
            disk.restore_power();
            (self.start)();
        });
    }
}

/// Runs a case with a disk, in a network and with mounts of its own. `test` is the test's name.
pub fn with_disk<F: Future<Output = ()>>(test: &str, case: impl FnOnce(Disk) -> F) {
    in_own_network(test, || match Disk::new() {
        Some(disk) => run(case(disk)),
        None => eprintln!("{test}: not run: there is no loop device here"),
    });
}

/// Checks that acknowledged grants, a queue and the order of tokens survive a cut of the power of
/// all servers.
///
/// # Panics
/// If they do not.
pub async fn grants_survive_a_power_cut(disk: Disk, servers: OnDisk) {
    // The servers were created a moment ago.
    disk.sync();
    let (ours, other) = (connect(&servers.url).await, connect(&servers.url).await);
    let first = acquire(&ours, "first").await;
    let lock = other.mutex("first").lease(LEASE);
    let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
    until_waiting(&ours, "first").await;
    // The power is cut immediately after this grant.
    let last = acquire(&ours, "last").await;
    servers.lose_power(&disk);
    for guard in [&first, &last] {
        assert!(is_refused(&other, guard.name().as_str()).await, "two clients hold the lock");
        assert!(guard.is_held(), "the lock was lost: {:?}", guard.state());
    }
    let token = last.token();
    last.release().await.unwrap();
    let again = acquire(&other, "last").await;
    assert!(again.token() > token, "token {} after {token}", again.token());
    let token = first.token();
    first.release().await.unwrap();
    let next = waiting.await.unwrap().unwrap();
    assert!(next.token() > token, "token {} after {token}", next.token());
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

async fn until_waiting(locks: &Client, name: &str) {
    let end = Instant::now() + PATIENCE;
    let waiting = async || {
        let info = locks.inspect(name).await.unwrap();
        info.is_some_and(|info| info.kind == Kind::Mutex && info.waiters().next().is_some())
    };
    while !waiting().await {
        assert!(Instant::now() < end, "there was never a waiter");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
