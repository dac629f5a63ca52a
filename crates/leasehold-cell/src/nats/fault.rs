//! Errors of NATS, with hints.

use async_nats::jetstream;
use async_nats::{ConnectError, ConnectErrorKind};
use leasehold_core::{Error, ErrorKind};

use crate::cells::Answer;

/// JetStream's error numbers for a missing stream and for an unexpected last sequence.
const NO_STREAM: u64 = 10_059;
const WRONG_SEQUENCE: u64 = 10_071;
/// JetStream's error number for a write to a key with another write in progress.
const WRITE_UNDER_WAY: u64 = 10_164;

/// The operation that JetStream refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    /// Finding or creating the bucket when a client connects.
    Connects,
    /// Reading or writing a value. A refusal may be temporary, because the operation was possible
    /// before.
    Asks,
}

/// The meaning of a JetStream error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// JetStream is disabled, or has not started yet on a server.
    Off,
    /// The disk, the memory, the bucket or the account is full.
    Full,
    /// There are too few servers for the number of replicas.
    Few,
    /// Temporary: a leader is being elected, a server is starting, or it is overloaded.
    Passing,
    /// The bucket's settings do not allow the operation.
    Settings,
}

/// The classes of JetStream's error numbers. Other numbers are classified by their code. Unknown
/// errors are treated as temporary, so the request is repeated and the error is shown.
const NUMBERS: &[(Class, &[u64])] = &[
    (Class::Off, &[10_035, 10_039, 10_076]),
    (
        Class::Full,
        &[10_002, 10_023, 10_026, 10_027, 10_028, 10_047, 10_053, 10_054, 10_077, 10_122],
    ),
    (Class::Few, &[10_005, 10_010, 10_011, 10_074]),
    (
        Class::Passing,
        &[
            10_004, 10_006, 10_007, 10_008, 10_009, 10_041, 10_048, 10_049, 10_051, NO_STREAM,
            10_063, 10_069, 10_118, 10_167,
        ],
    ),
    (
        Class::Settings,
        &[
            10_036, 10_052, 10_056, 10_057, 10_058, 10_060, 10_061, 10_065, 10_109, 10_110, 10_111,
            10_165, 10_166,
        ],
    ),
];

fn class(number: u64, code: usize, doing: Doing) -> Class {
    // JetStream also uses this number if it cannot place that many replicas.
    if doing == Doing::Connects && number == 10_023 {
        return Class::Few;
    }
    let known = NUMBERS.iter().find(|(_, numbers)| numbers.contains(&number));
    match (known, code) {
        (Some((class, _)), _) => *class,
        (None, 401 | 403) => Class::Settings,
        (None, _) => Class::Passing,
    }
}

/// Returns the error for servers that did not reply in time.
pub(super) fn unreachable(servers: &str, why: impl ToString) -> Error {
    let what = format!("NATS at {servers} does not respond");
    let hint = "check that it is running, and check the host and port in the URL";
    Error::new(ErrorKind::Unreachable, what).with_hint(hint).with_source(shown(&why.to_string()))
}

/// Returns the error for a failed connection.
pub(super) fn connecting(servers: &str, error: &ConnectError) -> Error {
    let message = error.to_string();
    let (kind, what, hint) = match error.kind() {
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => (
            ErrorKind::Denied,
            format!("NATS at {servers} rejected the credentials"),
            "use nats://user:password@host or nats://token@host",
        ),
        // rustls reports both problems as text only.
        _ if message.contains("received fatal alert") => (
            ErrorKind::Denied,
            format!("NATS at {servers} rejected the client's certificate, or requires one"),
            "add cert=FILE&key=FILE to the URL: PEM files of a client certificate, signed by an \
             authority that the server trusts, and its key",
        ),
        ConnectErrorKind::Tls => certificates(servers),
        _ if message.contains("invalid peer certificate") => certificates(servers),
        _ if message.contains("received corrupt message") => (
            ErrorKind::Config,
            format!("NATS at {servers} does not use TLS"),
            "enable tls {} in the server's configuration, or use nats: without ca= and cert=",
        ),
        ConnectErrorKind::TimedOut => {
            return unreachable(servers, "no NATS greeting in time");
        }
        _ => return unreachable(servers, error),
    };
    Error::new(kind, what).with_hint(hint).with_source(shown(&message))
}

fn certificates(servers: &str) -> (ErrorKind, String, &'static str) {
    (
        ErrorKind::Config,
        format!("the TLS handshake with NATS at {servers} failed"),
        "install the server's certificate authority in this machine's trust store, or add ca=FILE \
         to the URL; cert= and key= must name a certificate and its private key",
    )
}

/// Returns the error for a server without JetStream.
pub(super) fn no_jetstream(servers: &str) -> Error {
    let what = format!("JetStream is disabled on NATS at {servers}, or for this account");
    let hint = "start the server with -js (jetstream {} in its configuration file), or enable \
                JetStream for the account; on a leaf node, add ?domain=NAME to the URL";
    Error::new(ErrorKind::Config, what).with_hint(hint)
}

pub(super) const NO_LEADER: &str = "the bucket has no leader, or was deleted";
pub(super) const SEE_STREAM: &str = "retry; if it persists, run `nats stream info KV_BUCKET`";

