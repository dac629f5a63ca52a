//! The error by which a PostgreSQL statement reports that its connection leads to a different
//! database than before.
//!
//! A transaction compares the identity of the database with the known one. If they differ, it casts
//! [`OTHER`] to a number, which fails with an error that contains the text.

/// The message for a connection that leads to another database.
pub(in crate::store) const ELSEWHERE: &str = "the URL now leads to another database server or database, which does not have \
                                    this client's locks: restart this client to use it";

/// The text that the failing cast reports.
pub(in crate::store) const OTHER: &str = "leasehold: another database";

/// Returns the error message for the user, if the server's error reports another database.
pub(in crate::store) fn elsewhere(code: &str, says: &str) -> Option<&'static str> {
    (code == "22P02" && says.contains(OTHER)).then_some(ELSEWHERE)
}
