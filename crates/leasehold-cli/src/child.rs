//! CMD: started directly, in a process group of its own, and watched for how it stops and ends.
//!
//! Between fork and exec the child itself does what must be true before CMD's first instruction:
//! - it tells the [watchdog](crate::watchdog) its group, through the pipe: there is no moment at
//!   which CMD runs unwatched, even if leasehold is killed right after the fork;
//! - it makes itself the terminal's foreground group ([`crate::terminal`]);
//! - it keeps the store's lifeline open over exec, if CMD is to keep the lock alive.
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

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::unistd::{Pid, getpid};
use rustix::process::{WaitId, WaitIdOptions, waitid};

use crate::exit::{Failure, NOT_EXECUTABLE, NOT_FOUND};
use crate::{signals, terminal};

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
pub(crate) struct Surroundings<'a> {
    pub(crate) name: &'a str,
    pub(crate) token: u64,
    pub(crate) sequencer: String,
    pub(crate) watchdog: PipeWriter,
    pub(crate) tty: Option<File>,
    pub(crate) lifeline: Option<OwnedFd>,
}

impl Child {
    /// Starts CMD.
    pub(crate) fn start(command: &[OsString], around: Surroundings<'_>) -> Result<Self, Failure> {
        let Some((program, arguments)) = command.split_first() else {
            return Err(Failure::new(crate::exit::USAGE, "no command given"));
        };
        let mut cmd = Command::new(program);
        cmd.args(arguments)
            .env("LEASEHOLD_NAME", around.name)
            .env("LEASEHOLD_TOKEN", around.token.to_string())
            .env("LEASEHOLD_SEQUENCER", around.sequencer)
            .process_group(0);
        let Surroundings { mut watchdog, tty, lifeline, .. } = around;
        let prepare = move || {
            let group = getpid();
            tell_group(&mut watchdog, group)?;
            if let Some(tty) = &tty {
                terminal::hand_over(tty, group);
            }
            if let Some(lifeline) = &lifeline {
                fcntl(lifeline, FcntlArg::F_SETFD(FdFlag::empty()))?;
            }
            Ok(())
        };
        // SAFETY: runs in the forked child before exec, where only async-signal-safe calls are
        // allowed: `prepare` makes system calls (getpid, write, sigprocmask, tcsetpgrp, fcntl) on
        // descriptors that it owns and formats a number into a buffer on its stack; it takes no
        // lock and allocates nothing.
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
        signals::send(self.group, signal);
    }

    /// How it ended. From here on the group must not be signalled any more.
    pub(crate) fn reap(mut self) -> io::Result<ExitStatus> {
        self.process.wait()
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

fn not_started(program: &std::ffi::OsStr, error: &io::Error) -> Failure {
    match error.kind() {
        ErrorKind::NotFound => Failure::new(NOT_FOUND, format!("{program:?}: command not found")),
        ErrorKind::WouldBlock | ErrorKind::OutOfMemory => {
            Failure::system("cannot start the command", error)
        }
        ErrorKind::InvalidInput => {
            Failure::new(crate::exit::USAGE, format!("{program:?} cannot be a command: {error}"))
        }
        _ => Failure::new(NOT_EXECUTABLE, format!("{program:?} cannot be executed: {error}")),
    }
}
