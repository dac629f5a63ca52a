//! `leasehold run`: runs CMD while holding one lock or several.
//!
//! # The order of things
//! 1. Acquire the locks.
//! 2. Start the [watchdog](crate::watchdog) with the deadlines.
//! 3. Start [CMD](crate::child), forward signals and relay stops.
//! 4. When CMD has ended, dismiss the watchdog, reap CMD, release the locks, and exit with CMD's
//!    code.
//!
//! So whenever CMD runs, the lock is held, and a second process would stop CMD if this one could
//! not. See [supervise](crate::supervise).

use std::cell::Cell;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::store::Place;
use leasehold::{Client, MIN_LEASE};

use crate::args::RunArgs;
use crate::block_on::block_on;
use crate::command_end::CommandEnd;
use crate::events::{Event, Events, Style};
use crate::exit::{Failure, USAGE};
use crate::held_locks::HeldLocks;
use crate::kill_policy::lease_for;
use crate::progress::{self, Ahead};
use crate::signals::Signals;
use crate::supervise::{Job, SHORT_FAREWELL, supervise};
use crate::take::{self, CLOSE_TIMEOUT, Taking};
use crate::{boottime, nested, priority, reenter};

pub(crate) fn main(mut args: RunArgs) -> ExitCode {
    let max_hold = settle(&mut args);
    report_outcome(Style::of(args.json, args.verbose), async |events, signals| {
        run(&args, max_hold, events, signals, &Term::default()).await
    })
}

/// Runs `work` and reports its failure, if any. Returns the exit code, or ends this process by a
/// signal.
pub(crate) fn report_outcome(
    style: Style,
    work: impl AsyncFnOnce(&Events, &mut Signals) -> Result<CommandEnd, Failure>,
) -> ExitCode {
    priority::raise();
    let events = Events::new(style);
    let end = block_on(async {
        let signals = Signals::while_waiting();
        let mut signals = signals.map_err(|e| Failure::system("cannot catch signals", e))?;
        work(&events, &mut signals).await
    });
    let end = end.unwrap_or_else(|failure| {
        events.print(&failure.event());
        CommandEnd::Code(failure.code)
    });
    events.finish();
    end.exit()
}

/// Translates `--once-per` to `--try` and `--min-hold`. Unlike `--try`, it retries while the store
/// is unreachable, because otherwise the job would not run in this period. Removes and returns
/// `--max-hold`, which is enforced here and not by the guard.
pub(crate) fn settle(args: &mut RunArgs) -> Option<Duration> {
    let take = &mut args.take;
    if let Some(period) = args.once_per {
        (take.try_only, take.quiet, take.min_hold) = (true, true, Some(period));
        take.conflict_exit_code.get_or_insert(0);
        take.connect_timeout.get_or_insert(take::patience(take));
    }
    // The library rejects zero with a message.
    let max_hold = take.max_hold.take_if(|longest| !longest.is_zero());
    if let Some(longest) = max_hold {
        take.lease = take.lease.min(longest.max(MIN_LEASE));
    }
    max_hold
}

/// How far a run has come.
#[derive(Debug, Default)]
pub(crate) struct Term {
    /// Whether the store has accepted a claim, in this run or an earlier one.
    pub(crate) was_accepted: Cell<bool>,
    /// When the locks were acquired.
    pub(crate) held_since: Cell<Option<Instant>>,
}

