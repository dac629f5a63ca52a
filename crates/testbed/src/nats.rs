//! NATS with JetStream: one server, or a cluster of three members that can be broken separately.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::command::run;
use crate::daemon::{Daemon, Launch, Setup, accepts, start_somewhere};
use crate::network::{Cut, Network};
use crate::version::{Server, Version};
use crate::{Certificates, port, reaper};

/// Time limit for a cluster to become complete.
const PATIENCE: Duration = Duration::from_secs(60);

/// A NATS server that keeps its streams in its own directory. Further arguments of its command line
/// can be added with [`Setup::arg`].
#[derive(Debug)]
pub struct Nats {
    daemon: Daemon,
    port: u16,
    certificates: Option<Certificates>,
}

impl Nats {
    /// Starts a private server.
    pub fn start() -> Self {
        Self::with(Setup::new())
    }

    /// Starts a private server with this setup.
    pub fn with(setup: Setup) -> Self {
        start_somewhere(|port| Self::try_start(&setup, port, true))
    }

    /// Starts a server that stores nothing, without JetStream.
    pub fn without_jetstream() -> Self {
        start_somewhere(|port| Self::try_start(&Setup::new(), port, false))
    }

    fn try_start(setup: &Setup, port: u16, keeps: bool) -> Result<Self, String> {
        let directory = reaper::directory("nats");
        let mut args: Vec<String> = ["-a", "127.0.0.1", "-p"].map(Into::into).to_vec();
        args.push(port.to_string());
        if keeps {
            args.push("-js".into());
            args.extend(["-sd".into(), directory.join("data").display().to_string()]);
        }
        let certificates = setup.tls.then(|| Certificates::make(&directory));
        if let Some(Certificates { authority, certificate, key, .. }) = &certificates {
            let verify = format!("--tlsverify={}", setup.client_certificates);
            args.extend(["--tls".into(), verify]);
            for (name, file) in [("cert", certificate), ("key", key), ("cacert", authority)] {
                args.push(format!("--tls{name}={}", file.display()));
            }
        }
        args.extend(setup.args.iter().cloned());
        let launch = Launch { program: program(), args, user: None };
        let daemon = Daemon::start("nats", directory, launch, None, &|| accepts(port))?;
        Ok(Self { daemon, port, certificates })
    }

    /// Returns the port on which the server listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the server's URL, without a bucket.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Returns the server's certificates. Panics if it was started without [`Setup::tls`].
    pub fn certificates(&self) -> &Certificates {
        self.certificates.as_ref().expect("ask for Setup::tls first")
    }

    /// Sends one request like a client, without a library. Returns the answer as text.
    pub fn ask(&self, subject: &str, what: &str) -> String {
        ask(self.port, subject, what).unwrap_or_else(|why| panic!("no answer of {subject}: {why}"))
    }

    /// Returns the information that the server sends to each new client, as text.
    pub fn info(&self) -> String {
        let mut line = String::new();
        let stream = connected(self.port).expect("it listens");
        BufReader::new(stream).read_line(&mut line).expect("it greets");
        line
    }

    /// Returns the server's output.
    pub fn log(&self) -> String {
        self.daemon.log()
    }

    /// Returns the server's process ID.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// Sends SIGSTOP to the server.
    pub fn stop(&self) {
        self.daemon.stop();
    }

    /// Sends SIGCONT to the server.
    pub fn cont(&self) {
        self.daemon.cont();
    }

    /// Makes the server read its configuration file again.
    pub fn reload(&self) {
        run(Command::new("kill").args(["-HUP", &self.pid().to_string()]));
    }

    /// Sends SIGKILL to the server.
    pub fn kill(&self) {
        self.daemon.kill();
    }

    /// Restarts the server on the same port with its data. Kills it first if it is running.
    pub fn restart(&self) {
        self.daemon.restart(&|| accepts(self.port));
    }
}

/// A cluster of three members, which are numbered from 0 and named `n0` and so on.
#[derive(Debug)]
pub struct NatsCluster {
    members: Vec<Member>,
    network: Option<Network>,
}

