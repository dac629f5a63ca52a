//! Compares the Redis store with handmade locks over the same driver, on one server.
//!
//! *Pair*: `SET key value NX PX` and the script that compares and deletes, which is the recipe of
//! most lock libraries. It has neither queue nor token. Two PINGs show the cost of two round trips
//! alone.
//!
//! It is also compared with other libraries: rslock in this process, and redis-py's `Lock` in its
//! own process.
//!
//! *Contention*: the ring is the fastest way to hand a token around on Redis. Each contender waits
//! with BLPOP on its own connection, and passes the token on with RPUSH. leasehold's contenders
//! share eight clients, each with its own connections and thread. All of them are in the queue
//! before the measurement begins. *Polling* is the recipe again, retried every 5 ms, as most of
//! those libraries do.
//!
//! For results that do not depend on where the kernel places two processes, run it with `taskset -c
//! 0`. The server is a child process and shares the processor.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use testbed::{Redis, Setup};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use crate::contention::{self, Outcome, Window};
use crate::measure::{Effort, Result, Subject, alternate, now};
use crate::pair::{self, time_pairs};
use crate::queued;
use crate::spread;

/// Maximum number of contenders for the ring. With more, it would be a test of connections.
const CONNECTIONS: usize = 100;
const CLIENTS: usize = 8;
pub(crate) const RELEASE: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', \
                       KEYS[1]) else return 0 end";

pub(crate) fn pair(effort: Effort) -> Result<()> {
    let server = Redis::with(Setup::new().fast());
    let runtime = pair::runtime()?;
    let locks = runtime.block_on(leasehold::connect(server.url()))?;
    let raw = runtime.block_on(connect(&server))?;
    let script = redis::Script::new(RELEASE);
    let recipe =
        time_pairs(&runtime, effort, async || by_hand(&mut raw.clone(), &script, "raw").await);
    let pings = time_pairs(&runtime, effort, async || {
        let mut c = raw.clone();
        for _ in 0..2 {
            redis::cmd("PING").query_async::<()>(&mut c).await?;
        }
        Ok(())
    });
    let rslock = rslock::LockManager::from_clients(vec![client(&server)?]);
    let theirs = time_pairs(&runtime, effort, async || {
        let lock = rslock.lock("rslock", Duration::from_secs(15)).await?;
        rslock.unlock(&lock).await;
        Ok(())
    });
    let mut python = Python::start(&server)?;
    let mut subjects = vec![
        Subject::new("SET NX PX + compare-and-delete", recipe),
        Subject::new("two PINGs", pings),
        Subject::new("rslock", theirs),
        Subject::new("redis-py, Lock", move || python.pairs(effort.time)),
    ];
    subjects.extend(pair::ours(&runtime, effort, &locks));
    pair::show("redis:, uncontended pair", &alternate(effort, subjects)?, 2);
    hop(effort, &runtime, &server)?;
    many(effort, &server)
}

/// Measures a waiter's minimum wait, which is a message through the server.
fn hop(effort: Effort, runtime: &Runtime, server: &Redis) -> Result<()> {
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(None);
    let config = config.set_push_sender(sender);
    let listens = client_of(&server.url(), redis::ProtocolVersion::RESP3)?;
    let mut listener =
        runtime.block_on(listens.get_multiplexed_async_connection_with_config(&config))?;
    runtime.block_on(listener.subscribe("hop"))?;
    let speaker = runtime.block_on(connect(server))?;
    let receiver = tokio::sync::Mutex::new({
        // This message confirms the subscription.
        runtime.block_on(receiver.recv()).ok_or("nothing was received")?;
        receiver
    });
    let published = time_pairs(runtime, effort, async || {
        let mut speaker = speaker.clone();
        redis::cmd("PUBLISH").arg("hop").arg("x").query_async::<()>(&mut speaker).await?;
        receiver.lock().await.recv().await.ok_or("nothing was received")?;
        Ok(())
    });
    let ping = time_pairs(runtime, effort, async || {
        Ok(redis::cmd("PING").query_async::<()>(&mut speaker.clone()).await?)
    });
    let subjects =
        vec![Subject::new("PING", ping), Subject::new("PUBLISH until it is received", published)];
    pair::show("redis:, a message from one client to another", &alternate(effort, subjects)?, 1);
    drop(listener);
    Ok(())
}

