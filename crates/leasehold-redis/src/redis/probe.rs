//! Queries the servers' properties, and derives the store's guarantees from them.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use redis::{RedisError, RedisResult};
use tokio::runtime::Handle;

use super::connection::Node;
use super::fault::{self, Refusal};
use super::info::Info;
use super::request::sleep;
use super::servers::Servers;
use super::url::{Deployment, RedisUrl, Shortfall};
use leasehold_core::store::{
    ALL_KINDS, ClockModel, Durability, Guarantees, Liveness, Survival, Wakeup,
};
use leasehold_core::{Error, ErrorKind, Result, telemetry};

/// Maximum time to find the servers.
const LIMIT: Duration = Duration::from_secs(10);
/// First major version that supports the required protocol.
const LEAST_VERSION: u32 = 6;

/// Pause between two queries while a server is gone.
const PAUSE: Duration = Duration::from_millis(100);

/// Connects, and returns the store's guarantees and whether its servers are known to accept writes.
pub(super) async fn found(
    servers: &Servers,
    url: &RedisUrl,
    runtime: &Handle,
) -> Result<(Guarantees, bool)> {
    let mut gone = None;
    let found = async {
        let masters = settled(servers, runtime, &mut gone).await;
        let masters = masters.map_err(|e| fault::explain(&e))?;
        // Sentinels and clusters name only masters. A replica among them has been demoted.
        let is_master = |(_, info): &Found| info.is_some();
        let takes_writes = fails_over(url) || masters.iter().all(is_master);
        Ok((judged(&masters, url).await?, takes_writes))
    };
    tokio::select! {
        found = found => found,
        () = sleep(runtime, LIMIT) => Err(gone.map_or_else(
            || {
                let what = format!("the Redis server did not respond within {LIMIT:?}");
                let hint = "check that it is running and reachable";
                Error::new(ErrorKind::Unreachable, what).with_hint(hint)
            },
            |error| fault::explain(&error),
        )),
    }
}

/// A server that stores locks, and its INFO reply if this user may read it.
type Found = (Arc<Node>, Option<Info>);

/// Returns every server that stores locks. During a fail-over a server that is gone may be named.
/// Then this repeats the query until another server is named instead.
async fn settled(
    servers: &Servers,
    runtime: &Handle,
    gone: &mut Option<RedisError>,
) -> RedisResult<Vec<Found>> {
    loop {
        match ask(servers).await {
            Err(error) if fault::is_gone(&error) && servers.can_fail_over().await => {
                *gone = Some(error);
                sleep(runtime, PAUSE).await;
            }
            found => return found,
        }
    }
}

async fn ask(servers: &Servers) -> RedisResult<Vec<Found>> {
    let mut found = Vec::new();
    for node in servers.masters().await? {
        let info = match node.call(&redis::cmd("INFO")).await {
            Ok(value) => Some(Info::of(value)),
            // Without INFO, nothing that depends on it is guaranteed.
            Err(error) if is_hidden(&error) => None,
            Err(error) => return Err(error),
        };
        found.push((node, info));
    }
    Ok(found)
}

/// Returns whether INFO is hidden from this user, or disabled for all users.
pub(super) fn is_hidden(error: &RedisError) -> bool {
    matches!(fault::refusal(error), Some(Refusal::NoPermission | Refusal::NoCommand))
}

/// Returns the server's reply about a setting as text, or `None` if it cannot be read.
pub(super) async fn setting(node: &Node, name: &str) -> Option<String> {
    let mut get = redis::cmd("CONFIG");
    get.arg("GET").arg(name);
    node.call(&get).await.ok().map(|value| format!("{value:?}"))
}

fn fails_over(url: &RedisUrl) -> bool {
    !matches!(url.deployment, Deployment::Single(_))
}

