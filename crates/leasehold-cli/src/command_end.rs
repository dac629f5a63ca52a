//! How `leasehold run` ends: with an exit code, or by a signal.

use std::process::ExitCode;

use nix::sys::signal::Signal;

use crate::{signals, terminal};

/// How leasehold must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandEnd {
    Code(u8),
    /// By the signal that ended the wait for the lock.
    Signal(i32),
    /// Together with the whole job, by Ctrl-C.
    Interrupted,
}

impl CommandEnd {
    /// Ends the process by the signal, or returns the exit code.
    pub(crate) fn exit(self) -> ExitCode {
        match self {
            Self::Code(code) => ExitCode::from(code),
            Self::Signal(number) => ExitCode::from(signals::die_of(number)),
            Self::Interrupted => {
                terminal::interrupt_our_group();
                ExitCode::from(signals::die_of(Signal::SIGINT as i32))
            }
        }
    }
}
