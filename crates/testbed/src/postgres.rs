//! PostgreSQL.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cert::Certificates;
use crate::clock::MovableClock;
use crate::command::{run, succeeds};
use crate::daemon::{Daemon, Launch, Setup};
use crate::daemon::{accepts, as_user, give_to, start_somewhere};
use crate::reaper;
use crate::template;
use crate::version::{Server, Version};

/// The user to run as, because PostgreSQL refuses to run as root.
const USER: &str = "postgres";

/// A PostgreSQL server. Its superuser `postgres` needs no password. The role `lh` (password `lh`)
/// owns the tests' databases, and nothing else.
#[derive(Debug)]
pub struct Postgres {
    daemon: Daemon,
    directory: PathBuf,
    programs: PathBuf,
    port: u16,
    certificates: Option<Certificates>,
    databases: AtomicU32,
}

impl Postgres {
    /// Starts a private server.
    pub fn start() -> Self {
        Self::with(Setup::new())
    }

    /// Starts a private server with this setup.
    pub fn with(setup: Setup) -> Self {
        start_somewhere(|port| Self::try_start(&setup, port))
    }

    /// Starts an asynchronous streaming replica of this server, with this setup. This server is
    /// restarted, because its files are copied while it is down.
    pub fn replica(&self, setup: Setup) -> Self {
        self.kill();
        let replica = start_somewhere(|port| {
            Self::launch(&setup, port, |_, data| {
                run(Command::new("cp").arg("-a").arg(self.directory.join("data")).arg(data));
                let _ = std::fs::remove_file(data.join("postmaster.pid"));
                let primary =
                    format!("primary_conninfo = 'host=127.0.0.1 port={} user={USER}'\n", self.port);
                std::fs::write(data.join("postgresql.auto.conf"), primary)
                    .and_then(|()| std::fs::write(data.join("standby.signal"), ""))
                    .expect("files in our directory");
                give_to(USER, data);
            })
        });
        self.restart();
        replica
    }

    fn try_start(setup: &Setup, port: u16) -> Result<Self, String> {
        let server = Self::launch(setup, port, |programs, data| {
            template::copy(Server::Postgres, setup.version(), data, |place| {
                let made = place.join("data");
                give_to(USER, place);
                let mut initdb = as_user(Some(USER), &programs.join("initdb"));
                initdb.args(["-U", USER, "-A", "trust", "-N", "--no-instructions", "-E", "UTF8"]);
                run(initdb.args(["--locale=C", "-D"]).arg(&made).current_dir(place));
                made
            });
            let access = "host all,replication postgres 127.0.0.1/32 trust\n\
                          host all all 127.0.0.1/32 scram-sha-256\n";
            std::fs::write(data.join("pg_hba.conf"), access)
                .expect("initdb has made the directory");
        })?;
        server.admin("postgres", "CREATE ROLE lh LOGIN PASSWORD 'lh'");
        Ok(server)
    }

    /// Starts a server. `fill` writes its data, and gets the directory of PostgreSQL's programs.
    fn launch(setup: &Setup, port: u16, fill: impl FnOnce(&Path, &Path)) -> Result<Self, String> {
        let programs = programs(setup.version());
        let directory = reaper::directory("postgres");
        let certificates = setup.tls.then(|| Certificates::make(&directory));
        let clock = setup.movable_clock.then(|| MovableClock::new(&directory));
        give_to(USER, &directory);
        let data = directory.join("data");
        fill(&programs, &data);

        let mut args = vec!["-D".into(), data.display().to_string(), "-p".into(), port.to_string()];
        let mut set = |setting: String| args.extend(["-c".into(), setting]);
        set("listen_addresses=127.0.0.1".into());
        set("unix_socket_directories=".into());
        set("max_connections=300".into());
        set("shared_buffers=32MB".into());
        // Shared memory is in the server's directory, because a killed server does not remove it.
        set("dynamic_shared_memory_type=mmap".into());
        if setup.fast {
            set("fsync=off".into());
            set("synchronous_commit=off".into());
            set("full_page_writes=off".into());
        }
        if let Some(certificates) = &certificates {
            set("ssl=on".into());
            set(format!("ssl_cert_file={}", certificates.certificate.display()));
            set(format!("ssl_key_file={}", certificates.key.display()));
        }
        args.extend(setup.args.iter().cloned());
        let launch = Launch { program: programs.join("postgres"), args, user: Some(USER) };
        let ready = || is_ready(&programs, port);
        let daemon = Daemon::start("postgres", directory.clone(), launch, clock, &ready)?;
        Ok(Self { daemon, directory, programs, port, certificates, databases: AtomicU32::new(0) })
    }

