//! A store of your own: `json:/a/file`, all locks of a machine in one JSON file. It depends on
//! `leasehold-core` alone, as any third party's store does, and passes the suite that ours pass.
//!
//! ```no_run
//! # async fn example() -> leasehold_core::Result<()> {
//! use leasehold_core::{Builder, Registry};
//! let registry = Registry::default().with("json", &["json"], own_store::open);
//! let locks = Builder::new(registry).connect("json:/run/lock/app.json").await?;
//! let guard = locks.mutex("order:42").lock().await?;
//! # drop(guard); Ok(()) }
//! ```
//!
//! **What is atomic**: each call locks the file beside it (`flock`, which ends with the process),
//! reads all queues, does one thing to one of them, writes all of them to a new file and renames that.
//! Who dies halfway has changed nothing. Nothing is awaited meanwhile, so that a call that is dropped
//! has done all of it or nothing.
//!
//! **Whose clock**: the machine's wall clock, for leases and tokens. A token is greater than every one
//! before it, since the greatest is kept in the file, whatever becomes of the queues.
//!
//! **Who wakes whom**: nobody; a waiter asks every few milliseconds.
//!
//! What a queue is and does is [`Queue`]; all that remains to be written is where it is kept.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::kit::{identity_of, wall_micros};
use leasehold_core::queue::{Queue, StoreTime};
use leasehold_core::store::{
    ALL_KINDS, Durability, Evict, Guarantees, Joined, LockInfo, Mode, Renew, Renewal, Signal,
    Stall, Store, StoreInfo, Survival, mismatch,
};
use leasehold_core::{Claim, Error, ErrorKind, Name, Opening, Result};
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

/// The pause between two questions of a waiter.
const POLL: Duration = Duration::from_millis(5);

/// Opens the store of a `json:` URL: what a [`Registry`](leasehold_core::Registry) wants.
pub fn open(url: String, runtime: Handle) -> Opening {
    Box::pin(async move { Ok(Arc::new(JsonStore::open(&url, runtime)?) as Arc<dyn Store>) })
}

/// All locks of a machine in one JSON file. See the crate's documentation.
#[derive(Debug)]
pub struct JsonStore {
    info: StoreInfo,
    path: PathBuf,
    runtime: Handle,
}

/// What is in the file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Locks {
    last_token: u64,
    queues: BTreeMap<Name, Queue>,
}

impl JsonStore {
    /// Opens the store, and makes its file if there is none. Waiters' pauses are counted on `runtime`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the URL names no file that can be written.
    pub fn open(url: &str, runtime: Handle) -> Result<Self> {
        let path = PathBuf::from(url.strip_prefix("json:").unwrap_or_default());
        if !path.is_absolute() {
            let what = "a json: store is json:/an/absolute/path";
            return Err(Error::new(ErrorKind::Config, what));
        }
        let info = StoreInfo::new(url, guarantees()).local();
        let mut store = Self { info, path, runtime };
        store
            .change(|_| ())
            .map_err(|e| Error::new(ErrorKind::Config, "cannot be used").because(e))?;
        // The same for every path that leads to the file: of the file beside it, which is never replaced.
        store.info.identity = identity_of("json", &store.beside(".lock"));
        Ok(store)
    }

    fn beside(&self, ending: &str) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(ending);
        path.into()
    }

    /// One call: nobody else's comes in between.
    fn change<T>(&self, work: impl FnOnce(&mut Locks) -> T) -> Result<T> {
        let lock =
            File::options().create(true).truncate(false).write(true).open(self.beside(".lock"));
        let lock = lock.map_err(failed)?;
        lock.lock().map_err(failed)?;
        let mut locks = read(&self.path)?;
        let done = work(&mut locks);
        // A queue in which nobody stands is forgotten, but for its greatest token.
        let last = locks.queues.values().map(Queue::last_token).max().unwrap_or(0);
        locks.last_token = locks.last_token.max(last);
        locks.queues.retain(|_, queue| !queue.is_empty());
        let (new, text) = (self.beside(".new"), serde_json::to_string(&locks));
        fs::write(&new, text.map_err(|e| corrupt(&e))?).map_err(failed)?;
        fs::rename(&new, &self.path).map_err(failed)?;
        Ok(done)
    }

    /// Does something to one lock's queue, if anybody stands in it.
    fn with<T>(&self, name: &Name, work: impl FnOnce(&mut Queue, u64) -> T) -> Result<Option<T>> {
        self.change(|locks| locks.queues.get_mut(name).map(|queue| work(queue, wall_micros())))
    }
}

fn read(path: &Path) -> Result<Locks> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|e| corrupt(&e)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Locks::default()),
        Err(e) => Err(failed(e)),
    }
}

fn failed(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Unreachable, "the file cannot be read or written").because(error)
}

fn corrupt(error: &serde_json::Error) -> Error {
    let what = "the file is not what this store writes: see what is in it, or take another";
    Error::new(ErrorKind::Corrupt, what).because(error.to_string())
}

fn described(name: &Name, queue: &mut Queue, now: u64) -> Option<LockInfo> {
    queue.settle(now);
    let info = LockInfo::new(name.clone(), queue.kind(), queue.capacity(), queue.claims(now));
    (!info.claims.is_empty()).then_some(info)
}

/// What differs from the least that any store promises.
fn guarantees() -> Guarantees {
    let mut promised = Guarantees::least();
    promised.kinds = ALL_KINDS.into();
    promised.fifo = true;
    (promised.lock_delay, promised.at_least) = (true, true);
    // Renamed, and not forced to the disk.
    (promised.grant, promised.token) = (Durability::Machine, Durability::Machine);
    promised.on_store_crash = Survival::NotApplicable;
    promised.on_failover = Survival::NotApplicable;
    promised.on_partition = Survival::NotApplicable;
    // A client that is stopped with the lock file in its hands.
    promised.stall = Stall::Everybody;
    promised.notes =
        vec!["Every call reads and writes all locks: for a few of them.".into()].into();
    promised
}

#[async_trait]
impl Store for JsonStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let joined = self.change(|locks| {
            let (now, last) = (wall_micros(), locks.last_token);
            let queue = locks.queues.entry(claim.name.clone()).or_insert_with(|| {
                let mut queue = Queue::new(claim.kind, claim.capacity, true);
                queue.raise_last_token(last);
                queue
            });
            queue.join(claim, mode, StoreTime { now, stamp: now }, "")
        })?;
        joined.map_err(|m| mismatch(claim, m.kind, m.capacity))
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        self.change(|locks| {
            let now = wall_micros();
            let one = |Renew { claim, lease }: &Renew| match locks.queues.get_mut(&claim.name) {
                Some(queue) => queue.renew(claim, *lease, now),
                None => Renewal::Lost,
            };
            renewals.iter().map(one).collect()
        })
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        let left = self.with(&claim.name, |queue, now| queue.leave(claim.id, keep, now))?;
        Ok(left.unwrap_or(false))
    }

    async fn changed(&self, _claim: &Claim) -> Result<Signal> {
        // The caller's runtime may have no timer.
        let _ = self.runtime.spawn(tokio::time::sleep(POLL)).await;
        Ok(Signal::Ask)
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        Ok(self.with(name, |queue, now| described(name, queue, now))?.flatten())
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        self.change(|locks| {
            let now = wall_micros();
            let all = locks.queues.iter_mut().filter(|(name, _)| name.as_str().starts_with(prefix));
            all.filter_map(|(name, queue)| described(name, queue, now)).collect()
        })
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        Ok(self.with(name, |queue, now| queue.evict(which, now).len())?.unwrap_or(0))
    }
}
