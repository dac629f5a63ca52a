//! State that all requests share.

use leasehold::{Client, Election};
use metrics_exporter_prometheus::PrometheusHandle;
use sqlx::PgPool;

/// The state of the router. Clones share it.
#[derive(Clone)]
pub(crate) struct App {
    /// The connections to the service's own data. Each request that writes uses one.
    pub(crate) pool: PgPool,
    /// The lock client. It has its own connections, at most seven (four for calls, `?pool=` in
    /// the URL, and three others), because a lock must be renewed however busy the service is.
    pub(crate) locks: Client,
    /// The election of the instance that closes the books.
    pub(crate) books: Election,
    pub(crate) metrics: PrometheusHandle,
}
