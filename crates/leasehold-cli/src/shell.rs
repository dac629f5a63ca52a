//! Whose life a lock of `leasehold acquire` is tied to: the shell that gets the token.
//!
//! In `T=$(leasehold acquire x)` that is the shell which made the `$(…)`: the one that has the
//! other end of our stdout. What runs in between may be gone as soon as we are: a subshell,
//! `timeout`, `strace`, `sudo`, `bash -c`. So where our stdout is a pipe, the caller is the nearest
//! process above us that reads it. If nobody above us does (a pipeline: `leasehold acquire x | tail
//! -1`), or if it is no shell (sshd, make), nobody is known who would hold the lock for as long as
//! it is worked under, and it is refused: better no lock than one that is gone before the section
//! begins.
//!
//! Where our stdout is no pipe (a file, a terminal), our parent is the caller, if it is a shell.
//!
//! A process is its pid *and* its start time: a number may be given to somebody else.

use std::fs::{read_dir, read_link, read_to_string};
use std::io;
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};

use nix::libc;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::sync::oneshot;

use crate::exit::{Failure, USAGE};
use crate::proc::{Stat, lineage};

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

    /// Whoever started us, if it is there.
    pub(crate) fn parent() -> Option<Self> {
        let pid = i32::try_from(parent_id()).ok()?;
        Some(Self { pid, started: Stat::of(pid)?.started() })
    }

    /// The shell that called us.
    pub(crate) fn calling_shell() -> Result<Self, Failure> {
        let parent = i32::try_from(parent_id()).unwrap_or_default();
        let ours = read_link("/proc/self/fd/1").ok();
        let pipe = ours.filter(|out| out.to_string_lossy().starts_with("pipe:"));
        let caller = match &pipe {
            Some(pipe) => lineage(parent).find(|&pid| reads(pid, pipe)),
            None => Some(parent),
        };
        let shell = caller.filter(|&pid| is_shell(pid)).ok_or_else(|| {
            let what = match (&pipe, caller) {
                (Some(_), Some(pid)) => format!("the token goes to {}, no shell", program(pid)),
                (Some(_), None) => "the token goes to no shell above this command".to_owned(),
                (None, _) => format!("this was called by {}, no shell", program(parent)),
            };
            let fix = "say by --pid whose end releases the lock (in a script: --pid $$)";
            Failure::new(USAGE, format!("nothing was taken: {what}; {fix}"))
        })?;
        let shell = Self::with_pid(shell)?;
        if i32::try_from(parent_id()).ok() != Some(parent) {
            return Err(Failure::new(USAGE, "the calling shell is gone; name a process by --pid"));
        }
        Ok(shell)
    }

    /// What the kernel calls its program.
    pub(crate) fn program(self) -> String {
        program(self.pid)
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

/// What the kernel calls the program of this process.
fn program(pid: i32) -> String {
    let comm = read_to_string(format!("/proc/{pid}/comm"));
    comm.unwrap_or_default().trim_end().to_owned()
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

/// The shells of this world that run scripts and wait for what they call.
const SHELLS: [&str; 16] = [
    "ash", "bash", "busybox", "dash", "elvish", "fish", "ksh", "ksh93", "lksh", "mksh", "oksh",
    "posh", "sh", "tcsh", "yash", "zsh",
];

/// Whether the process is a shell, by its executable (its name is a script's, often).
fn is_shell(pid: i32) -> bool {
    let Ok(path) = read_link(format!("/proc/{pid}/exe")) else { return false };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // One that was replaced by an upgrade while it runs.
    let name = name.strip_suffix(" (deleted)").unwrap_or(&name);
    // Of the package, too: dash.real, bash-static, zsh5, ksh93.
    let name = name.split(['-', '.']).next().unwrap_or_default();
    SHELLS.contains(&name) || SHELLS.contains(&name.trim_end_matches(|c: char| c.is_ascii_digit()))
}
