//! A hold as a string, which a holder passes to a resource that can contact the store.
//!
//! The term comes from Google's lock service Chubby. A *fencing token* is checked by the resource
//! alone, which stores the highest token seen and sends no request. A *sequencer* is checked at the
//! store by [`Client::check`](crate::Client::check): one round trip, and nothing to store.
//!
//! | | token | sequencer |
//! |---|---|---|
//! | the resource stores | the highest token seen | nothing |
//! | cost of a check | none | one round trip to the store |
//! | rejects a stale writer | once the resource has seen the next holder's token | as soon as the lock is lost |
//! | between check and write | safe, if both are one atomic step | **not safe**: the lock may be lost in between |
//! | if the store is down | works | unknown: reject |
//! | shared holds | no | yes: permits and readers have sequencers too |
//!
//! So a sequencer rejects a stale holder even if no newer holder has appeared yet. Only the token
//! closes the remaining gap between check and write. Use both where you can.
//!
//! # The text form
//! `lh1:KIND:TOKEN:STORE:NAME`, in ASCII without spaces or quotes, so it needs no escaping in a
//! shell, a header or the path of a URL. `KIND` is `mutex`, `read`, `write` or `semaphore`. In
//! `STORE` and `NAME`, letters, digits, `-`, `.`, `_` and `~` are written as they are. Every other
//! byte is `%` and two upper-case hexadecimal digits. Each sequencer has exactly one text form, and
//! only that form is accepted. So two texts are equal if and only if the sequencers are. A
//! sequencer is not a secret: anyone who knows it can check the hold, but cannot renew or release
//! it.

use std::fmt;
use std::str::FromStr;

use crate::types::claim::Kind;
use crate::types::error::{Error, ErrorKind, Result};
use crate::types::name::{MAX_NAME_BYTES, Name};
use crate::types::token::Token;
use crate::util::percent::{Escaped, unescape};

const VERSION: &str = "lh1";
/// The longest identity of a store, in bytes.
pub(crate) const MAX_IDENTITY_BYTES: usize = 1024;
/// The longest text that can be a sequencer, in bytes.
const MAX_TEXT_BYTES: usize = 3 * (MAX_NAME_BYTES + MAX_IDENTITY_BYTES) + 64;

/// One hold of one lock in one store, in a printable form; see
/// [`Hold::sequencer`](crate::Hold::sequencer).
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// use leasehold::{Kind, Sequencer};
/// let guard = locks.mutex("order:42").lock().await?;
/// let text = guard.sequencer().to_string(); // lh1:mutex:…, for a header or an argument
///
/// // The receiver, with a client of the same store:
/// let shown: Sequencer = text.parse()?;
/// assert_eq!((shown.name(), shown.kind(), shown.token()), (guard.name(), Kind::Mutex, guard.grant()));
/// assert!(shown.is_exclusive());
/// assert_eq!(shown.store(), locks.identity());
/// locks.check(&shown).await?; // the lock is held now
/// guard.release().await?;
/// assert!(locks.check(&shown).await.is_err());
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(into = "String"))]
pub struct Sequencer {
    name: Name,
    side: Side,
    token: Token,
    store: String,
}

/// The kind of lock, and for a read-write lock also the side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    Mutex,
    Read,
    Write,
    Semaphore,
}

impl Side {
    /// Returns the side of a hold with this weight.
    pub(crate) fn of(kind: Kind, weight: u32) -> Self {
        match kind {
            Kind::Mutex => Self::Mutex,
            Kind::RwLock if weight == 1 => Self::Read,
            Kind::RwLock => Self::Write,
            Kind::Semaphore => Self::Semaphore,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Mutex => "mutex",
            Self::Read => "read",
            Self::Write => "write",
            Self::Semaphore => "semaphore",
        }
    }

    fn of_word(word: &str) -> Option<Self> {
        [Self::Mutex, Self::Read, Self::Write, Self::Semaphore]
            .into_iter()
            .find(|side| side.word() == word)
    }
}

impl Sequencer {
    pub(crate) fn new(name: Name, side: Side, token: Token, store: String) -> Self {
        Self { name, side, token, store }
    }

    /// Returns the name of the lock.
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// Returns the kind of the lock.
    pub fn kind(&self) -> Kind {
        match self.side {
            Side::Mutex => Kind::Mutex,
            Side::Read | Side::Write => Kind::RwLock,
            Side::Semaphore => Kind::Semaphore,
        }
    }

    /// Returns whether the hold excludes all others: a mutex or a write lock.
    pub fn is_exclusive(&self) -> bool {
        matches!(self.side, Side::Mutex | Side::Write)
    }

    /// Returns the token of the hold's grant.
    pub fn token(&self) -> Token {
        self.token
    }

    /// Returns the identity of the store; see [`Client::identity`](crate::Client::identity).
    pub fn store(&self) -> &str {
        &self.store
    }

    pub(crate) fn side(&self) -> Side {
        self.side
    }
}

impl fmt::Display for Sequencer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (side, token) = (self.side.word(), self.token);
        let (store, name) = (Escaped(&self.store), Escaped(self.name.as_str()));
        write!(f, "{VERSION}:{side}:{token}:{store}:{name}")
    }
}

impl From<Sequencer> for String {
    fn from(sequencer: Sequencer) -> Self {
        sequencer.to_string()
    }
}

impl TryFrom<String> for Sequencer {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl FromStr for Sequencer {
    type Err = Error;

