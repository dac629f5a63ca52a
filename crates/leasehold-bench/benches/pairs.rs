//! Measures what one pair of acquire and release costs, for each kind of lock and each way to
//! acquire it. The purpose is to find the change that made it slower. `ratios` compares it with the
//! raw limits.
//!
//! ```sh
//! cargo bench -p leasehold-bench --bench pairs
//! cargo bench -p leasehold-bench --bench pairs -- memory      # only what has this in its name
//! ```
//! All calls use the blocking API, so that no runtime is measured.

use divan::Bencher;
use leasehold::blocking::{Client, Guard};
use leasehold::{Owner, Result};
use tempfile::TempDir;

const STORES: [&str; 2] = ["memory", "file"];

fn main() {
    divan::main();
}

/// A client, and the directory that its store needs.
struct Subject {
    locks: Client,
    _scratch: TempDir,
}

fn connect(store: &str) -> Subject {
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let url = match store {
        "memory" => "memory:pairs".to_owned(),
        _ => format!("file:{}", scratch.path().join("store").display()),
    };
    let locks = leasehold::blocking::connect(url).expect("a store that was just made");
    Subject { locks, _scratch: scratch }
}

/// Acquires and releases repeatedly.
fn pair<M>(bencher: Bencher<'_, '_>, take: impl Fn() -> Result<Guard<M>>) {
    bencher.bench_local(|| take().and_then(Guard::release).expect("a free lock"));
}

#[divan::bench(args = STORES)]
fn mutex_lock(bencher: Bencher<'_, '_>, store: &str) {
    let client = connect(store);
    let lock = client.locks.mutex("a");
    pair(bencher, || lock.lock());
}

#[divan::bench(args = STORES)]
fn mutex_try_lock(bencher: Bencher<'_, '_>, store: &str) {
    let client = connect(store);
    let lock = client.locks.mutex("a");
    pair(bencher, || lock.try_lock());
}

#[divan::bench(args = STORES)]
fn mutex_lock_and_drop(bencher: Bencher<'_, '_>, store: &str) {
    let client = connect(store);
    let lock = client.locks.mutex("a");
    bencher.bench_local(|| drop(lock.lock().expect("a free lock")));
}

/// Creates the handle each time, as most code does.
#[divan::bench(args = STORES)]
fn mutex_by_name(bencher: Bencher<'_, '_>, store: &str) {
    let client = connect(store);
    pair(bencher, || client.locks.mutex("a").lock());
}

/// Re-enters the lock by its owner, without the store.
#[divan::bench(args = STORES)]
fn mutex_reentered(bencher: Bencher<'_, '_>, store: &str) {
    let client = connect(store);
    let me = Owner::new();
    let lock = client.locks.mutex("a").with(|m| m.owner(&me));
    let _held = lock.lock().expect("a free lock");
    pair(bencher, || lock.lock());
}

#[divan::bench(args = STORES)]
fn rwlock_read(bencher: Bencher<'_, '_>, store: &str) {
    let client = connect(store);
    let lock = client.locks.rwlock("a");
    pair(bencher, || lock.read());
}

#[divan::bench(args = STORES)]
fn rwlock_write(bencher: Bencher<'_, '_>, store: &str) {
    let client = connect(store);
    let lock = client.locks.rwlock("a");
    pair(bencher, || lock.write());
}

#[divan::bench(args = STORES)]
fn semaphore_acquire(bencher: Bencher<'_, '_>, store: &str) {
    let client = connect(store);
    let lock = client.locks.semaphore("a", 4);
    pair(bencher, || lock.acquire());
}
