//! The command line: what it accepts, and its help.
//!
//! Names, labels and CMD's arguments are data. They are passed on unchanged and never reach a shell.
//!
//! Every command selects the kind of a lock in the same way: without an option it is a mutex,
//! `--shared` and `--exclusive` are the two sides of a read-write lock, and `--max N` is a semaphore.
//! A mutex is not silently the exclusive side of a read-write lock. It is what every store supports
//! and what other programs' locks of that name are. If two kinds meet in one name, both users get an
//! error.
//!
//! Names of commands and options that were replaced are hidden aliases.

mod heading;
mod run;
mod take;

use std::ffi::OsString;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};
use leasehold::Token;
use leasehold::store::kit::{did_you_mean, parse_duration as duration};

use run::NamesAndCommand;
pub(crate) use run::{ElectArgs, RunArgs};
pub(crate) use take::{StoreArgs, TakeArgs};

/// Run a command while holding a lock, on one machine or many
#[derive(Debug, Parser)]
#[command(
    name = "leasehold",
    version,
    max_term_width = 100,
    override_usage = "leasehold [OPTIONS] <COMMAND>",
    after_help = EXAMPLES,
)]
pub(crate) struct Args {
    #[command(flatten)]
    store: StoreArgs,
    /// Report events on stderr
    #[arg(short, long, global = true, help_heading = heading::OUTPUT)]
    pub(crate) verbose: bool,
    /// Print JSON instead of text, where the command supports it
    #[arg(long, global = true, help_heading = heading::OUTPUT)]
    json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
Examples:
  leasehold run nightly-report ./report.sh      one at a time on this machine
  leasehold run --try backup ./backup.sh        exit with 75 if it already runs
  leasehold run --max 3 convert ./convert.sh    at most three at once
  leasehold show nightly-report                 who holds it, who waits

Environment:
  LEASEHOLD_STORE       the store, if there is no --store
  LEASEHOLD_STORE_FILE  file that contains the store's URL, if LEASEHOLD_STORE is not set
  LEASEHOLD_NAMESPACE   prefix of all lock names, if there is no --namespace

Details and examples: leasehold run --help";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command while holding a lock
    Run(RunArgs),
    /// Keep a command running on one of many machines
    Elect(ElectArgs),
    /// Take a lock for the rest of a shell script and print its token
    Acquire(AcquireArgs),
    /// Release a lock taken by `acquire`
    Release(ReleaseArgs),
    /// List the locks in use
    Ls(LsArgs),
    /// Show who holds a lock and who is waiting
    Show(ShowArgs),
    /// Explain why a lock is not free, and find deadlocks
    Why(WhyArgs),
    /// Watch locks and queues live
    #[cfg(feature = "top")]
    Top(TopArgs),
    /// Stream lock events
    Events(FollowArgs),
    /// Wait until a lock is free, or held
    Wait(WaitArgs),
    /// Prevent new holders for a while
    #[command(alias = "close")]
    Freeze(FreezeArgs),
    /// Undo `freeze`
    #[command(alias = "open")]
    Unfreeze(UnfreezeArgs),
    /// Take a lock away from its holder
    Evict(EvictArgs),
    /// Check whether a hold is still valid
    #[command(alias = "check")]
    Verify(VerifyArgs),
    /// Check that a store is configured safely
    Doctor(DoctorArgs),
    /// Serve locks over HTTP
    #[cfg(feature = "serve")]
    Serve(ServeArgs),
    /// Break clients and servers and verify the guarantees
    #[cfg(feature = "torture")]
    #[command(alias = "torture")]
    Stress(leasehold_torture::Args),
    /// Replay how well-known lock recipes fail
    #[cfg(feature = "lab")]
    #[command(alias = "lab")]
    Demo(leasehold_lab::Args),
    /// Hold a lock for another program and report its state on stdout
    Hold(HoldArgs),
    /// Print the SQL that creates leasehold's tables
    Schema(SchemaArgs),
    /// Print a shell completion script
    Completions(CompletionsArgs),
    /// Print a manual page, or write all of them
    Man(ManArgs),
    /// Watch locks and queues live
    #[cfg(not(feature = "top"))]
    #[command(hide = true, disable_help_flag = true)]
    Top(Anything),
    /// Break clients and servers and verify the guarantees
    #[cfg(not(feature = "torture"))]
    #[command(alias = "torture", hide = true, disable_help_flag = true)]
    Stress(Anything),
    /// Replay how well-known lock recipes fail
    #[cfg(not(feature = "lab"))]
    #[command(alias = "lab", hide = true, disable_help_flag = true)]
    Demo(Anything),
    /// Serve locks over HTTP
    #[cfg(not(feature = "serve"))]
    #[command(hide = true, disable_help_flag = true)]
    Serve(Anything),
    /// One process of `stress`
    #[cfg(feature = "torture")]
    #[command(name = leasehold_torture::WORKER, hide = true)]
    TortureWorker,
    /// Stops a command whose `leasehold` is gone
    #[command(hide = true)]
    Watchdog(WatchdogArgs),
}

