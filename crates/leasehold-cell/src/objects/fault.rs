//! What goes wrong on the way to an object store, in words that say what to do.

use leasehold_core::{Error, ErrorKind};
use object_store::Error as Driver;

use super::url::ObjectsUrl;

/// What the driver says of an answer that comes from elsewhere.
const REDIRECT: &str = "Received redirect";
/// What it says of a request that is wrong.
const BAD_REQUEST: &str = "status code: 400";

/// What it says of a server that has too much to do.
const BUSY: [&str; 2] = ["status code: 503", "status code: 429"];

/// Whether the server asks for patience: to ask again at once would be the opposite.
pub(super) fn is_busy(error: &Driver) -> bool {
    let why = error.to_string();
    BUSY.iter().any(|code| why.contains(code))
}

/// Nobody answers there, or not in time.
pub(super) fn unreachable(url: &ObjectsUrl, why: impl ToString) -> Error {
    let what = format!(
        "{} does not answer: check endpoint and network, and that there are credentials ({})",
        url.place(),
        url.cloud.credentials()
    );
    Error::new(ErrorKind::Unreachable, what).because(shown(&why.to_string()))
}

/// What the driver tells.
pub(super) fn of(url: &ObjectsUrl, error: &Driver) -> Error {
    let (why, place) = (error.to_string(), url.place());
    let (kind, what) = match error {
        Driver::NotFound { .. } => (
            ErrorKind::Config,
            format!("there is no {place}: make it, or write another in the URL"),
        ),
        Driver::PermissionDenied { .. } | Driver::Unauthenticated { .. } => (
            ErrorKind::Denied,
            format!("these credentials may not use {place}: allow {}", url.cloud.rights()),
        ),
        Driver::NotImplemented { .. } | Driver::NotSupported { .. } => {
            (ErrorKind::Config, format!("{place} cannot write under a condition: use another"))
        }
        _ if why.contains(REDIRECT) => (
            ErrorKind::Config,
            format!("{place} is in another region: write it in the URL, ?region=eu-central-1"),
        ),
        _ if why.contains(BAD_REQUEST) => (
            ErrorKind::Config,
            format!("{place} refuses the request: check region, endpoint and credentials"),
        ),
        _ if is_busy(error) => (
            ErrorKind::Unreachable,
            format!(
                "{place} is busy, or not there for the moment: try later; where many want one lock, use another"
            ),
        ),
        _ => return unreachable(url, why),
    };
    Error::new(kind, what).because(shown(&why))
}

/// It writes whatever the condition says.
pub(super) fn careless(url: &ObjectsUrl, what: &str) -> Error {
    let what = format!(
        "{} cannot keep locks: {what}. Two could hold. Use an object store that does what If-None-Match and \
         If-Match say, and no proxy before it that leaves them out",
        url.place()
    );
    Error::new(ErrorKind::Config, what)
}

/// In one line, without what is in an answer's page.
pub(super) fn shown(said: &str) -> String {
    let line: String = said.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    line.chars().take(240).collect()
}

#[cfg(all(test, feature = "s3"))]
mod tests {
    use super::*;

    fn generic(source: &str) -> Driver {
        Driver::Generic { store: "S3", source: source.into() }
    }

    #[test]
    fn s94_each_fault_is_one_line_that_says_what_to_do() {
        let denied = Driver::PermissionDenied { path: "k".into(), source: "403 Forbidden".into() };
        let missing = Driver::NotFound { path: "k".into(), source: "404\nNoSuchBucket".into() };
        for (error, kind, says) in [
            (denied, ErrorKind::Denied, "s3:ListBucket"),
            (missing, ErrorKind::Config, "there is no s3://b"),
            (generic("Received redirect without LOCATION"), ErrorKind::Config, "?region="),
            (
                generic("Server returned non-2xx status code: 400: x"),
                ErrorKind::Config,
                "check region",
            ),
            (
                generic("status code: 503: SlowDown\n<xml>"),
                ErrorKind::Unreachable,
                "is busy, or not there",
            ),
            (generic("status code: 429: x"), ErrorKind::Unreachable, "is busy, or not there"),
            (generic("connection refused"), ErrorKind::Unreachable, "does not answer"),
        ] {
            let told = of(&ObjectsUrl::parse("s3://b").unwrap(), &error);
            assert_eq!(told.kind(), kind, "{told}");
            let text = told.to_string();
            assert!(text.contains(says) && text.lines().count() == 1, "{text}");
        }
    }
}
