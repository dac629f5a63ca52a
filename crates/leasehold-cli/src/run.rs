//! `leasehold run`: CMD under a lock.
//!
//! # The order of things
//! Acquire; start the [watchdog](crate::watchdog) and tell it the deadlines; start
//! [CMD](crate::child); pass signals on and relay stops; when CMD has ended, send the watchdog
//! away, reap CMD, release, exit with CMD's code. So at every moment at which CMD runs, the lock is
//! held and a second process would end CMD if this one could not.
//!
//! # The lock is never given away under a running CMD
//! A guard knows until when it is certain ([`Guard::remaining`]), by a clock and a margin that no
//! store can undercut. With L the lease that is held: the one asked for, or max-hold where that is
//! shorter, or what the store granted of it (a session's end may come before, and whoever waited
//! first gets a waiter's lease, which is renewed to a whole one before CMD starts):
//!
//! | left | what happens |
//! |---|---|
//! | L/3 | the guard turns `AtRisk`: SIGTERM to CMD's group, by us |
//! | L/4 | the same, by the watchdog, if we do not run |
//! | L/8 | SIGKILL to CMD's group, by us |
//! | L/10 | the same, by the watchdog, if we do not run |
//! | 0 | the lock may be another's |
//!
//! A renewal may still come between: then nothing more is done to CMD, but it was asked to end, so
//! we exit with 74 all the same once it has. A hold that a person took away (`release --force`) is
//! lost without warning: SIGKILL at once, and only tokens help against what happened before it.
//! Where the store has no leases and there is no max-hold, `remaining` is for ever and none of this
//! applies.
//!
//! max-hold is kept here and not by the guard, whose lock would be another's at its end whatever
//! CMD does: a CMD that became another user (sudo) cannot be ended by us. That is said at once,
//! renewals go on for as long as it lives, and we exit with 74 and the reason.

use std::cell::Cell;
use std::pin::pin;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use leasehold::{ErrorKind, Guard, Leasehold, MIN_LEASE, Released, State, Watch};
use nix::sys::signal::Signal;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::RunArgs;
use crate::child::{Change, Child, NotStarted, Surroundings, own_lifeline};
use crate::drive::drive;
use crate::events::{Event, Events, Style};
use crate::exit::{self, Failure};
use crate::progress::{self, Ahead};
use crate::signals::{self, Signals};
use crate::take::{self, take};
use crate::terminal::{self, Terminal};
use crate::watchdog::{Deadlines, Watchdog, terminate};
use crate::{boottime, nested};

/// How long CMD has to end by itself after we were killed, while it keeps the lock alive itself.
const GRACE: Duration = Duration::from_secs(2);
/// How long we wait for a store that does not answer before we leave the rest to the lease.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The same when the lease is as good as over.
const SHORT_FAREWELL: Duration = Duration::from_secs(1);

pub(crate) fn main(mut args: RunArgs) -> ExitCode {
    let max_hold = settle(&mut args);
    told(Style::of(args.json, args.verbose), async |events, signals| {
        run(&args, max_hold, events, signals, &Cell::default()).await
    })
}

/// Does this, tells what happens meanwhile, and ends as it ends.
pub(crate) fn told(
    style: Style,
    work: impl AsyncFnOnce(&Events, &mut Signals) -> Result<End, Failure>,
) -> ExitCode {
    let mut events = Events::new(style);
    let end = drive(async {
        let signals = Signals::while_waiting();
        let mut signals = signals.map_err(|e| Failure::system("cannot catch signals", e))?;
        work(&events, &mut signals).await
    });
    let end = end.unwrap_or_else(|failure| {
        events.tell(&failure.event());
        End::Code(failure.code)
    });
    events.finish();
    end.exit()
}

