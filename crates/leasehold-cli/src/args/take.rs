//! Which store, and how a lock is taken: what many commands share.

use std::ffi::{OsStr, OsString};
use std::sync::LazyLock;
use std::time::Duration;

use leasehold::kit::parse_duration as duration;

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StoreArgs {
    /// Where the locks are kept: file:, file:/some/directory, sqlite:/some/file,
    /// postgres://user@host/db, mysql://user@host/db, redis://host,
    /// redis+sentinel://host,host,host/master, redis+cluster://host,host,
    /// redlock://host,host,host,
    /// zookeeper://host,host/path, etcd://host,host,host, …
    ///
    /// The default is what LEASEHOLD_STORE says, or else file:, a directory of yours on this
    /// machine, the same for your shell and for cron. `leasehold show NAME` and -v say which.
    #[arg(long, value_name = "URL", default_value = default_store(), hide_default_value = true)]
    store: String,
    /// What stands before all names, such as acme/: several applications in one store, of which none
    /// can name another's locks
    ///
    /// The default is what LEASEHOLD_NAMESPACE says, or else nothing.
    #[arg(long, value_name = "PREFIX", default_value = default_namespace(), hide_default_value = true)]
    namespace: String,
}

/// Not by clap, which would take the variable for something said on the command line, and show it
/// in usage lines as if it had to be there.
fn default_store() -> &'static OsStr {
    static STORE: LazyLock<OsString> =
        LazyLock::new(|| std::env::var_os("LEASEHOLD_STORE").unwrap_or_default());
    &STORE
}

fn default_namespace() -> &'static OsStr {
    static NAMESPACE: LazyLock<OsString> =
        LazyLock::new(|| std::env::var_os("LEASEHOLD_NAMESPACE").unwrap_or_default());
    &NAMESPACE
}

impl StoreArgs {
    /// The store's URL; an empty LEASEHOLD_STORE is as good as none.
    pub(crate) fn url(&self) -> &str {
        if self.store.is_empty() { "file:" } else { &self.store }
    }

    /// Connects to it.
    pub(crate) async fn connect(&self) -> leasehold::Result<leasehold::Leasehold> {
        leasehold::builder().namespace(&self.namespace).connect(self.url()).await
    }

    /// What a program finds in its environment that is to mean the same.
    pub(crate) fn environment(&self) -> [(&'static str, String); 2] {
        // As we were told it.
        [
            ("LEASEHOLD_STORE", self.url().to_owned()),
            ("LEASEHOLD_NAMESPACE", self.namespace.clone()),
        ]
    }
}

/// How to take a lock: what `run` and `acquire` share.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TakeArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Do not wait: exit with 75 if somebody else holds the lock
    #[arg(long = "try", conflicts_with = "wait")]
    pub(crate) try_only: bool,
    /// Wait no longer than this (10s, 5m, 1h30m; a bare number is seconds), then exit with 75
    #[arg(long, value_name = "DUR", value_parser = duration)]
    pub(crate) wait: Option<Duration>,
    /// Take the lock as one of many readers (a read-write lock)
    #[arg(long, conflicts_with_all = ["exclusive", "permits", "of"])]
    pub(crate) shared: bool,
    /// Take the lock as its only writer, against --shared
    #[arg(long, conflicts_with_all = ["permits", "of"])]
    pub(crate) exclusive: bool,
    /// Take this many permits of a semaphore
    #[arg(long, value_name = "K", requires = "of", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) permits: Option<u32>,
    /// The lock is a semaphore of N permits: up to N may hold at once
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) of: Option<u32>,
    /// How long a crashed holder's lock stays taken, where the store works with leases (not file:)
    #[arg(long, value_name = "DUR", value_parser = duration, default_value = "15s")]
    pub(crate) lease: Duration,
    /// Hold no longer than this (`run` ends its command in time, `acquire` and `hold` just release)
    #[arg(long, value_name = "DUR", value_parser = duration)]
    pub(crate) max_hold: Option<Duration>,
    /// Keep the lock taken this long from when it was taken, even if it is released earlier
    #[arg(long, value_name = "DUR", value_parser = duration)]
    pub(crate) at_least: Option<Duration>,
    /// Keep the lock closed this long after a crash, where the store can
    #[arg(long, value_name = "DUR", value_parser = duration)]
    pub(crate) lock_delay: Option<Duration>,
    /// What `show` and those who wait read about this holder
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// How long a store that is away is asked again, before the lock is had: at the start and while
    /// waiting [default: 15s, or --lease if that is longer; with --try: not at all]
    #[arg(long, value_name = "DUR", value_parser = duration)]
    pub(crate) retry_store: Option<Duration>,
    /// Exit with this code when the lock was not acquired [default: 75]
    #[arg(short = 'E', long, value_name = "CODE")]
    pub(crate) conflict_exit_code: Option<u8>,
    /// Say nothing when the lock was not acquired
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

impl TakeArgs {
    /// A mutex in this store, as it is taken where nothing else is said.
    pub(crate) fn of(store: StoreArgs) -> Self {
        Self {
            store,
            try_only: false,
            wait: None,
            shared: false,
            exclusive: false,
            permits: None,
            of: None,
            lease: leasehold::DEFAULT_LEASE,
            max_hold: None,
            at_least: None,
            lock_delay: None,
            label: None,
            retry_store: None,
            conflict_exit_code: None,
            quiet: false,
        }
    }

    /// Whether nothing is waited for.
    pub(crate) fn tries_only(&self) -> bool {
        self.try_only || self.wait == Some(Duration::ZERO)
    }

    /// What to exit with when the lock was not acquired.
    pub(crate) fn conflict_code(&self) -> u8 {
        self.conflict_exit_code.unwrap_or(crate::exit::NOT_ACQUIRED)
    }
}