async fn judged(masters: &[Found], url: &RedisUrl) -> Result<Guarantees> {
    let facts: Vec<&Info> = masters.iter().filter_map(|(_, info)| info.as_ref()).collect();
    let hidden = masters.len() > facts.len();
    for info in &facts {
        info.check(url)?;
    }
    if hidden && !url.restart_delay.is_zero() {
        let what = "restart_delay_ms needs the server's uptime, but this user may not run INFO";
        let hint = "run `ACL SETUSER USER +info`";
        return Err(Error::new(ErrorKind::Config, what).with_hint(hint));
    }
    let mut kept = Durability::Disk;
    for (node, info) in masters {
        kept = kept.min(keeps(node, info.as_ref()).await);
    }
    let evicts = facts.iter().find_map(|info| info.evicts());
    if let Some(policy) = &evicts {
        telemetry::evicting(policy);
    }
    let mut promised = promised(url, kept, evicts.as_deref(), hidden);
    for (node, _) in masters {
        if !lets_us_follow(node).await {
            promised.followed = Wakeup::Poll;
        }
    }
    Ok(promised)
}

/// Returns whether the server reports changes to this user (`redis/follow.rs`).
///
/// Permissions apply to a command and its subcommand, so a call that changes nothing tests them. If
/// the result is unclear, this returns true, and the subscription itself finds out.
async fn lets_us_follow(node: &Node) -> bool {
    let mut off = redis::cmd("CLIENT");
    off.arg("TRACKING").arg("OFF");
    node.call(&off).await.err().is_none_or(|error| fault::refusal(&error).is_none())
}

/// Returns which failures the keys of a server survive. Even if the append-only file is not synced
/// on every write, it is written before the reply. So a crash of the process alone loses nothing.
async fn keeps(node: &Node, info: Option<&Info>) -> Durability {
    if info.and_then(|info| info.figure("aof_enabled")) != Some("1") {
        return Durability::Process;
    }
    let always = setting(node, "appendfsync").await.is_some_and(|text| text.contains("always"));
    let rests = setting(node, "no-appendfsync-on-rewrite").await;
    // If the setting is hidden, Redis's default (`no`) is assumed.
    let rests = rests.is_some_and(|text| text.contains("yes"));
    if always && !rests { Durability::Disk } else { Durability::Machine }
}

impl Info {
    fn check(&self, url: &RedisUrl) -> Result<()> {
        let refused =
            |kind, what: String, hint: &'static str| Err(Error::new(kind, what).with_hint(hint));
        let version = self.figure("redis_version").unwrap_or_default();
        let major = version.split('.').next().and_then(|n| n.parse::<u32>().ok());
        if major.is_some_and(|major| major < LEAST_VERSION) {
            let version: String = version.chars().take(20).collect();
            let what = format!("the server runs Redis {version}, which is too old");
            return refused(
                ErrorKind::Unsupported,
                what,
                "upgrade it to Redis 6 or later, or to Valkey",
            );
        }
        let single = matches!(url.deployment, Deployment::Single(_));
        match self.figure("redis_mode") {
            Some("cluster") if !matches!(url.deployment, Deployment::Cluster(_)) => {
                let what = "this Redis server is a cluster node".into();
                let hint = "use redis+cluster://host:port/ as the store URL";
                return refused(ErrorKind::Config, what, hint);
            }
            Some("sentinel") => {
                let what = "this server is a Redis Sentinel, which cannot store locks".into();
                let hint = "use redis+sentinel://host1,host2,host3/mymaster as the store URL";
                return refused(ErrorKind::Config, what, hint);
            }
            _ => {}
        }
        if single && self.figure("role") == Some("slave") {
            let what = "this Redis server is a replica and rejects writes".into();
            let hint = "connect to its master, or use redis+sentinel://host1,host2,host3/mymaster";
            return refused(ErrorKind::Denied, what, hint);
        }
        Ok(())
    }

    /// Returns the policy by which the server evicts keys, if it does.
    pub(super) fn evicts(&self) -> Option<String> {
        let limited = self.figure("maxmemory").is_some_and(|most| most != "0");
        let policy = self.figure("maxmemory_policy")?;
        (limited && policy != "noeviction").then(|| policy.chars().take(40).collect())
    }
}

