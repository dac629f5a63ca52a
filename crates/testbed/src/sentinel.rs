//! A Redis master with replicas, watched by sentinels that fail over when it dies.

use std::time::Duration;

use crate::daemon::{Daemon, Launch, Setup, start_somewhere};
use crate::reaper;
use crate::redis::{Redis, ask, is_ready, server_program};
use crate::wait::wait;

/// What the sentinels call the master.
const MASTER: &str = "mymaster";

/// Servers that replicate the first of them, and three sentinels.
#[derive(Debug)]
pub struct Sentinel {
    servers: Vec<Redis>,
    sentinels: Vec<(Daemon, u16)>,
}

impl Sentinel {
    /// One master and one replica, of the test's own.
    pub fn start() -> Self {
        Self::with(1, Setup::new().fast())
    }

    /// One master and so many replicas. The sentinels take a server for dead after two seconds.
    pub fn with(replicas: usize, setup: Setup) -> Self {
        Self::judging(replicas, setup, Duration::from_secs(2))
    }

    /// One master and one replica, which nobody breaks.
    pub fn unbroken() -> Self {
        Self::unbroken_with(1, Setup::new().fast())
    }

    /// One master and so many replicas, which nobody breaks: a machine that does much else is no
    /// reason for a fail-over.
    pub fn unbroken_with(replicas: usize, setup: Setup) -> Self {
        Self::judging(replicas, setup, Duration::from_secs(60))
    }

    /// The sentinels take a server for dead when it has not answered for so long.
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

    /// The URL that finds the master through the sentinels.
    pub fn url(&self) -> String {
        let hosts: Vec<String> =
            self.sentinels.iter().map(|(_, port)| format!("127.0.0.1:{port}")).collect();
        format!("redis+sentinel://{}/{MASTER}", hosts.join(","))
    }

    /// The servers: at first the master, then its replicas; after a fail-over whoever it is.
    pub fn servers(&self) -> &[Redis] {
        &self.servers
    }

    /// Who is master by the word of the sentinels' majority.
    pub fn master(&self) -> &Redis {
        let mut votes: Vec<u16> = self.sentinels.iter().filter_map(|(_, at)| told(*at)).collect();
        votes.sort_unstable();
        let port = votes.get(votes.len() / 2).copied().expect("a sentinel that answers");
        self.servers.iter().find(|s| s.port() == port).expect("one of the servers")
    }

    /// Returns when all sentinels name another master than `old`, and it takes writes.
    pub fn wait_for_failover(&self, old: u16) {
        wait("the fail-over", &|| {
            self.sentinels.iter().all(|(_, at)| {
                told(*at).is_some_and(|port| {
                    port != old && ask(port, &["ROLE"]).is_ok_and(|r| r.starts_with("master"))
                })
            })
        });
    }

    /// Where the sentinels listen.
    pub fn sentinel_ports(&self) -> Vec<u16> {
        self.sentinels.iter().map(|(_, port)| *port).collect()
    }

    /// Kills one of the sentinels.
    pub fn kill_sentinel(&self, number: usize) {
        self.sentinels[number].0.kill();
    }
}

fn told(sentinel: u16) -> Option<u16> {
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
    // They meet, look and vote ten times as often as by default. And one that had no turn for two
    // seconds goes on: by default it would do nothing for thirty more.
    // A replica is fit to be master if what it last told is no older than five pings; and once the master is
    // down, each is asked only once a second: so three pings a second, or half of the elections fail.
    let periods = ["publish-period", "100", "info-period", "200", "ping-period", "300"];
    let others = ["ask-period", "100", "tilt-trigger", "60000"];
    let args: Vec<&str> = ["SENTINEL", "DEBUG"].into_iter().chain(periods).chain(others).collect();
    ask(port, &args)?;
    Ok((daemon, port))
}
