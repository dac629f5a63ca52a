//! Finds the master through sentinels, and finds it again after a fail-over.
//!
//! The driver does not follow fail-overs, so this module does. It queries all sentinels at once for
//! the master. The named server must then report the role of a master. The sentinels are queried in
//! four cases:
//! - There is no connection yet.
//! - A connection broke.
//! - A server reports that it accepts no writes.
//! - A reply is overdue. Then the query is repeated every second.
//!
//! A master that is partitioned from its sentinels but not from this client remains a master until
//! a sentinel reaches it. It acknowledges renewals that its successor does not know. So one
//! sentinel is polled each second for a fail-over. Fail-overs have a number, the configuration
//! epoch. The sentinel that knows the latest one is trusted over the others, and over the server's
//! own role.
//!
//! If the sentinels are unreachable as well, this module cannot detect the fail-over. The store's
//! guarantees state that.

use leasehold_core::kit::locked;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use redis::{Cmd, RedisError, RedisResult, Value};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::connection::{Node, PushListener};
use super::identity::Identity;
use super::request::{Request, TRIES, given_up, is_elsewhere, sleep};
use super::url::{Address, Login, RedisUrl};
use leasehold_core::Result;

/// Reply of one sentinel: how many other sentinels it knows, and how many must agree. `None` if it
/// did not respond.
pub(super) type Quorum = Option<(u32, u32)>;

/// Maximum time for a sentinel to respond.
const QUERY_TIMEOUT: Duration = Duration::from_millis(500);
/// Time without a reply after which the sentinels are queried for another master.
const LATE: Duration = Duration::from_secs(1);
/// Pause between two attempts during a fail-over.
const PAUSE: Duration = Duration::from_millis(50);

/// A master that sentinels know by name.
#[derive(Debug)]
pub(super) struct Sentinel {
    sentinels: Vec<Arc<Node>>,
    name: String,
    login: Login,
    runtime: Handle,
    channel: String,
    listener: Arc<dyn PushListener>,
    identity: Arc<Identity>,
    current: Mutex<Option<Arc<Node>>>,
    /// Highest fail-over number that a sentinel has reported. A sentinel that reports a lower one
    /// does not know the latest fail-over yet.
    epoch: AtomicU64,
    /// Fail-over number of the current master.
    chosen: AtomicU64,
    /// Lock that is held while searching for the master.
    looking: tokio::sync::Mutex<()>,
}

impl Sentinel {
    pub(super) fn new(
        url: &RedisUrl,
        sentinels: &[Address],
        name: &str,
        runtime: &Handle,
        channel: &str,
        listener: &Arc<dyn PushListener>,
    ) -> Result<Self> {
        let node = |at: &Address| Node::new(at.clone(), &url.sentinel_login, runtime, None, None);
        Ok(Self {
            sentinels: sentinels.iter().map(node).collect::<Result<_>>()?,
            name: name.to_owned(),
            login: url.login.clone(),
            runtime: runtime.clone(),
            channel: channel.to_owned(),
            listener: listener.clone(),
            identity: Arc::default(),
            current: Mutex::default(),
            epoch: AtomicU64::new(0),
            chosen: AtomicU64::new(0),
            looking: tokio::sync::Mutex::default(),
        })
    }

