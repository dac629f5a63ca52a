//! The process that a hold is bound to: one given by number, or the one that reads the token of
//! `leasehold acquire`.
//!
//! In `T=$(leasehold acquire x)` this is the shell that runs the `$(…)`. It has the other end of
//! stdout, a pipe. The owner is the nearest ancestor in the same session that has the pipe open for
//! reading. /proc shows this for any program, no matter what runs in between (`timeout`, `bash -c`,
//! a subshell). Node gives its children a pair of sockets instead. The kernel reports the process
//! that made the pair, which is Node.
//!
//! An ancestor in another session (sshd, sudo with a terminal of its own) only forwards what it
//! reads, and exits with this process. If no ancestor reads stdout (a pipeline, a file, a
//! terminal), the command is refused. A lock without an owner would be released before the work
//! begins.
//!
//! A process is identified by its pid *and* its start time, because a pid may be reused.

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

/// A process whose end is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    started: u64,
}

impl Process {
    /// Returns the process that has this pid now.
    pub(crate) fn with_pid(pid: i32) -> Result<Self, Failure> {
        Self::of(pid).ok_or_else(|| Failure::new(USAGE, format!("--pid {pid}: no such process")))
    }

    fn of(pid: i32) -> Option<Self> {
        Some(Self { pid, started: Stat::of(pid)?.started() })
    }

    /// Returns the parent process, if it exists.
    pub(crate) fn parent() -> Option<Self> {
        Self::of(i32::try_from(parent_id()).ok()?)
    }

    /// Returns the ancestor that reads this process's stdout.
    pub(crate) fn reader() -> Result<Self, Failure> {
        let refused = |why: &str| {
            let what = format!("cannot find the process that owns the lock: {why}");
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
            let program = reader.program();
            return Err(refused(&format!("{program}, which reads stdout, is in another session")));
        }
        Ok(reader)
    }

    /// Returns whether the process still exists.
    pub(crate) fn is_there(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// Returns the name of the process's program, as the kernel reports it.
    pub(crate) fn program(self) -> String {
        let comm = read_to_string(format!("/proc/{}/comm", self.pid));
        comm.unwrap_or_default().trim_end().to_owned()
    }

    /// Calls `ended` when the process ends. Returns an error if it has ended already.
    pub(crate) fn watch(self, ended: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let pidfd = open(self.pid)?;
        // The descriptor refers to the process that has the pid now. It is the right process if its
        // start time is the same.
        if !self.is_there() {
            return Err(gone());
        }
        when_ended(pidfd, ended)
    }
}

/// Calls `ended` when the process that started this one, directly or indirectly, ends. Returns an
/// error if it has ended already.
///
/// It may have ended, and its pid been reused, before this call. Then the process that has the pid
/// now started after this one. If /proc does not show the start times, the pid alone decides.
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

/// Returns the pid of the process that created the socket pair to which stdout belongs.
fn maker_of_stdout() -> Option<i32> {
    let maker = rustix::net::sockopt::socket_peercred(std::io::stdout()).ok()?;
    Some(maker.pid.as_raw_nonzero().get())
}

/// Returns whether the process has this pipe open for reading.
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
