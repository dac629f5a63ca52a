//! CMD: started directly, in a process group of its own, and watched until it stops or ends.
//!
//! Between fork and exec the child itself does what must have happened before CMD's first
//! instruction:
//! - It checks the clock. A process that was paused for longer than the lease after the grant must
//!   not start CMD alongside the next holder. The last check comes after everything else, including
//!   the message to the watchdog. If the child is paused after that check, the watchdog kills it at
//!   the deadline.
//! - It sends its group to the [watchdog](crate::watchdog) through the pipe. So CMD never runs
//!   unwatched, even if leasehold is killed right after the fork.
//! - It makes itself the terminal's foreground group ([`crate::terminal`]).
//! - It keeps the store's lifeline open across exec, if CMD is to keep the lock alive.
//! - It sets its own pid in [`LISTEN_PID`](crate::activation), if leasehold's pid was there.
//! - It restores the [priority](crate::priority) that leasehold was started with.
//! - It restores the [original](crate::inherited) disposition of SIGPIPE. Until then the signal is
//!   ignored, so that writing to a killed watchdog is an error that can be reported and does not
//!   end the child.
//!
//! CMD is found on PATH, as in a shell. Its arguments are passed on one by one. stdin, stdout and
//! stderr are not changed.
//!
//! The end of CMD is first *observed* (WNOWAIT). CMD is *reaped* only when leasehold and the
//! watchdog no longer signal the group, because the kernel can reuse its number after that.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind, PipeWriter, Write};
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{SigHandler, Signal};
use nix::unistd::{Pid, getpid};
use rustix::process::{WaitId, WaitIdOptions, waitid};

use crate::activation::Activated;
use crate::exit::{self, Failure, NOT_EXECUTABLE, NOT_FOUND};
use crate::{boottime, inherited, priority, signals, terminal};

/// The running CMD.
#[derive(Debug)]
pub(crate) struct Child {
    process: std::process::Child,
    group: Pid,
}

/// A change of CMD's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// CMD has ended and has not been reaped.
    Ended,
    /// This signal stopped CMD.
    Stopped(i32),
}

/// The environment, the descriptors and the deadline with which CMD is started.
#[derive(Debug)]
pub(crate) struct Surroundings {
    /// Variables in addition to leasehold's own environment.
    pub(crate) environment: Vec<(&'static str, String)>,
    pub(crate) watchdog: PipeWriter,
    pub(crate) tty: Option<File>,
    pub(crate) lifeline: Option<OwnedFd>,
    /// The latest moment to start CMD, in [boot-clock](boottime) nanoseconds.
    pub(crate) deadline: Option<u64>,
}

/// The reason why CMD was not started.
#[derive(Debug)]
pub(crate) enum NotStarted {
    /// The watchdog is dead, so it could not be notified of CMD's group.
    Unwatched,
    /// The deadline had passed.
    TooLate,
    Failed(Failure),
}

impl Child {
    /// Starts CMD.
    pub(crate) fn start(command: &[OsString], around: Surroundings) -> Result<Self, NotStarted> {
        let Some((program, arguments)) = command.split_first() else {
            let failure = Failure::new(exit::USAGE, "no command given");
            return Err(NotStarted::Failed(failure));
        };
        let Surroundings { environment, mut watchdog, tty, lifeline, deadline } = around;
        let mut activated = Activated::new(command, &environment);
        let mut cmd = Command::new(program);
        cmd.args(arguments).envs(environment).process_group(0);
        let prepare = move || {
            let before = signals::set(Signal::SIGPIPE, SigHandler::SigIgn)?;
            check_in_time(deadline)?;
            let group = getpid();
            priority::restore();
            tell_group(&mut watchdog, group)?;
            if let Some(tty) = &tty {
                terminal::hand_over(tty, group);
            }
            if let Some(lifeline) = &lifeline {
                fcntl(lifeline, FcntlArg::F_SETFD(FdFlag::empty()))?;
            }
            if !inherited::sigpipe_ignored() {
                signals::restore(Signal::SIGPIPE, &before);
            }
            check_in_time(deadline)?;
            activated.as_mut().map_or(Ok(()), |activated| Err(activated.exec(group)))
        };
        // SAFETY: The closure runs in the forked child before exec, where only async-signal-safe
        // calls are allowed. `prepare` makes only system calls (getpid, write, sigaction,
        // sigprocmask, tcsetpgrp, fcntl, clock_gettime, setpriority, execve) on descriptors that it
        // owns. It formats a number into a buffer on its stack. It takes no lock and allocates
        // nothing.
        unsafe { cmd.pre_exec(prepare) };
        let process = cmd.spawn().map_err(|e| not_started(program, &e))?;
        let group = Pid::from_raw(i32::try_from(process.id()).unwrap_or(i32::MAX));
        Ok(Self { process, group })
    }

    pub(crate) fn group(&self) -> Pid {
        self.group
    }

