//! Compares the Redlock store with a single handmade vote: `SET key value NX PX` and the script
//! that compares and deletes, on one server, over the same driver. leasehold does more on each of
//! three or five servers (token, holder, waiters). All servers of the run share this machine's
//! processors.

use std::sync::Arc;
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use testbed::{Redis, Redlock, Setup};
use tokio::runtime::Builder;
use tokio::task::JoinSet;

use crate::contention::{self, Outcome, Window};
use crate::measure::{Effort, Result, Subject, alternate, now};
use crate::pair::{self, time_pairs};
use crate::queued;
use crate::{redis, spread};

const CLIENTS: usize = 8;
const LEASE: Duration = Duration::from_secs(15);

pub(crate) fn pair(effort: Effort) -> Result<()> {
    for nodes in [3, 5] {
        let servers = Redlock::with(nodes, Setup::new().fast());
        let runtime = pair::runtime()?;
        // The servers have just been started, so no lock was lost.
        let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=1000";
        let locks = runtime.block_on(leasehold::connect(url))?;
        let raw = runtime.block_on(connect(&servers))?;
        let script = ::redis::Script::new(redis::RELEASE);
        let recipe = time_pairs(&runtime, effort, async || {
            redis::by_hand(&mut raw.clone(), &script, "raw").await
        });
        let rslock = rslock(&servers)?;
        let theirs = time_pairs(&runtime, effort, async || {
            let lock = rslock.lock("rslock", LEASE).await?;
            rslock.unlock(&lock).await;
            Ok(())
        });
        let name = format!("rslock on {nodes} servers");
        let mut subjects = vec![
            Subject::new("SET NX PX + compare-and-delete, one server", recipe),
            Subject::new(&name, theirs),
        ];
        subjects.extend(pair::ours(&runtime, effort, &locks));
        let title = format!("redlock: on {nodes} servers, uncontended pair");
        pair::show(&title, &alternate(effort, subjects)?, 1);
        many(effort, nodes, &servers)?;
    }
    Ok(())
}

/// Measures tasks with a name each, on two threads.
fn many(effort: Effort, nodes: usize, servers: &Redlock) -> Result<()> {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=1000";
    let locks = runtime.block_on(leasehold::connect(url))?;
    let raw = runtime.block_on(connect(servers))?;
    let script = Arc::new(::redis::Script::new(redis::RELEASE));
    let recipe = |i| {
        let with = (raw.clone(), script.clone(), format!("raw {i}"));
        spread::task(with, |(mut raw, script, name)| async move {
            redis::by_hand(&mut raw, &script, &name).await
        })
    };
    let rslock = rslock(servers)?;
    let theirs = |i| spread::task((rslock.clone(), format!("rslock {i}")), redis::rslock_pair);
    let name = format!("rslock on {nodes} servers");
    let subjects = vec![
        spread::subject("SET NX PX + compare-and-delete, one server", &runtime, effort, recipe),
        spread::subject(&name, &runtime, effort, theirs),
        spread::ours(&runtime, effort, &locks),
    ];
    let title = format!("redlock: on {nodes} servers, {} tasks with a lock each", spread::TASKS);
    pair::show(&title, &alternate(effort, subjects)?, 1);
    Ok(())
}

/// Compares it with rslock, whose waiters poll, here about every 5 ms.
pub(crate) fn contention(effort: Effort) -> Result<()> {
    let servers = Redlock::with(3, Setup::new().fast());
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=1000&max_lease_ms=60000";
    // One more client holds the lock until all contenders wait.
    let clients: std::result::Result<Vec<_>, _> =
        (0..=CLIENTS).map(|_| runtime.block_on(leasehold::connect(&url))).collect();
    let clients = clients?;
    for n in [8, 32] {
        let mut polling = Vec::new();
        for _ in 0..n {
            let mut rslock = rslock(&servers)?;
            rslock.set_retry(u32::MAX, Duration::from_millis(5));
            polling.push(Arc::new(rslock));
        }
        let theirs = || runtime.block_on(poll(&polling, effort));
        let ours = || {
            // The count is that of one server.
            let count = async || Ok(servers.nodes().first().map_or(0.0, redis::sent));
            runtime.block_on(queued::contend(&clients, n, effort, Duration::ZERO, count))
        };
        let subjects =
            vec![Subject::new("rslock, asking again", theirs), Subject::new("leasehold", ours)];
        let title = format!("redlock: on 3 servers, {n} contenders");
        contention::show(&title, &alternate(effort, subjects)?, 1);
    }
    Ok(())
}

async fn poll(contenders: &[Arc<rslock::LockManager>], effort: Effort) -> Result<Outcome> {
    let window = Window::next(effort);
    let mut running = JoinSet::new();
    for contender in contenders {
        running.spawn(contention::contend(window, contender.clone(), |rslock| async move {
            let held = rslock.lock("polled", LEASE).await?;
            let note = now();
            rslock.unlock(&held).await;
            Ok(note)
        }));
    }
    let notes: Result<Vec<_>> = running.join_all().await.into_iter().collect();
    Ok(Outcome::of(&notes?, effort.time))
}

fn rslock(servers: &Redlock) -> Result<rslock::LockManager> {
    let clients = servers.nodes().iter().map(client).collect::<Result<Vec<_>>>()?;
    Ok(rslock::LockManager::from_clients(clients))
}

fn client(node: &Redis) -> Result<::redis::Client> {
    let info: ::redis::ConnectionInfo =
        ::redis::IntoConnectionInfo::into_connection_info(node.url())?;
    let tcp = ::redis::io::tcp::TcpSettings::default().set_nodelay(true);
    Ok(::redis::Client::open(info.set_tcp_settings(tcp))?)
}

async fn connect(servers: &Redlock) -> Result<MultiplexedConnection> {
    // The connection is like leasehold's, without a delay for small packets and without a timer for
    // each answer.
    let client = client(servers.nodes().first().ok_or("no servers")?)?;
    let config = ::redis::AsyncConnectionConfig::new().set_response_timeout(None);
    Ok(client.get_multiplexed_async_connection_with_config(&config).await?)
}
