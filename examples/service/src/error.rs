//! Maps errors to HTTP responses.

use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use leasehold::fence::http::status;

/// What a handler returns.
pub(crate) type Reply<T> = Result<T, Failure>;

/// Why a request was not served: the status of the response, and a line for the log.
#[derive(Debug)]
pub(crate) struct Failure(StatusCode, String);

impl Failure {
    /// Returns the failure for an invalid request.
    pub(crate) fn bad(why: &str) -> Self {
        Self(StatusCode::BAD_REQUEST, why.into())
    }

    /// Returns the failure for a request that may have been executed. A client must not repeat it
    /// without an idempotency key.
    pub(crate) fn unknown(error: sqlx::Error) -> Self {
        Self(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
    }
}

impl From<leasehold::Error> for Failure {
    fn from(error: leasehold::Error) -> Self {
        Self(status(&error), error.to_string())
    }
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        leasehold::database::error(error).into()
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let Self(status, why) = self;
        // The line names the holders of locks, so it is only for the log and not for strangers.
        eprintln!("{status}: {why}");
        match status {
            StatusCode::LOCKED | StatusCode::SERVICE_UNAVAILABLE => {
                (status, [(RETRY_AFTER, "1")]).into_response()
            }
            StatusCode::BAD_REQUEST => (status, why).into_response(),
            _ => status.into_response(),
        }
    }
}
