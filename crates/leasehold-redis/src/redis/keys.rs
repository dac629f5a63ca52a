//! The keys of a lock, and the slots of a cluster.
//!
//! A lock's *main key* is the URL's prefix followed by the lock's name, byte for byte. Its
//! companion keys begin with [`RESERVED`]. In a cluster all of them must be in the main key's slot,
//! which the `{…}` in a key determines.
//!
//! The usual `{name}` is wrong for names such as `a}b` (only `a` is hashed) and `{}x` (the whole
//! key is hashed). So companion keys contain a *tag* instead, from a table with one short string
//! for each of the 16,384 slots.

use std::fmt;
use std::sync::OnceLock;

use redis::{Cmd, RedisWrite};

use super::url::RESERVED;
use leasehold_core::{Error, ErrorKind, Name, Result};

/// Number of slots of a cluster.
pub(super) const SLOTS: u16 = 16_384;
/// Number of keys per lock, and approximate number of bytes by which the other keys are longer than
/// the main key.
const ALL: usize = 6;
const COMPANION: usize = 20;

/// Naming scheme of the keys of a store's locks.
#[derive(Clone, Debug)]
pub(super) struct Keyspace {
    prefix: String,
    cluster: bool,
}

/// Keys of one lock.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    /// Slot in a cluster, otherwise 0.
    pub(super) slot: u16,
    pub(super) main: String,
    /// Tag of the slot in a cluster, otherwise `None`.
    tag: Option<&'static str>,
}

impl Keys {
    /// Returns how many keys [`write`](Self::write) appends, and their approximate size in bytes.
    pub(super) fn size(&self) -> (usize, usize) {
        (ALL, ALL * (self.main.len() + COMPANION))
    }

    /// Appends all keys that a script of one lock may touch.
    ///
    /// A cluster node must see which keys are being moved to another node. Other servers
    /// (Dragonfly) refuse to touch keys that are not in the request. The scripts expect this order:
    /// 1. the main key
    /// 2. the hybrid clock of the slot, which is never deleted
    /// 3. the waiters by token
    /// 4. the waiters by expiry
    /// 5. the hash of a lock without a main key
    /// 6. the holders of a lock without a main key
    pub(super) fn write(&self, call: &mut Cmd) {
        call.arg(&self.main);
        call.write_arg_fmt(self.clock());
        for letter in ['w', 'x', 'm', 'h'] {
            call.write_arg_fmt(self.companion(letter));
        }
    }

    /// Returns the key of the hash of a lock without a main key.
    pub(super) fn meta(&self) -> String {
        self.companion('m').to_string()
    }

    /// Returns a key in the same slot, which is written only so that `WAIT` has a write to wait
    /// for.
    pub(super) fn mark(&self) -> String {
        format!("{}:mark", self.clock())
    }

    fn clock(&self) -> impl fmt::Display {
        self.beside("clock", "")
    }

    fn companion(&self, letter: char) -> impl fmt::Display {
        fmt::from_fn(move |f| write!(f, "{}", self.beside(letter, format_args!(":{}", self.main))))
    }

    fn beside(&self, what: impl fmt::Display, of: impl fmt::Display) -> impl fmt::Display {
        fmt::from_fn(move |f| match self.tag {
            Some(tag) => write!(f, "{RESERVED}{{{tag}}}:{what}{of}"),
            None => write!(f, "{RESERVED}{what}{of}"),
        })
    }
}

impl Keyspace {
    pub(super) fn new(prefix: &str, cluster: bool) -> Self {
        Self { prefix: prefix.to_owned(), cluster }
    }

    pub(super) fn keys(&self, name: &Name) -> Result<Keys> {
        let main = format!("{}{}", self.prefix, name.as_str());
        if main.starts_with(RESERVED) {
            let what = format!("the prefix {RESERVED:?} is reserved for leasehold's own keys");
            let hint = "use another lock name, or add ?prefix=… to the URL";
            return Err(Error::new(ErrorKind::InvalidName, what).with_hint(hint).with_lock(name));
        }
        let slot = if self.cluster { slot(main.as_bytes()) } else { 0 };
        Ok(Keys { slot, main, tag: self.cluster.then(|| tag(slot)) })
    }

    /// Returns SCAN patterns that find every lock in use whose name begins with `prefix`. The first
    /// matches main keys. The second matches companion keys, because a lock in use may have no main
    /// key.
    pub(super) fn patterns(&self, prefix: &str) -> [String; 2] {
        let escaped = escaped(&format!("{}{prefix}", self.prefix));
        let tag = if self.cluster { "{*}:" } else { "" };
        [format!("{escaped}*"), format!("{RESERVED}{tag}[wm]:{escaped}*")]
    }

    /// Returns the prefixes of all keys that change when a lock whose name begins with `prefix`
    /// changes.
    pub(super) fn beginnings(&self, prefix: &str) -> Vec<String> {
        let main = format!("{}{prefix}", self.prefix);
        let companions = match self.cluster {
            // The tags of the slots differ, so only the part before the tag can be matched.
            true => vec![format!("{RESERVED}{{")],
            false => ['w', 'm'].iter().map(|letter| format!("{RESERVED}{letter}:{main}")).collect(),
        };
        [main].into_iter().chain(companions).collect()
    }

