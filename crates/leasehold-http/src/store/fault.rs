//! The errors of a server, of proxies in front of it, and of the network.
//!
//! A server describes each error as a [`Problem`] with its kind. Anything else was written by a
//! proxy or by another program, and only its status is known.

use std::error::Error as StdError;

use http::StatusCode;
use leasehold_core::{Error, ErrorKind};

use super::url::TOKEN_FILE;
use crate::wire::Problem;

const HINT: &str = "check that `leasehold serve` is running and reachable, then retry";
const CERTIFICATE_HINT: &str = "set ca= to the authority of the server's certificate, and cert= and key= if the server \
                                requires a client certificate";

/// Returns the innermost cause, which has the details that the outer ones lack.
fn cause<'a>(mut error: &'a (dyn StdError + 'static)) -> &'a (dyn StdError + 'static) {
    while let Some(source) = error.source() {
        error = source;
    }
    error
}

/// Returns the error of a request that was not answered.
pub(super) fn unreachable(what: &str, why: &(dyn StdError + 'static)) -> Error {
    let why = cause(why).to_string();
    let is_certificate = why.to_lowercase().contains("certificate");
    let hint = if is_certificate { CERTIFICATE_HINT } else { HINT };
    Error::new(ErrorKind::Unreachable, what).with_hint(hint).with_source(why)
}

/// Returns the error that an answer represents, or `None` for a success.
pub(super) fn refused(status: StatusCode, body: &[u8]) -> Option<Error> {
    if status.is_success() {
        return None;
    }
    let problem = serde_json::from_slice::<Problem>(body).ok().filter(|p| !p.kind.is_empty());
    let Some(problem) = problem else { return Some(foreign(status)) };
    let error = problem.error();
    // The server's own client was closed. Another replica can execute the call.
    match error.kind() {
        ErrorKind::Closed => Some(error.with_kind(ErrorKind::Unreachable)),
        _ => Some(error),
    }
}

/// Returns the error for an answer that was not written by a leasehold server.
fn foreign(status: StatusCode) -> Error {
    let error = |kind, hint: &str| {
        Error::new(kind, format!("the server answered with the HTTP status {status}"))
            .with_hint(hint.to_owned())
    };
    match status.as_u16() {
        401 | 403 | 407 => error(ErrorKind::Denied, TOKEN_FILE),
        408 | 425 | 429 | 500.. => error(ErrorKind::Unreachable, HINT),
        413 | 414 | 431 => error(ErrorKind::Config, "raise the limits of the proxy"),
        _ => error(ErrorKind::Config, "check that the URL is that of `leasehold serve`"),
    }
}

/// Returns the error for an answer that cannot be parsed.
pub(super) fn invalid(why: &serde_json::Error) -> Error {
    // The parser's text may quote the answer.
    let what = format!("invalid response from the server at line {}", why.line());
    Error::new(ErrorKind::Corrupt, what)
        .with_hint("check that the URL is that of `leasehold serve`, of the same version or newer")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(status: u16, body: &str) -> Option<ErrorKind> {
        refused(StatusCode::from_u16(status).unwrap(), body.as_bytes()).map(|e| e.kind())
    }

    #[test]
    fn kind_of_a_problem_is_the_kind_of_the_error() {
        assert_eq!(kind(200, "{}"), None);
        assert_eq!(kind(409, r#"{"kind":"contended"}"#), Some(ErrorKind::Contended));
        assert_eq!(kind(409, r#"{"kind":"mismatch"}"#), Some(ErrorKind::Mismatch));
        assert_eq!(kind(403, r#"{"kind":"denied"}"#), Some(ErrorKind::Denied));
        assert_eq!(kind(400, r#"{"kind":"of the future"}"#), Some(ErrorKind::Unreachable));
        // This is the answer of a server that shuts down.
        assert_eq!(kind(503, r#"{"kind":"closed"}"#), Some(ErrorKind::Unreachable));
        assert_eq!(kind(503, r#"{"kind":"unconfirmed"}"#), Some(ErrorKind::Unconfirmed));
    }

    #[test]
    fn status_of_a_proxy_is_an_outage_unless_a_retry_cannot_help() {
        let outages = [408, 429, 500, 502, 503, 504, 599];
        assert!(outages.iter().all(|s| kind(*s, "<html>") == Some(ErrorKind::Unreachable)));
        assert_eq!(kind(401, ""), Some(ErrorKind::Denied));
        for status in [301, 404, 405, 413] {
            assert_eq!(kind(status, "{\"kind\":\"\"}"), Some(ErrorKind::Config), "{status}");
        }
    }

    #[test]
    fn text_of_an_invalid_answer_is_not_shown() {
        let why = serde_json::from_str::<Problem>("\"secret\"").unwrap_err();
        assert!(!format!("{:#}", invalid(&why)).contains("secret"));
    }
}
