//! One server: its connection, its current run, and whether it votes.
//!
//! A client *meets* a node once for each run of the server. It reads the run id and the age, and
//! loads the voting script of that run. The node may have forgotten its data, because it is new,
//! was restarted or emptied, or is another server. A client then restores the highest token from
//! the other nodes after the delay ([`round::recollect`]).
//!
//! A server that has a replica is not met, and has no vote. After a fail-over to that replica,
//! which lags behind, two servers use one name. One of them does not know the held locks.
//!
//! [`round::recollect`]: super::round::recollect

use leasehold_core::kit::locked;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::runtime::Handle;

use super::claims::{Claims, NodePushListener};
use super::round::Known;
use super::scripts::{self, Elements, Scripts};
use super::url::RedlockUrl;
use leasehold_core::{Clock, Error, ErrorKind, Moment, Result};
use leasehold_redis::redis::connection::{Node as Connection, Script};
use leasehold_redis::redis::fault;
use leasehold_redis::redis::fault::Refusal;
use leasehold_redis::redis::url::Address;

/// Key of a node's memory.
pub(super) const MEMORY_KEY: &str = "leasehold:redlock";

/// Permissions that a user of these servers needs, in the syntax of `ACL SETUSER`.
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
    /// Lock that is held while meeting the server.
    meeting: tokio::sync::Mutex<()>,
    queued: Mutex<QueuedReleases>,
    /// Lock that is held while restoring the node's token.
    pub(super) restoring: tokio::sync::Mutex<()>,
}

/// Maximum number of queued releases per node. Beyond it, locks are freed when their leases expire.
const MAX_QUEUED_RELEASES: usize = 10_000;

/// Releases that a node has not answered yet.
#[derive(Debug, Default)]
struct QueuedReleases {
    /// Calls, each with the time at which its lease expires.
    calls: VecDeque<(Cmd, Moment)>,
    /// Whether a task is currently sending the queued releases.
    sending: bool,
}

/// One run of a server.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) id: String,
    take: Script,
    lived: Arc<Lived>,
    pub(super) settings: Settings,
}

/// What this client knows about a server since the server's last start.
#[derive(Debug)]
struct Lived {
    /// Time from which the server votes, in nanoseconds of the client's clock.
    votes_from: AtomicU64,
    /// Latest possible time of the server's start.
    started: Moment,
    /// Whether the server was a replica before it became a master.
    promoted: bool,
    voted: AtomicBool,
    /// Whether the server has run the release script.
    knows_release: AtomicBool,
}

impl Run {
    pub(super) fn votes_from(&self) -> Moment {
        Moment::from_nanos(self.lived.votes_from.load(Ordering::SeqCst))
    }

    /// Records that the node does not vote before this time.
    pub(super) fn votes_not_before(&self, from: Moment) {
        self.lived.votes_from.fetch_max(from.as_nanos(), Ordering::SeqCst);
    }

    /// Returns for how long the node has been without its data, if only its start can be the
    /// reason. Otherwise returns zero.
    ///
    /// A node that has voted in this run and has forgotten its data since was emptied. A promoted
    /// replica has another server's memory.
    pub(super) fn has_forgotten_for(&self, now: Moment) -> Duration {
        let lived = &self.lived;
        match lived.promoted || lived.voted.load(Ordering::SeqCst) {
            true => Duration::ZERO,
            false => now.since(lived.started),
        }
    }
}

/// Settings of a server that the operator should know about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) evicts: Option<String>,
    pub(super) durable: bool,
}

/// Reason why a node did not execute a request.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The node is reachable, but does not vote until this time has passed.
    Young(Duration),
    /// The node has forgotten its data.
    Forgot,
    /// Another name in the URL leads to the same server.
    Twin(Address),
    /// The node replicates another server, and has no vote of its own.
    Replica,
    /// The node has replicas, and therefore no vote. The value is their number.
    HasReplicas(usize),
    /// The attempt ended before the request was sent.
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

/// Description of a problem with a node, for an error.
pub(super) struct Problem {
    pub(super) kind: ErrorKind,
    pub(super) what: String,
    pub(super) hint: Option<String>,
}

impl Trouble {
    /// Returns whether the server certainly did not execute any part of the request.
    pub(super) fn undone(&self) -> bool {
        match self {
            Self::Young(_) | Self::Forgot | Self::Twin(_) | Self::Replica => true,
            Self::HasReplicas(_) | Self::Over => true,
            Self::Failed(error) => error.is_connection_refusal(),
            Self::Strange | Self::Slow(_) => false,
        }
    }

    /// Returns how long it takes until the node votes, if that is the only problem.
    pub(super) fn votes_in(&self) -> Option<Duration> {
        match self {
            Self::Young(left) => Some(*left),
            _ => None,
        }
    }

