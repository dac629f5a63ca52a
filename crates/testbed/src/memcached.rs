//! memcached: one server, which loses all data when it is killed.

use std::io::{BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use crate::command::program;
use crate::daemon::{Daemon, Launch, Setup, accepts, start_somewhere};
use crate::{Certificates, reaper};

/// A memcached server. Further arguments of its command line can be added with [`Setup::arg`].
#[derive(Debug)]
pub struct Memcached {
    daemon: Daemon,
    port: u16,
    certificates: Option<Certificates>,
}

impl Memcached {
    /// Starts a private server.
    pub fn start() -> Self {
        Self::with(Setup::new())
    }

    /// Starts a private server with this setup.
    pub fn with(setup: Setup) -> Self {
        start_somewhere(|port| Self::try_start(&setup, port))
    }

    fn try_start(setup: &Setup, port: u16) -> Result<Self, String> {
        let directory = reaper::directory("memcached");
        let port_text = port.to_string();
        let fixed = ["-l", "127.0.0.1", "-p", &port_text, "-U", "0", "-t", "2", "-u", "nobody"];
        let mut args: Vec<String> = fixed.map(str::to_owned).to_vec();
        let certificates = setup.tls.then(|| Certificates::make(&directory));
        if let Some(Certificates { authority, certificate, key, .. }) = &certificates {
            // The server drops root permissions before it reads the files.
            let verify = if setup.client_certificates { 2 } else { 0 };
            let files = [("chain_cert", certificate), ("key", key), ("ca_cert", authority)];
            args.push("-Z".into());
            for (name, file) in files {
                args.extend(["-o".into(), format!("ssl_{name}={}", file.display())]);
            }
            args.extend(["-o".into(), format!("ssl_verify_mode={verify}")]);
        }
        args.extend(setup.args.iter().cloned());
        let launch = Launch { program: program("memcached", &[], "memcached"), args, user: None };
        let daemon = Daemon::start("memcached", directory, launch, None, &|| accepts(port))?;
        Ok(Self { daemon, port, certificates })
    }

    /// Returns the port on which the server listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the server's URL.
    pub fn url(&self) -> String {
        let scheme = if self.certificates.is_some() { "memcacheds" } else { "memcached" };
        format!("{scheme}://127.0.0.1:{}/", self.port)
    }

    /// Returns the server's certificates. Panics if it was started without [`Setup::tls`].
    pub fn certificates(&self) -> &Certificates {
        self.certificates.as_ref().expect("ask for Setup::tls first")
    }

    /// Sends one line and returns the lines of the answer.
    pub fn say(&self, line: &str) -> Vec<String> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("not zero");
        let mut stream = BufReader::new(stream);
        // The reply to the no-op that follows marks the end of the answer.
        stream
            .get_mut()
            .write_all(format!("{line}\r\nmn\r\nquit\r\n").as_bytes())
            .expect("it reads");
        let mut reply = String::new();
        stream.by_ref().read_to_string(&mut reply).expect("text");
        reply.lines().take_while(|line| *line != "MN").map(str::to_owned).collect()
    }

    /// Returns the number `name` in the answer to `stats`.
    pub fn figure(&self, name: &str) -> u64 {
        let start = format!("STAT {name} ");
        let all = self.say("stats");
        let value = all.iter().find_map(|line| line.strip_prefix(&start)?.parse().ok());
        value.unwrap_or_else(|| panic!("stats have no {name}: {all:?}"))
    }

    /// Makes the server discard all data without a restart.
    pub fn flush(&self) {
        assert_eq!(self.say("flush_all"), ["OK"]);
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

    /// Restarts the server on the same port, without data. Kills it first if it is running.
    pub fn restart(&self) {
        self.daemon.restart(&|| accepts(self.port));
    }
}
