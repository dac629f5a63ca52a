//! Reaps children that this process did not start.
//!
//! leasehold is a child subreaper while it runs a command, and may be the first process of a
//! container. So orphans become its children, and stay as zombies unless leasehold waits for them.
//! This module must not reap the children that leasehold started. The exit statuses of CMD and of
//! the watchdog are read elsewhere, and the group number of CMD can be reused once CMD is reaped.

use nix::errno::Errno;
use nix::libc;

/// Reaps children that have ended, until it finds one of `spared`.
pub(crate) fn reap(spared: &[i32]) {
    while let Some(pid) = ended().filter(|pid| !spared.contains(pid)) {
        let flags = libc::WEXITED | libc::WNOHANG;
        if !wait(libc::P_PID, pid.unsigned_abs(), flags).is_ok_and(|reaped| reaped > 0) {
            return;
        }
    }
}

/// Returns whether this process has children, running or not reaped.
pub(crate) fn has_children() -> bool {
    peek() != Err(Errno::ECHILD)
}

/// Returns the pid of a child that has ended, without reaping the child.
fn ended() -> Option<i32> {
    peek().ok().filter(|&pid| pid > 0)
}

fn peek() -> nix::Result<i32> {
    wait(libc::P_ALL, 0, libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL)
}

/// Calls `waitid`. Returns the pid of the child that was waited for, or 0 if no child has ended.
/// The wrapper functions of the libraries do not return the pid, or cannot name the real-time
/// signal that killed a child.
fn wait(kind: libc::idtype_t, id: libc::id_t, flags: i32) -> nix::Result<i32> {
    // SAFETY: `waitid` fills in `status`, for which zeros are a valid value.
    unsafe {
        let mut status: libc::siginfo_t = std::mem::zeroed();
        Errno::result(libc::waitid(kind, id, &raw mut status, flags))?;
        Ok(status.si_pid())
    }
}

#[cfg(test)]
mod tests {
    use super::has_children;

    #[test]
    fn a_running_child_is_seen() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        assert!(has_children());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
