//! Command-line arguments.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use leasehold::store::Guarantees;
use leasehold::{Error, ErrorKind, Kind, Result};

use super::clocks::Clocks;
use super::history::Fault;
use super::ledger;
use super::reach::applicable;
use super::relay::shortest_lease;
use super::served::is_served;
use leasehold::store::kit::{
    default_namespace, default_store, parse_duration as duration, store_url, with_passwords,
};

/// Break clients and servers and verify the guarantees
///
/// Many processes take the same locks and work under them while they are paused, killed and
/// disconnected. Everything they see is recorded and checked afterwards. The test uses its own lock
/// names and does not touch other locks.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    leasehold stress --store memory: --duration 30s\n  \
    leasehold stress --store file:/var/tmp/locks --processes 12 --fault pause,kill --json\n  \
    leasehold stress --store redis+sentinel://a,b,c/main --html report.html -- ./fail-over\n  \
    leasehold stress --check history.jsonl --html report.html")]
#[command(after_long_help = "Exit status:\n  \
    0    pass: the store kept every promise\n  \
    1    fail: the store broke a promise, named in the report\n  \
    2    bad usage\n  \
    3    inconclusive: no violation, but the run was too short or its faults did no harm\n  \
    69   the store is unreachable\n  \
    130  interrupted\n\n\
    Examples:\n  \
    leasehold stress --store memory: --duration 30s\n  \
    leasehold stress --store file:/var/tmp/locks --processes 12 --fault pause,kill --json\n  \
    leasehold stress --store redis+sentinel://a,b,c/main --html report.html -- ./fail-over\n  \
    leasehold stress --check history.jsonl --html report.html")]
