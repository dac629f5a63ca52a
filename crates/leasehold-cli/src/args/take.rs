//! Options for the store and for acquiring a lock, which many commands share.

use std::borrow::Cow;
use std::time::Duration;

use leasehold::store::kit::{
    default_namespace, default_store, parse_duration as duration, redacted, store_url,
};

use super::heading;
use crate::missing;
use crate::table::quoted;

/// The store. Every command accepts these options, before and after the subcommand.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StoreArgs {
    /// Store that keeps the locks [default: $LEASEHOLD_STORE or file:]
    ///
    /// Other users can see a command line. Put a URL with a password into
    /// LEASEHOLD_STORE, or into a file that LEASEHOLD_STORE_FILE names, or add
    /// ?password_file=PATH to the URL.
    ///
    /// file:                          this machine, this user
    /// file:/some/directory           this machine, all users of the directory
    /// sqlite:/some/file.db           this machine, in an SQLite database
    /// postgres://user@host/db        PostgreSQL
    /// mysql://user@host/db           MySQL or MariaDB
    /// redis://host                   Redis or Valkey (also rediss:, redis+unix:)
    /// redis+sentinel://h,h,h/master  Redis with Sentinel
    /// redis+cluster://host,host      Redis Cluster
    /// redlock://host,host,host       majority of independent Redis servers
    /// etcd://host,host,host          etcd (also etcds:)
    /// zookeeper://host,host/path     ZooKeeper (also zookeepers:)
    /// nats://host,host/bucket        NATS JetStream (also natss:)
    /// memcached://host               memcached (also memcacheds:)
    /// s3://bucket/prefix             Amazon S3 and compatible stores
    /// gs://bucket/prefix             Google Cloud Storage
    /// az://container/prefix          Azure Blob Storage
    /// http://host,host               leasehold serve (also https:, http+unix:)
    #[arg(
        long,
        value_name = "URL",
        default_value = default_store(),
        value_parser = store_url,
        hide_default_value = true,
        global = true,
        help_heading = heading::STORE,
        verbatim_doc_comment,
    )]
    store: String,
    /// Prefix of all lock names [default: $LEASEHOLD_NAMESPACE]
    ///
    /// Applications that share a store and use different prefixes, such as acme/, cannot touch
    /// each other's locks by accident.
    #[arg(
        long,
        value_name = "PREFIX",
        default_value = default_namespace(),
        hide_default_value = true,
        hide_short_help = true,
        global = true,
        help_heading = heading::STORE,
    )]
    namespace: String,
}

/// Returns the URL with `create=no`, if its store is one that a client may create when it connects.
fn without_creating(url: &str) -> Cow<'_, str> {
    const CREATED: [&str; 9] = [
        "sqlite",
        "postgres",
        "postgresql",
        "mysql",
        "mariadb",
        "nats",
        "natss",
        "zookeeper",
        "zookeepers",
    ];
    if !url.split_once(':').is_some_and(|(scheme, _)| CREATED.contains(&scheme)) {
        return url.into();
    }
    let (base, query) = url.split_once('?').unwrap_or((url, ""));
    let kept = query.split('&').filter(|pair| !pair.is_empty() && !pair.starts_with("create="));
    let query = kept.chain(["create=no"]).collect::<Vec<_>>().join("&");
    format!("{base}?{query}").into()
}

impl StoreArgs {
    /// Returns the store's URL.
    pub(crate) fn url(&self) -> &str {
        &self.store
    }

    /// Connects to the store, and creates it if it is missing.
    pub(crate) async fn connect(&self) -> leasehold::Result<leasehold::Client> {
        self.connect_at(self.url()).await
    }

    /// Connects to the store, and fails if it is a database without leasehold's tables, or a bucket
    /// of NATS or a node of ZooKeeper that does not exist. Other stores are created by the first
    /// lock.
    pub(crate) async fn connect_to_existing(&self) -> leasehold::Result<leasehold::Client> {
        self.connect_at(&without_creating(self.url())).await
    }

    async fn connect_at(&self, url: &str) -> leasehold::Result<leasehold::Client> {
        let registry = leasehold::registry().feature_hint(missing::store_hint);
        leasehold::Builder::new(registry).namespace(&self.namespace).connect(url).await
    }

    /// Returns another command of `leasehold` on this store, for hints. The hint names the store,
    /// because the environment may select another one, which may have a lock of the same name. The
    /// URL has no password.
    pub(crate) fn command(&self, subcommand: &str, name: Option<&str>) -> String {
        let mut words = vec!["leasehold".to_owned(), subcommand.to_owned()];
        let of_environment = default_store().to_str().and_then(|text| store_url(text).ok());
        if of_environment.as_ref() != Some(&self.store) {
            words.extend(["--store".to_owned(), quoted(&redacted(&self.store))]);
        }
        if default_namespace() != self.namespace.as_str() {
            words.extend(["--namespace".to_owned(), quoted(&self.namespace)]);
        }
        words.extend(name.map(quoted));
        words.join(" ")
    }

