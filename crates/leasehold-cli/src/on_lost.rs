//! The program that is started when CMD is stopped because of its lock, for example to alert a
//! person.
//!
//! It is executed directly, not by a shell. It runs in a process group of its own. leasehold does
//! not wait for it, so the program and CMD do not delay each other, and it may outlive leasehold.
//! Its environment is CMD's, with the reason in `LEASEHOLD_REASON`.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::events::{Event, Events};
use crate::mark::{DETACHED, RUN};
use crate::priority;

/// The program, which is started at most once.
pub(crate) struct OnLost<'a> {
    pub(crate) program: Option<&'a OsStr>,
    /// The variables that were added to CMD's environment.
    pub(crate) environment: Vec<(&'static str, String)>,
}

impl OnLost<'_> {
    /// Starts the program on the first call, and returns its pid. If it cannot be started, a
    /// warning is printed.
    pub(crate) fn start(&mut self, why: &str, events: &Events) -> Option<i32> {
        let program = self.program.take()?;
        let mut command = Command::new(program);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.env("LEASEHOLD_REASON", why).env(RUN, DETACHED);
        command.stdin(Stdio::null()).process_group(0);
        // SAFETY: The closure makes one system call, which is async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                priority::restore();
                Ok(())
            });
        }
        match command.spawn() {
            Ok(child) => i32::try_from(child.id()).ok(),
            Err(error) => {
                let message = format!("cannot start {program:?} (--on-lost): {error}");
                events.print(&Event::Warning { message });
                None
            }
        }
    }
}
