//! The fencing token: the number by which a resource tells a late holder from the present one.

use std::fmt;
use std::num::NonZeroU64;

/// A fencing token: per lock name, a later grant has a greater token.
///
/// One unsigned 63-bit number, so that it fits a `BIGINT`. Hand it to the resource that the lock
/// protects; a resource that refuses a token smaller than the greatest it has seen cannot be
/// fooled by a holder that was paused while its lease ran out.
///
/// ```
/// use leasehold::Token;
/// let token: Token = "1763722356000001".parse()?; // from a header, say
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

/// For a `BIGINT`.
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
