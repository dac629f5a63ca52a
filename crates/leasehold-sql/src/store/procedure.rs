//! The stored procedures: their names, and the SQL that creates and calls them. `procedures.rs`
//! explains their purpose.

use std::sync::atomic::{AtomicBool, Ordering};

use super::wire::Statement;

/// The version of the procedures' texts, which is part of their names. Increase the version with
/// each change of the texts.
pub(super) const VERSION: u32 = 2;

/// Both procedures of a database.
#[derive(Debug)]
pub(super) struct Procedures {
    pub(super) stand: Procedure,
    pub(super) hand_over: Procedure,
    /// Returns a row if this user may create the procedures.
    pub(super) may_make: Statement,
    /// Returns the last claim whose hand-over was committed in this session, as one text.
    pub(super) left: Statement,
    /// Whether both procedures were found.
    ready: AtomicBool,
}

/// A stored procedure.
#[derive(Debug)]
pub(super) struct Procedure {
    /// The statement that creates the procedure.
    pub(super) create: String,
    /// The procedure's body, as the server stores it.
    pub(super) body: String,
    /// Returns the text of the procedure with this name, if it exists.
    pub(super) find: Statement,
    /// Calls the procedure. Returns one row, which consists of NULLs if nothing was done.
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

    /// Returns whether the procedures are called.
    pub(super) fn are_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed)
    }

    /// Sets whether the procedures are called from now on.
    pub(super) fn set_ready(&self, ready: bool) {
        self.ready.store(ready, Ordering::Relaxed);
    }
}
