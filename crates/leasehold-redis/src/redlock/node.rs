//! One server: its connection, which run of it we talk to, and whether it votes.
//!
//! A node is *met* once for each run of the server: its run id and age are read, the voting script
//! of that run is put there, and, if it has forgotten (it is new, restarted, was emptied or is another
//! server), somebody tells it what the others know once that is long enough ago
//! ([`round::recollect`]).
//!
//! A server that has a replica is not met, and has no vote: who fails over to that replica, which
//! lags behind, has two servers under one name, and one of them does not know who holds.
//!
//! [`round::recollect`]: super::round::recollect

use leasehold_core::kit::locked;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::runtime::Handle;

use super::claims::{Claims, Ear};
use super::round::Known;
use super::scripts::{self, Elements, Scripts};
use super::url::RedlockUrl;
use crate::redis::connection::{Node as Connection, Script};
use crate::redis::fault;
use crate::redis::fault::Refusal;
use crate::redis::url::Address;
use leasehold_core::{Clock, Error, ErrorKind, Moment, Result};

/// The key of a node's memory.
pub(super) const MEMORY_KEY: &str = "leasehold:redlock";

/// What a user of these servers needs, in the words of `ACL SETUSER`.
const RIGHTS: &str = "~lock-names* ~leasehold:* &leasehold:* +evalsha +eval +get +set +del +pttl \
                      +pexpire +pexpireat +time +publish +subscribe +zadd +zrem +zrange +zrank \
                      +zscore +zrangebyscore +hget +hset +hmget +hdel +scan +info";

/// One server of the majority.
#[derive(Debug)]
pub(super) struct Node {
    connection: Arc<Connection>,
    clock: Clock,
    pub(super) restart_delay: Duration,
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
    lived: Arc<Lived>,
    pub(super) settings: Settings,
}

/// What this client has lived through with one run of a server.
#[derive(Debug)]
struct Lived {
    /// It votes from here on, in nanoseconds.
    votes_from: AtomicU64,
    /// It started then, at the latest.
    started: Moment,
    /// It was a replica before it was a master.
    promoted: bool,
    voted: AtomicBool,
    /// It has run the script that releases.
    knows_release: AtomicBool,
}

impl Run {
    pub(super) fn votes_from(&self) -> Moment {
        Moment::from_nanos(self.lived.votes_from.load(Ordering::SeqCst))
    }

    /// The node has said that it does not vote until then.
    pub(super) fn votes_not_before(&self, from: Moment) {
        self.lived.votes_from.fetch_max(from.as_nanos(), Ordering::SeqCst);
    }

    /// If it has forgotten now: for how long it has, if only its start can have done that. Who voted
    /// and has forgotten was emptied since; who was promoted has the memory of another server.
    pub(super) fn has_forgotten_for(&self, now: Moment) -> Duration {
        let lived = &self.lived;
        match lived.promoted || lived.voted.load(Ordering::SeqCst) {
            true => Duration::ZERO,
            false => now.since(lived.started),
        }
    }
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
    /// So many servers copy it.
    HasReplicas(usize),
    /// The attempt was over before the node was asked.
    Over,
    Failed(RedisError),
    Strange,
    Slow(Duration),
}

impl From<RedisError> for Trouble {
    fn from(error: RedisError) -> Self {
        Self::Failed(error)
    }
}

/// A trouble in words.
pub(super) struct Problem {
    pub(super) kind: ErrorKind,
    pub(super) what: String,
    pub(super) hint: Option<String>,
}

impl Trouble {
    /// Whether the server certainly did nothing of what it was asked.
    pub(super) fn undone(&self) -> bool {
        match self {
            Self::Young(_) | Self::Forgot | Self::Twin(_) | Self::Replica => true,
            Self::HasReplicas(_) | Self::Over => true,
            Self::Failed(error) => error.is_connection_refusal(),
            Self::Strange | Self::Slow(_) => false,
        }
    }

    /// When it votes again, where that is all its trouble.
    pub(super) fn votes_in(&self) -> Option<Duration> {
        match self {
            Self::Young(left) => Some(*left),
            _ => None,
        }
    }