    fn current(&self) -> MutexGuard<'_, Option<Arc<Node>>> {
        // No code that can panic runs between two consistent states.
        locked(&self.current)
    }

    /// Runs a script on the current master. See [`Servers::send_noting`](super::servers::Servers).
    pub(super) async fn run(&self, request: &Request, doubt: &mut bool) -> RedisResult<Value> {
        let Request { script, call, .. } = request;
        let mut last = None;
        for tries in 0..TRIES {
            if tries > 1 {
                sleep(&self.runtime, PAUSE).await;
            }
            let node = match self.master().await {
                Ok(node) => node,
                Err(error) => {
                    last = Some(error);
                    continue;
                }
            };
            let answer = tokio::select! {
                answer = node.run_noting(script, call, doubt) => answer,
                () = self.replaced(&node) => Err(given_up(None)),
            };
            match answer {
                Err(error) if is_elsewhere(&error) && request.is_repeatable(*doubt) => {
                    self.doubt(&node);
                    last = Some(error);
                }
                answer => return answer,
            }
        }
        Err(given_up(last))
    }

    /// Waits until the sentinels name a master other than `node`. Polls them every second
    /// meanwhile.
    async fn replaced(&self, node: &Arc<Node>) {
        loop {
            sleep(&self.runtime, LATE).await;
            if self.ask().await.is_ok_and(|at| at != *node.address()) {
                return;
            }
        }
    }

    /// Polls one of the sentinels, in turn. A master that the sentinels have replaced may still
    /// reply until it is demoted, but the renewals that it acknowledges have no effect.
    pub(super) async fn watch(&self, turn: usize) {
        let Some(known) = self.known() else { return };
        let count = self.sentinels.len().max(1);
        let Some(sentinel) = self.sentinels.get(turn % count) else { return };
        let query = query_master(sentinel, &self.name);
        let Ok(Ok(report)) = tokio::time::timeout(QUERY_TIMEOUT, query).await else { return };
        self.epoch.fetch_max(report.epoch, Ordering::Relaxed);
        let newer = report.epoch > self.chosen.load(Ordering::Relaxed);
        if report.at.is_some_and(|at| newer && at != *known.address()) {
            self.doubt(&known);
            // Waiters poll the new master now. Holders use it at their next renewal.
            let _ = self.master().await;
        }
    }

    /// Forgets this server, which may no longer be the master.
    fn doubt(&self, node: &Arc<Node>) {
        let mut current = self.current();
        if current.as_ref().is_some_and(|known| Arc::ptr_eq(known, node)) {
            *current = None;
        }
    }

    fn known(&self) -> Option<Arc<Node>> {
        self.current().clone().filter(|node| !node.is_doubtful())
    }

    /// Returns the master.
    pub(super) async fn master(&self) -> RedisResult<Arc<Node>> {
        if let Some(node) = self.known() {
            return Ok(node);
        }
        let _looking = self.looking.lock().await;
        if let Some(node) = self.known() {
            return Ok(node);
        }
        let (at, epoch) = self.query_all().await?;
        let before = self.current().clone().filter(|node| *node.address() == at);
        let node = match before {
            Some(node) => node,
            None => {
                let listening = Some((self.channel.clone(), self.listener.clone()));
                let gate = Some(self.identity.gate());
                Node::new(at, &self.login, &self.runtime, listening, gate)
                    .map_err(|e| RedisError::from(std::io::Error::other(e.reason())))?
            }
        };
        node.trust_again();
        let role = self.in_time(&node, &redis::cmd("ROLE")).await;
        match role {
            Ok(Value::Array(parts)) if is_word(parts.first(), b"master") => {}
            Ok(_) => {
                let what = format!(
                    "the sentinels name {} as master, but that server does not report the role \
                     master (a fail-over may be in progress)",
                    node.address()
                );
                return Err(std::io::Error::other(what).into());
            }
            // A user without permission for ROLE has to trust the sentinels.
            Err(error) if !is_elsewhere(&error) => {}
            Err(error) => return Err(error),
        }
        self.chosen.store(epoch, Ordering::Relaxed);
        let changed = self.current().replace(node.clone()).is_some_and(|b| !Arc::ptr_eq(&b, &node));
        if changed {
            self.listener.interrupted();
        }
        Ok(node)
    }

    /// Returns the quorum that each sentinel reports.
    pub(super) async fn quorums(&self) -> Vec<Quorum> {
        let mut cmd = redis::cmd("SENTINEL");
        cmd.arg("MASTER").arg(&self.name);
        let mut all = Vec::new();
        for node in &self.sentinels {
            let answer = self.in_time(node, &cmd).await;
            all.push(answer.ok().and_then(|value| {
                Some((figure(&value, "num-other-sentinels")?, figure(&value, "quorum")?))
            }));
        }
        all
    }

    async fn in_time(&self, node: &Arc<Node>, cmd: &Cmd) -> RedisResult<Value> {
        tokio::select! {
            answer = node.call(cmd) => answer,
            () = sleep(&self.runtime, QUERY_TIMEOUT) => {
                Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into())
            }
        }
    }

    /// Queries all sentinels, and returns the first master whose fail-over number is not lower than
    /// the highest known.
    ///
    /// If more than half of the sentinels report a master, all with lower numbers, the sentinels
    /// were set up again. Then this returns the master with the highest of these numbers.
    pub(super) async fn ask(&self) -> RedisResult<Address> {
        self.query_all().await.map(|(at, _)| at)
    }

    /// Queries all sentinels like `ask`, and also returns the fail-over number.
    async fn query_all(&self) -> RedisResult<(Address, u64)> {
        let mut queries = JoinSet::new();
        for node in &self.sentinels {
            let (node, name) = (node.clone(), self.name.clone());
            // The queries run on leasehold's own thread, which has timers.
            let query = async move {
                tokio::time::timeout(QUERY_TIMEOUT, query_master(&node, &name)).await
            };
            queries.spawn_on(query, &self.runtime);
        }
        let (mut last, mut unknown, mut behind) = (None, false, Vec::new());
        while let Some(answer) = queries.join_next().await {
            match answer {
                Ok(Ok(Ok(ReportedMaster { at: Some(at), epoch }))) => {
                    if epoch >= self.epoch.fetch_max(epoch, Ordering::Relaxed) {
                        return Ok((at, epoch));
                    }
                    behind.push((epoch, at));
                }
                Ok(Ok(Ok(ReportedMaster { at: None, .. }))) => unknown = true,
                Ok(Ok(Err(error))) => last = Some(error),
                Ok(Err(_)) | Err(_) => {}
            }
        }
        if behind.len() > self.sentinels.len() / 2 {
            behind.sort_by_key(|(epoch, _)| *epoch);
            if let Some((epoch, at)) = behind.pop() {
                self.epoch.store(epoch, Ordering::Relaxed);
                return Ok((at, epoch));
            }
        }
        if unknown {
            let what = "unknown master";
            let name = format!("{:?}", self.name);
            return Err((redis::ErrorKind::MasterNameNotFoundBySentinel, what, name).into());
        }
        Err(last.unwrap_or_else(|| {
            let what = "no sentinel that knows the latest fail-over responds";
            std::io::Error::new(std::io::ErrorKind::TimedOut, what).into()
        }))
    }
}

