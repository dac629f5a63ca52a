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
        let what = "the work was already done, but the database could not store its outcome";
        let hint = "the first caller has the outcome; the work is not done again under this key";
        Error::new(ErrorKind::Corrupt, what).with_hint(hint)
    })?;
    match (ended, errors) {
        (Ended::Done, _) => Ok(Ok(text)),
        (Ended::Refused, Some(errors)) => Ok(Err((errors.read)(text))),
        (Ended::Refused, None) => {
            let shown: String = text.chars().take(60).collect();
            let what = format!("the work already ended with an error that was kept: {shown:?}");
            Err(Error::new(ErrorKind::Config, what).with_hint("call keep_errors to read it"))
        }
    }
}