    /// Returns the error about this node.
    pub(super) fn explain(&self, node: &Address) -> Error {
        let Problem { kind, what, hint } = self.problem();
        let error = Error::new(kind, format!("{node}: {what}"));
        match hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }

    /// Returns the problem without the node's address.
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
                    "has no vote because it has {count} replica(s): a promoted replica would not \
                     know the held locks"
                ),
                "run `REPLICAOF NO ONE` on the replicas, or use \
                 redis+sentinel://host1,host2,host3/mymaster",
            ),
            Self::Over => problem(Unreachable, "was not contacted before the attempt ended", ""),
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

/// Formats a duration in seconds, rounded up so that no client retries too early.
pub(super) fn seconds(time: Duration) -> String {
    format!("{} s", time.as_millis().div_ceil(1_000))
}

/// Returns the minimum time that a server with this `uptime_in_seconds` has been up. The value is
/// the difference of two times that are each truncated to whole seconds.
const fn up_for(uptime_in_seconds: u64) -> Duration {
    Duration::from_secs(uptime_in_seconds.saturating_sub(1))
}

impl Node {
    /// Creates the nodes of the URL, not connected yet.
    pub(super) fn all(
        url: &RedlockUrl,
        runtime: &Handle,
        claims: &Arc<Claims>,
        channel: &str,
    ) -> Result<Vec<Arc<Self>>> {
        let one = |(node, address): (usize, &Address)| {
            let listener = Arc::new(NodePushListener { node, claims: claims.clone() });
            let channel = Some((format!("{MEMORY_KEY}:{channel}"), listener as Arc<_>));
            Ok(Arc::new(Self {
                connection: Connection::new(address.clone(), &url.login, runtime, channel, None)?,
                clock: Clock::default(),
                restart_delay: url.restart_delay,
                run: Mutex::default(),
                meeting: tokio::sync::Mutex::default(),
                queued: Mutex::default(),
                restoring: tokio::sync::Mutex::default(),
            }))
        };
        url.nodes.iter().enumerate().map(one).collect()
    }

    pub(super) fn address(&self) -> &Address {
        self.connection.address()
    }

    /// Returns the channel for the node's messages to the calling runtime.
    pub(super) fn channel(&self) -> Arc<str> {
        self.connection.channel().unwrap_or_default()
    }

    /// Returns the known run, if any.
    pub(super) fn run(&self) -> Option<Arc<Run>> {
        locked(&self.run).clone()
    }

    /// Runs a script that does not vote.
    pub(super) async fn ask(&self, script: &Script, call: &Cmd) -> Result<Elements, Trouble> {
        Ok(Elements::of(self.connection.run(script, call).await?))
    }

