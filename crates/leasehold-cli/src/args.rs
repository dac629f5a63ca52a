//! What can be said on the command line, and the help that says so.
//!
//! Names, labels and CMD's arguments are data: they are handed on as they are, never to a shell.
//!
//! Which kind of lock a name is, is the caller's to say, the same way everywhere: plain is a
//! mutex, `--shared` and `--exclusive` are the two sides of a read-write lock, `--of N` a
//! semaphore. Plain is not silently "the exclusive side": a mutex is what every store keeps and
//! what other programs' locks of that name are, so two kinds that meet in one name are told so.

use std::ffi::{OsStr, OsString};
use std::sync::LazyLock;
use std::time::Duration;

use clap::{Parser, Subcommand};
use leasehold::Token;

use leasehold_torture::duration::duration;

/// Run any program under a lock: on one machine without a server, on many with the store you have.
#[derive(Debug, Parser)]
#[command(name = "leasehold", version, max_term_width = 100, after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
Examples:
  leasehold run nightly-report -- ./report.sh     one at a time on this machine; others wait
  leasehold run --try backup -- ./backup.sh       or exit with 75 at once
  leasehold run --of 3 convert -- ./convert a.png at most three at once
  leasehold show nightly-report                   who holds it, who waits, since when

  T=$(leasehold acquire deploy --pid $$) || exit  around a section of a shell script
  …
  leasehold release deploy --token \"$T\"";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Runs a command while holding a lock
    Run(RunArgs),
    /// Takes a lock for a shell script and prints its token
    Acquire(AcquireArgs),
    /// Runs a command on one of many machines, for ever: another takes over when this one ends
    Elect(ElectArgs),
    /// Holds a lock for a program in any language, and says on stdout what becomes of it
    Hold(HoldArgs),
    /// Releases what `acquire` took, or takes a lock away from whoever holds it
    Release(ReleaseArgs),
    /// Asks the store whether the hold that a sequencer tells of is still held
    Check(CheckArgs),
    /// Says what a store promises as it is set up, what breaks that, and what to do
    Doctor(DoctorArgs),
    /// Lists the locks in use
    Ls(LsArgs),
    /// Shows who holds a lock and who waits for it
    Show(ShowArgs),
    /// Says what changes: who waits, who holds, who has ended
    Events(FollowArgs),
    /// Waits until a lock is free, or held, and takes nothing
    Wait(WaitArgs),
    /// Prints the SQL that makes leasehold's tables in a database
    Schema(SchemaArgs),
    /// Prints what a shell completes
    Completions(CompletionsArgs),
    /// Prints the manual page, or writes all of them
    Man(ManArgs),
    /// Is my set-up safe? Fights for locks while processes are stopped, killed and cut off
    Torture(leasehold_torture::Args),
    /// Fights in `torture`
    #[command(name = leasehold_torture::WORKER, hide = true)]
    TortureWorker,
    /// Holds a lock for `acquire`
    #[command(hide = true)]
    Keep(KeepArgs),
    /// Ends a command whose `leasehold` is gone
    #[command(hide = true)]
    Watchdog(WatchdogArgs),
}

/// Connects to nothing: for databases whose tables other people make.
#[derive(Debug, clap::Args)]
pub(crate) struct SchemaArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Which tables to make
    #[arg(long, value_enum, default_value_t)]
    pub(crate) tables: Tables,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "In bash: leasehold completions bash > \
                        ~/.local/share/bash-completion/completions/leasehold")]
pub(crate) struct CompletionsArgs {
    /// Which shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "To read: leasehold man run | man -l -\n\
                        To install: leasehold man --into ~/.local/share/man/man1")]
pub(crate) struct ManArgs {
    /// Write the pages of all commands into this directory
    #[arg(long, value_name = "DIR", conflicts_with = "subcommand")]
    pub(crate) into: Option<std::path::PathBuf>,
    /// Which command's page; none: leasehold's
    #[arg(value_name = "COMMAND")]
    pub(crate) subcommand: Option<String>,
}

/// Which of leasehold's tables.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
pub(crate) enum Tables {
    /// Both
    #[default]
    All,
    /// What the store keeps its locks in
    Locks,
    /// What the library's lock_in, once and fence::sql use in your own transactions
    Transactions,
}

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
    /// Exit with this code when the lock was not acquired [default: 75]
    #[arg(short = 'E', long, value_name = "CODE")]
    pub(crate) conflict_exit_code: Option<u8>,
    /// Say nothing when the lock was not acquired
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Name of the lock: 1 to 512 bytes of UTF-8 without control characters
    pub(crate) name: String,
}

impl TakeArgs {
    /// Whether nothing is waited for.
    pub(crate) fn tries_only(&self) -> bool {
        self.try_only || self.wait == Some(Duration::ZERO)
    }

