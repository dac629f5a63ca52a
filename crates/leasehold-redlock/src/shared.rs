//! State that the tasks of all calls share: the servers, the claims, and the names of keys.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;

use super::claims::Claims;
use super::node::{MEMORY_KEY, Node};
use super::scripts::Scripts;
use leasehold_core::{Claim, Error, ErrorKind, Kind, Name, Result};
use leasehold_redis::redis::url::RESERVED;

/// State that the tasks of all calls share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) nodes: Vec<Arc<Node>>,
    pub(super) claims: Arc<Claims>,
    pub(super) scripts: Scripts,
    pub(super) prefix: String,
    pub(super) node_timeout: Duration,
    pub(super) max_lease: Duration,
    /// Number of releases in progress.
    pub(super) releases: tokio::sync::watch::Sender<usize>,
    /// Runtime of the client's own thread, with timers and connections.
    pub(super) runtime: Handle,
}

impl Shared {
    /// Runs `work` on the client's own thread. The work continues if the caller's future is
    /// dropped.
    pub(super) async fn spawned<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        let ended = |_| {
            Error::new(ErrorKind::Closed, "the thread of this client has ended")
                .with_hint("connect again")
        };
        self.runtime.spawn(work).await.map_err(ended)
    }

    /// Returns the keys of a lock: the main key, the record, the memory, the waiters by age, and
    /// the waiters by expiry.
    pub(super) fn keys(&self, name: &Name) -> [String; 5] {
        let name = name.as_str();
        let beside = |what: &str| format!("{}:{what}:{}{name}", MEMORY_KEY, self.prefix);
        [
            format!("{}{name}", self.prefix),
            self.record_key(name),
            MEMORY_KEY.to_owned(),
            beside("waiting"),
            beside("alive"),
        ]
    }

    pub(super) fn record_key(&self, name: &str) -> String {
        format!("{}:lock:{}{name}", MEMORY_KEY, self.prefix)
    }

    /// Rejects claims that can never work in this store.
    pub(super) fn check(&self, claim: &Claim) -> Result<()> {
        let refused = |kind, what: String, hint: &str| {
            Err(Error::new(kind, what).with_hint(hint).with_lock(&claim.name))
        };
        if claim.kind != Kind::Mutex {
            let what = format!("redlock: stores support mutexes only, not a {}", claim.kind);
            let hint = "use another store, such as redis: or postgres:";
            return refused(ErrorKind::Unsupported, what, hint);
        }
        if claim.lease > self.max_lease {
            let what = format!(
                "a lease of {:?} is longer than max_lease_ms ({:?})",
                claim.lease, self.max_lease
            );
            let hint = "use a shorter lease, or raise max_lease_ms in every client's URL";
            return refused(ErrorKind::Config, what, hint);
        }
        if self.prefix.is_empty() && claim.name.as_str().starts_with(RESERVED) {
            let what = format!("the prefix {RESERVED:?} is reserved for leasehold's own keys");
            let hint = "use another lock name, or add ?prefix=… to the URL";
            return refused(ErrorKind::InvalidName, what, hint);
        }
        Ok(())
    }
}
