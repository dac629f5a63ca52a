//! What can be said on the command line, and the help that says so.
//!
//! Names, labels and CMD's arguments are data: they are handed on as they are, never to a shell.
//!
//! Which kind of lock a name is, is the caller's to say, the same way everywhere: plain is a
//! mutex, `--shared` and `--exclusive` are the two sides of a read-write lock, `--of N` a
//! semaphore. Plain is not silently "the exclusive side": a mutex is what every store keeps and
//! what other programs' locks of that name are, so two kinds that meet in one name are told so.

mod run;
mod take;

use std::time::Duration;

use clap::{Parser, Subcommand};
use leasehold::Token;

use leasehold::kit::parse_duration as duration;

pub(crate) use run::{ElectArgs, RunArgs};
pub(crate) use take::{StoreArgs, TakeArgs};

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
    /// Closes a lock for a while: nobody gets it, and who asks reads why
    Close(CloseArgs),
    /// Opens what `close` closed
    Open(OpenArgs),
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
    /// Shows on a terminal what is held and waited for, as it changes
    #[cfg(feature = "top")]
    Top(TopArgs),
    /// Waits until a lock is free, or held, and takes nothing
    Wait(WaitArgs),
    /// Prints the SQL that makes leasehold's tables in a database
    Schema(SchemaArgs),
    /// Prints what a shell completes
    Completions(CompletionsArgs),
    /// Prints the manual page, or writes all of them
    Man(ManArgs),
    /// Is my set-up safe? Fights for locks while processes are stopped, killed and cut off
    #[cfg(feature = "torture")]
    Torture(leasehold_torture::Args),
    /// How do locks fail? Plays well-known recipes on real servers, step by step
    #[cfg(feature = "lab")]
    Lab(leasehold_lab::Args),
    /// Fights in `torture`
    #[cfg(feature = "torture")]
    #[command(name = leasehold_torture::WORKER, hide = true)]
    TortureWorker,
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
    /// The statements of `lock_in`, `once`, `versioned` and `fence::sql` instead, for programs in other languages
    #[arg(long, conflicts_with = "tables")]
    pub(crate) statements: bool,
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

#[derive(Debug, clap::Args)]
#[command(after_long_help = ACQUIRE_HELP, after_help = "More, with examples: leasehold acquire --help")]
pub(crate) struct AcquireArgs {
    #[command(flatten)]
    pub(crate) take: TakeArgs,
    /// The process whose end releases the lock [default: the one that reads the token]
    #[arg(long, value_parser = clap::value_parser!(i32).range(1..))]
    pub(crate) pid: Option<i32>,
    /// Name of the lock: 1 to 512 bytes of UTF-8 without control characters
    pub(crate) name: String,
}

const ACQUIRE_HELP: &str = "\
Example:
  T=$(leasehold acquire deploy --wait 1m) || exit
  ./deploy.sh \"$T\"
  leasehold release deploy --token \"$T\"

A `leasehold hold` in the background holds and renews the lock until it is released or the process
of --pid is gone, however it ended. Without --pid that is the one that reads the token, as the shell in
$(…) does, whatever runs in between: the nearest process above this one that has the other end of its
stdout, in the same session. It has to last for as long as the lock is needed. Where there is none (a
pipeline, a file, `ssh`, `sudo` with a terminal of its own) nothing is taken (2): say --pid $$.
`release` exits with 74 if the lock was lost meanwhile. Exit codes as in `leasehold run`.

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
    /// The process whose end releases the lock [default: whoever reads what is said]
    #[arg(long, value_parser = clap::value_parser!(i32).range(1..))]
    pub(crate) pid: Option<i32>,
    /// Name of the lock: 1 to 512 bytes of UTF-8 without control characters
    pub(crate) name: String,
}

