//! What goes wrong on the way to NATS, in words that say what to do.

use async_nats::jetstream;
use async_nats::{ConnectError, ConnectErrorKind};
use leasehold_core::{Error, ErrorKind};

/// By JetStream's numbers: what it does not find, what is not as it was expected to be, what is full.
const NO_STREAM: u64 = 10_059;
const NOT_ENABLED: [u64; 2] = [10_039, 10_076];
const WRONG_SEQUENCE: [u64; 2] = [10_071, 10_164];
const FULL: [u64; 3] = [10_047, 10_054, 10_077];
const NO_PEERS: [u64; 3] = [10_005, 10_023, 10_074];

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
pub(super) fn refused(servers: &str, error: &jetstream::Error) -> Error {
    let number = error.error_code().0;
    let (kind, what, hint) = if NOT_ENABLED.contains(&number) {
        return no_jetstream(servers);
    } else if FULL.contains(&number) {
        (ErrorKind::Full, "the bucket is full", "raise its max_bytes, or the account's limit")
    } else if NO_PEERS.contains(&number) {
        (
            ErrorKind::Config,
            "the cluster has fewer servers than the bucket needs copies",
            "add replicas=N to the URL, such as ?replicas=1",
        )
    } else if error.code() == 503 || error.code() == 408 || number == NO_STREAM {
        (ErrorKind::Unreachable, NO_LEADER, SEE_STREAM)
    } else {
        (ErrorKind::Corrupt, "JetStream rejected a request", "report this as a bug")
    };
    Error::new(kind, what).with_hint(hint).because(shown(&error.to_string()))
}

fn shown(said: &str) -> String {
    said.chars().filter(|c| !c.is_control()).take(200).collect()
}
