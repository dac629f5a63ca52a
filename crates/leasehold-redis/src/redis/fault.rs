//! Interprets Redis's errors: whether a retry can help, and a one-line message with a hint.

use redis::{ErrorKind as Driver, RedisError, ServerErrorKind};

use leasehold_core::kit::Password;
use leasehold_core::{Error, ErrorKind};

/// Reason for a server's refusal. Redis states it in the first word of an error. An error within a
/// script contains that word at a position that depends on the version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The script is not in the server's cache and has to be sent in full.
    NoScript,
    /// Another node serves the slot, from now on (`Moved`) or for this key only (`Ask`). With
    /// `TryAgain`, some of the keys are on this node and others on another one.
    Moved,
    Ask,
    TryAgain,
    /// No node serves the slot at the moment.
    ClusterDown,
    /// The server is a replica, which accepts no writes.
    ReadOnly,
    Loading,
    /// The server is busy with another program's script.
    Busy,
    /// The server has fewer replicas than its configuration requires.
    NoReplicas,
    OutOfMemory,
    /// The server cannot write to its disk.
    Disk,
    NoAuth,
    WrongPassword,
    NoPermission,
    WrongType,
    CrossSlot,
    TooManyClients,
    NoDatabase,
    /// The server is not a cluster node.
    NoCluster,
    /// The server does not support the protocol of Redis 6.
    TooOld,
    /// The server has no such command, because an administrator disabled it.
    NoCommand,
    Other,
}

const WORDS: &[(&str, Refusal)] = &[
    ("NOSCRIPT", Refusal::NoScript),
    ("MOVED", Refusal::Moved),
    ("ASK", Refusal::Ask),
    ("TRYAGAIN", Refusal::TryAgain),
    ("CLUSTERDOWN", Refusal::ClusterDown),
    ("MASTERDOWN", Refusal::ClusterDown),
    ("READONLY", Refusal::ReadOnly),
    ("UNBLOCKED", Refusal::ReadOnly),
    ("LOADING", Refusal::Loading),
    ("BUSY", Refusal::Busy),
    ("NOREPLICAS", Refusal::NoReplicas),
    ("OOM", Refusal::OutOfMemory),
    ("MISCONF", Refusal::Disk),
    ("NOAUTH", Refusal::NoAuth),
    ("WRONGPASS", Refusal::WrongPassword),
    ("NOPERM", Refusal::NoPermission),
    ("WRONGTYPE", Refusal::WrongType),
    ("CROSSSLOT", Refusal::CrossSlot),
];

const PHRASES: &[(&str, Refusal)] = &[
    ("ACL failure in script", Refusal::NoPermission),
    ("user executing the script can't", Refusal::NoPermission),
    ("WRONGTYPE", Refusal::WrongType),
    ("OOM command not allowed", Refusal::OutOfMemory),
    ("NOREPLICAS", Refusal::NoReplicas),
    ("MISCONF", Refusal::Disk),
    ("READONLY", Refusal::ReadOnly),
    ("can't write against a read only", Refusal::ReadOnly),
    ("access a non local key in a cluster", Refusal::TryAgain),
    ("cluster support disabled", Refusal::NoCluster),
    ("max number of clients", Refusal::TooManyClients),
    ("DB index is out of range", Refusal::NoDatabase),
    ("invalid DB index", Refusal::NoDatabase),
    ("unknown command 'HELLO'", Refusal::TooOld),
    ("unknown command `HELLO`", Refusal::TooOld),
    ("nknown command", Refusal::NoCommand),
    ("nknown Redis command", Refusal::NoCommand),
    ("HELLO", Refusal::TooOld),
    ("Authentication", Refusal::NoAuth),
];

/// Returns the reason for a refusal, or `None` if the error is not a reply of the server.
pub fn refusal(error: &RedisError) -> Option<Refusal> {
    match error.kind() {
        Driver::AuthenticationFailed => return Some(Refusal::WrongPassword),
        Driver::RESP3NotSupported => return Some(Refusal::TooOld),
        Driver::Server(ServerErrorKind::NoPerm) => return Some(Refusal::NoPermission),
        Driver::Server(_) | Driver::Extension => {}
        _ => return None,
    }
    let code = error.code().unwrap_or_default();
    if let Some((_, known)) = WORDS.iter().find(|(word, _)| *word == code) {
        return Some(*known);
    }
    let text = error.detail().unwrap_or_default();
    let known = PHRASES.iter().find(|(phrase, _)| text.contains(phrase));
    Some(known.map_or(Refusal::Other, |(_, known)| *known))
}

