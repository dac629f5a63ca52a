//! The resources that the locks protect: a register and a set. Workers read them, think, and write
//! them.
//!
//! Both are in the parent, as a database would be on another machine. A write names the version
//! that it builds on, so everything that was written since that read is overwritten. That is the
//! lost update that a lock prevents. The register is the number of versions that the last one
//! builds on, and the set contains the operations that wrote them.
//!
//! The *plain* resource accepts every write. The *fenced* one stores the highest token seen and
//! refuses lower ones, with check and write in one step. It checks the tokens of *reads* as well.
//! Otherwise a new holder could read, then a late write with the old token would be accepted, and
//! the new holder would overwrite it.

use serde::{Deserialize, Serialize};

use super::history::{Final, OpId};

/// The result of a read, for the write that builds on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Read {
    pub(super) version: usize,
    /// Value of the register.
    pub(super) value: u64,
}

/// A register and a set.
#[derive(Clone, Debug, Default)]
pub(super) struct Cell {
    /// All versions, each with the version that it builds on. They count from 1, and 0 is the empty
    /// state.
    versions: Vec<(usize, OpId)>,
    current: usize,
    value: u64,
    fence: Option<u64>,
}

impl Cell {
    /// Creates a resource that accepts every write.
    pub(super) fn plain() -> Self {
        Self::default()
    }

    /// Creates a resource that refuses tokens below the highest token seen.
    pub(super) fn fenced() -> Self {
        Self { fence: Some(0), ..Self::default() }
    }

    fn admits(&mut self, token: u64) -> bool {
        let Some(highest) = &mut self.fence else { return true };
        let admitted = token >= *highest;
        *highest = token.max(*highest);
        admitted
    }

    /// Returns its contents, or `None` if the token is stale.
    pub(super) fn read(&mut self, token: u64) -> Option<Read> {
        let read = Read { version: self.current, value: self.value };
        self.admits(token).then_some(read)
    }

    /// Increments the register and adds `op` to the set, both as `read` saw them. Returns whether
    /// the write was accepted.
    pub(super) fn write(&mut self, token: u64, read: Read, op: OpId) -> bool {
        if !self.admits(token) || read.version > self.versions.len() {
            return false;
        }
        self.versions.push((read.version, op));
        self.current = self.versions.len();
        self.value = read.value + 1;
        true
    }

    /// Returns the final contents of the register and the set.
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

    // R40
    #[test]
    fn stale_write_clobbers_only_the_unfenced_resource() {
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
    fn read_with_a_newer_token_fences_off_the_older_one() {
        let mut fenced = Cell::fenced();
        let late = fenced.read(5).unwrap();
        let next = fenced.read(6).unwrap();
        assert!(
            !fenced.write(5, late, op(5)),
            "a stale write was accepted after the new holder's read"
        );
        assert!(fenced.write(6, next, op(6)));
        assert_eq!(fenced.read(5), None);
    }

    #[test]
    fn write_on_an_unknown_version_is_rejected() {
        assert!(!Cell::plain().write(1, Read { version: 7, value: 7 }, op(1)));
    }
}
