//! The error of a story that could not be played, in one line.

use std::fmt;

/// The reason why a story was not played to its end.
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
