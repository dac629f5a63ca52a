//! A server of leasehold itself, `leasehold serve`.

use std::path::Path;

use crate::daemon::{Daemon, Launch, accepts, start_somewhere};
use crate::reaper;

/// A lock service over another store.
#[derive(Debug)]
pub struct LockService {
    daemon: Daemon,
    port: u16,
}

impl LockService {
    /// Starts the program `leasehold` as a server over the store of this URL. It needs no tokens.
    pub fn start(leasehold: &Path, store: &str) -> Self {
        start_somewhere(|port| Self::try_start(leasehold, store, port))
    }

    fn try_start(leasehold: &Path, store: &str, port: u16) -> Result<Self, String> {
        let address = format!("127.0.0.1:{port}");
        let args = ["serve", "--no-auth", "--listen", &address, "--store", store];
        let args = args.map(str::to_owned).to_vec();
        let launch = Launch { program: leasehold.to_owned(), args, user: None };
        let directory = reaper::directory("lock-service");
        let daemon = Daemon::start("lock-service", directory, launch, None, &|| accepts(port))?;
        Ok(Self { daemon, port })
    }

    /// Returns the port on which the server listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Pauses the server, with SIGSTOP.
    pub fn stop(&self) {
        self.daemon.stop();
    }

    /// Resumes the server after [`stop`](Self::stop).
    pub fn cont(&self) {
        self.daemon.cont();
    }

    /// Kills the server, with SIGKILL.
    pub fn kill(&self) {
        self.daemon.kill();
    }

    /// Restarts the server on the same port. Kills it first if it is running.
    pub fn restart(&self) {
        self.daemon.restart(&|| accepts(self.port));
    }
}