/// Says the same in fewer words: once per period is a lock that is kept and only tried for, and
/// max-hold, which is given back, is ours to keep.
fn settle(args: &mut RunArgs) -> Option<Duration> {
    let take = &mut args.take;
    if let Some(period) = args.once_per {
        (take.try_only, take.quiet, take.at_least) = (true, true, Some(period));
        take.conflict_exit_code.get_or_insert(0);
    }
    // The library refuses one of nothing, and says why.
    let max_hold = take.max_hold.take_if(|longest| !longest.is_zero());
    if let Some(longest) = max_hold {
        take.lease = take.lease.min(longest.max(MIN_LEASE));
    }
    max_hold
}

/// How leasehold is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Code(u8),
    /// By the signal that ended our waiting.
    Signal(i32),
    /// With the whole job, by Ctrl-C.
    Interrupted,
}

impl End {
    /// Ends so, or gives the code to end with.
    pub(crate) fn exit(self) -> ExitCode {
        match self {
            Self::Code(code) => ExitCode::from(code),
            Self::Signal(number) => ExitCode::from(signals::die_of(number)),
            Self::Interrupted => {
                terminal::interrupt_our_group();
                ExitCode::from(signals::die_of(Signal::SIGINT as i32))
            }
        }
    }
}

/// Once: waits, runs CMD, releases. Tells since when it has had the lock.
pub(crate) async fn run(
    args: &RunArgs,
    max_hold: Option<Duration>,
    events: &Events,
    signals: &mut Signals,
    held_since: &Cell<Option<Instant>>,
) -> Result<End, Failure> {
    let started = Instant::now();
    let locks = tokio::select! {
        locks = take::connect_to_take(&args.take, started) => locks?,
        number = signals.next_ending() => return Ok(End::Signal(number)),
    };
    events.tell(&Event::Store { store: locks.url().to_owned() });
    let guard = tokio::select! {
        guard = wait(&locks, args, started, events) => guard?,
        number = signals.next_ending() => {
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, locks.close()).await;
            return Ok(End::Signal(number));
        }
    };
    held_since.set(Some(Instant::now()));
    let ends = max_hold.and_then(boottime::after);
    signals.all().map_err(|e| Failure::system("cannot catch signals", e))?;
    let job = Job { args, locks: &locks, events, ends };
    let ended = supervise(&job, guard, signals).await;
    // Whatever is still owed to the store; a release that was answered left nothing.
    let _ = tokio::time::timeout(SHORT_FAREWELL, locks.close()).await;
    ended
}

/// Waits our turn, and says so.
async fn wait(
    locks: &Leasehold,
    args: &RunArgs,
    started: Instant,
    events: &Events,
) -> Result<Guard, Failure> {
    let name = &args.take.name;
    let (news, mut waiting) = tokio::sync::mpsc::unbounded_channel();
    let ahead = Ahead::default();
    let learnt = ahead.clone();
    let program = args.command.first().map(std::path::Path::new);
    // Its name and not its arguments, which may hold what is nobody's business.
    let label = program.and_then(|p| p.file_name()).unwrap_or_default().to_string_lossy();
    let taking = take(locks, &args.take, started, label.into_owned(), move |ahead| {
        if learnt.learn(ahead) {
            let _ = news.send(ahead);
        }
    });
    let mut taking = pin!(taking);
    let mut showing = pin!(progress::show(locks, name, &ahead, |line| events.progress(line)));
    let tell_waiting = |ahead| events.tell(&Event::Waiting { name: name.clone(), ahead });
    let guard = loop {
        tokio::select! {
            guard = &mut taking => break guard,
            Some(ahead) = waiting.recv() => tell_waiting(ahead),
            never = &mut showing, if events.shows_progress() => match never {},
        }
    };
    // Both may have come at once.
    while let Ok(ahead) = waiting.try_recv() {
        tell_waiting(ahead);
    }
    events.progress(String::new());
    let guard = guard?;
    events.tell(&Event::Acquired {
        name: name.clone(),
        token: guard.token().get(),
        waited_seconds: started.elapsed().as_secs_f64(),
    });
    Ok(guard)
}

/// What is to be done to CMD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Danger {
    None,
    Terminate,
    Kill,
}