    /// The error about this node.
    pub(super) fn explain(&self, node: &Address) -> Error {
        let Problem { kind, what, hint } = self.problem();
        let error = Error::new(kind, format!("{node}: {what}"));
        match hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }

    /// What is wrong, without the node's address.
    pub(super) fn problem(&self) -> Problem {
        use ErrorKind::{Config, Corrupt, Denied, Unreachable};
        let problem = |kind, what: &str, hint: &str| Problem {
            kind,
            what: what.to_owned(),
            hint: (!hint.is_empty()).then(|| hint.to_owned()),
        };
        match self {
            Self::Young(left) => {
                let what = format!(
                    "has no vote for another {} (restart_delay_ms), because it restarted, was \
                     emptied or is new, and may have lost held locks",
                    seconds(*left)
                );
                problem(Unreachable, &what, "retry later")
            }
            Self::Forgot => problem(
                Unreachable,
                "restarted, was emptied or is new, and too few other servers respond to recover \
                 the tokens that it lost",
                "start the other servers",
            ),
            Self::Twin(other) => problem(
                Config,
                &format!("is the same server as {other}"),
                "name each server once in the URL",
            ),
            Self::Replica => problem(
                Config,
                "is a replica, but redlock: needs independent servers",
                "run `REPLICAOF NO ONE` on it, or use redis+sentinel://host1,host2,host3/mymaster",
            ),
            Self::HasReplicas(count) => problem(
                Config,
                &format!(
                    "has no vote because it has {count} replica(s): one that is promoted would \
                     not know the held locks"
                ),
                "run `REPLICAOF NO ONE` on the replicas, or use \
                 redis+sentinel://host1,host2,host3/mymaster",
            ),
            Self::Over => problem(Unreachable, "was not asked in time", ""),
            Self::Failed(error) => match fault::refusal(error) {
                Some(Refusal::NoPermission) => problem(
                    Denied,
                    &format!("this Redis user lacks a permission: {}", fault::shown(error)),
                    &format!("run `ACL SETUSER USER {RIGHTS}`"),
                ),
                Some(Refusal::WrongType) => problem(
                    Corrupt,
                    "the lock's key holds a value that belongs to another program",
                    "use another lock name, or add ?prefix=… to the URL",
                ),
                _ => {
                    let explained = fault::explain(error);
                    let hint = explained.hint().unwrap_or_default();
                    problem(explained.kind(), &explained.reason(), hint)
                }
            },
            Self::Strange => problem(
                Corrupt,
                "sent an unexpected reply to a leasehold script",
                "check that it is Redis 6 or later, or Valkey; if it is, report this as a bug",
            ),
            Self::Slow(limit) => {
                problem(Unreachable, &format!("did not respond within {limit:?}"), "")
            }
        }
    }
}

/// Rounded up: nobody is told to come back too early.
pub(super) fn seconds(time: Duration) -> String {
    format!("{} s", time.as_millis().div_ceil(1_000))
}