/// The master that a sentinel reports, and the number of the fail-over that promoted it.
struct ReportedMaster {
    at: Option<Address>,
    epoch: u64,
}

async fn query_master(sentinel: &Node, name: &str) -> RedisResult<ReportedMaster> {
    let mut both = redis::Pipeline::new();
    both.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(name);
    both.cmd("SENTINEL").arg("MASTER").arg(name);
    let mut answers = sentinel.pipeline(&both).await?.into_iter();
    let at = match answers.next().unwrap_or(Value::Nil).extract_error()? {
        Value::Array(parts) => named(&parts),
        _ => None,
    };
    let known = answers.next().unwrap_or(Value::Nil);
    Ok(ReportedMaster { at, epoch: figure(&known, "config-epoch").map_or(0, u64::from) })
}

/// Returns the number in the field `name` of a sentinel's reply about a master.
fn figure(value: &Value, name: &str) -> Option<u32> {
    match value {
        Value::Map(pairs) => {
            let found = pairs.iter().find(|(key, _)| is_word(Some(key), name.as_bytes()));
            found.and_then(|(_, value)| number(value))
        }
        Value::Array(flat) => {
            let mut pairs = flat.chunks_exact(2);
            let found = pairs.find(|pair| is_word(pair.first(), name.as_bytes()));
            found.and_then(|pair| number(pair.get(1)?))
        }
        _ => None,
    }
}

fn number(value: &Value) -> Option<u32> {
    match value {
        Value::BulkString(text) => std::str::from_utf8(text).ok()?.parse().ok(),
        Value::SimpleString(text) => text.parse().ok(),
        Value::Int(n) => u32::try_from(*n).ok(),
        _ => None,
    }
}

fn is_word(value: Option<&Value>, word: &[u8]) -> bool {
    match value {
        Some(Value::BulkString(bytes)) => bytes == word,
        Some(Value::SimpleString(text)) => text.as_bytes() == word,
        _ => false,
    }
}

fn named(parts: &[Value]) -> Option<Address> {
    let [Value::BulkString(host), Value::BulkString(port)] = parts else { return None };
    let host = std::str::from_utf8(host).ok()?;
    let port = std::str::from_utf8(port).ok()?;
    Address::reported(host, port)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::values::values;

    #[test]
    fn master_is_parsed_from_both_protocol_versions() {
        let word = |text: &str| Value::BulkString(text.into());
        let flat = vec![word("name"), word("m"), word("config-epoch"), word("7")];
        assert_eq!(figure(&Value::Array(flat), "config-epoch"), Some(7));
        let pairs = vec![(word("config-epoch"), Value::Int(8))];
        assert_eq!(figure(&Value::Map(pairs), "config-epoch"), Some(8));
        let at = named(&[word("::1"), word("6379")]).unwrap();
        assert_eq!(at.to_string(), "[::1]:6379");
        assert!(named(&[word("a b"), word("6379")]).is_none());
    }

    proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_sentinel_reply_is_parsed_or_ignored(answer in values(&[
            "config-epoch", "7", "name", "10.0.0.1", "::1", "6379",
        ])) {
            let _ = figure(&answer, "config-epoch");
            if let Value::Array(parts) = &answer
                && let Some(at) = named(parts)
            {
                prop_assert!(!at.to_string().contains(char::is_whitespace));
            }
        }
    }
}