    /// What to exit with when the lock was not acquired.
    pub(crate) fn conflict_code(&self) -> u8 {
        self.conflict_exit_code.unwrap_or(crate::exit::NOT_ACQUIRED)
    }
}

#[derive(Debug, clap::Args)]
#[command(after_long_help = RUN_HELP, after_help = "More, with examples: leasehold run --help")]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) take: TakeArgs,
    /// Run at most once in this time, on however many machines: who comes second exits with 0
    /// and says nothing (-E changes the code, -v tells). For cron; give a little less than
    /// the period
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration,
        conflicts_with_all = ["try_only", "wait", "at_least"],
    )]
    pub(crate) once_per: Option<Duration>,
    /// Do not let the command inherit the lock: it is free the moment leasehold dies (file:)
    #[arg(long)]
    pub(crate) close: bool,
    /// Say on stderr what happens
    #[arg(short, long, conflicts_with = "quiet")]
    pub(crate) verbose: bool,
    /// Say on stderr what happens, as one JSON object per line
    #[arg(long, conflicts_with = "quiet")]
    pub(crate) json: bool,
    /// The command and its arguments: executed directly, never through a shell
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

const RUN_HELP: &str = "\
Examples:
  leasehold run nightly-report -- ./report.sh
  leasehold run --wait 30s -q -E 0 sync -- rsync -a src/ d/ # gives up quietly after 30 s
  leasehold run --of 4 --permits 2 gpu -- ./train           # two of four permits
  leasehold run --shared db -- ./read.sh                    # together with other --shared …
  leasehold run --exclusive db -- ./migrate.sh              # … but never with this one
  leasehold run --once-per 50m hourly -- ./hourly.sh        # from cron on many machines: once
  leasehold run stock -- sh -c 'update \"$LEASEHOLD_TOKEN\"'  # the shell is yours to ask for

--once-per counts from when the lock was taken, whatever becomes of the command: one that fails is
not run again before the next period, one whose machine dies is (its lease runs out).

The command finds LEASEHOLD_NAME, LEASEHOLD_TOKEN (the fencing token), LEASEHOLD_SEQUENCER (for
`leasehold check`), LEASEHOLD_STORE and LEASEHOLD_NAMESPACE (as given) in its environment. It runs
in a process group of its own; signals are passed on to that group, and on a terminal it is the
foreground job: Ctrl-C and Ctrl-Z work as ever.

To hold two locks, run one under the other, in the same order everywhere; the same lock twice is
refused (2).

Exit codes: the command's own, 128+n if it died of signal n; or
    2  usage, an invalid name or option, or a name in use as another kind of lock
   69  the store cannot be reached (for 15 s, --lease or --wait; with --try: at once) or used
   71  the system refused (no more processes, no more files)
   74  the lock was lost, or about to be, while the command ran: it was ended; or before it could
       be started: it was not run
   75  the lock was not acquired (-E changes this)
  126  the command cannot be executed
  127  the command was not found

The lock is not given away under a running command. Where it is a lease that cannot be renewed,
the command's group gets SIGTERM when a third of the lease is left, and SIGKILL before the last
tenth.
If leasehold itself is killed, or stopped for too long, a watchdog does the same. With the file
store nothing runs out, and the command inherits the lock as with flock (--close prevents it).

Not covered: descendants that leave the command's process group (daemons, setsid), or that run on in
it after the command itself has ended; a command that becomes another user (sudo, setuid programs),
which leasehold may not signal: it says so, renews for as long as the command lives, and exits with
74; a machine that is suspended or frozen as a whole until the lease is over (the command is ended
as soon as it wakes); whatever the command set off on other machines; and a store that fails over to
a member that had not heard of the hold (a replica of Redis or of a database): the old member may go
on renewing it until it is demoted. Where that matters, let the resource check the token. A job that
was stopped with Ctrl-Z stops renewing too: on a store with leases it is ended before its lease is
over.";

#[derive(Debug, clap::Args)]
#[command(after_help = ELECT_HELP)]
pub(crate) struct ElectArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// How long after this machine's death another takes over, where the store works with leases
    #[arg(long, value_name = "DUR", value_parser = duration, default_value = "15s")]
    pub(crate) lease: Duration,
    /// Nobody leads for so long after a crash, where the store can see to that
    #[arg(long, value_name = "DUR", value_parser = duration)]
    pub(crate) lock_delay: Option<Duration>,
    /// What `show` and those who wait read about this candidate
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// Say on stderr what happens
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Say on stderr what happens, as one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
    /// Name of the lock that the leader holds
    pub(crate) name: String,
    /// The command and its arguments: executed directly, never through a shell
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

