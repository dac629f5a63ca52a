//! Runs a job once per period, on the first client that requests it.

use std::time::Duration;

use crate::lock::acquire::LockHandle;
use crate::lock::guard::MutexGuard;
use crate::lock::wait::Wait;
use crate::types::answer::{ClaimInfo, ClaimState};
use crate::types::error::{ErrorKind, Result};

/// The result of [`Mutex::once_per`](crate::Mutex::once_per).
#[derive(Debug)]
#[must_use = "dropping the guard releases the lock, and the job does not run again in this period"]
#[non_exhaustive]
pub enum OncePer<G = MutexGuard> {
    /// The lock is held: run the job now, and keep the guard until it is done.
    Ran(G),
    /// Another client is running the job.
    Running(Box<ClaimInfo>),
    /// The job has already been done in this period.
    Done {
        /// The time until the job can run again.
        next: Duration,
    },
}

impl<G> OncePer<G> {
    /// Returns the guard, if this client is to run the job.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// # let locks = leasehold::connect("memory:").await?;
    /// let hourly = locks.mutex("report");
    /// if let Some(guard) = hourly.once_per(Duration::from_secs(3600)).await?.ran() {
    ///     // this client runs the job
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
    lock.options.min_hold = period;
    match lock.acquire("once_per", 1, Wait::Try).await {
        Ok(hold) => return Ok(OncePer::Ran(MutexGuard::new(hold))),
        Err(error) if error.kind() == ErrorKind::Contended => {}
        Err(error) => return Err(error),
    }
    let claims = lock.read().await?.map_or_else(Vec::new, |lock| lock.claims);
    let kept = claims.iter().find(|claim| claim.state == ClaimState::Cooldown);
    Ok(match (kept, claims.first()) {
        (Some(kept), _) => OncePer::Done { next: kept.remaining.unwrap_or_default() },
        (None, Some(first)) => OncePer::Running(Box::new(first.clone())),
        // The hold ended between the two requests.
        (None, None) => OncePer::Done { next: Duration::ZERO },
    })
}