    /// Creates a new, empty database of the role `lh` and returns its URL.
    pub fn database(&self) -> String {
        let number = self.databases.fetch_add(1, Ordering::Relaxed);
        let name = format!("test{number}");
        self.admin("postgres", &format!("CREATE DATABASE {name} OWNER lh"));
        self.url("lh", "lh", &name)
    }

    /// Returns the URL of a database for a role.
    pub fn url(&self, role: &str, password: &str, database: &str) -> String {
        format!("postgres://{role}:{password}@127.0.0.1:{}/{database}", self.port)
    }

    /// Runs SQL as the superuser. Returns one line for each row, with columns separated by `|`.
    /// Several statements are one transaction.
    pub fn admin(&self, database: &str, sql: &str) -> String {
        let mut psql = Command::new(self.programs.join("psql"));
        psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-U", USER, "-h", "127.0.0.1"]);
        psql.args(["-p", &self.port.to_string(), "-d", database, "-c", sql]);
        run(&mut psql).trim_end().to_owned()
    }

    /// Returns the port on which the server listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the process ID of the postmaster.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// Returns the server's log.
    pub fn log(&self) -> String {
        self.daemon.log()
    }

    /// Returns the server's certificates. Panics if the server was started without [`Setup::tls`].
    pub fn certificates(&self) -> &Certificates {
        self.certificates.as_ref().expect("ask for Setup::tls first")
    }

    /// Sends SIGSTOP to every process of the server.
    pub fn stop(&self) {
        self.daemon.stop();
    }

    /// Sends SIGCONT to the server.
    pub fn cont(&self) {
        self.daemon.cont();
    }

    /// Sends SIGKILL to every process of the server.
    pub fn kill(&self) {
        self.daemon.kill();
    }

    /// Restarts the server on the same port with its data. Kills it first if it is running.
    pub fn restart(&self) {
        self.daemon.restart(&|| is_ready(&self.programs, self.port));
    }

    /// Kills the server and restarts it as a hot standby without a primary, which answers but is
    /// read-only.
    pub fn become_standby(&self) {
        self.kill();
        let signal = self.directory.join("data").join("standby.signal");
        std::fs::write(&signal, "").expect("a file in our directory");
        give_to(USER, &self.directory);
        self.restart();
    }

    /// Makes a replica a primary and waits until it accepts writes.
    pub fn promote(&self) {
        let promoted = self.admin("postgres", "SELECT pg_promote(true, 60)");
        assert_eq!(promoted, "t", "the replica was not promoted:\n{}", self.log());
    }

    /// Sets the server's wall clock to the true time plus `seconds` ([`Setup::movable_clock`]).
    pub fn shift_clock(&self, seconds: i64) {
        self.daemon.clock().shift(seconds * 1_000_000_000);
    }
}

fn programs(version: Version) -> PathBuf {
    let initdb = Server::Postgres.program(version, "initdb");
    initdb.parent().map(Path::to_path_buf).expect("found in a folder")
}

fn is_ready(programs: &Path, port: u16) -> bool {
    if !accepts(port) {
        return false;
    }
    let mut ask = Command::new(programs.join("pg_isready"));
    succeeds(ask.args(["-q", "-h", "127.0.0.1", "-p", &port.to_string()]))
}