/// How long a server has been up at the least whose `uptime_in_seconds` is this: the difference of two
/// times, each cut to whole seconds.
const fn up_for(uptime_in_seconds: u64) -> Duration {
    Duration::from_secs(uptime_in_seconds.saturating_sub(1))
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
                connection: Connection::new(address.clone(), &url.login, runtime, channel, None)?,
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
    pub(super) fn channel(&self) -> Arc<str> {
        self.connection.channel().unwrap_or_default()
    }

    /// The run that we know of, if any.
    pub(super) fn run(&self) -> Option<Arc<Run>> {
        locked(&self.run).clone()
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

    /// Asks for its vote, unless the attempt is over by then: `call` adds keys and arguments to the
    /// call of the script.
    pub(super) async fn take(
        &self,
        call: impl Fn(Cmd) -> Cmd,
        over: impl Fn() -> bool,
    ) -> Result<Elements, Trouble> {
        let mut again = false;
        loop {
            let run = self.met(again).await?;
            let left = run.votes_from().since(self.clock.now());
            if !left.is_zero() {
                return Err(Trouble::Young(left));
            }
            // Nothing is awaited from here until the call is in the connection's queue, so what is
            // released after the attempt is over comes after this call.
            if over() {
                return Err(Trouble::Over);
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
        let info = Info(Elements::of(info).text().ok_or(Trouble::Strange)?);
        if info.figure("role").is_some_and(|role| role != "master") {
            return Err(Trouble::Replica);
        }
        if let replicas @ 1.. = info.replicas() {
            return Err(Trouble::HasReplicas(replicas));
        }
        let is_id = |id: &&str| id.len() == 40 && id.bytes().all(|b| b.is_ascii_hexdigit());
        let id = info.figure("run_id").filter(is_id).ok_or(Trouble::Strange)?;
        let lived = match known {
            Some(run) if run.id == id => run.lived.clone(),
            known => Arc::new(self.begin(&info, known.is_some())),
        };
        let take = scripts::take(id);
        let mut check = take.call(1);
        check.arg(MEMORY_KEY).arg("check");
        match self.ask(&take, &check).await?.text().as_deref() {
            Some("OK") => {}
            // It has restarted since.
            _ => return Err(Trouble::Forgot),
        }
        let run = Arc::new(Run { id: id.to_owned(), take, lived, settings: info.settings() });
        *locked(&self.run) = Some(run.clone());
        Ok(run)
    }

    /// A run of the server that is new to us; another one was known before it or not.
    fn begin(&self, info: &Info, knew_another: bool) -> Lived {
        let now = self.clock.now();
        let up = info.figure("uptime_in_seconds").and_then(|up| up.parse().ok()).unwrap_or(0);
        let delayed = now.plus(self.restart_delay);
        let votes_from = match knew_another {
            // It has restarted while we knew it: however old its own clock, which can be set, says
            // that it is.
            true => delayed,
            false => delayed.minus(up_for(up)),
        };
        Lived {
            votes_from: AtomicU64::new(votes_from.as_nanos()),
            started: now.minus(up_for(up)),
            promoted: info.figure("second_repl_offset") != Some("-1"),
            voted: AtomicBool::new(false),
            knows_release: AtomicBool::new(false),
        }
    }

    /// Notes that this run has voted: if it has forgotten later, it was emptied since.
    pub(super) fn has_voted(&self) {
        if let Some(run) = self.run() {
            run.lived.voted.store(true, Ordering::SeqCst);
        }
    }

    /// Runs the script that releases in one message, whether the server knows it or not: who sends it
    /// may be gone before it hears that it must be sent again.
    pub(super) async fn release(&self, script: &Script, call: &Cmd) -> Result<Elements, Trouble> {
        let run = self.run();
        let knows = |run: &Arc<Run>| run.lived.knows_release.load(Ordering::SeqCst);
        if run.as_ref().is_some_and(knows) {
            return self.ask(script, call).await;
        }
        let released = self.connection.call(&script.in_full(call)).await?;
        if let Some(run) = run {
            run.lived.knows_release.store(true, Ordering::SeqCst);
        }
        Ok(Elements::of(released))
    }

    /// Notes a release that is to be sent again; tells whether nobody does that yet.
    pub(super) fn owe(&self, call: Cmd, until: Moment) -> bool {
        let mut debts = locked(&self.debts);
        if debts.calls.len() < MOST_DEBTS {
            debts.calls.push_back((call, until));
        }
        !std::mem::replace(&mut debts.paying, true)
    }

    /// The first release that is still worth sending.
    pub(super) fn owed(&self, now: Moment) -> Option<Cmd> {
        let mut debts = locked(&self.debts);
        debts.calls.retain(|(_, until)| *until > now);
        debts.calls.front().map(|(call, _)| call.clone())
    }

    /// The first release was answered.
    pub(super) fn paid(&self) {
        locked(&self.debts).calls.pop_front();
    }

    /// Whether nothing is left; then whoever was sending them stops.
    pub(super) fn owes_nothing(&self) -> bool {
        let mut debts = locked(&self.debts);
        debts.paying = !debts.calls.is_empty();
        !debts.paying
    }

    /// What it knows of tokens, its clock, and whether it has voted since it was told that.
    pub(super) async fn known(&self, scripts: &Scripts) -> Result<(Known, u64, bool), Trouble> {
        let mut call = scripts.known.call(1);
        call.arg(MEMORY_KEY);
        let mut answer = self.ask(&scripts.known, &call).await?;
        read_known(&mut answer).ok_or(Trouble::Strange)
    }
}

fn read_known(answer: &mut Elements) -> Option<(Known, u64, bool)> {
    let (remembers, token) = (answer.natural()?, answer.natural()?);
    let known = match remembers {
        1 => Known::Remembers(token),
        _ => Known::Forgot(token),
    };
    Some((known, answer.natural()?, answer.natural()? == 1))
}

/// What a server says of itself.
struct Info(String);

impl Info {
    fn figure(&self, name: &str) -> Option<&str> {
        self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    }

    /// How many servers copy it. Who only fetches a backup has no port.
    fn replicas(&self) -> usize {
        let is_one = |line: &&str| {
            let rest = line.strip_prefix("slave").unwrap_or_default();
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            digits > 0 && rest.as_bytes().get(digits) == Some(&b':')
        };
        let listed: Vec<&str> = self.0.lines().filter(is_one).collect();
        match listed.is_empty() {
            true => self.figure("connected_slaves").and_then(|n| n.parse().ok()).unwrap_or(0),
            false => listed.iter().filter(|line| !line.contains(",port=0,")).count(),
        }
    }

    fn settings(&self) -> Settings {
        let policy = self.figure("maxmemory_policy").filter(|policy| *policy != "noeviction");
        Settings {
            evicts: policy.filter(|_| self.figure("maxmemory") != Some("0")).map(str::to_owned),
            durable: self.figure("aof_enabled") == Some("1"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::values::values;

    proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn what_a_node_knows_is_read_or_refused(answer in values(&["1", "7", ""])) {
            let mut said = Elements::of(answer.clone());
            if read_known(&mut Elements::of(answer)).is_some() {
                prop_assert!((0..4).all(|_| said.natural().is_some()));
            }
        }

        #[test]
        fn what_a_server_says_of_itself_is_read_or_passed_by(said in testbed::texts(&[
            "role:master\r\nrun_id:0123456789abcdef0123456789abcdef01234567\r\nuptime_in_seconds:17\r\n\
             connected_slaves:1\r\nslave0:ip=10.0.0.7,port=6379,state=online,offset=14,lag=0\r\n",
            "connected_slaves:2\r\nslave0:ip=10.0.0.8,port=0\r\nmaxmemory:1\r\nmaxmemory_policy:allkeys-lru\r\naof_enabled:1\r\n",
        ])) {
            let info = Info(said.clone());
            prop_assert!(info.settings().evicts.is_none_or(|policy| said.contains(&policy)));
            // A count that nobody can have lets nobody vote, as any other does.
            prop_assert!(info.replicas() == 0 || said.contains("slave"));
            let up = info.figure("uptime_in_seconds").and_then(|up| up.parse().ok()).unwrap_or(0);
            let now = Moment::from_nanos(1_000_000_000);
            prop_assert!(now.minus(up_for(up)) <= now);
        }
    }

    #[test]
    fn f78_replicas_are_counted_and_backups_are_not() {
        let replicas = |lines: &str| Info(lines.replace('|', "\r\n")).replicas();
        assert_eq!(replicas("role:master|connected_slaves:0|slave_expires:1"), 0);
        let one = "slave0:ip=10.0.0.7,port=6379,state=online,offset=14,lag=0";
        let backup = "slave1:ip=10.0.0.8,port=0,state=online,offset=0,lag=3";
        assert_eq!(replicas(&format!("connected_slaves:2|{one}|{backup}")), 1);
        assert_eq!(replicas(&format!("connected_slaves:1|{backup}")), 0);
        assert_eq!(replicas("connected_slaves:2"), 2);
    }

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
