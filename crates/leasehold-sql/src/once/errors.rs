//! Errors of a work that are outcomes.

use super::key::Ended;
use leasehold_core::{Error, ErrorKind, Result};

/// What is kept of a work's errors, and what it is again.
pub(super) struct Errors<E> {
    pub(super) keep: fn(&E) -> Option<String>,
    pub(super) read: fn(String) -> E,
}

impl<E> Clone for Errors<E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Errors<E> {}

/// What an earlier work came to.
pub(super) fn earlier<E>(
    ended: Ended,
    outcome: Option<String>,
    errors: Option<Errors<E>>,
) -> Result<Result<String, E>> {
    let text = outcome.ok_or_else(|| {
        let what = "it was done before, and the database could not store its outcome then: ask whoever \
                    did it; it is not done again";
        Error::new(ErrorKind::Corrupt, what)
    })?;
    match (ended, errors) {
        (Ended::Done, _) => Ok(Ok(text)),
        (Ended::Refused, Some(errors)) => Ok(Err((errors.read)(text))),
        (Ended::Refused, None) => {
            let shown: String = text.chars().take(60).collect();
            let what = format!(
                "it ended before in an error that was kept, {shown:?}: read it with keep_errors"
            );
            Err(Error::new(ErrorKind::Config, what))
        }
    }
}
