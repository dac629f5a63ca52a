//! Verifies which store a new connection leads to, before any other request is sent over it.
//!
//! # The risk
//! After a connection breaks, its address may belong to another server. For example, a pod's
//! address was reused, a DNS name was changed, or a node moved to another cluster. A client that
//! trusts the address acquires locks on that server, while all other clients use the right one.
//! That means two holders, without a time limit.
//!
//! # What is compared
//! - *A node of a cluster* (`Members`): its slot map must name at least one node of the map that
//!   this client used last. Node ids are random, survive restarts, and differ between clusters. A
//!   new node knows the other nodes before any client is redirected to it. A promoted replica was
//!   in the map as a replica.
//! - *Any other server* (`Identity`): a key without expiry, [`KEY`], contains a random id and its
//!   creation time. The first client of the store creates it. Replicas, append-only files and dumps
//!   contain it too. So a promoted replica and a server that kept its data have the known id.
//!
//! # Another id, or none
//! A server that lost its data is still the same server, and remains in use (`docs/stores/redis.md`
//! describes the effects). It is recognized in one of these ways, and any other server is refused:
//! - It is the same process as before (`run_id`). Its data was deleted, or the key was evicted.
//! - It has no id, and was started after the last reply that this client got from the store.
//! - It has another id, which was created after that reply. Another client found the empty server
//!   earlier and created the id.
//! - It has no id, and the sentinels named it when polled after the connection broke. (The client
//!   polls them after every failure and creates a new node, so the node's process is not known
//!   yet.)
//!
//! The time of the last reply is taken to be the time at which its request was sent. The time since
//! then is measured before the server is queried, so a pause of the client in between can make it
//! too short, but never too long. At worst the client refuses its own server, and tries again.
//!
//! # Limits
//! A server without an id that was started at the known address after the last reply is accepted,
//! as if it were a restart without data. So is a server without an id on which this user may not
//! run `INFO`. A node that moved to another cluster with `CLUSTER RESET SOFT` keeps its node id.
//!
//! - *The connection breaks during the check.* It is not used.
//! - *The client crashes after it wrote the key.* The next client finds the key.
//! - *Two clients write the key at the same time.* They use `SET NX`, then both read the same id.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use redis::aio::MultiplexedConnection;
use redis::{Pipeline, RedisError, RedisResult, Value};

use super::connection::Gate;
use super::fault::{self, Refusal};
use super::info::{Info, micros};
use super::url::Address;
use leasehold_core::kit::locked;
use leasehold_core::{ClaimId, Clock, Moment};

/// Key of the store's id.
const KEY: &str = "leasehold:store";
/// Maximum error of a server's reported uptime, which is in whole seconds.
const ROUNDED: Duration = Duration::from_secs(1);

/// What this client knows about a store that is on one server at a time: its id, and the time of
/// the last reply.
#[derive(Debug, Default)]
pub(super) struct Identity {
    known: Mutex<Option<Id>>,
    /// Time at which the last answered request was sent, in nanoseconds of `clock`.
    last_reply: AtomicU64,
    clock: Clock,
}

/// Id of a store: 32 hexadecimal digits, and its creation time in microseconds of the server's
/// clock.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Id {
    text: String,
    made: u64,
}

impl Id {
    fn parse(text: &str) -> Option<Self> {
        let (_, made) = text.split_once(' ')?;
        Some(Self { made: made.parse().ok()?, text: text.to_owned() })
    }
}

/// Gate of one server's connections.
#[derive(Debug)]
struct Server {
    identity: Arc<Identity>,
    /// `run_id` of the process that was last seen at this address.
    run: Mutex<Option<String>>,
}

/// Properties that a server reports about itself.
#[derive(Debug, Default)]
struct Report {
    id: Option<Id>,
    /// Time of the server's clock, in microseconds.
    now: u64,
    run: Option<String>,
    uptime: Option<Duration>,
}

impl Identity {
    /// Creates the gate of a server that has not been connected to yet.
    pub(super) fn gate(self: &Arc<Self>) -> Arc<dyn Gate> {
        Arc::new(Server { identity: self.clone(), run: Mutex::default() })
    }
}

impl Report {
    /// Returns whether this server is the store with the id `known`.
    ///
    /// `run` is the process that was at this address, and `silent` the time since the last reply.
    fn is_of(&self, known: &Id, run: Option<&str>, silent: Duration) -> bool {
        if run.is_some() && self.run.as_deref() == run {
            return true;
        }
        match &self.id {
            Some(id) if id == known => true,
            Some(id) => Duration::from_micros(self.now.saturating_sub(id.made)) <= silent,
            None => {
                let started = |uptime| uptime <= silent + ROUNDED;
                run.is_none() || self.uptime.is_none_or(started)
            }
        }
    }
}