    /// Returns the lock that a scanned key belongs to, and whether the key is its main key.
    pub(super) fn lock_of(&self, key: &str) -> Option<(Name, bool)> {
        let (main, is_main) = match key.strip_prefix(RESERVED) {
            None => (key, true),
            Some(rest) => {
                let rest = match self.cluster {
                    true => rest.strip_prefix('{')?.split_once("}:")?.1,
                    false => rest,
                };
                let (letter, main) = rest.split_once(':')?;
                (matches!(letter, "w" | "m").then_some(main)?, false)
            }
        };
        let name = main.strip_prefix(&self.prefix)?;
        Some((Name::new(name).ok()?, is_main))
    }
}

/// Escapes the characters that have a special meaning in a pattern of SCAN.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

/// Returns the slot of a key, as Redis Cluster computes it.
pub(crate) fn slot(key: &[u8]) -> u16 {
    let hashed = match key.iter().position(|b| *b == b'{') {
        None => key,
        Some(open) => {
            let rest = key.get(open + 1..).unwrap_or_default();
            match rest.iter().position(|b| *b == b'}') {
                None | Some(0) => key,
                Some(close) => rest.get(..close).unwrap_or(key),
            }
        }
    };
    crc16(hashed) % SLOTS
}

/// Returns the CRC-16/XMODEM checksum.
fn crc16(bytes: &[u8]) -> u16 {
    let one = |crc: u16, byte: &u8| {
        let shift = |crc: u16, _| if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
        (0..8).fold(crc ^ (u16::from(*byte) << 8), shift)
    };
    bytes.iter().fold(0, one)
}

/// Returns a short string that hashes to this slot. It is the same in every version.
fn tag(slot: u16) -> &'static str {
    static TAGS: OnceLock<Vec<String>> = OnceLock::new();
    let tags = TAGS.get_or_init(|| {
        let mut tags = vec![String::new(); usize::from(SLOTS)];
        let mut missing = tags.len();
        let mut n = 0_u32;
        while missing > 0 {
            let text = base36(n);
            n += 1;
            let tag = &mut tags[usize::from(crc16(text.as_bytes()) % SLOTS)];
            if tag.is_empty() {
                *tag = text;
                missing -= 1;
            }
        }
        tags
    });
    tags.get(usize::from(slot)).map_or("", String::as_str)
}

fn base36(mut n: u32) -> String {
    let mut digits = Vec::new();
    loop {
        digits.push(char::from_digit(n % 36, 36).unwrap_or('0'));
        n /= 36;
        if n == 0 {
            return digits.iter().rev().collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_redis() {
        // Values from the specification of Redis Cluster, and from CLUSTER KEYSLOT.
        assert_eq!(crc16(b"123456789"), 0x31c3);
        for (key, expected) in [("foo", 12_182), ("b", 3_300), ("{user1000}.following", 3_443)] {
            assert_eq!(slot(key.as_bytes()), expected, "{key}");
        }
        assert_eq!(slot(b"foo{}{bar}"), crc16(b"foo{}{bar}") % SLOTS);
        assert_eq!(slot(b"foo{{bar}}zap"), crc16(b"{bar") % SLOTS);
    }

    fn simple(arg: redis::Arg<&[u8]>) -> &[u8] {
        match arg {
            redis::Arg::Simple(bytes) => bytes,
            other => panic!("{other:?}"),
        }
    }

    // S26
    #[test]
    fn auxiliary_keys_are_in_the_slot_of_their_lock() {
        let space = Keyspace::new("", true);
        for name in ["a", "a}b", "{}x", "{a}b", "a{b", "}", "{", "💥{x}"] {
            let name = Name::new(name).unwrap();
            let keys = space.keys(&name).unwrap();
            let mut call = Cmd::new();
            keys.write(&mut call);
            let args: Vec<&[u8]> = call.args_iter().map(simple).collect();
            assert_eq!(args.len(), ALL);
            for key in args {
                assert_eq!(slot(key), keys.slot, "{}", key.escape_ascii());
            }
            let waiters = keys.companion('w').to_string();
            assert_eq!(space.lock_of(&waiters), Some((name.clone(), false)));
            assert_eq!(space.lock_of(&keys.main), Some((name, true)));
        }
        for n in 0..SLOTS {
            assert_eq!(slot(format!("leasehold:{{{}}}:clock", tag(n)).as_bytes()), n);
        }
    }

    #[test]
    fn reserved_keys_are_not_locks() {
        let space = Keyspace::new("", false);
        let reserved = Name::new("leasehold:clock").unwrap();
        assert_eq!(space.keys(&reserved).unwrap_err().kind(), ErrorKind::InvalidName);
        assert!(Keyspace::new("app:", false).keys(&reserved).is_ok());
        assert_eq!(space.lock_of("leasehold:clock"), None);
        assert_eq!(space.lock_of("leasehold:x:a"), None);
        assert_eq!(Keyspace::new("app:", false).lock_of("other:a"), None);
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_key_is_mapped_to_its_lock_or_ignored(key in testbed::texts(&[
            "app:order", "leasehold:w:app:order", "leasehold:{6Y}:m:app:order",
        ])) {
            for cluster in [false, true] {
                let names = Keyspace::new("app:", cluster);
                if let Some((name, true)) = names.lock_of(&key) {
                    proptest::prop_assert_eq!(format!("app:{}", name.as_str()), key.clone());
                }
            }
        }
    }
}
