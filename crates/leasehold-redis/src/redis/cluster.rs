//! Finds the node of each slot of a Redis Cluster, and follows slots that move.
//!
//! The map is read from any node that answers and kept; a node that redirects a request corrects it.
//! `MOVED`: that slot is there from now on. `ASK`: this key is already there, while its slot is on
//! its way. `TRYAGAIN`: some of the keys are here and some there; that passes in a moment.
//! A node that does not answer makes us read the map again, since its replica may have its slots by
//! now. So does one whose address belongs to another cluster by now, which gets no request of ours
//! (`redis/identity.rs`).

use leasehold_core::kit::locked;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use redis::{Cmd, Pipeline, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::runtime::Handle;

use super::connection::{Gate, Node, PushListener, Script};
use super::fault::{Refusal, refusal};
use super::identity::Members;
use super::keys::SLOTS;
use super::request::{Request, TRIES, given_up, is_elsewhere, sleep};
use super::url::{Address, Login, RedisUrl};
use leasehold_core::Result;

/// How long a node may take to tell the map.
const ASKED: Duration = Duration::from_secs(1);
/// After so long without an answer the map is read anew.
const LATE: Duration = Duration::from_secs(1);
/// Between two tries while slots move or nodes fail over.
const PAUSE: Duration = Duration::from_millis(20);
/// How many redirections and pauses one request may meet.
const HOPS: u32 = 60;

/// A cluster, as far as it is known.
#[derive(Debug)]
pub(super) struct Cluster {
    seeds: Vec<Address>,
    login: Login,
    runtime: Handle,
    channel: String,
    hears: Arc<dyn PushListener>,
    members: Arc<Members>,
    map: Mutex<Map>,
    /// Held by whoever reads the map.
    looking: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Map {
    nodes: HashMap<Address, Arc<Node>>,
    /// The node of each slot; empty until the map was read.
    slots: Vec<Option<Arc<Node>>>,
    /// How often it was read.
    reads: u64,
}

impl Map {
    /// The nodes that have slots.
    fn masters(&self) -> Vec<Arc<Node>> {
        let mut masters: Vec<Arc<Node>> = Vec::new();
        for node in self.slots.iter().flatten() {
            if !masters.iter().any(|known| Arc::ptr_eq(known, node)) {
                masters.push(node.clone());
            }
        }
        masters
    }
}

impl Cluster {
    pub(super) fn new(
        url: &RedisUrl,
        seeds: &[Address],
        runtime: &Handle,
        channel: &str,
        hears: &Arc<dyn PushListener>,
    ) -> Result<Self> {
        let cluster = Self {
            seeds: seeds.to_vec(),
            login: url.login.clone(),
            runtime: runtime.clone(),
            channel: channel.to_owned(),
            hears: hears.clone(),
            members: Arc::default(),
            map: Mutex::default(),
            looking: tokio::sync::Mutex::default(),
        };
        for seed in seeds {
            cluster.at(seed)?;
        }
        Ok(cluster)
    }

    fn map(&self) -> MutexGuard<'_, Map> {
        // No code that can panic runs between two consistent states.
        locked(&self.map)
    }

    /// The node at an address. Each has a channel of its own name: a message is published to all
    /// nodes, and shall be heard once.
    fn at(&self, at: &Address) -> Result<Arc<Node>> {
        let mut map = self.map();
        if let Some(node) = map.nodes.get(at) {
            return Ok(node.clone());
        }
        let channel = format!("{}.{}", self.channel, map.nodes.len());
        let listening = Some((channel, self.hears.clone()));
        let gate = Some(self.members.clone() as Arc<dyn Gate>);
        let node = Node::new(at.clone(), &self.login, &self.runtime, listening, gate)?;
        map.nodes.insert(at.clone(), node.clone());
        Ok(node)
    }

    fn known(&self, slot: u16) -> Option<Arc<Node>> {
        self.map().slots.get(usize::from(slot)).cloned().flatten()
    }

    /// The node of this slot.
    pub(super) async fn node(&self, slot: u16) -> RedisResult<Arc<Node>> {
        if let Some(node) = self.known(slot).filter(|node| !node.is_doubtful()) {
            return Ok(node);
        }
        let seen = self.map().reads;
        self.read_map(seen).await?;
        self.known(slot).ok_or_else(|| unserved("no node serves this slot"))
    }

    /// All nodes that have slots.
    pub(super) async fn masters(&self) -> RedisResult<Vec<Arc<Node>>> {
        let seen = self.map().reads;
        self.read_map(seen).await?;
        let masters = self.map().masters();
        if masters.is_empty() {
            return Err(unserved("no node serves any slot"));
        }
        Ok(masters)
    }

    pub(super) fn member(&self, slot: u16) -> u64 {
        // The place of the node in memory is as good a number as any: it only tells them apart.
        self.known(slot).map_or(0, |node| Arc::as_ptr(&node) as usize as u64)
    }

    /// Runs a script on the node of its slot; see [`Servers::send_noting`](super::servers::Servers).
    pub(super) async fn run(&self, request: &Request, doubt: &mut bool) -> RedisResult<Value> {
        let Request { slot, script, call, divisible } = request;
        let slot = *slot;
        let (mut failed, mut moved, mut asking) = (0, 0, None);
        let mut last = None;
        for _ in 0..HOPS {
            let (node, asked) = match asking.take() {
                Some(node) => (node, true),
                None => match self.node(slot).await {
                    Ok(node) => (node, false),
                    Err(error) => {
                        failed += 1;
                        last = Some(error);
                        if failed >= TRIES {
                            break;
                        }
                        sleep(&self.runtime, PAUSE).await;
                        continue;
                    }
                },
            };
            let answer = match asked {
                true => ask_there(&node, script, call, doubt).await,
                false => tokio::select! {
                    answer = node.run_noting(script, call, doubt) => answer,
                    () = self.replaced(slot, &node) => Err(given_up(None)),
                },
            };
            let Err(error) = answer else { return answer };
            match refusal(&error) {
                Some(Refusal::Moved) => {
                    moved += 1;
                    // Nodes that do not agree yet send us to and fro.
                    if moved > 2 {
                        sleep(&self.runtime, PAUSE).await;
                    }
                    if let Some(to) = self.redirected(&node, &error) {
                        let mut map = self.map();
                        if let Some(of) = map.slots.get_mut(usize::from(slot)) {
                            *of = Some(to);
                        }
                        drop(map);
                        self.adopt_orphans();
                    }
                }
                Some(Refusal::Ask) => asking = self.redirected(&node, &error),
                Some(Refusal::TryAgain) if *divisible => return Err(error),
                Some(Refusal::TryAgain) => sleep(&self.runtime, PAUSE).await,
                _ if is_elsewhere(&error) => {
                    failed += 1;
                    if failed >= TRIES {
                        return Err(error);
                    }
                    let seen = self.map().reads;
                    if failed > 1 {
                        sleep(&self.runtime, PAUSE).await;
                    }
                    // Whoever was asked before may answer by now, so its failure is not final.
                    let _ = self.read_map(seen).await;
                }
                _ => return Err(error),
            }
            last = Some(error);
        }
        match last {
            // Sent to and fro until we gave up: a matter of time, not of what was written.
            Some(error) if matches!(refusal(&error), Some(Refusal::Moved | Refusal::Ask)) => {
                Err(given_up(None))
            }
            last => Err(given_up(last)),
        }
    }

    /// Resolves when another node has this slot, which is looked at for as long as this one leaves
    /// us without an answer.
    async fn replaced(&self, slot: u16, node: &Arc<Node>) {
        loop {
            sleep(&self.runtime, LATE).await;
            let seen = self.map().reads;
            let read = self.read_map(seen).await;
            if read.is_ok() && self.known(slot).is_some_and(|now| !Arc::ptr_eq(&now, node)) {
                return;
            }
        }
    }

    fn redirected(&self, from: &Node, error: &RedisError) -> Option<Arc<Node>> {
        let (to, _) = error.redirect_node()?;
        self.at(&reachable(to, from.address())?).ok()
    }

    /// Reads the map anew, unless somebody has done so since it was read for the `seen`th time.
    async fn read_map(&self, seen: u64) -> RedisResult<()> {
        let _looking = self.looking.lock().await;
        if self.map().reads != seen {
            return Ok(());
        }
        let mut all: Vec<Arc<Node>> = self.map().nodes.values().cloned().collect();
        // Those that the URL names first, since others may have left the cluster.
        all.sort_by_key(|node| (node.is_doubtful(), !self.seeds.contains(node.address())));
        let mut cmd = redis::cmd("CLUSTER");
        cmd.arg("SLOTS");
        let mut last = None;
        for node in all {
            let answer = tokio::select! {
                answer = node.call(&cmd) => answer,
                () = sleep(&self.runtime, ASKED) => {
                    Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into())
                }
            };
            match answer {
                // It was moved to another cluster while we were connected.
                Ok(Value::Array(ranges)) if !self.members.is_same(&ranges) => {
                    last = Some(Members::stranger(node.address()));
                }
                Ok(Value::Array(ranges)) => {
                    self.members.learn(&ranges);
                    let slots = self.slots_of(&node, &ranges);
                    let mut map = self.map();
                    map.slots = slots;
                    map.reads += 1;
                    drop(map);
                    self.adopt_orphans();
                    return Ok(());
                }
                Ok(_) => {}
                Err(error) => last = Some(error),
            }
        }
        Err(given_up(last))
    }

    /// Who joined by a node that serves nothing any more is told on a channel to which only a connection
    /// to that node listened. All nodes pass all messages on, so any other can listen in its place.
    fn adopt_orphans(&self) {
        let expected = self.hears.expected();
        if expected.is_empty() {
            return;
        }
        let masters = self.map().masters();
        let mut orphans = expected;
        orphans.retain(|channel| !masters.iter().any(|node| node.listens_to(channel)));
        orphans.sort_unstable();
        orphans.dedup();
        let heir = masters.iter().find(|node| !node.is_doubtful()).or(masters.first());
        if let Some(heir) = heir.filter(|_| !orphans.is_empty()) {
            heir.adopt(orphans);
        }
    }

    fn slots_of(&self, told_by: &Node, ranges: &[Value]) -> Vec<Option<Arc<Node>>> {
        let mut slots = vec![None; usize::from(SLOTS)];
        for range in ranges {
            let Some((from, to, at)) = served(range, told_by.address()) else { continue };
            let Ok(node) = self.at(&at) else { continue };
            for slot in slots.iter_mut().take(to.saturating_add(1)).skip(from) {
                *slot = Some(node.clone());
            }
        }
        slots
    }
}

