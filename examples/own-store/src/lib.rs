//! A store of your own, `json:/a/file`, with all locks of a machine in one JSON file. Like any
//! third party's store, it depends only on `leasehold-core`. It passes the same suite as the other
//! stores.
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
//! **Atomicity.** Each call locks a second file next to it (`flock`, which ends with the process),
//! reads all queues, and changes one of them. It then writes all queues to a new file and renames
//! that. A process that crashes in between has changed nothing. Nothing is awaited in between, so a
//! call that is dropped has done everything or nothing.
//!
//! **Clock.** Leases and tokens use the machine's wall clock. Each token is higher than all earlier
//! ones, because the file keeps the highest token even if it forgets the queue.
//!
//! **Notification.** Waiters are not notified. A waiter polls every few milliseconds.
//!
//! [`Queue`] implements the queues, so only their storage remains to be written.

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

/// The pause between two polls of a waiter.
const POLL: Duration = Duration::from_millis(5);

/// Opens the store of a `json:` URL, for a [`Registry`](leasehold_core::Registry).
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

/// The content of the file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Locks {
    last_token: u64,
    queues: BTreeMap<Name, Queue>,
}

impl JsonStore {
    /// Opens the store and creates its file if it is missing. The pauses of waiters run on
    /// `runtime`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`]: the URL does not name a file that can be written.
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
            .map_err(|e| Error::new(ErrorKind::Config, "cannot be used").with_source(e))?;
        // The identity is the same for every path to the file. It is the identity of the lock file,
        // which is never replaced.
        store.info.identity = identity_of("json", &store.beside(".lock"));
        Ok(store)
    }

    fn beside(&self, ending: &str) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(ending);
        path.into()
    }

    /// Runs one call. No other call runs at the same time.
    fn change<T>(&self, work: impl FnOnce(&mut Locks) -> T) -> Result<T> {
        let lock =
            File::options().create(true).truncate(false).write(true).open(self.beside(".lock"));
        let lock = lock.map_err(failed)?;
        lock.lock().map_err(failed)?;
        let mut locks = read(&self.path)?;
        let done = work(&mut locks);
        // An empty queue is removed, but the highest token is kept.
        let last = locks.queues.values().map(Queue::last_token).max().unwrap_or(0);
        locks.last_token = locks.last_token.max(last);
        locks.queues.retain(|_, queue| !queue.is_empty());
        let (new, text) = (self.beside(".new"), serde_json::to_string(&locks));
        fs::write(&new, text.map_err(|e| corrupt(&e))?).map_err(failed)?;
        fs::rename(&new, &self.path).map_err(failed)?;
        Ok(done)
    }

    /// Changes one lock's queue, if it exists.
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
    Error::new(ErrorKind::Unreachable, "the file cannot be read or written").with_source(error)
}

fn corrupt(error: &serde_json::Error) -> Error {
    let what = "the file is not what this store writes: see what is in it, or take another";
    Error::new(ErrorKind::Corrupt, what).with_source(error.to_string())
}

fn described(name: &Name, queue: &mut Queue, now: u64) -> Option<LockInfo> {
    queue.settle(now);
    let info = LockInfo::new(name.clone(), queue.kind(), queue.capacity(), queue.claims(now));
    (!info.claims.is_empty()).then_some(info)
}

/// Returns the guarantees that exceed the minimum.
fn guarantees() -> Guarantees {
    let mut promised = Guarantees::least();
    promised.kinds = ALL_KINDS.into();
    promised.fifo = true;
    (promised.lock_delay, promised.min_hold) = (true, true);
    // The file is renamed, but not synced to disk.
    (promised.grant, promised.token) = (Durability::Machine, Durability::Machine);
    promised.on_store_crash = Survival::NotApplicable;
    promised.on_failover = Survival::NotApplicable;
    promised.on_partition = Survival::NotApplicable;
    // A client that is paused while it has locked the lock file blocks all others.
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
