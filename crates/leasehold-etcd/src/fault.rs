//! Maps etcd's errors to failures. They determine whether to try another member, and carry a hint
//! for the user.

use tonic::{Code, Status};

use leasehold_core::{Error, ErrorKind};

/// The error for keys that this user may not access, before the key prefix is known.
const CLOSED: &str = "this etcd user needs read and write access to leasehold's keys";

/// Adds the key prefix to an error for keys that this user may not access.
pub(super) fn closed(failure: Failure, prefix: &str) -> Failure {
    match failure {
        Failure::Final(error) if error.to_string().contains(CLOSED) => {
            let prefix: String = prefix.chars().take(80).collect();
            let what = format!(
                "this etcd user needs read and write access to the keys that begin with {prefix:?}"
            );
            let hint =
                format!("run `etcdctl role grant-permission ROLE readwrite {prefix:?} --prefix`");
            let denied = Error::new(ErrorKind::Denied, what).with_hint(hint);
            Failure::Final(match std::error::Error::source(&error) {
                Some(why) => denied.with_source(why.to_string()),
                None => denied,
            })
        }
        other => other,
    }
}

/// Errors of a member that is reachable and has a leader, but is overloaded.
const SLOW: [&str; 3] = [
    "etcdserver: request timed out",
    "etcdserver: request timed out, waiting for the applied index took too long",
    "etcdserver: too many requests",
];

/// A request that failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// This member does not respond, or cannot execute the request, but another member may. The
    /// request may have been executed.
    Passing(Error),
    /// This member is overloaded. The request may have been executed.
    Slow(Error),
    /// The lease in the request has expired.
    NoLease,
    /// The user's auth token is not valid any more. The request was not executed.
    Token(Error),
    /// The request would fail again if it were repeated.
    Final(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Passing(error)
            | Failure::Slow(error)
            | Failure::Token(error)
            | Failure::Final(error) => error,
            Failure::NoLease => {
                let what = "the etcd lease of this claim has expired";
                Self::new(ErrorKind::Unreachable, what).with_hint("retry")
            }
        }
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let text = status.message();
        let is_etcds = text.starts_with("etcdserver:") || text.starts_with("auth:");
        let last = |kind, what: &str, hint: &str| {
            Self::Final(Error::new(kind, what).with_hint(hint).with_source(shown(&status)))
        };
        match status.code() {
            Code::NotFound if text.contains("lease not found") => Self::NoLease,
            Code::Unauthenticated => Self::Token(
                Error::new(ErrorKind::Denied, "etcd rejected this user's auth token")
                    .with_hint("check the user name and password in the URL"),
            ),
            Code::InvalidArgument if text.contains("revision of auth store is old") => {
                let what = "etcd's users or roles have just changed";
                Self::Token(Error::new(ErrorKind::Denied, what).with_hint("retry"))
            }
            Code::InvalidArgument if text.contains("authentication failed") => last(
                ErrorKind::Denied,
                "etcd rejected the user name or the password",
                "check the URL: etcd://user:password@host",
            ),
            // Either authentication was enabled after the client found it disabled, or the URL has
            // no user.
            Code::InvalidArgument if text.contains("user name is empty") => {
                let error = Error::new(ErrorKind::Denied, "etcd requires a user name").with_hint(
                    "put the user name and password into the URL: etcd://user:password@host",
                );
                Self::Token(error.with_source(shown(&status)))
            }
            Code::PermissionDenied => last(
                ErrorKind::Denied,
                CLOSED,
                "run `etcdctl role grant-permission ROLE readwrite PREFIX --prefix`",
            ),
            Code::ResourceExhausted if text.contains("space exceeded") => last(
                ErrorKind::Full,
                "etcd's database is full",
                "run `etcdctl compact REVISION`, `etcdctl defrag --cluster` and `etcdctl alarm \
                 disarm`, or raise --quota-backend-bytes",
            ),
            Code::OutOfRange if text.contains("TTL") => last(
                ErrorKind::Config,
                "the lease is longer than etcd allows",
                "use a shorter lease",
            ),
            Code::Unimplemented => last(
                ErrorKind::Config,
                "this server does not support etcd's v3 API",
                "check that the URL points to etcd 3.4 or later",
            ),
            Code::DataLoss => last(
                ErrorKind::Corrupt,
                "etcd reports that its data is damaged",
                "run `etcdctl alarm list`, and replace the damaged member",
            ),
            // A learner (etcd 3.6) or a member that has just lost its leadership refuses the
            // request.
            Code::FailedPrecondition if text.contains("learner") || text.contains("leader") => {
                Self::Passing(unreachable(shown(&status)))
            }
            Code::Unavailable | Code::ResourceExhausted if SLOW.contains(&text) => {
                let error = Error::new(ErrorKind::Unreachable, "etcd is overloaded")
                    .with_hint("reduce its load, or give it faster disks or CPUs");
                Self::Slow(error.with_source(shown(&status)))
            }
            Code::Unavailable
            | Code::DeadlineExceeded
            | Code::Cancelled
            | Code::Aborted
            | Code::ResourceExhausted => Self::Passing(unreachable(shown(&status))),
            Code::Unknown | Code::Internal if !is_etcds => {
                Self::Passing(unreachable(shown(&status)))
            }
            _ => last(ErrorKind::Corrupt, "etcd rejected a request", "report this as a bug"),
        }
    }
}

