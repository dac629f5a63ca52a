//! PgBouncer: a pooler for a PostgreSQL server, in transaction mode.

use crate::command::program;
use crate::daemon::{Daemon, Launch};
use crate::daemon::{give_to, start_somewhere};
use crate::postgres::Postgres;
use crate::reaper;

/// The user to run as, because PgBouncer refuses to run as root.
const USER: &str = "postgres";

/// A pooler that gives each transaction any of a few connections to the server.
#[derive(Debug)]
pub struct PgBouncer {
    daemon: Daemon,
    port: u16,
}

impl PgBouncer {
    /// Starts PgBouncer in front of this server, with up to four connections to each of the
    /// server's databases. It rejects sessions with unknown parameters, as PgBouncer does by
    /// default.
    pub fn before(server: &Postgres) -> Self {
        Self::that_ignores(server, "")
    }

    /// Like [`before`](Self::before), but ignores these parameters (separated by commas) instead of
    /// rejecting them.
    pub fn that_ignores(server: &Postgres, parameter: &str) -> Self {
        start_somewhere(|port| Self::try_start(server, parameter, port))
    }

    fn try_start(server: &Postgres, ignored: &str, port: u16) -> Result<Self, String> {
        let pgbouncer = program("pgbouncer", &[], "pgbouncer");
        let directory = reaper::directory("pgbouncer");
        let users = directory.join("users");
        std::fs::write(&users, "\"lh\" \"lh\"\n").expect("a file in our directory");
        let config = directory.join("ini");
        let text = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr=127.0.0.1\n\
             listen_port={port}\nunix_socket_dir=\nauth_type=scram-sha-256\nauth_file={}\n\
             pool_mode=transaction\ndefault_pool_size=4\nmax_client_conn=200\n\
             ignore_startup_parameters={ignored}\n",
            server.port(),
            users.display(),
        );
        std::fs::write(&config, text).expect("a file in our directory");
        give_to(USER, &directory);
        let args = vec![config.display().to_string()];
        let launch = Launch { program: pgbouncer, args, user: Some(USER) };
        let ready = || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok();
        let daemon = Daemon::start("pgbouncer", directory, launch, None, &ready)?;
        Ok(Self { daemon, port })
    }

    /// Returns the URL of the same database through the pooler.
    pub fn in_front_of(&self, server: &Postgres, url: &str) -> String {
        url.replace(&format!(":{}/", server.port()), &format!(":{}/", self.port))
    }

    /// Returns the pooler's log.
    pub fn log(&self) -> String {
        self.daemon.log()
    }
}
