//! What Redis's errors mean: whether another try can help, and one line that says what to do.

use redis::{ErrorKind as Driver, RedisError, ServerErrorKind};

use leasehold_core::{Error, ErrorKind};

/// What a server's refusal is about. Redis tells it by the first word of the error; an error
/// within a script has that word somewhere in the text, where which is a matter of the version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The script is not in the server's cache: it is to be sent in full.
    NoScript,
    /// Another node serves the slot, from now on or for this key alone; or some of the keys are
    /// here and others there.
    Moved,
    Ask,
    TryAgain,
    /// No node serves the slot just now.
    ClusterDown,
    /// A replica, which takes no writes.
    ReadOnly,
    Loading,
    /// It is busy with a script that somebody else wrote.
    Busy,
    /// It has fewer replicas than it is told to demand.
    NoReplicas,
    OutOfMemory,
    /// It cannot write to its disk.
    Disk,
    NoAuth,
    WrongPassword,
    NoPermission,
    WrongType,
    CrossSlot,
    TooManyClients,
    NoDatabase,
    /// It is no node of a cluster.
    NoCluster,
    /// It does not speak the protocol that Redis 6 has.
    TooOld,
    /// It has no command of this name: somebody disabled it.
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

/// What the server refused, or `None` if it did not answer at all.
pub(crate) fn refusal(error: &RedisError) -> Option<Refusal> {
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

/// Whether the connection is no good any more. What was sent may have been done.
pub(crate) fn is_gone(error: &RedisError) -> bool {
    matches!(error.kind(), Driver::Io | Driver::Parse)
}

/// What is wrong with a server that is not the one that this client has used.
pub(crate) const ANOTHER_SERVER: &str = "the URL leads to another Redis server than when this \
                                         client connected, and locks there exclude no client here";
/// The same of a node, after its address.
pub(crate) const ANOTHER_CLUSTER: &str =
    "does not belong to the Redis Cluster that this client uses";

/// The error of a connection that was refused for that: nothing was sent, and another server may be
/// asked.
pub(crate) fn elsewhere(what: String) -> RedisError {
    (Driver::Io, "not the server that was expected", what).into()
}

/// What [`elsewhere`] said, and the hint.
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

/// One line for the caller.
pub(crate) fn explain(error: &RedisError) -> Error {
    if let Some((what, hint)) = as_elsewhere(error) {
        return Error::new(ErrorKind::Unreachable, what.to_owned()).with_hint(hint);
    }
    let (kind, what, hint) = match refusal(error) {
        None if error.kind() == Driver::MasterNameNotFoundBySentinel => return no_master(error),
        None if error.kind() == Driver::InvalidClientConfig => (
            ErrorKind::Config,
            "cannot connect with the settings in the URL",
            "check host, port and TLS in the URL",
        ),
        // An alert of TLS, which the driver has as text only.
        None if is_gone(error) && shown(error).contains("CertificateRequired") => (
            ErrorKind::Denied,
            "the Redis server requires a client certificate",
            "add cert=FILE&key=FILE to the URL: PEM files signed by an authority that the server \
             trusts, or set `tls-auth-clients no` in redis.conf",
        ),
        None if is_gone(error) => (
            ErrorKind::Unreachable,
            "cannot reach the Redis server",
            "check that it is running, and host, port and TLS in the URL",
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
    Error::new(kind, what).with_hint(hint).because(shown(error))
}

/// Whether it is a key that the user may not touch, and not a command.
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

/// A server that took our writes before takes none now.
pub(crate) fn demoted(error: &RedisError) -> Error {
    let what = "this Redis server was demoted to a replica and rejects writes until the fail-over \
                is complete";
    let hint = "if it stays a replica, connect to its master, or use \
                redis+sentinel://host1,host2,host3/mymaster";
    Error::new(ErrorKind::Unreachable, what).with_hint(hint).because(shown(error))
}

fn disabled(error: &RedisError) -> Error {
    let text = error.detail().unwrap_or_default();
    let named = text.split(['\'', '`']).nth(1).filter(|name| !name.is_empty());
    let named = named.unwrap_or("that leasehold needs");
    let named: String = named.chars().filter(|c| !c.is_control()).take(40).collect();
    let what = format!("the Redis server has no command {named}");
    let hint = "enable the command (rename-command in redis.conf); leasehold needs Redis 6 or \
                later, or Valkey";
    Error::new(ErrorKind::Unsupported, what).with_hint(hint).because(shown(error))
}

/// The kind, what went wrong, and the hint.
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
            "restart the replicas, or lower it: `CONFIG SET min-replicas-to-write N`",
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
            "put it into the URL: redis://user:password@host/",
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
            "raise it: `CONFIG SET maxclients N`",
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

/// The server's own words on one line.
pub(crate) fn shown(error: &RedisError) -> String {
    let text = match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        _ => error.to_string(),
    };
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}