/// The groups of commands in `leasehold --help`.
const GROUPS: [(&str, &[&str]); 4] = [
    ("Take locks", &["run", "elect", "acquire", "release"]),
    ("Inspect", &["ls", "show", "why", "top", "events", "wait"]),
    ("Operate", &["freeze", "unfreeze", "evict", "verify", "doctor", "serve"]),
    ("Test your setup", &["stress", "demo"]),
];

/// Parses the command line of this process. The error is help or a usage error.
pub(crate) fn parse() -> Result<Args, clap::Error> {
    parse_from(std::env::args_os().collect())
}

fn parse_from(words: Vec<OsString>) -> Result<Args, clap::Error> {
    let args = matched(&words)?;
    match args.command {
        Command::Run(run) => {
            let again =
                |args: Args| if let Command::Run(run) = args.command { Some(run) } else { None };
            split(run, words, again).map(|run| Args { command: Command::Run(run), ..args })
        }
        Command::Elect(elect) => {
            let again = |args: Args| {
                if let Command::Elect(elect) = args.command { Some(elect) } else { None }
            };
            split(elect, words, again).map(|elect| Args { command: Command::Elect(elect), ..args })
        }
        _ => Ok(args),
    }
}

fn matched(words: &[OsString]) -> Result<Args, clap::Error> {
    let matches = command().try_get_matches_from(words).map_err(|error| advised(error, words))?;
    Args::from_arg_matches(&matches)
}

/// Splits NAME and CMD. Options between them belong to leasehold, so in that case everything is
/// parsed again without NAME.
fn split<T: NamesAndCommand>(
    mut args: T,
    mut words: Vec<OsString>,
    again: impl FnOnce(Args) -> Option<T>,
) -> Result<T, clap::Error> {
    let is_option = |word: &OsString| word != "--" && word.as_encoded_bytes().starts_with(b"-");
    // clap takes everything from NAME on as it is.
    let first = words.len() - args.words().len();
    let follow = args.words().get(1).is_some_and(is_option);
    if args.is_named() || !follow || words[first - 1] == "--" {
        args.split(None).map_err(|e| usage_error(T::SUBCOMMAND, e.0, &e.1))?;
        return Ok(args);
    }
    let name = words.remove(first);
    match again(matched(&words)?) {
        Some(mut args) => {
            args.split(Some(name)).map_err(|e| usage_error(T::SUBCOMMAND, e.0, &e.1))?;
            Ok(args)
        }
        None => Ok(args),
    }
}

/// Returns an error that prints this subcommand's usage.
fn usage_error(subcommand: &str, kind: ErrorKind, message: &str) -> clap::Error {
    let mut all = command();
    all.build();
    match all.find_subcommand_mut(subcommand) {
        Some(subcommand) => subcommand.error(kind, message),
        None => all.error(kind, message),
    }
}

