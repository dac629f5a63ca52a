//! What is done in a run.

use std::fmt;

/// What is done in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Faults {
    /// To processes, all that can be done to them.
    All,
    /// To the servers, and some to processes.
    Servers,
    /// Processes are stopped for a while.
    Pause,
    /// Processes are killed.
    Kill,
    /// Their connections to the store are cut.
    Cut,
}

impl Faults {
    /// All of them, in the order in which a round goes through them.
    pub const ALL: [Self; 5] = [Self::All, Self::Servers, Self::Pause, Self::Kill, Self::Cut];
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::All => "all",
            Self::Servers => "servers",
            Self::Pause => "pause",
            Self::Kill => "kill",
            Self::Cut => "cut",
        })
    }
}
