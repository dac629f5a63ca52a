//! Reaps children that this process did not start.
//!
//! leasehold is a child subreaper while it runs a command, and may be the first process of a
//! container. So orphans become its children, and stay as zombies unless it waits for them. It must
//! not wait for its own: the status of CMD and of the watchdog is read elsewhere, and the number of
//! CMD's group is free once CMD is reaped.

use nix::errno::Errno;
use nix::libc;

/// Reaps all children that have ended, up to the first of these.
pub(crate) fn reap(spared: &[i32]) {
    while let Some(pid) = ended().filter(|pid| !spared.contains(pid)) {
        let flags = libc::WEXITED | libc::WNOHANG;
        if wait(libc::P_PID, pid.unsigned_abs(), flags).is_none() {
            return;
        }
    }
}

/// A child that has ended. It is not reaped.
fn ended() -> Option<i32> {
    wait(libc::P_ALL, 0, libc::WEXITED | libc::WNOHANG | libc::WNOWAIT)
}

/// The pid of the child that was waited for. (The wrappers have no pid, or no name for a child that
/// a real-time signal killed.)
fn wait(kind: libc::idtype_t, id: libc::id_t, flags: i32) -> Option<i32> {
    // SAFETY: waitid fills in `status`, for which zeros are a valid value, and which says pid 0 if
    // there was none.
    let pid = unsafe {
        let mut status: libc::siginfo_t = std::mem::zeroed();
        Errno::result(libc::waitid(kind, id, &raw mut status, flags)).ok()?;
        status.si_pid()
    };
    (pid > 0).then_some(pid)
}
