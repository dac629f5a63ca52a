//! Finds the master through sentinels, and finds it again after a fail-over.
//!
//! The driver does not follow fail-overs, so this does: the sentinels are asked, at once, whom they
//! call the master; whoever is named must say of itself that it is one. That is asked when there is
//! no connection yet, when one broke, when a server says that it takes no writes, and each second for
//! which an answer does not come.
//!
//! A master that is cut off from its sentinels but not from us goes on as master until it is told, and
//! acknowledges renewals that its successor knows nothing of. So one sentinel is asked each second
//! whether there was a fail-over; who knows of a later one (by its number, the configuration epoch) is
//! believed before those who know of an earlier one, and before the server's own word. Where the
//! sentinels cannot be reached either, nothing here can tell, and the store's guarantees say so.

use leasehold_core::kit::locked;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use redis::{Cmd, RedisError, RedisResult, Value};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::connection::{Node, PushListener, Script};
use super::identity::Identity;
use super::request::{TRIES, given_up, is_elsewhere, sleep};
use super::url::{Address, Login, RedisUrl};
use leasehold_core::Result;

/// What one sentinel says: how many others it knows of, and how many must agree.
pub(super) type Quorum = Option<(u32, u32)>;

/// How long a sentinel may take to answer.
const ASKED: Duration = Duration::from_millis(500);
/// After so long without an answer the sentinels are asked whether there is another master.
const LATE: Duration = Duration::from_secs(1);
/// Between two tries during a fail-over.
const PAUSE: Duration = Duration::from_millis(50);

/// A master that sentinels know by name.
#[derive(Debug)]
pub(super) struct Sentinel {
    sentinels: Vec<Arc<Node>>,
    name: String,
    login: Login,
    runtime: Handle,
    channel: String,
    hears: Arc<dyn PushListener>,
    identity: Arc<Identity>,
    current: Mutex<Option<Arc<Node>>>,
    /// The greatest number of a fail-over that a sentinel has told: who tells of an earlier one has not
    /// heard of it yet.
    epoch: AtomicU64,
    /// That of the current master.
    chosen: AtomicU64,
    /// Held by whoever looks for the master.
    looking: tokio::sync::Mutex<()>,
}

