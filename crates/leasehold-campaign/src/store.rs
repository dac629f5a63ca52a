//! The stores of the campaign, each set up as its documentation recommends.

use std::any::Any;
use std::path::Path;
use std::time::Duration;

use testbed::{Disk, Server, Setup, Version, ZooKeeperSetup};

use crate::breakable::{self, Breakable};
use crate::faults::Faults;

/// A store on which torture is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names suffice")]
pub enum Store {
    Memory,
    File,
    Sqlite,
    Postgres,
    MariaDb,
    MySql,
    Redis,
    Valkey,
    Sentinel,
    Cluster,
    Redlock,
    ZooKeeper,
    Etcd,
    Memcached,
    Nats,
    S3,
    LockService,
}

/// A store whose servers are not disturbed. They run until this is dropped.
pub(crate) struct Calm {
    pub(crate) url: String,
    _servers: Box<dyn Any + Send>,
}

impl Store {
    /// All stores.
    pub const ALL: [Self; 17] = [
        Self::Memory,
        Self::File,
        Self::Redis,
        Self::Valkey,
        Self::Sqlite,
        Self::Postgres,
        Self::MariaDb,
        Self::MySql,
        Self::Sentinel,
        Self::Cluster,
        Self::Redlock,
        Self::ZooKeeper,
        Self::Etcd,
        Self::Memcached,
        Self::Nats,
        Self::S3,
        Self::LockService,
    ];

