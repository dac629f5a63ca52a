//! etcd: a single member, or a cluster of several members that can be broken separately.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::cert::Certificates;
use crate::command::run;
use crate::daemon::{Daemon, Launch, Setup};
use crate::network::{Cut, Network};
use crate::proxy::Proxy;
use crate::version::{Server, Version};
use crate::{port, reaper};

/// Time limit for a cluster to become complete.
const PATIENCE: Duration = Duration::from_secs(60);

/// An etcd cluster of one or more members, numbered from 0.
#[derive(Debug)]
pub struct Etcd {
    version: Version,
    members: Vec<Member>,
    certificates: Option<Certificates>,
    network: Option<Network>,
    /// The proxies between the members, for [`Etcd::apart`].
    _between: Vec<Proxy>,
}

/// An `etcd grpc-proxy` in front of a cluster.
#[derive(Debug)]
pub struct GrpcProxy {
    port: u16,
    _daemon: Daemon,
}

impl GrpcProxy {
    /// Returns the port for clients.
    pub fn port(&self) -> u16 {
        self.port
    }
}

#[derive(Debug)]
struct Member {
    daemon: Daemon,
    ports: Ports,
}

#[derive(Clone, Copy, Debug)]
struct Ports {
    client: u16,
    peer: u16,
    /// Port for plain HTTP (`/health` and `/metrics`), even if the clients use TLS.
    metrics: u16,
}

impl Etcd {
    /// Starts a single member.
    pub fn start() -> Self {
        Self::with(Setup::new(), 1)
    }

    /// Starts three members.
    pub fn cluster() -> Self {
        Self::with(Setup::new(), 3)
    }

    /// Starts three members that can be [cut](Self::cut) from each other. Only within
    /// [`in_own_network`](crate::in_own_network), and one at a time there.
    pub fn separable(setup: &Setup) -> Self {
        Self::start_on(setup, 3, Some(Network::new()), None).unwrap_or_else(|why| panic!("{why}"))
    }

    /// Starts three members with this one-way delay between them. Their clients have no delay.
    pub fn apart(by: Duration) -> Self {
        Self::start_on(&Setup::new(), 3, None, Some(by)).unwrap_or_else(|why| panic!("{why}"))
    }

    /// Starts `members` members with this setup.
    pub fn with(setup: Setup, members: usize) -> Self {
        let mut last = String::new();
        for _ in 0..5 {
            match Self::start_on(&setup, members, None, None) {
                Ok(cluster) => return cluster,
                Err(why) if why.to_lowercase().contains("address already in use") => last = why,
                Err(why) => panic!("{why}"),
            }
        }
        panic!("five times a port was taken: {last}");
    }

    fn start_on(
        setup: &Setup,
        members: usize,
        network: Option<Network>,
        apart: Option<Duration>,
    ) -> Result<Self, String> {
        let version = setup.version();
        let etcd = Server::Etcd.program(version, "etcd");
        let certificates = setup.tls.then(|| Certificates::make(&reaper::directory("etcd-tls")));
        let new_ports =
            || Ports { client: port::free(), peer: port::free(), metrics: port::free() };
        let ports: Vec<Ports> = (0..members).map(|_| new_ports()).collect();
        let between: Vec<Proxy> = match apart {
            None => Vec::new(),
            Some(_) => ports.iter().map(|ports| Proxy::before(ports.peer)).collect(),
        };
        between.iter().for_each(|proxy| proxy.delay(apart.unwrap_or_default()));
        let peer = |p: &Ports| format!("http://127.0.0.1:{}", p.peer);
        // The address at which the other members reach this one.
        let found = |n: usize, p: &Ports| match between.get(n) {
            Some(proxy) => format!("http://127.0.0.1:{}", proxy.port()),
            None => peer(p),
        };
        let all: Vec<String> =
            ports.iter().enumerate().map(|(n, p)| format!("n{n}={}", found(n, p))).collect();
        // A single member needs no votes, so its election timeout is short. Otherwise etcd's
        // defaults apply, so that a busy machine does not change leaders all the time.
        let (beat, election) = if members == 1 { (50, 500) } else { (100, 1_000) };
        let mut cluster =
            Self { version, members: Vec::new(), certificates, network, _between: Vec::new() };
        for (n, &ports) in ports.iter().enumerate() {
            let directory = reaper::directory("etcd");
            let scheme = if setup.tls { "https" } else { "http" };
            let client = format!("{scheme}://127.0.0.1:{}", ports.client);
            let mut args: Vec<String> = vec![format!("--name=n{n}")];
            args.push(format!("--data-dir={}", directory.join("data").display()));
            args.push(format!("--listen-client-urls={client}"));
            args.push(format!("--advertise-client-urls={client}"));
            args.push(format!("--listen-peer-urls={}", peer(&ports)));
            args.push(format!("--initial-advertise-peer-urls={}", found(n, &ports)));
            args.push(format!("--listen-metrics-urls=http://127.0.0.1:{}", ports.metrics));
            args.push(format!("--initial-cluster={}", all.join(",")));
            // The token is the same for the whole cluster.
            args.push(format!("--initial-cluster-token={}", all.concat()));
            args.push("--initial-cluster-state=new".into());
            args.push(format!("--heartbeat-interval={beat}"));
            args.push(format!("--election-timeout={election}"));
            args.extend(
                ["--logger=zap", "--log-outputs=stderr", "--log-level=warn"].map(Into::into),
            );
            if let Some(certificates) = &cluster.certificates {
                args.push(format!("--cert-file={}", certificates.certificate.display()));
                args.push(format!("--key-file={}", certificates.key.display()));
                if setup.client_certificates {
                    let authority = certificates.authority().display();
                    args.push(format!("--trusted-ca-file={authority}"));
                }
            }
            args.extend(setup.args.iter().cloned());
            let mut launch = Launch { program: etcd.clone(), args, user: None };
            if let Some(network) = &cluster.network {
                network.admit(n, &mut launch, &directory);
            }
            // A member is ready only when the others are running as well.
            let daemon = Daemon::start("etcd", directory, launch, None, &|| true)?;
            cluster.members.push(Member { daemon, ports });
        }
        cluster._between = between;
        cluster.until_whole()?;
        Ok(cluster)
    }

