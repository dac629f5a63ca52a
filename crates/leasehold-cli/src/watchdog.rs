//! The watchdog: ends CMD when leasehold itself no longer can.
//!
//! leasehold ends CMD before another client can acquire its lock. But leasehold may be killed with
//! -9, or be paused until its lease expires. Then it could not end CMD. (PDEATHSIG reaches only the
//! direct child, and has no effect when leasehold is paused.) So a second process of this program
//! watches over CMD.
//!
//! # The algorithm
//! The watchdog reads lines from a pipe whose only writers are leasehold and the child it forks:
//! - `group N` comes from the child itself, before CMD's first instruction.
//! - `deadline TERM KILL` has two moments of the boot clock, or `-` for none. leasehold sends it
//!   after each renewal. The moments precede the end of the lease by a quarter and a tenth of it.
//! - `done` ends the watchdog.
//!
//! It acts in two cases:
//! - The pipe ends without `done`, because leasehold is dead. The watchdog sends TERM to the group.
//!   It sends KILL after a grace period or at the deadline, whichever comes first. The grace period
//!   is zero if the lock died with leasehold.
//! - A deadline passes without a new line, because leasehold is paused or gets no processor time.
//!   The watchdog sends TERM, then KILL, at the known moments.
//!
//! # Why it is correct
//! - *It is never too late.* It knows a deadline before CMD starts, and each later one only extends
//!   it. A lost or late line means an earlier KILL, never a later one. The time comes from the boot
//!   clock through a timerfd, so the alarm also fires right after the machine wakes.
//! - *It never signals the wrong group.* leasehold sends `done` and waits for the watchdog's end
//!   before it reaps CMD. So while leasehold lives, no other process can get the group's number.
//!   After leasehold's death the watchdog kills processes one by one, each through its pidfd.
//! - *Output cannot block it.* It signals first and prints afterwards, on a thread of its own. If
//!   no process reads stderr, the message is lost but not the signal.
//! - *It does not interfere.* It is in a session of its own, so no signal of the terminal or of a
//!   job reaches it. It blocks all signals, holds neither the lock's lifeline nor stdout, and ends
//!   with leasehold. Only KILL can kill it. leasehold then starts another watchdog.
//!
//! CMD here means its group and the [descendants](crate::descendants) that left the group.
//!
//! Two cases are not covered:
//! - a process that runs as another user, which the watchdog may not signal (a message names it);
//! - leasehold and the watchdog killed at the same moment. With the file store, CMD's inherited
//!   lifeline keeps the lock even then.

use std::io::{self, PipeWriter, Write, stdin};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use nix::unistd::Pid;

use crate::args::WatchdogArgs;
use crate::descendants::{Descendants, Survivors, WATCHDOG};
use crate::exit::{Failure, SYSTEM};
use crate::mark::{DETACHED, Mark, RUN};
use crate::{boottime, signals};

/// The moments at which CMD is ended unless newer deadlines arrive, in boot-clock nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Deadlines {
    /// The moment for SIGTERM.
    pub(crate) term: Option<u64>,
    /// The moment for SIGKILL.
    pub(crate) kill: Option<u64>,
}

/// The watchdog, as leasehold sees it.
#[derive(Debug)]
pub(crate) struct Watchdog {
    process: Child,
    pipe: PipeWriter,
    grace: Duration,
    mark: Mark,
    group: Option<Pid>,
    deadlines: Deadlines,
    /// How many more watchdogs may be started as replacements.
    spare: u8,
    /// Whether [`check`](Self::check) has reported that CMD continues without a watchdog.
    has_given_up: bool,
}

/// Time that a dismissed watchdog has to end. A stopped one would never end.
const TO_GO: Duration = Duration::from_secs(1);

/// Maximum number of times the watchdog is replaced. It is replaced if a person kills it by
/// mistake. If it is killed repeatedly, something else is killing it and another replacement would
/// not help.
const SPARE: u8 = 20;

