//! What one pair costs, take and give back, for each kind of lock and each way to take it: to
//! find out which change made it slower. How it compares with the raw limits is told by `ratios`.
//!
//! ```sh
//! cargo bench -p leasehold-bench --bench pairs
//! cargo bench -p leasehold-bench --bench pairs -- memory      # only what has this in its name
//! ```
//! All through the blocking face, so that no runtime is measured.

use divan::Bencher;
use leasehold::blocking::{Guard, Leasehold};
use leasehold::{Owner, Result};
use tempfile::TempDir;

const STORES: [&str; 2] = ["memory", "file"];

fn main() {
    divan::main();
}

/// A client, and the directory that its store needs.
struct Client {
    locks: Leasehold,
    _scratch: TempDir,
}

fn connect(store: &str) -> Client {
    let scratch = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let url = match store {
        "memory" => "memory:pairs".to_owned(),
        _ => format!("file:{}", scratch.path().join("store").display()),
    };
    let locks = leasehold::blocking::connect(url).expect("a store that was just made");
    Client { locks, _scratch: scratch }
}

/// Takes and releases, again and again.
fn pair(bencher: Bencher<'_, '_>, take: impl Fn() -> Result<Guard>) {
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

/// The handle made anew each time, as most code does.
#[divan::bench(args = STORES)]
fn mutex_by_name(bencher: Bencher<'_, '_>, store: &str) {
    let client = connect(store);
    pair(bencher, || client.locks.mutex("a").lock());
}

/// Entered again by its owner: no store involved.
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