    /// Waits until every running member is healthy.
    fn until_whole(&self) -> Result<(), String> {
        let end = Instant::now() + PATIENCE;
        for member in &self.members {
            while !member.is_healthy() {
                if let Some(status) = member.daemon.ended() {
                    return Err(format!("etcd ended with {status}:\n{}", member.daemon.log()));
                }
                assert!(Instant::now() < end, "etcd does not get well:\n{}", member.daemon.log());
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(())
    }

    /// Returns the store URL with all members: `etcd://127.0.0.1:P1,127.0.0.1:P2`, or `etcds:` with
    /// TLS.
    pub fn url(&self) -> String {
        let hosts: Vec<String> =
            self.members.iter().map(|m| format!("127.0.0.1:{}", m.ports.client)).collect();
        let scheme = if self.certificates.is_some() { "etcds" } else { "etcd" };
        format!("{scheme}://{}", hosts.join(","))
    }

    /// Returns how many members the cluster was started with.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Returns false, because a cluster always has members.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Returns a member's port for clients.
    pub fn port(&self, member: usize) -> u16 {
        self.members[member].ports.client
    }

    /// Returns a member's log.
    pub fn log(&self, member: usize) -> String {
        self.members[member].daemon.log()
    }

    /// Returns one of a member's metrics.
    pub fn metric(&self, member: usize, name: &str) -> Option<f64> {
        let text = get(self.members[member].ports.metrics, "/metrics")?;
        let line = text.lines().find(|line| line.split(' ').next() == Some(name))?;
        line.rsplit(' ').next()?.parse().ok()
    }

    /// Returns how many messages a member has received from clients, in calls and in streams.
    pub fn received(&self, member: usize) -> f64 {
        let text = get(self.members[member].ports.metrics, "/metrics").unwrap_or_default();
        let received =
            text.lines().filter(|line| line.starts_with("grpc_server_msg_received_total{"));
        received.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Waits until the cluster has a leader, and returns the leader's number.
    pub fn leader(&self) -> usize {
        let end = Instant::now() + PATIENCE;
        loop {
            let leads = |n: &usize| self.metric(*n, "etcd_server_is_leader") == Some(1.0);
            if let Some(leader) = (0..self.members.len()).find(leads) {
                return leader;
            }
            assert!(Instant::now() < end, "the members elect no leader");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the members' certificates. Panics if they were started without [`Setup::tls`].
    pub fn certificates(&self) -> &Certificates {
        self.certificates.as_ref().expect("ask for Setup::tls first")
    }

    /// Returns an `etcdctl` command that is set up to contact all members. The caller adds the
    /// arguments.
    pub fn etcdctl_command(&self) -> Command {
        let hosts: Vec<String> =
            self.members.iter().map(|m| format!("127.0.0.1:{}", m.ports.client)).collect();
        let mut command = Command::new(Server::Etcd.program(self.version, "etcdctl"));
        command.env("ETCDCTL_API", "3").current_dir(Path::new("/"));
        command.arg(format!("--endpoints={}", hosts.join(",")));
        if let Some(certificates) = &self.certificates {
            command.arg(format!("--cacert={}", certificates.authority().display()));
        }
        // On a busy machine an answer may take longer than etcdctl's default of five seconds.
        command.arg("--command-timeout=60s");
        command
    }

    /// Runs `etcdctl` to its end and returns what it printed.
    pub fn etcdctl(&self, args: &[&str]) -> String {
        run(self.etcdctl_command().args(args)).trim_end().to_owned()
    }

    /// Enables authentication. `root` (password `root`) has all permissions. `lh` (password `lh`)
    /// may read and write keys that begin with `prefix`, or all keys if `prefix` is empty.
    pub fn enable_auth(&self, prefix: &str) {
        self.etcdctl(&["user", "add", "root:root"]);
        self.etcdctl(&["user", "grant-role", "root", "root"]);
        self.etcdctl(&["role", "add", "locks"]);
        let granted = ["role", "grant-permission", "locks", "readwrite", prefix];
        let range = if prefix.is_empty() { "--from-key=true" } else { "--prefix=true" };
        self.etcdctl(&[&granted[..], &[range]].concat());
        self.etcdctl(&["user", "add", "lh:lh"]);
        self.etcdctl(&["user", "grant-role", "lh", "locks"]);
        self.etcdctl(&["auth", "enable"]);
    }

    /// Starts an `etcd grpc-proxy` in front of all members, with additional arguments.
    pub fn grpc_proxy(&self, more: &[&str]) -> GrpcProxy {
        let port = port::free();
        let hosts: Vec<String> =
            self.members.iter().map(|m| format!("127.0.0.1:{}", m.ports.client)).collect();
        let mut args: Vec<String> = vec!["grpc-proxy".into(), "start".into()];
        args.push(format!("--endpoints={}", hosts.join(",")));
        args.push(format!("--listen-addr=127.0.0.1:{port}"));
        args.extend(more.iter().map(ToString::to_string));
        let launch =
            Launch { program: Server::Etcd.program(self.version, "etcd"), args, user: None };
        let ready = || TcpStream::connect(("127.0.0.1", port)).is_ok();
        let directory = reaper::directory("etcd-proxy");
        let daemon = Daemon::start("etcd-proxy", directory, launch, None, &ready);
        GrpcProxy { port, _daemon: daemon.unwrap_or_else(|why| panic!("{why}")) }
    }

    /// Sends SIGSTOP to a member.
    pub fn stop(&self, member: usize) {
        self.members[member].daemon.stop();
    }

    /// Sends SIGCONT to a member.
    pub fn cont(&self, member: usize) {
        self.members[member].daemon.cont();
    }

    /// Sends SIGKILL to a member.
    pub fn kill(&self, member: usize) {
        self.members[member].daemon.kill();
    }

    /// Restarts a member on its port and with its data. Kills it first if it runs. Waits until it
    /// is healthy, which requires a majority.
    pub fn restart(&self, member: usize) {
        let member = &self.members[member];
        member.daemon.restart(&|| member.is_healthy());
    }

    /// Cuts a member from the others, but not from its clients. Requires
    /// [`separable`](Self::separable).
    pub fn cut(&self, member: usize, cut: Cut) {
        let ports = self.members[member].ports;
        self.network().cut(member, cut, &[ports.client, ports.metrics]);
    }

    /// Ends all cuts and waits until every member is healthy.
    pub fn heal(&self) {
        self.network().heal();
        self.until_whole().unwrap_or_else(|why| panic!("{why}"));
    }

    fn network(&self) -> &Network {
        self.network.as_ref().expect("ask for Etcd::separable first")
    }

    /// Kills all members, and then starts all of them again.
    pub fn restart_all(&self) {
        for member in &self.members {
            member.daemon.kill();
        }
        for member in &self.members {
            member.daemon.restart(&|| true);
        }
        self.until_whole().unwrap_or_else(|why| panic!("cannot restart: {why}"));
    }
}

impl Member {
    fn is_healthy(&self) -> bool {
        get(self.ports.metrics, "/health").is_some_and(|text| text.contains("\"true\""))
    }
}

/// Returns the answer to one plain HTTP request, or `None` if it does not arrive in time.
fn get(port: u16, path: &str) -> Option<String> {
    let limit = Duration::from_millis(1_500);
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(limit)).ok()?;
    stream.set_write_timeout(Some(limit)).ok()?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}
