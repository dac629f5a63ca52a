//! Diagnoses the configuration of Redis servers: see [`leasehold_core::doctor`].

use std::time::Duration;

use redis::RedisError;

use super::fault;
use super::info::{Info, micros};
use super::probe::{is_hidden, setting};
use super::sentinel::Quorum;
use super::servers::Servers;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::wall_micros;
use leasehold_core::{Result, doctor};

/// Checks the configuration of every master and of the sentinels.
pub(super) async fn diagnose(
    servers: &Servers,
    confirms: bool,
    restart_delay: Duration,
) -> Result<Vec<Finding>> {
    let explain = |e: RedisError| fault::explain(&e);
    let masters = servers.masters().await.map_err(explain)?;
    let mut found = Vec::new();
    for node in &masters {
        let at = node.address().to_string();
        match node.call(&redis::cmd("INFO")).await {
            Ok(value) => {
                found.extend(judge(&at, &Info::of(value), confirms, restart_delay));
            }
            Err(error) if is_hidden(&error) => {
                found.push(Finding::weak(
                    "unknown",
                    format!("{at} does not let this user run INFO"),
                    "leasehold cannot check eviction, persistence and replication",
                    "`ACL SETUSER USER +info +config|get`, or run the doctor as another user",
                ));
            }
            Err(error) => return Err(explain(error)),
        }
        // If CONFIG is not permitted, INFO has already shown whether there is an append-only file.
        let synced = setting(node, "appendfsync").await;
        if synced.is_some_and(|text| !text.contains("always")) {
            found.extend(not_at_once(&at, &found));
        }
        let rests = setting(node, "no-appendfsync-on-rewrite").await;
        if rests.is_some_and(|text| text.contains("yes")) && writes_a_file(&at, &found) {
            found.push(Finding::weak(
                "no-appendfsync-on-rewrite",
                format!("{at} has no-appendfsync-on-rewrite yes"),
                "it does not sync the append-only file while it rewrites it: a power failure then \
                 loses acknowledged grants, even with appendfsync always",
                "`CONFIG SET no-appendfsync-on-rewrite no`, or check tokens at the resource",
            ));
        }
        if matches!(servers, Servers::Cluster(_))
            && let Some(covered) = setting(node, "cluster-require-full-coverage").await
            && covered.contains("yes")
        {
            found.push(Finding::weak(
                "full-coverage",
                format!("{at} has cluster-require-full-coverage yes"),
                "while one node fails over, no node serves requests: locks with leases shorter \
                 than a fail-over are lost on all nodes",
                "`CONFIG SET cluster-require-full-coverage no`, or use leases longer than a \
                 fail-over",
            ));
        }
        let before = wall_micros();
        let time = node.call(&redis::cmd("TIME")).await.map_err(explain)?;
        found.extend(doctor::clocks(before, micros(&time).unwrap_or(0), wall_micros()));
    }
    match servers {
        Servers::Single(_) => {}
        Servers::Sentinel(sentinel) => found.extend(quorum(&sentinel.quorums().await)),
        Servers::Cluster(_) if masters.len() < 3 => found.push(Finding::weak(
            "few-masters",
            format!("the number of masters in the cluster is {}", masters.len()),
            "with fewer than three masters, no majority is left to promote a replica when one \
             fails",
            "run at least three masters",
        )),
        Servers::Cluster(_) => {}
    }
    Ok(found)
}

fn judge(at: &str, info: &Info, confirms: bool, restart_delay: Duration) -> Vec<Finding> {
    let mut found = Vec::new();
    if let Some(policy) = info.evicts() {
        found.push(Finding::broken(
            "eviction",
            format!("{at} evicts keys when its memory is full (maxmemory-policy {policy})"),
            "a held lock can be evicted like any other key; another client then acquires it while \
             the first still holds it",
            "`CONFIG SET maxmemory-policy noeviction`: a full server then keeps held locks and \
             rejects new ones",
        ));
    }
    if info.figure("aof_enabled") != Some("1") {
        found.push(forgets(at, restart_delay));
    }
    let replicas = info.figure("connected_slaves").and_then(|n| n.parse::<u32>().ok());
    if replicas.unwrap_or(0) > 0 && !confirms {
        found.push(Finding::weak(
            "asynchronous-replica",
            format!("{at} has replicas and does not wait for them"),
            "a fail-over loses the latest grants: two clients can hold the same lock until a \
             lease expires, but tokens still rise",
            "add replicas=N to the URL, which makes this rare, and check tokens at the resource, \
             which makes it harmless",
        ));
    }
    found
}

/// Returns the finding for a server without an append-only file.
fn forgets(at: &str, restart_delay: Duration) -> Finding {
    let what = format!("{at} has no append-only file (appendonly no)");
    if restart_delay.is_zero() {
        return Finding::broken(
            "persistence",
            what,
            "a restart loses held locks: two clients can hold the same lock until a lease \
             expires; new tokens rise with the server's clock",
            "`CONFIG SET appendonly yes` and `CONFIG SET appendfsync always`. Or add \
             restart_delay_ms to every client's URL, at least as long as the longest lease: no \
             lock is then granted until all leases from before the restart have expired. Or check \
             tokens at the resource",
        );
    }
    Finding::weak(
        "persistence",
        what,
        "a restart loses held locks and lock delays; restart_delay_ms makes it safe only if every \
         client's URL has it",
        "`CONFIG SET appendonly yes` and `CONFIG SET appendfsync always`, or give all clients the \
         same URL",
    )
}

fn writes_a_file(at: &str, found: &[Finding]) -> bool {
    let no_file = |f: &Finding| f.id == "persistence" && f.what.starts_with(&format!("{at} "));
    !found.iter().any(no_file)
}

/// Returns the finding for an append-only file that is not synced on every write.
fn not_at_once(at: &str, found: &[Finding]) -> Option<Finding> {
    writes_a_file(at, found).then(|| {
        Finding::weak(
            "appendfsync",
            format!("{at} replies before its writes are on disk (appendfsync)"),
            "a power failure loses the grants of the last second: two clients can hold the same \
             lock until a lease expires; new tokens rise with the server's clock",
            "`CONFIG SET appendfsync always`, or check tokens at the resource",
        )
    })
}

/// Returns the findings about the quorum. `sentinels` has one entry per sentinel of the URL, which
/// is `None` if that sentinel did not respond.
fn quorum(sentinels: &[Quorum]) -> Vec<Finding> {
    let mut found = Vec::new();
    let silent = sentinels.iter().filter(|s| s.is_none()).count();
    if silent > 0 {
        found.push(Finding::weak(
            "sentinel-down",
            format!("{silent} of {} sentinels do not respond", sentinels.len()),
            "a fail-over needs a majority of the sentinels",
            "restart them, or remove retired sentinels from the URL",
        ));
    }
    let Some((others, quorum)) = sentinels.iter().flatten().max() else { return found };
    let all = others + 1;
    if *quorum > all || all < 3 {
        found.push(Finding::broken(
            "quorum",
            format!("the master has {all} sentinels and a quorum of {quorum}"),
            "when the master fails, either no replica is promoted and locking stops, or a single \
             sentinel decides and clients can lock on two masters",
            "run at least three sentinels on separate machines, and set the quorum to a majority: \
             `SENTINEL SET MASTER quorum 2`",
        ));
    } else if *quorum <= all / 2 {
        found.push(Finding::weak(
            "quorum",
            format!("the quorum is {quorum} of {all} sentinels, less than a majority"),
            "a partitioned minority can declare the master down and start a fail-over",
            "set the quorum to a majority: `SENTINEL SET MASTER quorum N`",
        ));
    }
    found
}
