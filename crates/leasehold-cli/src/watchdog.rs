//! The watchdog: ends CMD when leasehold itself no longer can.
//!
//! leasehold ends CMD before its lock can be another's. But leasehold may be killed with -9, or be
//! stopped until its lease is over; then nobody would (PDEATHSIG reaches only the direct child, and
//! not at all when we are stopped). So a second process of this program stands by.
//!
//! # The algorithm
//! It reads lines from a pipe whose only writer is leasehold: `group N` (written by the child
//! itself before CMD's first instruction), `deadline TERM KILL` (moments of the boot clock, `-`:
//! none; after each renewal, and earlier than the real end of the lease by a quarter and a tenth of
//! it), `done`.
//! - End of file without `done`: leasehold is dead. TERM to the group, KILL after a grace period
//!   or at the deadline, whichever comes first. The grace is zero if the lock died with leasehold.
//! - The deadline comes without news: leasehold is stopped, or starved. TERM, then KILL, at the
//!   told moments.
//!
//! # Why it is right
//! - *Never too late.* It knows a deadline before CMD starts, and each later one only moves it out.
//!   A lost or late line means an earlier KILL, never a later one. Time is the boot clock's, by
//!   timerfd, so the alarm also goes off right after the machine wakes.
//! - *Never the wrong group.* leasehold says `done` and waits for our end before it reaps CMD, so
//!   while leasehold lives, no other process can get the group's number. After its death we kill
//!   processes one by one, each through its pidfd.
//! - *Nobody stops it.* It signals first and speaks afterwards, on a thread of its own: a stderr
//!   that nobody reads costs the words and not the signal.
//! - *Not in the way.* It is in a session of its own (no signal of the terminal or of a job reaches
//!   it), blocks all signals, holds neither the lock's lifeline nor stdout, and ends with
//!   leasehold. It is killed only by KILL; leasehold then starts another.
//!
//! CMD here means its group and the [descendants](crate::descendants) that left the group.
//!
//! Not covered: a process that became another user, which we may not signal (a message names it);
//! and leasehold and watchdog killed at the same moment (with the file store, CMD's inherited
//! lifeline keeps the lock even then).

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

/// When CMD is to be ended unless later news arrive, by the boot clock in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Deadlines {
    /// SIGTERM.
    pub(crate) term: Option<u64>,
    /// SIGKILL.
    pub(crate) kill: Option<u64>,
}

/// leasehold's side: the watchdog that it started.
#[derive(Debug)]
pub(crate) struct Watchdog {
    process: Child,
    pipe: PipeWriter,
    grace: Duration,
    mark: Mark,
    group: Option<Pid>,
    told: Deadlines,
    /// How many more are started in this one's place.
    spare: u8,
}

/// How long one that was sent away has to go; one that is stopped would never.
const TO_GO: Duration = Duration::from_secs(1);

/// One that is killed by a person is replaced; what kills it again and again is no person.
const SPARE: u8 = 20;

impl Watchdog {
    /// Starts one that gives CMD `grace` after our own death, and knows these deadlines.
    pub(crate) fn start(grace: Duration, mark: Mark, told: Deadlines) -> Result<Self, Failure> {
        let (process, pipe) = launch(grace, mark, told, None).map_err(not_started)?;
        Ok(Self { process, pipe, grace, mark, group: None, told, spare: SPARE })
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.process.id()).unwrap_or_default()
    }

    /// The end into which the child writes its group.
    pub(crate) fn pipe(&self) -> Result<PipeWriter, Failure> {
        self.pipe.try_clone().map_err(|e| Failure::system("cannot copy a pipe", e))
    }

    /// CMD runs in this group: another watchdog would have to be told.
    pub(crate) fn watches(&mut self, group: Pid) {
        self.group = Some(group);
    }

    /// Moves the deadlines.
    pub(crate) fn tell(&mut self, deadlines: Deadlines) {
        self.told = deadlines;
        // A pipe that is full or broken: the watchdog acts on what it knows, or is replaced.
        let _ = self.pipe.write_all(deadlines.line().as_bytes());
    }

    /// Starts another if this one was killed; tells whether it did.
    pub(crate) fn check(&mut self) -> Result<bool, Failure> {
        let ended = self.process.try_wait().ok().flatten();
        let killed = ended.is_some_and(|status| status.code() != Some(ACTED.into()));
        if killed && self.spare > 0 { self.replace() } else { Ok(false) }
    }

    /// The pipe broke before CMD began: starts another if that is because this one was killed.
    pub(crate) fn replace_broken(&mut self) -> Result<(), Failure> {
        // Its end of the pipe is closed a moment before it can be waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let what = "the command was not started, because its watchdog process keeps being killed";
        match self.spare {
            0 => Err(Failure::new(SYSTEM, what).hint("check the logs of the OOM killer")),
            _ => self.replace().map(drop),
        }
    }

    fn replace(&mut self) -> Result<bool, Failure> {
        self.spare -= 1;
        if self.spare == 0 && self.group.is_some() {
            let what = "the watchdog process keeps being killed: the command continues without it";
            return Err(Failure::new(SYSTEM, what));
        }
        (self.process, self.pipe) =
            launch(self.grace, self.mark, self.told, self.group).map_err(not_started)?;
        Ok(true)
    }

    /// CMD has ended: sends the watchdog away and waits until it is gone. Tells whether it was the
    /// watchdog that ended CMD. One that is stopped is killed: it has done nothing, and must not
    /// keep the lock from the next.
    pub(crate) fn done(&mut self) -> bool {
        let _ = self.pipe.write_all(b"done\n");
        if !ends_within(&self.process, TO_GO) {
            let _ = self.process.kill();
        }
        self.process.wait().is_ok_and(|status| status.code() == Some(ACTED.into()))
    }
}

