//! Compares leasehold with popular alternatives, on the same server in the same run.
//!
//! ```sh
//! ./test.sh --install && rivals/install.sh
//! taskset -c 0 cargo bench --manifest-path rivals/Cargo.toml                         # all of them
//! taskset -c 0 cargo bench --manifest-path rivals/Cargo.toml -- postgres etcd        # of some stores
//! taskset -c 0 cargo bench --manifest-path rivals/Cargo.toml -- --keep crates/leasehold-bench/benches/results
//! ```
//! The crates `distributed-lock` (session locks of PostgreSQL and MySQL, lock files) and
//! `etcd-client` (the locks of etcd's own lock service) run in this process. python-redis-lock,
//! node-redlock and Curator each run in a separate process, with a thread or a task for each
//! contender. Only leasehold issues a token, keeps a queue that clients can inspect, and renews by
//! default. The benchmark `ratios` explains how each figure is measured. This program includes its
//! files.

// The included files contain code that only other benchmarks use.
#![allow(dead_code)]

#[path = "../../../crates/leasehold-bench/benches/ratios/contention.rs"]
mod contention;
mod etcd;
#[path = "../../../crates/leasehold-bench/benches/ratios/figures.rs"]
mod figures;
mod file;
#[path = "../../../crates/leasehold-bench/benches/ratios/glance.rs"]
mod glance;
#[path = "../../../crates/leasehold-bench/benches/ratios/kept.rs"]
mod kept;
#[path = "../../../crates/leasehold-bench/benches/ratios/measure.rs"]
mod measure;
#[path = "../../../crates/leasehold-bench/benches/ratios/numbers.rs"]
mod numbers;
#[path = "../../../crates/leasehold-bench/benches/ratios/pair.rs"]
mod pair;
mod peer;
#[path = "../../../crates/leasehold-bench/benches/ratios/queued.rs"]
mod queued;
#[path = "../../../crates/leasehold-bench/benches/ratios/raw.rs"]
mod raw;
mod redis;
#[path = "../../../crates/leasehold-bench/benches/ratios/scratch.rs"]
mod scratch;
#[path = "../../../crates/leasehold-bench/benches/ratios/spread.rs"]
mod spread;
mod sql;
mod zookeeper;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use distributed_lock_core::{DistributedLock, LockHandle};
use leasehold::Client;
use tokio::runtime::{Builder, Runtime};

use contention::{Outcome, Turn};
use measure::{Effort, Result, Subject, now};

const PARTS: [&str; 5] = ["file", "sql", "redis", "zookeeper", "etcd"];
const CLIENTS: usize = 8;
const CONTENDERS: [usize; 2] = [8, 32];

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let (mut effort, mut parts, mut folder) = (Effort::FULL, Vec::new(), None);
    while let Some(argument) = arguments.next() {
        match &*argument {
            "--quick" => effort = Effort::QUICK,
            "--keep" => {
                let to = arguments.next().ok_or("--keep in which folder?")?;
                folder = Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(to));
            }
            part if PARTS.contains(&part) => parts.push(argument),
            part => return Err(format!("no such part: {part}; {}", PARTS.join(", ")).into()),
        }
    }
    for part in PARTS {
        if !parts.is_empty() && !parts.iter().any(|asked| asked == part) {
            continue;
        }
        match part {
            "file" => file::all(effort)?,
            "sql" => sql::all(effort)?,
            "redis" => redis::all(effort)?,
            "zookeeper" => zookeeper::all(effort)?,
            _ => etcd::all(effort)?,
        }
    }
    kept::end_part("rivals", "--manifest-path rivals/Cargo.toml --", effort, folder.as_deref())?;
    kept::end(folder.as_deref())
}

fn two_threads() -> Result<Runtime> {
    Ok(Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

/// Connects the clients of leasehold's contenders, and one more that holds the lock until all of
/// them wait.
fn clients(runtime: &Runtime, url: &str) -> Result<Vec<Client>> {
    let connect = || runtime.block_on(leasehold::connect(url));
    Ok((0..=CLIENTS).map(|_| connect()).collect::<Result<_, _>>()?)
}

fn ours<'a>(
    runtime: &'a Runtime,
    clients: &'a [Client],
    n: usize,
    effort: Effort,
) -> Subject<'a, Outcome> {
    Subject::new("leasehold", move || {
        let count = async || Ok(0.0);
        runtime.block_on(queued::contend(clients, n, effort, Duration::ZERO, count))
    })
}

/// Returns one turn of a contender with the crate `distributed-lock`.
fn turn_of<L: DistributedLock + Send + Sync + 'static>(lock: L) -> Turn {
    let lock = Arc::new(lock);
    Box::new(move || {
        let lock = lock.clone();
        Box::pin(async move {
            let held = lock.acquire(None).await?;
            let note = now();
            held.release().await?;
            Ok(note)
        })
    })
}
