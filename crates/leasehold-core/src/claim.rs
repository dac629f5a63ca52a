//! The words of the lock: claims, their ids, fencing tokens, kinds and holders.

use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::name::Name;

/// How many readers may share one read-write lock. A reader weighs 1, a writer this much.
pub const MAX_READERS: u32 = 1 << 20;

/// What a lock is: it fixes the capacity of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum Kind {
    /// One holder: capacity 1.
    Mutex,
    /// Many readers or one writer: capacity [`MAX_READERS`].
    RwLock,
    /// As many permits as the caller says.
    Semaphore,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mutex => "mutex",
            Self::RwLock => "read-write lock",
            Self::Semaphore => "semaphore",
        })
    }
}

/// The secret name of one claim: 128 bits from the system's random source, chosen before any I/O.
///
/// Who knows it may release or renew, so it is never logged: its `Debug` form hides it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimId(u128);

impl ClaimId {
    /// A fresh id.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the system has no random source.
    pub fn random() -> Result<Self> {
        if let Some(drawn) = crate::world::chance() {
            return Ok(Self(drawn));
        }
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|e| {
            Error::new(ErrorKind::Config, format!("the system's random source failed: {e}"))
        })?;
        Ok(Self(u128::from_le_bytes(bytes)))
    }

    /// The id with this value; for stores that read it back and for tests.
    pub const fn from_u128(value: u128) -> Self {
        Self(value)
    }

    /// The id as a number, to be written to the store and nowhere else.
    pub const fn as_u128(self) -> u128 {
        self.0
    }

    /// The 32 hexadecimal digits that stores write.
    pub fn to_hex(self) -> String {
        format!("{:032x}", self.0)
    }

    /// Reads what [`to_hex`](Self::to_hex) wrote.
    pub fn from_hex(hex: &str) -> Option<Self> {
        let digits = hex.len() == 32 && hex.bytes().all(|b| b.is_ascii_hexdigit());
        if !digits {
            return None;
        }
        u128::from_str_radix(hex, 16).ok().map(Self)
    }
}

impl fmt::Debug for ClaimId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClaimId(…)")
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for ClaimId {
    fn serialize<S: serde::Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        s.collect_str(&format_args!("{:032x}", self.0))
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for ClaimId {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        let hex = <std::borrow::Cow<'de, str>>::deserialize(d)?;
        Self::from_hex(&hex).ok_or_else(|| serde::de::Error::custom("a claim id is 32 hex digits"))
    }
}

/// A fencing token: per lock name, a later grant has a greater token.
///
/// One unsigned 63-bit number, so that it fits a `BIGINT`. Hand it to the resource that the lock
/// protects; a resource that refuses a token smaller than the greatest it has seen cannot be
/// fooled by a holder that was paused while its lease ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "u64", into = "u64"))]
pub struct Token(NonZeroU64);

impl Token {
    /// The greatest token.
    pub const MAX: u64 = i64::MAX as u64;

    /// The token with this value, or `None` for 0 and for what does not fit in 63 bits.
    pub const fn new(value: u64) -> Option<Self> {
        match NonZeroU64::new(value) {
            Some(nonzero) if value <= Self::MAX => Some(Self(nonzero)),
            _ => None,
        }
    }

    /// The number itself.
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<Token> for u64 {
    fn from(token: Token) -> Self {
        token.get()
    }
}

impl TryFrom<u64> for Token {
    type Error = Error;

    fn try_from(value: u64) -> Result<Self> {
        Self::new(value).ok_or_else(|| {
            Error::new(ErrorKind::Config, format!("{value} is no fencing token (1 to 2^63-1)"))
        })
    }
}

impl std::str::FromStr for Token {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        text.parse::<u64>().ok().and_then(Self::new).ok_or_else(|| {
            let text: String = text.chars().take(40).collect();
            Error::new(ErrorKind::Config, format!("{text:?} is no fencing token (1 to 2^63-1)"))
        })
    }
}

