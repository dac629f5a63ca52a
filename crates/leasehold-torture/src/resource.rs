//! What the locks protect: a register and a set, written by read, think, write.
//!
//! Both live in the parent, as a database would live on another machine. A write says on which
//! version it builds, so whatever was written since that read is overwritten: the lost update that
//! a lock is there to prevent. The register is the number of versions below the last, the set is
//! who wrote them.
//!
//! The *plain* resource takes every write. The *fenced* one keeps the highest token it has seen
//! and refuses lower ones, checking and acting in one step. It looks at the token of *reads* too:
//! otherwise a new holder could read, a late write with the old (not yet exceeded) token be taken,
//! and the new holder overwrite it.

use serde::{Deserialize, Serialize};

use super::history::{Final, OpId};

/// What a read tells, for the write that builds on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Read {
    pub(super) version: usize,
    /// What the register said.
    pub(super) value: u64,
}

/// A register and a set.
#[derive(Clone, Debug, Default)]
pub(super) struct Cell {
    /// Each with the version it was built on, counted from 1; 0 is the empty beginning.
    versions: Vec<(usize, OpId)>,
    current: usize,
    value: u64,
    fence: Option<u64>,
}

impl Cell {
    /// Takes every write.
    pub(super) fn plain() -> Self {
        Self::default()
    }

    /// Refuses tokens below the highest that it has seen.
    pub(super) fn fenced() -> Self {
        Self { fence: Some(0), ..Self::default() }
    }

    fn admits(&mut self, token: u64) -> bool {
        let Some(highest) = &mut self.fence else { return true };
        let admitted = token >= *highest;
        *highest = token.max(*highest);
        admitted
    }

    /// What it holds, or `None` if the token is late.
    pub(super) fn read(&mut self, token: u64) -> Option<Read> {
        let read = Read { version: self.current, value: self.value };
        self.admits(token).then_some(read)
    }

    /// Increments the register and adds `op` to the set, as `read` saw them. Tells whether the
    /// write was taken.
    pub(super) fn write(&mut self, token: u64, read: Read, op: OpId) -> bool {
        if !self.admits(token) || read.version > self.versions.len() {
            return false;
        }
        self.versions.push((read.version, op));
        self.current = self.versions.len();
        self.value = read.value + 1;
        true
    }

    /// The register and the set.
    pub(super) fn end(&self) -> Final {
        let mut set = Vec::new();
        let mut version = self.current;
        while let Some((base, op)) = version.checked_sub(1).and_then(|i| self.versions.get(i)) {
            set.push(*op);
            version = *base;
        }
        Final { value: self.value, set }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(n: u32) -> OpId {
        OpId { worker: 0, n }
    }

    #[test]
    fn r40_a_late_write_clobbers_the_plain_resource_and_not_the_fenced_one() {
        let mut plain = Cell::plain();
        let mut fenced = Cell::fenced();
        let late = (plain.read(5).unwrap(), fenced.read(5).unwrap());
        let next = (plain.read(6).unwrap(), fenced.read(6).unwrap());
        assert!(plain.write(6, next.0, op(6)) && fenced.write(6, next.1, op(6)));
        assert!(plain.write(5, late.0, op(5)));
        assert!(!fenced.write(5, late.1, op(5)));
        assert_eq!((plain.end().value, plain.end().set), (1, vec![op(5)]));
        assert_eq!((fenced.end().value, fenced.end().set), (1, vec![op(6)]));
    }

    #[test]
    fn a_read_with_a_newer_token_shuts_the_older_out() {
        let mut fenced = Cell::fenced();
        let late = fenced.read(5).unwrap();
        let next = fenced.read(6).unwrap();
        assert!(!fenced.write(5, late, op(5)), "the new holder has read already");
        assert!(fenced.write(6, next, op(6)));
        assert_eq!(fenced.read(5), None);
    }

    #[test]
    fn a_write_on_a_version_that_never_was_is_refused() {
        assert!(!Cell::plain().write(1, Read { version: 7, value: 7 }, op(1)));
    }
}
