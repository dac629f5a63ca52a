//! Supervises CMD while it runs under its locks, and ends it if its locks require that. The
//! [kill_policy](crate::kill_policy) module defines when CMD is stopped because of its locks.

use std::time::{Duration, Instant};

use leasehold::{Client, ErrorKind, LostReason, Released, State};
use nix::sys::signal::Signal;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::RunArgs;
use crate::child::{Change, Child, NotStarted, Surroundings, own_lifeline};
use crate::command_end::CommandEnd;
use crate::descendants::{Descendants, Survivors};
use crate::events::{Event, Events};
use crate::exit::{self, Failure};
use crate::held_locks::{HeldLocks, LocksWatch};
use crate::kill_policy::{Danger, after_kill, danger, deadlines, until_next};
use crate::mark::{self, Mark};
use crate::on_lost::OnLost;
use crate::signals::{self, Signals};
use crate::take::{self, CLOSE_TIMEOUT};
use crate::terminal::Terminal;
use crate::watchdog::{Deadlines, Watchdog, terminate};
use crate::{boottime, nested, orphans};

/// Default time that CMD has to end on its own after leasehold was killed. It applies if CMD's
/// inherited lifeline or a lease keeps the lock meanwhile.
const GRACE: Duration = Duration::from_secs(2);
/// Time limit for an unresponsive store when the lease has almost expired anyway.
pub(crate) const SHORT_FAREWELL: Duration = Duration::from_secs(1);

/// Time that the kernel gets to end killed processes.
const TO_KILL: Duration = Duration::from_secs(1);
/// Pause between two attempts to kill processes of CMD that could not be killed.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// What to run, and with which locks.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) args: &'a RunArgs,
    pub(crate) locks: &'a Client,
    pub(crate) events: &'a Events,
    /// The moment when max-hold ends, in [boot-clock](boottime) nanoseconds.
    pub(crate) ends: Option<u64>,
}

impl Job<'_> {
    /// Returns the time left until max-hold ends.
    fn of_hold(&self) -> Duration {
        self.ends.map_or(Duration::MAX, boottime::until)
    }

    /// Returns the time left until the lock is uncertain or max-hold ends, whichever comes first.
    fn left(&self, watch: &LocksWatch) -> Duration {
        watch.remaining().min(self.of_hold())
    }
}

/// CMD and everything that supervises it.
struct Supervisor<'a> {
    job: Job<'a>,
    /// The longest lease that is possible (`asked`) and the longest that was held so far (`lease`,
    /// called L in the [kill_policy](crate::kill_policy) module).
    asked: Duration,
    lease: Duration,
    watch: LocksWatch,
    watchdog: Watchdog,
    child: Child,
    descendants: Descendants,
    terminal: Option<Terminal>,
    done: Danger,
    at_risk: bool,
    /// Whether CMD now runs as another user, so that leasehold's signals are refused.
    is_anothers: bool,
    /// Processes of CMD that could not be killed.
    survivors: Survivors,
    /// Whether a signal to leasehold has asked CMD to end.
    is_told_to_end: bool,
    /// Whether CMD was signaled because max-hold ended.
    is_over: bool,
    /// The program to start when CMD is stopped.
    on_lost: OnLost<'a>,
}