/// Adds to the error for an unknown option or subcommand what the user probably meant.
///
/// clap suggests longer words only. `flock` has a -c and no subcommands.
fn advised(mut error: clap::Error, words: &[OsString]) -> clap::Error {
    use clap::error::{ContextKind, ContextValue};
    forget_hidden(&mut error);
    if error.kind() == ErrorKind::InvalidSubcommand
        && error.get(ContextKind::SuggestedSubcommand).is_none()
        && words.len() > 2
        && words[1] != "help"
    {
        let tip = "to run a command under a lock: leasehold run NAME CMD";
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
        return error;
    }
    let Some(ContextValue::String(unknown)) =
        error.get(ContextKind::InvalidArg).filter(|_| error.kind() == ErrorKind::UnknownArgument)
    else {
        return error;
    };
    if unknown == "-c" {
        let message = "unexpected argument '-c' found\n\n  \
                       tip: leasehold starts no shell: leasehold run NAME sh -c '...'";
        return usage_error("run", ErrorKind::UnknownArgument, message);
    }
    // Ours is the option with the fewest edits. clap's may be a longer one: --max-hold for --mx.
    if let Some(option) = similar_option(unknown, words) {
        error.insert(ContextKind::SuggestedArg, ContextValue::String(option));
    }
    error
}

/// Removes hidden subcommands from the suggestions of the error.
fn forget_hidden(error: &mut clap::Error) {
    use clap::error::{ContextKind, ContextValue};
    let Some(ContextValue::Strings(similar)) = error.get(ContextKind::SuggestedSubcommand) else {
        return;
    };
    let all = command();
    let is_shown = |name: &String| all.find_subcommand(name).is_some_and(|c| !c.is_hide_set());
    let shown: Vec<String> = similar.iter().filter(|name| is_shown(name)).cloned().collect();
    match shown.is_empty() {
        true => error.remove(ContextKind::SuggestedSubcommand),
        false => error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(shown)),
    };
}

/// The option of the subcommand that `unknown` most likely misspells.
fn similar_option(unknown: &str, words: &[OsString]) -> Option<String> {
    let unknown = unknown.strip_prefix("--")?;
    let all = command();
    let subcommand = words.iter().skip(1).find_map(|word| all.find_subcommand(word))?;
    let options = subcommand.get_arguments().filter(|option| !option.is_hide_set());
    let option = did_you_mean(unknown, options.filter_map(clap::Arg::get_long))?;
    Some(format!("--{option}"))
}

/// The command line with its help.
pub(crate) fn command() -> clap::Command {
    let mut all = Args::command();
    let overview = overview(&all);
    let globals: Vec<clap::Arg> =
        all.get_arguments().filter(|arg| arg.is_global_set()).cloned().collect();
    all = all
        .help_template(format!(
            "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{overview}\nOptions:\n{{options}}\
             {{after-help}}"
        ))
        .disable_help_flag(true)
        .disable_version_flag(true)
        .arg(help_flag().help_heading(heading::OUTPUT))
        .arg(
            clap::Arg::new("version")
                .short('V')
                .long("version")
                .action(ArgAction::Version)
                .help("Print the version")
                .help_heading(heading::OUTPUT)
                .display_order(999),
        );
    for subcommand in all.get_subcommands_mut() {
        let mut changed = std::mem::take(subcommand);
        if changed.get_name() == "run" {
            changed = run_in_order(&changed);
        }
        for global in &globals {
            // Accepted everywhere, but shown only where it has an effect.
            if changed.get_arguments().all(|arg| arg.get_id() != global.get_id()) {
                changed = changed.arg(global.clone().hide(true));
            }
        }
        if !changed.is_disable_help_flag_set() {
            let has_groups = changed
                .get_arguments()
                .any(|arg| !arg.is_hide_set() && arg.get_help_heading() == Some(heading::OUTPUT));
            let help = help_flag();
            changed = changed.disable_help_flag(true).arg(match has_groups {
                true => help.help_heading(heading::OUTPUT),
                false => help,
            });
        }
        *subcommand = changed;
    }
    all
}

