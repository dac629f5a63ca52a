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
//! store can undercut. With L the lease (or max-hold, where that is shorter):
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

use std::pin::pin;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use leasehold::{ErrorKind, Guard, Leasehold, State, Watch};
use nix::sys::signal::Signal;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::RunArgs;
use crate::child::{Change, Child, Surroundings, own_lifeline};
use crate::events::{Event, Events, Style};
use crate::exit::{self, Failure};
use crate::progress::{self, Ahead};
use crate::signals::{self, Signals};
use crate::take::{self, take};
use crate::terminal::{self, Terminal};
use crate::watchdog::{Deadlines, Watchdog, terminate};
use crate::{boottime, drive};

/// How long CMD has to end by itself after we were killed, while it keeps the lock alive itself.
const GRACE: Duration = Duration::from_secs(2);
/// How long we wait for a store that does not answer before we leave the rest to the lease.
const FAREWELL: Duration = Duration::from_secs(5);
/// The same when the lease is as good as over.
const SHORT_FAREWELL: Duration = Duration::from_secs(1);

pub(crate) fn main(args: RunArgs) -> ExitCode {
    let style = match (args.json, args.verbose) {
        (true, _) => Style::Json,
        (false, true) => Style::Plain,
        (false, false) => Style::Quiet,
    };
    let mut events = Events::new(style);
    let code = drive(run(&args, &events)).unwrap_or_else(|failure| {
        let Failure { code, message } = failure;
        events.tell(&Event::Failed { code, message });
        End::Code(code)
    });
    events.finish();
    match code {
        End::Code(code) => ExitCode::from(code),
        End::Signal(number) => ExitCode::from(signals::die_of(number)),
        End::Interrupted => {
            terminal::interrupt_our_group();
            ExitCode::from(signals::die_of(Signal::SIGINT as i32))
        }
    }
}

/// How leasehold is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Code(u8),
    /// By the signal that ended our waiting.
    Signal(i32),
    /// With the whole job, by Ctrl-C.
    Interrupted,
}

async fn run(args: &RunArgs, events: &Events) -> Result<End, Failure> {
    let refused = |e| Failure::system("cannot catch signals", e);
    let mut signals = Signals::while_waiting().map_err(refused)?;
    let started = Instant::now();
    let locks = tokio::select! {
        locks = take::connect_to_take(&args.take, started) => locks?,
        number = signals.next() => return Ok(End::Signal(number)),
    };
    events.tell(&Event::Store { store: locks.url().to_owned() });
    let guard = tokio::select! {
        guard = wait(&locks, args, started, events) => guard?,
        number = signals.next() => {
            let _ = tokio::time::timeout(FAREWELL, locks.close()).await;
            return Ok(End::Signal(number));
        }
    };
    signals.all().map_err(refused)?;
    let ended = supervise(args, &locks, guard, signals, events).await;
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

/// The table above, for a guard in this state with this much left of a lease (or max-hold).
fn danger(state: State, left: Duration, lease: Duration) -> Danger {
    match state {
        State::Lost(_) => Danger::Kill,
        _ if left <= kill_margin(lease) => Danger::Kill,
        State::AtRisk(_) => Danger::Terminate,
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
            kill: before_end(lease / 10),
        },
    }
}

/// CMD and all that looks after it.
struct Supervisor<'a> {
    events: &'a Events,
    name: &'a str,
    lease: Duration,
    watch: Watch,
    watchdog: Watchdog,
    child: Child,
    terminal: Option<Terminal>,
    done: Danger,
    at_risk: bool,
    /// When CMD was started, and for how long it may run.
    started: Instant,
    max_hold: Option<Duration>,
}

async fn supervise(
    args: &RunArgs,
    locks: &Leasehold,
    guard: Guard,
    mut signals: Signals,
    events: &Events,
) -> Result<End, Failure> {
    // Before CMD is started, so that none of its SIGCHLD is missed; and whoever started us with
    // SIGCHLD ignored would leave us no status to reap.
    let mut sigchld =
        signal(SignalKind::child()).map_err(|e| Failure::system("cannot catch signals", e))?;
    let mut supervisor = match start(args, locks, &guard, events) {
        Ok(supervisor) => supervisor,
        Err(failure) => {
            give_back(guard, events, FAREWELL).await.ok();
            return Err(failure);
        }
    };
    let timed = supervisor.watch.remaining() < Duration::MAX;
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
fn start<'a>(
    args: &'a RunArgs,
    locks: &Leasehold,
    guard: &Guard,
    events: &'a Events,
) -> Result<Supervisor<'a>, Failure> {
    let lease = take::lease(&args.take);
    let watch = guard.watch();
    let lifeline = match locks.store().lifeline().filter(|_| !args.close) {
        Some(lifeline) => Some(
            own_lifeline(lifeline).map_err(|e| Failure::system("cannot copy the lifeline", e))?,
        ),
        None => None,
    };
    // Without leases and lifeline, the lock dies with us.
    let outlives_us = lifeline.is_some() || locks.guarantees().has_leases();
    let grace = if outlives_us { GRACE } else { Duration::ZERO };
    let mut watchdog = Watchdog::start(grace, deadlines(watch.remaining(), lease, false))?;
    let terminal = Terminal::open();
    let around = Surroundings {
        name: &args.take.name,
        token: guard.token().get(),
        sequencer: guard.sequencer().to_string(),
        watchdog: watchdog.pipe()?,
        tty: terminal.as_ref().and_then(Terminal::for_child),
        lifeline,
    };
    let child = match Child::start(&args.command, around) {
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
    let name = &args.take.name;
    Ok(Supervisor {
        events,
        name,
        lease,
        watch,
        watchdog,
        child,
        terminal,
        done: Danger::None,
        at_risk: false,
        started: Instant::now(),
        max_hold: args.take.max_hold,
    })
}

