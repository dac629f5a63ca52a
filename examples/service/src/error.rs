//! Which error is which answer.

use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use leasehold::ErrorKind;

/// What a handler returns.
pub(crate) type Reply<T> = Result<T, Failure>;

/// Why a request was not served.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A lock or the database said so.
    Lock(leasehold::Error),
    /// The database did not say whether it has done it.
    Unknown(leasehold::Error),
    /// The request makes no sense, and why.
    Bad(&'static str),
    /// Somebody else has that.
    NotHere,
}

impl From<leasehold::Error> for Failure {
    fn from(error: leasehold::Error) -> Self {
        Self::Lock(error)
    }
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::Lock(leasehold::database::error(error))
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let error = match self {
            Self::Lock(error) => error,
            Self::Unknown(error) => {
                // Perhaps it is done: not to be sent again without a key by which that is seen.
                eprintln!("perhaps done: {error}");
                return StatusCode::INTERNAL_SERVER_ERROR.into_response();
            }
            Self::Bad(why) => return (StatusCode::BAD_REQUEST, why).into_response(),
            Self::NotHere => return StatusCode::NOT_FOUND.into_response(),
        };
        let status = match error.kind() {
            // Somebody is at it. (Not 503: the service is well.)
            ErrorKind::Contended | ErrorKind::Timeout if error.store_answered() => {
                StatusCode::LOCKED
            }
            // A later holder has written; what this request had read is old.
            ErrorKind::StaleToken | ErrorKind::StaleVersion => StatusCode::CONFLICT,
            ErrorKind::InvalidName => StatusCode::BAD_REQUEST,
            // Nothing was written, and it may work in a moment: the store is away, or was too slow.
            _ if error.is_retryable() => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        eprintln!("{status}: {error}");
        // The line says who holds what: for the log, and not for strangers.
        match status {
            StatusCode::LOCKED | StatusCode::SERVICE_UNAVAILABLE => {
                (status, [(RETRY_AFTER, "1")]).into_response()
            }
            _ => status.into_response(),
        }
    }
}
