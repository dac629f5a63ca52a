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

/// It refuses to run as root.
const USER: &str = "postgres";

/// A PostgreSQL server. Its superuser `postgres` needs no password; the role `lh` (password `lh`)
/// owns the databases that tests get, and nothing else.
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
    /// A server of the test's own.
    pub fn start() -> Self {
        Self::with(Setup::new())
    }

    /// The same, with more wishes.
    pub fn with(setup: Setup) -> Self {
        start_somewhere(|port| Self::try_start(&setup, port))
    }

    fn try_start(setup: &Setup, port: u16) -> Result<Self, String> {
        let programs = programs(setup.version());
        let directory = reaper::directory("postgres");
        let certificates = setup.tls.then(|| Certificates::make(&directory));
        let clock = setup.movable_clock.then(|| MovableClock::new(&directory));
        give_to(USER, &directory);
        let data = directory.join("data");
        template::copy(Server::Postgres, setup.version(), &data, |place| {
            let made = place.join("data");
            give_to(USER, place);
            let mut initdb = as_user(Some(USER), &programs.join("initdb"));
            initdb.args(["-U", USER, "-A", "trust", "-N", "--no-instructions", "-E", "UTF8"]);
            run(initdb.args(["--locale=C", "-D"]).arg(&made).current_dir(place));
            made
        });
        let access = "host all postgres 127.0.0.1/32 trust\n\
                      host all all 127.0.0.1/32 scram-sha-256\n";
        std::fs::write(data.join("pg_hba.conf"), access).expect("initdb has made the directory");

        let mut args = vec!["-D".into(), data.display().to_string(), "-p".into(), port.to_string()];
        let mut set = |setting: String| args.extend(["-c".into(), setting]);
        set("listen_addresses=127.0.0.1".into());
        set("unix_socket_directories=".into());
        set("max_connections=300".into());
        set("shared_buffers=32MB".into());
        // In our directory, since it is killed without having cleaned up.
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
        let server =
            Self { daemon, directory, programs, port, certificates, databases: AtomicU32::new(0) };
        server.admin("postgres", "CREATE ROLE lh LOGIN PASSWORD 'lh'");
        Ok(server)
    }

    /// The URL of a new, empty database that the role `lh` owns.
    pub fn database(&self) -> String {
        let number = self.databases.fetch_add(1, Ordering::Relaxed);
        let name = format!("test{number}");
        self.admin("postgres", &format!("CREATE DATABASE {name} OWNER lh"));
        self.url("lh", "lh", &name)
    }

    /// The URL of a database for a role.
    pub fn url(&self, role: &str, password: &str, database: &str) -> String {
        format!("postgres://{role}:{password}@127.0.0.1:{}/{database}", self.port)
    }

    /// Runs SQL as the superuser; one line for each row, columns separated by `|`. Several
    /// statements are one transaction.
    pub fn admin(&self, database: &str, sql: &str) -> String {
        let mut psql = Command::new(self.programs.join("psql"));
        psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-U", USER, "-h", "127.0.0.1"]);
        psql.args(["-p", &self.port.to_string(), "-d", database, "-c", sql]);
        run(&mut psql).trim_end().to_owned()
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The postmaster.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// What it logged.
    pub fn log(&self) -> String {
        self.daemon.log()
    }

    /// Its certificates, with [`Setup::tls`].
    pub fn certificates(&self) -> &Certificates {
        self.certificates.as_ref().expect("ask for Setup::tls first")
    }

    /// SIGSTOP for every process of it.
    pub fn stop(&self) {
        self.daemon.stop();
    }

    /// SIGCONT.
    pub fn cont(&self) {
        self.daemon.cont();
    }

    /// kill -9 for every process of it.
    pub fn kill(&self) {
        self.daemon.kill();
    }

    /// Up again on the same port with the same data; killed before if it runs.
    pub fn restart(&self) {
        self.daemon.restart(&|| is_ready(&self.programs, self.port));
    }

    /// Killed, and up again as a hot standby whose primary is gone: it answers, and cannot be written
    /// to.
    pub fn become_standby(&self) {
        self.kill();
        let signal = self.directory.join("data").join("standby.signal");
        std::fs::write(&signal, "").expect("a file in our directory");
        give_to(USER, &self.directory);
        self.restart();
    }

    /// From now on its wall clock shows the true time plus this ([`Setup::movable_clock`]).
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
