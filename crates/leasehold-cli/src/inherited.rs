//! Records properties of the process before Rust's runtime changes them.
//!
//! Before `main`, the runtime ignores SIGPIPE and opens /dev/null in place of a closed standard
//! stream. But CMD must get the original disposition of SIGPIPE. And a token must not be printed to
//! a closed stdout, because then no process would know the token of the lock. Therefore a
//! constructor, which the C library runs before any Rust code, records the originals.

use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc;

static SIGPIPE_IGNORED: AtomicBool = AtomicBool::new(false);
static STDOUT_CLOSED: AtomicBool = AtomicBool::new(false);

/// Returns whether SIGPIPE was ignored when this process was started.
pub(crate) fn sigpipe_ignored() -> bool {
    SIGPIPE_IGNORED.load(Ordering::Relaxed)
}

/// Returns whether stdout was closed when this process was started.
pub(crate) fn stdout_closed() -> bool {
    STDOUT_CLOSED.load(Ordering::Relaxed)
}

extern "C" fn look() {
    // SAFETY: The call only fills in `before`, for which zeros are a valid value.
    let ignored = unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut before) == 0
            && before.sa_sigaction == libc::SIG_IGN
    };
    SIGPIPE_IGNORED.store(ignored, Ordering::Relaxed);
    // SAFETY: The call reads a flag of a number, which does not have to be an open descriptor.
    let closed = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) } == -1;
    STDOUT_CLOSED.store(closed, Ordering::Relaxed);
}

// SAFETY: The C library calls the functions of this list once, in this thread, before `main`.
// `look` makes two system calls and two stores, which need nothing of Rust's runtime.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;
