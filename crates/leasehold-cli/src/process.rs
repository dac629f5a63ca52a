//! Whose life a hold is bound to, where it is not its reader's: a process that is named, or the one that reads the
//! token of `leasehold acquire`.
//!
//! In `T=$(leasehold acquire x)` that is the shell that runs the `$(…)`: it has the other end of
//! our stdout, a pipe. The owner is the nearest ancestor in our session that has the pipe open for
//! reading. /proc shows this whatever the program is and whatever runs in between (`timeout`,
//! `bash -c`, a subshell). Node gives its children a pair of sockets instead; the kernel reports
//! the process that made the pair, which is Node.
//!
//! An ancestor in another session (sshd, sudo with a terminal of its own) only forwards what it
//! reads, and exits with us. If no ancestor reads stdout (a pipeline, a file, a terminal), the
//! command is refused: a lock without an owner would be released before the work begins.
//!
//! A process is its pid *and* its start time: a number may be given to somebody else.

use std::fs::{read_dir, read_link, read_to_string};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};

use nix::libc;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::exit::{Failure, USAGE};
use crate::proc::{Stat, lineage};

/// A process that is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    started: u64,
}

impl Process {
    /// The one that has this number now.
    pub(crate) fn with_pid(pid: i32) -> Result<Self, Failure> {
        Self::of(pid).ok_or_else(|| Failure::new(USAGE, format!("--pid {pid}: no such process")))
    }

    fn of(pid: i32) -> Option<Self> {
        Some(Self { pid, started: Stat::of(pid)?.started() })
    }

    /// Whoever started us, if it is there.
    pub(crate) fn parent() -> Option<Self> {
        Self::of(i32::try_from(parent_id()).ok()?)
    }

    /// The one above us that reads our stdout.
    pub(crate) fn reader() -> Result<Self, Failure> {
        let refused = |why: &str| {
            let what = format!("cannot tell which process owns the lock: {why}");
            Failure::new(USAGE, what).hint(
                "pass --pid PID, the process that works under the lock (in a shell: --pid $$); the \
                 lock was not taken",
            )
        };
        let out = read_link("/proc/self/fd/1").unwrap_or_default();
        let kind = out.to_string_lossy().into_owned();
        let above = i32::try_from(parent_id()).unwrap_or_default();
        let reader = match kind.split(':').next() {
            Some("pipe") => lineage(above).find(|&pid| reads(pid, &out)),
            Some("socket") => maker_of_stdout().filter(|&maker| lineage(above).any(|p| p == maker)),
            _ => return Err(refused("stdout is neither a pipe nor a socket")),
        };
        let reader = reader.and_then(Self::of);
        let Some(reader) = reader else {
            return Err(refused("no parent process reads stdout"));
        };
        let session = |pid| Stat::of(pid).map(|stat| stat.session());
        let ours = i32::try_from(std::process::id()).ok().and_then(session);
        if ours.is_none() || session(reader.pid) != ours {
            let who = reader.program();
            return Err(refused(&format!("{who}, which reads stdout, is in another session")));
        }
        Ok(reader)
    }

    /// Whether it is still there.
    pub(crate) fn is_there(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// What the kernel calls its program.
    pub(crate) fn program(self) -> String {
        let comm = read_to_string(format!("/proc/{}/comm", self.pid));
        comm.unwrap_or_default().trim_end().to_owned()
    }

    /// Calls `ended` when the process ends. An error if it has ended already.
    pub(crate) fn watch(self, ended: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let pidfd = open(self.pid)?;
        // The descriptor is of whoever has the number now; if that one was started when ours was,
        // it is ours.
        if !self.is_there() {
            return Err(gone());
        }
        when_ended(pidfd, ended)
    }
}

/// Calls `ended` when the process that started this one, directly or not, ends. An error if it has ended already.
///
/// It may have ended, and its pid been reused, before we look. Then the process that has the pid now started after
/// this one. Where /proc does not say when, the pid alone decides.
pub(crate) fn watch_caller(pid: i32, ended: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let pidfd = open(pid)?;
    let started = |pid| Stat::of(pid).map(|stat| stat.started());
    let ours = i32::try_from(std::process::id()).ok().and_then(started);
    if started(pid).zip(ours).is_some_and(|(caller, ours)| caller > ours) {
        return Err(gone());
    }
    when_ended(pidfd, ended)
}

fn gone() -> io::Error {
    io::ErrorKind::NotFound.into()
}

fn open(pid: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or_else(gone)?;
    pidfd_open(pid, PidfdFlags::empty()).map_err(|e| match e {
        Errno::SRCH => gone(),
        other => other.into(),
    })
}

fn when_ended(pidfd: OwnedFd, ended: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let watch = move || {
        let mut end = [PollFd::new(&pidfd, PollFlags::IN)];
        while poll(&mut end, None) == Err(Errno::INTR) {}
        ended();
    };
    std::thread::Builder::new().name("process".into()).spawn(watch).map(drop)
}

/// The process that made the pair of sockets of which our stdout is one.
fn maker_of_stdout() -> Option<i32> {
    let maker = rustix::net::sockopt::socket_peercred(std::io::stdout()).ok()?;
    Some(maker.pid.as_raw_nonzero().get())
}

/// Whether the process has this pipe open to read from it.
fn reads(pid: i32, pipe: &Path) -> bool {
    let open = read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    open.filter(|fd| read_link(fd.path()).is_ok_and(|to| to == pipe)).any(|fd| {
        let about = PathBuf::from(format!("/proc/{pid}/fdinfo")).join(fd.file_name());
        let about = read_to_string(about).unwrap_or_default();
        let flags = about.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|octal| i32::from_str_radix(octal.trim(), 8).ok());
        flags.is_some_and(|flags| flags & libc::O_ACCMODE == libc::O_RDONLY)
    })
}
