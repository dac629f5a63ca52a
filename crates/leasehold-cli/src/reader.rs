//! Whether anybody reads our stdout.
//!
//! Who writes learns that nobody reads as it writes. Who has nothing to say for hours has to be told: the kernel
//! reports an error on a pipe, and a hang-up on a socket or a terminal, to whoever polls it for nothing at all.

use std::io::{self, stdout};
use std::os::fd::AsFd;
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};

/// Calls `gone` when nobody reads stdout any more, where that can be known (a file has no reader).
pub(crate) fn watch(gone: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let out = stdout().as_fd().try_clone_to_owned()?;
    let watch = move || {
        loop {
            let mut watched = [PollFd::new(&out, PollFlags::empty())];
            match poll(&mut watched, None) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                // No more memory: then nobody is told.
                Err(_) => return,
            }
        }
        gone();
    };
    thread::Builder::new().name("stdout".into()).spawn(watch).map(drop)
}
