//! The mark in the environment that identifies the processes of a command: `LEASEHOLD_RUN`.
//!
//! The variable lists the marks of all enclosing `leasehold run` processes, outermost first. Every
//! run has a unique mark. It contains the pid, the start time and the PID namespace of the
//! `leasehold` process, the boot-clock time at which the mark was created, and a flag
//! (`Mark::is_alone`). A process that is started with [`DETACHED`] as the value does not belong to
//! any command.

use std::env;
use std::fmt;
use std::fs::read_link;
use std::str::FromStr;

use crate::proc::Stat;
use crate::{boottime, orphans};

pub(crate) const RUN: &str = "LEASEHOLD_RUN";
/// The value of `LEASEHOLD_RUN` for processes that must outlive the command.
pub(crate) const DETACHED: &str = "detached";

/// The mark that identifies one run in `LEASEHOLD_RUN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    /// The pid of the run's leasehold, and its start time in `started`.
    pub(crate) pid: i32,
    pub(crate) started: u64,
    at: u64,
    /// The PID namespace of the run's leasehold; 0 if it is unknown.
    namespace: u64,
    /// Whether all descendants of this leasehold belong to the command, except those that leasehold
    /// started itself.
    pub(crate) is_alone: bool,
}

impl Mark {
    /// Creates the mark for a command that this process is about to start.
    ///
    /// Existing children of this process do not belong to the command. `elect` has children that an
    /// earlier term left behind, and a shell with children may have become leasehold by `exec`.
    /// Orphans of these children may become children of this process later. If this process is the
    /// first one of a container, so may orphans of all other programs in it.
    pub(crate) fn new() -> Self {
        let pid = i32::try_from(std::process::id()).unwrap_or_default();
        let started = Stat::of(pid).map_or(0, |stat| stat.started());
        let is_alone = pid != 1 && !orphans::has_children();
        Self { pid, started, at: boottime::now(), namespace: namespace(), is_alone }
    }

    /// Returns the value of `LEASEHOLD_RUN` for the command's environment.
    pub(crate) fn handed_down(self) -> String {
        let above = env::var(RUN).unwrap_or_default();
        if above.is_empty() || above == DETACHED {
            self.to_string()
        } else {
            format!("{above} {self}")
        }
    }

    /// Returns whether this mark is in a value of `LEASEHOLD_RUN`.
    pub(crate) fn is_in(self, value: &str) -> bool {
        marks(value).any(|mark| mark == self)
    }

    /// Returns whether this mark is the innermost one in a value of `LEASEHOLD_RUN`.
    pub(crate) fn is_last_in(self, value: &str) -> bool {
        marks(value).last() == Some(self)
    }
}

fn marks(value: &str) -> impl Iterator<Item = Mark> {
    value.split(' ').filter_map(|mark| mark.parse().ok())
}

/// Returns whether an enclosing run is in another PID namespace, where pids have another meaning.
pub(crate) fn is_below_another_namespace() -> bool {
    let ours = namespace();
    marks(&env::var(RUN).unwrap_or_default()).any(|mark| mark.namespace != ours)
}

/// Returns the PID namespace of this process, as its inode number.
fn namespace() -> u64 {
    let link = read_link("/proc/self/ns/pid").unwrap_or_default();
    let text = link.to_string_lossy();
    text.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(0)
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, started, at, namespace, is_alone } = self;
        write!(f, "{pid}-{started}-{at}-{namespace}-{}", u8::from(*is_alone))
    }
}

impl FromStr for Mark {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut words = text.split('-');
        let mut next = || words.next().unwrap_or_default();
        Ok(Self {
            pid: next().parse()?,
            started: next().parse()?,
            at: next().parse()?,
            namespace: next().parse()?,
            is_alone: next().parse::<u8>()? == 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_found_among_others() {
        let [outer, inner] = [1, 2].map(|at| Mark { at, ..Mark::new() });
        assert_eq!(inner.to_string().parse(), Ok(inner));
        let value = format!("{outer} {inner}");
        assert!(outer.is_in(&value) && inner.is_in(&value));
        assert!(inner.is_last_in(&value) && !outer.is_last_in(&value));
        for other in ["", DETACHED, "1-2", "nonsense 1-2-3-4-x"] {
            assert!(!outer.is_in(other) && !outer.is_last_in(other), "{other}");
        }
    }
}
