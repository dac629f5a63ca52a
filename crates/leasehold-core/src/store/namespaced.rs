//! A store that puts one prefix before all names of a client, which does not see the prefix. So
//! several applications, tenants or environments can share one store, and none can name another's
//! locks.
//!
//! Nothing else changes. Each name that is passed to the store gets the prefix, and each name that
//! it returns loses it. A name without the prefix is never returned. Sequencers contain names
//! without the prefix, so clients with different namespaces count as clients of different stores
//! (the client's identity contains the namespace).
//!
//! A namespace is a convention among clients, not access control. A client that may use the store
//! can also use it without a namespace, and then sees the full names.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;

use super::{
    Converted, Evict, EvictionListener, Follow, Joined, LockInfo, Mode, Ownership, Queues, Renew,
    Renewal, Signal, Store, StoreInfo,
};
use crate::types::claim::Claim;
use crate::types::doctor::Finding;
use crate::types::error::{Error, ErrorKind, Result};
use crate::types::name::{MAX_NAME_BYTES, Name};
use crate::types::token::Token;

/// The maximum length of a prefix, in bytes. It leaves room for names after the prefix.
const LONGEST: usize = MAX_NAME_BYTES / 2;

#[derive(Debug)]
struct Namespaced {
    inner: Arc<dyn Store>,
    prefix: String,
}

/// Returns the store with `prefix` before all names, or the store itself if the prefix is empty.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use std::sync::Arc;
/// use leasehold::store::{kit::namespaced, MemoryStore};
/// use leasehold::Client;
/// let store = Arc::new(MemoryStore::new());
/// let all = Client::with_store(store.clone())?;
/// let ours = Client::with_store(namespaced(store, "billing/".to_owned())?)?;
/// let guard = ours.mutex("invoice").lock().await?;
/// assert_eq!(all.list("").await?[0].name.as_str(), "billing/invoice");
/// # drop(guard); Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// # Errors
/// - [`Config`](ErrorKind::Config): the prefix is too long, or contains control characters.
pub fn namespaced(store: Arc<dyn Store>, prefix: String) -> Result<Arc<dyn Store>> {
    if prefix.is_empty() {
        return Ok(store);
    }
    let refused = |what: String| {
        let hint = format!("use at most {LONGEST} bytes, and no control characters");
        Err(Error::new(ErrorKind::Config, what).with_hint(hint))
    };
    if prefix.len() > LONGEST {
        return refused(format!("the namespace is too long: {} bytes", prefix.len()));
    }
    if prefix.contains(char::is_control) {
        return refused(format!("the namespace {prefix:?} contains a control character"));
    }
    Ok(Arc::new(Namespaced { inner: store, prefix }))
}

impl Namespaced {
    /// Returns the name as the store knows it.
    fn there(&self, name: &Name) -> Result<Name> {
        Name::new(format!("{}{}", self.prefix, name.as_str())).map_err(|_| {
            let most = MAX_NAME_BYTES - self.prefix.len();
            let what = format!(
                "lock name too long: at most {most} bytes in the namespace {:?}",
                self.prefix
            );
            Error::new(ErrorKind::InvalidName, what)
        })
    }

    fn claim_there(&self, claim: &Claim) -> Result<Claim> {
        Ok(Claim { name: self.there(&claim.name)?, ..claim.clone() })
    }

    /// Returns the information with the name as the clients know it, or `None` if it has another
    /// prefix.
    fn here(&self, mut info: LockInfo) -> Option<LockInfo> {
        info.name = Name::new(info.name.as_str().strip_prefix(&self.prefix)?).ok()?;
        Some(info)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Store for Namespaced {
    fn info(&self) -> &StoreInfo {
        self.inner.info()
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        self.inner.join(&self.claim_there(claim)?, mode).await
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let there = |r: &Renew| Ok(Renew { claim: self.claim_there(&r.claim)?, lease: r.lease });
        let renewals: Vec<Renew> = renewals.iter().map(there).collect::<Result<_>>()?;
        self.inner.renew(&renewals).await
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        self.inner.leave(&self.claim_there(claim)?, keep).await
    }

    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        self.inner.convert(&self.claim_there(claim)?).await
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        self.inner.changed(&self.claim_there(claim)?).await
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        let read = self.inner.read(&self.there(name)?).await?;
        Ok(read.and_then(|info| self.here(info)))
    }

    async fn holders(&self, name: &Name, token: Option<Token>) -> Result<Option<LockInfo>> {
        let read = self.inner.holders(&self.there(name)?, token).await?;
        Ok(read.and_then(|info| self.here(info)))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let all = self.inner.list(&format!("{}{prefix}", self.prefix)).await?;
        Ok(all.into_iter().filter_map(|info| self.here(info)).collect())
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        self.inner.evict(&self.there(name)?, which).await
    }

    fn on_eviction(&self, listener: Weak<dyn EvictionListener>) {
        self.inner.on_eviction(listener);
    }

    async fn follow(&self, queues: &Queues) -> Result<Option<Follow>> {
        let there = match queues {
            Queues::Of(name) => Queues::Of(self.there(name)?),
            Queues::All(prefix) => Queues::All(format!("{}{prefix}", self.prefix)),
        };
        self.inner.follow(&there).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        self.inner.diagnose().await
    }

    async fn disconnect(&self) {
        self.inner.disconnect().await;
    }

    fn longest_lease(&self) -> Duration {
        self.inner.longest_lease()
    }

    fn shard(&self, name: &Name) -> u64 {
        self.there(name).map_or(0, |name| self.inner.shard(&name))
    }

    fn confirmed(&self, claim: &Claim) -> Option<u32> {
        self.inner.confirmed(&self.claim_there(claim).ok()?)
    }

    fn ownership(&self, claim: &Claim) -> Result<Option<Ownership>> {
        self.inner.ownership(&self.claim_there(claim)?)
    }

    fn lifeline(&self) -> Option<BorrowedFd<'_>> {
        self.inner.lifeline()
    }
}
