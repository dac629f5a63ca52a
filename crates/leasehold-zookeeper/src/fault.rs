//! What the driver's errors mean, in one line that says what to do.

use zookeeper_client::Error as Fault;

use leasehold_core::{Error, ErrorKind};

/// Whether the session is over: nothing sent on it will be done any more. (One that has moved lives.)
pub(super) fn ends_session(fault: &Fault) -> bool {
    matches!(fault, Fault::SessionExpired | Fault::AuthFailed | Fault::ClientClosed)
}

/// What the caller is told when an operation on the node at `path` failed.
pub(super) fn explain(fault: Fault, path: &str) -> Error {
    let path = path.escape_debug();
    let (kind, what) = match &fault {
        Fault::NoAuth => (
            ErrorKind::Denied,
            format!(
                "no permission on {path}: give the URL a user and password that its ACL allows, or \
                 let its owner change the ACL"
            ),
        ),
        Fault::AuthFailed => {
            (ErrorKind::Denied, "ZooKeeper refuses the user or the password: check the URL".into())
        }
        Fault::NoNode => (
            ErrorKind::Config,
            format!("the node {path} does not exist: create it, or write create=yes into the URL"),
        ),
        Fault::NoChildrenForEphemerals => (
            ErrorKind::Mismatch,
            format!("{path} is an ephemeral node and no lock: use another name or path"),
        ),
        Fault::QuotaExceeded => (
            ErrorKind::Full,
            format!("the quota of {path} is used up: raise it, or try again later"),
        ),
        Fault::NotReadOnly => (
            ErrorKind::Unreachable,
            "this member has lost its quorum and only reads: bring the other members back".into(),
        ),
        Fault::Unimplemented => (
            ErrorKind::Unsupported,
            "this server is too old or lacks containers: leasehold needs ZooKeeper 3.6 or later"
                .into(),
        ),
        Fault::BadArguments(_) | Fault::InvalidAcl => {
            (ErrorKind::Config, format!("ZooKeeper refuses what was asked about {path}"))
        }
        Fault::UnmarshalError { .. } | Fault::MarshallingError => (
            ErrorKind::Corrupt,
            "ZooKeeper's answer cannot be read: check that the port is its client port".into(),
        ),
        _ => (
            ErrorKind::Unreachable,
            "no answer from ZooKeeper: check that a majority of its members runs and can be \
             reached"
                .into(),
        ),
    };
    Error::new(kind, what).because(fault)
}

pub(super) fn shut_down() -> Error {
    Error::new(ErrorKind::Closed, "the client's runtime was shut down: connect again")
}
