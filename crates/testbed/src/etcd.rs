//! etcd: a single member, or a cluster of several whose members break one by one.

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

/// How long a cluster may take to be whole.
const PATIENCE: Duration = Duration::from_secs(60);

/// An etcd cluster of one or more members, numbered from 0.
#[derive(Debug)]
pub struct Etcd {
    version: Version,
    members: Vec<Member>,
    certificates: Option<Certificates>,
    network: Option<Network>,
    /// What stands between the members, for [`Etcd::apart`].
    _between: Vec<Proxy>,
}

/// An `etcd grpc-proxy` before a cluster.
#[derive(Debug)]
pub struct GrpcProxy {
    port: u16,
    _daemon: Daemon,
}

impl GrpcProxy {
    /// Where it listens for clients.
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
    /// Plain HTTP, whatever the clients speak: `/health` and `/metrics`.
    metrics: u16,
}

impl Etcd {
    /// A single member.
    pub fn start() -> Self {
        Self::with(Setup::new(), 1)
    }

    /// Three members.
    pub fn cluster() -> Self {
        Self::with(Setup::new(), 3)
    }

    /// Three members that can be [cut](Self::cut) from each other. Within
    /// [`in_own_network`](crate::in_own_network) only, and once there.
    pub fn separable() -> Self {
        Self::start_on(&Setup::new(), 3, Some(Network::new()), None)
            .unwrap_or_else(|why| panic!("{why}"))
    }

    /// Three members that are so far from each other, one way; their clients are near.
    pub fn apart(by: Duration) -> Self {
        Self::start_on(&Setup::new(), 3, None, Some(by)).unwrap_or_else(|why| panic!("{why}"))
    }

    /// As many members as you like.
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
        // Where the others find a member.
        let found = |n: usize, p: &Ports| match between.get(n) {
            Some(proxy) => format!("http://127.0.0.1:{}", proxy.port()),
            None => peer(p),
        };
        let all: Vec<String> =
            ports.iter().enumerate().map(|(n, p)| format!("n{n}={}", found(n, p))).collect();
        // Short where nobody can be slow to vote; else as etcd has it, so that a busy machine
        // does not change leaders all the time.
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
            // One for the whole cluster.
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
            // It is ready when the others are there as well.
            let daemon = Daemon::start("etcd", directory, launch, None, &|| true)?;
            cluster.members.push(Member { daemon, ports });
        }
        cluster._between = between;
        cluster.until_whole()?;
        Ok(cluster)
    }

    /// Waits until every member that runs says that it is well.
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

    /// The store URL of all members: `etcd://127.0.0.1:P1,127.0.0.1:P2`, or `etcds:` with TLS.
    pub fn url(&self) -> String {
        let hosts: Vec<String> =
            self.members.iter().map(|m| format!("127.0.0.1:{}", m.ports.client)).collect();
        let scheme = if self.certificates.is_some() { "etcds" } else { "etcd" };
        format!("{scheme}://{}", hosts.join(","))
    }

    /// How many members it was started with.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Never: a cluster has members.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Where a member listens for clients.
    pub fn port(&self, member: usize) -> u16 {
        self.members[member].ports.client
    }

    /// What a member logged.
    pub fn log(&self, member: usize) -> String {
        self.members[member].daemon.log()
    }

    /// A number of a member's metrics.
    pub fn metric(&self, member: usize, name: &str) -> Option<f64> {
        let text = get(self.members[member].ports.metrics, "/metrics")?;
        let line = text.lines().find(|line| line.split(' ').next() == Some(name))?;
        line.rsplit(' ').next()?.parse().ok()
    }

    /// How many messages a member has received from clients: calls, and those in streams.
    pub fn received(&self, member: usize) -> f64 {
        let text = get(self.members[member].ports.metrics, "/metrics").unwrap_or_default();
        let received =
            text.lines().filter(|line| line.starts_with("grpc_server_msg_received_total{"));
        received.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// The member that leads, once there is one.
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

    /// Its certificates, with [`Setup::tls`].
    pub fn certificates(&self) -> &Certificates {
        self.certificates.as_ref().expect("ask for Setup::tls first")
    }

    /// `etcdctl` for all members, without arguments yet.
    pub fn etcdctl_command(&self) -> Command {
        let hosts: Vec<String> =
            self.members.iter().map(|m| format!("127.0.0.1:{}", m.ports.client)).collect();
        let mut command = Command::new(Server::Etcd.program(self.version, "etcdctl"));
        command.env("ETCDCTL_API", "3").current_dir(Path::new("/"));
        command.arg(format!("--endpoints={}", hosts.join(",")));
        if let Some(certificates) = &self.certificates {
            command.arg(format!("--cacert={}", certificates.authority().display()));
        }
        // On a busy machine an answer may take longer than etcdctl's five seconds.
        command.arg("--command-timeout=60s");
        command
    }

    /// Runs `etcdctl` to its end and returns what it printed.
    pub fn etcdctl(&self, args: &[&str]) -> String {
        run(self.etcdctl_command().args(args)).trim_end().to_owned()
    }

    /// Has users from now on: `root` (password `root`) may do everything; `lh` (password `lh`) may
    /// read and write what begins with `prefix`, or all if that is empty.
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

    /// An `etcd grpc-proxy` before all members, with more arguments.
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

    /// SIGSTOP to a member.
    pub fn stop(&self, member: usize) {
        self.members[member].daemon.stop();
    }

    /// SIGCONT to a member.
    pub fn cont(&self, member: usize) {
        self.members[member].daemon.cont();
    }

    /// kill -9 of a member.
    pub fn kill(&self, member: usize) {
        self.members[member].daemon.kill();
    }

    /// A member up again, on its port and with its data; killed before if it runs. Returns when it
    /// is well, for which a majority must be up.
    pub fn restart(&self, member: usize) {
        let member = &self.members[member];
        member.daemon.restart(&|| member.is_healthy());
    }

    /// Cuts a member from the others, but not from its clients. For [`separable`](Self::separable).
    pub fn cut(&self, member: usize, cut: Cut) {
        let ports = self.members[member].ports;
        self.network().cut(member, cut, &[ports.client, ports.metrics]);
    }

    /// Ends all cuts; returns when every member is well again.
    pub fn mend(&self) {
        self.network().mend();
        self.until_whole().unwrap_or_else(|why| panic!("{why}"));
    }

    fn network(&self) -> &Network {
        self.network.as_ref().expect("ask for Etcd::separable first")
    }

    /// All members killed, and then all up again.
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

/// The answer to one plain HTTP request, or `None` if there is none soon.
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
