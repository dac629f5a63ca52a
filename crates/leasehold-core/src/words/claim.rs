//! What a store is asked to keep: one request to hold a lock, its secret id, and the lock's kind.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::time::Duration;

use super::error::{Error, ErrorKind, Result};
use super::holder::Holder;
use super::limits::{DEFAULT_LEASE, DEFAULT_WAITER_LEASE};
use super::name::Name;
use crate::base::world;

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

/// The secret name of one claim: 128 random bits of the system's, chosen before any I/O.
///
/// Who knows it may release or renew, so it is never logged: its `Debug` form hides it.
///
/// ```
/// use leasehold::ClaimId;
/// let id = ClaimId::random()?;
/// assert_eq!(ClaimId::from_hex(&id.to_hex()), Some(id));
/// assert_eq!(ClaimId::from_u128(id.as_u128()), id);
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimId(u128);

impl ClaimId {
    /// A fresh id.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the system has no random source.
    pub fn random() -> Result<Self> {
        if let Some(drawn) = world::chance() {
            return Ok(Self(drawn));
        }
        let mut bytes = [0; 16];
        fill(&mut bytes)?;
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

/// Fills it from the system's random source.
pub(crate) fn fill(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(|e| {
        Error::new(ErrorKind::Config, format!("the system's random source failed: {e}"))
    })
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

/// What is kept for claims of this process. Their ids are random already, and secret: nobody can choose
/// them so that they meet, and a hash that is hard to predict would cost more than all else here.
pub(crate) type IdMap<T> = HashMap<ClaimId, T, BuildHasherDefault<IdHasher>>;

/// Makes a hash of an id that was drawn at random.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    /// Spread over all bits, for ids that tests chose.
    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(29) ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
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
    /// ```
    /// use leasehold::{Claim, Kind, Name};
    /// let claim = Claim::new(Name::new("convert")?, Kind::Semaphore, 2, 3)?; // two permits of three
    /// assert_eq!((claim.weight, claim.capacity), (2, 3));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
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
            lease: DEFAULT_LEASE,
            waiter_lease: DEFAULT_WAITER_LEASE,
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

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn ids_from_outside_are_written_as_they_were_read(text in testbed::texts(&[
            "0123456789abcdef0123456789abcdef",
        ])) {
            if let Some(id) = ClaimId::from_hex(&text) {
                proptest::prop_assert_eq!(id.to_hex(), text.to_ascii_lowercase());
            }
        }
    }
}
