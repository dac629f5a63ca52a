//! How a statement in PostgreSQL reports that its connection leads to another database than before.
//!
//! A transaction compares the database's identity with the known one. If they differ, it casts [`OTHER`] to a
//! number, which fails with an error that contains the text.

/// The message for a connection that leads to another database.
pub(super) const ELSEWHERE: &str = "the URL leads to another database server or database than when this client \
                                    connected, and locks there exclude no client here: restart this client to \
                                    use it";

/// The text that the failing cast reports.
pub(super) const OTHER: &str = "leasehold: another database";

/// Returns the message if this error reports another database.
pub(super) fn elsewhere(code: &str, says: &str) -> Option<&'static str> {
    (code == "22P02" && says.contains(OTHER)).then_some(ELSEWHERE)
}
