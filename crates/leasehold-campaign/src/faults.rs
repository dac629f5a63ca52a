//! The faults that are injected in a run.

use std::fmt;

/// The faults that are injected in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Faults {
    /// All faults that processes can have.
    All,
    /// Faults of the servers, and some of processes.
    Servers,
    /// Processes are paused.
    Pause,
    /// Processes are killed.
    Kill,
    /// The connections of processes to the store are cut.
    Cut,
    /// Processes are paused while a reply is on its way to them.
    Stale,
    /// Servers are partitioned from each other, and the power of all servers is cut. Some processes
    /// have faults at the same time.
    Outage,
}

impl Faults {
    /// All of them, in the order of a round.
    pub const ALL: [Self; 7] =
        [Self::All, Self::Servers, Self::Outage, Self::Pause, Self::Kill, Self::Cut, Self::Stale];
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::All => "all",
            Self::Servers => "servers",
            Self::Pause => "pause",
            Self::Kill => "kill",
            Self::Cut => "cut",
            Self::Stale => "stale",
            Self::Outage => "outage",
        })
    }
}
