//! One server: its connection, which run of it we talk to, and whether it votes.
//!
//! A node is *met* once for each run of the server: its run id and age are read, the voting script
//! of that run is put there, and, if it has forgotten (it is new, or restarted), somebody tells it
//! what the others know once it is old enough ([`round::recollect`]).
//!
//! [`round::recollect`]: super::round::recollect

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::runtime::Handle;

use super::claims::{Claims, Ear};
use super::round::Known;
use super::scripts::{self, Elements, Scripts};
use super::url::RedlockUrl;
use crate::clock::{Clock, Moment};
use crate::error::{Error, ErrorKind, Result};
use crate::store::redis::connection::{Node as Connection, Script};
use crate::store::redis::fault::{self, Refusal};
use crate::store::redis::url::Address;

/// The key of a node's memory.
pub(super) const MEMORY_KEY: &str = "leasehold:redlock";

/// What a user of these servers needs, in the words of `ACL SETUSER`.
const RIGHTS: &str = "~lock-names* ~leasehold:* &leasehold:* +evalsha +eval +get +set +del +pttl \
                      +pexpire +pexpireat +time +publish +subscribe +zadd +zrem +zrange +zrank \
                      +zscore +zrangebyscore +hget +hset +hmget +hdel +scan +info (see \
                      docs/stores/redlock.md)";

/// One server of the majority.
#[derive(Debug)]
pub(super) struct Node {
    connection: Arc<Connection>,
    clock: Clock,
    restart_delay: Duration,
    run: Mutex<Option<Arc<Run>>>,
    /// Held by whoever meets it.
    meeting: tokio::sync::Mutex<()>,
    debts: Mutex<Debts>,
    /// Held by whoever tells it what it forgot.
    pub(super) telling: tokio::sync::Mutex<()>,
}

/// The most releases that are owed to one node; beyond, its leases do it.
const MOST_DEBTS: usize = 10_000;

/// Releases that a node has not answered yet.
#[derive(Debug, Default)]
struct Debts {
    /// Each with the time at which its lease is over.
    calls: VecDeque<(Cmd, Moment)>,
    /// Somebody is sending them.
    paying: bool,
}

/// One run of a server.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) id: String,
    take: Script,
    /// It votes from here on.
    pub(super) votes_from: Moment,
    pub(super) settings: Settings,
}

/// What people should know of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) evicts: Option<String>,
    pub(super) durable: bool,
}

/// Why a node did not do what it was asked.
#[derive(Debug)]
pub(super) enum Trouble {
    /// It is reached, and does not vote yet.
    Young(Duration),
    /// It has forgotten.
    Forgot,
    /// Another name in the URL leads to the same server.
    Twin(Address),
    /// It copies another server, and has no vote of its own.
    Replica,
    Failed(RedisError),
    Strange,
    Slow(Duration),
}

impl From<RedisError> for Trouble {
    fn from(error: RedisError) -> Self {
        Self::Failed(error)
    }
}

impl Trouble {
    /// Whether the server certainly did nothing of what it was asked.
    pub(super) fn undone(&self) -> bool {
        match self {
            Self::Young(_) | Self::Forgot | Self::Twin(_) | Self::Replica => true,
            Self::Failed(error) => error.is_connection_refusal(),
            Self::Strange | Self::Slow(_) => false,
        }
    }

    pub(super) fn explain(&self, node: &Address) -> Error {
        let unreachable = |what: String| Error::new(ErrorKind::Unreachable, what);
        match self {
            Self::Young(left) => unreachable(format!(
                "{node} has restarted, and votes in {left:?} (restart_delay_ms): it may have lost \
                 locks that are held"
            )),
            Self::Forgot => unreachable(format!(
                "{node} has restarted, and too few of the others answer to tell it what it missed"
            )),
            Self::Twin(other) => Error::new(
                ErrorKind::Config,
                format!("{node} and {other} are the same server: name each server once"),
            ),
            Self::Replica => Error::new(
                ErrorKind::Config,
                format!(
                    "{node} is a replica: a redlock: store needs servers that know nothing of each other"
                ),
            ),
            Self::Failed(error) if fault::refusal(error) == Some(Refusal::NoPermission) => {
                let what = format!("{node}: this Redis user lacks a right; it needs: {RIGHTS}");
                Error::new(ErrorKind::Denied, what).because(fault::shown(error))
            }
            Self::Failed(error) => {
                let explained = fault::explain(error);
                Error::new(explained.kind(), format!("{node}: {}", explained.reason()))
            }
            Self::Strange => Error::new(
                ErrorKind::Corrupt,
                format!("{node} answered what leasehold does not know: is it a Redis server?"),
            ),
            Self::Slow(limit) => unreachable(format!("{node} did not answer within {limit:?}")),
        }
    }
}

