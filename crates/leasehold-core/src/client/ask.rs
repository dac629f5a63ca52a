//! What a caller asks the store for its own claim, and for how long.

use std::time::Duration;

use crate::store::Store;
use crate::words::answer::{Renew, Renewal};
use crate::words::claim::Claim;
use crate::words::error::{Error, ErrorKind, Result};
use crate::words::limits::DEFAULT_LEASE;

/// For how long a store that does not answer is asked again by who wants to wait: a lease, and no
/// less than the default one. A fail-over must fit in it, however short the lease.
pub(crate) fn outage_timeout(store: &dyn Store, claim: &Claim) -> Duration {
    claim.lease.max(DEFAULT_LEASE).saturating_add(store.info().replication_timeout)
}

/// The store's answer for one claim, asked for on the caller's side.
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
