//! MariaDB and MySQL.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cert::Certificates;
use crate::clock::MovableClock;
use crate::command::{program, run, succeeds};
use crate::daemon::{Daemon, Launch, Setup};
use crate::daemon::{accepts, start_somewhere, we_are_root};
use crate::reaper;
use crate::template;
use crate::version::{Server, Version};

/// A MariaDB server. The user `admin` has all permissions. `lh` (password `lh`) may use the tests'
/// databases, and nothing else.
#[derive(Debug)]
pub struct MariaDb {
    daemon: Daemon,
    port: u16,
    certificates: Option<Certificates>,
    databases: AtomicU32,
}

/// A MySQL server with the methods of [`MariaDb`]. Only its newest version is available.
#[derive(Debug)]
pub struct MySql(MariaDb);

impl MySql {
    /// Starts a private server.
    pub fn start() -> Self {
        Self::with(Setup::new())
    }

    /// Starts a private server with this setup.
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

/// Statements that are executed at each start, one per line.
const INIT: &str = "\
CREATE USER IF NOT EXISTS 'admin'@'127.0.0.1' IDENTIFIED BY 'admin';
GRANT ALL ON *.* TO 'admin'@'127.0.0.1' WITH GRANT OPTION;
CREATE USER IF NOT EXISTS 'lh'@'127.0.0.1' IDENTIFIED BY 'lh';
GRANT ALL ON `test%`.* TO 'lh'@'127.0.0.1';
";

/// Options that make MySQL as small as MariaDB is by default. They limit the redo log, and disable
/// the statistics of threads, which would take half of the start-up time.
const MYSQL: [&str; 2] = ["--innodb-redo-log-capacity=8M", "--performance-schema=OFF"];

impl MariaDb {
    /// Starts a private server.
    pub fn start() -> Self {
        Self::with(Setup::new())
    }

    /// Starts a private server with this setup.
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
        // Each server has its own directory for temporary files, because a starting server deletes
        // the temporary tables that it finds.
        std::fs::create_dir(directory.join("tmp")).expect("a directory in our directory");
        std::fs::write(directory.join("init.sql"), INIT).expect("a file in our directory");
        let program =
            server.program(version, if server == Server::MySql { "mysqld" } else { "mariadbd" });
        template::copy(server, version, &directory.join("data"), |place| {
            std::fs::create_dir(place.join("tmp")).expect("a directory in our directory");
            match server {
                Server::MySql => make_mysql_data(version, place),
                _ => make_mariadb_data(version, place),
            }
        });
        let path = |name: &str| directory.join(name).display().to_string();
        let mut args = places(server, version);
        // Without this option the server refuses to run as root.
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
                args.extend(["--mysqlx=OFF", "--secure-file-priv=NULL"].map(Into::into));
                args.extend(MYSQL.map(Into::into));
            }
            _ => args.push("--innodb-log-file-size=8M".into()),
        }
        if setup.fast {
            args.push("--innodb-flush-log-at-trx-commit=0".into());
        }
        let passing = || {
            // Older versions do not enable TLS on their own, and MySQL's files already contain a
            // certificate.
            (server == Server::MariaDb && version == Version::Newest).then(passing_certificate)
        };
        if let Some(shown) = certificates.as_ref().or_else(passing) {
            args.push(format!("--ssl-cert={}", shown.certificate.display()));
            args.push(format!("--ssl-key={}", shown.key.display()));
        }
        args.extend(setup.args.iter().cloned());
        let launch = Launch { program, args, user: None };
        let daemon = Daemon::start("mariadb", directory, launch, clock, &|| is_ready(port))?;
        Ok(Self { daemon, port, certificates, databases: AtomicU32::new(0) })
    }

    /// Creates a new, empty database for the user `lh` and returns its URL.
    pub fn database(&self) -> String {
        let number = self.databases.fetch_add(1, Ordering::Relaxed);
        let name = format!("test{number}");
        self.admin(&format!("CREATE DATABASE {name}"));
        self.url("lh", "lh", &name)
    }

    /// Returns the URL of a database for a user.
    pub fn url(&self, user: &str, password: &str, database: &str) -> String {
        format!("mysql://{user}:{password}@127.0.0.1:{}/{database}", self.port)
    }

    /// Runs SQL as the administrator. Returns one line for each row, with columns separated by
    /// tabs.
    pub fn admin(&self, sql: &str) -> String {
        run(client(self.port, "admin").args(["-N", "-B", "-e", sql])).trim_end().to_owned()
    }

    /// Runs SQL as the administrator and returns whether it succeeded.
    pub fn admin_may_fail(&self, sql: &str) -> bool {
        succeeds(client(self.port, "admin").args(["-e", sql]))
    }

    /// Returns the port on which the server listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the ID of the server's only process.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// Returns the server's log.
    pub fn log(&self) -> String {
        self.daemon.log()
    }

    /// Returns the server's certificates. Panics if it was started without [`Setup::tls`].
    pub fn certificates(&self) -> &Certificates {
        self.certificates.as_ref().expect("ask for Setup::tls first")
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

    /// Restarts the server on the same port with its data. Kills it first if it is running.
    pub fn restart(&self) {
        self.daemon.restart(&|| is_ready(self.port));
    }

    /// Sets the server's wall clock to the true time plus `seconds` ([`Setup::movable_clock`]).
    pub fn shift_clock(&self, seconds: i64) {
        self.daemon.clock().shift(seconds * 1_000_000_000);
    }
}

