//! A lock as an extractor: a handler that names it runs under it.

use std::time::Duration;

use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use leasehold::Guard;

use crate::app::App;
use crate::error::Failure;

/// How long a request waits for its turn: less than whoever sent it does.
const PATIENCE: Duration = Duration::from_secs(2);

/// The account in the request's path, locked. Dropped at the end of the handler, it is released; a request
/// whose client has gone drops it too, or its place in the queue.
pub(crate) struct Locked {
    pub(crate) id: i64,
    pub(crate) guard: Guard,
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
