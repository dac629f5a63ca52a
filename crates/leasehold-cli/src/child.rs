//! CMD: started directly, in a process group of its own, and watched for how it stops and ends.
//!
//! Between fork and exec the child itself does what must be true before CMD's first instruction:
//! - it looks at the clock: whoever was stopped between the grant and here, for longer than the
//!   lease, must not start CMD beside the next holder. It looks last of all, after it has told the
//!   watchdog its group; what is stopped after that look is killed by the watchdog at the deadline;
//! - it tells the [watchdog](crate::watchdog) its group, through the pipe: there is no moment at
//!   which CMD runs unwatched, even if leasehold is killed right after the fork;
//! - it makes itself the terminal's foreground group ([`crate::terminal`]);
//! - it keeps the store's lifeline open over exec, if CMD is to keep the lock alive;
//! - it gets its own pid in [`LISTEN_PID`](crate::activation), if we had ours there;
//! - it takes back the [priority](crate::priority) that we were started with;
//! - it puts SIGPIPE back to what [we were given](crate::inherited). (Until then it is ignored: a
//!   watchdog that was killed is an error to be told, and no death.)
//!
//! CMD is found as a shell finds it, on PATH; its arguments are handed on one by one. stdin, stdout
//! and stderr are not touched.
//!
//! The end is first *seen* (WNOWAIT) and only *reaped* when nothing may signal the group any more:
//! until then the kernel cannot give its number to anybody else.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind, PipeWriter, Write};
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{SigHandler, Signal};
use nix::unistd::{Pid, getpid};
use rustix::process::{WaitId, WaitIdOptions, waitid};

use crate::activation::Activated;
use crate::exit::{self, Failure, NOT_EXECUTABLE, NOT_FOUND};
use crate::{boottime, inherited, priority, signals, terminal};

/// CMD, running.
#[derive(Debug)]
pub(crate) struct Child {
    process: std::process::Child,
    group: Pid,
}

/// What happened to CMD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// It has ended, and waits to be reaped.
    Ended,
    /// It was stopped by this signal.
    Stopped(i32),
}

/// What CMD is started with besides its arguments.
#[derive(Debug)]
pub(crate) struct Surroundings {
    /// What it finds in its environment besides what we found in ours.
    pub(crate) environment: Vec<(&'static str, String)>,
    pub(crate) watchdog: PipeWriter,
    pub(crate) tty: Option<File>,
    pub(crate) lifeline: Option<OwnedFd>,
    /// Until when it may be started, by the [boot clock](boottime).
    pub(crate) deadline: Option<u64>,
}

/// Why CMD was not started.
#[derive(Debug)]
pub(crate) enum NotStarted {
    /// The watchdog is not there to be told of it.
    Unwatched,
    /// It would have begun after its deadline.
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
        // SAFETY: runs in the forked child before exec, where only async-signal-safe calls are
        // allowed: `prepare` makes system calls (getpid, write, sigaction, sigprocmask, tcsetpgrp,
        // fcntl, clock_gettime, setpriority, execve) on descriptors that it owns and formats a number into a
        // buffer on its stack; it takes no lock and allocates nothing.
        unsafe { cmd.pre_exec(prepare) };
        let process = cmd.spawn().map_err(|e| not_started(program, &e))?;
        let group = Pid::from_raw(i32::try_from(process.id()).unwrap_or(i32::MAX));
        Ok(Self { process, group })
    }

    pub(crate) fn group(&self) -> Pid {
        self.group
    }

    /// What has happened since the last call; asked for after each SIGCHLD.
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

    /// Passes a signal on to CMD's whole group.
    pub(crate) fn send(&self, signal: i32) {
        // What became another user's gets no signals of ours.
        let _ = signals::send(self.group, signal);
    }

    /// How it ended. From here on the group must not be signalled any more.
    pub(crate) fn reap(mut self) -> io::Result<ExitStatus> {
        self.process.wait()
    }
}

/// What tells our own refusal from those of the system; no exec fails so.
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

/// A second descriptor of the store's lifeline, out of the way of what a shell script numbers its
/// own; closed by exec until the child says otherwise.
pub(crate) fn own_lifeline(lifeline: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let number = fcntl(lifeline, FcntlArg::F_DUPFD_CLOEXEC(100))
        .or_else(|_| fcntl(lifeline, FcntlArg::F_DUPFD_CLOEXEC(10)))?;
    // SAFETY: fcntl has just made this descriptor for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn not_started(program: &std::ffi::OsStr, error: &io::Error) -> NotStarted {
    match error.kind() {
        _ if error.raw_os_error() == Some(TOO_LATE as i32) => NotStarted::TooLate,
        ErrorKind::BrokenPipe => NotStarted::Unwatched,
        _ => NotStarted::Failed(cannot_be_run(program, error)),
    }
}

/// Why a program cannot be run.
pub(crate) fn cannot_be_run(program: &std::ffi::OsStr, error: &io::Error) -> Failure {
    match error.kind() {
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

    #[test]
    fn f28_nothing_is_run_after_its_deadline() {
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

    #[test]
    fn f29_nothing_is_run_without_its_watchdog() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ran");
        let (watchdog, around) = surroundings(None);
        drop(watchdog);
        let unwatched = Child::start(&touch(&path), around);
        assert!(matches!(unwatched, Err(NotStarted::Unwatched)), "{unwatched:?}");
        assert!(!path.exists());
    }
}
