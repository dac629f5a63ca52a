//! The Redlock store beside one vote by hand: `SET key value NX PX` and the script that compares and
//! deletes, on one server, over the same driver. Ours does more on each of three or five servers
//! (the token, who holds, who waits), and all servers of the run share this machine's processors.

use redis::aio::MultiplexedConnection;
use testbed::{Redlock, Setup};

use crate::measure::{Effort, Result, Subject, alternate};
use crate::pair::{self, time_pairs};

const RELEASE: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', \
                       KEYS[1]) else return 0 end";

pub(crate) fn pair(effort: Effort) -> Result<()> {
    for nodes in [3, 5] {
        let servers = Redlock::with(nodes, Setup::new().fast());
        let runtime = pair::runtime()?;
        // They have just been started, and nothing was lost.
        let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=1000";
        let locks = runtime.block_on(leasehold::connect(url))?;
        let raw = runtime.block_on(connect(&servers))?;
        let script = redis::Script::new(RELEASE);
        let recipe =
            time_pairs(&runtime, effort, async || by_hand(&mut raw.clone(), &script).await);
        let mut subjects = vec![Subject::new("SET NX PX + compare-and-delete, one server", recipe)];
        subjects.extend(pair::ours(&runtime, effort, &locks));
        let title = format!("redlock: on {nodes} servers, uncontended pair");
        pair::show(&title, &alternate(effort, subjects)?, 1);
    }
    Ok(())
}

async fn connect(servers: &Redlock) -> Result<MultiplexedConnection> {
    // As ours is: no delay for small packets, no timer for each answer.
    let node = servers.nodes().first().ok_or("no servers")?;
    let info: redis::ConnectionInfo = redis::IntoConnectionInfo::into_connection_info(node.url())?;
    let tcp = redis::io::tcp::TcpSettings::default().set_nodelay(true);
    let client = redis::Client::open(info.set_tcp_settings(tcp))?;
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(None);
    Ok(client.get_multiplexed_async_connection_with_config(&config).await?)
}

async fn by_hand(c: &mut MultiplexedConnection, script: &redis::Script) -> Result<()> {
    let id = "0123456789abcdef0123456789abcdef";
    let mut set = redis::cmd("SET");
    set.arg("raw").arg(id).arg("NX").arg("PX").arg(15_000);
    let taken: Option<String> = set.query_async(c).await?;
    let deleted: i64 = script.key("raw").arg(id).invoke_async(c).await?;
    match (taken, deleted) {
        (Some(_), 1) => Ok(()),
        other => Err(format!("not alone: {other:?}").into()),
    }
}
