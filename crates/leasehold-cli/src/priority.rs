//! Raises the priority of leasehold itself, if that is permitted (root, CAP_SYS_NICE or
//! RLIMIT_NICE).
//!
//! A command may use all processor time of its container or of a small machine. Then its leasehold
//! cannot renew the lease, and the watchdog cannot kill the command in time. Both need very little
//! time, but need it immediately. The command gets the priority that leasehold was started with.

use std::sync::OnceLock;

use rustix::process::{getpriority_process, setpriority_process};

/// A priority higher than that of an ordinary command.
const RAISED: i32 = -15;

static BEFORE: OnceLock<i32> = OnceLock::new();

/// Raises the priority of this thread, and of threads and processes that it starts later.
pub(crate) fn raise() {
    let Ok(before) = getpriority_process(None) else { return };
    if before > RAISED && setpriority_process(None, RAISED).is_ok() {
        let _ = BEFORE.set(before);
    }
}

/// Restores the original priority for a program that is about to be executed. It makes only a
/// system call, so it may be called between fork and exec.
pub(crate) fn restore() {
    if let Some(&before) = BEFORE.get() {
        let _ = setpriority_process(None, before);
    }
}
