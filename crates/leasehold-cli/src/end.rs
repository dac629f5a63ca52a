//! How `leasehold run` ends: with a code, or by the signal that ended what it did.

use std::process::ExitCode;

use nix::sys::signal::Signal;

use crate::{signals, terminal};

/// How leasehold is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Code(u8),
    /// By the signal that ended our waiting.
    Signal(i32),
    /// With the whole job, by Ctrl-C.
    Interrupted,
}

impl End {
    /// Ends so, or gives the code to end with.
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