    /// Returns what has happened to CMD since the last call. Call this after each SIGCHLD.
    pub(crate) fn change(&self) -> Option<Change> {
        let id = || rustix::process::Pid::from_raw(self.group.as_raw()).map(WaitId::Pid);
        let seen = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        if waitid(id()?, seen).ok()?.is_some() {
            return Some(Change::Ended);
        }
        let stops = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
        let stopped = waitid(id()?, stops).ok()??;
        stopped.stopping_signal().map(Change::Stopped)
    }

    /// Forwards a signal to CMD's whole group.
    pub(crate) fn send(&self, signal: i32) {
        // If CMD runs as another user, it does not get leasehold's signals.
        let _ = signals::send(self.group, signal);
    }

    /// Reaps CMD and returns how it ended. After this call the group must not be signaled.
    pub(crate) fn reap(mut self) -> io::Result<ExitStatus> {
        self.process.wait()
    }
}

/// The error of a missed deadline. No exec fails with this number, so it cannot be confused with an
/// error of the system.
const TOO_LATE: Errno = Errno::ETIME;

fn check_in_time(deadline: Option<u64>) -> io::Result<()> {
    match deadline {
        Some(deadline) if boottime::now() >= deadline => Err(TOO_LATE.into()),
        _ => Ok(()),
    }
}

/// Writes "group N" without allocating.
fn tell_group(watchdog: &mut PipeWriter, group: Pid) -> io::Result<()> {
    let mut line = [0; 32];
    let mut rest = &mut line[..];
    writeln!(rest, "group {group}")?;
    let unused = rest.len();
    watchdog.write_all(&line[..line.len() - unused])
}

/// Returns a second descriptor of the store's lifeline. Its number is high, so that it does not
/// collide with the descriptors of a shell script. exec closes it unless the child changes that.
pub(crate) fn own_lifeline(lifeline: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let number = fcntl(lifeline, FcntlArg::F_DUPFD_CLOEXEC(100))
        .or_else(|_| fcntl(lifeline, FcntlArg::F_DUPFD_CLOEXEC(10)))?;
    // SAFETY: fcntl has just created this descriptor, and it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn not_started(program: &std::ffi::OsStr, error: &io::Error) -> NotStarted {
    match error.kind() {
        _ if error.raw_os_error() == Some(TOO_LATE as i32) => NotStarted::TooLate,
        ErrorKind::BrokenPipe => NotStarted::Unwatched,
        _ => NotStarted::Failed(cannot_be_run(program, error)),
    }
}

/// Returns whether the program is named by a path, and not searched for in `PATH`.
fn has_slash(program: &std::ffi::OsStr) -> bool {
    program.as_encoded_bytes().contains(&b'/')
}

/// Returns why a program cannot be executed.
pub(crate) fn cannot_be_run(program: &std::ffi::OsStr, error: &io::Error) -> Failure {
    match error.kind() {
        // The kernel reports a missing interpreter like a missing file.
        ErrorKind::NotFound if Path::new(program).is_file() && has_slash(program) => {
            let what = format!("cannot execute {program:?}: its interpreter was not found");
            Failure::new(NOT_EXECUTABLE, what).hint(
                "check the line that begins with #!, and that lines do not end with CR LF; for a \
                 binary, check that its loader is installed",
            )
        }
        ErrorKind::NotFound => {
            let failure = Failure::new(NOT_FOUND, format!("{program:?}: command not found"));
            match program.to_string_lossy().contains([' ', '|', ';', '&']) {
                true => {
                    failure.hint("leasehold starts no shell: for shell syntax, run sh -c '...'")
                }
                false => failure,
            }
        }
        _ if exit::is_shortage(error) => {
            Failure::system(&format!("cannot start {program:?}"), error)
        }
        ErrorKind::InvalidInput => {
            Failure::new(exit::USAGE, format!("invalid command {program:?}: {error}"))
        }
        _ => Failure::new(NOT_EXECUTABLE, format!("cannot execute {program:?}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn surroundings(deadline: Option<u64>) -> (io::PipeReader, Surroundings) {
        let (reader, watchdog) = io::pipe().unwrap();
        let environment = Vec::new();
        (reader, Surroundings { environment, watchdog, tty: None, lifeline: None, deadline })
    }

    fn touch(path: &std::path::Path) -> [OsString; 2] {
        ["touch".into(), path.into()]
    }

    // F28
    #[test]
    fn command_does_not_start_after_its_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ran");
        let (_watchdog, around) = surroundings(Some(boottime::now()));
        let late = Child::start(&touch(&path), around);
        assert!(matches!(late, Err(NotStarted::TooLate)), "{late:?}");
        assert!(!path.exists());
        let (_watchdog, around) =
            surroundings(boottime::after(std::time::Duration::from_secs(900)));
        Child::start(&touch(&path), around).unwrap().reap().unwrap();
        assert!(path.exists());
    }

    // F29
    #[test]
    fn command_does_not_start_without_its_watchdog() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ran");
        let (watchdog, around) = surroundings(None);
        drop(watchdog);
        let unwatched = Child::start(&touch(&path), around);
        assert!(matches!(unwatched, Err(NotStarted::Unwatched)), "{unwatched:?}");
        assert!(!path.exists());
    }
}