/// `run` with its groups of options in a fixed order. clap shows them in the order of their first options.
fn run_in_order(command: &clap::Command) -> clap::Command {
    use heading::{COMMAND, LEASE, LOCK, OUTPUT, STORE, WAITING};
    const ORDER: [&str; 6] = [LOCK, WAITING, LEASE, COMMAND, STORE, OUTPUT];
    let mut args: Vec<clap::Arg> = command.get_arguments().cloned().collect();
    args.sort_by_key(|arg| ORDER.iter().position(|group| arg.get_help_heading() == Some(group)));
    clap::Command::new("run")
        .about(command.get_about().cloned().unwrap_or_default())
        .after_help(command.get_after_help().cloned().unwrap_or_default())
        .after_long_help(command.get_after_long_help().cloned().unwrap_or_default())
        .override_usage(run::RUN_USAGE)
        .args(args)
}

fn help_flag() -> clap::Arg {
    clap::Arg::new("help")
        .short('h')
        .long("help")
        .action(ArgAction::Help)
        .help("Print help (--help: with details)")
        .display_order(998)
}

/// The commands in groups. clap has groups for options only.
fn overview(all: &clap::Command) -> String {
    let mut text = String::new();
    for (group, names) in GROUPS {
        let commands = names.iter().filter_map(|name| all.find_subcommand(name));
        let lines: String = commands
            .filter(|command| !command.is_hide_set())
            .map(|command| {
                let about = command.get_about().map(ToString::to_string).unwrap_or_default();
                format!("  {:<10} {about}\n", command.get_name())
            })
            .collect();
        if !lines.is_empty() {
            text.push_str(&format!("{group}:\n{lines}\n"));
        }
    }
    text.push_str("Also: hold, schema, completions, man, help\n");
    text
}

/// The arguments of a subcommand that is not in this build.
#[derive(Debug, clap::Args)]
pub(crate) struct Anything {
    #[arg(num_args = 0.., allow_hyphen_values = true, trailing_var_arg = true)]
    _words: Vec<OsString>,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "leasehold does not connect: --store only selects the SQL dialect.")]
pub(crate) struct SchemaArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Which tables to create
    #[arg(long, value_enum, default_value_t)]
    pub(crate) tables: Tables,
    /// Print the statements for programs in other languages instead
    ///
    /// These are the statements of `lock_in`, `once`, `versioned` and `fence::sql`.
    #[arg(long, conflicts_with = "tables")]
    pub(crate) statements: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Install for bash:\n  leasehold completions bash > \
                        ~/.local/share/bash-completion/completions/leasehold")]
pub(crate) struct CompletionsArgs {
    /// Shell to generate completions for
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Read a page:    leasehold man run | man -l -\n\
                        Install them:   leasehold man --into ~/.local/share/man/man1")]
pub(crate) struct ManArgs {
    /// Write the pages of all commands to DIR
    #[arg(long, value_name = "DIR", conflicts_with = "subcommand")]
    pub(crate) into: Option<std::path::PathBuf>,
    /// Command to print the page of [default: leasehold itself]
    #[arg(value_name = "COMMAND")]
    pub(crate) subcommand: Option<String>,
}

/// Which of leasehold's tables.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
pub(crate) enum Tables {
    /// Both of these
    #[default]
    All,
    /// The tables of the store
    Locks,
    /// The tables for lock_in, once and fence::sql in your own transactions
    Transactions,
}

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Details and an example: leasehold acquire --help",
    after_long_help = ACQUIRE_HELP
)]
pub(crate) struct AcquireArgs {
    #[command(flatten)]
    pub(crate) take: TakeArgs,
    /// Release the lock when this process exits [default: the token's reader]
    #[arg(
        long,
        value_parser = clap::value_parser!(i32).range(1..),
        help_heading = heading::LEASE,
    )]
    pub(crate) pid: Option<i32>,
    /// Name of the lock
    pub(crate) name: String,
}

