//! Compares leasehold's costs with the raw limits, in one run.
//!
//! ```sh
//! cargo bench -p leasehold-bench --bench ratios                  # everything, about ten minutes
//! cargo bench -p leasehold-bench --bench ratios -- pair kill     # only these
//! cargo bench -p leasehold-bench --bench ratios --all-features -- sql   # real databases, started by it
//! taskset -c 0 cargo bench -p leasehold-bench --bench ratios --features redis -- redis
//! cargo bench -p leasehold-bench --bench ratios -- --quick       # only to see that it runs
//! cargo bench -p leasehold-bench --all-features --bench ratios -- --keep crates/leasehold-bench/benches/results   # for the documentation
//! cargo bench -p leasehold-bench --all-features --bench ratios -- etcd   # beside a real etcd
//! ```
//! The tables are printed on standard output as Markdown. `crates/leasehold-bench/benches/results`
//! contains them for one run. No figure here is a test.

mod bytes;
mod contention;
mod crowds;
#[cfg(feature = "etcd")]
mod etcd;
#[cfg(feature = "redis")]
mod far;
mod figures;
mod glance;
mod kept;
mod kill;
#[cfg(any(feature = "redis", feature = "postgres"))]
mod line;
mod measure;
#[cfg(feature = "memcached")]
mod memcached;
#[cfg(feature = "nats")]
mod nats;
mod numbers;
#[cfg(feature = "s3")]
mod objects;
mod pair;
mod queued;
mod raw;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "redlock")]
mod redlock;
mod scratch;
#[cfg(feature = "etcd")]
mod service;
#[cfg(any(feature = "redis", feature = "redlock", feature = "postgres"))]
mod spread;
#[cfg(all(feature = "sqlite", feature = "postgres", feature = "mysql"))]
mod sql;
#[cfg(feature = "zookeeper")]
mod zookeeper;

use std::path::{Path, PathBuf};

use measure::{Effort, Result};

const PARTS: [&str; 15] = [
    "pair",
    "contention",
    "kill",
    "sql",
    "redis",
    "redlock",
    "zookeeper",
    "etcd",
    "memcached",
    "nats",
    "s3",
    "crowd",
    "held",
    "bytes",
    "service",
];

/// The parts of SQL, which can be run separately.
const ALONE: [&str; 4] = ["sqlite", "postgres", "mariadb", "mysql"];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // These arguments run the program as a contender or a holder in a process of its own.
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["contend", subject, me, of, dir] => {
            return contention::child(subject, me, of, Path::new(dir));
        }
        #[cfg(feature = "etcd")]
        ["serve"] => return service::child(),
        ["hold", subject, dir] => return kill::child(subject, Path::new(dir)),
        _ => {}
    }
    let Asked { effort, parts, folder } = Asked::of(&arguments)?;
    for part in parts {
        run(part, effort)?;
        let command = format!("-p leasehold-bench --all-features --bench ratios -- {part}");
        kept::end_part(part, &command, effort, folder.as_deref())?;
    }
    kept::end(folder.as_deref())
}

/// The parsed arguments.
struct Asked {
    effort: Effort,
    parts: Vec<&'static str>,
    /// Folder in which the results are saved.
    folder: Option<PathBuf>,
}

impl Asked {
    fn of(arguments: &[String]) -> Result<Self> {
        let mut asked = Self { effort: Effort::FULL, parts: Vec::new(), folder: None };
        let mut arguments = arguments.iter().map(String::as_str);
        while let Some(argument) = arguments.next() {
            match argument {
                // Cargo adds this argument.
                "--bench" => {}
                "--quick" => asked.effort = Effort::QUICK,
                "--keep" => {
                    let folder = arguments.next().ok_or("--keep in which folder?")?;
                    // Cargo starts this program in the package's folder.
                    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
                    asked.folder = Some(root.join(folder));
                }
                part => {
                    let known = PARTS.into_iter().chain(ALONE).find(|known| *known == part);
                    asked.parts.push(known.ok_or_else(|| {
                        format!("no such part: {part}; there are {}", PARTS.join(", "))
                    })?);
                }
            }
        }
        if asked.parts.is_empty() {
            asked.parts = PARTS.to_vec();
        }
        Ok(asked)
    }
}

fn run(part: &str, effort: Effort) -> Result<()> {
    match part {
        "pair" => {
            pair::memory(effort)?;
            pair::file(effort)?;
        }
        "contention" => {
            contention::memory(effort)?;
            contention::file_in_one_process(effort)?;
            contention::file_in_processes(effort)?;
        }
        "kill" => kill::file(effort)?,
        #[cfg(all(feature = "sqlite", feature = "postgres", feature = "mysql"))]
        "sql" => {
            sql::sqlite(effort)?;
            sql::postgres(effort)?;
            sql::mariadb(effort)?;
            sql::mysql(effort)?;
        }
        #[cfg(all(feature = "sqlite", feature = "postgres", feature = "mysql"))]
        "sqlite" => sql::sqlite(effort)?,
        #[cfg(all(feature = "sqlite", feature = "postgres", feature = "mysql"))]
        "postgres" => sql::postgres(effort)?,
        #[cfg(all(feature = "sqlite", feature = "postgres", feature = "mysql"))]
        "mariadb" => sql::mariadb(effort)?,
        #[cfg(all(feature = "sqlite", feature = "postgres", feature = "mysql"))]
        "mysql" => sql::mysql(effort)?,
        #[cfg(feature = "redis")]
        "redis" => {
            redis::pair(effort)?;
            redis::contention(effort)?;
            far::redis(effort)?;
        }
        #[cfg(feature = "redlock")]
        "redlock" => {
            redlock::pair(effort)?;
            redlock::contention(effort)?;
        }
        #[cfg(feature = "zookeeper")]
        "zookeeper" => zookeeper::all(effort)?,
        #[cfg(feature = "etcd")]
        "etcd" => etcd::all(effort)?,
        #[cfg(feature = "memcached")]
        "memcached" => {
            memcached::pair(effort)?;
            memcached::contention(effort)?;
        }
        #[cfg(feature = "nats")]
        "nats" => {
            nats::pair(effort)?;
            nats::contention(effort)?;
        }
        #[cfg(feature = "s3")]
        "s3" => {
            objects::pair(effort)?;
            objects::contention(effort)?;
        }
        "crowd" => crowds::waiting(effort)?,
        "held" => crowds::held(effort)?,
        "bytes" => bytes::all(effort)?,
        #[cfg(feature = "etcd")]
        "service" => {
            service::pairs(effort)?;
            service::hand_over(effort)?;
            service::streams(effort)?;
        }
        _ => {}
    }
    Ok(())
}
