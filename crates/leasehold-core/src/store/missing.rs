//! The error for a store that does not exist.

use std::fmt::Display;

use crate::types::error::{Error, ErrorKind};

/// How the reason of the error begins.
const REASON: &str = "no store found: ";

/// Returns the error for a URL whose store does not exist, if the client may not create it
/// (`create=no`). `why` is what is missing.
///
/// ```
/// use leasehold::store::kit::{is_no_store, no_store};
/// let error = no_store("the bucket \"locks\" does not exist");
/// assert_eq!(error.reason(), "no store found: the bucket \"locks\" does not exist");
/// assert!(is_no_store(&error));
/// ```
pub fn no_store(why: impl Display) -> Error {
    Error::new(ErrorKind::Config, format!("{REASON}{why}"))
}

/// Returns whether the error is that of [`no_store`].
pub fn is_no_store(error: &Error) -> bool {
    error.kind() == ErrorKind::Config && error.reason().starts_with(REASON)
}