impl Sentinel {
    pub(super) fn new(
        url: &RedisUrl,
        sentinels: &[Address],
        name: &str,
        runtime: &Handle,
        channel: &str,
        hears: &Arc<dyn PushListener>,
    ) -> Result<Self> {
        let node = |at: &Address| Node::new(at.clone(), &url.sentinel_login, runtime, None, None);
        Ok(Self {
            sentinels: sentinels.iter().map(node).collect::<Result<_>>()?,
            name: name.to_owned(),
            login: url.login.clone(),
            runtime: runtime.clone(),
            channel: channel.to_owned(),
            hears: hears.clone(),
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

    /// Runs a script on the master, whoever it is by now; see
    /// [`Servers::send_noting`](super::servers::Servers).
    pub(super) async fn run(
        &self,
        script: &Script,
        call: &Cmd,
        doubt: &mut bool,
    ) -> RedisResult<Value> {
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
                Err(error) if is_elsewhere(&error) => {
                    self.doubt(&node);
                    last = Some(error);
                }
                answer => return answer,
            }
        }
        Err(given_up(last))
    }

    /// Resolves when the sentinels name another master than this one, which they are asked about
    /// for as long as it leaves us without an answer.
    async fn replaced(&self, node: &Arc<Node>) {
        loop {
            sleep(&self.runtime, LATE).await;
            if self.ask().await.is_ok_and(|at| at != *node.address()) {
                return;
            }
        }
    }

    /// Asks one of the sentinels, in their turn. A master that they have replaced may go on, and answer
    /// us, until somebody demotes it: its renewals are worth nothing.
    pub(super) async fn watch(&self, turn: usize) {
        let Some(known) = self.known() else { return };
        let count = self.sentinels.len().max(1);
        let Some(sentinel) = self.sentinels.get(turn % count) else { return };
        let Ok(Ok(told)) = tokio::time::timeout(ASKED, told(sentinel, &self.name)).await else {
            return;
        };
        self.epoch.fetch_max(told.epoch, Ordering::Relaxed);
        let newer = told.epoch > self.chosen.load(Ordering::Relaxed);
        if told.at.is_some_and(|at| newer && at != *known.address()) {
            self.doubt(&known);
            // Those who wait ask there; who holds does so at the next renewal.
            let _ = self.master().await;
        }
    }

    /// This server may be master no more.
    fn doubt(&self, node: &Arc<Node>) {
        let mut current = self.current();
        if current.as_ref().is_some_and(|known| Arc::ptr_eq(known, node)) {
            *current = None;
        }
    }

    fn known(&self) -> Option<Arc<Node>> {
        self.current().clone().filter(|node| !node.is_doubtful())
    }

    /// The master.
    pub(super) async fn master(&self) -> RedisResult<Arc<Node>> {
        if let Some(node) = self.known() {
            return Ok(node);
        }
        let _looking = self.looking.lock().await;
        if let Some(node) = self.known() {
            return Ok(node);
        }
        let (at, epoch) = self.asked().await?;
        let before = self.current().clone().filter(|node| *node.address() == at);
        let node = match before {
            Some(node) => node,
            None => {
                let listening = Some((self.channel.clone(), self.hears.clone()));
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
            // A user without the right to ask has to believe the sentinels.
            Err(error) if !is_elsewhere(&error) => {}
            Err(error) => return Err(error),
        }
        self.chosen.store(epoch, Ordering::Relaxed);
        let changed = self.current().replace(node.clone()).is_some_and(|b| !Arc::ptr_eq(&b, &node));
        if changed {
            self.hears.interrupted();
        }
        Ok(node)
    }

    /// What each sentinel says of the quorum.
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
            () = sleep(&self.runtime, ASKED) => {
                Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into())
            }
        }
    }

    /// Asks all sentinels; the first good answer counts that tells of no earlier fail-over than we know
    /// of. Where most answer and all are behind, they were set up anew.
    pub(super) async fn ask(&self) -> RedisResult<Address> {
        self.asked().await.map(|(at, _)| at)
    }

    /// The same, and the number of the fail-over.
    async fn asked(&self) -> RedisResult<(Address, u64)> {
        let mut asked = JoinSet::new();
        for node in &self.sentinels {
            let (node, name) = (node.clone(), self.name.clone());
            // On our own thread, where there are timers.
            let one = async move { tokio::time::timeout(ASKED, told(&node, &name)).await };
            asked.spawn_on(one, &self.runtime);
        }
        let (mut last, mut unknown, mut behind) = (None, false, Vec::new());
        while let Some(answer) = asked.join_next().await {
            match answer {
                Ok(Ok(Ok(Told { at: Some(at), epoch }))) => {
                    if epoch >= self.epoch.fetch_max(epoch, Ordering::Relaxed) {
                        return Ok((at, epoch));
                    }
                    behind.push((epoch, at));
                }
                Ok(Ok(Ok(Told { at: None, .. }))) => unknown = true,
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

/// Whom a sentinel calls the master, and the number of the fail-over that made it so.
struct Told {
    at: Option<Address>,
    epoch: u64,
}

async fn told(sentinel: &Node, name: &str) -> RedisResult<Told> {
    let mut both = redis::Pipeline::new();
    both.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(name);
    both.cmd("SENTINEL").arg("MASTER").arg(name);
    let mut answers = sentinel.pipeline(&both).await?.into_iter();
    let at = match answers.next().unwrap_or(Value::Nil).extract_error()? {
        Value::Array(parts) => named(&parts),
        _ => None,
    };
    let known = answers.next().unwrap_or(Value::Nil);
    Ok(Told { at, epoch: figure(&known, "config-epoch").map_or(0, u64::from) })
}

/// One figure of what a sentinel says of a master.
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
    Address::told(host, port)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::values::values;

    #[test]
    fn a_master_is_read_from_both_protocols() {
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
        fn what_a_sentinel_says_is_read_or_is_nothing(answer in values(&[
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
