//! Errors as responses.

use std::time::Duration;

use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::response::{IntoResponse, Response};
use leasehold_core::store::{ClaimInfo, LockInfo};
use leasehold_core::{Error, ErrorKind};
use leasehold_http::wire::{PROBLEM_JSON, Problem};

/// The error with which a request is answered.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) error: Error,
    status: StatusCode,
    frozen: Option<String>,
}

impl Failure {
    /// Replaces the status that follows from the error's kind.
    pub(crate) fn with_status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }

    /// Creates the error of a busy lock. If the lock is frozen, the reason is part of the response.
    pub(crate) fn busy(error: Error, lock: Option<&LockInfo>) -> Self {
        let frozen = lock.and_then(frozen).map(str::to_owned);
        let status = if frozen.is_some() { StatusCode::LOCKED } else { StatusCode::CONFLICT };
        Self { error, status, frozen }
    }

    pub(crate) fn problem(&self) -> Problem {
        let mut problem = Problem::new(&self.error);
        problem.status = Some(self.status.as_u16());
        problem.frozen.clone_from(&self.frozen);
        problem
    }
}

/// Returns why the lock is frozen, if it is.
pub(crate) fn frozen(lock: &LockInfo) -> Option<&str> {
    lock.claims.iter().find_map(ClaimInfo::frozen)
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        use ErrorKind as Kind;
        let status = match error.kind() {
            Kind::Contended | Kind::AtRisk => StatusCode::CONFLICT,
            Kind::Timeout => StatusCode::REQUEST_TIMEOUT,
            Kind::Lost => StatusCode::GONE,
            Kind::Unreachable | Kind::Unconfirmed | Kind::Conflict | Kind::Closed => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Kind::Unsupported => StatusCode::NOT_IMPLEMENTED,
            Kind::Mismatch => StatusCode::UNPROCESSABLE_ENTITY,
            Kind::InvalidName | Kind::Config => StatusCode::BAD_REQUEST,
            Kind::Denied => StatusCode::FORBIDDEN,
            Kind::Full => StatusCode::INSUFFICIENT_STORAGE,
            Kind::StaleVersion | Kind::StaleToken => StatusCode::PRECONDITION_FAILED,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self { error, status, frozen: None }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let problem = self.problem();
        let body = serde_json::to_vec(&problem).unwrap_or_default();
        let mut response = (self.status, [(CONTENT_TYPE, PROBLEM_JSON)], body).into_response();
        if let Some(wait) = self.error.retry_after() {
            let seconds = wait.as_millis().div_ceil(1000).max(1);
            if let Ok(seconds) = u64::try_from(seconds) {
                response.headers_mut().insert(RETRY_AFTER, seconds.into());
            }
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = axum::http::HeaderValue::from_static("Bearer");
            response.headers_mut().insert(axum::http::header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}

/// Creates the error of a request that the client has to correct.
pub(crate) fn invalid(what: impl Into<String>, hint: &str) -> Failure {
    Error::new(ErrorKind::Config, what).with_hint(hint).into()
}

/// Creates the error of a request that this server does not execute, because it shuts down.
pub(crate) fn draining() -> Failure {
    let what = "this server is shutting down, and takes no new claims";
    Error::new(ErrorKind::Unreachable, what)
        .with_hint("retry: another server, or this one after its restart, will answer")
        .with_retry_after(Duration::from_secs(1))
        .into()
}
