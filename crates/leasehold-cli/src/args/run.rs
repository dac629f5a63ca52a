//! The arguments of `run` and `elect`.

use std::ffi::OsString;
use std::time::Duration;

use clap::error::ErrorKind;
use leasehold::store::kit::parse_duration as duration;

use super::heading;
use super::take::{StoreArgs, TakeArgs};

pub(super) const RUN_USAGE: &str = "leasehold run [OPTIONS] NAME CMD...\n       \
                                    leasehold run [OPTIONS] --name NAME... CMD...";

#[derive(Debug, clap::Args)]
#[command(
    override_usage = RUN_USAGE,
    after_help = "All options, with examples: leasehold run --help",
    after_long_help = RUN_HELP,
)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) take: TakeArgs,
    /// Take several locks together (repeat --name for each)
    ///
    /// Either all of them are acquired or none. The order is the same for every client, so two
    /// commands never deadlock.
    #[arg(long = "name", value_name = "NAME", help_heading = heading::LOCK)]
    names: Vec<String>,
    /// Take the first free lock of several; LEASEHOLD_NAME is its name
    #[arg(long, requires = "names", hide_short_help = true, help_heading = heading::LOCK)]
    pub(crate) any: bool,
    /// Run at most once per DUR, across all machines (for cron)
    ///
    /// A later attempt exits with 0 and prints nothing (-E changes the code, -v reports the
    /// attempt). Give a little less than the period of the cron job.
    #[arg(
        long,
        value_name = "DUR",
        value_parser = duration,
        conflicts_with_all = ["try_only", "wait", "min_hold"],
        help_heading = heading::COMMAND,
    )]
    pub(crate) once_per: Option<Duration>,
    /// Time between SIGTERM and SIGKILL when the lock is lost
    ///
    /// At most three eighths of --lease. [default: a fifth of --lease, or 2s if leasehold itself
    /// was killed]
    #[arg(
        long,
        alias = "term-grace",
        value_name = "DUR",
        value_parser = duration,
        hide_short_help = true,
        help_heading = heading::COMMAND,
    )]
    pub(crate) kill_after: Option<Duration>,
    /// Start PROGRAM if the command is stopped because of its lock
    ///
    /// LEASEHOLD_REASON gives the reason. leasehold does not wait for PROGRAM.
    #[arg(
        long,
        value_name = "PROGRAM",
        hide_short_help = true,
        help_heading = heading::COMMAND,
    )]
    pub(crate) on_lost: Option<OsString>,
    /// Do not let the command inherit the lock's file descriptor (file:)
    ///
    /// The lock is then free as soon as leasehold itself has ended.
    #[arg(
        short_alias = 'o',
        long,
        alias = "close",
        hide_short_help = true,
        help_heading = heading::COMMAND,
    )]
    pub(crate) no_inherit: bool,
    /// Reuse the lock of an enclosing `leasehold run` instead of failing
    #[arg(
        long,
        conflicts_with_all = ["names", "max_hold", "min_hold", "lock_delay", "once_per"],
        hide_short_help = true,
        help_heading = heading::COMMAND,
    )]
    pub(crate) reenter: bool,
    /// Report events on stderr
    #[arg(short, long, help_heading = heading::OUTPUT)]
    pub(crate) verbose: bool,
    /// Report events on stderr as JSON, one object per line
    #[arg(long, help_heading = heading::OUTPUT)]
    pub(crate) json: bool,
    /// Name of the lock, then the command and its arguments
    ///
    /// A name has 1 to 512 bytes of UTF-8 without control characters. The command is executed
    /// directly, not by a shell.
    #[arg(
        value_names = ["NAME", "CMD"],
        required = true,
        num_args = 1..,
        trailing_var_arg = true,
    )]
    words: Vec<OsString>,
    #[arg(skip)]
    pub(crate) command: Vec<OsString>,
}

impl RunArgs {
    /// Returns the names of the locks, in the order in which they were given.
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the name of the first lock.
    pub(crate) fn name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }
}

/// A subcommand with the positional arguments NAME CMD….
///
/// clap treats all of them as one argument, so that options after the first word of CMD belong to
/// CMD even if `--name` gives the names.
pub(super) trait NamesAndCommand {
    const SUBCOMMAND: &'static str;
    /// Returns the positional arguments as given.
    fn words(&self) -> &[OsString];
    /// Returns whether `--name` was given.
    fn is_named(&self) -> bool;
    fn set(&mut self, name: Option<String>, command: Vec<OsString>);

