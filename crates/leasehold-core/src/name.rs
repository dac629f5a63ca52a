//! Lock names: data from outside, checked once and never interpreted.
//!
//! A [`Name`] is 1 to 512 bytes of UTF-8 without control characters. Each store encodes it
//! injectively (two names never meet in one file, key or path), so a name such as `a/../b` is only
//! ever a name. Names are compared byte for byte: `Job`, `job` and `job ` are three locks, and
//! look-alike Unicode is not folded.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};

/// The longest lock name, in bytes of UTF-8.
pub const MAX_NAME_BYTES: usize = 512;

/// The name of a lock, already checked. Cheap to clone.
///
/// Its `Display` form is quoted and escaped, so that a name can never forge a line in a log. It is
/// for people: `name.to_string()` is another name than `name`. What takes a name takes a `&Name` as
/// it is.
///
/// ```
/// use leasehold::Name;
/// let name: Name = "order:42".parse()?;
/// assert_eq!(name.as_str(), "order:42");
/// assert_eq!(name.to_string(), "\"order:42\""); // for people
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "String", into = "String"))]
pub struct Name(Arc<str>);

impl Name {
    /// Checks `name` and keeps it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidName`] if it is empty, longer than 512 bytes, or holds a control
    /// character (which includes NUL, tab, carriage return and line feed).
    pub fn new(name: impl AsRef<str>) -> Result<Self> {
        let name = name.as_ref();
        let refused = |why: String| {
            let shown: String = name.chars().take(40).collect();
            Err(Error::new(ErrorKind::InvalidName, format!("lock name {shown:?} {why}")))
        };
        if name.is_empty() {
            return refused("is empty: give the lock a name of 1 to 512 bytes".into());
        }
        if name.len() > MAX_NAME_BYTES {
            let len = name.len();
            return refused(format!("… is {len} bytes long; the most is {MAX_NAME_BYTES}"));
        }
        if let Some(c) = name.chars().find(|c| c.is_control()) {
            return refused(format!("holds the control character {c:?}; remove it"));
        }
        Ok(Self(name.into()))
    }

    /// The name as it was given.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::new(name)
    }
}

impl TryFrom<String> for Name {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        Self::new(name)
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.as_str().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s90_names_are_checked_and_never_forge_a_log_line() {
        for good in ["a", "a/../b", "order:42", "\"quoted\" 'twice'", "ключ", &"x".repeat(512)]
        {
            assert_eq!(Name::new(good).unwrap().as_str(), good);
        }
        for bad in ["", "a\0b", "a\r\nb", "tab\t", "\u{7f}", &"x".repeat(513), &"é".repeat(257)] {
            let error = Name::new(bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidName);
            assert!(!error.to_string().contains(char::is_control), "{error}");
        }
        // A line separator is no control character: it is a fine name, and stays on one line.
        let odd = Name::new("a\u{2028}b").unwrap();
        assert_eq!(odd.to_string(), "\"a\\u{2028}b\"");
        assert!(Name::new("x".repeat(10_240)).unwrap_err().to_string().len() < 200);
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn a_name_from_outside_is_taken_as_it_is_or_refused(text in testbed::texts(&["order:42", "ключ"])) {
            match Name::new(&text) {
                Ok(name) => {
                    proptest::prop_assert_eq!(name.as_str(), &text);
                    proptest::prop_assert!(!text.is_empty() && text.len() <= MAX_NAME_BYTES);
                    proptest::prop_assert!(!text.contains(char::is_control));
                }
                Err(error) => {
                    proptest::prop_assert!(!error.to_string().contains(char::is_control));
                }
            }
        }
    }
}