impl ElectArgs {
    /// One term: a lock that is waited for, for as long as it takes.
    pub(crate) fn term(self) -> RunArgs {
        let take = TakeArgs {
            store: self.store,
            try_only: false,
            wait: None,
            shared: false,
            exclusive: false,
            permits: None,
            of: None,
            lease: self.lease,
            max_hold: None,
            at_least: None,
            lock_delay: self.lock_delay,
            label: self.label,
            conflict_exit_code: None,
            quiet: false,
            name: self.name,
        };
        RunArgs {
            take,
            once_per: None,
            close: false,
            verbose: self.verbose,
            json: self.json,
            command: self.command,
        }
    }
}

const ELECT_HELP: &str = "\
Each term is a `leasehold run`, with all that its help says: the command has LEASEHOLD_TOKEN, the
number of the term, and is ended before the lock can be another's. When it ends, by itself or so, or
the store is away, this stands in the queue again, after a pause of 1 to 30 s. INT, QUIT and TERM
are passed on and end it.

Exit codes: the command's own once it was told to end; 128+n for the signal that ended the waiting;
2, 126 and 127 as in `leasehold run`.";

#[derive(Debug, clap::Args)]
#[command(after_long_help = ACQUIRE_HELP, after_help = "More, with examples: leasehold acquire --help")]
pub(crate) struct AcquireArgs {
    #[command(flatten)]
    pub(crate) take: TakeArgs,
    /// The process whose end releases the lock [default: the shell that reads the token]
    #[arg(long, value_parser = clap::value_parser!(i32).range(1..))]
    pub(crate) pid: Option<i32>,
}

const ACQUIRE_HELP: &str = "\
Example:
  T=$(leasehold acquire deploy --wait 1m) || exit
  ./deploy.sh \"$T\"
  leasehold release deploy --token \"$T\"

A keeper in the background holds and renews the lock until it is released or the calling shell is
gone, however it ended. `release` exits with 74 if the lock was lost meanwhile. That shell is the
one that reads the token, as in $(…), whatever runs in between; in a pipeline there is none, and
without --pid $$ nothing is taken (2). Exit codes as in `leasehold run`.

Nothing stops the script when the lock is lost (where the store works with leases): a script that
must be stopped is better run by `leasehold run`.";

#[derive(Debug, clap::Args)]
#[command(after_long_help = HOLD_HELP, after_help = "More, with examples: leasehold hold --help")]
pub(crate) struct HoldArgs {
    #[command(flatten)]
    pub(crate) take: TakeArgs,
    /// Say it as one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
}

const HOLD_HELP: &str = "\
Example, in bash:
  exec {lock}< <(leasehold hold deploy < /dev/null)   # starts it, and has its stdout
  while read -r word token rest <&$lock && [ \"$word\" = waiting ]; do :; done
  [ \"$word\" = held ] || exit
  ./deploy.sh \"$token\"
  exec {lock}<&-                                      # nobody reads any more: released

It says on stdout, each on a line:
  waiting N               it stands in the queue, N before it
  held TOKEN SEQUENCER S  the lock is yours; renewed again and again, certain for S seconds
  at_risk S               it could not be renewed in time: certain for S seconds more
  recovered S             it was renewed after all
  lost REASON             the lock may be another's by now; the last line
  released TOKEN          the last line
  failed CODE MESSAGE     nothing is held; the last line
With --json these are objects with \"event\", \"time\" (seconds since 1970) and the same values by name.

It holds until `release` is written to its stdin, or that ends (where it is a pipe or a socket:
another stdin is not touched), or nobody reads its stdout, or a signal ends it: a caller that dies
gives the lock back. If its stdout ends without a last line, it was killed, and the lock is not
certain any more.

Nothing stops the caller when the lock is lost: it has to read. Exit codes as in `leasehold run`; 74
if the lock was lost.";

#[derive(Debug, clap::Args)]
#[command(after_help = RELEASE_HELP)]
pub(crate) struct ReleaseArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Release the hold with this token: what `acquire` printed
    #[arg(long, value_name = "T", required_unless_present = "force", conflicts_with = "force")]
    pub(crate) token: Option<Token>,
    /// Take the lock away from whoever holds it; who waits is next
    #[arg(long)]
    pub(crate) force: bool,
    /// Name of the lock
    pub(crate) name: String,
}

const RELEASE_HELP: &str = "\
Exit codes: 0 it was held until now; 74 the hold with this token had ended before (lost, evicted or
released); 1 with --force, nobody held it; 2 and 69 as in `leasehold run`.

--force hands the lock to the next in the queue while its holder may still be at work: only a
resource that checks tokens is safe from that. On Redis it refuses what is not certainly a lock, and
a lock of Redisson's (69).";

#[derive(Debug, clap::Args)]
#[command(after_help = CHECK_HELP)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// The sequencer: LEASEHOLD_SEQUENCER of a command under `leasehold run`
    #[arg(value_name = "SEQUENCER")]
    pub(crate) sequencer: String,
}