/// Acquires the locks, runs CMD and releases the locks, once. `term` receives how far it comes.
pub(crate) async fn run(
    args: &RunArgs,
    max_hold: Option<Duration>,
    events: &Events,
    signals: &mut Signals,
    term: &Term,
) -> Result<CommandEnd, Failure> {
    let started = Instant::now();
    let locks = tokio::select! {
        locks = take::connect_to_take(&args.take, started) => locks?,
        number = signals.next_ending() => return Ok(CommandEnd::Signal(number)),
    };
    events.print(&Event::Store { store: locks.url().to_owned() });
    check_grace(args, max_hold, &locks)?;
    if args.reenter
        && let Some(above) = nested::held_above(&locks, &args.take, args.name()).await
    {
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, locks.close()).await;
        return Err(reenter::exec(args, &above, events));
    }
    let waited = tokio::select! {
        held = wait(&locks, args, started, events, term) => held.map_err(|failure| {
            Err(match args.once_per {
                Some(_) => failure.naming("--min-hold", "--once-per"),
                None => failure,
            })
        }),
        number = signals.next_ending() => Err(Ok(CommandEnd::Signal(number))),
    };
    let held = match waited {
        Ok(held) => held,
        Err(end) => {
            // This withdraws the claims. Otherwise the store could grant the lock to a process that
            // no longer exists.
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, locks.close()).await;
            return end;
        }
    };
    term.was_accepted.set(true);
    term.held_since.set(Some(Instant::now()));
    let ends = max_hold.and_then(boottime::after);
    signals.all().map_err(|e| Failure::system("cannot catch signals", e))?;
    let job = Job { args, locks: &locks, events, ends };
    let ended = supervise(&job, held, signals).await;
    // This sends a release that was not answered yet.
    let _ = tokio::time::timeout(SHORT_FAREWELL, locks.close()).await;
    ended
}

/// Fails if the lease is too short for the grace period of `--kill-after`.
fn check_grace(args: &RunArgs, max_hold: Option<Duration>, locks: &Client) -> Result<(), Failure> {
    let Some(grace) = args.kill_after else { return Ok(()) };
    let ends = max_hold.is_some() || locks.guarantees().has_leases();
    let least = lease_for(grace);
    if !ends || least <= take::lease(locks, &args.take) {
        return Ok(());
    }
    let what = format!("--kill-after {grace:?} is too long for the lease");
    let hint = format!("set --lease (and --max-hold, if given) to at least {least:?}");
    Err(Failure::new(USAGE, what).hint(hint))
}

/// Acquires the locks, and reports the wait.
async fn wait(
    locks: &Client,
    args: &RunArgs,
    started: Instant,
    events: &Events,
    term: &Term,
) -> Result<HeldLocks, Failure> {
    let (news, mut waiting) = tokio::sync::mpsc::unbounded_channel();
    let ahead = Ahead::default();
    let learnt = ahead.clone();
    let program = args.command.first().map(std::path::Path::new);
    // The label is the program's name without its arguments, which may contain secrets.
    let label = program.and_then(|p| p.file_name()).unwrap_or_default().to_string_lossy();
    let on_waiting = move |name: &str, place: Place| {
        if learnt.learn(name, place.ahead) {
            let _ = news.send((name.to_owned(), place.ahead));
        }
    };
    let (label, on_waiting) = (label.into_owned(), Arc::new(on_waiting));
    let taking = Taking { locks, args: &args.take, started, label, on_waiting };
    let mut taking = pin!(async {
        let names = args.names();
        let guards = if args.any { taking.any(names).await } else { taking.all(names).await };
        HeldLocks::of(guards?, &taking).await
    });
    let mut showing = pin!(progress::show(locks, &ahead, |line| events.progress(line)));
    let tell_waiting = |(name, ahead)| events.print(&Event::Waiting { name, ahead });
    let held = loop {
        tokio::select! {
            held = &mut taking => break held,
            Some(news) = waiting.recv() => {
                term.was_accepted.set(true);
                tell_waiting(news);
            }
            never = &mut showing, if events.shows_progress() => match never {},
        }
    };
    // The grant and new positions may have arrived at the same time.
    while let Ok(news) = waiting.try_recv() {
        term.was_accepted.set(true);
        tell_waiting(news);
    }
    events.progress(String::new());
    let held = held?;
    for (name, token) in held.tokens() {
        let waited_seconds = started.elapsed().as_secs_f64();
        events.print(&Event::Held { name, token: token.get(), waited_seconds });
    }
    Ok(held)
}
