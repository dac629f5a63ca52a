//! Redis: one server, alone or as a replica of another.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use crate::cert::Certificates;
use crate::clock::MovableClock;
use crate::daemon::{Daemon, Launch, Setup, start_somewhere};
use crate::reaper;
use crate::version::Server;

/// A Redis server. Without [`Setup::fast`] it writes every command to its disk before it answers.
/// `Setup::arg("--requirepass")` and the next argument set a password. `--user` adds users, as on
/// Redis's own command line.
#[derive(Debug)]
pub struct Redis {
    daemon: Daemon,
    directory: PathBuf,
    port: u16,
    /// Port on which the server listens at present.
    listens: AtomicU16,
    tls_port: Option<u16>,
    password: Option<String>,
    certificates: Option<Certificates>,
}

impl Redis {
    /// Starts a private server.
    pub fn start() -> Self {
        Self::with(Setup::new())
    }

    /// Starts a private server with this setup.
    pub fn with(setup: Setup) -> Self {
        start_somewhere(|port| Self::try_start(&setup, port))
    }

    /// Starts a replica of another server.
    pub fn replica_of(master: u16, setup: Setup) -> Self {
        Self::with(setup.arg("--replicaof").arg(format!("127.0.0.1 {master}")))
    }

    pub(crate) fn try_start(setup: &Setup, port: u16) -> Result<Self, String> {
        let directory = reaper::directory("redis");
        let certificates = setup.tls.then(|| Certificates::make(&directory));
        let clock = setup.movable_clock.then(|| MovableClock::new(&directory));
        let data = directory.join("data");
        std::fs::create_dir(&data).expect("a new directory in our own");
        let mut args: Vec<String> = Vec::new();
        let mut set = |key: &str, value: String| args.extend([format!("--{key}"), value]);
        set("port", port.to_string());
        set("bind", "127.0.0.1".into());
        set("dir", data.display().to_string());
        set("unixsocket", directory.join("socket").display().to_string());
        set("save", String::new());
        set("appendonly", if setup.fast { "no" } else { "yes" }.into());
        set("appendfsync", "always".into());
        set("protected-mode", "no".into());
        set("daemonize", "no".into());
        set("enable-debug-command", "local".into());
        // Replication begins immediately, and not after a wait of five seconds for more replicas.
        set("repl-diskless-sync-delay", "0".into());
        let tls_port = certificates.as_ref().map(|certificates| {
            let tls_port = crate::port::free();
            set("tls-port", tls_port.to_string());
            set("tls-auth-clients", "no".into());
            set("tls-cert-file", certificates.certificate.display().to_string());
            set("tls-key-file", certificates.key.display().to_string());
            set("tls-ca-cert-file", certificates.authority().display().to_string());
            tls_port
        });
        args.extend(setup.args.iter().cloned());
        let password = setup.args.iter().skip_while(|arg| *arg != "--requirepass").nth(1).cloned();
        let launch = Launch { program: server_program(setup), args, user: None };
        let ready = || is_ready(port);
        let daemon = Daemon::start("redis", directory.clone(), launch, clock, &ready)?;
        let listens = AtomicU16::new(port);
        Ok(Self { daemon, directory, port, listens, tls_port, password, certificates })
    }

    /// Returns the port without TLS.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the server's URL. With [`Setup::tls`] the URL names the TLS port.
    pub fn url(&self) -> String {
        let password = self.password.as_ref().map(|p| format!(":{p}@")).unwrap_or_default();
        match self.tls_port {
            Some(port) => format!("rediss://{password}127.0.0.1:{port}/"),
            None => format!("redis://{password}127.0.0.1:{}/", self.port),
        }
    }

    /// Returns the path of the server's Unix socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    /// Returns the server's certificates. Panics if it was started without [`Setup::tls`].
    pub fn certificates(&self) -> &Certificates {
        self.certificates.as_ref().expect("ask for Setup::tls first")
    }

    /// Runs a command as the default user. Each element of an array is a line. Panics if the server
    /// refuses.
    pub fn command(&self, args: &[&str]) -> String {
        self.try_command(args).unwrap_or_else(|why| panic!("{args:?}: {why}"))
    }

    fn try_command(&self, args: &[&str]) -> Result<String, String> {
        let port = self.listens.load(Ordering::SeqCst);
        let mut line = Line::open(port).map_err(|why| why.to_string())?;
        if let Some(password) = &self.password {
            line.command(&["AUTH", password])?;
        }
        line.command(args)
    }

    /// Makes the server listen on `port` instead of its present port. [`command`](Self::command)
    /// then uses `port`. To undo this, pass the server's original [port](Self::port).
    pub fn listen_at(&self, port: u16) {
        self.command(&["CONFIG", "SET", "port", &port.to_string()]);
        self.listens.store(port, Ordering::SeqCst);
        crate::wait::wait("it to listen there", &|| is_ready(port));
    }

    /// Returns the server's replication status, or an empty text if the server does not answer. A
    /// sentinel that makes the server a master closes all connections to it, including the one used
    /// here.
    fn replication(&self) -> String {
        self.try_command(&["INFO", "replication"]).unwrap_or_default()
    }