const ACQUIRE_HELP: &str = "\
Example:
  T=$(leasehold acquire deploy --wait 1m) || exit
  ./deploy.sh \"$T\"
  leasehold release deploy --token \"$T\"

A background process (`leasehold hold`) holds and renews the lock until it is released or the owner
process exits, for whatever reason.

The owner is the shell that reads the token in $(...), even through `timeout` or `bash -c`. To be
exact, it is the nearest ancestor that reads this command's stdout and is in the same session. In a
pipeline, with a redirection, or over ssh there is no such process. The command then fails with 2
and takes no lock. Pass --pid $$ to make the script the owner.

leasehold does not stop the script if the lock is lost. `release` then exits with 74. Use
`leasehold run` for a script that has to be stopped.

Exit status: as for `leasehold run`";

#[derive(Debug, clap::Args)]
#[command(
    after_help = "The protocol, with an example: leasehold hold --help",
    after_long_help = HOLD_HELP
)]
pub(crate) struct HoldArgs {
    #[command(flatten)]
    pub(crate) take: TakeArgs,
    /// Release the lock when this process exits [default: stdout's reader]
    #[arg(
        long,
        value_parser = clap::value_parser!(i32).range(1..),
        help_heading = heading::LEASE,
    )]
    pub(crate) pid: Option<i32>,
    /// Also release the lock when this process exits, even if its forks live on
    #[arg(
        long,
        value_name = "PID",
        value_parser = clap::value_parser!(i32).range(1..),
        conflicts_with = "pid",
        help_heading = heading::LEASE,
    )]
    pub(crate) caller: Option<i32>,
    /// Print one JSON object per line
    #[arg(long, help_heading = heading::OUTPUT)]
    pub(crate) json: bool,
    /// Name of the lock
    pub(crate) name: String,
}

const HOLD_HELP: &str = "\
Example, in bash:
  exec {lock}< <(leasehold hold deploy < /dev/null)   # start it and read its stdout
  while read -r word token rest <&$lock && [ \"$word\" = waiting ]; do :; done
  [ \"$word\" = held ] || exit
  ./deploy.sh \"$token\"
  exec {lock}<&-                                      # close its stdout: this releases the lock

Output, one line each:
  waiting N HOLDER          in the queue, N ahead; HOLDER says who holds the lock or why it is taken
                            (in the first line, and for the first three waiters in each line)
  held TOKEN SEQUENCER S T  acquired; renewed in the background, valid for S seconds, until T
  at_risk S T               not renewed in time: valid for S more seconds
  recovered S T             renewed after all
  lost REASON               another client may hold the lock now (last line)
  released TOKEN            released (last line)
  failed CODE MESSAGE       nothing is held (last line)
T is the time in seconds since 1970. S and T are omitted if the lock needs no renewal.

With --json each line is an object with \"event\", \"time\" (seconds since 1970) and the same values
by name. S and T are remaining_seconds and deadline. `waiting` lists the holders as `show --json`.

The lock is released when
- `release` is written to stdin, or stdin is closed (if stdin is a pipe or a socket)
- the process that reads stdout exits
- a signal ends `hold`
- the process given by --caller exits
So a caller that crashes releases its lock. If stdout ends without a last line, `hold` was killed:
treat the lock as lost.

Pass --caller with your own pid if your program forks: a fork has the same stdin and stdout open,
so they do not show that your program is gone.

With --pid the lock is released when that process exits, whether or not stdout is read, and by
`leasehold release --token`. After `stay` was written to stdin, stdin may be closed.

leasehold does not stop the caller if the lock is lost: the caller has to read the output.

Exit status: as for `leasehold run`; 74 if the lock was lost";

#[derive(Debug, clap::Args)]
#[command(after_help = RELEASE_HELP)]
pub(crate) struct ReleaseArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Token that `acquire` printed
    #[arg(long, value_name = "TOKEN", required_unless_present = "force", conflicts_with = "force")]
    pub(crate) token: Option<Token>,
    /// Take the lock away from its holder: see `evict`
    #[arg(long, hide = true)]
    pub(crate) force: bool,
    /// Name of the lock
    pub(crate) name: String,
}

const RELEASE_HELP: &str = "\
To take a lock away from its holder: leasehold evict NAME

Exit status:
   0  released; the lock was held until now
  74  the hold had already ended (lost, evicted or released)
   2, 69  as for `leasehold run`";

#[derive(Debug, clap::Args)]
#[command(after_help = EVICT_HELP)]
pub(crate) struct EvictArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Evict only the holder with this token
    #[arg(long, value_name = "TOKEN")]
    pub(crate) token: Option<Token>,
    /// Name of the lock
    pub(crate) name: String,
}

