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

/// One line for the caller.
pub(crate) fn explain(error: &RedisError) -> Error {
    let (kind, what) = match refusal(error) {
        None if error.kind() == Driver::MasterNameNotFoundBySentinel => (
            ErrorKind::Config,
            "the sentinels know no master of this name: check the last part of the URL with \
             SENTINEL MASTERS",
        ),
        None if error.kind() == Driver::InvalidClientConfig => {
            (ErrorKind::Config, "the connection cannot be made with these settings")
        }
        None if is_gone(error) => (
            ErrorKind::Unreachable,
            "the Redis server cannot be reached: check that it runs and that host, port and TLS \
             are right",
        ),
        None => (ErrorKind::Corrupt, "the Redis server answered what leasehold does not know"),
        Some(Refusal::NoCommand) => return disabled(error),
        Some(_) if is_about_keys(error) => (
            ErrorKind::Denied,
            "this Redis user may not touch a key that this needs: it needs ~lock-names* (with the \
             URL's prefix) and ~leasehold:* (see docs/stores/redis.md)",
        ),
        Some(refusal) => told(refusal),
    };
    Error::new(kind, what).because(shown(error))
}

/// Whether it is a key that the user may not touch, and not a command.
pub(crate) fn is_about_keys(error: &RedisError) -> bool {
    let text = error.detail().unwrap_or_default();
    refusal(error) == Some(Refusal::NoPermission)
        && (text.contains("one of the keys") || text.contains("access a key"))
}

/// A server that took our writes before takes none now.
pub(crate) fn demoted(error: &RedisError) -> Error {
    let what = "this Redis server was a master and is a replica now, which takes no writes: the \
                fail-over is waited for; if the URL leads to it for good, write redis+sentinel://…";
    Error::new(ErrorKind::Unreachable, what).because(shown(error))
}

fn disabled(error: &RedisError) -> Error {
    let text = error.detail().unwrap_or_default();
    let named = text.split(['\'', '`']).nth(1).filter(|name| !name.is_empty());
    let named = named.unwrap_or("that leasehold needs");
    let named: String = named.chars().filter(|c| !c.is_control()).take(40).collect();
    let what = format!(
        "the Redis server has no command {named}: it was disabled there (rename-command), or this is \
         another server than Redis 6 or later, or Valkey"
    );
    Error::new(ErrorKind::Unsupported, what).because(shown(error))
}

fn told(refusal: Refusal) -> (ErrorKind, &'static str) {
    use ErrorKind::{Config, Corrupt, Denied, Full, Unreachable, Unsupported};
    match refusal {
        Refusal::NoScript => (
            Unreachable,
            "the Redis server forgets scripts as soon as they are sent: try again later",
        ),
        Refusal::Moved | Refusal::Ask | Refusal::CrossSlot => (
            Config,
            "this Redis server is a node of a cluster: write the store as redis+cluster://…",
        ),
        Refusal::TryAgain => {
            (Unreachable, "a slot of the Redis Cluster is being moved just now: try again")
        }
        Refusal::ClusterDown => (
            Unreachable,
            "the Redis Cluster does not serve this slot: check CLUSTER INFO and its nodes",
        ),
        Refusal::ReadOnly => (
            Denied,
            "this Redis server is a replica and takes no writes: connect to its master, or write \
             redis+sentinel://…",
        ),
        Refusal::Loading => (
            Unreachable,
            "the Redis server is still loading its data from disk: try again in a moment",
        ),
        Refusal::Busy => (
            Unreachable,
            "the Redis server is busy with somebody's endless script: end it with SCRIPT KILL",
        ),
        Refusal::NoReplicas => (
            Unreachable,
            "the Redis server has fewer replicas than its min-replicas-to-write: mend the replicas",
        ),
        Refusal::OutOfMemory => (
            Full,
            "the Redis server is at its maxmemory and lets nobody new in: make room, or raise it",
        ),
        Refusal::Disk => {
            (Full, "the Redis server cannot save to its disk and refuses writes: make room there")
        }
        Refusal::NoAuth => {
            (Denied, "the Redis server asks for a password: write redis://user:password@host/")
        }
        Refusal::WrongPassword => {
            (Denied, "the Redis server refuses the user or the password: check the URL")
        }
        Refusal::NoPermission => (
            Denied,
            "this Redis user lacks a right; it needs: ~lock-names* ~leasehold:* &leasehold:* +eval \
             +evalsha +get +set +getset +del +exists +pexpire +pttl +getrange +time +publish \
             +subscribe +zadd +zrem +zcard +zrange +zrevrange +zrank +zscore +zpopmin \
             +zrangebyscore +hget +hset +hdel +hincrby +hscan +scan; with sentinels +role, in a cluster \
             +cluster|slots +asking, for replicas +wait (see docs/stores/redis.md)",
        ),
        Refusal::WrongType => (
            Corrupt,
            "the key of this lock holds something else than a lock, and was left as it is: use \
             another name, or a prefix in the URL",
        ),
        Refusal::TooManyClients => {
            (Unreachable, "the Redis server has as many clients as its maxclients allows: raise it")
        }
        Refusal::NoDatabase => {
            (Config, "there is no such database: Redis has as many as its `databases` setting says")
        }
        Refusal::NoCluster => {
            (Config, "this Redis server is no node of a cluster: write the store as redis://…")
        }
        Refusal::TooOld => {
            (Unsupported, "this is no Redis 6 or later, nor Valkey: upgrade the server")
        }
        Refusal::NoCommand => (Unsupported, "the Redis server lacks a command"),
        Refusal::Other => (Corrupt, "the Redis server refused a command of leasehold's"),
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