/// The exit code of a watchdog that signalled CMD.
const ACTED: u8 = 10;

/// Whether the process has ended, now or within this time.
fn ends_within(process: &Child, limit: Duration) -> bool {
    let id = i32::try_from(process.id()).ok().and_then(rustix::process::Pid::from_raw);
    let handle = id
        .and_then(|id| rustix::process::pidfd_open(id, rustix::process::PidfdFlags::empty()).ok());
    // Without the means to wait for so long, it is not waited for.
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
    told: Deadlines,
    group: Option<Pid>,
) -> io::Result<(Child, PipeWriter)> {
    let (theirs, mut ours) = io::pipe()?;
    // Shared by every descriptor of this end: a watchdog that is stopped must not stop us.
    rustix::io::ioctl_fionbio(&ours, true)?;
    // Before it lives, so that it never lives without knowing.
    ours.write_all(told.line().as_bytes())?;
    if let Some(group) = group {
        ours.write_all(format!("group {group}\n").as_bytes())?;
    }
    // Not current_exe(): this one is there even if the file was replaced meanwhile.
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

/// The watchdog's own main.
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

/// What it knows.
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
            // Never 0 or 1: killpg would take them for our own group, or for everybody.
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

/// What it has done to CMD.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Acted {
    /// Nobody had to know: leasehold says what became of CMD.
    Terminated,
    /// Killed at its deadline, except these.
    Killed(Survivors),
    /// Ended after leasehold's death, except these.
    Orphaned(Survivors),
}

/// Tells whether it signalled CMD.
fn watch(grace: Duration, mark: Option<Mark>) -> io::Result<Option<Acted>> {
    SigSet::all().thread_block()?;
    // `killall leasehold` means leasehold, and not who stands by for just that.
    nix::sys::prctl::set_name(WATCHDOG)?;
    let alarm = TimerFd::new(ClockId::CLOCK_BOOTTIME, TimerFlags::TFD_CLOEXEC)?;
    let input = stdin();
    let (mut known, mut text, mut acted) = (Knowledge::default(), Vec::new(), None);
    loop {
        let Deadlines { term, kill } = known.deadlines;
        let now = boottime::now();
        if let Some(group) = known.group.map(Pid::from_raw) {
            if kill.is_some_and(|k| k <= now) {
                // First, and at once. What is left of it is found below leasehold, which is there.
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
        // Not through std's buffer, in which a line could lie while we poll.
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

/// Wakes us at the next moment of those that are told; at none if there are none.
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

/// leasehold is dead: so is CMD, in time.
///
/// Its orphans are not below leasehold any more. So what belongs to it is found before anything is
/// signalled, while its processes are below each other. Without grace they are stopped meanwhile.
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

/// TERM, and CONT so that a stopped group gets to it. An error if it is another user's.
pub(crate) fn terminate(group: Pid) -> nix::Result<()> {
    signals::send(group, Signal::SIGTERM as i32)?;
    signals::send(group, Signal::SIGCONT as i32)
}

/// How long the kernel has to end what is killed.
const TO_KILL: Duration = Duration::from_secs(2);

/// How long a stderr that nobody reads has to take one line.
const TO_SPEAK: Duration = Duration::from_millis(500);

/// Says what was done, once it is done. The write may block for ever (the descriptor is shared with
/// others, and must not be made non-blocking for them): then the process ends without it.
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
    let (tell, said) = mpsc::channel();
    let write = move || {
        let _ = io::stderr().write_all(format!("leasehold: {what}\n").as_bytes());
        let _ = tell.send(());
    };
    if std::thread::Builder::new().spawn(write).is_ok() {
        let _ = said.recv_timeout(TO_SPEAK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_known_and_nonsense_is_not() {
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
