//! Lock names: data from outside, checked once and never interpreted.
//!
//! A [`Name`] is 1 to 512 bytes of UTF-8 without control characters. Each store encodes it
//! injectively (two names never meet in one file, key or path), so a name such as `a/../b` is only
//! ever a name. Names are compared byte for byte: `Job`, `job` and `job ` are three locks, and
//! look-alike Unicode is not folded. [`Name::new`] is with the other [words from outside](super::outside).

use std::fmt;
use std::sync::Arc;

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
    /// The name, or what is wrong with it, in words that go after the name.
    pub(super) fn checked(name: &str) -> Result<Self, String> {
        if name.is_empty() {
            return Err("is empty: give the lock a name of 1 to 512 bytes".into());
        }
        if name.len() > MAX_NAME_BYTES {
            let len = name.len();
            return Err(format!("… is {len} bytes long; the most is {MAX_NAME_BYTES}"));
        }
        if let Some(c) = name.chars().find(|c| c.is_control()) {
            return Err(format!("holds the control character {c:?}; remove it"));
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

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.as_str().to_owned()
    }
}
