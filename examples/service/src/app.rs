//! What all requests share.

use leasehold::{Election, Leasehold};
use metrics_exporter_prometheus::PrometheusHandle;
use sqlx::PgPool;

/// The state of the router. Clones are the same.
#[derive(Clone)]
pub(crate) struct App {
    /// The service's own data. Each request that writes takes one connection of it.
    pub(crate) pool: PgPool,
    /// The locks. They have connections of their own, four at most (`?pool=` in their URL): a lock
    /// must be renewed however busy the service is.
    pub(crate) locks: Leasehold,
    /// One instance closes the books.
    pub(crate) books: Election,
    pub(crate) metrics: PrometheusHandle,
}
