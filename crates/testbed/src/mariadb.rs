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

/// What keeps MySQL as small as MariaDB is by itself: its log of changes, and no books kept on what
/// each of its threads does, which half of its start would be spent on.
const MYSQL: [&str; 2] = ["--innodb-redo-log-capacity=8M", "--performance-schema=OFF"];

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
                args.extend(["--mysqlx=OFF", "--secure-file-priv=NULL"].map(Into::into));
                args.extend(MYSQL.map(Into::into));
            }
            _ => args.push("--innodb-log-file-size=8M".into()),
        }
        if setup.fast {
            args.push("--innodb-flush-log-at-trx-commit=0".into());
        }
        let passing = || {
            // Older ones offer no TLS by themselves, and MySQL's files came with a certificate.
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

/// For servers of which nobody wants TLS in particular. They offer it, as they do where nobody says
/// anything; the certificate that they would make at each start is of RSA, which takes long.
fn passing_certificate() -> &'static Certificates {
    static MADE: OnceLock<Certificates> = OnceLock::new();
    MADE.get_or_init(|| Certificates::make(&reaper::directory("mariadb-tls")))
}

/// Makes the files of a new MariaDB, and says where.
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

/// The same of a new MySQL.
fn make_mysql_data(version: Version, directory: &Path) -> PathBuf {
    let data = directory.join("data");
    let mut install = Command::new(Server::MySql.program(version, "mysqld"));
    install.args(places(Server::MySql, version)).arg("--initialize-insecure");
    install.args(MYSQL);
    install.arg(format!("--datadir={}", data.display()));
    install.arg(format!("--tmpdir={}", directory.join("tmp").display()));
    install.args(we_are_root().then_some("--user=root"));
    run(&mut install);
    // Its identity is what a server gives itself as it starts.
    std::fs::remove_file(data.join("auto.cnf")).expect("it has been made");
    data
}

fn client(port: u16, user: &str) -> Command {
    let mut client = Command::new(program("mariadb", &[], "mariadb-client"));
    client.args(["--no-defaults", "--protocol=tcp", "-h127.0.0.1", "-u", user]);
    client.arg(format!("-P{port}")).env("MYSQL_PWD", user).current_dir(Path::new("/"));
    client
}

/// When the users of the init file can log in: it answers pings before that.
fn is_ready(port: u16) -> bool {
    accepts(port) && succeeds(client(port, "lh").args(["-e", "SELECT 1"]))
}