/// Who claims: what people need to find the program that holds a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Holder {
    /// The machine's name for itself.
    pub host: String,
    /// The process, as that machine numbers it.
    pub pid: u32,
    /// What the program says of itself, or empty.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "String::is_empty"))]
    pub label: String,
}

impl Holder {
    /// This process on this machine. The label is cut to 256 bytes and loses control characters.
    pub fn this_process(label: &str) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let mut clean: String = label.chars().filter(|c| !c.is_control()).collect();
        clean.truncate(clean.floor_char_boundary(256));
        Self { host, pid: std::process::id(), label: clean }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pid {}", self.host.escape_debug(), self.pid)?;
        if !self.label.is_empty() {
            write!(f, " ({})", self.label.escape_debug())?;
        }
        Ok(())
    }
}

/// One request to hold a lock, as the store sees it. Cheap to clone.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Claim {
    /// The secret that renews and releases it.
    pub id: ClaimId,
    /// The lock.
    pub name: Name,
    /// What the caller believes the lock to be.
    pub kind: Kind,
    /// How much of the capacity it takes.
    pub weight: u32,
    /// The capacity that the caller believes the lock to have.
    pub capacity: u32,
    /// How long a grant lasts unrenewed.
    pub lease: Duration,
    /// How long a place in the queue lasts without a heartbeat, and a pushed grant without a
    /// renewal.
    pub waiter_lease: Duration,
    /// How long the lock stays closed after this claim ended uncleanly.
    pub lock_delay: Duration,
    /// The highest token that this client has seen: the store draws above it.
    pub seen: u64,
    /// For people.
    pub holder: Arc<Holder>,
}

impl Claim {
    /// A claim of one of `capacity` for `name` with default times and a random id. Stores get
    /// theirs ready made; this is for tests and tools.
    ///
    /// # Errors
    /// As [`ClaimId::random`].
    pub fn new(name: Name, kind: Kind, weight: u32, capacity: u32) -> Result<Self> {
        Ok(Self {
            id: ClaimId::random()?,
            name,
            kind,
            weight,
            capacity,
            lease: crate::options::DEFAULT_LEASE,
            waiter_lease: crate::options::DEFAULT_WAITER_LEASE,
            lock_delay: Duration::ZERO,
            seen: 0,
            holder: Arc::new(Holder::this_process("")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s91_claim_ids_are_random_and_never_shown() {
        let id = ClaimId::random().unwrap();
        assert_ne!(id, ClaimId::random().unwrap());
        assert!(!format!("{id:?}").contains(&id.to_hex()));
        assert_eq!(ClaimId::from_hex(&id.to_hex()), Some(id));
        assert_eq!(ClaimId::from_hex("+0000000000000000000000000000001"), None);
    }

    #[test]
    fn tokens_fit_a_bigint() {
        assert_eq!(Token::new(0), None);
        assert_eq!(Token::new(u64::MAX), None);
        assert_eq!(Token::new(Token::MAX).unwrap().get(), i64::MAX as u64);
        assert!("-1".parse::<Token>().is_err());
    }

    #[test]
    fn labels_lose_what_could_forge_a_line() {
        let holder = Holder::this_process("nightly\nroot pid 1");
        assert_eq!(holder.label, "nightlyroot pid 1");
        assert!(Holder::this_process(&"é".repeat(200)).label.len() <= 256);
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn ids_and_tokens_from_outside_are_written_as_they_were_read(text in testbed::texts(&[
            "0123456789abcdef0123456789abcdef", "9223372036854775807", "1",
        ])) {
            if let Some(id) = ClaimId::from_hex(&text) {
                proptest::prop_assert_eq!(id.to_hex(), text.to_ascii_lowercase());
            }
            if let Ok(token) = text.parse::<Token>() {
                proptest::prop_assert_eq!(token.to_string().parse::<Token>().ok(), Some(token));
            }
        }
    }
}