#[derive(Debug)]
struct Member {
    daemon: Daemon,
    client: u16,
    monitor: u16,
}

impl NatsCluster {
    /// Starts three members with NATS's defaults, which sync their data every two minutes.
    pub fn start() -> Self {
        Self::start_in(false, || None)
    }

    /// Starts three members that can be [cut](Self::cut) from each other. Only within
    /// [`in_own_network`](crate::in_own_network), and one at a time there.
    pub fn separable() -> Self {
        Self::start_in(false, || Some(Network::new()))
    }

    /// Starts [separable](Self::separable) members that sync each write before they acknowledge it.
    pub fn durable() -> Self {
        Self::start_in(true, || Some(Network::new()))
    }

    fn start_in(is_durable: bool, network: impl Fn() -> Option<Network>) -> Self {
        let mut last = String::new();
        for _ in 0..5 {
            match Self::try_start(is_durable, network()) {
                Ok(cluster) => return cluster,
                Err(why) if why.to_lowercase().contains("address already in use") => last = why,
                Err(why) => panic!("{why}"),
            }
        }
        panic!("five times a port was taken: {last}");
    }

    fn try_start(is_durable: bool, network: Option<Network>) -> Result<Self, String> {
        let new_ports = || [port::free(), port::free(), port::free()];
        let ports: Vec<[u16; 3]> = (0..3).map(|_| new_ports()).collect();
        let routes: Vec<String> =
            ports.iter().map(|[_, route, _]| format!("nats://127.0.0.1:{route}")).collect();
        let mut cluster = Self { members: Vec::new(), network };
        for (n, &[client, route, monitor]) in ports.iter().enumerate() {
            let directory = reaper::directory("nats");
            let mut args: Vec<String> = vec!["-js".into(), format!("--name=n{n}")];
            args.push("--addr=127.0.0.1".into());
            args.push(format!("--port={client}"));
            args.push(format!("--http_port={monitor}"));
            let data = directory.join("data").display().to_string();
            if is_durable {
                let config = directory.join("nats.conf");
                let text = "jetstream { sync_interval: always }\n";
                std::fs::write(&config, text).expect("a file in our directory");
                args.push(format!("--config={}", config.display()));
            }
            args.push(format!("--store_dir={data}"));
            args.push("--cluster_name=testbed".into());
            args.push(format!("--cluster=nats://127.0.0.1:{route}"));
            args.push(format!("--routes={}", routes.join(",")));
            let mut launch = Launch { program: program(), args, user: None };
            if let Some(network) = &cluster.network {
                network.admit(n, &mut launch, &directory);
            }
            // A member is ready only when the others are running as well.
            let daemon = Daemon::start("nats", directory, launch, None, &|| true)?;
            cluster.members.push(Member { daemon, client, monitor });
        }
        cluster.until_whole()?;
        Ok(cluster)
    }