pub struct Args {
    /// Store to test [default: $LEASEHOLD_STORE or file:]
    #[arg(
        long,
        value_name = "URL",
        default_value = default_store(),
        hide_default_value = true,
        value_parser = store
    )]
    store: String,
    /// Prefix of the names of the test's locks [default: $LEASEHOLD_NAMESPACE]
    ///
    /// For a store where this user may lock only names with a prefix. A fenced resource in the
    /// store has no prefix.
    #[arg(
        long,
        value_name = "PREFIX",
        default_value = default_namespace(),
        hide_default_value = true,
        hide_short_help = true
    )]
    namespace: String,
    /// How long to run [default: 10s, or longer if the store recovers slowly]
    #[arg(long = "duration", alias = "seconds", value_name = "DUR", value_parser = time)]
    seconds: Option<u32>,
    /// Number of processes; each runs four operations at a time
    #[arg(long = "processes", alias = "clients", value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(2..=500))]
    clients: u32,
    /// Number of locks of each kind
    ///
    /// Few locks have many waiters each. Many locks allow more operations, because a paused process
    /// blocks fewer others.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=333))]
    locks: u32,
    /// Kinds of locks to use
    #[arg(long, value_name = "KIND", value_enum, value_delimiter = ',', default_value = "all")]
    kind: Vec<KindArg>,
    /// Faults to inject [default: all that the store allows]
    ///
    /// pause sends SIGSTOP and kill sends SIGKILL to a process. cut interrupts its connection to
    /// the store. stale pauses it while a reply of the store is on its way, so that it acts on an
    /// old reply afterwards. cut and stale require a store whose URL names servers and does not use
    /// TLS.
    #[arg(long, value_name = "FAULT", value_enum, value_delimiter = ',')]
    fault: Vec<FaultArg>,
    /// Average time between faults [default: long enough to recover]
    ///
    /// At most half of the processes have a fault at the same time, so faults can be less frequent.
    #[arg(long, value_name = "DUR", value_parser = fault_every)]
    fault_every: Option<Duration>,
    /// Give each process a wall clock that is wrong by up to DUR
    ///
    /// No guarantee depends on the wall clocks of clients of networked stores. TLS and the
    /// signatures of S3 do. This needs libfaketime, and is not for sqlite: and memory:, whose
    /// clients use the clock of one machine.
    #[arg(long, value_name = "DUR", value_parser = skew)]
    clock_skew: Option<Duration>,
    /// Where to keep the fenced resource, which rejects stale tokens
    ///
    /// With process, the resource is in the memory of the test. With store, it is in the store, behind
    /// the store's own fence (SQL, single Redis, etcd, ZooKeeper). The test then creates a table, keys or
    /// nodes named leasehold-torture and deletes them at the end.
    #[arg(long, value_name = "WHERE", value_enum, default_value = "process")]
    fence: FenceArg,
    /// Lease of each hold [default: 500ms, or the shortest the store supports]
    ///
    /// A short lease expires often during faults.
    #[arg(long, value_name = "DUR", value_parser = lease)]
    lease: Option<Duration>,
    /// Repeat the random choices of an earlier run, but not its timing
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Print the report as JSON
    #[arg(long)]
    pub(super) json: bool,
    /// Write the run to FILE as a self-contained HTML page
    #[arg(long, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,
    /// Write everything the checker saw to FILE (JSON Lines)
    #[arg(long, value_name = "FILE")]
    pub(super) history: Option<PathBuf>,
    /// Check the history in FILE instead of running a test
    ///
    /// The history can be from an earlier run or from another lock implementation.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["seconds", "clients", "locks", "kind", "fault", "fault_every",
            "clock_skew", "fence", "lease", "seed", "history", "command"]
    )]
    pub(super) check: Option<PathBuf>,
    /// Program that disturbs the store's servers, run repeatedly
    ///
    /// It can kill and restart a server, promote a replica or pause a server. It must exit when the
    /// store works again. The checker then expects what the store promises for crashes and fail-overs.
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum KindArg {
    Mutex,
    Rwlock,
    Semaphore,
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FaultArg {
    Pause,
    Kill,
    Cut,
    Stale,
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FenceArg {
    Process,
    Store,
}

/// Returns the store's URL with the passwords from the files that it names. The workers need them
/// in the URL, because relays replace its servers.
fn store(text: &str) -> std::result::Result<String, Box<dyn std::error::Error + Send + Sync>> {
    Ok(with_passwords(&store_url(text)?)?.into_owned())
}

fn time(text: &str) -> std::result::Result<u32, String> {
    let time = duration(text)?;
    match (Duration::from_secs(1)..=Duration::from_secs(86_400)).contains(&time) {
        true => Ok(u32::try_from(time.as_millis().div_ceil(1_000)).unwrap_or(u32::MAX)),
        false => Err("must be between 1s and 24h".into()),
    }
}

/// Parses a lease that is short enough to expire often and long enough to be renewed in time.
fn lease(text: &str) -> std::result::Result<Duration, String> {
    let lease = duration(text)?;
    match (Duration::from_millis(100)..=Duration::from_secs(60)).contains(&lease) {
        true => Ok(lease),
        false => Err("must be between 100ms and 60s".into()),
    }
}

/// Parses a time between faults that leaves the parent enough time for its own work.
fn fault_every(text: &str) -> std::result::Result<Duration, String> {
    let every = duration(text)?;
    match (Duration::from_millis(1)..=Duration::from_secs(3600)).contains(&every) {
        true => Ok(every),
        false => Err("must be between 1ms and 1h".into()),
    }
}

/// Parses the greatest error of a wall clock.
fn skew(text: &str) -> std::result::Result<Duration, String> {
    let skew = duration(text)?;
    match (Duration::from_secs(1)..=Duration::from_secs(365 * 86_400)).contains(&skew) {
        true => Ok(skew),
        false => Err("must be between 1s and 365d".into()),
    }
}

/// The validated arguments.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) store: String,
    /// Prefix of the locks' names.
    pub(super) namespace: String,
    /// The requested duration in seconds. See [`Plan::time`].
    seconds: Option<u32>,
    pub(super) clients: u32,
    /// Number of locks of each kind.
    pub(super) locks: u32,
    /// Time between faults, if the user gave one.
    fault_every: Option<Duration>,
    /// How wrong the workers' wall clocks are at most.
    clock_skew: Option<Duration>,
    pub(super) lease: Duration,
    pub(super) seed: u64,
    /// Program that is started as a worker, which is this program.
    pub(super) program: PathBuf,
    /// Whether the fenced resource is in the store itself.
    pub(super) fence_in_store: bool,
    /// Command that disturbs the store's servers.
    pub(super) command: Vec<OsString>,
    kinds: Vec<Kind>,
    faults: Vec<Fault>,
    any_kind: bool,
}

impl Plan {
    pub(super) fn new(args: &Args, program: PathBuf) -> Self {
        let all = [Kind::Mutex, Kind::RwLock, Kind::Semaphore];
        let any_kind = args.kind.contains(&KindArg::All);
        let wanted = |kind: &Kind| {
            any_kind
                || args.kind.iter().any(|arg| {
                    matches!(
                        (arg, kind),
                        (KindArg::Mutex, Kind::Mutex)
                            | (KindArg::Rwlock, Kind::RwLock)
                            | (KindArg::Semaphore, Kind::Semaphore)
                    )
                })
        };
        let mut faults: Vec<Fault> = match args.fault.is_empty() {
            true => applicable(&args.store),
            false => args.fault.iter().filter_map(|f| f.fault()).collect(),
        };
        faults.sort_unstable();
        faults.dedup();
        Self {
            store: args.store.clone(),
            namespace: args.namespace.clone(),
            seconds: args.seconds,
            clients: args.clients,
            locks: args.locks,
            fault_every: args.fault_every,
            clock_skew: args.clock_skew,
            lease: args.lease.unwrap_or_else(|| shortest_lease(&args.store)),
            seed: args.seed.unwrap_or_else(|| fastrand::u64(..)),
            program,
            // A store in this process already has its resources here.
            command: args.command.clone(),
            fence_in_store: args.fence == FenceArg::Store && !is_served(&args.store),
            kinds: all.into_iter().filter(wanted).collect(),
            faults,
            any_kind,
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let faults: Vec<String> = self.faults.iter().map(Fault::to_string).collect();
        let faults = if faults.is_empty() { "no faults".into() } else { faults.join(", ") };
        let time = self.seconds.map_or(String::new(), |seconds| format!(" for {seconds} s"));
        write!(f, "testing the store with {} processes{time} ({faults})", self.clients)
    }
}

impl FaultArg {
    fn fault(self) -> Option<Fault> {
        match self {
            Self::Pause => Some(Fault::Pause),
            Self::Kill => Some(Fault::Kill),
            Self::Cut => Some(Fault::Cut),
            Self::Stale => Some(Fault::Stale),
            Self::None => None,
        }
    }
}

impl Plan {
    /// Returns how long to run. The default is long enough for several pauses and recoveries. After
    /// `recovery` at most, the store has removed a client that is paused or has crashed.
    pub(super) fn time(&self, recovery: Duration) -> Duration {
        match self.seconds {
            Some(seconds) => Duration::from_secs(seconds.into()),
            None => (recovery * 4).clamp(Duration::from_secs(10), Duration::from_secs(120)),
        }
    }

    /// Returns the maximum number of concurrent worker faults, and the average time from the start
    /// of one fault to the next in the same loop.
    pub(super) fn pace(&self) -> (u32, Option<Duration>) {
        // At most half of the workers have a fault at the same time.
        let half = self.clients / 2;
        match self.fault_every {
            None => (half.min(16), None),
            Some(every) => (half, Some(every * half)),
        }
    }

    /// Returns the command line that repeats this run on the store with this URL. The URL shows no
    /// credentials.
    pub(super) fn command_again(&self, store: &str, time: Duration) -> Vec<String> {
        let kind = |kind: &Kind| match kind {
            Kind::Mutex => "mutex",
            Kind::RwLock => "rwlock",
            Kind::Semaphore => "semaphore",
        };
        let kinds: Vec<&str> = self.kinds.iter().map(kind).collect();
        let faults: Vec<String> = self.faults.iter().map(Fault::to_string).collect();
        let shown = |d: Duration| humantime::format_duration(d).to_string().replace(' ', "");
        let options = [
            ("--store", store.to_owned()),
            ("--duration", format!("{}s", time.as_secs())),
            ("--processes", self.clients.to_string()),
            ("--locks", self.locks.to_string()),
            ("--kind", if self.any_kind { "all".into() } else { kinds.join(",") }),
            ("--fault", if faults.is_empty() { "none".into() } else { faults.join(",") }),
            ("--fence", if self.fence_in_store { "store".into() } else { "process".into() }),
            ("--lease", shown(self.lease)),
            ("--seed", self.seed.to_string()),
        ];
        let every = self.fault_every.map(|every| ("--fault-every", shown(every)));
        let skew = self.clock_skew.map(|skew| ("--clock-skew", shown(skew)));
        let namespace = Some(("--namespace", self.namespace.clone()));
        let namespace = namespace.filter(|(_, prefix)| !prefix.is_empty());
        let words = options.into_iter().chain(namespace).chain(every).chain(skew);
        let words = words.flat_map(|(name, value)| [name.to_owned(), value]);
        let mut words: Vec<String> =
            ["leasehold", "stress"].map(Into::into).into_iter().chain(words).collect();
        if !self.command.is_empty() {
            words.push("--".into());
            words.extend(self.command.iter().map(|word| word.to_string_lossy().into_owned()));
        }
        words
    }

    /// Returns the kinds of lock to use.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the user named a kind that the store does not support.
    pub(super) fn kinds(&self, promises: &Guarantees) -> Result<Vec<Kind>> {
        let missing = self.kinds.iter().find(|k| !promises.keeps(**k));
        match missing {
            Some(kind) if !self.any_kind => {
                let what =
                    format!("this store does not support the kind {kind} (remove it from --kind)");
                Err(Error::new(ErrorKind::Unsupported, what))
            }
            _ => Ok(self.kinds.iter().copied().filter(|k| promises.keeps(*k)).collect()),
        }
    }

    /// Checks that the store can keep the fenced resource, if it was requested there.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] with the reason.
    pub(super) fn fence(&self) -> Result<()> {
        if self.fence_in_store { ledger::supported(&self.store) } else { Ok(()) }
    }

    /// Returns the workers' wrong clocks, if `--clock-skew` is given.
    ///
    /// # Errors
    /// - [`ErrorKind::Unsupported`]: the store uses the clock of its clients' machine.
    /// - [`ErrorKind::Config`]: libfaketime is not installed.
    pub(super) fn clocks(&self) -> Result<Option<Clocks>> {
        let Some(most) = self.clock_skew else { return Ok(None) };
        if self.store.starts_with("sqlite:") || is_served(&self.store) {
            let what = "--clock-skew is not supported: this store uses the clock of one machine";
            let error = Error::new(ErrorKind::Unsupported, what);
            return Err(error.with_hint("leave --clock-skew out, or test a store with a server"));
        }
        Clocks::new(most).map(Some)
    }

    /// Returns the faults to inject.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the user named a fault that cannot be injected into this
    /// store's clients.
    pub(super) fn faults(&self) -> Result<Vec<Fault>> {
        let possible = applicable(&self.store);
        match self.faults.iter().find(|f| !possible.contains(f)) {
            Some(fault) => {
                let what = format!(
                    "--fault {fault} is not supported: this store's connections cannot be interrupted"
                );
                Err(Error::new(ErrorKind::Unsupported, what))
            }
            None => Ok(self.faults.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }

    fn plan(line: &str) -> std::result::Result<Plan, clap::Error> {
        let words = std::iter::once("torture").chain(line.split_whitespace());
        <Command as clap::Parser>::try_parse_from(words).map(|c| Plan::new(&c.args, PathBuf::new()))
    }

    #[test]
    fn defaults_are_all_kinds_and_all_supported_faults() {
        let memory = plan("--store memory:").unwrap();
        let all = [Fault::Pause, Fault::Kill, Fault::Cut, Fault::Stale];
        assert_eq!(memory.faults().unwrap(), all);
        assert_eq!(memory.kinds.len(), 3);
        let file = plan("--store file:/x").unwrap();
        assert_eq!(file.faults().unwrap(), [Fault::Pause, Fault::Kill]);
        assert!(plan("--store memory: --fault none").unwrap().faults().unwrap().is_empty());
    }

    #[test]
    fn repeat_command_gives_the_same_plan() {
        for line in [
            "--store memory: --seed 7",
            "--store memory: --fault none --kind mutex,semaphore --lease 2500ms --seed 1",
            "--store memory: --locks 40 --fault-every 1500us --clock-skew 90m --seed 2",
            "--store etcd://a --fence store --clients 9 --fault kill --seed 3 -- ./fail-over now",
        ] {
            let first = plan(line).unwrap();
            let time = first.time(Duration::from_secs(3));
            let words = first.command_again(&first.store, time);
            let mut again = plan(&words[2..].join(" ")).unwrap();
            assert_eq!(again.seconds.take(), u32::try_from(time.as_secs()).ok());
            assert_eq!(format!("{again:?}"), format!("{first:?}"), "{words:?}");
        }
    }

    #[test]
    fn impossible_arguments_are_rejected_in_one_line() {
        let error = plan("--store file: --fault cut").unwrap().faults().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(error.to_string().lines().count(), 1);
        for bad in [
            "--store=",
            "--lease 0s",
            "--lease 61",
            "--lease soon",
            "--lease 99999999999999999999s",
            "--clients 1",
            "--locks 0",
            "--locks 334",
            "--fault-every 0s",
            "--fault-every 2h",
            "--duration 0s",
            "--duration 25h",
        ] {
            assert!(plan(&format!("--store memory: {bad}")).is_err(), "{bad}");
        }
        assert_eq!(plan("--store memory: --lease 2s").unwrap().lease, Duration::from_secs(2));
    }

    // F52
    #[test]
    fn defaults_allow_more_time_for_a_slow_store() {
        let seconds = Duration::from_secs;
        let memory = plan("--store memory:").unwrap();
        assert_eq!(memory.lease, Duration::from_millis(500));
        assert_eq!(memory.time(Duration::from_millis(2500)), seconds(10));
        assert_eq!(memory.time(seconds(18)), seconds(72));
        assert_eq!(memory.time(seconds(600)), seconds(120));
        assert_eq!(plan("--store etcd://a").unwrap().lease, seconds(2));
        let parsed = plan("--store etcd://a --seconds 5 --lease 1s").unwrap();
        assert_eq!((parsed.time(seconds(18)), parsed.lease), (seconds(5), seconds(1)));
    }
}
