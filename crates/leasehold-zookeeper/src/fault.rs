//! Maps the driver's errors to errors with hints.

use zookeeper_client::Error as Fault;

use leasehold_core::kit::no_store;
use leasehold_core::{Error, ErrorKind};

/// Returns whether the session has ended, so that no request sent on it will be executed any more.
/// (A session that has moved is alive.)
pub(super) fn ends_session(fault: &Fault) -> bool {
    matches!(fault, Fault::SessionExpired | Fault::AuthFailed | Fault::ClientClosed)
}

/// Returns the error for a failed operation on the node at `path`.
pub(super) fn explain(fault: Fault, path: &str) -> Error {
    let path = path.escape_debug();
    if matches!(fault, Fault::NoNode) {
        let missing = no_store(format!("the node {path} does not exist")).with_source(fault);
        return missing.with_hint("create it, or add create=yes to the URL");
    }
    let (kind, what, hint) = match &fault {
        Fault::NoAuth => (
            ErrorKind::Denied,
            format!("this user has no permission on the node {path}"),
            "use user:password@ of a user that its ACL allows, or ask its owner to run `setAcl`",
        ),
        Fault::AuthFailed => (
            ErrorKind::Denied,
            "ZooKeeper rejected the user name or the password".into(),
            "check the URL: zookeeper://user:password@host:2181/path",
        ),
        Fault::NoChildrenForEphemerals => (
            ErrorKind::Mismatch,
            format!("the node {path} is ephemeral, so it cannot be a lock"),
            "use another lock name, or another path in the URL",
        ),
        Fault::QuotaExceeded => (
            ErrorKind::Full,
            format!("the quota of {path} is used up"),
            "raise the quota with `setquota`, or retry later",
        ),
        Fault::NotReadOnly => (
            ErrorKind::Unreachable,
            "this ZooKeeper server is read-only because it has lost its quorum".into(),
            "restart the other servers of the ensemble",
        ),
        Fault::Unimplemented => (
            ErrorKind::Unsupported,
            "this ZooKeeper server does not support container nodes".into(),
            "upgrade it to ZooKeeper 3.6 or later",
        ),
        Fault::BadArguments(_) | Fault::InvalidAcl => (
            ErrorKind::Config,
            format!("ZooKeeper rejected a request for the node {path}"),
            "check the path, and acl= in the URL",
        ),
        Fault::UnmarshalError { .. } | Fault::MarshallingError => (
            ErrorKind::Corrupt,
            "ZooKeeper sent an unexpected reply".into(),
            "check that the URL has its client port (2181)",
        ),
        _ => (
            ErrorKind::Unreachable,
            "ZooKeeper does not respond".into(),
            "check that a majority of the ensemble is running and reachable",
        ),
    };
    Error::new(kind, what).with_hint(hint).with_source(fault)
}

pub(super) fn shut_down() -> Error {
    Error::new(ErrorKind::Closed, "the runtime of this client was shut down")
        .with_hint("connect again")
}