const EVICT_HELP: &str = "\
The next waiter gets the lock immediately. The evicted holder may still be working: `run` stops its
command, but only after it was notified. Check fencing tokens at the resource to be safe.

`evict` also ends a cooldown (--min-hold, --once-per, --lock-delay). `unfreeze` ends a freeze. On
Redis, `evict` refuses keys that may not be locks, and locks of Redisson (69).

Exit status:
   0  the holders were evicted
   1  nothing to evict
   2, 69  as for `leasehold run`";

#[derive(Debug, clap::Args)]
#[command(after_help = FREEZE_HELP)]
pub(crate) struct FreezeArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// How long to freeze the lock (30m, 8h, 2days; at most a year)
    #[arg(long = "for", value_name = "DUR", value_parser = duration)]
    pub(crate) time: Duration,
    /// Reason, shown to anyone who tries to take the lock
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// Do not wait: exit with 75 if the lock is held
    #[arg(short = 'n', long = "try", aliases = ["nonblock", "nb"], conflicts_with = "wait")]
    try_only: bool,
    /// Wait up to DUR for holders and earlier waiters, then exit with 75
    #[arg(short, long, alias = "timeout", value_name = "DUR", value_parser = duration)]
    wait: Option<Duration>,
    /// The lock is a read-write lock
    #[arg(short = 'x', long, short_alias = 'e', conflicts_with = "max")]
    exclusive: bool,
    /// The lock is a semaphore of N permits
    #[arg(
        long,
        alias = "of",
        short_alias = 'j',
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    max: Option<u32>,
    /// Name of the lock
    pub(crate) name: String,
}

impl FreezeArgs {
    /// The whole lock, kept for that long.
    pub(crate) fn take(self, label: String) -> TakeArgs {
        TakeArgs {
            try_only: self.try_only,
            wait: self.wait,
            exclusive: self.exclusive,
            permits: self.max,
            max: self.max,
            min_hold: Some(self.time),
            label: Some(label),
            ..TakeArgs::of(self.store)
        }
    }
}

const FREEZE_HELP: &str = "\
Example:
  leasehold freeze deploy --for 8h --reason 'database migration, ask Ana'
  leasehold unfreeze deploy

`freeze` waits in the lock's queue like any other client: current holders and earlier waiters finish
first. No process keeps running. `show`, `ls` and everyone who tries to take the lock see the reason.

Exit status:
   0  the lock is frozen
   2, 69, 75  as for `leasehold run`";

#[derive(Debug, clap::Args)]
#[command(after_help = UNFREEZE_HELP)]
pub(crate) struct UnfreezeArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Name of the lock
    pub(crate) name: String,
}

const UNFREEZE_HELP: &str = "\
Cooldowns of jobs (--min-hold, --once-per) are not affected: see `leasehold evict`.

Exit status:
   0  the freeze has ended
   1  the lock is not frozen
   2, 69  as for `leasehold run`";

