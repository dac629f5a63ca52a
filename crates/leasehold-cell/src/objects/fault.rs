//! Errors of object stores, with hints.

use leasehold_core::{Error, ErrorKind};
use object_store::Error as Driver;

use super::url::ObjectsUrl;

/// The driver's error text if the server redirects the request to another location.
const REDIRECT: &str = "Received redirect";
/// A part of the URL of the machine's metadata service, where the driver looks for credentials
/// last.
const METADATA: &str = "/latest/api/token";

/// The meaning of an error code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// The server is overloaded, and clients must wait.
    Busy,
    /// The server is temporarily unavailable, or did not get the whole request in time.
    Passing,
    /// The bucket's quota is used up, or the server's disks are full.
    Full,
    /// The clocks of this machine and the servers are too far apart, or this machine was suspended.
    Clock,
    /// The credentials have expired. New ones must be fetched or set.
    Expired,
    /// The credentials lack a permission.
    Denied,
    /// The bucket does not exist.
    Missing,
    /// The bucket requires a checksum or encryption that our requests do not have.
    Demands,
    /// The server considers the request invalid.
    Wrong,
    /// The server does not support the operation.
    Unable,
}

/// The classes of the error codes of Amazon and compatible servers, of Google's XML API, and of
/// Azure. Other errors are classified by status. Unknown errors are treated as temporary, so the
/// request is repeated and the error is shown.
const CODES: &[(Class, &[&str])] = &[
    (
        Class::Busy,
        &[
            "SlowDown",
            "ServiceUnavailable",
            "Throttling",
            "ThrottlingException",
            "RequestLimitExceeded",
            "BandwidthLimitExceeded",
            "TooManyRequests",
            "ServerBusy",
            "OperationTimedOut",
            "rateLimitExceeded",
        ],
    ),
    (
        Class::Passing,
        &[
            "InternalError",
            "InternalServerError",
            "RequestTimeout",
            "RequestTimeoutException",
            "IncompleteBody",
            "BadDigest",
            "ConditionalRequestConflict",
            "OperationAborted",
            "NotReady",
            "ClientDisconnected",
            "BackendError",
            "BucketAlreadyOwnedByYou",
            "LeaseIdMissing",
            "AccountBeingCreated",
            "ContainerBeingDeleted",
            "PreconditionFailed",
            "XMinioServerNotInitialized",
            "XMinioReadQuorum",
            "XMinioWriteQuorum",
        ],
    ),
    (Class::Full, &["QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull"]),
    (Class::Clock, &["RequestTimeTooSkewed", "RequestExpired"]),
    (
        Class::Expired,
        &["ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "AuthenticationExpired"],
    ),
    (
        Class::Denied,
        &[
            "AccessDenied",
            "AllAccessDisabled",
            "AccountProblem",
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "InvalidToken",
            "InvalidSecurity",
            "NotSignedUp",
            "AuthenticationFailed",
            "AuthorizationFailure",
            "AuthorizationPermissionMismatch",
            "InsufficientAccountPermissions",
            "AccountIsDisabled",
            "Forbidden",
        ],
    ),
    (
        Class::Missing,
        &["NoSuchBucket", "ContainerNotFound", "ResourceNotFound", "ContainerDisabled"],
    ),
    (
        Class::Demands,
        &[
            "MissingUploadObjectWithObjectLockHeaders",
            "Content-MD5 OR x-amz-checksum",
            "ServerSideEncryptionConfigurationNotFoundError",
            "InvalidEncryptionAlgorithmError",
            "KMS.DisabledException",
            "KMS.NotFoundException",
            "KMS.KMSInvalidStateException",
            "MissingSecurityHeader",
        ],
    ),
    (Class::Unable, &["NotImplemented", "MethodNotAllowed", "UnsupportedHeader"]),
];

/// The classes of HTTP statuses, for unknown codes.
const STATUS: &[(Class, &[u16])] = &[
    (Class::Busy, &[429, 503]),
    (
        Class::Passing,
        &[408, 409, 412, 425, 499, 500, 502, 504, 508, 509, 520, 521, 522, 523, 524, 529],
    ),
    (Class::Full, &[507]),
    (Class::Denied, &[401, 403, 407]),
    (Class::Missing, &[404, 410]),
    (Class::Wrong, &[400, 405, 411, 413, 414, 415, 416, 431]),
    (Class::Unable, &[501, 505]),
];

/// Returns the class of an error by the code or status in its text, or `None` if the text is not
/// that of a reply.
pub(super) fn class(error_text: &str) -> Option<Class> {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let names = |code: &str| {
        error_text.match_indices(code).any(|(at, _)| {
            let (before, after) =
                (&error_text.as_bytes()[..at], &error_text.as_bytes()[at + code.len()..]);
            !before.last().is_some_and(|byte| is_word(*byte))
                && !after.first().is_some_and(|byte| is_word(*byte))
        })
    };
    let by_code = CODES.iter().find(|(_, codes)| codes.iter().any(|code| names(code)));
    if let Some((class, _)) = by_code {
        return Some(*class);
    }
    let (_, rest) = error_text.split_once("status code: ")?;
    let status: u16 = rest.get(..3)?.parse().ok()?;
    let by_status = STATUS.iter().find(|(_, all)| all.contains(&status));
    Some(by_status.map_or(Class::Passing, |(class, _)| *class))
}

/// Returns whether the server is overloaded. An immediate retry would make this worse.
pub(super) fn is_busy(error: &Driver) -> bool {
    class(&error.to_string()) == Some(Class::Busy)
}

/// Returns the error for a store that did not reply in time.
pub(super) fn unreachable(url: &ObjectsUrl, why: impl ToString) -> Error {
    let not_read = match url.is_anonymous || url.cloud.has_credentials() {
        true => String::new(),
        false => format!("; {}", url.cloud.not_read()),
    };
    let what = format!("{} does not respond", url.place());
    let hint = format!(
        "check the endpoint, the network and the credentials: {}{not_read}",
        url.cloud.credentials()
    );
    Error::new(ErrorKind::Unreachable, what).with_hint(hint).with_source(shown(&why.to_string()))
}

/// Returns the error for an error of the driver.
pub(super) fn of(url: &ObjectsUrl, error: &Driver) -> Error {
    let (why, place) = (error.to_string(), url.place());
    let class = match (class(&why), error) {
        _ if why.contains(REDIRECT) => {
            let what = format!("{place} is in another region");
            let hint = "name the region in the URL: ?region=eu-central-1";
            return Error::new(ErrorKind::Config, what).with_hint(hint).with_source(shown(&why));
        }
        (Some(class), _) => class,
        (None, Driver::NotFound { .. }) => Class::Missing,
        (None, Driver::PermissionDenied { .. } | Driver::Unauthenticated { .. }) => Class::Denied,
        (None, Driver::NotImplemented { .. } | Driver::NotSupported { .. }) => Class::Unable,
        (None, _) if why.contains(METADATA) => {
            let what = format!("no credentials for {place} were found");
            let hint = format!("{}; {}", url.cloud.credentials(), url.cloud.not_read());
            return Error::new(ErrorKind::Unreachable, what)
                .with_hint(hint)
                .with_source(shown(&why));
        }
        (None, _) => return unreachable(url, why),
    };
    let (kind, what, hint) = match class {
        Class::Busy => (
            ErrorKind::Unreachable,
            format!("{place} is overloaded or temporarily unavailable"),
            "retry later; if many clients want the same lock, use another store, such as redis:"
                .to_owned(),
        ),
        Class::Passing => (
            ErrorKind::Unreachable,
            format!("{place} did not process the request"),
            "retry; see the server's log if this persists".to_owned(),
        ),
        Class::Full => (
            ErrorKind::Full,
            format!("{place} is full"),
            "raise the bucket's quota, or free space on the server".to_owned(),
        ),
        Class::Clock => (
            ErrorKind::Unreachable,
            format!("the clocks of this machine and of {place} are more than 15 minutes apart"),
            "set this machine's clock; if the machine was suspended, retry".to_owned(),
        ),
        Class::Expired => (
            ErrorKind::Unreachable,
            format!("the credentials for {place} have expired"),
            format!("set new credentials: {}", url.cloud.credentials()),
        ),
        Class::Denied => (
            ErrorKind::Denied,
            format!("these credentials may not use {place}"),
            format!("allow {}", url.cloud.rights()),
        ),
        Class::Missing => (
            ErrorKind::Config,
            format!("{place} does not exist"),
            "create it, or correct its name in the URL".to_owned(),
        ),
        Class::Demands => (
            ErrorKind::Config,
            format!(
                "{place} requires a checksum or encryption (Object Lock or the bucket's policy)"
            ),
            format!("set {}, or use another bucket", url.cloud.demands()),
        ),
        Class::Wrong => (
            ErrorKind::Config,
            format!("{place} rejected the request"),
            "check the region, the endpoint and the credentials".to_owned(),
        ),
        Class::Unable => (
            ErrorKind::Config,
            format!("{place} does not support conditional writes"),
            CONDITIONAL.to_owned(),
        ),
    };
    Error::new(kind, what).with_hint(hint).with_source(shown(&why))
}

/// The hint for a store without conditional writes.
pub(super) const CONDITIONAL: &str =
    "use an object store that supports If-None-Match and If-Match, without a proxy that drops them";

/// Returns the error for a store that ignores write conditions.
pub(super) fn careless(url: &ObjectsUrl, what: &str) -> Error {
    let what = format!(
        "{} cannot store locks: {what}, so two clients could hold the same lock",
        url.place()
    );
    Error::new(ErrorKind::Config, what).with_hint(CONDITIONAL)
}

/// Shortens a text and makes it one line.
pub(super) fn shown(text: &str) -> String {
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    line.chars().take(240).collect()
}

#[cfg(all(test, feature = "s3"))]
mod tests {
    use super::*;

    /// Waiters and elections continue after temporary errors, and end after permanent ones.
    #[test]
    fn object_store_error_codes_map_to_the_right_kind() {
        let url = ObjectsUrl::parse("s3://b").unwrap();
        let xml = |status: u16, code: &str| {
            let page = format!("<Error><Code>{code}</Code><Message>m</Message></Error>");
            Driver::Generic {
                store: "S3",
                source: format!("Server returned non-2xx status code: {status}: {page}").into(),
            }
        };
        let denied = |status: u16, code: &str| Driver::PermissionDenied {
            path: "k".into(),
            source: format!("status code: {status}: <Code>{code}</Code>").into(),
        };
        for (error, kind, says) in [
            (xml(400, "RequestTimeout"), ErrorKind::Unreachable, "retry"),
            (denied(403, "RequestTimeTooSkewed"), ErrorKind::Unreachable, "minutes apart"),
            (xml(403, "RequestTimeTooSkewed"), ErrorKind::Unreachable, "minutes apart"),
            (xml(400, "ExpiredToken"), ErrorKind::Unreachable, "have expired"),
            (denied(403, "ExpiredToken"), ErrorKind::Unreachable, "have expired"),
            (xml(400, "TokenRefreshRequired"), ErrorKind::Unreachable, "have expired"),
            (xml(503, "SlowDown"), ErrorKind::Unreachable, "is overloaded"),
            (xml(400, "ThrottlingException"), ErrorKind::Unreachable, "is overloaded"),
            (xml(500, "InternalError"), ErrorKind::Unreachable, "retry"),
            (xml(500, "OperationTimedOut"), ErrorKind::Unreachable, "is overloaded"),
            (xml(403, "QuotaExceeded"), ErrorKind::Full, "quota"),
            (xml(400, "XMinioAdminBucketQuotaExceeded"), ErrorKind::Full, "quota"),
            (xml(507, "AnotherCode"), ErrorKind::Full, "quota"),
            (xml(400, "BadDigest"), ErrorKind::Unreachable, "retry"),
            (xml(409, "OperationAborted"), ErrorKind::Unreachable, "retry"),
            (xml(502, "whatever a proxy says"), ErrorKind::Unreachable, "retry"),
            (xml(599, "an unknown error"), ErrorKind::Unreachable, "retry"),
            (xml(418, "an unknown error"), ErrorKind::Unreachable, "retry"),
            (denied(403, "AccessDenied"), ErrorKind::Denied, "s3:PutObject"),
            (xml(403, "InvalidAccessKeyId"), ErrorKind::Denied, "s3:PutObject"),
            (xml(404, "NoSuchBucket"), ErrorKind::Config, "does not exist"),
            (xml(400, "InvalidArgument"), ErrorKind::Config, "check the region"),
            (xml(501, "NotImplemented"), ErrorKind::Config, "conditional writes"),
            (
                xml(400, "MissingUploadObjectWithObjectLockHeaders"),
                ErrorKind::Config,
                "AWS_CHECKSUM_ALGORITHM=SHA256",
            ),
        ] {
            let mapped = of(&url, &error);
            assert_eq!(mapped.kind(), kind, "{error}: {mapped}");
            assert!(format!("{mapped:#}").contains(says), "{mapped:#}");
        }
        // No code is in two rows, and a code that is part of another word is ignored.
        let all: Vec<&str> = CODES.iter().flat_map(|(_, codes)| codes.iter().copied()).collect();
        for (class, codes) in CODES {
            for code in *codes {
                assert_eq!(all.iter().filter(|other| *other == code).count(), 1, "{code} twice");
                assert_eq!(self::class(&format!("<Code>{code}</Code>")), Some(*class), "{code}");
            }
        }
        assert_eq!(class("status code: 403: NotAccessDeniedAtAll"), Some(Class::Denied));
        assert_eq!(class("connection reset"), None);
    }

    #[test]
    fn missing_credentials_error_names_unsupported_sources() {
        let url = ObjectsUrl::parse("s3://b").unwrap();
        let why =
            "Error performing PUT http://169.254.169.254/latest/api/token: error sending request";
        let message = of(&url, &generic(why)).to_string();
        assert!(message.contains("profiles and SSO are not read"), "{message}");
        assert!(message.contains("aws configure export-credentials --format env"), "{message}");
    }

    fn generic(source: &str) -> Driver {
        Driver::Generic { store: "S3", source: source.into() }
    }

    // S94
    #[test]
    fn each_error_is_one_line_with_a_fix() {
        let denied = Driver::PermissionDenied { path: "k".into(), source: "403 Forbidden".into() };
        let missing = Driver::NotFound { path: "k".into(), source: "404\nNoSuchBucket".into() };
        for (error, kind, says) in [
            (denied, ErrorKind::Denied, "s3:ListBucket"),
            (missing, ErrorKind::Config, "s3://b does not exist"),
            (generic("Received redirect without LOCATION"), ErrorKind::Config, "?region="),
            (
                generic("Server returned non-2xx status code: 400: x"),
                ErrorKind::Config,
                "check the region",
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
            let mapped = of(&ObjectsUrl::parse("s3://b").unwrap(), &error);
            assert_eq!(mapped.kind(), kind, "{mapped}");
            let text = format!("{mapped:#}");
            assert!(text.contains(says) && text.lines().count() == 1, "{text}");
        }
    }
}
