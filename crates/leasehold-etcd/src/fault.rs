//! What etcd's errors mean: whether to ask another member, and one line that says what to do.

use tonic::{Code, Status};

use leasehold_core::{Error, ErrorKind};

/// What is told of keys that our user has no right to, before it is known which.
const CLOSED: &str = "this user of etcd's may not read and write here";

/// Names the keys that we are not let at: those that begin with this.
pub(super) fn closed(failure: Failure, prefix: &str) -> Failure {
    match failure {
        Failure::Final(error) if error.to_string().contains(CLOSED) => {
            let prefix: String = prefix.chars().take(80).collect();
            let what = format!(
                "{CLOSED}: let its role have the keys that begin with {prefix:?} (etcdctl role \
                 grant-permission ROLE readwrite {prefix:?} --prefix)"
            );
            let told = Error::new(ErrorKind::Denied, what);
            Failure::Final(match std::error::Error::source(&error) {
                Some(why) => told.because(why.to_string()),
                None => told,
            })
        }
        other => other,
    }
}

/// What a member says that is there, and has its leader, and cannot keep up.
const SLOW: [&str; 3] = [
    "etcdserver: request timed out",
    "etcdserver: request timed out, waiting for the applied index took too long",
    "etcdserver: too many requests",
];

/// A request that failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// This member does not answer, or cannot: another one may. What was sent may have been done.
    Passing(Error),
    /// This member answered, that it has more to do than it can. What was sent may have been done.
    Slow(Error),
    /// The lease that was named is over.
    NoLease,
    /// Our user's token is not good any more; nothing was done.
    Token(Error),
    /// Asking again does not help.
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
                let what = "etcd ended the lease of this claim: try again";
                Self::new(ErrorKind::Unreachable, what)
            }
        }
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let text = status.message();
        let is_etcds = text.starts_with("etcdserver:") || text.starts_with("auth:");
        let last = |kind, what: &str| Self::Final(Error::new(kind, what).because(shown(&status)));
        match status.code() {
            Code::NotFound if text.contains("lease not found") => Self::NoLease,
            Code::Unauthenticated => Self::Token(Error::new(
                ErrorKind::Denied,
                "etcd does not accept the token of our user: check user and password",
            )),
            Code::InvalidArgument if text.contains("revision of auth store is old") => {
                Self::Token(Error::new(ErrorKind::Denied, "etcd's users changed: try again"))
            }
            Code::InvalidArgument if text.contains("authentication failed") => {
                last(ErrorKind::Denied, "etcd refuses the user or the password: check the URL")
            }
            // Users were enabled after we had learnt that there are none, or we have none to tell.
            Code::InvalidArgument if text.contains("user name is empty") => {
                let what = "this etcd has users: put one into the URL, etcd://user:password@host";
                Self::Token(Error::new(ErrorKind::Denied, what).because(shown(&status)))
            }
            Code::PermissionDenied => last(ErrorKind::Denied, CLOSED),
            Code::ResourceExhausted if text.contains("space exceeded") => last(
                ErrorKind::Full,
                "etcd's database is full: compact and defragment it, then disarm the alarm",
            ),
            Code::OutOfRange if text.contains("TTL") => {
                last(ErrorKind::Config, "etcd grants no lease that long: lease for less")
            }
            Code::Unimplemented => last(
                ErrorKind::Config,
                "this server does not know etcd's v3 API: check the URL (etcd 3.4 or later)",
            ),
            Code::DataLoss => last(ErrorKind::Corrupt, "etcd reports that its data is damaged"),
            // A learner's refusal (etcd 3.6), or one of a member that is just no leader any more.
            Code::FailedPrecondition if text.contains("learner") || text.contains("leader") => {
                Self::Passing(unreachable(shown(&status)))
            }
            Code::Unavailable | Code::ResourceExhausted if SLOW.contains(&text) => {
                let what =
                    "etcd has more to do than it can: it may need faster disks or processors";
                Self::Slow(Error::new(ErrorKind::Unreachable, what).because(shown(&status)))
            }
            Code::Unavailable
            | Code::DeadlineExceeded
            | Code::Cancelled
            | Code::Aborted
            | Code::ResourceExhausted => Self::Passing(unreachable(shown(&status))),
            Code::Unknown | Code::Internal if !is_etcds => {
                Self::Passing(unreachable(shown(&status)))
            }
            _ => last(ErrorKind::Corrupt, "etcd refused a request of leasehold's: report this"),
        }
    }
}

/// Nobody answers.
pub(super) fn unreachable(why: String) -> Error {
    let what = "no member of etcd answers: check that a majority runs and that hosts and ports are \
                right";
    Error::new(ErrorKind::Unreachable, what).because(why)
}

/// Nobody answers over TLS. A member that misses a client's certificate, or does not accept it, only
/// closes the connection as seen from here.
pub(super) fn over_tls(error: Error) -> Error {
    if error.kind() != ErrorKind::Unreachable {
        return error;
    }
    let what = "no member of etcd answers over TLS: check that a majority runs, that hosts and ports are \
                right, and whether etcd wants a certificate of its clients, from an authority that \
                it trusts (cert= and key= in the URL)";
    let told = Error::new(ErrorKind::Unreachable, what);
    match std::error::Error::source(&error) {
        Some(why) => told.because(why.to_string()),
        None => told,
    }
}

/// The deepest cause, on one line.
fn shown(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = std::error::Error::source(status);
    while let Some(cause) = source {
        text = cause.to_string();
        source = cause.source();
    }
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

/// The deepest cause, on one line.
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

    #[test]
    fn f47_what_a_learner_refuses_another_member_may_do() {
        for (code, text) in [
            (Code::Unavailable, "etcdserver: rpc not supported for learner"),
            (Code::FailedPrecondition, "etcdserver: rpc not supported for learner"),
            (Code::FailedPrecondition, "etcdserver: not leader"),
        ] {
            let failure = Failure::from(Status::new(code, text));
            assert!(matches!(failure, Failure::Passing(_)), "{text}: {failure:?}");
        }
    }

    #[test]
    fn s92_a_member_that_is_slow_is_there() {
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

    #[test]
    fn f12_a_request_without_a_token_is_sent_again_with_one() {
        let failure = Failure::from(Status::invalid_argument("etcdserver: user name is empty"));
        let Failure::Token(error) = failure else { panic!("{failure:?}") };
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(format!("{error:#}").contains("put one into the URL"), "{error}");
    }
}