/// How long a server has been up at the least whose `uptime_in_seconds` is this: the difference of two
/// times, each cut to whole seconds.
const fn up_for(uptime_in_seconds: u64) -> Duration {
    Duration::from_secs(uptime_in_seconds.saturating_sub(1))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that can panic runs between two consistent states.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Node {
    /// The servers of the URL, none of them connected to yet.
    pub(super) fn all(
        url: &RedlockUrl,
        runtime: &Handle,
        claims: &Arc<Claims>,
        channel: &str,
    ) -> Result<Vec<Arc<Self>>> {
        let one = |(node, address): (usize, &Address)| {
            let ear = Arc::new(Ear { node, claims: claims.clone() });
            let channel = Some((format!("{MEMORY_KEY}:{channel}"), ear as Arc<_>));
            Ok(Arc::new(Self {
                connection: Connection::new(address.clone(), &url.login, runtime, channel)?,
                clock: Clock::default(),
                restart_delay: url.restart_delay,
                run: Mutex::default(),
                meeting: tokio::sync::Mutex::default(),
                debts: Mutex::default(),
                telling: tokio::sync::Mutex::default(),
            }))
        };
        url.nodes.iter().enumerate().map(one).collect()
    }

    pub(super) fn address(&self) -> &Address {
        self.connection.address()
    }

    /// Where its messages reach us, from this runtime.
    pub(super) fn channel(&self) -> String {
        self.connection.channel().unwrap_or_default()
    }

    /// The run that we know of, if any.
    pub(super) fn run(&self) -> Option<Arc<Run>> {
        lock(&self.run).clone()
    }

    /// Runs a script that does not vote.
    pub(super) async fn ask(&self, script: &Script, call: &Cmd) -> Result<Elements, Trouble> {
        Ok(Elements::of(self.connection.run(script, call).await?))
    }

    /// Runs many commands at once.
    pub(super) async fn ask_all(
        &self,
        script: &Script,
        calls: &[Cmd],
    ) -> Result<Vec<Value>, Trouble> {
        let [first, ..] = calls else { return Ok(Vec::new()) };
        let mut pipeline = redis::pipe();
        calls.iter().for_each(|call| {
            pipeline.add_command(call.clone());
        });
        let answers = self.connection.pipeline(&pipeline).await?;
        let unknown = |answer: &Value| match answer {
            Value::ServerError(error) => error.code() == "NOSCRIPT",
            _ => false,
        };
        if !answers.iter().any(unknown) {
            return Ok(answers);
        }
        // Once in full, so that the server knows it; the first may then be done twice, which changes
        // nothing.
        self.connection.run(script, first).await?;
        Ok(self.connection.pipeline(&pipeline).await?)
    }

    /// Runs one command.
    pub(super) async fn call(&self, cmd: &Cmd) -> Result<Value, Trouble> {
        Ok(self.connection.call(cmd).await?)
    }

    /// Asks for its vote: `call` adds keys and arguments to the call of the script.
    pub(super) async fn take(&self, call: impl Fn(Cmd) -> Cmd) -> Result<Elements, Trouble> {
        let mut again = false;
        loop {
            let run = self.met(again).await?;
            let left = run.votes_from.since(self.clock.now());
            if !left.is_zero() {
                return Err(Trouble::Young(left));
            }
            match self.connection.call(&call(run.take.call(5))).await {
                // Another run of the server, or somebody flushed its scripts.
                Err(error) if fault::refusal(&error) == Some(Refusal::NoScript) && !again => {
                    again = true;
                }
                answer => return Ok(Elements::of(answer?)),
            }
        }
    }

    /// Meets the server, unless that was done; `again` in any case.
    pub(super) async fn met(&self, again: bool) -> Result<Arc<Run>, Trouble> {
        let before = self.run();
        if let Some(run) = before.clone().filter(|_| !again) {
            return Ok(run);
        }
        let _meeting = self.meeting.lock().await;
        let known = self.run();
        // Somebody else may have met it while we waited.
        let same = known.as_ref().map(Arc::as_ptr) == before.as_ref().map(Arc::as_ptr);
        if let Some(run) = known.clone().filter(|_| !same) {
            return Ok(run);
        }
        let info = self.connection.call(&redis::cmd("INFO")).await?;
        let info = Elements::of(info).text().ok_or(Trouble::Strange)?;
        let figure = |name: &str| {
            info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
        };
        if figure("role").is_some_and(|role| role != "master") {
            return Err(Trouble::Replica);
        }
        let is_id = |id: &&str| id.len() == 40 && id.bytes().all(|b| b.is_ascii_hexdigit());
        let id = figure("run_id").filter(is_id).ok_or(Trouble::Strange)?;
        let up = figure("uptime_in_seconds").and_then(|up| up.parse().ok()).unwrap_or(0);
        let now = self.clock.now();
        let delayed = now.plus(self.restart_delay);
        let votes_from = match known {
            Some(run) if run.id == id => run.votes_from,
            // It has restarted while we knew it: however old its own clock, which can be set, says
            // that it is.
            Some(_) => delayed,
            None => delayed.minus(up_for(up)),
        };
        let take = scripts::take(id);
        let mut check = take.call(1);
        check.arg(MEMORY_KEY).arg("check");
        match self.ask(&take, &check).await?.text().as_deref() {
            Some("OK") => {}
            // It has restarted since.
            _ => return Err(Trouble::Forgot),
        }
        let policy = figure("maxmemory_policy").filter(|policy| *policy != "noeviction");
        let settings = Settings {
            evicts: policy.filter(|_| figure("maxmemory") != Some("0")).map(str::to_owned),
            durable: figure("aof_enabled") == Some("1"),
        };
        let run = Arc::new(Run { id: id.to_owned(), take, votes_from, settings });
        *lock(&self.run) = Some(run.clone());
        Ok(run)
    }

    /// Notes a release that is to be sent again; tells whether nobody does that yet.
    pub(super) fn owe(&self, call: Cmd, until: Moment) -> bool {
        let mut debts = lock(&self.debts);
        if debts.calls.len() < MOST_DEBTS {
            debts.calls.push_back((call, until));
        }
        !std::mem::replace(&mut debts.paying, true)
    }

    /// The first release that is still worth sending.
    pub(super) fn owed(&self, now: Moment) -> Option<Cmd> {
        let mut debts = lock(&self.debts);
        debts.calls.retain(|(_, until)| *until > now);
        debts.calls.front().map(|(call, _)| call.clone())
    }

    /// The first release was answered.
    pub(super) fn paid(&self) {
        lock(&self.debts).calls.pop_front();
    }

    /// Whether nothing is left; then whoever was sending them stops.
    pub(super) fn owes_nothing(&self) -> bool {
        let mut debts = lock(&self.debts);
        debts.paying = !debts.calls.is_empty();
        !debts.paying
    }

    /// What it knows of tokens, and its clock.
    pub(super) async fn known(&self, scripts: &Scripts) -> Result<(Known, u64), Trouble> {
        let mut call = scripts.known.call(1);
        call.arg(MEMORY_KEY);
        let mut answer = self.ask(&scripts.known, &call).await?;
        let remembers = answer.natural();
        let (Some(remembers), Some(token), Some(clock)) =
            (remembers, answer.natural(), answer.natural())
        else {
            return Err(Trouble::Strange);
        };
        let known = match remembers {
            1 => Known::Remembers(token),
            _ => Known::Forgot(token),
        };
        Ok((known, clock))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s33_uptime_is_truncated_twice() {
        // In milliseconds. Started late in a second and asked early in one, it says a second more.
        for start in [0, 1, 500, 999] {
            for up in [0, 1, 999, 1_000, 1_001, 30_000, 30_999] {
                let says = (start + up) / 1_000 - start / 1_000;
                assert!(up_for(says) <= Duration::from_millis(up), "{up} ms from {start}");
                assert!(up_for(says) + Duration::from_secs(2) > Duration::from_millis(up));
            }
        }
    }
}
