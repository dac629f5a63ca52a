//! Lock names: checked once, and never interpreted.
//!
//! A [`Name`] has 1 to 512 bytes of UTF-8 without control characters. Each store encodes it
//! injectively: two names never share a file, key or path, so a name such as `a/../b` is just a
//! name. Names are compared byte for byte. `Job`, `job` and `job ` are three locks, and Unicode
//! look-alikes are different. [`Name::new`] is in [`outside`](super::outside).

use std::fmt;
use std::sync::Arc;

/// The maximum length of a lock name, in bytes of UTF-8.
pub const MAX_NAME_BYTES: usize = 512;

/// The name of a lock, already checked. Cheap to clone.
///
/// Its `Display` form is quoted and escaped, so a name cannot forge a line in a log. That form is
/// for people: `name.to_string()` is not the name itself. Functions that take a name also accept a
/// `&Name`.
///
/// ```
/// use leasehold::Name;
/// let name: Name = "order:42".parse()?;
/// assert_eq!(name.as_str(), "order:42");
/// assert_eq!(name.to_string(), "\"order:42\""); // for people
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(into = "String"))]
pub struct Name(Arc<str>);

impl Name {
    /// Checks `name`. The error states what is wrong with it.
    pub(super) fn checked(name: &str) -> Result<Self, String> {
        if name.is_empty() {
            return Err("it is empty".into());
        }
        if name.len() > MAX_NAME_BYTES {
            let len = name.len();
            return Err(format!("it is {len} bytes long"));
        }
        if let Some(c) = name.chars().find(|c| c.is_control()) {
            return Err(format!("it contains the control character {c:?}"));
        }
        Ok(Self(name.into()))
    }

    /// Returns the name as text.
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
