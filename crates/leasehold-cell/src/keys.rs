//! The keys of the cells.
//!
//! ```text
//! PREFIXl:NAME      a lock's queue; the name percent-encoded
//! PREFIXh:DIGITS    a lock's queue whose name is too long for a key; the cell contains the name
//! PREFIXk:…         a marker that a client could not acquire that lock; it expires
//! PREFIXs:DIGITS    a client's session
//! PREFIXe           the epoch: since when the system has kept its data
//! ```
//!
//! Two long names may have the same digits. The second client finds the other name in the cell, and
//! gets an error. So a claim is never in another lock's queue.

use leasehold_core::Name;
use leasehold_core::kit::{Escaped, unescape};

/// Returns the error text for a parameter's value. A value that may be a pasted URL with a password
/// is hidden.
#[cfg(any(
    feature = "memcached",
    feature = "nats",
    feature = "s3",
    feature = "gs",
    feature = "az"
))]
pub(crate) fn invalid(key: &str, value: &str) -> String {
    match value.contains([':', '@', '/']) {
        true => format!("invalid value for {key}"),
        false => {
            format!("invalid value {:?} for {key}", value.chars().take(60).collect::<String>())
        }
    }
}

/// Returns the error text for a name in a URL. A name that may contain a password is hidden.
#[cfg(any(feature = "nats", feature = "s3", feature = "gs", feature = "az"))]
pub(crate) fn invalid_name(what: &str, text: &str) -> String {
    match text.contains([':', '@']) {
        true => format!("invalid {what} in the URL"),
        false => {
            let shown: String = leasehold_core::kit::redacted(text).chars().take(80).collect();
            format!("invalid {what} {shown:?} in the URL")
        }
    }
}

/// The longest prefix. The rest of the key has room for the digits of a session or of a long name.
#[cfg(any(test, feature = "memcached", feature = "nats"))]
pub(crate) const LONGEST_PREFIX: usize = 64;

/// Makes the keys of the cells.
#[derive(Debug)]
pub(crate) struct Keys {
    prefix: String,
    longest: usize,
}

impl Keys {
    pub(crate) fn new(prefix: String, longest: usize) -> Self {
        Self { prefix, longest }
    }

    pub(crate) fn lock(&self, name: &Name) -> String {
        let key = format!("{}l:{}", self.prefix, Escaped(name.as_str()));
        match key.len() <= self.longest {
            true => key,
            false => format!("{}h:{:032x}", self.prefix, digits(name.as_str())),
        }
    }

    pub(crate) fn contention_marker(&self, name: &Name) -> String {
        format!("{}k:{:032x}", self.prefix, digits(name.as_str()))
    }

    pub(crate) fn session(&self, id: &str) -> String {
        format!("{}s:{id}", self.prefix)
    }

    pub(crate) fn epoch(&self) -> String {
        format!("{}e", self.prefix)
    }

    /// Returns the prefixes of the keys of locks.
    pub(crate) fn locks(&self) -> [String; 2] {
        ["l:", "h:"].map(|sort| format!("{}{sort}", self.prefix))
    }

    /// Returns the lock name of this key, if the key contains it.
    pub(crate) fn name_of(&self, key: &str) -> Option<Name> {
        let escaped = key.strip_prefix(&self.prefix)?.strip_prefix("l:")?;
        Name::new(unescape(escaped)?).ok()
    }
}

/// Computes FNV-1a with 128 bits. The hash must be the same in every version of leasehold, and need
/// not be hard to guess.
pub(crate) fn digits(text: &str) -> u128 {
    const START: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    text.bytes().fold(START, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    // S90
    #[test]
    fn each_name_maps_to_its_own_key() {
        let keys = Keys::new("leasehold:".into(), 250);
        let key = |name: &str| keys.lock(&Name::new(name).unwrap());
        assert_eq!(key("a b/é"), "leasehold:l:a%20b%2F%C3%A9");
        let (long, longer) = (key(&"é".repeat(100)), key(&"é".repeat(101)));
        assert!(long.starts_with("leasehold:h:") && long != longer, "{long}, {longer}");
        assert_eq!(keys.name_of(&key("a b/é")).unwrap().as_str(), "a b/é");
        assert_eq!(keys.name_of(&long), None);
        // The published values for the empty text and for "a".
        assert_eq!(digits(""), 0x6c62272e07bb014262b821756295c58d);
        assert_eq!(digits("a"), 0xd228cb696f1a8caf78912b704e4a8964);
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        // S90
        #[test]
        fn no_key_is_too_long_or_has_a_space(name in testbed::texts(&["a b", "%\r\nget x"])) {
            let keys = Keys::new("p".repeat(LONGEST_PREFIX), 250);
            if let Ok(name) = Name::new(&name) {
                let key = keys.lock(&name);
                proptest::prop_assert!(key.len() <= 250, "{}", key);
                proptest::prop_assert!(key.bytes().all(|b| b.is_ascii_graphic()), "{}", key);
            }
        }
    }
}