/// redis-py in its own process, which measures its own time.
struct Python {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Python {
    fn start(server: &Redis) -> Result<Self> {
        let mut command = Command::new(testbed::python());
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/ratios/redis_lock.py"));
        command.arg(server.port().to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let input = child.stdin.take().ok_or("no input")?;
        let output = BufReader::new(child.stdout.take().ok_or("no output")?);
        Ok(Self { child, input, output })
    }

    /// Returns nanoseconds per pair.
    fn pairs(&mut self, time: Duration) -> Result<f64> {
        writeln!(self.input, "{}", time.as_secs_f64())?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim().parse()?)
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // It may have ended on its own.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Measures tasks with a name each, on two threads.
fn many(effort: Effort, server: &Redis) -> Result<()> {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let locks = runtime.block_on(leasehold::connect(server.url()))?;
    let raw = runtime.block_on(connect(server))?;
    let script = Arc::new(redis::Script::new(RELEASE));
    let recipe = |i| {
        let with = (raw.clone(), script.clone(), format!("raw {i}"));
        spread::task(with, |(mut raw, script, name)| async move {
            by_hand(&mut raw, &script, &name).await
        })
    };
    let rslock = rslock::LockManager::from_clients(vec![client(server)?]);
    let theirs = |i| spread::task((rslock.clone(), format!("rslock {i}")), rslock_pair);
    let subjects = vec![
        spread::subject("SET NX PX + compare-and-delete", &runtime, effort, recipe),
        spread::subject("rslock", &runtime, effort, theirs),
        spread::ours(&runtime, effort, &locks),
    ];
    let title = format!("redis:, {} tasks with a lock each", spread::TASKS);
    pair::show(&title, &alternate(effort, subjects)?, 1);
    Ok(())
}

/// Runs rslock's pair.
pub(crate) async fn rslock_pair((rslock, name): (rslock::LockManager, String)) -> Result<()> {
    let lock = rslock.lock(name.as_str(), Duration::from_secs(15)).await?;
    rslock.unlock(&lock).await;
    Ok(())
}

/// Creates a client like leasehold's, without a delay for small packets.
fn client_of(url: &str, protocol: redis::ProtocolVersion) -> Result<redis::Client> {
    let info: redis::ConnectionInfo = url.parse()?;
    let settings = info.redis_settings().clone().set_protocol(protocol);
    let tcp = redis::io::tcp::TcpSettings::default().set_nodelay(true);
    Ok(redis::Client::open(info.set_redis_settings(settings).set_tcp_settings(tcp))?)
}

fn client(server: &Redis) -> Result<redis::Client> {
    client_of(&server.url(), redis::ProtocolVersion::RESP2)
}

async fn connect(server: &Redis) -> Result<MultiplexedConnection> {
    connect_to(&server.url()).await
}

pub(crate) async fn connect_to(url: &str) -> Result<MultiplexedConnection> {
    // It has no timer for each answer either.
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(None);
    let client = client_of(url, redis::ProtocolVersion::RESP2)?;
    Ok(client.get_multiplexed_async_connection_with_config(&config).await?)
}

pub(crate) async fn by_hand(
    c: &mut MultiplexedConnection,
    script: &redis::Script,
    name: &str,
) -> Result<()> {
    let id = "0123456789abcdef0123456789abcdef";
    let mut set = redis::cmd("SET");
    set.arg(name).arg(id).arg("NX").arg("PX").arg(15_000);
    let taken: Option<String> = set.query_async(c).await?;
    let deleted: i64 = script.key(name).arg(id).invoke_async(c).await?;
    match (taken, deleted) {
        (Some(_), 1) => Ok(()),
        other => Err(format!("not alone: {other:?}").into()),
    }
}

pub(crate) fn contention(effort: Effort) -> Result<()> {
    let server = Redis::with(Setup::new().fast().arg("--maxclients").arg("4000"));
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let connect_ours = || runtime.block_on(leasehold::connect(server.url()));
    // One more client holds the lock until all contenders wait.
    let clients: std::result::Result<Vec<_>, _> = (0..=CLIENTS).map(|_| connect_ours()).collect();
    let clients = clients?;
    for n in [8, 32, effort.crowd] {
        for hold in [Duration::ZERO, Duration::from_millis(1)] {
            let mut connections = Vec::new();
            for _ in (0..n).filter(|_| n <= CONNECTIONS) {
                connections.push(runtime.block_on(connect(&server))?);
            }
            let mut subjects = Vec::new();
            if !connections.is_empty() {
                let ring = || runtime.block_on(ring(&connections, effort, hold));
                subjects.push(Subject::new("ring", ring));
                let poll = || runtime.block_on(poll(&connections, effort, hold));
                subjects.push(Subject::new("polling", poll));
            }
            let raws = subjects.len().min(1);
            let ours = || {
                let count = async || Ok(sent(&server));
                runtime.block_on(queued::contend(&clients, n, effort, hold, count))
            };
            subjects.push(Subject::new("leasehold", ours));
            let held = if hold.is_zero() { String::new() } else { format!(", held for {hold:?}") };
            let title = format!("redis:, {n} contenders{held}");
            contention::show(&title, &alternate(effort, subjects)?, raws);
        }
    }
    Ok(())
}

async fn work(hold: Duration) {
    if !hold.is_zero() {
        tokio::time::sleep(hold).await;
    }
}

async fn ring(
    connections: &[MultiplexedConnection],
    effort: Effort,
    hold: Duration,
) -> Result<Outcome> {
    let n = connections.len();
    let window = Window::next(effort);
    let mut running = JoinSet::new();
    let mut first = connections[0].clone();
    redis::cmd("DEL").arg("ring 0").query_async::<()>(&mut first).await?;
    for (i, c) in connections.iter().enumerate() {
        let mut c = c.clone();
        running.spawn(async move {
            tokio::time::sleep(window.opens_in()).await;
            let (mine, next) = (format!("ring {i}"), format!("ring {}", (i + 1) % n));
            let mut notes = Vec::new();
            loop {
                let mut wait = redis::cmd("BLPOP");
                let token: Option<(String, String)> =
                    wait.arg(&mine).arg(1).query_async(&mut c).await?;
                let note = now();
                if token.is_some() {
                    work(hold).await;
                    redis::cmd("RPUSH").arg(&next).arg("token").query_async::<()>(&mut c).await?;
                }
                match (token, note < window.until) {
                    (Some(_), true) => notes.push(note),
                    (_, true) => {}
                    (_, false) => return Result::Ok(notes),
                }
            }
        });
    }
    redis::cmd("RPUSH").arg("ring 0").arg("token").query_async::<()>(&mut first).await?;
    let notes: Result<Vec<_>> = running.join_all().await.into_iter().collect();
    for i in 0..n {
        redis::cmd("DEL").arg(format!("ring {i}")).query_async::<()>(&mut first).await?;
    }
    Ok(Outcome::of(&notes?, effort.time))
}

async fn poll(
    connections: &[MultiplexedConnection],
    effort: Effort,
    hold: Duration,
) -> Result<Outcome> {
    let window = Window::next(effort);
    let mut running = JoinSet::new();
    for (i, c) in connections.iter().enumerate() {
        let mut c = c.clone();
        running.spawn(async move {
            let (script, id) = (redis::Script::new(RELEASE), format!("{i:032}"));
            tokio::time::sleep(window.opens_in()).await;
            let mut notes = Vec::new();
            while now() < window.until {
                let mut set = redis::cmd("SET");
                set.arg("polled").arg(&id).arg("NX").arg("PX").arg(15_000);
                if set.query_async::<Option<String>>(&mut c).await?.is_none() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    continue;
                }
                notes.push(now());
                work(hold).await;
                script.key("polled").arg(&id).invoke_async::<()>(&mut c).await?;
            }
            Result::Ok(notes)
        });
    }
    let notes: Result<Vec<_>> = running.join_all().await.into_iter().collect();
    Ok(Outcome::of(&notes?, effort.time))
}

/// Returns how many scripts clients have sent.
pub(crate) fn sent(server: &Redis) -> f64 {
    let calls = server.calls();
    calls.iter().filter(|(name, _)| name == "evalsha").map(|(_, calls)| *calls as f64).sum()
}
