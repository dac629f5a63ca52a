//! Numbers of grants, and fencing tokens: the numbers by which a resource distinguishes an earlier
//! holder from the current one.

use std::fmt;
use std::num::NonZeroU64;

/// The number of a grant. For each lock name, a later grant has a larger number.
///
/// A token is an unsigned 63-bit number, so it fits into a `BIGINT`. Every grant has one, including
/// those of readers and permits. The number of an exclusive grant is its [`FencingToken`].
///
/// ```
/// use leasehold::Token;
/// let token: Token = "1763722356000001".parse()?;
/// assert_eq!(Token::new(token.get()), Some(token));
/// assert!(Token::new(0).is_none() && Token::new(Token::MAX + 1).is_none());
/// assert_eq!(i64::from(token), 1763722356000001); // for a BIGINT
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(into = "u64"))]
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

/// The number of an exclusive grant, which a resource checks.
///
/// Pass it to the resource that the lock protects. The resource stores the highest token seen and
/// rejects smaller ones. So it rejects a holder that was paused while its lease expired. A token
/// comes from a [`MutexGuard`](crate::MutexGuard) or a [`WriteGuard`](crate::WriteGuard). A
/// resource reads it from a request, with [`new`](Self::new) or [`str::parse`].
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// use leasehold::FencingToken;
/// let token = locks.mutex("order:42").lock().await?.token();
/// let header = token.to_string(); // sent with each request to the resource, which reads it:
/// assert_eq!(header.parse::<FencingToken>()?, token);
/// assert_eq!(FencingToken::new(token.get()), Some(token));
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct FencingToken(Token);

impl FencingToken {
    /// The largest token.
    pub const MAX: u64 = Token::MAX;

    /// Returns the fencing token of an exclusive grant.
    pub(crate) const fn of(token: Token) -> Self {
        Self(token)
    }

    /// Returns the token with this value, or `None` for 0 and for numbers of more than 63 bits.
    ///
    /// The caller guarantees that the number comes from an exclusive hold.
    pub const fn new(value: u64) -> Option<Self> {
        match Token::new(value) {
            Some(token) => Some(Self(token)),
            None => None,
        }
    }

    /// Returns the token as a number.
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Returns the number of the grant.
impl From<FencingToken> for Token {
    fn from(token: FencingToken) -> Self {
        token.0
    }
}

/// Converts the token for a `BIGINT` column.
impl From<FencingToken> for i64 {
    fn from(token: FencingToken) -> Self {
        token.0.into()
    }
}

impl From<FencingToken> for u64 {
    fn from(token: FencingToken) -> Self {
        token.get()
    }
}