impl Watchdog {
    /// Starts a watchdog that gives CMD the time `grace` to end after leasehold's death, and that
    /// knows these deadlines.
    pub(crate) fn start(
        grace: Duration,
        mark: Mark,
        deadlines: Deadlines,
    ) -> Result<Self, Failure> {
        let (process, pipe) = launch(grace, mark, deadlines, None).map_err(not_started)?;
        let (group, spare, has_given_up) = (None, SPARE, false);
        Ok(Self { process, pipe, grace, mark, group, deadlines, spare, has_given_up })
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.process.id()).unwrap_or_default()
    }

    /// Returns a copy of the pipe's end into which the child writes its group.
    pub(crate) fn pipe(&self) -> Result<PipeWriter, Failure> {
        self.pipe.try_clone().map_err(|e| Failure::system("cannot copy a pipe", e))
    }

    /// Records the group of CMD, for a replacement of the watchdog.
    pub(crate) fn watches(&mut self, group: Pid) {
        self.group = Some(group);
    }

    /// Sends new deadlines.
    pub(crate) fn send(&mut self, deadlines: Deadlines) {
        self.deadlines = deadlines;
        // The pipe may be full or broken. Then the watchdog acts on the deadlines that it has, or
        // is replaced.
        let _ = self.pipe.write_all(deadlines.line().as_bytes());
    }

    /// Replaces the watchdog if it was killed. Returns whether it was replaced. Returns an error
    /// once if it was killed too often.
    pub(crate) fn check(&mut self) -> Result<bool, Failure> {
        let ended = self.process.try_wait().ok().flatten();
        let killed = ended.is_some_and(|status| status.code() != Some(ACTED.into()));
        if !killed || self.has_given_up {
            return Ok(false);
        }
        if self.spare == 0 {
            self.has_given_up = true;
            let what = "the watchdog process keeps being killed: the command continues without it";
            return Err(Failure::new(SYSTEM, what));
        }
        self.replace().map(|()| true)
    }

    /// Handles a pipe that broke before CMD began: ends the old watchdog and starts another.
    pub(crate) fn replace_broken(&mut self) -> Result<(), Failure> {
        // The old watchdog's end of the pipe is closed a moment before its exit status is
        // available.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let what = "the command was not started, because its watchdog process keeps being killed";
        match self.spare {
            0 => Err(Failure::new(SYSTEM, what).hint("check the logs of the OOM killer")),
            _ => self.replace(),
        }
    }

    fn replace(&mut self) -> Result<(), Failure> {
        self.spare -= 1;
        (self.process, self.pipe) =
            launch(self.grace, self.mark, self.deadlines, self.group).map_err(not_started)?;
        Ok(())
    }

    /// Dismisses the watchdog after CMD has ended, and waits until the watchdog has ended. Returns
    /// whether the watchdog signaled CMD. A stopped watchdog is killed, because it has done nothing
    /// and must not delay the release of the lock.
    pub(crate) fn done(&mut self) -> bool {
        let _ = self.pipe.write_all(b"done\n");
        if !ends_within(&self.process, TO_GO) {
            let _ = self.process.kill();
        }
        self.process.wait().is_ok_and(|status| status.code() == Some(ACTED.into()))
    }
}

/// The exit code of a watchdog that signaled CMD.
const ACTED: u8 = 10;

/// Returns whether the process ends within `limit`.
fn ends_within(process: &Child, limit: Duration) -> bool {
    let id = i32::try_from(process.id()).ok().and_then(rustix::process::Pid::from_raw);
    let handle = id
        .and_then(|id| rustix::process::pidfd_open(id, rustix::process::PidfdFlags::empty()).ok());
    // If the kernel cannot wait with a time limit, this does not wait.
    let Some(handle) = handle else { return false };
    let end = Instant::now() + limit;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        let mut ended = [PollFd::new(handle.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ended, left) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(Errno::EINTR) => {}
            Err(_) => return false,
        }
    }
}

fn not_started(error: io::Error) -> Failure {
    Failure::system("cannot start the watchdog", error)
}

impl Deadlines {
    fn line(self) -> String {
        let show = |moment: Option<u64>| moment.map_or("-".to_owned(), |m| m.to_string());
        format!("deadline {} {}\n", show(self.term), show(self.kill))
    }
}

fn launch(
    grace: Duration,
    mark: Mark,
    deadlines: Deadlines,
    group: Option<Pid>,
) -> io::Result<(Child, PipeWriter)> {
    let (theirs, mut ours) = io::pipe()?;
    // This makes all descriptors of this end non-blocking, because a stopped watchdog must not
    // block leasehold.
    rustix::io::ioctl_fionbio(&ours, true)?;
    // This is written before the watchdog starts, so that it always knows a deadline.
    ours.write_all(deadlines.line().as_bytes())?;
    if let Some(group) = group {
        ours.write_all(format!("group {group}\n").as_bytes())?;
    }
    // current_exe() would fail if the file was replaced in the meantime. This path always works.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("leasehold")
        .args(["watchdog", "--grace", &grace.as_millis().to_string()])
        .args(["--run", &mark.to_string()])
        .env(RUN, DETACHED)
        .stdin(theirs)
        .stdout(Stdio::null())
        .current_dir("/");
    // SAFETY: setsid is a system call and async-signal-safe.
    unsafe { command.pre_exec(|| nix::unistd::setsid().map(drop).map_err(io::Error::from)) };
    Ok((command.spawn()?, ours))
}