/// What must be left of a lease for CMD to live on. A little more than the watchdog's tenth, so
/// that it speaks up only if we do not.
fn kill_margin(lease: Duration) -> Duration {
    lease / 8
}

/// How much is left of a lease at the latest when CMD is killed: this long the lock is still held
/// then, for what CMD itself has set off under [another lock](nested).
fn after_kill(lease: Duration) -> Duration {
    lease / 10
}

/// The table above, for a guard in this state with this much left of a lease of that length, and of
/// max-hold.
fn danger(state: State, left: Duration, of_hold: Duration, lease: Duration) -> Danger {
    match state {
        State::Lost(_) => Danger::Kill,
        _ if left.min(of_hold) <= kill_margin(lease) => Danger::Kill,
        State::AtRisk(_) => Danger::Terminate,
        _ if of_hold <= lease / 3 => Danger::Terminate,
        _ => Danger::None,
    }
}

/// What the watchdog is told.
fn deadlines(left: Duration, lease: Duration, terminated: bool) -> Deadlines {
    let before_end = |margin| boottime::after(left.saturating_sub(margin));
    match boottime::after(left) {
        None => Deadlines::default(),
        Some(_) => Deadlines {
            term: before_end((lease / 4).min(left / 2)).filter(|_| !terminated),
            kill: before_end(after_kill(lease)),
        },
    }
}

/// What is to be done.
#[derive(Clone, Copy)]
struct Job<'a> {
    args: &'a RunArgs,
    locks: &'a Leasehold,
    events: &'a Events,
    /// When max-hold is over, by the [boot clock](boottime).
    ends: Option<u64>,
}

impl Job<'_> {
    fn name(&self) -> String {
        self.args.take.name.clone()
    }

    /// What is left of max-hold.
    fn of_hold(&self) -> Duration {
        self.ends.map_or(Duration::MAX, boottime::until)
    }

    /// What is left of lock and max-hold.
    fn left(&self, watch: &Watch) -> Duration {
        watch.remaining().min(self.of_hold())
    }
}

/// CMD and all that looks after it.
struct Supervisor<'a> {
    job: Job<'a>,
    /// The longest lease that there may be, and the longest that there was: L.
    asked: Duration,
    lease: Duration,
    watch: Watch,
    watchdog: Watchdog,
    child: Child,
    terminal: Option<Terminal>,
    done: Danger,
    at_risk: bool,
    /// CMD became another user's, and a signal of ours was refused, or would be.
    is_anothers: bool,
    /// What was done was done because max-hold is over.
    is_over: bool,
}

async fn supervise(job: &Job<'_>, guard: Guard, signals: &mut Signals) -> Result<End, Failure> {
    // Before CMD is started, so that none of its SIGCHLD is missed; and whoever started us with
    // SIGCHLD ignored would leave us no status to reap.
    let mut sigchld =
        signal(SignalKind::child()).map_err(|e| Failure::system("cannot catch signals", e))?;
    let mut supervisor = match start(job, &guard) {
        Ok(supervisor) => supervisor,
        Err(failure) => {
            give_back(guard, job.events, CLOSE_TIMEOUT).await.ok();
            return Err(failure);
        }
    };
    let timed = job.left(&supervisor.watch) < Duration::MAX;
    let mut changes = supervisor.watch.clone();
    supervisor.look();
    loop {
        tokio::select! {
            _ = sigchld.recv() => match supervisor.child_changed() {
                true => break,
                false => supervisor.look(),
            },
            number = signals.next() => supervisor.forward(number),
            _ = changes.changed() => supervisor.look(),
            () = tokio::time::sleep(supervisor.until_next_look()), if timed => supervisor.look(),
        }
    }
    supervisor.end(guard).await
}

