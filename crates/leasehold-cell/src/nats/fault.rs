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
    let what = format!(
        "NATS at {servers} does not answer: check that it runs, and that host and port are right"
    );
    Error::new(ErrorKind::Unreachable, what).because(shown(&why.to_string()))
}

/// Why no connection came about.
pub(super) fn connecting(servers: &str, error: &ConnectError) -> Error {
    let (kind, what) = match error.kind() {
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => (
            ErrorKind::Denied,
            format!(
                "NATS at {servers} refuses who we are: put its user and password, or its token, into the \
                 URL: nats://user:password@host or nats://token@host"
            ),
        ),
        ConnectErrorKind::Tls => (
            ErrorKind::Config,
            format!(
                "there is no TLS with NATS at {servers}: it is begun where the server demands it, and \
                 the authorities are those that this machine trusts"
            ),
        ),
        ConnectErrorKind::TimedOut => {
            return unreachable(servers, "nothing that greets as NATS does answered in time");
        }
        _ => return unreachable(servers, error),
    };
    Error::new(kind, what).because(shown(&error.to_string()))
}

/// JetStream is not to be had.
pub(super) fn no_jetstream(servers: &str) -> Error {
    let what = format!(
        "NATS at {servers} keeps nothing for this user: JetStream is off, there or for the account. Start \
         the server with -js (jetstream {{}} in its file), or allow it for the account; at a leaf node, name its \
         domain in the URL, ?domain=hub"
    );
    Error::new(ErrorKind::Config, what)
}

/// The user may not do this.
pub(super) fn denied(bucket: &str, violation: &str) -> Error {
    let what = format!(
        "this user of NATS may not use the bucket: allow it to publish on $KV.{bucket}.>, \
         $JS.API.STREAM.INFO.KV_{bucket}, $JS.API.STREAM.MSG.GET.KV_{bucket} and leasehold.{bucket}.>, and \
         to subscribe to _INBOX.> and leasehold.{bucket}.>"
    );
    Error::new(ErrorKind::Denied, what).because(shown(violation))
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
    let (kind, what) = if NOT_ENABLED.contains(&number) {
        return no_jetstream(servers);
    } else if FULL.contains(&number) {
        (
            ErrorKind::Full,
            "the bucket takes no more: raise its max_bytes, or the account's limit".to_owned(),
        )
    } else if NO_PEERS.contains(&number) {
        (
            ErrorKind::Config,
            "the cluster has too few servers for so many copies: give the number in the URL, ?replicas=1"
                .to_owned(),
        )
    } else if error.code() == 503 || error.code() == 408 || number == NO_STREAM {
        (
            ErrorKind::Unreachable,
            "the bucket has no leader now, or is gone: see nats stream info".to_owned(),
        )
    } else {
        (ErrorKind::Corrupt, "JetStream refused a request of leasehold's: report this".to_owned())
    };
    Error::new(kind, what).because(shown(&error.to_string()))
}

fn shown(said: &str) -> String {
    said.chars().filter(|c| !c.is_control()).take(200).collect()
}
