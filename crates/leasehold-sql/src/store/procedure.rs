//! Procedures that the server keeps: what they are called, what makes them, how they are called (`procedures.rs`
//! says what for).

use std::sync::atomic::{AtomicBool, Ordering};

use super::wire::Statement;

/// Part of their names: to be raised with each change of their texts.
pub(super) const VERSION: u32 = 2;

/// Both procedures of a database.
#[derive(Debug)]
pub(super) struct Procedures {
    pub(super) stand: Procedure,
    pub(super) hand_over: Procedure,
    /// Whether this user may make them: a row.
    pub(super) may_make: Statement,
    /// Which claim was the last that handed over in this session for good: one text.
    pub(super) left: Statement,
    /// Whether both were found.
    ready: AtomicBool,
}

/// A procedure of the server's.
#[derive(Debug)]
pub(super) struct Procedure {
    /// What makes it.
    pub(super) create: String,
    /// What it does, as the server keeps it.
    pub(super) body: String,
    /// Its text, if there is one of this name.
    pub(super) find: Statement,
    /// One row, of NULLs where nothing was done.
    pub(super) call: Statement,
}

impl Procedures {
    pub(super) fn new(
        stand: Procedure,
        hand_over: Procedure,
        may_make: Statement,
        left: Statement,
    ) -> Self {
        Self { stand, hand_over, may_make, left, ready: AtomicBool::new(false) }
    }

    /// Whether they are called.
    pub(super) fn are_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed)
    }

    /// From now on they are not, or are.
    pub(super) fn set_ready(&self, ready: bool) {
        self.ready.store(ready, Ordering::Relaxed);
    }
}