/// Returns whether the connection is unusable. The request may have been executed.
pub(crate) fn is_gone(error: &RedisError) -> bool {
    matches!(error.kind(), Driver::Io | Driver::Parse)
}

/// Message about a server that is not the one that this client has used.
pub(crate) const ANOTHER_SERVER: &str = "the URL now leads to another Redis server, which does \
                                         not have this client's locks";
/// Message about a node that does not belong to the cluster that this client uses. It follows the
/// node's address.
pub(crate) const ANOTHER_CLUSTER: &str =
    "does not belong to the Redis Cluster that this client uses";

/// Returns the error of a connection that was refused because it leads to another server or
/// cluster. No request was sent, so another server may be tried.
pub(crate) fn elsewhere(what: String) -> RedisError {
    (Driver::Io, "connected to an unexpected server", what).into()
}

/// Text by which an error that [`outdated`] created is recognized.
const OUTDATED: &str = "the password is being changed";

/// Returns the error of a connection whose password is being changed.
pub(crate) fn outdated() -> RedisError {
    (Driver::Io, "the server rejected the password", OUTDATED.to_owned()).into()
}

/// Returns the message and the hint of an error that [`elsewhere`] created. Returns `None` for
/// other errors.
fn as_elsewhere(error: &RedisError) -> Option<(&str, &'static str)> {
    let what = error.detail().filter(|_| error.kind() == Driver::Io)?;
    let hint = match what {
        ANOTHER_SERVER => "restart this client to use it",
        _ if what.ends_with(ANOTHER_CLUSTER) => {
            "wait until its own cluster has replaced that node, or restart this client to use the \
             other cluster"
        }
        _ => return None,
    };
    Some((what, hint))
}

/// Converts an error of the driver to one of leasehold, with a one-line message and a hint.
pub fn explain(error: &RedisError) -> Error {
    if error.kind() == Driver::Io && error.detail() == Some(OUTDATED) {
        return Password::outdated("the Redis server");
    }
    if let Some((what, hint)) = as_elsewhere(error) {
        return Error::new(ErrorKind::Unreachable, what.to_owned()).with_hint(hint);
    }
    let (kind, what, hint) = match refusal(error) {
        None if error.kind() == Driver::MasterNameNotFoundBySentinel => return no_master(error),
        None if error.kind() == Driver::InvalidClientConfig => (
            ErrorKind::Config,
            "cannot connect with the settings in the URL",
            "check the host, port and TLS settings in the URL",
        ),
        // The driver reports a TLS alert only as text.
        None if is_gone(error) && shown(error).contains("CertificateRequired") => (
            ErrorKind::Denied,
            "the Redis server requires a client certificate",
            "add cert=FILE&key=FILE to the URL: PEM files of a client certificate, signed by an \
             authority that the server trusts, and its key. Or set `tls-auth-clients no` in \
             redis.conf",
        ),
        None if is_gone(error) => (
            ErrorKind::Unreachable,
            "cannot reach the Redis server",
            "check that it is running, and check the host, port and TLS settings in the URL",
        ),
        None => (
            ErrorKind::Corrupt,
            "unexpected reply from the Redis server",
            "check that the URL points to Redis 6 or later, or to Valkey",
        ),
        Some(Refusal::NoCommand) => return disabled(error),
        Some(_) if is_about_keys(error) => (
            ErrorKind::Denied,
            "this Redis user may not access a key that leasehold needs",
            "run `ACL SETUSER USER ~leasehold:* ~lock-names*`, with the URL's prefix before the \
             lock names",
        ),
        Some(refusal) => described(refusal),
    };
    Error::new(kind, what).with_hint(hint).with_source(shown(error))
}

/// Returns whether the user lacks access to a key, rather than to a command.
pub(crate) fn is_about_keys(error: &RedisError) -> bool {
    let text = error.detail().unwrap_or_default();
    refusal(error) == Some(Refusal::NoPermission)
        && (text.contains("one of the keys") || text.contains("access a key"))
}

