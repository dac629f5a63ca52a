//! A Redis master with replicas, monitored by sentinels that fail over when it crashes.

use std::time::Duration;

use crate::daemon::{Daemon, Launch, Setup, start_somewhere};
use crate::reaper;
use crate::redis::{Redis, ask, is_ready, server_program};
use crate::wait::wait;

/// The sentinels' name for the master.
const MASTER: &str = "mymaster";

/// A master with its replicas, and three sentinels.
#[derive(Debug)]
pub struct Sentinel {
    servers: Vec<Redis>,
    sentinels: Vec<(Daemon, u16)>,
}

impl Sentinel {
    /// Starts one private master and one replica.
    pub fn start() -> Self {
        Self::with(1, Setup::new().fast())
    }

    /// Starts one master and `replicas` replicas. The sentinels consider a server dead after two
    /// seconds.
    pub fn with(replicas: usize, setup: Setup) -> Self {
        Self::judging(replicas, setup, Duration::from_secs(2))
    }

    /// Starts one master and one replica that tests do not break.
    pub fn unbroken() -> Self {
        Self::unbroken_with(1, Setup::new().fast())
    }

    /// Starts one master and `replicas` replicas that tests do not break. A busy machine does not
    /// cause a fail-over.
    pub fn unbroken_with(replicas: usize, setup: Setup) -> Self {
        Self::judging(replicas, setup, Duration::from_secs(60))
    }

    /// Starts servers that the sentinels consider dead when they have not answered for
    /// `down_after`.
    fn judging(replicas: usize, setup: Setup, down_after: Duration) -> Self {
        let master = Redis::with(setup.clone());
        let port = master.port();
        let mut servers = vec![master];
        servers.extend((0..replicas).map(|_| Redis::replica_of(port, setup.clone())));
        servers[0].wait_for_replicas(replicas);
        let start = |at| sentinel(&setup, at, port, down_after);
        let sentinels: Vec<_> = (0..3).map(|_| start_somewhere(start)).collect();
        let set = Self { servers, sentinels };
        wait("the sentinels to know each other and the replicas", &|| set.is_settled(replicas));
        set
    }

    fn is_settled(&self, replicas: usize) -> bool {
        self.sentinels.iter().all(|(_, port)| {
            let known = ask(*port, &["SENTINEL", "MASTER", MASTER]).unwrap_or_default();
            let lines: Vec<&str> = known.lines().collect();
            let figure = |name: &str| {
                let at = lines.iter().position(|line| *line == name)?;
                lines.get(at + 1)?.parse::<usize>().ok()
            };
            figure("num-other-sentinels") == Some(2) && figure("num-slaves") == Some(replicas)
        })
    }

    /// Returns the URL that finds the master through the sentinels.
    pub fn url(&self) -> String {
        let hosts: Vec<String> =
            self.sentinels.iter().map(|(_, port)| format!("127.0.0.1:{port}")).collect();
        format!("redis+sentinel://{}/{MASTER}", hosts.join(","))
    }

    /// Returns the servers: the first master, followed by its replicas. After a fail-over, any of
    /// them may be the master.
    pub fn servers(&self) -> &[Redis] {
        &self.servers
    }

    /// Returns the master, according to the majority of the sentinels.
    pub fn master(&self) -> &Redis {
        let mut votes: Vec<u16> =
            self.sentinels.iter().filter_map(|(_, at)| master_port(*at)).collect();
        votes.sort_unstable();
        let port = votes.get(votes.len() / 2).copied().expect("a sentinel that answers");
        self.servers.iter().find(|s| s.port() == port).expect("one of the servers")
    }

    /// Waits until all sentinels name a master other than `old`, and the server that they name is a
    /// master.
    pub fn wait_for_failover(&self, old: u16) {
        wait("the fail-over", &|| {
            self.sentinels.iter().all(|(_, at)| {
                master_port(*at).is_some_and(|port| {
                    port != old && ask(port, &["ROLE"]).is_ok_and(|r| r.starts_with("master"))
                })
            })
        });
    }

    /// Returns the ports of the sentinels.
    pub fn sentinel_ports(&self) -> Vec<u16> {
        self.sentinels.iter().map(|(_, port)| *port).collect()
    }

    /// Kills one of the sentinels.
    pub fn kill_sentinel(&self, number: usize) {
        self.sentinels[number].0.kill();
    }
}

fn master_port(sentinel: u16) -> Option<u16> {
    let address = ask(sentinel, &["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER]).ok()?;
    address.lines().nth(1)?.parse().ok()
}

fn sentinel(
    setup: &Setup,
    port: u16,
    master: u16,
    down_after: Duration,
) -> Result<(Daemon, u16), String> {
    let directory = reaper::directory("sentinel");
    let file = directory.join("sentinel.conf");
    let text = format!(
        "port {port}\nbind 127.0.0.1\ndir {}\nprotected-mode no\n\
         sentinel monitor {MASTER} 127.0.0.1 {master} 2\n\
         sentinel down-after-milliseconds {MASTER} {}\n\
         sentinel failover-timeout {MASTER} 2000\n",
        directory.display(),
        down_after.as_millis(),
    );
    std::fs::write(&file, text).expect("a file in our directory");
    let launch = Launch {
        program: server_program(setup),
        args: vec![file.display().to_string(), "--sentinel".into()],
        user: None,
    };
    let daemon = Daemon::start("sentinel", directory, launch, None, &|| is_ready(port))?;
    // The sentinels publish, poll and vote ten times as often as by default. A sentinel that was
    // not scheduled for two seconds continues. By default it would do nothing for thirty more
    // seconds.
    //
    // A replica can become master if its last answer is no older than five pings. Once the master
    // is down, replicas are polled only once per second. So the ping period allows three pings per
    // second. Otherwise half of the elections fail.
    let periods = ["publish-period", "100", "info-period", "200", "ping-period", "300"];
    let others = ["ask-period", "100", "tilt-trigger", "60000"];
    let args: Vec<&str> = ["SENTINEL", "DEBUG"].into_iter().chain(periods).chain(others).collect();
    ask(port, &args)?;
    Ok((daemon, port))
}
