//! Which store a new connection leads to, checked before anything else is sent over it.
//!
//! # What could go wrong
//! A connection breaks, and by the time of the next one its address belongs to another server: a
//! pod's address was used again, a DNS name was changed, a node moved to another cluster. A client
//! that trusts the address takes locks there, and all other clients take them where it does not
//! look: two holders, without limit.
//!
//! # What is compared
//! - *A node of a cluster* (`Members`): its map of the slots must name at least one node of the map
//!   that this client used last. Node ids are random, survive restarts, and are different in each
//!   cluster. A new node knows the others by the time that anyone is sent to it, and a promoted
//!   replica has been in the map as a replica.
//! - *Any other server* (`Identity`): a key without expiry, [`KEY`], has a random id and the time
//!   at which it was made. The first client ever makes it; replicas, append-only files and dumps
//!   have it as well. So a promoted replica and a server that kept its data have the known id.
//!
//! # Another id, or none
//! A server that lost its data is no other server, and goes on as the store's page says. It is
//! known in one of these ways, and what fits none of them is refused:
//! - It is the same process as before (`run_id`): it was emptied, or the key was evicted.
//! - It has no id, and was started after the last reply that this client got from the store.
//! - It has another id, which was made after that reply: by a client that met the emptied server
//!   earlier.
//! - It has no id, and the sentinels, asked since the connection broke, name it. (After any failure
//!   they are asked, and a node is made anew; so its process is not known yet.)
//!
//! The last reply counts from when its request was sent: a client that was paused before it read
//! the reply must not take the restart for older than it was.
//!
//! # What is left
//! A server that is started at our address after the last reply, with no id in it, is taken for
//! ours after a restart without data; so is one whose user may neither run `INFO` nor has an id. A
//! node that is moved to another cluster by `CLUSTER RESET SOFT` keeps its node id.
//!
//! *The connection breaks in between*: it is not used. *We die after the key was written*: the next
//! client finds it.
//! *Two write it at once*: `SET NX`, then both read the same one.

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

/// The key of the store's id.
const KEY: &str = "leasehold:store";
/// By how much a server may be younger than it says, which is in whole seconds.
const ROUNDED: Duration = Duration::from_secs(1);

/// The id of a store that is one server at a time.
#[derive(Debug, Default)]
pub(super) struct Identity {
    known: Mutex<Option<Id>>,
    /// When the last request was sent that was answered, in nanoseconds of `clock`.
    heard: AtomicU64,
    clock: Clock,
}

/// An id: 32 hexadecimal digits, and when it was made, in microseconds of the server's clock.
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

/// The gate of one server's connections.
#[derive(Debug)]
struct Server {
    identity: Arc<Identity>,
    /// The process that was there last.
    run: Mutex<Option<String>>,
}

/// What a server reports of itself.
#[derive(Debug, Default)]
struct Report {
    id: Option<Id>,
    /// By its clock, in microseconds.
    now: u64,
    run: Option<String>,
    uptime: Option<Duration>,
}

impl Identity {
    /// The gate of a server that has not been connected to yet.
    pub(super) fn gate(self: &Arc<Self>) -> Arc<dyn Gate> {
        Arc::new(Server { identity: self.clone(), run: Mutex::default() })
    }
}

impl Report {
    /// Whether this is the store whose id is `known`. `run` is the process that was at this
    /// address, and `silent` the time since the last reply.
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
        let report = match ask(connection).await {
            Ok(report) => report,
            // Not known yet: whatever is wrong, calls are refused for the same reason, with more to
            // say.
            Err(error) if known.is_none() && fault::refusal(&error).is_some() => return Ok(()),
            Err(error) => return Err(error),
        };
        let heard = Moment::from_nanos(self.identity.heard.load(Ordering::Relaxed));
        let silent = self.identity.clock.now().since(heard);
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

    fn heard(&self, sent: Moment) {
        self.identity.heard.fetch_max(sent.as_nanos(), Ordering::Relaxed);
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
    // Another user may, so it is not known whether this one has to.
    let info = next().map(Info::of).ok();
    let figure = |name| info.as_ref().and_then(|info| info.figure(name)).map(str::to_owned);
    let uptime = figure("uptime_in_seconds").and_then(|text| text.parse().ok());
    Ok(Report { id, now, run: figure("run_id"), uptime: uptime.map(Duration::from_secs) })
}

/// Makes the id of a server that has none: the known one again, or a new one. `None` if it may not
/// be written.
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

/// The nodes of the cluster that a client uses.
#[derive(Debug, Default)]
pub(super) struct Members(Mutex<HashSet<String>>);

impl Members {
    /// Whether a map of the slots is of the same cluster as the last one.
    pub(super) fn is_same(&self, ranges: &[Value]) -> bool {
        let known = locked(&self.0);
        let ids = ids(ranges);
        // Some servers that act as a cluster give their nodes no ids.
        let is_anonymous = ids.is_empty() && !ranges.is_empty();
        known.is_empty() || is_anonymous || ids.iter().any(|id| known.contains(*id))
    }

    /// Takes over the nodes of this map.
    pub(super) fn learn(&self, ranges: &[Value]) {
        let ids: HashSet<String> = ids(ranges).into_iter().map(str::to_owned).collect();
        if !ids.is_empty() {
            *locked(&self.0) = ids;
        }
    }

    /// The error of a node that belongs to another cluster.
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

/// The ids of all nodes of a map, replicas too: in each range, from the third part on, each node is
/// its host, its port and its id.
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
    fn the_same_id_or_process_is_the_same_store() {
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
    fn a_process_without_an_id_is_the_same_store_if_it_was_started_since() {
        let known = id('a', 7);
        let silent = Duration::from_secs(60);
        for (uptime, same) in [(Some(59), true), (Some(61), true), (Some(62), false), (None, true)]
        {
            let report = report(None, Some("new"), uptime);
            assert_eq!(report.is_of(&known, Some("run"), silent), same, "{uptime:?}");
        }
        // The sentinels have named it.
        assert!(report(None, Some("new"), Some(9_999)).is_of(&known, None, silent));
    }

    #[test]
    fn another_id_is_the_same_store_if_it_was_made_since() {
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
    fn maps_of_one_cluster_share_a_node() {
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
        fn a_map_and_an_id_from_outside_are_read_or_passed_over(
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
