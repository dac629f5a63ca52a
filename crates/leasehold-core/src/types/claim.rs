//! Claims: one request to hold a lock, its secret ID, and the kind of the lock.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::time::Duration;

use super::error::{Error, ErrorKind, Result};
use super::holder::Holder;
use super::limits::{DEFAULT_LEASE, DEFAULT_WAITER_LEASE};
use super::name::Name;
use crate::util::world;

/// The largest number of readers that can share one read-write lock. A reader has the weight 1, and
/// a writer has this weight.
pub const MAX_READERS: u32 = 1 << 20;

/// The kind of a lock. It determines the capacity of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum Kind {
    /// One holder: capacity 1.
    Mutex,
    /// Many readers or one writer: capacity [`MAX_READERS`].
    RwLock,
    /// Several permits: the caller sets the capacity.
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

/// The secret ID of one claim: 128 random bits, drawn before any I/O.
///
/// Anyone who knows the ID can release or renew the claim, so it is never logged, and its `Debug`
/// form hides it.
///
/// ```
/// use leasehold::store::ClaimId;
/// let id = ClaimId::random()?;
/// assert_eq!(ClaimId::from_hex(&id.to_hex()), Some(id));
/// assert_eq!(ClaimId::from_u128(id.as_u128()), id);
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimId(u128);

impl ClaimId {
    /// Draws a new ID.
    ///
    /// # Errors
    /// - [`Config`](ErrorKind::Config): the system has no random number generator.
    pub fn random() -> Result<Self> {
        if let Some(drawn) = world::chance() {
            return Ok(Self(drawn));
        }
        let mut bytes = [0; 16];
        fill(&mut bytes)?;
        Ok(Self(u128::from_le_bytes(bytes)))
    }

    /// Returns the ID with this value. For stores that read IDs back, and for tests.
    pub const fn from_u128(value: u128) -> Self {
        Self(value)
    }

    /// Returns the ID as a number. Write it to the store and nowhere else.
    pub const fn as_u128(self) -> u128 {
        self.0
    }

    /// Returns the ID as 32 hexadecimal digits, as stores write it.
    pub fn to_hex(self) -> String {
        format!("{:032x}", self.0)
    }

    /// Parses the text that [`to_hex`](Self::to_hex) returns.
    pub fn from_hex(hex: &str) -> Option<Self> {
        let digits = hex.len() == 32 && hex.bytes().all(|b| b.is_ascii_hexdigit());
        if !digits {
            return None;
        }
        u128::from_str_radix(hex, 16).ok().map(Self)
    }
}

/// Fills `bytes` from the system's random source.
pub(crate) fn fill(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(|e| {
        Error::new(ErrorKind::Config, format!("the system's random number generator failed: {e}"))
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
        Self::from_hex(&hex).ok_or_else(|| {
            serde::de::Error::custom("invalid claim ID: expected 32 hexadecimal digits")
        })
    }
}

/// A map whose keys are the IDs of this process's claims. The IDs are random and secret, so no
/// attacker can choose IDs with colliding hashes. A keyed hash would cost more than the rest of a
/// lookup.
pub(crate) type IdMap<T> = HashMap<ClaimId, T, BuildHasherDefault<IdHasher>>;

/// Hashes an ID that was drawn at random.
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

    /// Spreads the number over all bits, because tests choose small IDs.
    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(29) ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// One request to hold a lock, as the store sees it. Cheap to clone.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Claim {
    /// The secret ID, with which the claim is renewed and released.
    pub id: ClaimId,
    /// The lock.
    pub name: Name,
    /// The kind of lock that the caller requests.
    pub kind: Kind,
    /// How much of the capacity the claim takes.
    pub weight: u32,
    /// The capacity that the caller requests.
    pub capacity: u32,
    /// How long a grant lasts without a renewal.
    pub lease: Duration,
    /// How long a queue position lasts without a heartbeat, and a pushed grant without a renewal.
    pub waiter_lease: Duration,
    /// How long the lock stays unavailable after an unclean end of this claim.
    pub lock_delay: Duration,
    /// The highest token that this client has seen. The store assigns a higher one.
    pub seen: u64,
    /// The process that made the claim, as shown to people.
    pub holder: Arc<Holder>,
}

impl Claim {
    /// Creates a claim with default times and a random ID. For tests and tools.
    ///
    /// ```
    /// use leasehold::store::Claim;
    /// use leasehold::{Kind, Name};
    /// let claim = Claim::new(Name::new("convert")?, Kind::Semaphore, 2, 3)?; // two permits of three
    /// assert_eq!((claim.weight, claim.capacity), (2, 3));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// The same as [`ClaimId::random`].
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

    // S91
    #[test]
    fn claim_ids_are_random_and_never_shown() {
        let id = ClaimId::random().unwrap();
        assert_ne!(id, ClaimId::random().unwrap());
        assert!(!format!("{id:?}").contains(&id.to_hex()));
        assert_eq!(ClaimId::from_hex(&id.to_hex()), Some(id));
        assert_eq!(ClaimId::from_hex("+0000000000000000000000000000001"), None);
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn parsed_claim_ids_round_trip(text in testbed::texts(&[
            "0123456789abcdef0123456789abcdef",
        ])) {
            if let Some(id) = ClaimId::from_hex(&text) {
                proptest::prop_assert_eq!(id.to_hex(), text.to_ascii_lowercase());
            }
        }
    }
}
