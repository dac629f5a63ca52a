//! Errors of the work that are kept as outcomes.

use super::key::Ended;
use leasehold_core::{Error, ErrorKind, Result};

/// Functions that convert errors of the work to stored text, and back.
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

/// Returns the outcome of work that was done earlier.
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