#[derive(Debug, clap::Args)]
#[command(after_help = VERIFY_HELP)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// The hold: $LEASEHOLD_SEQUENCER of a command under `leasehold run`
    #[arg(value_name = "SEQUENCER")]
    pub(crate) sequencer: String,
}

const VERIFY_HELP: &str = "\
The lock can be lost between this check and your next step. A resource that can remember a number
should also reject every token smaller than the highest one it has seen, in the same step as the
write.

Exit status:
   0  the hold was valid when the store answered
   1  the hold is no longer valid
   2  invalid sequencer, or one of another store
  69  the store is unreachable: the answer is unknown";

#[derive(Debug, clap::Args)]
#[command(after_help = DOCTOR_HELP)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(feature = "serve")]
#[derive(Debug, clap::Args)]
#[command(after_help = SERVE_HELP)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// HOST:PORT or unix:PATH [default: $XDG_RUNTIME_DIR/leasehold.sock]
    ///
    /// Can be given several times. Requests over TCP need tokens. The service also uses the sockets that a
    /// systemd socket unit passes to it.
    #[arg(long, value_name = "ADDR")]
    pub(crate) listen: Vec<String>,
    /// File with the identities that may use the service
    ///
    /// The file contains only hashes of the tokens. It is read again when it changes, and on SIGHUP.
    #[arg(long, value_name = "FILE")]
    pub(crate) tokens: Option<std::path::PathBuf>,
    /// Accept every request from this machine over TCP, for tests
    #[arg(long, conflicts_with = "tokens")]
    pub(crate) no_auth: bool,
    /// Certificate of the server in PEM format, for https: over TCP
    ///
    /// The file contains the certificate and those that lead to the authority. It is read again
    /// when it changes.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<std::path::PathBuf>,
    /// Private key of the server's certificate, in PEM format
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<std::path::PathBuf>,
    /// Authority of client certificates, in PEM format
    ///
    /// A client with such a certificate needs no token. Its identity is the one whose
    /// certificate_names contain a DNS name of the certificate.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_client_ca: Option<std::path::PathBuf>,
    /// File that keeps the history of all locks across restarts
    ///
    /// Each server needs a file of its own.
    #[arg(long, value_name = "FILE")]
    pub(crate) history: Option<std::path::PathBuf>,
    /// Time for clients to finish after SIGTERM
    #[arg(long, value_name = "DUR", default_value = "30s", value_parser = duration)]
    pub(crate) drain: Duration,
    /// Log JSON lines
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(feature = "serve")]
const SERVE_HELP: &str = "\
Through a Unix socket, processes of the same user need no token. With --verbose, every request is
logged. Several servers can share one store, unless it is file:, memory: or zookeeper:.

A shell holds a lock for as long as curl runs:
  curl -sN --unix-socket \"$XDG_RUNTIME_DIR/leasehold.sock\" \\
    -X POST http://localhost/v1/locks/NAME/hold

Exit status:
   0  SIGTERM or SIGINT, after draining
   2  usage error, or an invalid token file or certificate
  69  the store is unreachable
  71  the address cannot be used";

const DOCTOR_HELP: &str = "\
`doctor` changes no setting. In a database it creates leasehold's tables if they are missing.

Exit status:
   0  no guarantee is broken
   1  a guarantee is broken, or the store rejects this configuration
   2  usage error
  69  the store is unreachable: the answer is unknown";

#[derive(Debug, clap::Args)]
#[command(after_help = LS_HELP)]
pub(crate) struct LsArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Print one JSON array
    #[arg(long)]
    pub(crate) json: bool,
    /// Only locks whose name starts with PREFIX
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) prefix: String,
}

const LS_HELP: &str = "\
The slots of a semaphore (NAME/slot/1, ...) are not listed.

Exit status:
   0  whether or not there are any locks
   2  usage error
  69  the store is unreachable or does not exist";

