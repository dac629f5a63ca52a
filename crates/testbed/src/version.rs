//! The version of the server that a test uses.
//!
//! The oldest version is the machine's own (from `apt-get install` on Debian 12). The newest
//! versions are those that `newer-servers.sh` extracts from later versions of Debian. A run uses
//! the newest ones if they are available, unless `LEASEHOLD_SERVERS=oldest` is set. A test that
//! needs a certain version selects it in its [`Setup`](crate::Setup).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::command::{find, program, run};
use crate::python;

/// One end of the range of tested versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// The version that is installed on this machine.
    Oldest,
    /// The version that `newer-servers.sh` made available.
    Newest,
}

impl Version {
    /// Returns the version in `LEASEHOLD_SERVERS` (`oldest` or `newest`). By default it is the
    /// newest that is available.
    pub fn of_this_run() -> Self {
        static OF_THIS_RUN: OnceLock<Version> = OnceLock::new();
        *OF_THIS_RUN.get_or_init(|| match std::env::var("LEASEHOLD_SERVERS").as_deref() {
            Ok("oldest") => Self::Oldest,
            Ok("newest") => Self::Newest,
            Ok(other) => panic!("LEASEHOLD_SERVERS={other}: oldest or newest"),
            Err(_) if newer_servers().join("trixie").is_dir() => Self::Newest,
            Err(_) => {
                // A CI run that leaves out half of its servers must not pass.
                assert!(std::env::var_os("CI").is_none(), "no newer servers: run ./test.sh");
                Self::Oldest
            }
        })
    }
}

/// A server that tests run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// PostgreSQL.
    Postgres,
    /// MariaDB.
    MariaDb,
    /// MySQL. Only its newest version is available.
    MySql,
    /// Redis.
    Redis,
    /// Valkey. Only its newest version is available.
    Valkey,
    /// ZooKeeper.
    ZooKeeper,
    /// etcd.
    Etcd,
    /// NATS. Only its newest version is available.
    Nats,
}

impl Server {
    /// All servers.
    pub const ALL: [Self; 8] = [
        Self::Postgres,
        Self::MariaDb,
        Self::MySql,
        Self::Redis,
        Self::Valkey,
        Self::ZooKeeper,
        Self::Etcd,
        Self::Nats,
    ];

