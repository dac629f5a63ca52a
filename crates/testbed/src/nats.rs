//! NATS with JetStream: one server, or a cluster of three whose members break one by one.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use crate::daemon::{Daemon, Launch, Setup, accepts, start_somewhere};
use crate::network::{Cut, Network};
use crate::version::{Server, Version};
use crate::{port, reaper};

/// How long a cluster may take to be whole.
const PATIENCE: Duration = Duration::from_secs(60);

/// A NATS server that keeps its streams in a directory of its own. More arguments, as on its own command
/// line, with [`Setup::arg`].
#[derive(Debug)]
pub struct Nats {
    daemon: Daemon,
    port: u16,
}

impl Nats {
    /// A server of the test's own.
    pub fn start() -> Self {
        Self::with(Setup::new())
    }

    /// The same, with more wishes.
    pub fn with(setup: Setup) -> Self {
        start_somewhere(|port| Self::try_start(&setup, port, true))
    }

    /// A server that keeps nothing: no JetStream.
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
        args.extend(setup.args.iter().cloned());
        let launch = Launch { program: program(), args, user: None };
        let daemon = Daemon::start("nats", directory, launch, None, &|| accepts(port))?;
        Ok(Self { daemon, port })
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its URL, without a bucket.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// The answer to one request, as text: what a client sends, without a library.
    pub fn ask(&self, subject: &str, what: &str) -> String {
        ask(self.port, subject, what).unwrap_or_else(|why| panic!("no answer of {subject}: {why}"))
    }

    /// What it says of itself to whoever comes, as text.
    pub fn info(&self) -> String {
        let mut line = String::new();
        let stream = connected(self.port).expect("it listens");
        BufReader::new(stream).read_line(&mut line).expect("it greets");
        line
    }

    /// What it printed.
    pub fn log(&self) -> String {
        self.daemon.log()
    }

    /// The server's process.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// SIGSTOP.
    pub fn stop(&self) {
        self.daemon.stop();
    }

    /// SIGCONT.
    pub fn cont(&self) {
        self.daemon.cont();
    }

    /// kill -9.
    pub fn kill(&self) {
        self.daemon.kill();
    }

    /// Up again on the same port, with what it kept; killed before if it runs.
    pub fn restart(&self) {
        self.daemon.restart(&|| accepts(self.port));
    }
}

/// A cluster of three members, numbered from 0, called `n0` and so on.
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
    /// Three members.
    pub fn start() -> Self {
        Self::start_in(|| None)
    }

    /// Three members that can be [cut](Self::cut) from each other. Within
    /// [`in_own_network`](crate::in_own_network) only, and once there.
    pub fn separable() -> Self {
        Self::start_in(|| Some(Network::new()))
    }

    fn start_in(network: impl Fn() -> Option<Network>) -> Self {
        let mut last = String::new();
        for _ in 0..5 {
            match Self::try_start(network()) {
                Ok(cluster) => return cluster,
                Err(why) if why.to_lowercase().contains("address already in use") => last = why,
                Err(why) => panic!("{why}"),
            }
        }
        panic!("five times a port was taken: {last}");
    }

    fn try_start(network: Option<Network>) -> Result<Self, String> {
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
            args.push(format!("--store_dir={}", directory.join("data").display()));
            args.push("--cluster_name=testbed".into());
            args.push(format!("--cluster=nats://127.0.0.1:{route}"));
            args.push(format!("--routes={}", routes.join(",")));
            let mut launch = Launch { program: program(), args, user: None };
            if let Some(network) = &cluster.network {
                network.admit(n, &mut launch, &directory);
            }
            // It is ready when the others are there as well.
            let daemon = Daemon::start("nats", directory, launch, None, &|| true)?;
            cluster.members.push(Member { daemon, client, monitor });
        }
        cluster.until_whole()?;
        Ok(cluster)
    }

    /// Waits until every member that runs says that it is well.
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
        Ok(())
    }

    /// The URL of all members, without a bucket.
    pub fn url(&self) -> String {
        let hosts: Vec<String> =
            self.members.iter().map(|m| format!("127.0.0.1:{}", m.client)).collect();
        format!("nats://{}", hosts.join(","))
    }

    /// Where a member listens for clients.
    pub fn port(&self, member: usize) -> u16 {
        self.members[member].client
    }

    /// The answer to one request at a member.
    pub fn ask(&self, member: usize, subject: &str, what: &str) -> String {
        let port = self.members[member].client;
        ask(port, subject, what).unwrap_or_else(|why| panic!("no answer of {subject}: {why}"))
    }

    /// The member that leads this stream, once there is one.
    pub fn leader(&self, stream: &str) -> usize {
        let end = Instant::now() + PATIENCE;
        let subject = format!("$JS.API.STREAM.INFO.{stream}");
        loop {
            for member in self.members.iter().filter(|member| member.daemon.ended().is_none()) {
                let Ok(told) = ask(member.client, &subject, "") else { continue };
                let named = told.split("\"leader\":\"n").nth(1).and_then(|rest| rest.get(..1));
                if let Some(leader) = named.and_then(|n| n.parse().ok()) {
                    return leader;
                }
            }
            assert!(Instant::now() < end, "the members of {stream} elect no leader");
            std::thread::sleep(Duration::from_millis(50));
        }
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
        let Member { client, monitor, .. } = self.members[member];
        self.network().cut(member, cut, &[client, monitor]);
    }

    /// Ends all cuts; returns when every member is well again.
    pub fn mend(&self) {
        self.network().mend();
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
}

/// There is only a newest: what Debian 12 has knows no keys that end by themselves.
fn program() -> std::path::PathBuf {
    Server::Nats.program(Version::Newest, "nats-server")
}

/// The answer to one plain HTTP request, or `None` if there is none soon.
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

/// One request in NATS's own protocol, and the payload of its answer.
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