impl Supervisor<'_> {
    /// Looks at what is left of the lock, does what must be done, and tells the watchdog.
    fn look(&mut self) {
        let (state, left) = (self.watch.state(), self.watch.remaining());
        let danger = danger(state, left, self.lease);
        let name = || self.name.to_owned();
        if danger >= Danger::Terminate && self.done < Danger::Terminate {
            terminate(self.child.group());
            self.done = Danger::Terminate;
            self.at_risk = true;
            let remaining_seconds = left.as_secs_f64();
            self.events.tell(&Event::AtRisk { name: name(), remaining_seconds });
        }
        if danger == Danger::Kill && self.done < Danger::Kill {
            signals::send(self.child.group(), Signal::SIGKILL as i32);
            self.done = Danger::Kill;
            self.events.tell(&match state {
                State::Lost(reason) => Event::Lost { name: name(), reason: reason.to_string() },
                _ => Event::Killed { name: name() },
            });
        }
        if danger == Danger::None && self.done == Danger::Terminate && self.at_risk {
            self.at_risk = false;
            self.events.tell(&Event::Recovered { name: name() });
        }
        if left < Duration::MAX {
            let terminated = self.done >= Danger::Terminate;
            self.watchdog.tell(deadlines(left, self.lease, terminated));
        }
    }

    /// A fraction of the lease, so that the watchdog's news are fresh; less if it is time to kill
    /// before.
    fn until_next_look(&self) -> Duration {
        let left = self.watch.remaining().saturating_sub(kill_margin(self.lease));
        let killed = self.done == Danger::Kill;
        let soonest = Duration::from_millis(2);
        if killed { self.lease / 20 } else { left.min(self.lease / 20) }.max(soonest)
    }

    fn forward(&self, number: i32) {
        self.child.send(number);
        self.events.tell(&Event::Forwarded { signal: number });
    }

    /// After SIGCHLD. Tells whether CMD has ended.
    fn child_changed(&mut self) -> bool {
        while let Some(change) = self.child.change() {
            match change {
                Change::Ended => return true,
                Change::Stopped(signal) => {
                    self.events.tell(&Event::Stopped { signal });
                    if let Some(terminal) = &mut self.terminal {
                        terminal.relay_stop(self.child.group(), signal);
                    }
                }
            }
        }
        if let Err(failure) = self.watchdog.check() {
            // Better unwatched than not at all supervised; the next SIGCHLD tries again.
            self.events.tell(&Event::Warning { message: failure.message });
        }
        false
    }

    /// CMD has ended.
    async fn end(mut self, guard: Guard) -> Result<End, Failure> {
        let group = self.child.group();
        if self.done > Danger::None {
            // What it started must not run on either.
            signals::send(group, Signal::SIGKILL as i32);
        }
        if self.watchdog.done() {
            // We were stopped meanwhile, and are back before we had our own look.
            self.done = Danger::Kill;
        }
        let had_terminal = self.terminal.as_ref().is_some_and(|t| t.take_back(group));
        let reaped = self.child.reap();
        let status =
            reaped.map_err(|e| Failure::system("cannot learn how the command ended", e))?;
        let (code, number) =
            (status.code(), std::os::unix::process::ExitStatusExt::signal(&status));
        self.events.tell(&Event::Exited { code, signal: number });
        let state = self.watch.state();
        let limit = if self.done > Danger::None { SHORT_FAREWELL } else { FAREWELL };
        let released = give_back(guard, self.events, limit).await;
        if self.done > Danger::None {
            let why = match state {
                State::Lost(reason) => reason.to_string(),
                // Two thirds of the (shortened) lease are over before anything is done.
                _ if self
                    .max_hold
                    .is_some_and(|m| self.started.elapsed() + self.lease / 2 >= m) =>
                {
                    "its --max-hold is over".to_owned()
                }
                _ => "its lease could not be renewed in time".to_owned(),
            };
            let what = format!("the command was ended because of its lock {:?}: {why}", self.name);
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
        Ok(Ok(())) => {
            events.tell(&Event::Released { name, token });
            return Ok(());
        }
        Ok(Err(error)) => error,
        Err(_) => leasehold::Error::new(ErrorKind::Unreachable, "no answer to the release"),
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
        let danger = |left| danger(State::Held, Duration::from_millis(left), LEASE);
        assert_eq!(danger(10_000), Danger::None);
        assert_eq!(danger(1251), Danger::None);
        assert_eq!(danger(1250), Danger::Kill);
        let lost = State::Lost(LostReason::Gone);
        assert_eq!(super::danger(lost, Duration::ZERO, LEASE), Danger::Kill);
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