    /// Returns the store's name in the table, which is mostly its URL's scheme.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::File => "file",
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
            Self::MariaDb => "mysql (MariaDB)",
            Self::MySql => "mysql (MySQL)",
            Self::Redis => "redis",
            Self::Valkey => "redis (Valkey)",
            Self::Sentinel => "redis+sentinel",
            Self::Cluster => "redis+cluster",
            Self::Redlock => "redlock",
            Self::ZooKeeper => "zookeeper",
            Self::Etcd => "etcd",
            Self::Memcached => "memcached",
            Self::Nats => "nats",
            Self::S3 => "s3 (SeaweedFS)",
            Self::LockService => "http (Redis)",
        }
    }

    /// Returns the kind of server, if several versions of it can be installed.
    fn server(self) -> Option<Server> {
        Some(match self {
            Self::Memory
            | Self::File
            | Self::Sqlite
            | Self::Memcached
            | Self::S3
            | Self::LockService => return None,
            Self::Postgres => Server::Postgres,
            Self::MariaDb => Server::MariaDb,
            Self::MySql => Server::MySql,
            Self::Redis | Self::Sentinel | Self::Cluster | Self::Redlock => Server::Redis,
            Self::Valkey => Server::Valkey,
            Self::ZooKeeper => Server::ZooKeeper,
            Self::Etcd => Server::Etcd,
            Self::Nats => Server::Nats,
        })
    }

    /// Returns the versions that are installed on this machine. That is `Newest` for stores without
    /// a choice of versions.
    pub(crate) fn versions(self) -> Vec<Version> {
        let Some(server) = self.server() else { return vec![Version::Newest] };
        let both = [Version::Oldest, Version::Newest];
        both.into_iter().filter(|version| server.exists(*version)).collect()
    }

    /// Returns the server with its version, for the table. Empty if the store has no server.
    pub(crate) fn server_name(self, version: Version) -> String {
        match self.server() {
            Some(server) => format!("{} {}", server.name(), server.version(version)),
            None if self == Self::Memcached => {
                let greeting = testbed::Memcached::start().say("version").concat();
                greeting.replace("VERSION", "memcached")
            }
            None => String::new(),
        }
    }

    /// Returns the faults that apply to this store's clients and servers.
    pub(crate) fn faults(self) -> &'static [Faults] {
        use Faults::{All, Clocks, Cut, Kill, Outage, Pause, Servers, Stale};
        match self {
            // The clients of these are on one machine, so their clocks cannot differ.
            Self::Memory => &[All, Pause, Kill, Cut, Stale],
            Self::File | Self::Sqlite => &[All, Pause, Kill],
            // The servers in these URLs redirect clients to others, so a relay cannot cut their
            // connections.
            Self::Sentinel | Self::Cluster => &[All, Servers, Pause, Kill, Clocks],
            // memcached loses everything with its power. The others are not set up on a disk.
            Self::Redlock | Self::Memcached | Self::S3 | Self::LockService => {
                &[All, Servers, Pause, Kill, Cut, Stale, Clocks]
            }
            _ => &[All, Servers, Outage, Pause, Kill, Cut, Stale, Clocks],
        }
    }

    /// Returns whether it is fast. Most operations of the campaign run on fast stores.
    pub(crate) fn is_fast(self) -> bool {
        matches!(self, Self::Memory | Self::File | Self::Redis | Self::Valkey)
    }

    /// Returns the number of processes of a run and the number of locks of each kind. Both are
    /// small on slow stores. A short stall there must not cost any leases, and databases limit
    /// their connections.
    pub(crate) fn size(self) -> (u32, u32) {
        match self {
            _ if self.is_fast() => (64, 300),
            Self::Sqlite | Self::S3 => (8, 4),
            Self::Postgres | Self::MariaDb | Self::MySql => (12, 10),
            _ => (24, 20),
        }
    }

    /// Returns the duration of a run, where a piece takes `piece`. Fast stores run longer, because
    /// they carry most operations, but the events must fit into memory. Servers are disturbed only
    /// after the store had time to recover from the last disturbance.
    pub(crate) fn time(self, faults: Faults, piece: Duration) -> Duration {
        let least = match (faults, self) {
            (Faults::Servers, Self::Sentinel | Self::ZooKeeper | Self::Memcached) => 50,
            (Faults::Servers, Self::Cluster | Self::Etcd) => 40,
            (Faults::Servers, Self::Nats | Self::S3) => 80,
            (Faults::Outage, Self::Nats | Self::ZooKeeper | Self::Etcd) => 80,
            (Faults::Servers | Faults::Outage, _) => 15,
            // The servers' timestamps have whole seconds, and two seconds are allowed for clock
            // differences.
            (_, Self::S3) => 45,
            _ => 1,
        };
        let least = Duration::from_secs(least).max(piece);
        match self.is_fast() {
            true => (piece * 4).min(Duration::from_secs(120)).max(least),
            false => least,
        }
    }

    /// Returns torture's `--lease`, if it is not the default.
    pub(crate) fn lease(self, faults: Faults) -> Option<&'static str> {
        let disturbs = matches!(faults, Faults::Servers | Faults::Outage);
        (self == Self::Etcd && disturbs).then_some("2s")
    }

    /// Starts servers in which no faults are injected. Files are created in `directory`. `program`
    /// is the command `leasehold`.
    pub(crate) fn calm(self, version: Version, directory: &Path, program: &Path) -> Calm {
        // These servers are never killed, so they need no durable writes. And a busy machine must
        // not cause a fail-over.
        let setup = setup(version).fast();
        let file = |scheme: &str, name| format!("{scheme}:{}", directory.join(name).display());
        let keep = |url: String, servers: Box<dyn Any + Send>| Calm { url, _servers: servers };
        match self {
            Self::Memory => keep("memory:".into(), Box::new(())),
            Self::File => keep(file("file", "locks"), Box::new(())),
            Self::Sqlite => keep(file("sqlite", "db"), Box::new(())),
            Self::Postgres => {
                let server = testbed::Postgres::with(setup);
                keep(server.database(), Box::new(server))
            }
            Self::MariaDb => {
                let server = testbed::MariaDb::with(setup);
                keep(server.database(), Box::new(server))
            }
            Self::MySql => {
                let server = testbed::MySql::with(setup);
                keep(server.database(), Box::new(server))
            }
            Self::Redis => {
                let server = testbed::Redis::with(setup);
                keep(server.url(), Box::new(server))
            }
            Self::Valkey => {
                let server = testbed::Redis::with(Setup::valkey().fast());
                keep(server.url(), Box::new(server))
            }
            Self::Sentinel => {
                let servers = testbed::Sentinel::unbroken_with(1, setup);
                keep(servers.url(), Box::new(servers))
            }
            Self::Cluster => {
                let servers = testbed::Cluster::unbroken_with(3, 0, setup);
                keep(servers.url(), Box::new(servers))
            }
            Self::Redlock => {
                let servers = testbed::Redlock::with(5, setup);
                let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=500";
                keep(url, Box::new(servers))
            }
            Self::ZooKeeper => {
                let server = testbed::ZooKeeper::with(&ZooKeeperSetup::new().version(version));
                keep(format!("{}?session=1s", server.url()), Box::new(server))
            }
            Self::Etcd => {
                let server = testbed::Etcd::with(setup, 1);
                keep(server.url(), Box::new(server))
            }
            Self::Memcached => {
                let server = testbed::Memcached::start();
                let url = server.url() + "?restart_delay_ms=0&session_ms=1000";
                keep(url, Box::new(server))
            }
            Self::Nats => {
                let server = testbed::Nats::start();
                keep(server.url() + "/?session_ms=1000", Box::new(server))
            }
            Self::S3 => {
                let server = testbed::SeaweedFs::start();
                keep(server.url("torture") + "&session_ms=2000&poll_ms=50", Box::new(server))
            }
            Self::LockService => {
                let redis = testbed::Redis::with(setup);
                let server = testbed::LockService::start(program, &redis.url());
                let url = format!("http://127.0.0.1:{}/", server.port());
                keep(url, Box::new((server, redis)))
            }
        }
    }

    /// Starts servers that can be disturbed. `program` is the command `leasehold`. `None`: the
    /// store has no servers.
    pub(crate) fn breakable(
        self,
        version: Version,
        disk: Option<Disk>,
        program: &Path,
    ) -> Option<Breakable> {
        let setup = setup(version);
        Some(match self {
            Self::Memory | Self::File | Self::Sqlite => return None,
            Self::Postgres => breakable::postgres(setup, disk),
            Self::MariaDb => breakable::mariadb(setup, disk),
            Self::MySql => breakable::mysql(setup, disk),
            Self::Redis => breakable::redis(setup, disk),
            Self::Valkey => breakable::redis(Setup::valkey(), disk),
            Self::Sentinel => breakable::sentinel(setup),
            Self::Cluster => breakable::cluster(setup),
            Self::Redlock => breakable::redlock(setup),
            Self::ZooKeeper => breakable::zookeeper(&ZooKeeperSetup::new().version(version), disk),
            Self::Etcd => breakable::etcd(setup, disk),
            Self::Memcached => breakable::memcached(Setup::new()),
            Self::Nats => breakable::nats(disk),
            Self::S3 => breakable::objects(),
            Self::LockService => breakable::lock_service(program),
        })
    }

    /// Returns the clients' faults while servers are disturbed. SQL stores get no pauses, because a
    /// pause that begins while a row is locked takes a long time to recover from.
    pub(crate) fn beside_servers(self) -> &'static str {
        match self {
            Self::Postgres | Self::MariaDb | Self::MySql => "kill",
            _ => "pause,kill",
        }
    }
}

fn setup(version: Version) -> Setup {
    match version {
        Version::Oldest => Setup::oldest(),
        Version::Newest => Setup::newest(),
    }
}
