//! The priority of leasehold itself, where it may be raised (root, CAP_SYS_NICE or RLIMIT_NICE).
//!
//! A command that takes all processor time of its container or of a small machine keeps its own
//! leasehold from renewing the lease, and the watchdog from killing it in time. Both need very
//! little time, but need it soon. The command gets the priority that we were started with.

use std::sync::OnceLock;

use rustix::process::{getpriority_process, setpriority_process};

/// Ahead of whatever a command does by default.
const RAISED: i32 = -15;

static BEFORE: OnceLock<i32> = OnceLock::new();

/// Raises the priority of this thread, and of what it starts from now on.
pub(crate) fn raise() {
    let Ok(before) = getpriority_process(None) else { return };
    if before > RAISED && setpriority_process(None, RAISED).is_ok() {
        let _ = BEFORE.set(before);
    }
}

/// Undoes it for a program that is about to be executed. Only a system call: also called between
/// fork and exec.
pub(crate) fn restore() {
    if let Some(&before) = BEFORE.get() {
        let _ = setpriority_process(None, before);
    }
}