/// Returns the error for a user without permission.
pub(super) fn denied(bucket: &str, violation: &str) -> Error {
    let what = format!("this NATS user may not use the bucket {bucket:?}");
    let hint = format!(
        "allow it to publish on $KV.{bucket}.>, $JS.API.STREAM.INFO.KV_{bucket}, \
         $JS.API.STREAM.MSG.GET.KV_{bucket} and leasehold.{bucket}.>, and to subscribe to \
         _INBOX.> and leasehold.{bucket}.>"
    );
    Error::new(ErrorKind::Denied, what).with_hint(hint).with_source(shown(violation))
}

/// Returns the answer to a write that JetStream refused because the value has changed or is being
/// changed. Other errors return `None`.
///
/// If another write of the value is in progress, the answer is [`Answer::InDoubt`]. That write may
/// be our own, because a server that reconnects can pass on a request twice.
pub(super) fn refusal(error: &jetstream::ErrorCode) -> Option<Answer> {
    match error.0 {
        WRONG_SEQUENCE => Some(Answer::Refused),
        WRITE_UNDER_WAY => Some(Answer::InDoubt),
        _ => None,
    }
}

/// Returns whether the error means that the stream does not exist.
pub(super) fn is_no_stream(error: &jetstream::ErrorCode) -> bool {
    error.0 == NO_STREAM
}

/// Returns the error for a request that JetStream refused.
pub(super) fn refused(servers: &str, error: &jetstream::Error, doing: Doing) -> Error {
    let (number, code) = (error.error_code().0, error.code());
    let (kind, what, hint) = match class(number, code, doing) {
        Class::Off if doing == Doing::Connects => return no_jetstream(servers),
        Class::Off => (
            ErrorKind::Unreachable,
            "JetStream is disabled on the NATS server",
            "see the server's log",
        ),
        Class::Full => (
            ErrorKind::Full,
            "the bucket is full",
            "raise its max_bytes, the account's limits or the servers' max_file_store",
        ),
        Class::Few if doing == Doing::Connects => (
            ErrorKind::Config,
            "the cluster has too few servers for the bucket's replicas, or their disks are full",
            "add servers or disk space, or add replicas=N to the URL, such as ?replicas=1",
        ),
        Class::Settings => (
            ErrorKind::Config,
            "the bucket's settings or the account do not allow this",
            "run leasehold doctor",
        ),
        Class::Few | Class::Passing => (ErrorKind::Unreachable, NO_LEADER, SEE_STREAM),
    };
    Error::new(kind, what).with_hint(hint).with_source(shown(&error.to_string()))
}

fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(code: usize, number: u64, doing: Doing) -> Error {
        let body = format!(r#"{{"code":{code},"err_code":{number},"description":"said"}}"#);
        let error: jetstream::Error = serde_json::from_str(&body).unwrap();
        refused("h:4222", &error, doing)
    }

    #[test]
    fn write_refused_during_a_concurrent_write_is_in_doubt() {
        let refusal = |number: u64| {
            let body = format!(r#"{{"code":400,"err_code":{number},"description":"said"}}"#);
            let error: jetstream::Error = serde_json::from_str(&body).unwrap();
            refusal(&error.error_code())
        };
        assert_eq!(refusal(10_071), Some(Answer::Refused));
        assert_eq!(refusal(10_164), Some(Answer::InDoubt));
        assert_eq!(refusal(10_077), None);
    }

    /// Waiters, elections and the cleanup continue after temporary errors.
    #[test]
    fn jetstream_error_codes_map_to_the_right_kind() {
        use Doing::{Asks, Connects};
        for (code, number, doing, kind, says) in [
            (503, 10_023, Asks, ErrorKind::Full, "max_file_store"),
            (503, 10_023, Connects, ErrorKind::Config, "too few servers"),
            (400, 10_002, Asks, ErrorKind::Full, "account"),
            (500, 10_028, Asks, ErrorKind::Full, "is full"),
            (500, 10_047, Asks, ErrorKind::Full, "is full"),
            (503, 10_077, Asks, ErrorKind::Full, "max_bytes"),
            (429, 10_167, Asks, ErrorKind::Unreachable, "no leader"),
            (503, 10_008, Asks, ErrorKind::Unreachable, "no leader"),
            (500, 10_009, Asks, ErrorKind::Unreachable, "no leader"),
            (404, 10_059, Asks, ErrorKind::Unreachable, "no leader"),
            (500, 10_118, Asks, ErrorKind::Unreachable, "no leader"),
            (503, 10_039, Asks, ErrorKind::Unreachable, "JetStream is disabled"),
            (503, 10_039, Connects, ErrorKind::Config, "-js"),
            (400, 10_074, Connects, ErrorKind::Config, "too few servers"),
            (400, 10_074, Asks, ErrorKind::Unreachable, "no leader"),
            (400, 10_166, Asks, ErrorKind::Config, "doctor"),
            (400, 10_109, Asks, ErrorKind::Config, "doctor"),
            // An error of a later version of NATS.
            (500, 19_999, Asks, ErrorKind::Unreachable, "said"),
            (400, 19_998, Asks, ErrorKind::Unreachable, "19998"),
        ] {
            let error = error_of(code, number, doing);
            assert_eq!(error.kind(), kind, "{number}: {error}");
            assert!(format!("{error:#}").contains(says), "{number}: {error:#}");
        }
        let mut all: Vec<u64> =
            NUMBERS.iter().flat_map(|(_, numbers)| numbers.iter().copied()).collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count, "an error code is in two rows");
    }
}
