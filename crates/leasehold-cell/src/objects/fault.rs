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
    let what = format!("{} does not respond", url.place());
    let hint =
        format!("check endpoint and network, and the credentials: {}", url.cloud.credentials());
    Error::new(ErrorKind::Unreachable, what).with_hint(hint).because(shown(&why.to_string()))
}

/// What the driver tells.
pub(super) fn of(url: &ObjectsUrl, error: &Driver) -> Error {
    let (why, place) = (error.to_string(), url.place());
    let (kind, what, hint) = match error {
        Driver::NotFound { .. } => (
            ErrorKind::Config,
            format!("{place} does not exist"),
            "create it, or correct its name in the URL".to_owned(),
        ),
        Driver::PermissionDenied { .. } | Driver::Unauthenticated { .. } => (
            ErrorKind::Denied,
            format!("these credentials may not use {place}"),
            format!("allow {}", url.cloud.rights()),
        ),
        Driver::NotImplemented { .. } | Driver::NotSupported { .. } => (
            ErrorKind::Config,
            format!("{place} does not support conditional writes"),
            CONDITIONAL.to_owned(),
        ),
        _ if why.contains(REDIRECT) => (
            ErrorKind::Config,
            format!("{place} is in another region"),
            "name the region in the URL: ?region=eu-central-1".to_owned(),
        ),
        _ if why.contains(BAD_REQUEST) => (
            ErrorKind::Config,
            format!("{place} rejected the request"),
            "check region, endpoint and credentials".to_owned(),
        ),
        _ if is_busy(error) => (
            ErrorKind::Unreachable,
            format!("{place} is overloaded or temporarily unavailable"),
            "retry later; if many clients want the same lock, use another store, such as redis:"
                .to_owned(),
        ),
        _ => return unreachable(url, why),
    };
    Error::new(kind, what).with_hint(hint).because(shown(&why))
}

/// What a store must be able to do.
pub(super) const CONDITIONAL: &str =
    "use an object store that supports If-None-Match and If-Match, without a proxy that drops them";

/// It writes whatever the condition says.
pub(super) fn careless(url: &ObjectsUrl, what: &str) -> Error {
    let what = format!(
        "{} cannot store locks: {what}, so two clients could hold the same lock",
        url.place()
    );
    Error::new(ErrorKind::Config, what).with_hint(CONDITIONAL)
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
            (missing, ErrorKind::Config, "s3://b does not exist"),
            (generic("Received redirect without LOCATION"), ErrorKind::Config, "?region="),
            (
                generic("Server returned non-2xx status code: 400: x"),
                ErrorKind::Config,
                "check region",
            ),
            (
                generic("status code: 503: SlowDown\n<xml>"),
                ErrorKind::Unreachable,
                "is overloaded or temporarily unavailable",
            ),
            (
                generic("status code: 429: x"),
                ErrorKind::Unreachable,
                "is overloaded or temporarily unavailable",
            ),
            (generic("connection refused"), ErrorKind::Unreachable, "does not respond"),
        ] {
            let told = of(&ObjectsUrl::parse("s3://b").unwrap(), &error);
            assert_eq!(told.kind(), kind, "{told}");
            let text = format!("{told:#}");
            assert!(text.contains(says) && text.lines().count() == 1, "{text}");
        }
    }
}
