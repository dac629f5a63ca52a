//! Diagnoses the configuration of the servers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::attempt::LATE;
use super::node::{Trouble, seconds};
use super::shared::Shared;
use super::url::RedlockUrl;
use leasehold_core::ErrorKind;
use leasehold_core::doctor::{Finding, clocks};
use leasehold_core::kit::wall_micros;

/// Time limit for a server to respond.
const LIMIT: Duration = Duration::from_secs(2);

impl Shared {
    pub(super) async fn diagnose(self: &Arc<Self>, url: &RedlockUrl) -> Vec<Finding> {
        let mut found = Vec::new();
        if url.restart_delay < url.max_lease {
            found.push(Finding::broken(
                "restart-delay",
                format!(
                    "restart_delay_ms is {:?}, but leases can last {:?} (max_lease_ms)",
                    url.restart_delay, url.max_lease
                ),
                "a server that restarts without its data can vote for a second holder while the \
                 first lease is valid, and tokens can fall",
                "remove restart_delay_ms from every client's URL; a shorter delay is safe only if \
                 all servers run with appendonly yes and appendfsync always",
            ));
        }
        found.extend(number(self.nodes.len()));
        let hosts: Vec<String> = url.nodes.iter().map(|n| host(&n.to_string())).collect();
        found.extend(together(&hosts));
        let mut answers = self.ask_each(LIMIT, LATE, |i| {
            let shared = self.clone();
            async move {
                let run = shared.nodes[i].met(true).await?;
                if let Some(twin) = shared.twin_of(i) {
                    return Err(twin);
                }
                let before = wall_micros();
                let (_, theirs, _) = shared.nodes[i].known(&shared.scripts).await?;
                Ok((run, before, theirs, wall_micros()))
            }
        });
        while let Some((i, answer)) = answers.recv().await {
            let node = self.nodes[i].address();
            let (run, before, theirs, after) = match answer {
                Ok(answer) => answer,
                Err(trouble) => {
                    found.push(no_vote(&trouble.explain(node).reason(), &trouble));
                    continue;
                }
            };
            let left = run.votes_from().since(self.claims.now());
            if !left.is_zero() {
                found.push(no_vote("", &Trouble::Young(left)).about(&format!(
                    "{node} restarted or was emptied and has no vote for another {}",
                    seconds(left)
                )));
            }
            if let Some(policy) = &run.settings.evicts {
                found.push(Finding::broken(
                    "eviction",
                    format!("{node} has maxmemory-policy {policy}"),
                    "it can evict held locks when its memory is full",
                    "`CONFIG SET maxmemory-policy noeviction`, and the same in its configuration \
                     file",
                ));
            }
            if !run.settings.durable {
                found.push(Finding::weak(
                    "durable",
                    format!("{node} loses its data in a restart (appendonly no)"),
                    "it forgets held locks, so after a restart it has no vote for the length of \
                     the longest lease",
                    "`CONFIG SET appendonly yes`, and for power failures `CONFIG SET appendfsync \
                     always`",
                ));
            }
            found.extend(clocks(before, theirs, after).into_iter().map(|finding| {
                let what = format!("{node}: {}", finding.what);
                finding.about(&what)
            }));
        }
        found
    }
}

fn number(nodes: usize) -> Option<Finding> {
    nodes.is_multiple_of(2).then(|| {
        Finding::weak(
            "even",
            format!("the URL names {nodes} servers, an even number"),
            "an even number tolerates no more failures than one server fewer, and makes ties more \
             likely",
            "use 3 or 5 servers",
        )
    })
}

/// Returns a finding if most of the servers are on one machine, because they fail together.
fn together(hosts: &[String]) -> Vec<Finding> {
    let mut count: BTreeMap<&str, usize> = BTreeMap::new();
    for host in hosts {
        *count.entry(host).or_default() += 1;
    }
    let majority = count.into_iter().filter(|(_, n)| *n > hosts.len() / 2);
    let finding = |(host, n): (&str, usize)| {
        Finding::weak(
            "one-machine",
            format!("{n} of {} servers are on {host}", hosts.len()),
            "if that machine fails, the majority is lost",
            "run each server on a separate machine",
        )
    };
    majority.map(finding).collect()
}

fn host(address: &str) -> String {
    address.rsplit_once(':').map_or(address, |(host, _)| host).to_owned()
}

/// Returns the finding about a server that does not vote at the moment.
fn no_vote(what: &str, trouble: &Trouble) -> Finding {
    let why = "without its vote, fewer further failures are tolerated";
    let broken = matches!(trouble, Trouble::Twin(_) | Trouble::Replica | Trouble::HasReplicas(_))
        || matches!(trouble, Trouble::Failed(e)
            if leasehold_redis::redis::fault::explain(e).kind() != ErrorKind::Unreachable);
    let restart = "start it, or replace it with another server in every client's URL";
    match broken {
        true => {
            let hint = trouble.problem().hint.unwrap_or_else(|| restart.to_owned());
            Finding::broken("node", what, why, hint)
        }
        false if matches!(trouble, Trouble::Young(_)) => {
            let fix = "no action needed: the server votes again after that time";
            Finding::weak("node", what, why, fix)
        }
        false => Finding::weak("node", what, why, restart),
    }
}

trait About {
    fn about(self, what: &str) -> Self;
}

impl About for Finding {
    /// Returns the finding with another text about what was found.
    fn about(mut self, what: &str) -> Self {
        self.what = what.to_owned();
        self
    }
}