/// Runs the watchdog process.
pub(crate) fn main(args: &WatchdogArgs) -> ExitCode {
    match watch(Duration::from_millis(args.grace), args.run) {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(acted)) => {
            say(&acted);
            ExitCode::from(ACTED)
        }
        Err(error) => Failure::system("the watchdog failed", error).report(),
    }
}

/// What the watchdog knows.
#[derive(Debug, Default, PartialEq, Eq)]
struct Knowledge {
    group: Option<i32>,
    deadlines: Deadlines,
    done: bool,
}

impl Knowledge {
    fn learn(&mut self, line: &str) {
        let mut words = line.split_whitespace();
        let moment = |word: Option<&str>| word.and_then(|w| w.parse().ok());
        match words.next() {
            // 0 and 1 are rejected, because killpg would signal this process's own group, or all
            // processes.
            Some("group") => {
                self.group = words.next().and_then(|w| w.parse().ok()).filter(|&g| g > 1);
            }
            Some("deadline") => {
                self.deadlines =
                    Deadlines { term: moment(words.next()), kill: moment(words.next()) };
            }
            Some("done") => self.done = true,
            _ => {}
        }
    }
}

/// What the watchdog has done to CMD.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Acted {
    /// CMD got TERM only. The watchdog reports nothing, because leasehold reports how CMD ended.
    Terminated,
    /// CMD was killed at its deadline, except these processes.
    Killed(Survivors),
    /// CMD was ended after leasehold's death, except these processes.
    Orphaned(Survivors),
}

