//! What is wrong with a majority of servers: see [`crate::doctor`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::node::Node;
use super::url::RedlockUrl;
use crate::doctor::Finding;

/// How the servers were asked for, and what they say of themselves.
pub(super) fn diagnose(url: &RedlockUrl, nodes: &[Arc<Node>]) -> Vec<Finding> {
    let mut found: Vec<Finding> =
        restart(url.restart_delay, url.max_lease).into_iter().chain(number(nodes.len())).collect();
    let hosts: Vec<String> = nodes.iter().map(|n| host(&n.address().to_string())).collect();
    found.extend(shared(&hosts));
    for node in nodes {
        let at = node.address();
        let Some(run) = node.run() else {
            found.push(Finding::weak(
                "down",
                format!("{at} is not reached"),
                "it has no vote, so fewer others may fail",
                "start it; it votes again when the longest lease is over",
            ));
            continue;
        };
        if let Some(policy) = &run.settings.evicts {
            found.push(Finding::broken(
                "eviction",
                format!("{at} throws keys away when its memory is full (maxmemory-policy {policy})"),
                "a lock that is held is a key like all others: thrown away on enough servers, it is \
                 free, and two hold",
                "set maxmemory-policy noeviction",
            ));
        }
        if !run.settings.durable {
            found.push(Finding::note(
                "persistence",
                format!("{at} writes no append-only file"),
                "after a restart it votes only when the longest lease is over (restart_delay_ms), and \
                 asks the others what it missed",
            ));
        }
    }
    found
}

fn restart(delay: Duration, longest: Duration) -> Option<Finding> {
    (delay < longest).then(|| {
        Finding::broken(
            "restart-delay",
            format!("a server that restarted votes after {delay:?}, and leases may be {longest:?}"),
            "one that came back without its data votes a second time for a lock that is held: two \
             hold, and tokens may fall",
            "leave restart_delay_ms out of the URL, or make it max_lease_ms at least",
        )
    })
}

fn number(nodes: usize) -> Option<Finding> {
    nodes.is_multiple_of(2).then(|| {
        Finding::weak(
            "even",
            format!("there are {nodes} servers"),
            "an even number survives no more failures than one server less, and ties are likelier",
            "use 3 or 5",
        )
    })
}

/// Servers that share a machine share its fate.
fn shared(hosts: &[String]) -> Vec<Finding> {
    let mut count: BTreeMap<&str, usize> = BTreeMap::new();
    for host in hosts {
        *count.entry(host).or_default() += 1;
    }
    let together = count.into_iter().filter(|(_, n)| *n > hosts.len() / 2);
    let finding = |(host, n): (&str, usize)| {
        Finding::weak(
            "one-machine",
            format!("{n} of {} servers are on {host}", hosts.len()),
            "when that machine goes down, so does the majority; the point of several servers is that \
             they fail apart",
            "put each on a machine of its own",
        )
    };
    together.map(finding).collect()
}

fn host(address: &str) -> String {
    address.rsplit_once(':').map_or(address, |(host, _)| host).to_owned()
}