    /// Parses the text that `Display` writes.
    ///
    /// # Errors
    /// - [`Config`](ErrorKind::Config): the text is not a sequencer. The error does not repeat the
    ///   text.
    fn from_str(text: &str) -> Result<Self> {
        let refused = |why: &str| {
            Error::new(ErrorKind::Config, format!("invalid sequencer: {why}"))
                .with_hint(
                    "expected lh1:KIND:TOKEN:STORE:NAME, the whole value of $LEASEHOLD_SEQUENCER",
                )
                .with_operation("parse")
        };
        if text.len() > MAX_TEXT_BYTES {
            return Err(refused("too long"));
        }
        let mut parts = text.split(':');
        let mut next = || parts.next().ok_or_else(|| refused("too few fields"));
        if next()? != VERSION {
            return Err(refused("it does not begin with lh1:"));
        }
        let side = Side::of_word(next()?).ok_or_else(|| refused("unknown kind of lock"))?;
        let token: Token =
            next()?.parse().map_err(|_| refused("the token is not a number from 1 to 2^63-1"))?;
        let store =
            unescape(next()?).ok_or_else(|| refused("the store is not escaped correctly"))?;
        let name = unescape(next()?).ok_or_else(|| refused("the name is not escaped correctly"))?;
        let name = Name::new(name)?;
        if store.is_empty() || store.len() > MAX_IDENTITY_BYTES {
            return Err(refused("the store identity is empty or too long"));
        }
        let sequencer = Self { name, side, token, store };
        // Only the canonical form is accepted, so leading zeros and unnecessary escapes are
        // rejected.
        match sequencer.to_string() == text {
            true => Ok(sequencer),
            false => Err(refused("not in the canonical form")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sequencer(name: &str, side: Side, token: u64, store: &str) -> Sequencer {
        let name = Name::new(name).unwrap();
        Sequencer::new(name, side, Token::new(token).unwrap(), store.into())
    }

    // R34
    #[test]
    fn a_sequencer_needs_no_quoting_anywhere() {
        let odd = sequencer("a b'$(x)\"%:é", Side::Write, 42, "etcd://a,b/c");
        let text = odd.to_string();
        assert_eq!(text, "lh1:write:42:etcd%3A%2F%2Fa%2Cb%2Fc:a%20b%27%24%28x%29%22%25%3A%C3%A9");
        assert_eq!(text.parse::<Sequencer>().unwrap(), odd);
    }

    // R34
    #[test]
    fn malformed_sequencers_are_rejected_in_one_line() {
        let long = format!("lh1:mutex:1:m:{}", "%41".repeat(20_000));
        for bad in [
            "",
            "lh1",
            "lh1:mutex:1:memory%3A",
            "lh2:mutex:1:m:n",
            "LH1:mutex:1:m:n",
            "lh1:Mutex:1:m:n",
            "lh1:mutex:0:m:n",
            "lh1:mutex:-1:m:n",
            "lh1:mutex:+1:m:n",
            "lh1:mutex:01:m:n",
            "lh1:mutex:9223372036854775808:m:n",
            "lh1:mutex:99999999999999999999999:m:n",
            "lh1:mutex:1::n",
            "lh1:mutex:1:m:",
            "lh1:mutex:1:m:n:",
            "lh1:mutex:1:m:n\n",
            " lh1:mutex:1:m:n",
            "lh1:mutex:1:m:%",
            "lh1:mutex:1:m:%4",
            "lh1:mutex:1:m:%zz",
            "lh1:mutex:1:m:%6e",    // n does not need an escape
            "lh1:mutex:1:m:%c3%A9", // lower case
            "lh1:mutex:1:m:%FF",
            "lh1:mutex:1:m:%00",
            "lh1:mutex:1:m:a\u{e9}",
            "lh1:mutex:1:m:a/b",
            long.as_str(),
        ] {
            let error = bad.parse::<Sequencer>().unwrap_err();
            let shown = format!("{error:#}");
            assert!(shown.len() < 300 && !shown.contains(char::is_control), "{error}");
        }
    }

    fn side() -> impl Strategy<Value = Side> {
        prop_oneof![Just(Side::Mutex), Just(Side::Read), Just(Side::Write), Just(Side::Semaphore)]
    }

    fn any() -> impl Strategy<Value = Sequencer> {
        (r"[a:%é/ ]{1,4}", side(), 1..=Token::MAX, r"[m:%é/ ]{1,4}")
            .prop_map(|(name, side, token, store)| sequencer(&name, side, token, &store))
    }

    proptest! {
        // R34
        #[test]
        fn sequencers_round_trip_and_are_unambiguous(a in any(), b in any()) {
            prop_assert_eq!(&a.to_string().parse::<Sequencer>().unwrap(), &a);
            prop_assert_eq!(a == b, a.to_string() == b.to_string());
        }

        // R34
        #[test]
        fn nearly_valid_sequencer_text_round_trips_if_accepted(text in r"(lh1:)?(mutex:|read:)?[0-9a-f:%+ .]{0,20}") {
            if let Ok(read) = text.parse::<Sequencer>() {
                prop_assert_eq!(read.to_string(), text);
            }
        }
    }

    proptest! {
        #![proptest_config(testbed::cases())]

        // R34
        #[test]
        fn any_sequencer_text_round_trips_or_is_rejected(text in testbed::texts(&[
            "lh1:write:42:etcd%3A%2F%2Fa%2Cb%2Fc:a%20b", "lh1:mutex:1:m:x",
        ])) {
            match text.parse::<Sequencer>() {
                Ok(read) => prop_assert_eq!(read.to_string(), text),
                Err(error) => prop_assert_eq!(format!("{error:#}").lines().count(), 1),
            }
        }
    }
}