fn promised(url: &RedisUrl, kept: Durability, evicts: Option<&str>, unknown: bool) -> Guarantees {
    let fails_over = fails_over(url);
    let mut notes: Vec<Cow<'static, str>> = vec![
        "Leases expire by the server's wall clock. If it is set forward, they expire early, and only the token \
         distinguishes two holders. If it is set back, a dead holder's lock stays taken for that much longer."
            .into(),
        "Tokens increase while the server keeps its data, whatever its clock does. After a loss of data \
         they increase unless the clock is behind the last token."
            .into(),
        "Locks exclude clients that use SET NX PX on the same key, and vice versa. Those clients are not \
         in the queue: they do not get the lock while leasehold's waiters hand it over to each other."
            .into(),
        "Listing iterates over all keys of the database (SCAN). It does not show locks that only other \
         libraries' clients hold."
            .into(),
    ];
    match url.deployment {
        Deployment::Single(_) => {}
        Deployment::Sentinel { .. } => notes.push(
            "Replication is asynchronous, so a fail-over can lose the latest grants. A partitioned old master \
             keeps renewing them until it is demoted, or until a sentinel reports the new master to the client \
             (polled every second). Two clients can hold for that long, which can exceed a lease. Check tokens \
             at the resource."
                .into(),
        ),
        Deployment::Cluster(_) => notes.push(
            "Replication is asynchronous, so a fail-over can lose the latest grants. A partitioned old master \
             keeps renewing them until it detects the partition (cluster-node-timeout). Two clients can hold for \
             that long, which can exceed a lease. Check tokens at the resource."
                .into(),
        ),
    }
    if kept == Durability::Process && !unknown {
        notes.push(
            "The server has no append-only file. A restart loses all holds, and tokens then increase by its \
             clock alone."
                .into(),
        );
    }
    if !url.restart_delay.is_zero() {
        notes.push(
            format!(
                "After a restart the server grants nothing for {:?}, until every forgotten lease has \
                 expired. This requires restart_delay_ms in every client's URL. It does not cover FLUSHALL, \
                 fail-overs or clients of other libraries.",
                url.restart_delay
            )
            .into(),
        );
    }
    if matches!(url.deployment, Deployment::Cluster(_)) {
        notes.push(
            "Moving a slot does not affect the lease of a mutex. Read-write locks and semaphores in the slot \
             cannot be renewed until the move is complete. If that takes longer than a lease, they are lost, and \
             their guards report it."
                .into(),
        );
    }
    if let Some(replicas) = url.replicas {
        let then = match replicas.short {
            Shortfall::Refuse => "otherwise the lock is released again",
            Shortfall::Accept => "otherwise the lock is granted anyway",
        };
        notes.push(
            format!(
                "{} of the replicas must confirm each grant within {:?}; {then}. A fail-over may \
                 promote another replica.",
                replicas.count, replicas.within
            )
            .into(),
        );
    }
    if let Some(policy) = evicts {
        notes.push(
            format!(
                "UNSAFE: with maxmemory-policy {policy} the server evicts keys when memory runs out, \
                 including held locks. Set noeviction."
            )
            .into(),
        );
    }
    if unknown {
        notes.push(
            "INFO is disabled or this user may not call it, so persistence and eviction are unknown."
                .into(),
        );
    }
    let mut promised = Guarantees::least();
    promised.kinds = Cow::Borrowed(ALL_KINDS);
    promised.downgrades = true;
    promised.upgrades = true;
    promised.fifo = true;
    promised.wakeup = Wakeup::Push;
    promised.evicted = Wakeup::Push;
    promised.followed = Wakeup::Push;
    promised.liveness = Liveness::Lease;
    promised.clock = ClockModel::Wall;
    promised.lock_delay = true;
    promised.min_hold = true;
    // Keys can be evicted without any crash.
    promised.grant = if fails_over || evicts.is_some() { Durability::Process } else { kept };
    promised.token = if evicts.is_some() { Durability::Process } else { kept };
    promised.on_pause = Survival::Fenced;
    promised.on_clock_step = Survival::Fenced;
    promised.on_store_crash = match evicts {
        None if kept == Durability::Disk || !url.restart_delay.is_zero() => Survival::Exclusive,
        _ => Survival::Fenced,
    };
    // Evicted locks are not exclusive. A caller that requires exclusion gets an error.
    promised.on_failover = match fails_over || evicts.is_some() {
        true => Survival::Fenced,
        false => Survival::NotApplicable,
    };
    promised.on_partition = Survival::Fenced;
    promised.recovery = Duration::from_secs(if fails_over { 10 } else { 2 });
    promised.notes = notes.into();
    promised
}
