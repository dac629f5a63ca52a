//! What goes wrong on the way to NATS, in words that say what to do.

use async_nats::jetstream;
use async_nats::{ConnectError, ConnectErrorKind};
use leasehold_core::{Error, ErrorKind};

/// By JetStream's numbers: what it does not find, and what is not as it was expected to be.
const NO_STREAM: u64 = 10_059;
const WRONG_SEQUENCE: [u64; 2] = [10_071, 10_164];

/// What was asked for as JetStream refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    /// The bucket is looked for or made, as a client connects.
    Connects,
    /// A value is read or written: what refuses that may pass, for it was possible before.
    Asks,
}

/// What an error of JetStream's means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// JetStream is off, or a server has not begun with it.
    Off,
    /// Disk, memory, the bucket or the account has no room.
    Full,
    /// There are too few servers for so many copies.
    Few,
    /// A leader is elected, a server starts or has too much to do.
    Passing,
    /// The bucket's settings do not allow it.
    Settings,
}

/// By JetStream's numbers. What is not here is judged by its code, and what is new is passing: it is asked again, and
/// shown.
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
    // That there is no room for so many copies is said by the same number.
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

/// Nobody answers there, or not in time.
pub(super) fn unreachable(servers: &str, why: impl ToString) -> Error {
    let what = format!("NATS at {servers} does not respond");
    let hint = "check that it is running, and host and port in the URL";
    Error::new(ErrorKind::Unreachable, what).with_hint(hint).because(shown(&why.to_string()))
}

/// Why no connection came about.
pub(super) fn connecting(servers: &str, error: &ConnectError) -> Error {
    let (kind, what, hint) = match error.kind() {
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => (
            ErrorKind::Denied,
            format!("NATS at {servers} rejected the credentials"),
            "use nats://user:password@host or nats://token@host",
        ),
        ConnectErrorKind::Tls => (
            ErrorKind::Config,
            format!("the TLS handshake with NATS at {servers} failed"),
            "install the server's certificate authority in this machine's trust store",
        ),
        ConnectErrorKind::TimedOut => {
            return unreachable(servers, "no NATS greeting in time");
        }
        _ => return unreachable(servers, error),
    };
    Error::new(kind, what).with_hint(hint).because(shown(&error.to_string()))
}

/// JetStream is not to be had.
pub(super) fn no_jetstream(servers: &str) -> Error {
    let what = format!("JetStream is disabled on NATS at {servers}, or for this account");
    let hint = "start the server with -js (jetstream {} in its configuration file), or enable \
                JetStream for the account; on a leaf node, add ?domain=NAME to the URL";
    Error::new(ErrorKind::Config, what).with_hint(hint)
}

pub(super) const NO_LEADER: &str = "the bucket has no leader, or was deleted";
pub(super) const SEE_STREAM: &str = "retry; if it persists, run `nats stream info KV_BUCKET`";

/// The user may not do this.
pub(super) fn denied(bucket: &str, violation: &str) -> Error {
    let what = format!("this NATS user may not use the bucket {bucket:?}");
    let hint = format!(
        "allow it to publish on $KV.{bucket}.>, $JS.API.STREAM.INFO.KV_{bucket}, \
         $JS.API.STREAM.MSG.GET.KV_{bucket} and leasehold.{bucket}.>, and to subscribe to \
         _INBOX.> and leasehold.{bucket}.>"
    );
    Error::new(ErrorKind::Denied, what).with_hint(hint).because(shown(violation))
}

/// Whether JetStream says that the value is not what was read.
pub(super) fn is_refused(error: &jetstream::ErrorCode) -> bool {
    WRONG_SEQUENCE.contains(&error.0)
}

/// Whether JetStream says that there is no such stream.
pub(super) fn is_no_stream(error: &jetstream::ErrorCode) -> bool {
    error.0 == NO_STREAM
}

/// What JetStream refuses, in its words.
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
            "the cluster has fewer servers than the bucket needs copies, or no room on them",
            "add servers or room, or add replicas=N to the URL, such as ?replicas=1",
        ),
        Class::Settings => (
            ErrorKind::Config,
            "the bucket's settings or the account do not allow this",
            "run leasehold doctor",
        ),
        Class::Few | Class::Passing => (ErrorKind::Unreachable, NO_LEADER, SEE_STREAM),
    };
    Error::new(kind, what).with_hint(hint).because(shown(&error.to_string()))
}

fn shown(said: &str) -> String {
    said.chars().filter(|c| !c.is_control()).take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(code: usize, number: u64, doing: Doing) -> Error {
        let said = format!(r#"{{"code":{code},"err_code":{number},"description":"said"}}"#);
        let error: jetstream::Error = serde_json::from_str(&said).unwrap();
        refused("h:4222", &error, doing)
    }

    /// A waiter, an election and the cleanup go on after what passes.
    #[test]
    fn each_number_of_jetstream_is_told_by_what_follows_from_it() {
        use Doing::{Asks, Connects};
        for (code, number, doing, kind, says) in [
            (503, 10_023, Asks, ErrorKind::Full, "max_file_store"),
            (503, 10_023, Connects, ErrorKind::Config, "fewer servers"),
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
            (400, 10_074, Connects, ErrorKind::Config, "fewer servers"),
            (400, 10_074, Asks, ErrorKind::Unreachable, "no leader"),
            (400, 10_166, Asks, ErrorKind::Config, "doctor"),
            (400, 10_109, Asks, ErrorKind::Config, "doctor"),
            // Of a later version.
            (500, 19_999, Asks, ErrorKind::Unreachable, "said"),
            (400, 19_998, Asks, ErrorKind::Unreachable, "19998"),
        ] {
            let told = told(code, number, doing);
            assert_eq!(told.kind(), kind, "{number}: {told}");
            assert!(format!("{told:#}").contains(says), "{number}: {told:#}");
        }
        let mut all: Vec<u64> =
            NUMBERS.iter().flat_map(|(_, numbers)| numbers.iter().copied()).collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count, "a number is in two rows");
    }
}
