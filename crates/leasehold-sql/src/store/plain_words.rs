//! The statements of a plain turn. The argument for its correctness is in `plain.rs`.

use super::wire::Statement;

/// The statements of a plain turn (`postgres/plain.rs`, `mysql/plain.rs`).
#[derive(Debug)]
pub(super) struct Plain {
    /// Locks the lock's row. Argument: name.
    pub(super) lock: Statement,
    /// Joins the queue. Returns the token, the number of claims ahead, and the maximum time for
    /// which the first of these still holds. Returns no row if the case is not simple enough.
    pub(super) stand: Statement,
    /// Hands over. Returns the ID, token and client of the next claim, if there is one. Returns no
    /// row if the case is not simple enough.
    pub(super) hand_over: Statement,
    /// Notifies the client of the next claim. Arguments: this client, and `notified_prefix`.
    pub(super) tell: Statement,
    /// The prefix of the names of clients that `tell` notifies.
    pub(super) notified_prefix: &'static str,
}
