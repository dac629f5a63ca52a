//! `replicas=N`: a grant counts once N replicas have it.
//!
//! Redis answers before its replicas know, and a fail-over to one that does not know loses the grant.
//! `WAIT` tells how many replicas have what *its own connection* wrote, and stalls that connection
//! meanwhile. So there is one connection for it to each server, on which many grants are confirmed at
//! once: it looks whether the server (still) has them, writes something itself, and waits until
//! that is known by enough replicas; what was written before is known by them too.
//!
//! This narrows the gap, and does not close it: the replica that is promoted may be another. A pushed
//! grant is an invitation only; whoever it is for asks, and that is confirmed before the answer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::{Pipeline, RedisResult, Value};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::connection::Node;
use super::fault;
use super::keys::Keys;
use super::servers::Servers;
use super::url::{Address, Login, Replicas, Shortfall};
use crate::claim::{Claim, Kind};
use crate::error::{Error, ErrorKind, Result};

/// How much longer an answer may take than the replicas.
const CONNECTING: Duration = Duration::from_secs(1);

/// Confirms the grants of one client.
#[derive(Debug)]
pub(super) struct Confirm {
    wanted: Replicas,
    servers: Arc<Servers>,
    login: Login,
    runtime: Handle,
    groups: Mutex<HashMap<Address, Arc<Group>>>,
}

/// Those who wait for one server's replicas.
#[derive(Debug)]
struct Group {
    node: Arc<Node>,
    pending: Mutex<Pending>,
}

#[derive(Debug, Default)]
struct Pending {
    grants: Vec<Grant>,
    /// Somebody is at work on them.
    running: bool,
}

#[derive(Debug)]
struct Grant {
    /// Asks the server whether it has the grant.
    look: redis::Cmd,
    /// What the answer begins with if it has. After a fail-over it may have somebody else's.
    ours: String,
    /// What to write in the same slot.
    mark: String,
    told: oneshot::Sender<Result<u32>>,
}

impl Confirm {
    pub(super) fn new(
        wanted: Replicas,
        login: &Login,
        servers: &Arc<Servers>,
        runtime: &Handle,
    ) -> Self {
        Self {
            wanted,
            servers: servers.clone(),
            login: login.clone(),
            runtime: runtime.clone(),
            groups: Mutex::default(),
        }
    }

    /// Returns when enough replicas know of this claim's grant.
    pub(super) async fn grant(&self, claim: &Claim, keys: &Keys) -> Result<()> {
        let node = self.servers.node(keys.slot).await.map_err(|e| fault::explain(&e))?;
        let group = self.group(node.address())?;
        let (told, reached) = oneshot::channel();
        let (look, ours) = look(claim, keys);
        let grant = Grant { look, ours, mark: keys.mark(), told };
        let start = {
            let mut pending = group.pending.lock().unwrap_or_else(PoisonError::into_inner);
            pending.grants.push(grant);
            !std::mem::replace(&mut pending.running, true)
        };
        if start {
            let wanted = self.wanted;
            drop(self.runtime.spawn(async move { group.work(wanted).await }));
        }
        let reached = match reached.await {
            Ok(reached) => reached?,
            Err(_) => {
                let what = "the client's runtime was shut down: connect again";
                return Err(Error::new(ErrorKind::Closed, what));
            }
        };
        let Replicas { count, within, short } = self.wanted;
        if reached >= count || short == Shortfall::Accept {
            return Ok(());
        }
        let what = format!(
            "granted, but only {reached} of {count} replicas had it within {within:?}: given back; \
             check the replicas, or ask for fewer"
        );
        Err(Error::new(ErrorKind::Unconfirmed, what))
    }

    fn group(&self, at: &Address) -> Result<Arc<Group>> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(group) = groups.get(at) {
            return Ok(group.clone());
        }
        let node = Node::new(at.clone(), &self.login, &self.runtime, None)?;
        let group = Arc::new(Group { node, pending: Mutex::default() });
        groups.insert(at.clone(), group.clone());
        Ok(group)
    }
}

/// What tells whether a server has a grant, and what it answers then.
fn look(claim: &Claim, keys: &Keys) -> (redis::Cmd, String) {
    match claim.kind {
        Kind::Mutex if claim.capacity == 1 => {
            let mut cmd = redis::cmd("GETRANGE");
            cmd.arg(&keys.main).arg(0).arg(32);
            (cmd, format!("{} ", claim.id.to_hex()))
        }
        _ => {
            let mut cmd = redis::cmd("HGET");
            cmd.arg(keys.meta()).arg(claim.id.to_hex());
            (cmd, "h ".into())
        }
    }
}

impl Group {
    /// Confirms until nobody waits any more.
    async fn work(&self, wanted: Replicas) {
        loop {
            let grants = {
                let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
                if pending.grants.is_empty() {
                    pending.running = false;
                    return;
                }
                std::mem::take(&mut pending.grants)
            };
            // Connecting, the first time, is not the replicas' fault.
            let limit = wanted.within + CONNECTING;
            let answer = tokio::time::timeout(limit, self.confirm(&grants, wanted)).await;
            let mut answers = match answer {
                Ok(Ok(answers)) => answers.into_iter(),
                Ok(Err(error)) => {
                    for grant in grants {
                        // Nobody may be listening any more.
                        let _ = grant.told.send(Err(fault::explain(&error)));
                    }
                    continue;
                }
                Err(_) => vec![Value::Int(0)].into_iter(),
            };
            let reached = match answers.next_back() {
                Some(Value::Int(n)) => u32::try_from(n).unwrap_or(0),
                _ => 0,
            };
            // Without a write of its own, it has waited for an earlier one.
            if let Some(Err(error)) = answers.next_back().map(Value::extract_error) {
                for grant in grants {
                    let _ = grant.told.send(Err(fault::explain(&error)));
                }
                continue;
            }
            for grant in grants {
                let there = match answers.next() {
                    Some(Value::BulkString(found)) => found.starts_with(grant.ours.as_bytes()),
                    _ => false,
                };
                let _ = grant.told.send(Ok(if there { reached } else { 0 }));
            }
        }
    }

    async fn confirm(&self, grants: &[Grant], wanted: Replicas) -> RedisResult<Vec<Value>> {
        let mut pipeline = Pipeline::new();
        for grant in grants {
            pipeline.add_command(grant.look.clone());
        }
        if let Some(grant) = grants.first() {
            pipeline.cmd("SET").arg(&grant.mark).arg("").arg("PX").arg(60_000);
        }
        pipeline.cmd("WAIT").arg(wanted.count);
        pipeline.arg(u64::try_from(wanted.within.as_millis()).unwrap_or(1_000));
        self.node.pipeline(&pipeline).await
    }
}