/// Watches until CMD or leasehold ends. Returns what was done to CMD, if anything.
fn watch(grace: Duration, mark: Option<Mark>) -> io::Result<Option<Acted>> {
    SigSet::all().thread_block()?;
    // With a name of its own, the watchdog is not killed by `killall leasehold`.
    nix::sys::prctl::set_name(WATCHDOG)?;
    let alarm = TimerFd::new(ClockId::CLOCK_BOOTTIME, TimerFlags::TFD_CLOEXEC)?;
    let input = stdin();
    let (mut known, mut text, mut acted) = (Knowledge::default(), Vec::new(), None);
    loop {
        let Deadlines { term, kill } = known.deadlines;
        let now = boottime::now();
        if let Some(group) = known.group.map(Pid::from_raw) {
            if kill.is_some_and(|k| k <= now) {
                // The group is killed first and immediately. The other processes are found among
                // the descendants of leasehold, which still exists.
                let _ = signals::send(group, Signal::SIGKILL as i32);
                let survivors = Descendants::new(mark, group).kill_all(TO_KILL);
                return Ok(Some(Acted::Killed(survivors)));
            }
            if term.is_some_and(|t| t <= now) {
                let _ = terminate(group);
                Descendants::new(mark, group).terminate();
                acted = Some(Acted::Terminated);
                known.deadlines.term = None;
            }
        }
        set_alarm(&alarm, known.deadlines, now)?;
        let mut ready = [
            PollFd::new(input.as_fd(), PollFlags::POLLIN),
            PollFd::new(alarm.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut ready, PollTimeout::NONE) {
            Ok(_) if ready[0].any() == Some(true) => {}
            Ok(_) | Err(Errno::EINTR) => continue,
            Err(e) => return Err(e.into()),
        }
        // This bypasses std's buffer, in which a line could stay unnoticed during the poll.
        let mut chunk = [0; 512];
        match rustix::io::read(&input, &mut chunk)? {
            0 => break,
            n => text.extend_from_slice(&chunk[..n]),
        }
        while let Some(end) = text.iter().position(|&b| b == b'\n') {
            known.learn(&String::from_utf8_lossy(&text[..end]));
            text.drain(..=end);
        }
        if known.done {
            return Ok(acted);
        }
    }
    Ok(orphaned(&known, grace, mark).or(acted))
}

/// Sets the alarm to the next moment of the deadlines, or off if there is none.
fn set_alarm(alarm: &TimerFd, deadlines: Deadlines, now: u64) -> io::Result<()> {
    let coming = [deadlines.term, deadlines.kill].into_iter().flatten().filter(|&m| m > now).min();
    match coming {
        Some(moment) => {
            let at = TimeSpec::from_duration(Duration::from_nanos(moment));
            alarm.set(Expiration::OneShot(at), TimerSetTimeFlags::TFD_TIMER_ABSTIME)?;
        }
        None => alarm.unset()?,
    }
    Ok(())
}

/// Ends CMD after leasehold's death. CMD has the time `grace`, but not beyond the deadline for
/// SIGKILL.
///
/// Orphans of leasehold are no longer its children. So the processes of CMD are found before any of
/// them is signaled, while they are still descendants of each other. Without a grace period, the
/// group is stopped in the meantime.
fn orphaned(known: &Knowledge, grace: Duration, mark: Option<Mark>) -> Option<Acted> {
    let group = known.group.map(Pid::from_raw)?;
    if grace.is_zero() {
        let _ = signals::send(group, Signal::SIGSTOP as i32);
    }
    let mut descendants = Descendants::orphaned(mark, group);
    if !descendants.is_any_left() {
        return None;
    }
    let grace = known.deadlines.kill.map_or(grace, |k| grace.min(boottime::until(k)));
    let end = boottime::after(grace).unwrap_or(0);
    if !grace.is_zero() {
        let _ = terminate(group);
        descendants.terminate();
    }
    while boottime::now() < end {
        std::thread::sleep(Duration::from_millis(5).min(boottime::until(end)));
        if descendants.is_over() && !descendants.is_any_left() {
            return Some(Acted::Orphaned(Survivors::default()));
        }
    }
    Some(Acted::Orphaned(descendants.kill_all(TO_KILL)))
}

/// Sends TERM, and CONT so that a stopped group handles it. Returns an error if the group runs as
/// another user.
pub(crate) fn terminate(group: Pid) -> nix::Result<()> {
    signals::send(group, Signal::SIGTERM as i32)?;
    signals::send(group, Signal::SIGCONT as i32)
}

/// Time that the kernel gets to end killed processes.
const TO_KILL: Duration = Duration::from_secs(2);

/// Time limit for writing one line to a stderr that may not be read.
const TO_SPEAK: Duration = Duration::from_millis(500);

/// Reports the watchdog's action on stderr. The write may block indefinitely. The descriptor is
/// shared with other processes and must not be made non-blocking for them. If the write blocks, the
/// process exits without reporting.
fn say(acted: &Acted) {
    let (what, survivors) = match acted {
        Acted::Terminated => return,
        Acted::Killed(survivors) => (
            "leasehold was paused and its lock was about to expire: the watchdog killed the command",
            survivors,
        ),
        Acted::Orphaned(survivors) => {
            ("leasehold was killed: the watchdog stopped the command", survivors)
        }
    };
    let what = match survivors.is_empty() {
        true => what.to_owned(),
        false => format!("{what}, except {survivors}: it may run without its lock"),
    };
    let (tell, receiver) = mpsc::channel();
    let write = move || {
        let _ = io::stderr().write_all(format!("leasehold: {what}\n").as_bytes());
        let _ = tell.send(());
    };
    if std::thread::Builder::new().spawn(write).is_ok() {
        let _ = receiver.recv_timeout(TO_SPEAK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Here the started program is the test binary, which rejects the watchdog's arguments and
    /// exits. For `check`, that is a watchdog that was killed.
    #[test]
    fn killed_watchdog_is_replaced_as_often_as_allowed() {
        let mut watchdog =
            Watchdog::start(Duration::ZERO, Mark::new(), Deadlines::default()).unwrap();
        // No process has this number.
        watchdog.watches(Pid::from_raw(i32::MAX));
        let mut check = || {
            watchdog.process.wait().unwrap();
            watchdog.check()
        };
        for i in 0..SPARE {
            let replaced = check();
            assert!(matches!(replaced, Ok(true)), "after {i} replacements: {replaced:?}");
        }
        check().unwrap_err();
        assert!(matches!(check(), Ok(false)), "the error is reported only once");
    }

    #[test]
    fn valid_lines_are_learned_and_invalid_ones_ignored() {
        let mut known = Knowledge::default();
        for line in ["group 7", "deadline - 9", "", "nonsense", "group"] {
            known.learn(line);
        }
        let deadlines = Deadlines { term: None, kill: Some(9) };
        assert_eq!(known, Knowledge { group: None, deadlines, done: false });
        for dangerous in ["group 0", "group 1", "group -1", "group 99999999999"] {
            known.learn(dangerous);
            assert_eq!(known.group, None, "{dangerous}");
        }
    }
}