#[async_trait]
impl Gate for Server {
    async fn admit(
        &self,
        connection: &mut MultiplexedConnection,
        _at: &Address,
    ) -> RedisResult<()> {
        let (known, run) = (locked(&self.identity.known).clone(), locked(&self.run).clone());
        // This is read before the server reads its clock. A late reply must not make `silent`
        // longer than the age of another server's id.
        let last_reply = Moment::from_nanos(self.identity.last_reply.load(Ordering::Relaxed));
        let silent = self.identity.clock.now().since(last_reply);
        let report = match ask(connection).await {
            Ok(report) => report,
            // The store is not known yet. Calls will be refused for the same reason, with a better
            // error.
            Err(error) if known.is_none() && fault::refusal(&error).is_some() => return Ok(()),
            Err(error) => return Err(error),
        };
        if let Some(known) = &known
            && !report.is_of(known, run.as_deref(), silent)
        {
            return Err(fault::elsewhere(fault::ANOTHER_SERVER.to_owned()));
        }
        let id = match report.id {
            Some(id) => Some(id),
            None => mark(connection, known, report.now).await?,
        };
        *locked(&self.run) = report.run;
        if id.is_some() {
            *locked(&self.identity.known) = id;
        }
        Ok(())
    }

    fn replied(&self, sent: Moment) {
        self.identity.last_reply.fetch_max(sent.as_nanos(), Ordering::Relaxed);
    }

    fn now(&self) -> Moment {
        self.identity.clock.now()
    }
}

async fn ask(connection: &mut MultiplexedConnection) -> RedisResult<Report> {
    let mut asked = Pipeline::new();
    asked.cmd("TIME");
    asked.cmd("GET").arg(KEY);
    asked.cmd("INFO").arg("server");
    let answers = connection.send_packed_commands(&asked, 0, asked.len()).await?;
    let mut answers = answers.into_iter().map(Value::extract_error);
    let mut next = || answers.next().unwrap_or(Ok(Value::Nil));
    let now = micros(&next()?).unwrap_or(0);
    let id = text(next()?).as_deref().and_then(Id::parse);
    // If this user may not run INFO, the run id and the uptime stay unknown, and do not cause a
    // refusal.
    let info = next().map(Info::of).ok();
    let figure = |name| info.as_ref().and_then(|info| info.figure(name)).map(str::to_owned);
    let uptime = figure("uptime_in_seconds").and_then(|text| text.parse().ok());
    Ok(Report { id, now, run: figure("run_id"), uptime: uptime.map(Duration::from_secs) })
}

/// Writes an id to a server that has none: the known id, or a new one. Returns the id that the
/// server has then, or `None` if it cannot be read.
async fn mark(
    connection: &mut MultiplexedConnection,
    known: Option<Id>,
    now: u64,
) -> RedisResult<Option<Id>> {
    let text_of = match known {
        Some(known) => known.text,
        None => {
            let random =
                ClaimId::random().map_err(|error| std::io::Error::other(error.reason()))?;
            format!("{} {now}", random.to_hex())
        }
    };
    let mut marked = Pipeline::new();
    marked.cmd("SET").arg(KEY).arg(text_of).arg("NX");
    marked.cmd("GET").arg(KEY);
    let answers = connection.send_packed_commands(&marked, 0, marked.len()).await?;
    let id = answers.into_iter().nth(1).and_then(|id| id.extract_error().ok()).and_then(text);
    Ok(id.as_deref().and_then(Id::parse))
}

fn text(value: Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes).ok(),
        _ => None,
    }
}

/// Ids of the nodes of the cluster that this client uses.
#[derive(Debug, Default)]
pub(super) struct Members(Mutex<HashSet<String>>);

impl Members {
    /// Returns whether a slot map belongs to the same cluster as the last one.
    pub(super) fn is_same(&self, ranges: &[Value]) -> bool {
        let known = locked(&self.0);
        let ids = ids(ranges);
        // Some servers that emulate a cluster give their nodes no ids.
        let is_anonymous = ids.is_empty() && !ranges.is_empty();
        known.is_empty() || is_anonymous || ids.iter().any(|id| known.contains(*id))
    }

    /// Replaces the known nodes with those of this map.
    pub(super) fn learn(&self, ranges: &[Value]) {
        let ids: HashSet<String> = ids(ranges).into_iter().map(str::to_owned).collect();
        if !ids.is_empty() {
            *locked(&self.0) = ids;
        }
    }

    /// Returns the error for a node that belongs to another cluster.
    pub(super) fn stranger(at: &Address) -> RedisError {
        fault::elsewhere(format!("{at} {}", fault::ANOTHER_CLUSTER))
    }
}

