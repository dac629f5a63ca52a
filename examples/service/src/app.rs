//! The state of the router.

use leasehold::Leasehold;
use metrics_exporter_prometheus::PrometheusHandle;
use sqlx::PgPool;
use tokio::sync::watch;

/// What all requests share. Clones are the same.
#[derive(Clone)]
pub(crate) struct App {
    /// The service's own data. Each request that writes takes one connection of it.
    pub(crate) pool: PgPool,
    /// The locks. They have connections of their own, four at most (`?pool=` in their URL): a lock
    /// must be renewed however busy the service is.
    pub(crate) locks: Leasehold,
    /// The term that this instance leads, if it does.
    pub(crate) term: watch::Sender<Option<u64>>,
    pub(crate) metrics: PrometheusHandle,
}
