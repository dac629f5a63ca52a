//! MariaDB.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cert::Certificates;
use crate::clock::MovableClock;
use crate::daemon::{Daemon, Launch, Setup};
use crate::daemon::{program, run, start_somewhere, succeeds, we_are_root};
use crate::reaper;

/// A MariaDB server. The user `admin` may do everything; `lh` (password `lh`) may use the
/// databases that tests get, and nothing else.
#[derive(Debug)]
pub struct MariaDb {
    daemon: Daemon,
    port: u16,
    certificates: Option<Certificates>,
    databases: AtomicU32,
}

/// Read at each start, one statement a line.
const INIT: &str = "\
CREATE USER IF NOT EXISTS 'admin'@'127.0.0.1' IDENTIFIED BY 'admin';
GRANT ALL ON *.* TO 'admin'@'127.0.0.1' WITH GRANT OPTION;
CREATE USER IF NOT EXISTS 'lh'@'127.0.0.1' IDENTIFIED BY 'lh';
GRANT ALL ON `test%`.* TO 'lh'@'127.0.0.1';
";

impl MariaDb {
    /// A server of the test's own.
    pub fn start() -> Self {
        Self::with(Setup::new())
    }

    /// The same, with more wishes.
    pub fn with(setup: Setup) -> Self {
        start_somewhere(|port| Self::try_start(&setup, port))
    }

    fn try_start(setup: &Setup, port: u16) -> Result<Self, String> {
        let server_program = program("mariadbd", &[], "mariadb-server");
        let directory = reaper::directory("mariadb");
        let certificates = setup.tls.then(|| Certificates::make(&directory));
        let clock = setup.movable_clock.then(|| MovableClock::new(&directory));
        let path = |name: &str| directory.join(name).display().to_string();
        let mut install = Command::new(program("mariadb-install-db", &[], "mariadb-server"));
        install.args(["--no-defaults", "--auth-root-authentication-method=normal"]);
        install.args(["--skip-test-db", "--skip-name-resolve", "--innodb-log-file-size=8M"]);
        install.arg(format!("--datadir={}", path("data")));
        // Each its own: a server that starts deletes the temporary tables that it finds.
        let temporary = directory.join("tmp");
        std::fs::create_dir(&temporary).expect("a directory in our directory");
        install.env("TMPDIR", &temporary);
        // Unasked, it refuses to serve as root.
        install.args(we_are_root().then_some("--user=root"));
        run(&mut install);
        std::fs::write(directory.join("init.sql"), INIT).expect("a file in our directory");

        let mut args: Vec<String> =
            ["--no-defaults", "--bind-address=127.0.0.1"].map(Into::into).into();
        args.extend(we_are_root().then(|| "--user=root".into()));
        args.extend(
            ["--skip-name-resolve", "--skip-log-bin", "--max-connections=300"].map(Into::into),
        );
        args.extend(["--innodb-buffer-pool-size=32M", "--innodb-log-file-size=8M"].map(Into::into));
        args.push(format!("--port={port}"));
        args.push(format!("--datadir={}", path("data")));
        args.push(format!("--tmpdir={}", path("tmp")));
        args.push(format!("--socket={}", path("s")));
        args.push(format!("--pid-file={}", path("pid")));
        args.push(format!("--init-file={}", path("init.sql")));
        if setup.fast {
            args.push("--innodb-flush-log-at-trx-commit=0".into());
        }
        if let Some(certificates) = &certificates {
            args.push(format!("--ssl-cert={}", certificates.certificate.display()));
            args.push(format!("--ssl-key={}", certificates.key.display()));
        }
        args.extend(setup.args.iter().cloned());
        let launch = Launch { program: server_program, args, user: None };
        let daemon = Daemon::start("mariadb", directory, launch, clock, &|| is_ready(port))?;
        Ok(Self { daemon, port, certificates, databases: AtomicU32::new(0) })
    }

    /// The URL of a new, empty database that the user `lh` may do everything with.
    pub fn database(&self) -> String {
        let number = self.databases.fetch_add(1, Ordering::Relaxed);
        let name = format!("test{number}");
        self.admin(&format!("CREATE DATABASE {name}"));
        self.url("lh", "lh", &name)
    }

    /// The URL of a database for a user.
    pub fn url(&self, user: &str, password: &str, database: &str) -> String {
        format!("mysql://{user}:{password}@127.0.0.1:{}/{database}", self.port)
    }

    /// Runs SQL as the administrator; one line for each row, columns separated by tabs.
    pub fn admin(&self, sql: &str) -> String {
        run(client(self.port, "admin").args(["-N", "-B", "-e", sql])).trim_end().to_owned()
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its one process.
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

    /// Up again on the same port with the same data; killed before if it runs.
    pub fn restart(&self) {
        self.daemon.restart(&|| is_ready(self.port));
    }

    /// From now on its wall clock shows the true time plus this ([`Setup::movable_clock`]).
    pub fn shift_clock(&self, seconds: i64) {
        self.daemon.clock().shift(seconds * 1_000_000_000);
    }
}

fn client(port: u16, user: &str) -> Command {
    let mut client = Command::new(program("mariadb", &[], "mariadb-client"));
    client.args(["--no-defaults", "--protocol=tcp", "-h127.0.0.1", "-u", user]);
    client.arg(format!("-P{port}")).env("MYSQL_PWD", user).current_dir(Path::new("/"));
    client
}

/// When the users of the init file can log in: it answers pings before that.
fn is_ready(port: u16) -> bool {
    succeeds(client(port, "lh").args(["-e", "SELECT 1"]))
}
