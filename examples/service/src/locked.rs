//! A lock as an extractor. A handler with this parameter runs under the lock.

use std::time::Duration;

use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use leasehold::MutexGuard;

use crate::app::App;
use crate::error::Failure;

/// Time limit for a request that waits for its lock. It is shorter than the client's own time
/// limit.
const PATIENCE: Duration = Duration::from_secs(2);

/// The account in the request's path, locked. It is released when it is dropped at the end of the
/// handler. If the client disconnects, the lock or its place in the queue is dropped as well.
pub(crate) struct Locked {
    pub(crate) id: i64,
    pub(crate) guard: MutexGuard,
}

impl FromRequestParts<App> for Locked {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        let id = Path::<i64>::from_request_parts(parts, app).await;
        let Path(id) = id.map_err(|_| Failure::bad("an account is a number"))?;
        let guard = app.locks.mutex(format!("account:{id}")).lock_timeout(PATIENCE).await?;
        Ok(Self { id, guard })
    }
}