    /// Splits the words into NAME and CMD. `name` is NAME, if it was already removed from the
    /// words.
    ///
    /// # Errors
    /// - `ArgumentConflict`: NAME was given in both ways.
    /// - `InvalidUtf8`: NAME is not valid UTF-8.
    /// - `MissingRequiredArgument`: CMD is missing.
    fn split(&mut self, name: Option<OsString>) -> Result<(), (ErrorKind, String)> {
        let error = |kind, message: &str| Err((kind, message.to_owned()));
        if name.is_some() && self.is_named() {
            let message = "the argument '--name <NAME>' cannot be used with a NAME before CMD";
            return error(ErrorKind::ArgumentConflict, message);
        }
        let is_named = self.is_named() || name.is_some();
        let mut words = self.words().to_vec();
        let name = match name {
            None if !is_named => Some(words.remove(0)),
            name => name,
        };
        let name = match name.map(OsString::into_string).transpose() {
            Ok(name) => name,
            Err(_) => return error(ErrorKind::InvalidUtf8, "the lock's name is not valid UTF-8"),
        };
        if !is_named && words.first().is_some_and(|word| word == "--") {
            words.remove(0);
        }
        if words.is_empty() {
            let name = name.unwrap_or_default();
            let message = format!(
                "no command to run while {name:?} is held\n\n  \
                 tip: the lock's name comes first: leasehold {} NAME CMD...",
                Self::SUBCOMMAND
            );
            return error(ErrorKind::MissingRequiredArgument, &message);
        }
        self.set(name, words);
        Ok(())
    }
}

impl NamesAndCommand for RunArgs {
    const SUBCOMMAND: &'static str = "run";

    fn words(&self) -> &[OsString] {
        &self.words
    }

    fn is_named(&self) -> bool {
        !self.names.is_empty()
    }

    fn set(&mut self, name: Option<String>, command: Vec<OsString>) {
        self.names.extend(name);
        self.command = command;
    }
}

const RUN_HELP: &str = "\
Options go before CMD. Everything after the first word of CMD belongs to CMD. `--` before CMD is
optional, unless CMD begins with a dash.

Examples:
  leasehold run nightly ./report.sh                      wait for the lock, then run
  leasehold run --try backup ./backup.sh                 exit with 75 if the lock is taken
  leasehold run --wait 30s -q -E 0 sync rsync -a s/ d/   give up quietly after 30 s
  leasehold run --max 3 convert ./convert a.png          at most three at once
  leasehold run --max 4 --permits 2 db ./load            two of four permits
  leasehold run --shared db ./read.sh                    together with other readers, ...
  leasehold run --exclusive db ./migrate.sh              ... but never with this writer
  leasehold run --once-per 50m hourly ./hourly.sh        once per hour, from cron on many machines
  leasehold run --name stock:a --name stock:b ./move.sh  both locks or neither
  leasehold run --any --name dev1 --name dev2 ./test.sh  the first lock that is free
  leasehold run stock sh -c 'update \"$LEASEHOLD_TOKEN\"'  start a shell for shell syntax

Environment of the command:
  LEASEHOLD_NAME         name of the lock (of the first one, if there are several)
  LEASEHOLD_TOKEN        its fencing token
  LEASEHOLD_SEQUENCER    the hold as text, for `leasehold verify`
  LEASEHOLD_NAMES, LEASEHOLD_TOKENS, LEASEHOLD_SEQUENCERS
                         the same for all locks, one per line, in the order of --name
  LEASEHOLD_SLOT         with --max N: the number of the permit, 1 to N, unique among the holders
                         (with --permits K: K numbers, separated by spaces)
  LEASEHOLD_STORE, LEASEHOLD_NAMESPACE
                         the store and the namespace in use
  LEASEHOLD_RUN          marks the processes of this run
  LEASEHOLD_REASON       for --on-lost: why the command was stopped

Exit status:
  The exit status of the command, or 128+n if signal n killed it. Otherwise:
    2  usage error, invalid name or option, or a lock of another kind has this name
   69  the store is unreachable (for 15 s, --lease or --connect-timeout) or unusable
   71  the operating system refused (out of processes or files)
   74  the lock was lost, or about to be lost: the command was stopped, or not started
   75  the lock was not acquired (-E changes this)
  126  the command cannot be executed
  127  the command was not found

If the lock is lost:
  leasehold never releases the lock while the command runs. If the lease cannot be renewed, the
  command and its descendants get SIGTERM when a third of the lease is left (--kill-after changes
  this), and SIGKILL before the last tenth, even if timeout, setsid, su -c or parallel started them.
  A watchdog process does the same if leasehold itself is killed or paused. file: has no leases:
  the command inherits the lock, as with flock.

Signals:
  The command runs in a process group of its own. leasehold forwards signals to that group. On a
  terminal the command is the foreground job: Ctrl-C and Ctrl-Z work as usual.

Once per period:
  The period of --once-per begins when the lock is acquired. A command that fails is not run again
  before the next period. If its machine crashes, another machine may run it when the lease expires.

Slots:
  The numbers in LEASEHOLD_SLOT are locks as well, named NAME/slot/1 to NAME/slot/N. (Of a NAME over
  240 bytes, a hash replaces the end.)

Nested runs:
  `leasehold run` for a lock that an enclosing `leasehold run` holds exits with 2, because waiting
  would be a deadlock. With --reenter the command runs under the enclosing hold.