    /// Returns the environment in which another `leasehold` uses the same store and namespace.
    pub(crate) fn environment(&self) -> [(&'static str, String); 2] {
        [
            ("LEASEHOLD_STORE", self.url().to_owned()),
            ("LEASEHOLD_NAMESPACE", self.namespace.clone()),
        ]
    }
}

/// How to acquire a lock: the options that `run`, `acquire` and `hold` share.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TakeArgs {
    /// Share a read-write lock with other readers
    #[arg(
        short,
        long,
        conflicts_with_all = ["exclusive", "permits", "max"],
        help_heading = heading::LOCK,
    )]
    pub(crate) shared: bool,
    /// Take a read-write lock alone, as its writer
    #[arg(
        short = 'x',
        long,
        short_alias = 'e',
        conflicts_with_all = ["permits", "max"],
        help_heading = heading::LOCK,
    )]
    pub(crate) exclusive: bool,
    /// Allow up to N holders at once (a semaphore)
    #[arg(
        long,
        alias = "of",
        short_alias = 'j',
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..),
        help_heading = heading::LOCK,
    )]
    pub(crate) max: Option<u32>,
    /// With --max N: take K of the N permits [default: 1]
    #[arg(
        long,
        value_name = "K",
        requires = "max",
        value_parser = clap::value_parser!(u32).range(1..),
        hide_short_help = true,
        help_heading = heading::LOCK,
    )]
    pub(crate) permits: Option<u32>,
    /// Do not wait: exit with 75 if the lock is taken
    #[arg(
        short = 'n',
        long = "try",
        aliases = ["nonblock", "nb"],
        conflicts_with = "wait",
        help_heading = heading::WAITING,
    )]
    pub(crate) try_only: bool,
    /// Wait up to DUR (10s, 5m, 1h30m), then exit with 75
    #[arg(
        short,
        long,
        alias = "timeout",
        value_name = "DUR",
        value_parser = duration,
        help_heading = heading::WAITING,
    )]
    pub(crate) wait: Option<Duration>,
    /// Exit code when the lock was not acquired [default: 75]
    #[arg(
        short = 'E',
        long,
        value_name = "CODE",
        hide_short_help = true,
        help_heading = heading::WAITING,
    )]
    pub(crate) conflict_exit_code: Option<u8>,
    /// Print nothing when the lock was not acquired
    #[arg(short, long, help_heading = heading::WAITING)]
    pub(crate) quiet: bool,
    /// Time until a crashed holder's lock is freed
    ///
    /// Stores without leases (file:) free the lock of a crashed holder immediately and ignore this.
    #[arg(
        long,
        alias = "ttl",
        value_name = "DUR",
        value_parser = duration,
        default_value = "15s",
        help_heading = heading::LEASE,
    )]
    pub(crate) lease: Duration,
    /// Hold the lock for at most DUR
    ///
    /// `run` stops its command in time. `acquire` and `hold` only release the lock.
    #[arg(long, value_name = "DUR", value_parser = duration, help_heading = heading::LEASE)]
    pub(crate) max_hold: Option<Duration>,
    /// Keep the lock taken for at least DUR, even if it is released earlier
    ///
    /// DUR counts from when the lock was acquired.
    #[arg(
        long,
        alias = "at-least",
        value_name = "DUR",
        value_parser = duration,
        hide_short_help = true,
        help_heading = heading::LEASE,
    )]
    pub(crate) min_hold: Option<Duration>,
    /// Keep the lock unavailable for DUR after its holder crashed
    ///
    /// Needs a store that records crashed holders: SQLite, PostgreSQL, MySQL, Redis or etcd.
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration,
        hide_short_help = true,
        help_heading = heading::LEASE,
    )]
    pub(crate) lock_delay: Option<Duration>,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Time to keep retrying while the store is unreachable
    ///
    /// Applies to connecting and to waiting. [default: 15s, or --lease if that is longer; 0s with
    /// --try]
    #[arg(
        long,
        alias = "retry-store",
        value_name = "DUR",
        value_parser = duration,
        hide_short_help = true,
        help_heading = heading::STORE,
    )]
    pub(crate) connect_timeout: Option<Duration>,
    /// Text shown for this holder, by `show` and to waiters
    #[arg(long, value_name = "TEXT", help_heading = heading::OUTPUT)]
    pub(crate) label: Option<String>,
}

impl TakeArgs {
    /// Returns the options for a mutex in this store, with the default for every option.
    pub(crate) fn of(store: StoreArgs) -> Self {
        Self {
            store,
            try_only: false,
            wait: None,
            shared: false,
            exclusive: false,
            permits: None,
            max: None,
            lease: leasehold::DEFAULT_LEASE,
            max_hold: None,
            min_hold: None,
            lock_delay: None,
            label: None,
            connect_timeout: None,
            conflict_exit_code: None,
            quiet: false,
        }
    }

    /// Returns whether the acquisition does not wait.
    pub(crate) fn tries_only(&self) -> bool {
        self.try_only || self.wait == Some(Duration::ZERO)
    }

    /// Returns the exit code for a lock that was not acquired.
    pub(crate) fn conflict_code(&self) -> u8 {
        self.conflict_exit_code.unwrap_or(crate::exit::NOT_ACQUIRED)
    }
}

#[cfg(test)]
mod tests {
    use super::without_creating;

    #[test]
    fn a_store_is_not_created_whatever_its_url_says() {
        for (url, expected) in [
            ("sqlite:/a b/x.db", "sqlite:/a b/x.db?create=no"),
            ("postgres://u:p@h,i/d?", "postgres://u:p@h,i/d?create=no"),
            ("mysql://h/d?prefix=a_&create=yes", "mysql://h/d?prefix=a_&create=no"),
            ("postgres:///d?user=u&password=p@s", "postgres:///d?user=u&password=p@s&create=no"),
            ("zookeeper://h/a?create=yes&naming=kazoo", "zookeeper://h/a?naming=kazoo&create=no"),
            ("natss://h/b", "natss://h/b?create=no"),
            ("file:/a?b", "file:/a?b"),
            ("redis://u:p?q@h", "redis://u:p?q@h"),
            ("etcd", "etcd"),
        ] {
            assert_eq!(without_creating(url), expected);
        }
    }
}