    /// Runs many calls of one script in one batch.
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
        // The script is sent in full once, so that the server caches it. The first call may then
        // run twice, which has no further effect.
        self.connection.run(script, first).await?;
        Ok(self.connection.pipeline(&pipeline).await?)
    }

    /// Runs one command.
    pub(super) async fn call(&self, cmd: &Cmd) -> Result<Value, Trouble> {
        Ok(self.connection.call(cmd).await?)
    }

    /// Requests the node's vote, unless the attempt ends before the request is sent. `call` adds
    /// keys and arguments to the script call.
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
            // `over` is checked when the connection is open. So a release after the end of the
            // attempt follows this call, even if the client had to connect again.
            match self.connection.call_unless(&over, &call(run.take.call(5))).await {
                // The server was restarted, or its script cache was flushed.
                Err(error) if fault::refusal(&error) == Some(Refusal::NoScript) && !again => {
                    again = true;
                }
                answer => return answer?.map(Elements::of).ok_or(Trouble::Over),
            }
        }
    }

    /// Meets the server, unless this client has already met it. With `again`, meets it again.
    pub(super) async fn met(&self, again: bool) -> Result<Arc<Run>, Trouble> {
        let before = self.run();
        if let Some(run) = before.clone().filter(|_| !again) {
            return Ok(run);
        }
        let _meeting = self.meeting.lock().await;
        let known = self.run();
        // Another task may have met the server while this one waited.
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
            // The server has restarted since INFO was read.
            _ => return Err(Trouble::Forgot),
        }
        let run = Arc::new(Run { id: id.to_owned(), take, lived, settings: info.settings() });
        *locked(&self.run) = Some(run.clone());
        Ok(run)
    }

    /// Creates the history of a new run of the server. `knew_another` states whether an earlier run
    /// was known.
    fn begin(&self, info: &Info, knew_another: bool) -> Lived {
        let now = self.clock.now();
        let up = info.figure("uptime_in_seconds").and_then(|up| up.parse().ok()).unwrap_or(0);
        let delayed = now.plus(self.restart_delay);
        let votes_from = match knew_another {
            // The server restarted while it was known. Its reported age is ignored, because its
            // clock can be set.
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

    /// Records that the server has voted in its current run. If its data is missing later in the
    /// same run, the server was emptied.
    pub(super) fn has_voted(&self) {
        if let Some(run) = self.run() {
            run.lived.voted.store(true, Ordering::SeqCst);
        }
    }

    /// Runs the release script in one message, whether or not the server has cached it. The client
    /// may end before it could send a second message.
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

    /// Queues a release to be sent again. Returns whether a task has to be started for that.
    pub(super) fn queue_release(&self, call: Cmd, until: Moment) -> bool {
        let mut queued = locked(&self.queued);
        if queued.calls.len() < MAX_QUEUED_RELEASES {
            queued.calls.push_back((call, until));
        }
        !std::mem::replace(&mut queued.sending, true)
    }

    /// Returns the first release whose lease has not expired. Removes all releases whose leases
    /// have expired.
    pub(super) fn next_release(&self, now: Moment) -> Option<Cmd> {
        let mut queued = locked(&self.queued);
        queued.calls.retain(|(_, until)| *until > now);
        queued.calls.front().map(|(call, _)| call.clone())
    }

    /// Removes the first release, which was answered.
    pub(super) fn release_answered(&self) {
        locked(&self.queued).calls.pop_front();
    }

    /// Returns whether the queue is empty, in which case the sending task stops.
    pub(super) fn is_release_queue_empty(&self) -> bool {
        let mut queued = locked(&self.queued);
        queued.sending = !queued.calls.is_empty();
        !queued.sending
    }

    /// Returns what the node knows about tokens, its clock, and whether it has voted since its
    /// memory was restored.
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

/// Reply to INFO.
struct Info(String);

impl Info {
    fn figure(&self, name: &str) -> Option<&str> {
        self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    }

    /// Returns the number of replicas. A client that only downloads a backup has no port and does
    /// not count.
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
        fn any_node_state_is_parsed_or_refused(answer in values(&["1", "7", ""])) {
            let mut elements = Elements::of(answer.clone());
            if read_known(&mut Elements::of(answer)).is_some() {
                prop_assert!((0..4).all(|_| elements.natural().is_some()));
            }
        }

        #[test]
        fn any_server_info_is_parsed_or_ignored(text in testbed::texts(&[
            "role:master\r\nrun_id:0123456789abcdef0123456789abcdef01234567\r\nuptime_in_seconds:17\r\n\
             connected_slaves:1\r\nslave0:ip=10.0.0.7,port=6379,state=online,offset=14,lag=0\r\n",
            "connected_slaves:2\r\nslave0:ip=10.0.0.8,port=0\r\nmaxmemory:1\r\nmaxmemory_policy:allkeys-lru\r\naof_enabled:1\r\n",
        ])) {
            let info = Info(text.clone());
            prop_assert!(info.settings().evicts.is_none_or(|policy| text.contains(&policy)));
            // An impossible count of replicas prevents a vote, like any other count.
            prop_assert!(info.replicas() == 0 || text.contains("slave"));
            let up = info.figure("uptime_in_seconds").and_then(|up| up.parse().ok()).unwrap_or(0);
            let now = Moment::from_nanos(1_000_000_000);
            prop_assert!(now.minus(up_for(up)) <= now);
        }
    }

    // F78
    #[test]
    fn replicas_are_counted_and_backups_are_not() {
        let replicas = |lines: &str| Info(lines.replace('|', "\r\n")).replicas();
        assert_eq!(replicas("role:master|connected_slaves:0|slave_expires:1"), 0);
        let one = "slave0:ip=10.0.0.7,port=6379,state=online,offset=14,lag=0";
        let backup = "slave1:ip=10.0.0.8,port=0,state=online,offset=0,lag=3";
        assert_eq!(replicas(&format!("connected_slaves:2|{one}|{backup}")), 1);
        assert_eq!(replicas(&format!("connected_slaves:1|{backup}")), 0);
        assert_eq!(replicas("connected_slaves:2"), 2);
    }

    // S33
    #[test]
    fn uptime_is_never_overestimated() {
        // All times are in milliseconds. If the server started late in a second and is queried
        // early in one, it reports one second more.
        for start in [0, 1, 500, 999] {
            for up in [0, 1, 999, 1_000, 1_001, 30_000, 30_999] {
                let says = (start + up) / 1_000 - start / 1_000;
                assert!(up_for(says) <= Duration::from_millis(up), "{up} ms from {start}");
                assert!(up_for(says) + Duration::from_secs(2) > Duration::from_millis(up));
            }
        }
    }
}