/// Returns the options with the paths of a server's own files.
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

/// Returns a shared certificate for servers without particular TLS requirements. These servers
/// offer TLS by default. They would generate an RSA certificate at each start, which takes a long
/// time.
fn passing_certificate() -> &'static Certificates {
    static MADE: OnceLock<Certificates> = OnceLock::new();
    MADE.get_or_init(|| Certificates::make(&reaper::directory("mariadb-tls")))
}

/// Creates the files of a new MariaDB and returns their directory.
fn make_mariadb_data(version: Version, directory: &Path) -> PathBuf {
    let server = Server::MariaDb;
    let data = directory.join("data");
    let mut install = Command::new(server.program(version, "mariadb-install-db"));
    install.args(places(server, version)).arg("--auth-root-authentication-method=normal");
    install.args(["--skip-test-db", "--skip-name-resolve", "--innodb-log-file-size=8M"]);
    install.arg(format!("--datadir={}", data.display()));
    install.env("TMPDIR", directory.join("tmp"));
    install.args(we_are_root().then_some("--user=root"));
    run(&mut install);
    data
}

/// Creates the files of a new MySQL and returns their directory.
fn make_mysql_data(version: Version, directory: &Path) -> PathBuf {
    let data = directory.join("data");
    let mut install = Command::new(Server::MySql.program(version, "mysqld"));
    install.args(places(Server::MySql, version)).arg("--initialize-insecure");
    install.args(MYSQL);
    install.arg(format!("--datadir={}", data.display()));
    install.arg(format!("--tmpdir={}", directory.join("tmp").display()));
    install.args(we_are_root().then_some("--user=root"));
    run(&mut install);
    // A server generates its identity when it starts.
    std::fs::remove_file(data.join("auto.cnf")).expect("it has been made");
    data
}

fn client(port: u16, user: &str) -> Command {
    let mut client = Command::new(program("mariadb", &[], "mariadb-client"));
    client.args(["--no-defaults", "--protocol=tcp", "-h127.0.0.1", "-u", user]);
    client.arg(format!("-P{port}")).env("MYSQL_PWD", user).current_dir(Path::new("/"));
    client
}

/// Returns whether the users of the init file can log in. The server answers pings earlier.
fn is_ready(port: u16) -> bool {
    accepts(port) && succeeds(client(port, "lh").args(["-e", "SELECT 1"]))
}