const HOLD_HELP: &str = "\
Example, in bash:
  exec {lock}< <(leasehold hold deploy < /dev/null)   # starts it, and has its stdout
  while read -r word token rest <&$lock && [ \"$word\" = waiting ]; do :; done
  [ \"$word\" = held ] || exit
  ./deploy.sh \"$token\"
  exec {lock}<&-                                      # nobody reads any more: released

It says on stdout, each on a line:
  waiting N WHO             it stands in the queue, N before it; who holds, or why nobody may
  held TOKEN SEQUENCER S T  the lock is yours; renewed again and again, certain for S seconds, until T
  at_risk S T               it could not be renewed in time: certain for S seconds more
  recovered S T             it was renewed after all
  lost REASON               the lock may be another's by now; the last line
  released TOKEN            the last line
  failed CODE MESSAGE       nothing is held; the last line
T is the time of day in seconds since 1970; S and T are left out where a hold needs no renewal. With
--json these are objects with \"event\", \"time\" (seconds since 1970) and the same values by name
(remaining_seconds and deadline are S and T), and `waiting` has holders as `show --json` has them.

It holds until `release` is written to its stdin, or that ends (where it is a pipe or a socket:
another stdin is not touched), or nobody reads its stdout, or a signal ends it: a caller that dies
gives the lock back. If its stdout ends without a last line, it was killed, and the lock is not
certain any more. With --pid that process's end takes the place of its reader's, `leasehold release
--token` ends it, too, and after `stay` was written to its stdin the end of that means nothing.

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
#[command(after_help = CLOSE_HELP)]
pub(crate) struct CloseArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// How long it stays closed (30m, 8h, 2days; a year at most)
    #[arg(long = "for", value_name = "DUR", value_parser = duration)]
    time: Duration,
    /// What whoever asks for the lock reads
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// Do not wait: exit with 75 if somebody holds the lock
    #[arg(long = "try", conflicts_with = "wait")]
    try_only: bool,
    /// Wait no longer than this for those who have it or came before, then exit with 75
    #[arg(long, value_name = "DUR", value_parser = duration)]
    wait: Option<Duration>,
    /// The lock is a read-write lock
    #[arg(long, conflicts_with = "of")]
    exclusive: bool,
    /// The lock is a semaphore of N permits
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    of: Option<u32>,
    /// Name of the lock
    pub(crate) name: String,
}

impl CloseArgs {
    /// All of the lock, to be kept for that long.
    pub(crate) fn take(self, label: String) -> TakeArgs {
        TakeArgs {
            try_only: self.try_only,
            wait: self.wait,
            exclusive: self.exclusive,
            permits: self.of,
            of: self.of,
            at_least: Some(self.time),
            label: Some(label),
            ..TakeArgs::of(self.store)
        }
    }
}

const CLOSE_HELP: &str = "\
Example:
  leasehold close deploy --for 8h --reason 'the database is moved, ask Ana'
  leasehold open deploy

It takes the lock in its turn, and leaves it closed: whoever holds it, or waited before, comes first. No
process stays. `show` and `ls` tell of it, and who tries to take the lock reads the reason.

Exit codes: 0 it is closed; 2, 69 and 75 as in `leasehold run`.";

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0 it was closed, and is not any more; 1 it is not closed; 2 and 69 as in \
                        `leasehold run`. A lock that a job keeps (--at-least, --once-per) is not opened by \
                        this: see `leasehold release --force`."
)]
pub(crate) struct OpenArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Name of the lock
    pub(crate) name: String,
}

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

#[cfg(feature = "top")]
#[derive(Debug, clap::Args)]
#[command(after_help = TOP_HELP)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// How often to look
    #[arg(long, value_name = "DUR", value_parser = pause, default_value = "1s")]
    pub(crate) every: Duration,
    /// Only names that begin so
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) prefix: String,
}

#[cfg(feature = "top")]
const TOP_HELP: &str = "\
The longest hold stands first, or with s the oldest wait. Enter shows who stands in a queue, and
there e evicts, after a question. ? tells all keys. Each look is one request, and takes nothing.

There are no colours with NO_COLOR, or on a terminal that is not known to have any; nothing is told
by colour alone. The terminal has to understand ANSI sequences.

Exit codes: 0 it was quit; 2 bad usage, or stdin or stdout is no terminal; 69 there is no store, it
cannot be reached at the start, or it refuses; 128+n it was ended by signal n.";

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
