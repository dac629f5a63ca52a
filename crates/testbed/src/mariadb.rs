//! MariaDB and MySQL.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cert::Certificates;
use crate::clock::MovableClock;
use crate::command::{program, run, succeeds};
use crate::daemon::{Daemon, Launch, Setup};
use crate::daemon::{start_somewhere, we_are_root};
use crate::reaper;
use crate::version::{Server, Version};

/// A MariaDB server. The user `admin` may do everything; `lh` (password `lh`) may use the
/// databases that tests get, and nothing else.
#[derive(Debug)]
pub struct MariaDb {
    daemon: Daemon,
    port: u16,
    certificates: Option<Certificates>,
    databases: AtomicU32,
}

/// MySQL itself, which is everything that [`MariaDb`] is here. There is only a newest.
#[derive(Debug)]
pub struct MySql(MariaDb);

impl MySql {
    /// A server of the test's own.
    pub fn start() -> Self {
        Self::with(Setup::new())
    }

    /// The same, with more wishes.
    pub fn with(setup: Setup) -> Self {
        Self(start_somewhere(|port| MariaDb::try_start(Server::MySql, &setup, port)))
    }
}

impl std::ops::Deref for MySql {
    type Target = MariaDb;

    fn deref(&self) -> &MariaDb {
        &self.0
    }
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
        start_somewhere(|port| Self::try_start(Server::MariaDb, &setup, port))
    }

    fn try_start(server: Server, setup: &Setup, port: u16) -> Result<Self, String> {
        let version = match server {
            Server::MySql => Version::Newest,
            _ => setup.version(),
        };
        let directory = reaper::directory("mariadb");
        let certificates = setup.tls.then(|| Certificates::make(&directory));
        let clock = setup.movable_clock.then(|| MovableClock::new(&directory));
        // Each its own: a server that starts deletes the temporary tables that it finds.
        std::fs::create_dir(directory.join("tmp")).expect("a directory in our directory");
        std::fs::write(directory.join("init.sql"), INIT).expect("a file in our directory");
        let program = match server {
            Server::MySql => make_mysql_data(version, &directory),
            _ => make_mariadb_data(version, &directory),
        };
        let path = |name: &str| directory.join(name).display().to_string();
        let mut args = places(server, version);
        // Unasked, it refuses to serve as root.
        args.extend(we_are_root().then(|| "--user=root".into()));
        args.extend(
            ["--bind-address=127.0.0.1", "--skip-name-resolve", "--skip-log-bin"].map(Into::into),
        );
        args.extend(["--max-connections=300", "--innodb-buffer-pool-size=32M"].map(Into::into));
        args.push(format!("--port={port}"));
        args.push(format!("--datadir={}", path("data")));
        args.push(format!("--tmpdir={}", path("tmp")));
        args.push(format!("--socket={}", path("s")));
        args.push(format!("--pid-file={}", path("pid")));
        args.push(format!("--init-file={}", path("init.sql")));
        match server {
            Server::MySql => {
                args.extend(["--mysqlx=OFF", "--secure-file-priv=NULL"].map(Into::into))
            }
            _ => args.push("--innodb-log-file-size=8M".into()),
        }
        if setup.fast {
            args.push("--innodb-flush-log-at-trx-commit=0".into());
        }
        if let Some(certificates) = &certificates {
            args.push(format!("--ssl-cert={}", certificates.certificate.display()));
            args.push(format!("--ssl-key={}", certificates.key.display()));
        }
        args.extend(setup.args.iter().cloned());
        let launch = Launch { program, args, user: None };
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

    /// The same, where the server may refuse.
    pub fn admin_may_fail(&self, sql: &str) -> bool {
        succeeds(client(self.port, "admin").args(["-e", sql]))
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

/// The options that tell a server where its own files are.
fn places(server: Server, version: Version) -> Vec<String> {
    let mut options = vec!["--no-defaults".to_owned()];
    if version == Version::Oldest {
        return options;
    }
    let base = server.root(version).join("usr");
    options.push(format!("--basedir={}", base.display()));
    if server == Server::MySql {
        let share = base.join("share/mysql");
        options.push(format!("--lc-messages-dir={}", share.display()));
        options.push(format!("--character-sets-dir={}", share.join("charsets").display()));
    }
    options
}

/// Makes the files of a new MariaDB; returns the server's program.
fn make_mariadb_data(version: Version, directory: &Path) -> PathBuf {
    let server = Server::MariaDb;
    let mut install = Command::new(server.program(version, "mariadb-install-db"));
    install.args(places(server, version)).arg("--auth-root-authentication-method=normal");
    install.args(["--skip-test-db", "--skip-name-resolve", "--innodb-log-file-size=8M"]);
    install.arg(format!("--datadir={}", directory.join("data").display()));
    install.env("TMPDIR", directory.join("tmp"));
    install.args(we_are_root().then_some("--user=root"));
    run(&mut install);
    server.program(version, "mariadbd")
}

/// The same of a new MySQL.
fn make_mysql_data(version: Version, directory: &Path) -> PathBuf {
    let program = Server::MySql.program(version, "mysqld");
    let mut install = Command::new(&program);
    install.args(places(Server::MySql, version)).arg("--initialize-insecure");
    install.arg(format!("--datadir={}", directory.join("data").display()));
    install.arg(format!("--tmpdir={}", directory.join("tmp").display()));
    install.args(we_are_root().then_some("--user=root"));
    run(&mut install);
    program
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