Limitations:
  leasehold cannot stop
  - descendants that outlive a command which exits on its own (daemons), or that were started with
    LEASEHOLD_RUN=detached
  - a daemon with an empty environment, if leasehold itself was killed
  - a process that switches to another user (sudo, setuid): leasehold warns, renews the lock while the
    process runs, and exits with 74
  - work that the command started on other machines
  If the machine is suspended until the lease expires, the command is stopped only when it resumes.
  A store that fails over to a member without the latest writes can grant a lock twice: the old
  member may keep renewing the first hold until it is demoted.
  While a job is stopped with Ctrl-Z, its lease is not renewed. On a store with leases, the command
  is terminated before the lease expires.
  leasehold itself needs processor time to renew: with a small CPU quota, use 15 s or more.
  Where this matters, check the fencing token at the resource.";

#[derive(Debug, clap::Args)]
#[command(
    override_usage = "leasehold elect [OPTIONS] NAME CMD...",
    after_help = "More: leasehold elect --help",
    after_long_help = ELECT_HELP
)]
pub(crate) struct ElectArgs {
    /// Time until another machine takes over from a crashed leader
    ///
    /// Stores without leases (file:) notice a crash immediately and ignore this.
    #[arg(
        long,
        alias = "ttl",
        value_name = "DUR",
        value_parser = duration,
        default_value = "15s",
        help_heading = heading::LEASE,
    )]
    pub(crate) lease: Duration,
    /// Time without any leader after a leader crashed
    ///
    /// Needs a store that records crashed holders: SQLite, PostgreSQL, MySQL, Redis or etcd.
    #[arg(long, value_name = "DUR", value_parser = duration, help_heading = heading::LEASE)]
    pub(crate) lock_delay: Option<Duration>,
    /// End each term after DUR, so that another candidate leads
    #[arg(long, value_name = "DUR", value_parser = duration, help_heading = heading::LEASE)]
    pub(crate) max_hold: Option<Duration>,
    /// Time between SIGTERM and SIGKILL when the lock is lost
    ///
    /// At most three eighths of --lease.
    #[arg(long, value_name = "DUR", value_parser = duration, help_heading = heading::COMMAND)]
    pub(crate) kill_after: Option<Duration>,
    /// Start PROGRAM if the command is stopped because of its lock
    ///
    /// LEASEHOLD_REASON gives the reason. leasehold does not wait for PROGRAM.
    #[arg(long, value_name = "PROGRAM", help_heading = heading::COMMAND)]
    pub(crate) on_lost: Option<OsString>,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Text shown for this candidate, by `show` and to waiters
    #[arg(long, value_name = "TEXT", help_heading = heading::OUTPUT)]
    pub(crate) label: Option<String>,
    /// Report events on stderr
    #[arg(short, long, help_heading = heading::OUTPUT)]
    pub(crate) verbose: bool,
    /// Report events on stderr as JSON, one object per line
    #[arg(long, help_heading = heading::OUTPUT)]
    pub(crate) json: bool,
    /// Name of the leader's lock, then the command and its arguments
    ///
    /// The command is executed directly, not by a shell.
    #[arg(
        value_names = ["NAME", "CMD"],
        required = true,
        num_args = 1..,
        trailing_var_arg = true,
    )]
    words: Vec<OsString>,
    #[arg(skip)]
    pub(crate) name: String,
    #[arg(skip)]
    pub(crate) command: Vec<OsString>,
}

impl NamesAndCommand for ElectArgs {
    const SUBCOMMAND: &'static str = "elect";

    fn words(&self) -> &[OsString] {
        &self.words
    }

    fn is_named(&self) -> bool {
        false
    }

    fn set(&mut self, name: Option<String>, command: Vec<OsString>) {
        self.name = name.unwrap_or_default();
        self.command = command;
    }
}

impl ElectArgs {
    /// Returns the arguments of the `run` for one term. That `run` waits for the lock without
    /// limit.
    pub(crate) fn term(self) -> RunArgs {
        let take = TakeArgs {
            lease: self.lease,
            max_hold: self.max_hold,
            lock_delay: self.lock_delay,
            label: self.label,
            ..TakeArgs::of(self.store)
        };
        RunArgs {
            take,
            names: vec![self.name],
            any: false,
            reenter: false,
            once_per: None,
            kill_after: self.kill_after,
            on_lost: self.on_lost,
            no_inherit: false,
            verbose: self.verbose,
            json: self.json,
            words: Vec::new(),
            command: self.command,
        }
    }
}

const ELECT_HELP: &str = "\
Example:
  leasehold elect --store etcd://a,b,c scheduler ./scheduler

Each term is one `leasehold run`: see its help for signals, limitations and what happens when the
lock is lost. LEASEHOLD_TOKEN is the number of the term. The command is stopped before another
machine can take over.

When a term ends, this candidate rejoins the queue after a pause of 1 to 30 s. It does so if the
command exited, if the lock was lost, and if the store was unreachable. SIGINT, SIGQUIT and SIGTERM
are forwarded to the command and end the candidacy.

Exit status:
  The exit status of the command after one of these signals, or 128+n if signal n arrived while it
  was waiting; 2, 126 and 127 as for `leasehold run`";
