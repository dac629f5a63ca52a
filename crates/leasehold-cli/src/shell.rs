//! Whose life a lock of `leasehold acquire` is tied to: the calling shell.
//!
//! That is our parent, mostly. In `T=$(leasehold acquire x)` both bash and dash turn the subshell of
//! the `$(…)` into us, so our parent is the script. But in `T=$(set -e; leasehold acquire x)` it is
//! that subshell, which is gone as soon as we are, and the lock with it. Such a parent gives itself
//! away: it writes to the very pipe that we write to, its own parent does not, and it is a fork of
//! its parent without an exec in between (their memory is laid out alike, which address-space
//! randomisation makes certain). Then its parent is meant. An explicit `( … )` subshell
//! has its own stdout in common with its parent, and is taken for what it is: the caller.
//!
//! A process is its pid *and* its start time: a number may be given to somebody else.

use std::io;
use std::os::unix::process::parent_id;
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::sync::oneshot;

use crate::exit::{Failure, USAGE};
use crate::proc::Stat;

/// A process that is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) started: u64,
}

impl Process {
    /// The one that has this number now.
    pub(crate) fn with_pid(pid: i32) -> Result<Self, Failure> {
        let stat = Stat::of(pid);
        let gone = || Failure::new(USAGE, format!("no process has the number {pid} (--pid)"));
        Ok(Self { pid, started: stat.ok_or_else(gone)?.started() })
    }

    /// The shell that called us.
    pub(crate) fn calling_shell() -> Result<Self, Failure> {
        let parent = i32::try_from(parent_id()).unwrap_or_default();
        let ours = stdout_of("self").filter(|out| out.to_string_lossy().starts_with("pipe:"));
        let above = ours.and_then(|ours| substituted_by(parent, &ours));
        let caller = Self::with_pid(above.unwrap_or(parent))?;
        if i32::try_from(parent_id()).ok() != Some(parent) {
            return Err(Failure::new(USAGE, "the calling shell is gone; name a process by --pid"));
        }
        Ok(caller)
    }

    /// What the kernel calls its program.
    pub(crate) fn program(self) -> String {
        let comm = std::fs::read_to_string(format!("/proc/{}/comm", self.pid));
        comm.unwrap_or_default().trim_end().to_owned()
    }

    /// Resolves when the process ends. An error if it has ended already.
    pub(crate) fn watch(self) -> io::Result<oneshot::Receiver<()>> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let pid = Pid::from_raw(self.pid).ok_or_else(gone)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|e| match e {
            Errno::SRCH => gone(),
            other => other.into(),
        })?;
        // The descriptor is of whoever has the number now; if that one was started when ours was,
        // it is ours.
        if Stat::of(self.pid).is_none_or(|s| s.started() != self.started) {
            return Err(gone());
        }
        let (tell, ended) = oneshot::channel();
        std::thread::Builder::new().name("shell".into()).spawn(move || {
            let mut end = [PollFd::new(&pidfd, PollFlags::IN)];
            while poll(&mut end, None) == Err(Errno::INTR) {}
            let _ = tell.send(());
        })?;
        Ok(ended)
    }
}

/// If `pid` is the subshell of a `$(…)` that ends in our pipe, or one inside it: the shell that made
/// it.
fn substituted_by(pid: i32, ours: &PathBuf) -> Option<i32> {
    let image = Stat::of(pid)?.image()?;
    let mut inside = pid;
    loop {
        if stdout_of(&inside.to_string())? != *ours {
            // Never at first: then somebody between us and the pipe's reader is the caller.
            return (inside != pid).then_some(inside);
        }
        inside = Stat::of(inside)?.parent();
        if Stat::of(inside)?.image()? != image {
            return None;
        }
    }
}

fn stdout_of(process: &str) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{process}/fd/1")).ok()
}