/// Starts the watchdog, then CMD.
fn start<'a>(job: &Job<'a>, guard: &Guard) -> Result<Supervisor<'a>, Failure> {
    let Job { args, locks, events, .. } = *job;
    let watch = guard.watch();
    let asked = take::lease(locks, &args.take);
    let lease = asked.min(watch.remaining());
    // Without leases and lifeline, the lock dies with us.
    let inherits = locks.store().lifeline().is_some() && !args.close;
    let outlives_us = inherits || locks.guarantees().has_leases();
    let grace = nested::grace(if outlives_us { GRACE } else { Duration::ZERO });
    let mut watchdog = Watchdog::start(grace, deadlines(job.left(&watch), lease, false))?;
    let timed = job.left(&watch) < Duration::MAX;
    let after_kill = match outlives_us {
        true => timed.then(|| after_kill(lease)),
        false => Some(Duration::ZERO),
    };
    let terminal = Terminal::open();
    let started = start_child(job, guard, &mut watchdog, terminal.as_ref(), |left| {
        let deadline = deadlines(left, lease, false).kill;
        (deadline, nested::handed_down(&guard.sequencer(), after_kill))
    });
    let child = match started {
        Ok(child) => child,
        Err(failure) => {
            if let Some(terminal) = &terminal {
                terminal.take_back_from_the_dead();
            }
            watchdog.done();
            return Err(failure);
        }
    };
    watchdog.watches(child.group());
    events.tell(&Event::Started { pid: child.group().as_raw() });
    Ok(Supervisor {
        job: *job,
        asked,
        lease,
        watch,
        watchdog,
        child,
        terminal,
        done: Danger::None,
        at_risk: false,
        is_anothers: false,
        is_over: false,
    })
}