fn no_master(error: &RedisError) -> Error {
    let what =
        format!("the sentinels do not know the master {}", error.detail().unwrap_or("in the URL"));
    let hint = "run `redis-cli -h SENTINEL -p 26379 SENTINEL MASTERS` and put one of these names \
                at the end of the URL";
    Error::new(ErrorKind::Config, what).with_hint(hint)
}

/// Returns the error of a server that accepted writes before and now rejects them.
pub(crate) fn demoted(error: &RedisError) -> Error {
    let what = "this Redis server was demoted to a replica and rejects writes until the fail-over \
                is complete";
    let hint = "if it stays a replica, connect to its master, or use \
                redis+sentinel://host1,host2,host3/mymaster";
    Error::new(ErrorKind::Unreachable, what).with_hint(hint).with_source(shown(error))
}

fn disabled(error: &RedisError) -> Error {
    let text = error.detail().unwrap_or_default();
    let named = text.split(['\'', '`']).nth(1).filter(|name| !name.is_empty());
    let named = named.unwrap_or("that leasehold needs");
    let named: String = named.chars().filter(|c| !c.is_control()).take(40).collect();
    if named.eq_ignore_ascii_case("sentinel") {
        let hint = "name the sentinels (their port is usually 26379), or connect to this server \
                    with redis://host:port";
        return Error::new(ErrorKind::Unsupported, "this Redis server is not a sentinel")
            .with_hint(hint)
            .with_source(shown(error));
    }
    let what = format!("the Redis server has no command {named}");
    let hint = "enable the command (rename-command in redis.conf); leasehold needs Redis 6 or \
                later, or Valkey";
    Error::new(ErrorKind::Unsupported, what).with_hint(hint).with_source(shown(error))
}

/// Returns the kind, the message and the hint for a refusal.
fn described(refusal: Refusal) -> (ErrorKind, &'static str, &'static str) {
    use ErrorKind::{Config, Corrupt, Denied, Full, Unreachable, Unsupported};
    match refusal {
        Refusal::NoScript => (
            Unreachable,
            "the Redis server drops scripts right after they were loaded",
            "retry later; check which client runs SCRIPT FLUSH",
        ),
        Refusal::Moved | Refusal::Ask | Refusal::CrossSlot => (
            Config,
            "this Redis server is a cluster node",
            "use redis+cluster://host:port/ as the store URL",
        ),
        Refusal::TryAgain => {
            (Unreachable, "a slot of the Redis Cluster is being migrated", "retry in a moment")
        }
        Refusal::ClusterDown => (
            Unreachable,
            "no node of the Redis Cluster serves this lock's slot",
            "run `redis-cli CLUSTER INFO` and restart the nodes that failed",
        ),
        Refusal::ReadOnly => (
            Denied,
            "this Redis server is a replica and rejects writes",
            "connect to its master, or use redis+sentinel://host1,host2,host3/mymaster",
        ),
        Refusal::Loading => (
            Unreachable,
            "the Redis server is still loading its data from disk",
            "retry in a moment",
        ),
        Refusal::Busy => (
            Unreachable,
            "the Redis server is blocked by a long-running script",
            "run `redis-cli SCRIPT KILL`",
        ),
        Refusal::NoReplicas => (
            Unreachable,
            "the Redis server has fewer working replicas than min-replicas-to-write",
            "restart the replicas, or run `CONFIG SET min-replicas-to-write N` with a lower number",
        ),
        Refusal::OutOfMemory => (
            Full,
            "the Redis server has reached maxmemory and rejects new locks",
            "free memory, or run `CONFIG SET maxmemory SIZE`",
        ),
        Refusal::Disk => (
            Full,
            "the Redis server cannot save to its disk and rejects writes",
            "free disk space on the server; its log has the details",
        ),
        Refusal::NoAuth => (
            Denied,
            "the Redis server requires a password",
            "put the password into the URL: redis://user:password@host/",
        ),
        Refusal::WrongPassword => (
            Denied,
            "the Redis server rejected the user name or the password",
            "check the URL: redis://user:password@host/",
        ),
        Refusal::NoPermission => (
            Denied,
            "this Redis user lacks a permission",
            "run `ACL SETUSER USER ~lock-names* ~leasehold:* &leasehold:* +eval +evalsha +get \
             +set +getset +del +exists +pexpire +pttl +getrange +time +publish +subscribe +zadd \
             +zrem +zcard +zrange +zrevrange +zrank +zscore +zpopmin +zrangebyscore +hget +hset \
             +hdel +hincrby +hscan +scan`; for Sentinel add +role, for a cluster +cluster|slots \
             +asking, for replicas=N +wait",
        ),
        Refusal::WrongType => (
            Corrupt,
            "this lock's key holds a value that belongs to another program; it was left unchanged",
            "use another lock name, or add ?prefix=… to the URL",
        ),
        Refusal::TooManyClients => (
            Unreachable,
            "the Redis server has reached maxclients",
            "raise the limit: `CONFIG SET maxclients N`",
        ),
        Refusal::NoDatabase => (
            Config,
            "the Redis server does not have the database that the URL names",
            "use a smaller number, or raise `databases` in redis.conf",
        ),
        Refusal::NoCluster => (
            Config,
            "cluster mode is disabled on this Redis server",
            "use redis://host:port/ as the store URL",
        ),
        Refusal::TooOld => (
            Unsupported,
            "this server does not support the protocol RESP3",
            "upgrade it to Redis 6 or later, or to Valkey",
        ),
        Refusal::NoCommand => (
            Unsupported,
            "the Redis server lacks a command",
            "leasehold needs Redis 6 or later, or Valkey",
        ),
        Refusal::Other => (
            Corrupt,
            "the Redis server rejected a command",
            "check that the URL points to Redis 6 or later, or to Valkey; if it does, report this \
             as a bug",
        ),
    }
}

