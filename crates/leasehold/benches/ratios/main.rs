//! What leasehold costs, beside what nobody could undercut, in one run.
//!
//! ```sh
//! cargo bench -p leasehold --bench ratios                  # everything, about ten minutes
//! cargo bench -p leasehold --bench ratios -- pair kill     # only these
//! cargo bench -p leasehold --bench ratios --all-features -- sql   # real databases, started by it
//! taskset -c 0 cargo bench -p leasehold --bench ratios --features redis -- redis
//! cargo bench -p leasehold --bench ratios -- --quick       # only to see that it runs
//! cargo bench -p leasehold --features etcd --bench ratios -- etcd   # beside a real etcd
//! ```
//! The tables go to the standard output as Markdown; `docs/benchmarks.md` keeps a run of them. No
//! figure here is a test.

mod contention;
#[cfg(feature = "etcd")]
mod etcd;
mod kill;
mod measure;
mod pair;
#[cfg(any(
    feature = "redis",
    feature = "etcd",
    all(feature = "sqlite", feature = "postgres", feature = "mysql")
))]
mod queued;
mod raw;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "redlock")]
mod redlock;
mod scratch;
#[cfg(all(feature = "sqlite", feature = "postgres", feature = "mysql"))]
mod sql;
#[cfg(feature = "zookeeper")]
mod zookeeper;

use std::path::Path;

use measure::{Effort, Result};

const PARTS: [&str; 8] =
    ["pair", "contention", "kill", "sql", "redis", "redlock", "zookeeper", "etcd"];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // The same program again, as a contender or a holder in a process of its own.
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["contend", subject, me, of, dir] => {
            return contention::child(subject, me, of, Path::new(dir));
        }
        ["hold", subject, dir] => return kill::child(subject, Path::new(dir)),
        _ => {}
    }
    // Cargo adds `--bench`.
    let quick = arguments.iter().any(|a| a == "--quick");
    let effort = if quick { Effort::QUICK } else { Effort::FULL };
    let chosen: Vec<&String> = arguments.iter().filter(|a| !a.starts_with("--")).collect();
    let wanted = |part: &str| chosen.is_empty() || chosen.iter().any(|c| *c == part);
    let known = |c: &&&String| PARTS.contains(&c.as_str());
    if let Some(unknown) = chosen.iter().find(|c| !known(c)) {
        return Err(format!("no such part: {unknown}; there are {}", PARTS.join(", ")).into());
    }
    if wanted("pair") {
        pair::memory(effort)?;
        pair::file(effort)?;
    }
    if wanted("contention") {
        contention::memory(effort)?;
        contention::file_in_one_process(effort)?;
        contention::file_in_processes(effort)?;
    }
    if wanted("kill") {
        kill::file(effort)?;
    }
    #[cfg(all(feature = "sqlite", feature = "postgres", feature = "mysql"))]
    if wanted("sql") {
        sql::sqlite(effort)?;
        sql::postgres(effort)?;
        sql::mariadb(effort)?;
    }
    #[cfg(feature = "redis")]
    if wanted("redis") {
        redis::pair(effort)?;
        redis::contention(effort)?;
    }
    #[cfg(feature = "redlock")]
    if wanted("redlock") {
        redlock::pair(effort)?;
    }
    #[cfg(feature = "zookeeper")]
    if wanted("zookeeper") {
        zookeeper::all(effort)?;
    }
    #[cfg(feature = "etcd")]
    if wanted("etcd") {
        etcd::all(effort)?;
    }
    Ok(())
}