    /// Returns the server's usual name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Postgres => "PostgreSQL",
            Self::MariaDb => "MariaDB",
            Self::MySql => "MySQL",
            Self::Redis => "Redis",
            Self::Valkey => "Valkey",
            Self::ZooKeeper => "ZooKeeper",
            Self::Etcd => "etcd",
            Self::Nats => "NATS",
        }
    }

    /// Returns whether this version is available on this machine.
    pub fn exists(self, version: Version) -> bool {
        match (self, version) {
            (Self::MySql | Self::Valkey | Self::Nats, Version::Oldest) => false,
            (_, Version::Oldest) => true,
            (Self::Nats, Version::Newest) => python::environment().join("nats-server").is_file(),
            (_, Version::Newest) => self.root(version).is_dir(),
        }
    }

    /// Returns the missing Debian packages without which this machine's server cannot be started.
    pub fn missing(self) -> Vec<&'static str> {
        let needed: &[(&str, &str)] = match self {
            Self::Postgres => &[("initdb", "postgresql"), ("psql", "postgresql-client")],
            Self::MariaDb => &[("mariadbd", "mariadb-server"), ("mariadb", "mariadb-client")],
            Self::MySql => &[("mysqld", "mysql-server"), ("mariadb", "mariadb-client")],
            Self::Redis => &[("redis-server", "redis-server")],
            Self::Valkey => &[("valkey-server", "valkey-server")],
            Self::ZooKeeper => &[("java", "default-jre-headless")],
            Self::Etcd => &[("etcd", "etcd-server")],
            Self::Nats => &[("nats-server", "nats-server")],
        };
        let folders = self.folders(Path::new("/"));
        let lacks = needed.iter().filter(|(name, _)| find(name, &folders).is_none());
        let mut packages: Vec<_> = lacks.map(|(_, package)| *package).collect();
        if self == Self::ZooKeeper && !Path::new("/usr/share/java/zookeeper.jar").exists() {
            packages.push("zookeeper");
        }
        packages
    }

    /// Returns whether this server is available in this run. If not, prints a message. In CI, this
    /// panics if the newer servers are missing, unless the run selects the oldest ones.
    pub fn in_this_run(self) -> bool {
        if self.exists(Version::of_this_run()) {
            return true;
        }
        eprintln!("left out: there is no {} among the oldest servers", self.name());
        false
    }

    /// Returns the server's version, such as `15.18`.
    pub fn version(self, version: Version) -> String {
        if self == Self::ZooKeeper {
            return self.version_of_jar(version);
        }
        let name = match self {
            Self::Postgres => "postgres",
            Self::MariaDb => "mariadbd",
            Self::MySql => "mysqld",
            Self::Redis => "redis-server",
            Self::Valkey => "valkey-server",
            Self::Nats => "nats-server",
            Self::Etcd | Self::ZooKeeper => "etcd",
        };
        let output = run(Command::new(self.program(version, name)).arg("--version"));
        // The version is the first word in the form of a version.
        let words = output.split(|c: char| c.is_whitespace() || c == '=' || c == '-');
        let mut versions = words.map(|word| word.trim_start_matches('v')).filter(|word| {
            word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok())
        });
        versions.next().unwrap_or_else(|| panic!("no version in {output:?}")).to_owned()
    }

    /// Returns the version of a Java library, which is in its file name or in the name of a link to
    /// it.
    fn version_of_jar(self, version: Version) -> String {
        let jar = self.jar(version, "zookeeper");
        let folder = jar.parent().map(std::fs::read_dir).expect("it is in a folder");
        let names = folder.into_iter().flatten().filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            Some(name.strip_prefix("zookeeper-")?.strip_suffix(".jar")?.to_owned())
        });
        let mut versions = names.filter(|name| name.starts_with(|c: char| c.is_ascii_digit()));
        versions.next().unwrap_or_else(|| panic!("no version beside {}", jar.display()))
    }

    /// Returns the path of one of the server's programs.
    pub(crate) fn program(self, version: Version, name: &str) -> PathBuf {
        match version {
            Version::Oldest => program(name, &self.folders(Path::new("/")), self.package()),
            Version::Newest if self == Self::Nats => {
                let path = python::environment().join(name);
                assert!(path.is_file(), "no {}: run ./test.sh --install nats", path.display());
                path
            }
            Version::Newest => {
                let root = self.root(version);
                let folders = self.folders(&root).into_iter();
                let usual = ["usr/bin", "usr/sbin"].map(|folder| root.join(folder));
                let mut all = folders.chain(usual).map(|folder| folder.join(name));
                all.find(|path| path.is_file()).unwrap_or_else(|| {
                    panic!("no newer {}: run ./test.sh, or LEASEHOLD_SERVERS=oldest", self.name())
                })
            }
        }
    }

    /// Returns the path of one of the server's Java libraries.
    pub(crate) fn jar(self, version: Version, name: &str) -> PathBuf {
        let jar = self.root(version).join(format!("usr/share/java/{name}.jar"));
        assert!(jar.exists(), "no {}: run ./test.sh", jar.display());
        jar
    }

    /// Returns the root directory of the server's files.
    pub(crate) fn root(self, version: Version) -> PathBuf {
        match (version, self) {
            (Version::Oldest, _) => PathBuf::from("/"),
            (Version::Newest, Self::MariaDb | Self::ZooKeeper) => newer_servers().join("trixie"),
            (Version::Newest, _) => newer_servers().join("sid"),
        }
    }

    /// Returns the folders of the server's programs. Debian has a separate folder for each version
    /// of PostgreSQL.
    fn folders(self, root: &Path) -> Vec<PathBuf> {
        if self != Self::Postgres {
            return Vec::new();
        }
        let all = root.join("usr/lib/postgresql");
        let installed = std::fs::read_dir(&all).into_iter().flatten();
        let versions = installed.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let newest = versions.max().map(|version: u32| all.join(version.to_string()).join("bin"));
        newest.into_iter().collect()
    }

    fn package(self) -> &'static str {
        match self {
            Self::Postgres => "postgresql",
            Self::MariaDb => "mariadb-server",
            Self::MySql => "mysql-server",
            Self::Redis => "redis-server",
            Self::Valkey => "valkey-server",
            Self::ZooKeeper => "zookeeper",
            Self::Etcd => "etcd-server",
            Self::Nats => "nats-server",
        }
    }
}

/// Returns the folder that `newer-servers.sh` creates. It need not exist.
fn newer_servers() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/newer-servers.sh");
        PathBuf::from(run(Command::new("sh").args([script, "where"])).trim_end())
    })
}
