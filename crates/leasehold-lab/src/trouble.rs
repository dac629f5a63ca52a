//! Why a story could not be played: one line, whatever it was that failed.

use std::fmt;

/// What kept a story from being played to its end.
pub(crate) struct Trouble(String);

pub(crate) type Result<T> = std::result::Result<T, Trouble>;

impl Trouble {
    pub(crate) fn new(why: impl Into<String>) -> Self {
        Self(why.into())
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line: Vec<&str> = self.0.split_whitespace().collect();
        f.write_str(&line.join(" "))
    }
}

impl<E: std::error::Error> From<E> for Trouble {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}