#[async_trait]
impl Gate for Members {
    async fn admit(&self, connection: &mut MultiplexedConnection, at: &Address) -> RedisResult<()> {
        if locked(&self.0).is_empty() {
            return Ok(());
        }
        let mut slots = redis::cmd("CLUSTER");
        slots.arg("SLOTS");
        let answer = connection.send_packed_command(&slots).await;
        match answer.and_then(Value::extract_error) {
            Ok(Value::Array(ranges)) if self.is_same(&ranges) => Ok(()),
            Ok(_) => Err(Self::stranger(at)),
            Err(error) if fault::refusal(&error) == Some(Refusal::NoCluster) => {
                Err(Self::stranger(at))
            }
            Err(error) => Err(error),
        }
    }
}

/// Returns the ids of all nodes of a map, including replicas. In each range, the third and all
/// later parts are nodes, each with host, port and id.
fn ids(ranges: &[Value]) -> HashSet<&str> {
    let nodes = ranges.iter().filter_map(|range| match range {
        Value::Array(parts) => parts.get(2..),
        _ => None,
    });
    nodes.flatten().filter_map(id).collect()
}

fn id(node: &Value) -> Option<&str> {
    let Value::Array(parts) = node else { return None };
    let Some(Value::BulkString(id)) = parts.get(2) else { return None };
    std::str::from_utf8(id).ok().filter(|id| !id.is_empty())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::values::values;

    const SECOND: Duration = Duration::from_secs(1);

    fn id(digit: char, made: u64) -> Id {
        Id::parse(&format!("{} {made}", digit.to_string().repeat(32))).unwrap()
    }

    fn report(id: Option<Id>, run: Option<&str>, uptime: Option<u64>) -> Report {
        let (run, uptime) = (run.map(str::to_owned), uptime.map(Duration::from_secs));
        Report { id, now: 100_000_000, run, uptime }
    }

    #[test]
    fn same_id_or_process_means_same_store() {
        let known = id('a', 7);
        let promoted = report(Some(known.clone()), Some("other"), Some(9_999));
        assert!(promoted.is_of(&known, Some("run"), SECOND));
        for emptied in
            [report(None, Some("run"), Some(9_999)), report(Some(id('b', 8)), Some("run"), None)]
        {
            assert!(emptied.is_of(&known, Some("run"), SECOND));
        }
    }

    #[test]
    fn server_without_an_id_is_the_same_store_if_started_since() {
        let known = id('a', 7);
        let silent = Duration::from_secs(60);
        for (uptime, same) in [(Some(59), true), (Some(61), true), (Some(62), false), (None, true)]
        {
            let report = report(None, Some("new"), uptime);
            assert_eq!(report.is_of(&known, Some("run"), silent), same, "{uptime:?}");
        }
        // The sentinels have named this server, so its process is not known yet.
        assert!(report(None, Some("new"), Some(9_999)).is_of(&known, None, silent));
    }

    #[test]
    fn different_id_is_the_same_store_if_created_since() {
        let known = id('a', 7);
        for (made, same) in [(99_000_000, true), (98_999_999, false), (100_000_001, true)] {
            let report = report(Some(id('b', made)), Some("new"), Some(0));
            assert_eq!(report.is_of(&known, Some("run"), SECOND), same, "{made}");
            assert_eq!(report.is_of(&known, None, SECOND), same, "{made}");
        }
    }

    fn node(id: &str) -> Value {
        let word = |text: &str| Value::BulkString(text.into());
        Value::Array(vec![word("10.0.0.7"), Value::Int(7000), word(id)])
    }

    fn range(nodes: &[&str]) -> Value {
        let mut parts = vec![Value::Int(0), Value::Int(5460)];
        parts.extend(nodes.iter().map(|id| node(id)));
        Value::Array(parts)
    }

    #[test]
    fn slot_maps_of_one_cluster_share_a_node() {
        let members = Members::default();
        assert!(members.is_same(&[]));
        members.learn(&[range(&["a", "replica"]), range(&["b"])]);
        for (map, same) in [
            (vec![range(&["replica"]), range(&["new"])], true),
            (vec![range(&["x"]), range(&["y", "b"])], true),
            (vec![range(&["x"]), range(&["y"])], false),
            (vec![], false),
            (vec![range(&[])], true),
        ] {
            assert_eq!(members.is_same(&map), same, "{map:?}");
        }
        members.learn(&[range(&["c"])]);
        assert!(!members.is_same(&[range(&["a"])]));
    }

    proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_slot_map_and_store_id_are_parsed_or_ignored(
            map in values(&["10.0.0.1", "a", ""]),
            text in testbed::texts(&["0123456789abcdef0123456789abcdef 1700000000000000"]),
        ) {
            if let Value::Array(ranges) = &map {
                let members = Members::default();
                members.learn(ranges);
                prop_assert!(members.is_same(ranges));
            }
            if let Some(id) = Id::parse(&text) {
                prop_assert_eq!(id.text, text);
            }
        }
    }
}
