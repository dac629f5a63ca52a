//! The service, and the state that its requests share.

use std::path::Path;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use leasehold_core::kit::{locked, request_timeout};
use leasehold_core::store::{EvictionListener, Store};
use leasehold_core::{ClaimId, Client, DEFAULT_LEASE, Error, Result};
use tokio::sync::{broadcast, watch};

use crate::access::{Access, handle};
use crate::history::History;
use crate::history_file::HistoryFile;
use crate::leased::leased;
use crate::limits::Limits;
use crate::problem::Failure;
use crate::recorded::Recorded;
use crate::requests::Requests;

/// A lock service, cheap to clone.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// use leasehold_server::{Access, Limits, Service};
/// let service = Service::new(locks, Access::same_user(), Limits::default())?;
/// let router: axum::Router = service.router(); // to be nested in a router of your own
/// service.reload()?; // the file of tokens, if it has changed
/// service.drain(); // no new claims from now on
/// # drop(router); Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Service(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The client that opened the store. The store's connections live as long as this client.
    opened: Client,
    /// The client for the claims that the server itself makes, for hold streams and to freeze
    /// locks.
    locks: Client,
    store: Arc<dyn Store>,
    access: Access,
    limits: Limits,
    draining: watch::Sender<bool>,
    asks: broadcast::Sender<String>,
    requests: Requests,
    history: Arc<History>,
    history_file: Mutex<Option<HistoryFile>>,
    /// The receiver of evictions, which is registered with the store while the service exists.
    _evictions: Arc<Evictions>,
}

/// Waits until the service drains.
pub(crate) async fn drained(draining: &mut watch::Receiver<bool>) {
    // The sender lives as long as the service.
    let _ = draining.wait_for(|draining| *draining).await;
}

/// Reports evictions to all event streams.
#[derive(Debug)]
struct Evictions(broadcast::Sender<String>);

impl EvictionListener for Evictions {
    fn ask(&self, id: ClaimId) {
        // Without a stream, the client finds out at its next renewal.
        let _ = self.0.send(handle(id));
    }
}

impl Service {
    /// Creates a service over the store of this client. Must be called in a tokio runtime.
    ///
    /// # Errors
    /// The same as [`Client::with_store`].
    pub fn new(locks: Client, access: Access, limits: Limits) -> Result<Self> {
        let history = Arc::new(History::new(limits.history, limits.history_per_lock));
        let watch = limits.watch_store && limits.history > 0;
        let store = Recorded::new(leased(locks.store().clone()), history.clone(), watch);
        let store: Arc<dyn Store> = Arc::new(store);
        let identity = locks.identity().to_owned();
        let builder = leasehold_core::Builder::new(leasehold_core::Registry::default());
        let opened = locks;
        let locks = builder.identity(identity).store(store.clone())?;
        let asks = broadcast::Sender::new(1024);
        let evictions = Arc::new(Evictions(asks.clone()));
        let listener: Weak<Evictions> = Arc::downgrade(&evictions);
        store.on_eviction(listener);
        let draining = watch::Sender::new(false);
        let requests = Requests::default();
        Ok(Self(Arc::new(Inner {
            opened,
            locks,
            store,
            access,
            limits,
            draining,
            asks,
            requests,
            history,
            history_file: Mutex::new(None),
            _evictions: evictions,
        })))
    }

    /// Reloads the token file, if there is one.
    ///
    /// # Errors
    /// The same as [`Access::tokens`]. On an error, the current identities stay in effect.
    pub fn reload(&self) -> Result<()> {
        self.0.access.reload()
    }

    /// Keeps the history of all locks in this file too, so that a restart does not lose it. Adds
    /// the holds that an earlier server of this store has written there. Other servers cannot use
    /// the file at the same time. [`serve`](crate::serve) writes the last changes when it ends.
    /// Without it, those of the last second may be missing.
    ///
    /// # Errors
    /// - [`Config`](leasehold_core::ErrorKind::Config): the file cannot be read or written,
    ///   contains something else, or another server uses it.
    pub fn keep_history_in(&self, file: impl AsRef<Path>) -> Result<()> {
        let file = HistoryFile::open(file.as_ref(), self.0.locks.identity(), &self.0.history)?;
        *locked(&self.0.history_file) = Some(file);
        Ok(())
    }

    /// Stops accepting claims, and notifies open streams. [`serve`](crate::serve) calls this when
    /// it shuts down.
    pub fn drain(&self) {
        self.0.draining.send_replace(true);
    }

    /// Releases the locks of hold streams, and disconnects from the store.
    pub(crate) async fn close(&self) {
        // Locks that are not released now become free when their leases expire.
        let _ = self.0.locks.clone().close().await;
        let _ = self.0.opened.clone().close().await;
    }

    /// Writes the history to its file, if it has one.
    pub(crate) async fn close_history(&self) {
        let file = locked(&self.0.history_file).take();
        let _ = tokio::task::spawn_blocking(move || file.map(HistoryFile::close)).await;
    }

    pub(crate) fn locks(&self) -> &Client {
        &self.0.locks
    }

    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.0.store
    }

    pub(crate) fn access(&self) -> &Access {
        &self.0.access
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.0.limits
    }

    pub(crate) fn requests(&self) -> &Requests {
        &self.0.requests
    }

    pub(crate) fn history(&self) -> &History {
        &self.0.history
    }

    pub(crate) fn is_draining(&self) -> bool {
        *self.0.draining.borrow()
    }

    pub(crate) fn draining(&self) -> watch::Receiver<bool> {
        self.0.draining.subscribe()
    }

    pub(crate) fn asks(&self) -> broadcast::Receiver<String> {
        self.0.asks.subscribe()
    }

    /// Waits for a call of the store, but no longer than a client of the store would. After a
    /// timeout, it is unknown whether the call took effect.
    pub(crate) async fn call<T>(
        &self,
        lease: Duration,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T, Failure> {
        let info = self.0.store.info();
        let limit = request_timeout(lease).saturating_add(info.replication_timeout);
        let called = tokio::time::timeout(limit, call).await;
        let result = called.unwrap_or_else(|_| Err(Error::no_reply(limit)));
        result.map_err(|error| Failure::from(error.with_store(&info.url)))
    }

    /// Waits for a reading call of the store, with the time limit of a default lease.
    pub(crate) async fn read<T>(
        &self,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T, Failure> {
        self.call(DEFAULT_LEASE, call).await
    }
}
