//! What `run` and `elect` are told.

use std::ffi::OsString;
use std::time::Duration;

use leasehold::kit::parse_duration as duration;

use super::take::{StoreArgs, TakeArgs};

#[derive(Debug, clap::Args)]
#[command(after_long_help = RUN_HELP, after_help = "More, with examples: leasehold run --help")]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) take: TakeArgs,
    /// Name of the lock: 1 to 512 bytes of UTF-8 without control characters
    #[arg(value_name = "NAME", required_unless_present = "names")]
    name: Option<String>,
    /// Several locks instead of one: all of them, in an order that is the same for all, or none
    #[arg(short, long = "name", value_name = "NAME", conflicts_with = "name")]
    names: Vec<String>,
    /// Of several locks, take the first that is free; which, is in LEASEHOLD_NAME
    #[arg(long, conflicts_with = "name")]
    pub(crate) any: bool,
    /// Where a `leasehold run` above has the lock, run under its hold instead of refusing
    #[arg(long, conflicts_with_all = ["names", "max_hold", "at_least", "lock_delay", "once_per"])]
    pub(crate) reenter: bool,
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
    /// How long the command has between SIGTERM and SIGKILL where its lock is about to be lost: three
    /// eighths of --lease at most [default: a fifth of it], or leasehold was killed [default: 2s]
    #[arg(long, value_name = "DUR", value_parser = duration)]
    pub(crate) term_grace: Option<Duration>,
    /// Start this program when the command is ended because of its lock: LEASEHOLD_REASON says why
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) on_lost: Option<OsString>,
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

impl RunArgs {
    /// The locks, in the order in which they were named.
    pub(crate) fn names(&self) -> &[String] {
        self.name.as_ref().map_or(&self.names, std::slice::from_ref)
    }

    /// The first of them.
    pub(crate) fn name(&self) -> &str {
        self.names().first().map_or("", String::as_str)
    }
}

const RUN_HELP: &str = "\
Examples:
  leasehold run nightly-report -- ./report.sh
  leasehold run --wait 30s -q -E 0 sync -- rsync -a src/ d/ # gives up quietly after 30 s
  leasehold run --of 4 --permits 2 db -- ./load             # two of four permits
  leasehold run --shared db -- ./read.sh                    # together with other --shared …
  leasehold run --exclusive db -- ./migrate.sh              # … but never with this one
  leasehold run --once-per 50m hourly -- ./hourly.sh        # from cron on many machines: once
  leasehold run -n stock:a -n stock:b -- ./move.sh          # both, never one
  leasehold run --any -n dev1 -n dev2 -- ./test.sh          # whichever is free: $LEASEHOLD_NAME
  leasehold run --of 4 gpu -- ./train                       # $LEASEHOLD_SLOT says which of the four
  leasehold run stock -- sh -c 'update \"$LEASEHOLD_TOKEN\"'  # the shell is yours to ask for

--once-per counts from when the lock was taken, whatever becomes of the command: one that fails is
not run again before the next period, one whose machine dies is (its lease runs out).

The command finds LEASEHOLD_NAME, LEASEHOLD_TOKEN (the fencing token), LEASEHOLD_SEQUENCER (for
`leasehold check`), LEASEHOLD_STORE and LEASEHOLD_NAMESPACE (as given) in its environment. It runs
in a process group of its own; signals are passed on to that group, and on a terminal it is the
foreground job: Ctrl-C and Ctrl-Z work as ever.

Several locks: `-n a -n b` takes all of them, in an order that is the same for everybody, so that two
callers never wait for each other; `--any` takes the first that is free. LEASEHOLD_NAMES, _TOKENS and
_SEQUENCERS have a line for each, as they were named; LEASEHOLD_NAME, … are the first. A lock that a
`leasehold run` above has is refused (2), or with --reenter the command runs under that hold.

With --of N, LEASEHOLD_SLOT is the number of the permit, 1 to N, that nobody else has meanwhile (of K
permits: K numbers with blanks between). The numbers are locks, too: NAME/slot/1 to NAME/slot/N.

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
the command's group gets SIGTERM when a third of the lease is left (or --term-grace before), and
SIGKILL before the last tenth.
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
            lease: self.lease,
            lock_delay: self.lock_delay,
            label: self.label,
            ..TakeArgs::of(self.store)
        };
        RunArgs {
            take,
            name: None,
            names: vec![self.name],
            any: false,
            reenter: false,
            once_per: None,
            term_grace: None,
            on_lost: None,
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