    /// Waits until every member is healthy, and the leader has heard from the others. Otherwise, it
    /// rejects a new stream with "peer offline".
    fn until_whole(&self) -> Result<(), String> {
        let end = Instant::now() + PATIENCE;
        for member in &self.members {
            while !member.is_healthy() {
                if let Some(status) = member.daemon.ended() {
                    return Err(format!("nats ended with {status}:\n{}", member.daemon.log()));
                }
                assert!(Instant::now() < end, "nats does not get well:\n{}", member.daemon.log());
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        while !self.members.iter().any(Member::leads_the_others) {
            assert!(
                Instant::now() < end,
                "nats elects no leader: {}",
                self.members[0].daemon.log()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Returns the URL with all members, without a bucket.
    pub fn url(&self) -> String {
        let hosts: Vec<String> =
            self.members.iter().map(|m| format!("127.0.0.1:{}", m.client)).collect();
        format!("nats://{}", hosts.join(","))
    }

    /// Returns a member's port for clients.
    pub fn port(&self, member: usize) -> u16 {
        self.members[member].client
    }

    /// Sends one request to a member and returns the answer.
    pub fn ask(&self, member: usize, subject: &str, what: &str) -> String {
        let port = self.members[member].client;
        ask(port, subject, what).unwrap_or_else(|why| panic!("no answer of {subject}: {why}"))
    }

    /// Waits until this stream has a leader, and returns the leader's number.
    pub fn leader(&self, stream: &str) -> usize {
        let end = Instant::now() + PATIENCE;
        let subject = format!("$JS.API.STREAM.INFO.{stream}");
        loop {
            for member in self.members.iter().filter(|member| member.daemon.ended().is_none()) {
                let Ok(reply) = ask(member.client, &subject, "") else { continue };
                let named = reply.split("\"leader\":\"n").nth(1).and_then(|rest| rest.get(..1));
                if let Some(leader) = named.and_then(|n| n.parse().ok()) {
                    return leader;
                }
            }
            assert!(Instant::now() < end, "the members of {stream} elect no leader");
            std::thread::sleep(Duration::from_millis(50));
        }
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

    /// Restarts all members on their ports and with their data, and waits until they are healthy.
    /// Kills those that run first.
    pub fn restart_all(&self) {
        self.members.iter().for_each(|member| member.daemon.kill());
        self.members.iter().for_each(|member| member.daemon.restart(&|| true));
        self.until_whole().unwrap_or_else(|why| panic!("cannot restart: {why}"));
    }

    /// Cuts a member from the others, but not from its clients. Requires
    /// [`separable`](Self::separable).
    pub fn cut(&self, member: usize, cut: Cut) {
        let Member { client, monitor, .. } = self.members[member];
        self.network().cut(member, cut, &[client, monitor]);
    }

    /// Ends all cuts and waits until every member is healthy.
    pub fn heal(&self) {
        self.network().heal();
        self.until_whole().unwrap_or_else(|why| panic!("{why}"));
    }

    fn network(&self) -> &Network {
        self.network.as_ref().expect("ask for NatsCluster::separable first")
    }
}

impl Member {
    fn is_healthy(&self) -> bool {
        get(self.monitor, "/healthz").is_some_and(|text| text.contains("\"ok\""))
    }

    /// Returns whether this member is the leader and both others are up to date.
    fn leads_the_others(&self) -> bool {
        let text = get(self.monitor, "/jsz").unwrap_or_default();
        let text: String = text.split_whitespace().collect();
        text.matches("\"current\":true").count() == 2 && !text.contains("\"offline\":true")
    }
}

/// Returns the server's program. Only the newest version is tested, because Debian 12's version
/// does not support keys that expire.
fn program() -> std::path::PathBuf {
    Server::Nats.program(Version::Newest, "nats-server")
}

/// Returns the answer to one plain HTTP request, or `None` if it does not arrive in time.
fn get(port: u16, path: &str) -> Option<String> {
    let mut stream = connected(port).ok()?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}

fn connected(port: u16) -> std::io::Result<TcpStream> {
    let limit = Some(Duration::from_millis(2_000));
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(limit)?;
    stream.set_write_timeout(limit)?;
    Ok(stream)
}

/// Sends one request in NATS's own protocol, and returns the payload of its answer.
fn ask(port: u16, subject: &str, what: &str) -> std::io::Result<String> {
    let mut stream = BufReader::new(connected(port)?);
    let hello =
        "CONNECT {\"verbose\":false,\"headers\":true,\"no_responders\":true}\r\nSUB answer 1\r\n";
    let length = what.len();
    write!(stream.get_mut(), "{hello}PUB {subject} answer {length}\r\n{what}\r\n")?;
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        if line.starts_with("PING") {
            stream.get_mut().write_all(b"PONG\r\n")?;
        } else if line.starts_with("MSG ") || line.starts_with("HMSG ") {
            let length = line.trim_end().rsplit(' ').next().and_then(|n| n.parse().ok());
            let mut payload = vec![0; length.unwrap_or(0)];
            stream.read_exact(&mut payload)?;
            return Ok(String::from_utf8_lossy(&payload).into_owned());
        } else if line.starts_with("-ERR") {
            return Err(std::io::Error::other(line));
        }
    }
}
