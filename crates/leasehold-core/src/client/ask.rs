//! Requests to the store for a single claim, and the time limit for an outage.

use std::time::Duration;

use crate::store::Store;
use crate::types::answer::{Renew, Renewal};
use crate::types::claim::Claim;
use crate::types::error::{Error, ErrorKind, Result};
use crate::types::limits::DEFAULT_LEASE;

/// Returns how long a waiting caller retries while the store does not answer: one lease, but at
/// least the default lease. A fail-over must fit into this time, even if the lease is short.
pub(crate) fn outage_timeout(store: &dyn Store, claim: &Claim) -> Duration {
    claim.lease.max(DEFAULT_LEASE).saturating_add(store.info().replication_timeout)
}

/// Renews one claim from the caller's task, and returns the store's result.
pub(crate) async fn renew_one(
    store: &dyn Store,
    claim: &Claim,
    lease: Duration,
) -> Result<Renewal> {
    let answers = store.renew(&[Renew { claim: claim.clone(), lease }]).await?;
    let mut answers = answers.into_iter();
    let none = || Error::new(ErrorKind::Corrupt, "the store returned no result for a renewal");
    answers.next().ok_or_else(none)?.known()
}