#[derive(Debug, clap::Args)]
#[command(after_help = FOLLOW_HELP)]
pub(crate) struct FollowArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Print one JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
    /// Polling interval
    #[arg(long, value_name = "DUR", value_parser = pause, default_value = "500ms")]
    pub(crate) every: Duration,
    /// Only locks whose name starts with PREFIX
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) prefix: String,
}

/// Parses a polling interval. Intervals below 10 ms would overload the store.
fn pause(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        pause if pause < Duration::from_millis(10) => Err("must be at least 10ms".to_owned()),
        pause => Ok(pause),
    }
}

const FOLLOW_HELP: &str = "\
The first lines are the current state. Each poll is one request. Changes that are undone between two
polls are not reported. `ended` means released, lost, or no longer waiting. Ctrl-C stops it.

Exit status:
   0  the process that reads stdout is gone
   2  usage error
  69  the store is unreachable at the start, or does not exist";

#[cfg(feature = "top")]
#[derive(Debug, clap::Args)]
#[command(after_help = TOP_HELP)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Polling interval
    #[arg(long, value_name = "DUR", value_parser = pause, default_value = "1s")]
    pub(crate) every: Duration,
    /// Only locks whose name starts with PREFIX
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) prefix: String,
}

#[cfg(feature = "top")]
const TOP_HELP: &str = "\
The longest hold comes first; press s to sort by the longest wait. Enter shows the queue of a lock.
There, e evicts a holder after confirmation. ? lists all keys. Each poll is one request. The slots of
a semaphore (NAME/slot/1, ...) are not listed.

NO_COLOR turns colors off. The terminal has to understand ANSI sequences.

Exit status:
   0  quit
   2  usage error, or stdin or stdout is not a terminal
  69  the store is unreachable at the start, does not exist, or is unusable
   128+n  ended by signal n";

#[derive(Debug, clap::Args)]
#[command(after_help = WAIT_HELP)]
pub(crate) struct WaitArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Wait until the lock is held, instead of free
    #[arg(long)]
    pub(crate) held: bool,
    /// Wait up to DUR (10s, 5m, 1h30m), then exit with 75
    #[arg(
        long,
        short_alias = 'w',
        alias = "wait",
        value_name = "DUR",
        value_parser = duration,
    )]
    pub(crate) timeout: Option<Duration>,
    /// Name of the lock
    pub(crate) name: String,
}

const WAIT_HELP: &str = "\
`wait` takes no lock: another client may take it right afterwards. Use `run` to take it. A lock is
free if it has no holder and no waiter and is not in a cooldown.

Exit status:
   0  the lock is free, or held with --held
   2  usage error
  69  the store is unreachable or unusable
  75  timed out";

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
States:
  held      it holds the lock
  waiting   it is in the queue
  cooldown  the holder is gone, but the lock stays taken for a while (--min-hold, --once-per,
            --lock-delay, `freeze`)

Exit status:
   0  the lock is held, waited for, or in a cooldown
   1  the lock is free
   2  usage error
  69  the store is unreachable or does not exist";

#[derive(Debug, clap::Args)]
#[command(after_help = WHY_HELP)]
pub(crate) struct WhyArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Name of the lock
    pub(crate) name: String,
}

const WHY_HELP: &str = "\
Prints the lock, and the locks for which its holders wait. If processes with several tasks wait for
each other, it may not be a deadlock: the task that holds a lock may not be the one that waits.

Exit status:
   0  no deadlock
   1  a possible deadlock: some processes wait for each other
   2  usage error
  69  the store is unreachable or does not exist";

#[derive(Debug, clap::Args)]
pub(crate) struct WatchdogArgs {
    /// Milliseconds between SIGTERM and SIGKILL after leasehold was killed
    #[arg(long, value_name = "MS")]
    pub(crate) grace: u64,
    /// Marker that identifies the command's processes
    #[arg(long, value_name = "MARK")]
    pub(crate) run: Option<crate::mark::Mark>,
}

#[cfg(test)]
mod tests;
