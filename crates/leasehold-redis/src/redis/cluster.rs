//! Finds the node of each slot of a Redis Cluster, and follows slots that move.
//!
//! The slot map is read from any node that responds, and cached. A node that cannot serve a request
//! replies with one of these errors:
//! - `MOVED`: the slot is on the named node from now on. The map is corrected.
//! - `ASK`: this key is already on the named node, while its slot is being moved.
//! - `TRYAGAIN`: some of the keys are on this node and others on another one, for a moment.
//!
//! If a node does not respond, the map is read again, because a replica may serve its slots now.
//! The same happens if the node's address now belongs to another cluster. The node there gets no
//! requests (`redis/identity.rs`).

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

/// Maximum time for a node to return the map.
const ASKED: Duration = Duration::from_secs(1);
/// Time without a reply after which the map is read again.
const LATE: Duration = Duration::from_secs(1);
/// Pause between two attempts while slots move or nodes fail over.
const PAUSE: Duration = Duration::from_millis(20);
/// Maximum number of redirections and pauses of one request.
const HOPS: u32 = 60;

/// What this client knows about a cluster.
#[derive(Debug)]
pub(super) struct Cluster {
    seeds: Vec<Address>,
    login: Login,
    runtime: Handle,
    channel: String,
    listener: Arc<dyn PushListener>,
    members: Arc<Members>,
    map: Mutex<Map>,
    /// Lock that is held while the map is read.
    looking: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Map {
    nodes: HashMap<Address, Arc<Node>>,
    /// Node of each slot. Empty until the map has been read.
    slots: Vec<Option<Arc<Node>>>,
    /// Number of times that the map was read.
    reads: u64,
}

impl Map {
    /// Returns the nodes that serve slots.
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
        listener: &Arc<dyn PushListener>,
    ) -> Result<Self> {
        let cluster = Self {
            seeds: seeds.to_vec(),
            login: url.login.clone(),
            runtime: runtime.clone(),
            channel: channel.to_owned(),
            listener: listener.clone(),
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

    /// Returns the node at an address, and creates it if it is new. Each node has its own channel
    /// name, because a message is published to all nodes and should be received once.
    fn at(&self, at: &Address) -> Result<Arc<Node>> {
        let mut map = self.map();
        if let Some(node) = map.nodes.get(at) {
            return Ok(node.clone());
        }
        let channel = format!("{}.{}", self.channel, map.nodes.len());
        let listening = Some((channel, self.listener.clone()));
        let gate = Some(self.members.clone() as Arc<dyn Gate>);
        let node = Node::new(at.clone(), &self.login, &self.runtime, listening, gate)?;
        map.nodes.insert(at.clone(), node.clone());
        Ok(node)
    }

    fn known(&self, slot: u16) -> Option<Arc<Node>> {
        self.map().slots.get(usize::from(slot)).cloned().flatten()
    }

    /// Returns the node that serves this slot.
    pub(super) async fn node(&self, slot: u16) -> RedisResult<Arc<Node>> {
        if let Some(node) = self.known(slot).filter(|node| !node.is_doubtful()) {
            return Ok(node);
        }
        let seen = self.map().reads;
        self.read_map(seen).await?;
        self.known(slot).ok_or_else(|| unserved("no node serves this slot"))
    }

    /// Returns all nodes that serve slots.
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
        // The memory address of the node identifies it. The number only has to be unique.
        self.known(slot).map_or(0, |node| Arc::as_ptr(&node) as usize as u64)
    }

    /// Runs a script on the node of its slot. See
    /// [`Servers::send_noting`](super::servers::Servers).
    pub(super) async fn run(&self, request: &Request, doubt: &mut bool) -> RedisResult<Value> {
        let Request { slot, script, call, divisible, .. } = request;
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
                    // Nodes with different maps can redirect a request back and forth.
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
                _ if is_elsewhere(&error) && request.is_repeatable(*doubt) => {
                    failed += 1;
                    if failed >= TRIES {
                        return Err(error);
                    }
                    let seen = self.map().reads;
                    if failed > 1 {
                        sleep(&self.runtime, PAUSE).await;
                    }
                    // The node that failed may respond now, so a failure to read the map is not
                    // final.
                    let _ = self.read_map(seen).await;
                }
                _ => return Err(error),
            }
            last = Some(error);
        }
        match last {
            // The request was redirected until the limit. That is transient, so the last node's
            // error is not reported.
            Some(error) if matches!(refusal(&error), Some(Refusal::Moved | Refusal::Ask)) => {
                Err(given_up(None))
            }
            last => Err(given_up(last)),
        }
    }

    /// Waits until a node other than `node` serves this slot. Reads the map every second meanwhile.
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

    /// Reads the map again, unless another task has done so since read number `seen`.
    async fn read_map(&self, seen: u64) -> RedisResult<()> {
        let _looking = self.looking.lock().await;
        if self.map().reads != seen {
            return Ok(());
        }
        let mut all: Vec<Arc<Node>> = self.map().nodes.values().cloned().collect();
        // The nodes of the URL come first, because others may have left the cluster.
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
                // The node was moved to another cluster while the connection was open.
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

    /// Lets another node take over the channels of nodes that serve no slots any more.
    ///
    /// A waiter that joined through such a node is notified on a channel to which only a connection
    /// to that node was subscribed. All nodes forward all messages, so a connection to any other
    /// node can subscribe to it.
    fn adopt_orphans(&self) {
        let expected = self.listener.expected();
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

/// Parses one range of CLUSTER SLOTS: the first slot, the last slot, and the node that serves them.
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

/// Returns an error like the one that a node sends if a slot is not served.
fn unserved(what: &'static str) -> RedisError {
    RedisError::from((ServerErrorKind::ClusterDown.into(), "CLUSTERDOWN", what.to_owned()))
}

/// Parses the address of a node. If it has no host, the host is that of the node that reported it.
fn reachable(at: &str, told_by: &Address) -> Option<Address> {
    let (host, port) = at.rsplit_once(':')?;
    match (host, told_by) {
        ("" | "?", Address::Tcp(host, _)) => Address::reported(host, port),
        _ => Address::reported(host, port),
    }
}

/// Sends one request to the node that the slot is being moved to.
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
    fn node_without_a_host_is_at_the_queried_address() {
        let told_by = Address::reported("10.0.0.7", "7000").unwrap();
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
        fn any_slot_map_is_parsed_or_ignored(
            line in values(&["10.0.0.1", "::1", "?", "7000"]),
            host in values(&["10.0.0.1", "::1", "?", ""]),
            port in any::<i64>(),
        ) {
            let told_by = Address::reported("10.0.0.7", "7000").unwrap();
            let _ = served(&line, &told_by);
            if let Some((from, to, at)) = served(&self::line(host, port), &told_by) {
                prop_assert_eq!((from, to), (0, 5460));
                prop_assert!(!at.to_string().contains(char::is_whitespace));
            }
        }
    }
}
