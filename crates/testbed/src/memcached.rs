//! memcached: one server, which forgets all when it is killed.

use std::io::{BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use crate::command::program;
use crate::daemon::{Daemon, Launch, Setup, accepts, start_somewhere};
use crate::reaper;

/// A memcached server. More arguments, as on its own command line, with [`Setup::arg`].
#[derive(Debug)]
pub struct Memcached {
    daemon: Daemon,
    port: u16,
}

impl Memcached {
    /// A server of the test's own.
    pub fn start() -> Self {
        Self::with(Setup::new())
    }

    /// The same, with more wishes.
    pub fn with(setup: Setup) -> Self {
        start_somewhere(|port| Self::try_start(&setup, port))
    }

    fn try_start(setup: &Setup, port: u16) -> Result<Self, String> {
        let directory = reaper::directory("memcached");
        let port_text = port.to_string();
        let fixed = ["-l", "127.0.0.1", "-p", &port_text, "-U", "0", "-t", "2", "-u", "nobody"];
        let mut args: Vec<String> = fixed.map(str::to_owned).to_vec();
        args.extend(setup.args.iter().cloned());
        let launch = Launch { program: program("memcached", &[], "memcached"), args, user: None };
        let daemon = Daemon::start("memcached", directory, launch, None, &|| accepts(port))?;
        Ok(Self { daemon, port })
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("memcached://127.0.0.1:{}/", self.port)
    }

    /// Says one line, and tells the lines of the answer, up to the last that it begins with `END`, or the
    /// first if it is the only one.
    pub fn say(&self, line: &str) -> Vec<String> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("not zero");
        let mut stream = BufReader::new(stream);
        // What follows tells where the answer ends.
        stream
            .get_mut()
            .write_all(format!("{line}\r\nmn\r\nquit\r\n").as_bytes())
            .expect("it reads");
        let mut said = String::new();
        stream.by_ref().read_to_string(&mut said).expect("text");
        said.lines().take_while(|line| *line != "MN").map(str::to_owned).collect()
    }

    /// One figure of `stats`.
    pub fn figure(&self, name: &str) -> u64 {
        let start = format!("STAT {name} ");
        let all = self.say("stats");
        let value = all.iter().find_map(|line| line.strip_prefix(&start)?.parse().ok());
        value.unwrap_or_else(|| panic!("stats have no {name}: {all:?}"))
    }

    /// Forgets all, as a restart does, and goes on.
    pub fn flush(&self) {
        assert_eq!(self.say("flush_all"), ["OK"]);
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

    /// Up again on the same port, empty; killed before if it runs.
    pub fn restart(&self) {
        self.daemon.restart(&|| accepts(self.port));
    }
}
