//! What a plain turn says to the server (`plain.rs` says why it is right).

use super::procedure::Procedures;
use super::wire::Statement;

/// The statements of a plain turn (`plain_postgres.rs`, `plain_mysql.rs`).
#[derive(Debug)]
pub(super) struct Plain {
    /// Argument: name.
    pub(super) lock: Statement,
    /// Token, how many are before it, and for how long the first of them holds at most; no row: it is not
    /// as simple as that.
    pub(super) stand: Statement,
    /// The next one's claim, token and client, if there is one; no row: it is not as simple as that.
    pub(super) hand_over: Statement,
    pub(super) tell: Statement,
    /// What the names of those begin with whom it tells.
    pub(super) told: &'static str,
    /// The same as procedures of the server's, where it can be asked for them.
    pub(super) procedures: Option<Procedures>,
}

/// The result of a hand-over in one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HandedOver {
    Done,
    /// The queue is not one that a plain turn can serve.
    Not,
    /// The message failed, and the hand-over may or may not have happened.
    Perhaps,
}