/// Returns the error for a cluster in which no member responds.
pub(super) fn unreachable(why: String) -> Error {
    let hint = "check that a majority of the cluster is running, and check the hosts and ports in \
                the URL";
    Error::new(ErrorKind::Unreachable, "no etcd member responds").with_hint(hint).with_source(why)
}

/// Adds a hint about client certificates to the error of [`unreachable`]. If a member requires
/// another client certificate, it only closes the connection, so the client sees no other error.
pub(super) fn over_tls(error: Error) -> Error {
    if error.kind() != ErrorKind::Unreachable {
        return error;
    }
    let hint = "check that a majority of the cluster is running, and check the hosts and ports in \
                the URL; if etcd requires client certificates, set cert= and key= in the URL, \
                signed by an authority that etcd trusts";
    let refused = Error::new(ErrorKind::Unreachable, "no etcd member responds over TLS");
    let refused = refused.with_hint(hint);
    match std::error::Error::source(&error) {
        Some(why) => refused.with_source(why.to_string()),
        None => refused,
    }
}

/// Returns the deepest cause, on one line.
fn shown(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = std::error::Error::source(status);
    while let Some(cause) = source {
        text = cause.to_string();
        source = cause.source();
    }
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

/// Returns the deepest cause, on one line.
pub(super) fn cause(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string().chars().filter(|c| !c.is_control()).take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    // F47
    #[test]
    fn request_refused_by_a_learner_is_tried_on_another_member() {
        for (code, text) in [
            (Code::Unavailable, "etcdserver: rpc not supported for learner"),
            (Code::FailedPrecondition, "etcdserver: rpc not supported for learner"),
            (Code::FailedPrecondition, "etcdserver: not leader"),
        ] {
            let failure = Failure::from(Status::new(code, text));
            assert!(matches!(failure, Failure::Passing(_)), "{text}: {failure:?}");
        }
    }

    // S92
    #[test]
    fn slow_member_is_not_unreachable() {
        for (code, text, slow) in [
            (Code::Unavailable, SLOW[1], true),
            (Code::ResourceExhausted, SLOW[2], true),
            (Code::Unavailable, "etcdserver: no leader", false),
            (
                Code::Unavailable,
                "etcdserver: request timed out, possibly due to connection lost",
                false,
            ),
        ] {
            let failure = Failure::from(Status::new(code, text));
            assert_eq!(matches!(failure, Failure::Slow(_)), slow, "{text}: {failure:?}");
            assert_eq!(matches!(failure, Failure::Passing(_)), !slow, "{text}: {failure:?}");
        }
    }

    /// Waiters and elections continue after transient errors, and end at all others. Requests that
    /// need another token are repeated before that.
    #[test]
    fn etcd_errors_map_to_the_right_kind() {
        for (code, text, kind) in [
            (Code::Unavailable, "etcdserver: leader changed", ErrorKind::Unreachable),
            (Code::Unavailable, "etcdserver: no leader", ErrorKind::Unreachable),
            (Code::Unavailable, "etcdserver: server stopped", ErrorKind::Unreachable),
            (Code::Unavailable, "etcdserver: unhealthy cluster", ErrorKind::Unreachable),
            (Code::Unavailable, "etcdserver: request timed out", ErrorKind::Unreachable),
            (Code::Unavailable, "transport is closing", ErrorKind::Unreachable),
            (Code::ResourceExhausted, "etcdserver: too many requests", ErrorKind::Unreachable),
            (Code::ResourceExhausted, "grpc: received message too large", ErrorKind::Unreachable),
            (Code::DeadlineExceeded, "context deadline exceeded", ErrorKind::Unreachable),
            (Code::Cancelled, "context canceled", ErrorKind::Unreachable),
            (Code::Unknown, "raft proposal dropped", ErrorKind::Unreachable),
            (Code::Internal, "h2 protocol error", ErrorKind::Unreachable),
            (Code::NotFound, "etcdserver: requested lease not found", ErrorKind::Unreachable),
            (Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded", ErrorKind::Full),
            (Code::PermissionDenied, "etcdserver: permission denied", ErrorKind::Denied),
            (Code::OutOfRange, "etcdserver: too large lease TTL", ErrorKind::Config),
            (Code::Unimplemented, "unknown service etcdserverpb.KV", ErrorKind::Config),
            (Code::DataLoss, "etcdserver: corrupt cluster", ErrorKind::Corrupt),
        ] {
            let error = Error::from(Failure::from(Status::new(code, text)));
            assert_eq!(error.kind(), kind, "{text}: {error}");
        }
        for (code, text) in [
            (Code::Unauthenticated, "etcdserver: invalid auth token"),
            (Code::InvalidArgument, "etcdserver: revision of auth store is old"),
        ] {
            let failure = Failure::from(Status::new(code, text));
            assert!(matches!(failure, Failure::Token(_)), "{text}: {failure:?}");
        }
    }

    // F12
    #[test]
    fn request_without_auth_token_is_retried_with_one() {
        let failure = Failure::from(Status::invalid_argument("etcdserver: user name is empty"));
        let Failure::Token(error) = failure else { panic!("{failure:?}") };
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(
            format!("{error:#}").contains("put the user name and password into the URL"),
            "{error}"
        );
    }
}
