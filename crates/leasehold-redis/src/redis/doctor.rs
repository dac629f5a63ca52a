//! What is wrong with a Redis set-up: see [`leasehold_core::doctor`].

use std::time::Duration;

use redis::{RedisError, Value};

use super::fault;
use super::probe::{Info, is_hidden, setting};
use super::sentinel::Quorum;
use super::servers::Servers;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::wall_micros;
use leasehold_core::{Result, doctor};

/// Looks at every master, and at the sentinels.
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
                    format!("{at} does not tell about itself (INFO)"),
                    "eviction, persistence and replication cannot be judged",
                    "permit INFO and CONFIG|GET to the user that locks, or run the doctor as another",
                ));
            }
            Err(error) => return Err(explain(error)),
        }
        // Not permitted: INFO has said whether there is such a log at all.
        let synced = setting(node, "appendfsync").await;
        if synced.is_some_and(|text| !text.contains("always")) {
            found.extend(not_at_once(&at, &found));
        }
        let rests = setting(node, "no-appendfsync-on-rewrite").await;
        if rests.is_some_and(|text| text.contains("yes")) && writes_a_file(&at, &found) {
            found.push(Finding::weak(
                "no-appendfsync-on-rewrite",
                format!("{at} does not sync its append-only file while it writes it anew"),
                "a power cut meanwhile forgets grants that were answered, also with appendfsync always",
                "set no-appendfsync-on-rewrite no, or let the resource check tokens",
            ));
        }
        if matches!(servers, Servers::Cluster(_))
            && let Some(covered) = setting(node, "cluster-require-full-coverage").await
            && covered.contains("yes")
        {
            found.push(Finding::weak(
                "full-coverage",
                format!("{at} serves nobody while any slot of the cluster has no master"),
                "while one node fails over, no lock of any node is renewed: leases shorter than a \
                 fail-over are lost on all of them",
                "set cluster-require-full-coverage no, or lease for longer than a fail-over takes",
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
            format!("the cluster has {} masters", masters.len()),
            "with fewer than three, no majority is left to promote a replica when one fails",
            "run three masters at least",
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
            format!("{at} throws keys away when its memory is full (maxmemory-policy {policy})"),
            "a lock that is held is a key like all others: thrown away, it is free, and two hold",
            "set maxmemory-policy noeviction: then a full server refuses new locks, and keeps those \
             that are held",
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
            "a fail-over loses the latest grants, so two may hold until a lease is over; tokens still \
             rise",
            "write replicas=N into the URL, which makes that rare, and let the resource check tokens, \
             which makes it harmless",
        ));
    }
    found
}

/// Without an append-only file.
fn forgets(at: &str, restart_delay: Duration) -> Finding {
    let what = format!("{at} writes no append-only file");
    if restart_delay.is_zero() {
        return Finding::broken(
            "persistence",
            what,
            "a restart forgets locks that are held, so two may hold until a lease is over; tokens go \
             on rising by the clock",
            "set appendonly yes and appendfsync always; or write restart_delay_ms into the URL of every \
             client, no less than the longest lease, so that nobody is let in before all leases are \
             over; or let the resource check tokens",
        );
    }
    Finding::weak(
        "persistence",
        what,
        "a restart forgets locks that are held, and nobody is let in until their leases are over \
         (restart_delay_ms), if all clients have that in their URLs; lock-delays are forgotten",
        "set appendonly yes and appendfsync always, or see to it that all clients have the same URL",
    )
}

fn writes_a_file(at: &str, found: &[Finding]) -> bool {
    let no_file = |f: &Finding| f.id == "persistence" && f.what.starts_with(&format!("{at} "));
    !found.iter().any(no_file)
}

/// With an append-only file that is not synced each time.
fn not_at_once(at: &str, found: &[Finding]) -> Option<Finding> {
    writes_a_file(at, found).then(|| {
        Finding::weak(
            "appendfsync",
            format!("{at} does not write to its disk before it answers (appendfsync)"),
            "a power cut forgets the grants of the last second, so two may hold until a lease is \
             over; tokens go on rising by the clock",
            "set appendfsync always, or let the resource check tokens",
        )
    })
}

/// One entry for each sentinel of the URL; `None`: it did not answer.
fn quorum(sentinels: &[Quorum]) -> Vec<Finding> {
    let mut found = Vec::new();
    let silent = sentinels.iter().filter(|s| s.is_none()).count();
    if silent > 0 {
        found.push(Finding::weak(
            "sentinel-down",
            format!("{silent} of {} sentinels do not answer", sentinels.len()),
            "a fail-over needs a majority of them",
            "start them again, or take those that are gone out of the URL",
        ));
    }
    let Some((others, quorum)) = sentinels.iter().flatten().max() else { return found };
    let all = others + 1;
    if *quorum > all || all < 3 {
        found.push(Finding::broken(
            "quorum",
            format!("there are {all} sentinels, of which {quorum} must agree"),
            "when the master dies, nobody is promoted, or a single sentinel decides: nothing can be \
             locked, or two masters are locked on",
            "run three sentinels or more, on machines of their own, with a quorum of a majority",
        ));
    } else if *quorum <= all / 2 {
        found.push(Finding::weak(
            "quorum",
            format!("{quorum} of {all} sentinels may declare the master dead"),
            "a minority that is cut off can start a fail-over",
            "set the quorum to a majority",
        ));
    }
    found
}

/// The answer to TIME.
fn micros(value: &Value) -> Option<u64> {
    let Value::Array(parts) = value else { return None };
    let number = |i: usize| match parts.get(i) {
        Some(Value::BulkString(text)) => std::str::from_utf8(text).ok()?.parse::<u64>().ok(),
        _ => None,
    };
    number(0)?.checked_mul(1_000_000)?.checked_add(number(1)?)
}