const CHECK_HELP: &str = "\
Exit codes: 0 the hold was held when the store answered; 1 it is not held any more; 2 this is no
sequencer, or one of another store; 69 the store cannot be reached, and nothing is known. Only 0 is
a yes.

Between this answer and what you do next the lock may be lost. A resource that can remember a number
should refuse every token smaller than the greatest it has seen, in the same step as the write.";

#[derive(Debug, clap::Args)]
#[command(after_help = DOCTOR_HELP)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

const DOCTOR_HELP: &str = "\
It only looks: no setting is changed (a database store's tables are made if there are none).

Exit codes: 0 the store keeps what its kind can promise; 1 something breaks a promise, or the store
refuses to be used so; 2 bad usage; 69 it cannot be reached, and nothing is known.";

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0, whether or not there are any; 2 bad usage; 69 the store cannot be \
                  reached, or there is none."
)]
pub(crate) struct LsArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Print one JSON array
    #[arg(long)]
    pub(crate) json: bool,
    /// Only names that begin so
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) prefix: String,
}

#[derive(Debug, clap::Args)]
#[command(after_help = FOLLOW_HELP)]
pub(crate) struct FollowArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Say it as one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
    /// How often to look
    #[arg(long, value_name = "DUR", value_parser = pause, default_value = "500ms")]
    pub(crate) every: Duration,
    /// Only names that begin so
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) prefix: String,
}

/// No less than a server can bear.
fn pause(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        pause if pause < Duration::from_millis(10) => Err("no less than 10ms".to_owned()),
        pause => Ok(pause),
    }
}

const FOLLOW_HELP: &str = "\
It begins with all that is there. Each look is one request, and what comes and goes between two
looks is not seen; `ended` is given back, lost, or given up.

Ctrl-C ends it. Exit codes: 0 its reader has seen enough; 2 bad usage; 69 there is no store, or it
cannot be reached at the start.";

#[derive(Debug, clap::Args)]
#[command(after_help = WAIT_HELP)]
pub(crate) struct WaitArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Until somebody holds it
    #[arg(long)]
    pub(crate) held: bool,
    /// No longer than this (10s, 5m, 1h30m; a bare number is seconds), then exit with 75
    #[arg(long, value_name = "DUR", value_parser = duration)]
    pub(crate) timeout: Option<Duration>,
    /// Name of the lock
    pub(crate) name: String,
}

const WAIT_HELP: &str = "\
It takes nothing: as soon as it has ended, somebody else may have the lock. Who wants it takes it
with `run`. A lock is free when nobody holds it, waits for it, or keeps it closed for a while.

Exit codes: 0 it is so; 2 bad usage; 69 the store cannot be reached or used; 75 not in that time";

#[derive(Debug, clap::Args)]
#[command(after_help = SHOW_HELP)]
pub(crate) struct ShowArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Name of the lock
    pub(crate) name: String,
}

const SHOW_HELP: &str = "\
Who holds, who waits, and who has departed: its holder is gone, and the lock is kept closed in its
place (--at-least, --once-per, --lock-delay).

Exit codes: 0 somebody holds the lock, waits for it or has departed; 1 it is free; 2 bad usage; 69
the store cannot be reached, or there is none.";

#[derive(Debug, clap::Args)]
pub(crate) struct KeepArgs {
    #[command(flatten)]
    pub(crate) take: TakeArgs,
    /// The process whose end releases the lock …
    #[arg(long)]
    pub(crate) pid: i32,
    /// … and when it was started, so that no other of that number is taken for it
    #[arg(long)]
    pub(crate) started: u64,
    /// Report the queue too: somebody watches
    #[arg(long)]
    pub(crate) progress: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct WatchdogArgs {
    /// How long the group has between SIGTERM and SIGKILL once leasehold is gone
    #[arg(long, value_name = "MS")]
    pub(crate) grace: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }

    #[test]
    fn kinds_do_not_mix() {
        let parse = |more: &[&str]| {
            let words = ["leasehold", "run"].iter().chain(more).chain(&["x", "--", "true"]);
            Args::try_parse_from(words)
        };
        for good in [&[][..], &["--of", "3"], &["--of", "3", "--permits", "2"], &["--shared"]] {
            assert!(parse(good).is_ok(), "{good:?}");
        }
        for bad in [
            &["--permits", "2"][..],
            &["--of", "0"],
            &["--shared", "--exclusive"],
            &["--shared", "--of", "2"],
            &["--try", "--wait", "1s"],
            &["--once-per", "1h", "--try"],
            &["--once-per", "1h", "--wait", "1s"],
            &["--once-per", "1h", "--at-least", "1m"],
            &["-q", "-v"],
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