/// One line of CLUSTER SLOTS: from which slot to which, and who serves them.
fn served(range: &Value, told_by: &Address) -> Option<(usize, usize, Address)> {
    let Value::Array(parts) = range else { return None };
    let [Value::Int(from), Value::Int(to), Value::Array(master), ..] = parts.as_slice() else {
        return None;
    };
    let [host, Value::Int(port), ..] = master.as_slice() else { return None };
    let host = match host {
        Value::BulkString(host) => std::str::from_utf8(host).unwrap_or_default(),
        _ => "",
    };
    let at = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let at = reachable(&at, told_by)?;
    Some((usize::try_from(*from).ok()?, usize::try_from(*to).ok()?, at))
}

/// As a node would say it.
fn unserved(what: &'static str) -> RedisError {
    RedisError::from((ServerErrorKind::ClusterDown.into(), "CLUSTERDOWN", what.to_owned()))
}

/// A node that does not know its own host is where whoever named it is.
fn reachable(at: &str, told_by: &Address) -> Option<Address> {
    let (host, port) = at.rsplit_once(':')?;
    match (host, told_by) {
        ("" | "?", Address::Tcp(host, _)) => Address::told(host, port),
        _ => Address::told(host, port),
    }
}

/// One request to a node that is only about to get the slot.
async fn ask_there(
    node: &Arc<Node>,
    script: &Script,
    call: &Cmd,
    doubt: &mut bool,
) -> RedisResult<Value> {
    let mut full = None;
    let before = std::mem::replace(doubt, true);
    loop {
        let mut pipeline = Pipeline::new();
        pipeline.add_command(redis::cmd("ASKING"));
        pipeline.add_command(full.clone().unwrap_or_else(|| call.clone()));
        let last = node.pipeline(&pipeline).await?.pop();
        *doubt = before;
        match last.unwrap_or(Value::Nil).extract_error() {
            Err(error) if full.is_none() && refusal(&error) == Some(Refusal::NoScript) => {
                full = Some(script.in_full(call));
            }
            answer => return answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::values::values;

    fn line(host: Value, port: i64) -> Value {
        let master = Value::Array(vec![host, Value::Int(port), Value::Nil]);
        Value::Array(vec![Value::Int(0), Value::Int(5460), master])
    }

    #[test]
    fn a_node_that_does_not_know_its_host_is_where_it_was_asked() {
        let told_by = Address::told("10.0.0.7", "7000").unwrap();
        let at = |host: Value| served(&line(host, 7001), &told_by).map(|(.., at)| at.to_string());
        let word = |text: &str| Value::BulkString(text.into());
        assert_eq!(at(Value::Nil).as_deref(), Some("10.0.0.7:7001"));
        assert_eq!(at(word("")).as_deref(), Some("10.0.0.7:7001"));
        assert_eq!(at(word("10.0.0.8")).as_deref(), Some("10.0.0.8:7001"));
        assert_eq!(at(word("::1")).as_deref(), Some("[::1]:7001"));
        assert!(served(&line(word("10.0.0.8"), -1), &told_by).is_none());
    }

    proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn a_map_from_outside_is_read_or_passed_over(
            line in values(&["10.0.0.1", "::1", "?", "7000"]),
            host in values(&["10.0.0.1", "::1", "?", ""]),
            port in any::<i64>(),
        ) {
            let told_by = Address::told("10.0.0.7", "7000").unwrap();
            let _ = served(&line, &told_by);
            if let Some((from, to, at)) = served(&self::line(host, port), &told_by) {
                prop_assert_eq!((from, to), (0, 5460));
                prop_assert!(!at.to_string().contains(char::is_whitespace));
            }
        }
    }
}
