//! What we were started with, seen before Rust's runtime changes it.
//!
//! The runtime ignores SIGPIPE and opens /dev/null in the place of a standard stream that is
//! closed, both before `main`. But CMD is to have the SIGPIPE that we were given, and a token that
//! is printed to nobody is a lock that nobody knows of. So we look earlier: a constructor, which
//! the C library runs before all of Rust.

use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc;

static SIGPIPE_IGNORED: AtomicBool = AtomicBool::new(false);
static STDOUT_CLOSED: AtomicBool = AtomicBool::new(false);

/// Whether whoever started us had SIGPIPE ignored.
pub(crate) fn sigpipe_ignored() -> bool {
    SIGPIPE_IGNORED.load(Ordering::Relaxed)
}

/// Whether there was no stdout.
pub(crate) fn stdout_closed() -> bool {
    STDOUT_CLOSED.load(Ordering::Relaxed)
}

extern "C" fn look() {
    // SAFETY: the call only fills in `before`, for which zeros are a valid value.
    let ignored = unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut before) == 0
            && before.sa_sigaction == libc::SIG_IGN
    };
    SIGPIPE_IGNORED.store(ignored, Ordering::Relaxed);
    // SAFETY: asks for a flag of a number that need not be a descriptor.
    let closed = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) } == -1;
    STDOUT_CLOSED.store(closed, Ordering::Relaxed);
}

// SAFETY: a list of functions that the C library calls once, in this thread, before `main`; what
// `look` does (two system calls and two stores) needs nothing of Rust's runtime.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;
