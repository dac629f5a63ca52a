//! Where things are: what the cells' keys are called.
//!
//! ```text
//! PREFIXl:NAME      a lock's queue; the name percent-encoded
//! PREFIXh:DIGITS    the same of a name that is too long for a key; the name itself is in the cell
//! PREFIXk:…         somebody wants that lock in vain: a sign that ends by itself
//! PREFIXs:DIGITS    a client's session
//! PREFIXe           since when the system knows what it knows
//! ```
//!
//! Two long names may have the same digits. Whoever comes second finds another name in the cell, and is
//! refused: nobody ever stands in another lock's queue.

use leasehold_core::Name;
use leasehold_core::kit::{Escaped, unescape};

/// The error text for a parameter's value. What may be a pasted URL with a password is hidden.
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

/// The error text for a name in a URL. What may contain a password is hidden.
#[cfg(any(feature = "nats", feature = "s3", feature = "gs", feature = "az"))]
pub(crate) fn invalid_name(what: &str, text: &str) -> String {
    match text.contains([':', '@']) {
        true => format!("invalid {what} in the URL"),
        false => {
            format!("invalid {what} {:?} in the URL", text.chars().take(80).collect::<String>())
        }
    }
}

/// The longest prefix: what is left is enough for a session's or a long name's digits.
#[cfg(any(test, feature = "memcached", feature = "nats"))]
pub(crate) const LONGEST_PREFIX: usize = 64;

/// How the cells' keys are called.
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

    pub(crate) fn knock(&self, name: &Name) -> String {
        format!("{}k:{:032x}", self.prefix, digits(name.as_str()))
    }

    pub(crate) fn session(&self, id: &str) -> String {
        format!("{}s:{id}", self.prefix)
    }

    pub(crate) fn epoch(&self) -> String {
        format!("{}e", self.prefix)
    }

    /// What the keys of locks begin with.
    pub(crate) fn locks(&self) -> [String; 2] {
        ["l:", "h:"].map(|sort| format!("{}{sort}", self.prefix))
    }

    /// The name that this key is of, if it can be told from the key alone.
    pub(crate) fn name_of(&self, key: &str) -> Option<Name> {
        let escaped = key.strip_prefix(&self.prefix)?.strip_prefix("l:")?;
        Name::new(unescape(escaped)?).ok()
    }
}

/// FNV-1a of 128 bits: the same in every version, and nothing has to be safe from being guessed.
pub(crate) fn digits(text: &str) -> u128 {
    const START: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    text.bytes().fold(START, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s90_any_name_is_a_key_of_its_own() {
        let keys = Keys::new("leasehold:".into(), 250);
        let key = |name: &str| keys.lock(&Name::new(name).unwrap());
        assert_eq!(key("a b/é"), "leasehold:l:a%20b%2F%C3%A9");
        let (long, longer) = (key(&"é".repeat(100)), key(&"é".repeat(101)));
        assert!(long.starts_with("leasehold:h:") && long != longer, "{long}, {longer}");
        assert_eq!(keys.name_of(&key("a b/é")).unwrap().as_str(), "a b/é");
        assert_eq!(keys.name_of(&long), None);
        // As published for the empty text and for "a".
        assert_eq!(digits(""), 0x6c62272e07bb014262b821756295c58d);
        assert_eq!(digits("a"), 0xd228cb696f1a8caf78912b704e4a8964);
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn s90_no_key_is_too_long_or_has_a_space(name in testbed::texts(&["a b", "%\r\nget x"])) {
            let keys = Keys::new("p".repeat(LONGEST_PREFIX), 250);
            if let Ok(name) = Name::new(&name) {
                let key = keys.lock(&name);
                proptest::prop_assert!(key.len() <= 250, "{}", key);
                proptest::prop_assert!(key.bytes().all(|b| b.is_ascii_graphic()), "{}", key);
            }
        }
    }
}
