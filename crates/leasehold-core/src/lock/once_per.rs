//! Once per period, by whoever of many comes first.

use std::time::Duration;

use crate::lock::acquire::LockHandle;
use crate::lock::guard::Guard;
use crate::lock::wait::Wait;
use crate::words::answer::{ClaimInfo, Standing};
use crate::words::error::{ErrorKind, Result};

/// What [`Mutex::once_per`](crate::Mutex::once_per) came to.
#[derive(Debug)]
#[must_use = "a guard that is dropped at once has done nothing, and the period is over all the same"]
pub enum OncePer<G = Guard> {
    /// Ours: do it, while this is held.
    Ran(G),
    /// Somebody is at it.
    Running(Box<ClaimInfo>),
    /// It was done in this period.
    Done {
        /// For how long it will not be done again.
        next: Duration,
    },
}

impl<G> OncePer<G> {
    /// The guard, if it is ours to do.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// # let locks = leasehold::connect("memory:").await?;
    /// let hourly = locks.mutex("report");
    /// if let Some(guard) = hourly.once_per(Duration::from_secs(3600)).await?.ran() {
    ///     // ours to do
    ///     guard.release().await?;
    /// }
    /// assert!(hourly.once_per(Duration::from_secs(3600)).await?.ran().is_none());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn ran(self) -> Option<G> {
        match self {
            Self::Ran(guard) => Some(guard),
            Self::Running(_) | Self::Done { .. } => None,
        }
    }

    pub(crate) fn map<H>(self, wrap: impl FnOnce(G) -> H) -> OncePer<H> {
        match self {
            Self::Ran(guard) => OncePer::Ran(wrap(guard)),
            Self::Running(holder) => OncePer::Running(holder),
            Self::Done { next } => OncePer::Done { next },
        }
    }
}

pub(crate) async fn once_per(lock: &LockHandle, period: Duration) -> Result<OncePer> {
    let mut lock = lock.clone();
    lock.options.at_least = period;
    match lock.acquire("once_per", 1, Wait::Try).await {
        Ok(guard) => return Ok(OncePer::Ran(guard)),
        Err(error) if error.kind() == ErrorKind::Contended => {}
        Err(error) => return Err(error),
    }
    let claims = lock.read().await?.map_or_else(Vec::new, |lock| lock.claims);
    let kept = claims.iter().find(|claim| claim.standing == Standing::Departed);
    Ok(match (kept, claims.first()) {
        (Some(kept), _) => OncePer::Done { next: kept.remaining.unwrap_or_default() },
        (None, Some(first)) => OncePer::Running(Box::new(first.clone())),
        // It came to an end between the two looks.
        (None, None) => OncePer::Done { next: Duration::ZERO },
    })
}
