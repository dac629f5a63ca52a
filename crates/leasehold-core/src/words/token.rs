//! The fencing token: the number by which a resource distinguishes an earlier holder from the
//! current one.

use std::fmt;
use std::num::NonZeroU64;

/// A fencing token. For each lock name, a later grant has a larger token.
///
/// It is an unsigned 63-bit number, so it fits a `BIGINT`. Pass it to the resource that the lock
/// protects. The resource stores the highest token seen and rejects smaller ones, and so rejects a
/// holder that was paused while its lease expired.
///
/// ```
/// use leasehold::Token;
/// let token: Token = "1763722356000001".parse()?; // for example, from a header
/// assert_eq!(Token::new(token.get()), Some(token));
/// assert!(Token::new(0).is_none() && Token::new(Token::MAX + 1).is_none());
/// assert_eq!(i64::from(token), 1763722356000001); // for a BIGINT
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "u64", into = "u64"))]
pub struct Token(NonZeroU64);

impl Token {
    /// The largest token.
    pub const MAX: u64 = i64::MAX as u64;

    /// Returns the token with this value, or `None` for 0 and for numbers of more than 63 bits.
    pub const fn new(value: u64) -> Option<Self> {
        match NonZeroU64::new(value) {
            Some(nonzero) if value <= Self::MAX => Some(Self(nonzero)),
            _ => None,
        }
    }

    /// Returns the token as a number.
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Converts the token for a `BIGINT` column.
impl From<Token> for i64 {
    fn from(token: Token) -> Self {
        token.get().cast_signed()
    }
}

impl From<Token> for u64 {
    fn from(token: Token) -> Self {
        token.get()
    }
}