pub(crate) async fn supervise(
    job: &Job<'_>,
    held: HeldLocks,
    signals: &mut Signals,
) -> Result<CommandEnd, Failure> {
    // This comes before CMD starts, so that no SIGCHLD of CMD is missed. It also undoes an ignored
    // SIGCHLD, with which the kernel would keep no exit status to reap.
    let mut sigchld =
        signal(SignalKind::child()).map_err(|e| Failure::system("cannot catch signals", e))?;
    let mut supervisor = match start(job, &held) {
        Ok(supervisor) => supervisor,
        Err(failure) => {
            give_back(held, job.events, CLOSE_TIMEOUT).await.ok();
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
    supervisor.end(held, signals).await
}

/// Starts the watchdog, then CMD.
fn start<'a>(job: &Job<'a>, held: &HeldLocks) -> Result<Supervisor<'a>, Failure> {
    let Job { args, locks, events, .. } = *job;
    let watch = held.watch();
    let asked = take::lease(locks, &args.take);
    let lease = asked.min(watch.remaining());
    // If the store has no leases and CMD inherits no lifeline, the lock ends with this process.
    let inherits = locks.store().lifeline().is_some() && !args.no_inherit;
    let outlives_us = inherits || locks.guarantees().has_leases();
    let orphaned = args.kill_after.unwrap_or(GRACE);
    let orphaned = nested::grace(if outlives_us { orphaned } else { Duration::ZERO });
    let due = |left| deadlines(left, lease, args.kill_after, false);
    let mark = Mark::new();
    let mut watchdog = Watchdog::start(orphaned, mark, due(job.left(&watch)))?;
    let timed = job.left(&watch) < Duration::MAX;
    let after_kill = match outlives_us {
        true => timed.then(|| after_kill(lease)),
        false => Some(Duration::ZERO),
    };
    let terminal = Terminal::open();
    let mut environment = nested::handed_down(&held.sequencers(), after_kill);
    environment.extend(held.environment(args.names()));
    // A leasehold that CMD starts must use the same store.
    environment.extend(args.take.store.environment());
    environment.push((mark::RUN, mark.handed_down()));
    // Orphans among CMD's descendants become children of this process.
    let _ = nix::sys::prctl::set_child_subreaper(true);
    let started = start_child(job, &environment, &mut watchdog, terminal.as_ref(), || {
        due(job.left(&watch)).kill
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
    events.print(&Event::Started { pid: child.group().as_raw() });
    Ok(Supervisor {
        job: *job,
        asked,
        lease,
        watch,
        watchdog,
        descendants: Descendants::new(Some(mark), child.group()),
        child,
        terminal,
        done: Danger::None,
        at_risk: false,
        is_anothers: false,
        is_told_to_end: false,
        survivors: Survivors::default(),
        is_over: false,
        on_lost: OnLost { program: args.on_lost.as_deref(), environment },
    })
}

/// Starts CMD under a running watchdog, before the deadline. Replaces a watchdog that was killed.
fn start_child(
    job: &Job<'_>,
    environment: &[(&'static str, String)],
    watchdog: &mut Watchdog,
    terminal: Option<&Terminal>,
    deadline: impl Fn() -> Option<u64>,
) -> Result<Child, Failure> {
    let Job { args, locks, .. } = *job;
    loop {
        let lifeline = locks.store().lifeline().filter(|_| !args.no_inherit).map(own_lifeline);
        let lifeline = lifeline.transpose();
        let lifeline = lifeline.map_err(|e| Failure::system("cannot copy the lifeline", e))?;
        let tty = terminal.and_then(Terminal::for_child);
        let (environment, deadline) = (environment.to_vec(), deadline());
        let around =
            Surroundings { environment, watchdog: watchdog.pipe()?, tty, lifeline, deadline };
        match Child::start(&args.command, around) {
            Ok(child) => return Ok(child),
            Err(NotStarted::Failed(failure)) => return Err(failure),
            Err(NotStarted::Unwatched) => watchdog.replace_broken()?,
            Err(NotStarted::TooLate) => {
                let what =
                    format!("lock {:?} was lost before the command could be started", args.name());
                let hint = "the command was not run: retry, or use a longer --lease";
                return Err(Failure::new(exit::LOST, what).hint(hint));
            }
        }
    }
}

impl Supervisor<'_> {
    /// Checks how much is left of the lock, signals CMD if necessary, and updates the watchdog.
    fn look(&mut self) {
        let (left, of_hold) = (self.watch.remaining(), self.job.of_hold());
        let (state, name) = self.watch.worst();
        let name = name.to_owned();
        self.lease = self.lease.max(left.min(self.asked));
        let grace = self.job.args.kill_after;
        let danger = danger(state, left, of_hold, self.lease, grace);
        let (events, group) = (self.job.events, self.child.group());
        let timed = left.min(of_hold) < Duration::MAX;
        if timed && signals::is_anothers(group) {
            self.say_that_it_is_anothers();
        }
        if danger >= Danger::Terminate && self.done < Danger::Terminate {
            let sent = terminate(group).is_ok();
            self.descendants.terminate();
            self.done = Danger::Terminate;
            self.at_risk = true;
            self.is_over = of_hold <= left;
            let remaining_seconds = left.min(of_hold).as_secs_f64();
            events.print(&Event::AtRisk { name: name.clone(), remaining_seconds, sent });
        }
        if danger == Danger::Kill && self.done == Danger::Kill {
            self.descendants.kill();
        }
        if danger == Danger::Kill && self.done < Danger::Kill {
            let sent = signals::send(group, Signal::SIGKILL as i32).is_ok();
            self.descendants.kill();
            self.done = Danger::Kill;
            events.print(&match state {
                State::Lost(reason) => {
                    Event::Lost { name: name.clone(), reason: reason.to_string() }
                }
                _ => Event::Killed { name: name.clone(), sent },
            });
            if !sent {
                self.say_that_it_is_anothers();
            }
            // After SIGKILL the watchdog needs no deadline. It acts only if this process dies.
            self.watchdog.send(Deadlines::default());
        }
        if danger == Danger::None && self.done == Danger::Terminate && self.at_risk {
            self.at_risk = false;
            events.print(&Event::Recovered { name });
        }
        if self.done > Danger::None {
            self.start_on_lost();
        }
        if timed && self.done < Danger::Kill {
            let terminated = self.done >= Danger::Terminate;
            self.watchdog.send(deadlines(left.min(of_hold), self.lease, grace, terminated));
        }
    }

    fn start_on_lost(&mut self) {
        let why = Why::of(&self.watch, self.is_over).reason();
        if let Some(pid) = self.on_lost.start(why, self.job.events) {
            self.descendants.spare(pid);
        }
    }

    /// Reports that CMD runs as another user. Only the first call has an effect.
    fn say_that_it_is_anothers(&mut self) {
        if !std::mem::replace(&mut self.is_anothers, true) {
            let message = format!(
                "the command runs as another user, so leasehold cannot stop it if lock {:?} is lost",
                self.job.args.name()
            );
            self.job.events.print(&Event::Warning { message });
        }
    }

    /// Returns the time until the next check. It is a fraction of the lease, so that the watchdog's
    /// deadlines are fresh, or less if a signal is due earlier.
    fn until_next_look(&self) -> Duration {
        let soonest = Duration::from_millis(2);
        let until = match self.done {
            Danger::Kill => self.lease / 20,
            _ => until_next(self.job.left(&self.watch), self.lease, self.job.args.kill_after),
        };
        until.max(soonest)
    }

    fn forward(&mut self, number: i32) {
        self.is_told_to_end |=
            [Signal::SIGTERM, Signal::SIGINT].map(|s| s as i32).contains(&number);
        self.child.send(number);
        self.job.events.print(&Event::Forwarded { signal: number });
    }

    /// Handles a SIGCHLD. Returns whether CMD has ended.
    fn child_changed(&mut self) -> bool {
        while let Some(change) = self.child.change() {
            match change {
                Change::Ended => return true,
                Change::Stopped(signal) => {
                    self.job.events.print(&Event::Stopped { signal });
                    if let Some(terminal) = &mut self.terminal {
                        terminal.relay_stop(self.child.group(), signal);
                    }
                }
            }
        }
        if let Err(failure) = self.watchdog.check() {
            // CMD continues without a watchdog, because that is better than without supervision.
            // The next SIGCHLD retries.
            self.job.events.print(&Event::Warning { message: failure.message });
        }
        orphans::reap(&[self.child.group().as_raw(), self.watchdog.pid()]);
        false
    }

    /// Ends what CMD started, after a signal to leasehold has ended CMD. Otherwise these processes
    /// would run next to the following holder.
    async fn end_the_rest(&mut self, signals: &mut Signals) {
        // CMD is still in its group, although it is dead. Without /proc, the group seems alive.
        if !crate::proc::is_ours() || !self.descendants.is_any_left() {
            return;
        }
        // The signal may have been one that CMD's children ignore, such as SIGINT.
        let _ = terminate(self.child.group());
        self.descendants.terminate();
        let until = Instant::now() + self.job.args.kill_after.unwrap_or(GRACE);
        let mut is_told_again = false;
        while self.descendants.is_any_left() && Instant::now() < until && !is_told_again {
            self.look();
            if self.done > Danger::None {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK_AGAIN.min(self.until_next_look())) => {}
                _ = signals.next() => is_told_again = true,
            }
        }
        let survivors = self.descendants.kill_all(TO_KILL);
        if !survivors.is_empty() {
            let message = format!("{survivors} could not be stopped; the lock is released");
            self.job.events.print(&Event::Warning { message });
        }
    }

    /// Kills what CMD started, after CMD was stopped because of its lock. While some of these
    /// processes survive, the lock is kept as long as possible, unless a signal ends leasehold.
    async fn end_descendants(&mut self, signals: &mut Signals) {
        let sent = signals::send(self.child.group(), Signal::SIGKILL as i32);
        self.is_anothers |= sent.is_err();
        self.survivors = self.descendants.kill_all(TO_KILL);
        if self.survivors.is_empty() || !self.is_held() {
            return;
        }
        self.watchdog.send(Deadlines::default());
        let (name, left) = (self.job.args.name(), &self.survivors);
        let message = format!("{left} could not be stopped: lock {name:?} is kept until they end");
        self.job.events.print(&Event::Warning { message });
        while !self.survivors.is_empty() && self.is_held() && !signals.told_to_end() {
            tokio::select! {
                () = tokio::time::sleep(LOOK_AGAIN) => {}
                _ = signals.next() => {}
            }
            self.survivors = self.descendants.kill_all(Duration::ZERO);
        }
    }

    fn is_held(&self) -> bool {
        !matches!(self.watch.worst().0, State::Lost(_)) && !self.watch.remaining().is_zero()
    }

    /// Releases the locks after CMD has ended, and returns how leasehold must end.
    async fn end(mut self, held: HeldLocks, signals: &mut Signals) -> Result<CommandEnd, Failure> {
        let group = self.child.group();
        // Signals that arrived together with the end of CMD.
        while let Some(number) = signals.arrived().await {
            self.forward(number);
        }
        if self.done == Danger::None && self.is_told_to_end {
            self.end_the_rest(signals).await;
        }
        if self.done > Danger::None {
            self.end_descendants(signals).await;
        }
        if self.watchdog.done() {
            // This process was paused, and the watchdog signaled CMD before this process could.
            self.is_over |= self.job.of_hold() <= self.lease / 3;
            self.done = Danger::Kill;
            self.start_on_lost();
            self.end_descendants(signals).await;
        }
        let had_terminal = self.terminal.as_ref().is_some_and(|t| t.take_back(group));
        let reaped = self.child.reap();
        // Processes that were killed together with CMD may have become children of this process.
        // They are reaped here, because a container's first process would inherit them and may reap
        // nothing.
        orphans::reap(&[]);
        let status =
            reaped.map_err(|e| Failure::system("cannot read the exit status of the command", e))?;
        let (code, number) =
            (status.code(), std::os::unix::process::ExitStatusExt::signal(&status));
        let events = self.job.events;
        events.print(&Event::Exited { code, signal: number });
        let (name, why) = (self.watch.worst().1.to_owned(), Why::of(&self.watch, self.is_over));
        if self.done > Danger::None {
            // A nested leasehold that was killed together with CMD stops its own command within
            // this time.
            tokio::time::sleep(after_kill(self.lease).min(self.job.left(&self.watch))).await;
        }
        let limit = if self.done > Danger::None { SHORT_FAREWELL } else { CLOSE_TIMEOUT };
        let released = give_back(held, events, limit).await;
        if self.done > Danger::None {
            let fate = match self.is_anothers {
                true => {
                    "the command could not be stopped, because it runs as another user".to_owned()
                }
                false if self.survivors.is_empty() => "the command was stopped".to_owned(),
                false => format!("the command was stopped, except {}", self.survivors),
            };
            let (why, hint) = why.explained();
            let failure = Failure::new(exit::LOST, format!("lock {name:?} {why}: {fate}"));
            let show = self.job.args.take.store.command("show", Some(&name));
            let hint = hint.map(|hint| hint.replace("leasehold show NAME", &show));
            return Err(hint.into_iter().fold(failure, Failure::hint));
        }
        released?;
        let interrupted = had_terminal && number == Some(Signal::SIGINT as i32);
        Ok(if interrupted { CommandEnd::Interrupted } else { CommandEnd::Code(exit::of(status)) })
    }
}

/// The reason why CMD is stopped.
#[derive(Clone, Copy)]
enum Why {
    Lost(LostReason),
    MaxHold,
    NotRenewed,
}

impl Why {
    fn of(watch: &LocksWatch, is_over: bool) -> Self {
        match watch.worst().0 {
            State::Lost(reason) => Self::Lost(reason),
            _ if is_over => Self::MaxHold,
            _ => Self::NotRenewed,
        }
    }

    /// Returns only the reason, for LEASEHOLD_REASON.
    fn reason(self) -> &'static str {
        match self {
            Self::Lost(LostReason::Expired) => "the lease expired",
            Self::Lost(LostReason::Gone) => "the lock was evicted, or the store lost it",
            Self::Lost(LostReason::MaxHold) | Self::MaxHold => "--max-hold was reached",
            Self::Lost(_) => "the lock was lost",
            Self::NotRenewed => "the lease could not be renewed in time",
        }
    }

    /// Returns what happened to the lock, and the next step for the user.
    fn explained(self) -> (&'static str, Option<&'static str>) {
        let longer = "check the store; a longer --lease tolerates longer outages";
        match self {
            Self::Lost(LostReason::Expired) => ("expired", Some(longer)),
            Self::Lost(LostReason::Gone) => (
                "was evicted, or the store lost it",
                Some("see who holds it now: leasehold show NAME"),
            ),
            Self::Lost(LostReason::MaxHold) | Self::MaxHold => {
                ("reached its --max-hold", Some("if the command needs longer, raise --max-hold"))
            }
            Self::Lost(_) => ("was lost", None),
            Self::NotRenewed => ("could not be renewed in time", Some(longer)),
        }
    }
}

/// Releases the locks. If the store does not answer, this prints a warning and succeeds, because
/// CMD has not failed. The lock is then freed when its lease expires.
async fn give_back(held: HeldLocks, events: &Events, limit: Duration) -> Result<(), Failure> {
    let tokens = held.tokens();
    let error = match tokio::time::timeout(limit, held.release()).await {
        Ok(Ok(Released::Now | Released::Shared)) => {
            for (name, token) in tokens {
                events.print(&Event::Released { name, token: token.get() });
            }
            return Ok(());
        }
        Ok(Err(error)) => error,
        Ok(Ok(_)) | Err(_) => {
            leasehold::Error::new(ErrorKind::Unreachable, "the store did not answer")
        }
    };
    let names: Vec<String> = tokens.iter().map(|(name, _)| format!("{name:?}")).collect();
    let names = error.name().map_or_else(|| names.join(", "), |name| format!("{name}"));
    if error.kind() == ErrorKind::Lost {
        let message = format!("lost {names} while the command ran: {}", error.reason());
        let failure = Failure::new(exit::LOST, message);
        return Err(error.hint().map(str::to_owned).into_iter().fold(failure, Failure::hint));
    }
    let why = error.reason();
    events.print(&Event::Warning { message: exit::not_released(&names, &why) });
    Ok(())
}
