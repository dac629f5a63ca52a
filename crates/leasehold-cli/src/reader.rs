//! Detects that no process reads stdout any longer.
//!
//! A process that writes finds out when it writes. A process that writes nothing for hours has to
//! poll. The kernel reports an error on a pipe, and a hang-up on a socket or a terminal, even to a
//! poll for no events.

use std::io::{self, stdout};
use std::os::fd::AsFd;
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};

/// Calls `gone` when no process reads stdout any longer. It is never called for a file, which has
/// no reader.
pub(crate) fn watch(gone: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let out = stdout().as_fd().try_clone_to_owned()?;
    let watch = move || {
        loop {
            let mut watched = [PollFd::new(&out, PollFlags::empty())];
            match poll(&mut watched, None) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                // The kernel is out of memory, so `gone` is not called.
                Err(_) => return,
            }
        }
        gone();
    };
    thread::Builder::new().name("stdout".into()).spawn(watch).map(drop)
}
