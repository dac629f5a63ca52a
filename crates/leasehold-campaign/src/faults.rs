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
    /// The wall clock of each process is wrong. Processes have all other faults at the same time.
    Clocks,
}

impl Faults {
    /// All kinds of faults, in the order in which a round runs them.
    pub const ALL: [Self; 8] = [
        Self::All,
        Self::Servers,
        Self::Outage,
        Self::Pause,
        Self::Kill,
        Self::Cut,
        Self::Stale,
        Self::Clocks,
    ];
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
            Self::Clocks => "clocks",
        })
    }
}
