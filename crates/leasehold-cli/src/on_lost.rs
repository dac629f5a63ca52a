//! What is started when CMD is ended because of its lock: for whoever has to be woken.
//!
//! It is a program and no shell's line, runs in a process group of its own, and is not waited for: neither it
//! nor CMD holds the other up, and it may outlive us. It has what CMD had in its environment, and why.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::events::{Event, Events};
use crate::mark::{DETACHED, RUN};
use crate::priority;

/// What is to be started, once.
pub(crate) struct OnLost<'a> {
    pub(crate) program: Option<&'a OsStr>,
    /// CMD's.
    pub(crate) environment: Vec<(&'static str, String)>,
}

impl OnLost<'_> {
    /// Starts it, the first time, and returns its pid. That it could not be started is said.
    pub(crate) fn start(&mut self, why: &str, events: &Events) -> Option<i32> {
        let program = self.program.take()?;
        let mut command = Command::new(program);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.env("LEASEHOLD_REASON", why).env(RUN, DETACHED);
        command.stdin(Stdio::null()).process_group(0);
        // SAFETY: one system call, which is async-signal-safe.
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
                events.tell(&Event::Warning { message });
                None
            }
        }
    }
}