    /// Returns whether the server knows that it is a replica.
    pub fn is_replica(&self) -> bool {
        self.replication().lines().any(|line| line.trim() == "role:slave")
    }

    /// Returns the value of `figure` in this section of INFO.
    pub fn info(&self, section: &str, figure: &str) -> String {
        let all = self.command(&["INFO", section]);
        let value = all.lines().find_map(|line| line.strip_prefix(figure)?.strip_prefix(':'));
        value.unwrap_or_else(|| panic!("INFO {section} has no {figure}:\n{all}")).trim().to_owned()
    }

    /// Returns how often each command ran since `CONFIG RESETSTAT`, by name. Commands of scripts
    /// are included.
    pub fn calls(&self) -> Vec<(String, u64)> {
        let all = self.command(&["INFO", "commandstats"]);
        let calls = all.lines().filter_map(|line| {
            let (name, figures) = line.strip_prefix("cmdstat_")?.split_once(':')?;
            let calls = figures.strip_prefix("calls=")?.split(',').next()?.parse().ok()?;
            Some((name.to_owned(), calls))
        });
        calls.collect()
    }

    /// Waits until exactly `count` replicas are online at this master.
    pub fn wait_for_replicas(&self, count: usize) {
        crate::wait::wait("the replicas to be in step", &|| {
            self.replication().matches("state=online").count() == count
        });
    }

    /// Waits until this replica has become a master.
    pub fn wait_for_master(&self) {
        crate::wait::wait("a replica to become master", &|| self.is_master());
    }

    pub(crate) fn is_master(&self) -> bool {
        self.replication().lines().any(|line| line.trim() == "role:master")
    }

    /// Returns the server's log.
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

    /// Sends SIGKILL to the server.
    pub fn kill(&self) {
        self.daemon.kill();
    }

    /// Restarts the server on the same port with its data on disk. Kills it first if it runs.
    pub fn restart(&self) {
        self.daemon.restart(&|| is_ready(self.port));
    }

    /// Restarts the server on the same port, without data.
    pub fn restart_empty(&self) {
        self.kill();
        let data = self.directory.join("data");
        // A node of a cluster keeps its place in the cluster.
        let nodes = std::fs::read(data.join("nodes.conf")).ok();
        std::fs::remove_dir_all(&data).expect("our own directory");
        std::fs::create_dir(&data).expect("our own directory");
        if let Some(nodes) = nodes {
            std::fs::write(data.join("nodes.conf"), nodes).expect("our own directory");
        }
        self.restart();
    }

    /// Sets the server's wall clock to the true time plus `seconds` ([`Setup::movable_clock`]).
    pub fn shift_clock(&self, seconds: i64) {
        self.daemon.clock().shift(seconds * 1_000_000_000);
    }
}

/// Returns the program of Redis, or of Valkey if the setup requires it.
pub(crate) fn server_program(setup: &Setup) -> PathBuf {
    match setup.valkey {
        true => Server::Valkey.program(setup.version(), "valkey-server"),
        false => Server::Redis.program(setup.version(), "redis-server"),
    }
}

/// Returns whether the server answers a PING, or requires a password for it.
pub(crate) fn is_ready(port: u16) -> bool {
    match Line::open(port).map(|mut line| line.command(&["PING"])) {
        Ok(Ok(_)) => true,
        Ok(Err(refused)) => refused.starts_with("NOAUTH"),
        Err(_) => false,
    }
}

/// Runs one command on a server that requires no password.
pub(crate) fn ask(port: u16, args: &[&str]) -> Result<String, String> {
    let mut line = Line::open(port).map_err(|e| e.to_string())?;
    line.command(args)
}

/// A connection that implements as much of the protocol as tests need.
struct Line(BufReader<TcpStream>);

impl Line {
    fn open(port: u16) -> std::io::Result<Self> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        Ok(Self(BufReader::new(stream)))
    }

    fn command(&mut self, args: &[&str]) -> Result<String, String> {
        let mut request = format!("*{}\r\n", args.len());
        for arg in args {
            request += &format!("${}\r\n{arg}\r\n", arg.len());
        }
        self.0.get_mut().write_all(request.as_bytes()).map_err(|e| e.to_string())?;
        self.reply()
    }

    fn reply(&mut self) -> Result<String, String> {
        let mut head = String::new();
        self.0.read_line(&mut head).map_err(|e| e.to_string())?;
        let head = head.trim_end();
        let (kind, rest) = head.split_at_checked(1).ok_or("it hung up")?;
        match kind {
            "+" | ":" => Ok(rest.to_owned()),
            "-" => Err(rest.to_owned()),
            "$" => {
                let Ok(length) = rest.parse::<usize>() else { return Ok(String::new()) };
                let mut body = vec![0; length + 2];
                self.0.read_exact(&mut body).map_err(|e| e.to_string())?;
                body.truncate(length);
                Ok(String::from_utf8_lossy(&body).into_owned())
            }
            "*" => {
                let count = rest.parse::<usize>().unwrap_or(0);
                let elements: Result<Vec<String>, String> =
                    (0..count).map(|_| self.reply()).collect();
                Ok(elements?.join("\n"))
            }
            _ => Err(format!("no reply of Redis: {head:?}")),
        }
    }
}