/// Starts CMD under a watchdog that is there, in the time that is left.
fn start_child(
    job: &Job<'_>,
    guard: &Guard,
    watchdog: &mut Watchdog,
    terminal: Option<&Terminal>,
    terms: impl Fn(Duration) -> (Option<u64>, Vec<(&'static str, String)>),
) -> Result<Child, Failure> {
    let Job { args, locks, .. } = *job;
    let take = &args.take;
    loop {
        let lifeline = locks.store().lifeline().filter(|_| !args.close).map(own_lifeline);
        let lifeline = lifeline.transpose();
        let lifeline = lifeline.map_err(|e| Failure::system("cannot copy the lifeline", e))?;
        let (deadline, mut environment) = terms(job.left(&guard.watch()));
        environment.extend([
            ("LEASEHOLD_NAME", take.name.clone()),
            ("LEASEHOLD_TOKEN", guard.token().to_string()),
            ("LEASEHOLD_SEQUENCER", guard.sequencer().to_string()),
        ]);
        // What runs under the lock means the same store.
        environment.extend(take.store.environment());
        let tty = terminal.and_then(Terminal::for_child);
        let around =
            Surroundings { environment, watchdog: watchdog.pipe()?, tty, lifeline, deadline };
        match Child::start(&args.command, around) {
            Ok(child) => return Ok(child),
            Err(NotStarted::Failed(failure)) => return Err(failure),
            Err(NotStarted::Unwatched) => watchdog.replace_broken()?,
            Err(NotStarted::TooLate) => {
                let what = format!(
                    "the lock {:?} was lost before the command could be started: it was not run",
                    take.name
                );
                return Err(Failure::new(exit::LOST, what));
            }
        }
    }
}

impl Supervisor<'_> {
    /// Looks at what is left of the lock, does what must be done, and tells the watchdog.
    fn look(&mut self) {
        let (state, left, of_hold) =
            (self.watch.state(), self.watch.remaining(), self.job.of_hold());
        self.lease = self.lease.max(left.min(self.asked));
        let danger = danger(state, left, of_hold, self.lease);
        let (events, group) = (self.job.events, self.child.group());
        let timed = left.min(of_hold) < Duration::MAX;
        if timed && signals::is_anothers(group) {
            self.say_that_it_is_anothers();
        }
        if danger >= Danger::Terminate && self.done < Danger::Terminate {
            let sent = terminate(group).is_ok();
            self.done = Danger::Terminate;
            self.at_risk = true;
            self.is_over = of_hold <= left;
            let remaining_seconds = left.min(of_hold).as_secs_f64();
            events.tell(&Event::AtRisk { name: self.job.name(), remaining_seconds, sent });
        }
        if danger == Danger::Kill && self.done < Danger::Kill {
            let sent = signals::send(group, Signal::SIGKILL as i32).is_ok();
            self.done = Danger::Kill;
            let name = self.job.name();
            events.tell(&match state {
                State::Lost(reason) => Event::Lost { name, reason: reason.to_string() },
                _ => Event::Killed { name, sent },
            });
            if !sent {
                self.say_that_it_is_anothers();
            }
            // There is nothing left for it to do unless we die.
            self.watchdog.tell(Deadlines::default());
        }
        if danger == Danger::None && self.done == Danger::Terminate && self.at_risk {
            self.at_risk = false;
            events.tell(&Event::Recovered { name: self.job.name() });
        }
        if timed && self.done < Danger::Kill {
            let terminated = self.done >= Danger::Terminate;
            self.watchdog.tell(deadlines(left.min(of_hold), self.lease, terminated));
        }
    }

    /// Once, as soon as it is seen.
    fn say_that_it_is_anothers(&mut self) {
        if !std::mem::replace(&mut self.is_anothers, true) {
            let message = format!(
                "the command runs as another user, whom leasehold may not signal: it cannot be \
                 ended when its lock {:?} is lost",
                self.job.args.take.name
            );
            self.job.events.tell(&Event::Warning { message });
        }
    }

    /// A fraction of the lease, so that the watchdog's news are fresh; less if it is time to kill
    /// before.
    fn until_next_look(&self) -> Duration {
        let left = self.job.left(&self.watch).saturating_sub(kill_margin(self.lease));
        let killed = self.done == Danger::Kill;
        let soonest = Duration::from_millis(2);
        if killed { self.lease / 20 } else { left.min(self.lease / 20) }.max(soonest)
    }

    fn forward(&self, number: i32) {
        self.child.send(number);
        self.job.events.tell(&Event::Forwarded { signal: number });
    }

    /// After SIGCHLD. Tells whether CMD has ended.
    fn child_changed(&mut self) -> bool {
        while let Some(change) = self.child.change() {
            match change {
                Change::Ended => return true,
                Change::Stopped(signal) => {
                    self.job.events.tell(&Event::Stopped { signal });
                    if let Some(terminal) = &mut self.terminal {
                        terminal.relay_stop(self.child.group(), signal);
                    }
                }
            }
        }
        if let Err(failure) = self.watchdog.check() {
            // Better unwatched than not at all supervised; the next SIGCHLD tries again.
            self.job.events.tell(&Event::Warning { message: failure.message });
        }
        false
    }

    /// CMD has ended.
    async fn end(mut self, guard: Guard) -> Result<End, Failure> {
        let group = self.child.group();
        if self.done > Danger::None {
            // What it started must not run on either.
            self.is_anothers |= signals::send(group, Signal::SIGKILL as i32).is_err();
        }
        if self.watchdog.done() {
            // We were stopped meanwhile, and are back before we had our own look.
            self.is_over |= self.job.of_hold() <= self.lease / 3;
            self.done = Danger::Kill;
        }
        let had_terminal = self.terminal.as_ref().is_some_and(|t| t.take_back(group));
        let reaped = self.child.reap();
        let status =
            reaped.map_err(|e| Failure::system("cannot learn how the command ended", e))?;
        let (code, number) =
            (status.code(), std::os::unix::process::ExitStatusExt::signal(&status));
        let events = self.job.events;
        events.tell(&Event::Exited { code, signal: number });
        let state = self.watch.state();
        if self.done > Danger::None {
            // A leasehold that was killed with CMD ends its own command in this time.
            tokio::time::sleep(after_kill(self.lease).min(self.job.left(&self.watch))).await;
        }
        let limit = if self.done > Danger::None { SHORT_FAREWELL } else { CLOSE_TIMEOUT };
        let released = give_back(guard, events, limit).await;
        if self.done > Danger::None {
            let why = match state {
                State::Lost(reason) => reason.to_string(),
                _ if self.is_over => "its --max-hold is over".to_owned(),
                _ => "its lease could not be renewed in time".to_owned(),
            };
            let what = match self.is_anothers {
                true => "should have been ended, but runs as another user,",
                false => "was ended",
            };
            let what =
                format!("the command {what} because of its lock {:?}: {why}", self.job.name());
            return Err(Failure::new(exit::LOST, what));
        }
        released?;
        let interrupted = had_terminal && number == Some(Signal::SIGINT as i32);
        Ok(if interrupted { End::Interrupted } else { End::Code(exit::of(status)) })
    }
}

/// Releases the lock. That the store does not answer is said, but is no failure of CMD's: the
/// lease ends the hold.
async fn give_back(guard: Guard, events: &Events, limit: Duration) -> Result<(), Failure> {
    let (name, token) = (guard.name().as_str().to_owned(), guard.token().get());
    let error = match tokio::time::timeout(limit, guard.release()).await {
        Ok(Ok(Released::Now | Released::Shared)) => {
            events.tell(&Event::Released { name, token });
            return Ok(());
        }
        Ok(Err(error)) => error,
        Ok(Ok(_)) | Err(_) => {
            leasehold::Error::new(ErrorKind::Unreachable, "no answer to the release")
        }
    };
    let lost = error.kind() == ErrorKind::Lost;
    let message = match lost {
        true => format!("lost {name:?} while the command ran: {error}"),
        false => format!("{error}; {name:?} is free when its lease is over"),
    };
    if lost {
        return Err(Failure::new(exit::LOST, message));
    }
    events.tell(&Event::Warning { message });
    Ok(())
}

#[cfg(test)]
mod tests {
    use leasehold::LostReason;

    use super::*;

    const LEASE: Duration = Duration::from_secs(10);

    #[test]
    fn a_command_is_killed_in_time_before_the_end() {
        let never = Duration::MAX;
        let danger = |left| danger(State::Held, Duration::from_millis(left), never, LEASE);
        assert_eq!(danger(10_000), Danger::None);
        assert_eq!(danger(1251), Danger::None);
        assert_eq!(danger(1250), Danger::Kill);
        let lost = State::Lost(LostReason::Gone);
        assert_eq!(super::danger(lost, Duration::ZERO, never, LEASE), Danger::Kill);
        // And by max-hold on a store without leases.
        let of_hold = |left| super::danger(State::Held, never, left, LEASE);
        assert_eq!(of_hold(LEASE), Danger::None);
        assert_eq!(of_hold(LEASE / 3), Danger::Terminate);
        assert_eq!(of_hold(LEASE / 8), Danger::Kill);
    }

    #[test]
    fn without_leases_the_watchdog_has_no_deadline() {
        assert_eq!(deadlines(Duration::MAX, LEASE, false), Deadlines::default());
    }

    #[test]
    fn the_watchdog_terminates_after_us_and_kills_before_the_end() {
        let now = boottime::now();
        let told = deadlines(LEASE, LEASE, false);
        // They count from some moment of the call.
        let took = boottime::now() - now;
        let (term, kill) = (told.term.unwrap() - now, told.kill.unwrap() - now);
        assert!((7_500_000_000..=7_500_000_000 + took).contains(&term), "{term} in {took}");
        assert!((9_000_000_000..=9_000_000_000 + took).contains(&kill), "{kill} in {took}");
        assert_eq!(deadlines(LEASE, LEASE, true).term, None);
        // However little is left, TERM comes no earlier than half of it from now.
        let (now, told) = (boottime::now(), deadlines(LEASE / 5, LEASE, false));
        assert!(told.term.unwrap() - now >= 1_000_000_000);
    }
}
