//! What is wrong with the servers as they are set up.

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

/// How long a server has to answer.
const LIMIT: Duration = Duration::from_secs(2);

impl Shared {
    pub(super) async fn diagnose(self: &Arc<Self>, url: &RedlockUrl) -> Vec<Finding> {
        let mut found = Vec::new();
        if url.restart_delay < url.max_lease {
            found.push(Finding::broken(
                "restart-delay",
                format!(
                    "a server that restarted votes after {:?}, and a lease may be {:?}",
                    url.restart_delay, url.max_lease
                ),
                "if it came back without its data, it helps a second holder to a majority, and \
                 tokens may fall",
                "leave restart_delay_ms out of the URL of every client; 0 is for tests, and for \
                 servers that all run with appendonly yes and appendfsync always",
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
                    "{node} has restarted, or was emptied, and votes in {}",
                    seconds(left)
                )));
            }
            if let Some(policy) = &run.settings.evicts {
                found.push(Finding::broken(
                    "eviction",
                    format!("{node} has the maxmemory-policy {policy}"),
                    "when its memory is full, it may throw away locks that are held",
                    "CONFIG SET maxmemory-policy noeviction, also in its configuration file",
                ));
            }
            if !run.settings.durable {
                found.push(Finding::weak(
                    "durable",
                    format!("{node} keeps nothing over a restart (appendonly no)"),
                    "it forgets who holds; it then has no vote for as long as the longest lease",
                    "appendonly yes, at best with appendfsync always",
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
            format!("there are {nodes} servers"),
            "an even number survives no more failures than one server less, and ties are likelier",
            "use 3 or 5",
        )
    })
}

/// Servers that share a machine share its fate.
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
            "when that machine goes down, so does the majority; the point of several servers is that \
             they fail apart",
            "put each on a machine of its own",
        )
    };
    majority.map(finding).collect()
}

fn host(address: &str) -> String {
    address.rsplit_once(':').map_or(address, |(host, _)| host).to_owned()
}

/// A server that does not vote now.
fn no_vote(what: &str, trouble: &Trouble) -> Finding {
    let why = "with two of five servers missing, the next one that fails stops everybody";
    let broken = matches!(trouble, Trouble::Twin(_) | Trouble::Replica | Trouble::HasReplicas(_))
        || matches!(trouble, Trouble::Failed(e)
            if crate::redis::fault::explain(e).kind() != ErrorKind::Unreachable);
    let fix = match trouble {
        Trouble::Young(_) => "wait",
        _ => "start it, or put another server in its place in the URL of every client",
    };
    match broken {
        true => Finding::broken("node", what, why, "do as the message says"),
        false => Finding::weak("node", what, why, fix),
    }
}

trait About {
    fn about(self, what: &str) -> Self;
}

impl About for Finding {
    /// The same finding, said of something else.
    fn about(mut self, what: &str) -> Self {
        self.what = what.to_owned();
        self
    }
}
