//! HTTP status codes of errors.

use http::StatusCode;
use leasehold_core::{Error, ErrorKind};

/// Returns the HTTP status for a request that failed with this error of a lock, a fence or the
/// store.
///
/// | status | error | meaning |
/// |---|---|---|
/// | 423 Locked | `Contended`, `Timeout`, and the store answered | another client holds the lock, and the service works |
/// | 409 Conflict | `StaleToken`, `StaleVersion` | a newer holder has written, so the data that the request has read is outdated |
/// | 400 Bad Request | `InvalidName` | the name came from the request |
/// | 503 Service Unavailable | any other [retryable](Error::is_retryable) error | the store is unreachable, or the lock was lost |
/// | 500 | all others | a missing permission or an invalid setting, which an operator must fix |
///
/// Send `Retry-After` with 423 and 503. If a commit was not answered, it is unknown whether it
/// happened: answer with 500 then, whatever the error, unless the request has an idempotency key
/// (`once`). The text of an error names holders and hosts. Write it to the log, and do not send it
/// to untrusted clients.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use leasehold::fence::http::status;
/// let locks = leasehold::connect("memory:").await?;
/// let _held = locks.mutex("account:7").lock().await?;
/// let error = locks.mutex("account:7").try_lock().await.unwrap_err();
/// assert_eq!(status(&error).as_u16(), 423);
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
pub fn status(error: &Error) -> StatusCode {
    match error.kind() {
        ErrorKind::Contended | ErrorKind::Timeout => StatusCode::LOCKED,
        ErrorKind::StaleToken | ErrorKind::StaleVersion => StatusCode::CONFLICT,
        ErrorKind::InvalidName => StatusCode::BAD_REQUEST,
        _ if error.is_retryable() => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

#[cfg(test)]
mod tests {
    use leasehold_core::LostReason;

    use super::*;

    #[test]
    fn each_kind_has_its_status() {
        for (kind, expected) in [
            (ErrorKind::StaleToken, 409),
            (ErrorKind::StaleVersion, 409),
            (ErrorKind::InvalidName, 400),
            (ErrorKind::Contended, 423),
            (ErrorKind::Timeout, 423),
            (ErrorKind::Unreachable, 503),
            (ErrorKind::AtRisk, 503),
            (ErrorKind::Denied, 500),
            (ErrorKind::Config, 500),
            (ErrorKind::Closed, 500),
        ] {
            assert_eq!(status(&Error::new(kind, "")).as_u16(), expected, "{kind:?}");
        }
        assert_eq!(status(&Error::lost(LostReason::Gone)).as_u16(), 503);
    }
}