/// Returns the server's own message on one line.
pub fn shown(error: &RedisError) -> String {
    let text = match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        _ => error.to_string(),
    };
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waiters and elections continue after transient errors, and end with permanent ones.
    #[test]
    fn redis_errors_map_to_the_right_kind() {
        use ErrorKind::{Config, Corrupt, Denied, Full, Unreachable, Unsupported};
        for (text, kind) in [
            ("LOADING Redis is loading the dataset in memory", Unreachable),
            ("BUSY Redis is busy running a script.", Unreachable),
            ("TRYAGAIN Multiple keys request during rehashing of slot", Unreachable),
            ("CLUSTERDOWN The cluster is down", Unreachable),
            ("CLUSTERDOWN Hash slot not served", Unreachable),
            ("MASTERDOWN Link with MASTER is down", Unreachable),
            ("NOREPLICAS Not enough good replicas to write.", Unreachable),
            ("NOSCRIPT No matching script. Please use EVAL.", Unreachable),
            ("ERR max number of clients reached", Unreachable),
            ("ERR max number of clients + cluster connections reached", Unreachable),
            ("OOM command not allowed when used memory > 'maxmemory'.", Full),
            ("MISCONF Redis is configured to save RDB snapshots", Full),
            ("MISCONF Errors writing to the AOF file: No space left on device", Full),
            ("ERR Error running script: -OOM command not allowed when used memory", Full),
            ("READONLY You can't write against a read only replica.", Denied),
            ("NOAUTH Authentication required.", Denied),
            ("WRONGPASS invalid username-password pair or user is disabled.", Denied),
            ("NOPERM User app has no permissions to run the 'eval' command", Denied),
            ("MOVED 3999 127.0.0.1:6381", Config),
            ("CROSSSLOT Keys in request don't hash to the same slot", Config),
            ("ERR DB index is out of range", Config),
            ("ERR This instance has cluster support disabled", Config),
            ("ERR unknown command 'EVALSHA', with args beginning with:", Unsupported),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", Corrupt),
        ] {
            let reply = redis::parse_redis_value(format!("-{text}\r\n").as_bytes()).unwrap();
            let error = explain(&reply.extract_error().unwrap_err());
            assert_eq!(error.kind(), kind, "{text}: {error}");
        }
        let reply = redis::parse_redis_value(b"-READONLY You can't write against a replica\r\n");
        let error = demoted(&reply.unwrap().extract_error().unwrap_err());
        assert!(error.is_transient(), "{error}");
    }
}
