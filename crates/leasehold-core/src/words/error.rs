//! One error for everything: what happened, to which lock, on which store, and what to do.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use super::holder::Holder;
use super::name::Name;
use super::token::Token;
use crate::base::duration::short;

/// `Result` with leasehold's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, for callers to match on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum ErrorKind {
    /// Somebody else holds the lock, and the caller did not want to wait.
    Contended,
    /// The caller's waiting time is over. The place in the queue was given up. Whether somebody
    /// else had the lock or the store was away: [`Error::store_answered`].
    Timeout,
    /// The lock was held and is not any more; see [`Error::lost_reason`].
    Lost,
    /// Held, but with less validity left than was asked for.
    AtRisk,
    /// The store does not answer. What was asked may or may not have been done there; leasehold
    /// cleans up behind itself once the store is back, or the lease does.
    Unreachable,
    /// Granted, but fewer replicas of the store have the grant than was asked for: it was given back.
    Unconfirmed,
    /// The store cannot do this, and leasehold does not pretend.
    Unsupported,
    /// The name is in use as another kind of lock or with another capacity; or an idempotency key comes with another
    /// request.
    Mismatch,
    /// The name is empty, too long, or has control characters.
    InvalidName,
    /// An option, a URL or the machine's set-up cannot work.
    Config,
    /// The store refuses: no permission, wrong credentials.
    Denied,
    /// The store is full.
    Full,
    /// What the store keeps there is not a lock of ours, or is damaged.
    Corrupt,
    /// This [`Leasehold`](crate::Leasehold) was closed.
    Closed,
    /// The database ended the caller's transaction because of another one (a deadlock, a
    /// serialization failure): roll back and run the whole transaction again.
    Conflict,
    /// The row was changed since it was read; see [`Error::stale_version`].
    StaleVersion,
    /// The resource has seen a greater fencing token; see [`Error::stale_token`].
    StaleToken,
}

impl ErrorKind {
    /// The kind as one word, for metrics' labels: `contended`, `at_risk`, …
    ///
    /// ```
    /// assert_eq!(leasehold::ErrorKind::AtRisk.as_str(), "at_risk");
    /// ```
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Contended => "contended",
            Self::Timeout => "timeout",
            Self::Lost => "lost",
            Self::AtRisk => "at_risk",
            Self::Unreachable => "unreachable",
            Self::Unconfirmed => "unconfirmed",
            Self::Unsupported => "unsupported",
            Self::Mismatch => "mismatch",
            Self::InvalidName => "invalid_name",
            Self::Config => "config",
            Self::Denied => "denied",
            Self::Full => "full",
            Self::Corrupt => "corrupt",
            Self::Closed => "closed",
            Self::Conflict => "conflict",
            Self::StaleVersion => "stale_version",
            Self::StaleToken => "stale_token",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Contended => "held by somebody else",
            Self::Timeout => "timed out",
            Self::Lost => "lost",
            Self::AtRisk => "too little validity left",
            Self::Unreachable => "store unreachable",
            Self::Unconfirmed => "too few replicas",
            Self::Unsupported => "unsupported",
            Self::Mismatch => "mismatch",
            Self::InvalidName => "invalid name",
            Self::Config => "bad configuration",
            Self::Denied => "permission denied",
            Self::Full => "store full",
            Self::Corrupt => "unreadable",
            Self::Closed => "closed",
            Self::Conflict => "transaction conflict",
            Self::StaleVersion => "stale version",
            Self::StaleToken => "stale token",
        })
    }
}

/// A compare-and-set that came too late: both versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StaleVersion {
    /// The version that the caller had read.
    pub expected: i64,
    /// The version that is there now; `None` if the row is gone.
    pub found: Option<i64>,
}

/// A write under a fencing token that came too late: both tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StaleToken {
    /// The greatest token that the resource has seen.
    pub seen: Token,
    /// The token that was offered.
    pub offered: Token,
}

/// Why a hold ended without being released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// The lease ran out by our own clock before a renewal was acknowledged.
    Expired,
    /// The store says that the claim is gone: evicted by a person, expired there, or the store
    /// lost its state.
    Gone,
    /// `max_hold` is over.
    MaxHold,
    /// The process forked: the child does not hold what its parent holds.
    Forked,
    /// [`Leasehold::close`](crate::Leasehold::close) released it.
    Closed,
}

impl LostReason {
    #[cfg(feature = "metrics")]
    pub(crate) const ALL: [Self; 5] =
        [Self::Expired, Self::Gone, Self::MaxHold, Self::Forked, Self::Closed];

    /// The reason as one word, for metrics' labels: `expired`, `max_hold`, …
    ///
    /// ```
    /// assert_eq!(leasehold::LostReason::MaxHold.as_str(), "max_hold");
    /// ```
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::Gone => "gone",
            Self::MaxHold => "max_hold",
            Self::Forked => "forked",
            Self::Closed => "closed",
        }
    }
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "its lease ran out before a renewal was acknowledged",
            Self::Gone => "the store no longer knows the claim (evicted, expired or state lost)",
            Self::MaxHold => "its max_hold is over",
            Self::Forked => "this is a forked child; only the parent holds it",
            Self::Closed => "the client was closed",
        })
    }
}

/// A hold as a contention error shows it.
///
/// ```
/// use std::time::Duration;
/// use leasehold::{Error, ErrorKind, Holder, HolderInfo, Token};
/// let token = Token::new(7).expect("it is none of 0");
/// let holder = HolderInfo::new(Holder::this_process("backup"), token, Duration::from_secs(90));
/// let error = Error::new(ErrorKind::Contended, "held by somebody else").held_by(vec![holder]);
/// assert!(error.to_string().contains("backup"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct HolderInfo {
    /// Who.
    pub holder: Holder,
    /// The fencing token of the hold.
    pub token: Token,
    /// For how long it has been held.
    pub since: Duration,
}

impl HolderInfo {
    /// What a store tells of a holder.
    pub fn new(holder: Holder, token: Token, since: Duration) -> Self {
        Self { holder, token, since }
    }
}

impl fmt::Display for HolderInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, token {}, for {}", self.holder, self.token, short(self.since))
    }
}

/// The one error type. `Display` is one line: what happened, to which lock, on which store, who
/// holds it, and what to do.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// use leasehold::ErrorKind;
/// let _held = locks.mutex("order:42").label("the nightly job").lock().await?;
/// let error = locks.mutex("order:42").try_lock().await.unwrap_err();
/// match error.kind() {
///     ErrorKind::Contended => println!("{} has it", error.holders()[0].holder),
///     _ if error.is_retryable() => println!("later, perhaps: {error}"),
///     _ => println!("never, until somebody mends it: {error}"),
/// }
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// What it is made of, and tells:
///
/// ```
/// # fn f() -> leasehold::Result<()> {
/// use std::time::Duration;
/// use leasehold::{Error, ErrorKind, LostReason, Name, Token};
///
/// // As a store of your own makes them, and a fence.
/// let reset = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
/// let error = Error::new(ErrorKind::Unreachable, "the store hung up: try again")
///     .during("lock")
///     .on(&Name::new("order:42")?)
///     .at("mine://host")
///     .because(reset);
/// assert_eq!(error.operation(), Some("lock"));
/// assert_eq!(error.name().map(Name::as_str), Some("order:42"));
/// assert_eq!(error.store(), Some("mine://host"));
/// assert!(error.reason().starts_with("the store hung up: try again: ")); // for an error of which it is a part
/// assert!(error.is_transient() && !error.held_by_this_client());
/// assert!(error.but(ErrorKind::Denied).held_by(vec![]).holders().is_empty());
/// let away = Error::no_reply(Duration::from_secs(5)).not_before(Duration::from_secs(1));
/// assert!(!away.store_answered());
///
/// // What they know beside their kind.
/// assert_eq!(Error::lost(LostReason::Expired).lost_reason(), Some(LostReason::Expired));
/// let [seen, offered] = [34, 33].map(|n| Token::new(n).expect("it is none of 0"));
/// assert_eq!(Error::stale_fence(seen, offered).stale_token().map(|t| t.seen), Some(seen));
/// assert_eq!(Error::stale_row(1, Some(2)).stale_version().and_then(|v| v.found), Some(2));
/// # Ok(()) }
/// # f().unwrap();
/// ```
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    operation: Option<&'static str>,
    name: Option<Name>,
    store: Option<String>,
    holders: Vec<HolderInfo>,
    lost: Option<LostReason>,
    stale: Option<Stale>,
    /// That the store was silent, where the kind does not say it.
    silent: bool,
    /// That the client that asked has it.
    own: bool,
    not_before: Option<Duration>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

#[derive(Clone, Copy)]
enum Stale {
    Version(StaleVersion),
    Token(StaleToken),
}

impl Error {
    /// An error of this kind; `message` says what happened and what to do, in one line and without
    /// credentials.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: message.into(),
            operation: None,
            name: None,
            store: None,
            holders: Vec::new(),
            lost: None,
            stale: None,
            silent: false,
            own: false,
            not_before: None,
            source: None,
        }))
    }

    /// Says what was being done.
    #[must_use]
    pub fn during(mut self, operation: &'static str) -> Self {
        self.0.operation.get_or_insert(operation);
        self
    }

    /// Says which lock.
    #[must_use]
    pub fn on(mut self, name: &Name) -> Self {
        self.0.name.get_or_insert_with(|| name.clone());
        self
    }

    /// Says which store, as a URL without credentials.
    #[must_use]
    pub fn at(mut self, store: &str) -> Self {
        self.0.store.get_or_insert_with(|| store.to_owned());
        self
    }

    /// Says who holds the lock.
    #[must_use]
    pub fn held_by(mut self, holders: Vec<HolderInfo>) -> Self {
        self.0.holders = holders;
        self
    }

    /// Keeps the error underneath.
    #[must_use]
    pub fn because(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Says that the store was silent.
    pub(crate) fn in_silence(mut self) -> Self {
        self.0.silent = true;
        self
    }

    /// The store has answered, and knows that the same call cannot succeed before that time is over.
    #[must_use]
    pub fn not_before(mut self, time: Duration) -> Self {
        self.0.not_before = Some(time);
        self
    }

    /// See [`not_before`](Self::not_before).
    pub(crate) fn succeeds_not_before(&self) -> Option<Duration> {
        self.0.not_before
    }

    /// The same, but of that kind.
    #[must_use]
    pub fn but(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// A store that has been silent for this long.
    pub fn no_reply(silent: Duration) -> Self {
        let what = format!(
            "no answer within {}: check that the store runs and can be reached, then try again",
            short(silent)
        );
        Self::new(ErrorKind::Unreachable, what)
    }

    /// A client that was closed.
    pub(crate) fn closed() -> Self {
        Self::new(ErrorKind::Closed, "this Leasehold was closed: connect again")
    }

    /// A hold that ended for this reason.
    pub fn lost(reason: LostReason) -> Self {
        let mut error = Self::new(ErrorKind::Lost, reason.to_string());
        error.0.lost = Some(reason);
        error
    }

    /// A version that is not the expected one any more.
    pub fn stale_row(expected: i64, found: Option<i64>) -> Self {
        let found_text = found.map_or("no row".into(), |v| format!("version {v}"));
        let message =
            format!("{found_text} found where {expected} was expected: read again and retry");
        let mut error = Self::new(ErrorKind::StaleVersion, message);
        error.0.stale = Some(Stale::Version(StaleVersion { expected, found }));
        error
    }

    /// A token smaller than one that the resource has seen: what a fence of your own refuses with.
    pub fn stale_fence(seen: Token, offered: Token) -> Self {
        let message = format!(
            "token {offered} was offered, {seen} has been seen: the lock is somebody else's now; \
             stop, and roll back"
        );
        let mut error = Self::new(ErrorKind::StaleToken, message);
        error.0.stale = Some(Stale::Token(StaleToken { seen, offered }));
        error
    }

    /// What went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether the same call may succeed later without anybody changing anything: what a loop that
    /// is to outlive outages goes on for, with growing pauses.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// # let locks = leasehold::connect("memory:").await?;
    /// let mut pause = Duration::from_millis(100);
    /// let guard = loop {
    ///     match locks.mutex("leader").lock().await {
    ///         Ok(guard) => break guard,
    ///         Err(error) if error.is_retryable() => {
    ///             eprintln!("{error}; again in {pause:?}");
    ///             tokio::time::sleep(pause).await;
    ///             pause = (pause * 2).min(Duration::from_secs(10));
    ///         }
    ///         Err(error) => return Err(error),
    ///     }
    /// };
    /// # drop(guard); Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn is_retryable(&self) -> bool {
        use ErrorKind::{AtRisk, Conflict, Contended, Full, Lost, Timeout, Unreachable};
        matches!(self.0.kind, Contended | Timeout | Lost | AtRisk | Unreachable | Full | Conflict)
    }

    /// Whether it may be over soon, so that who waits goes on asking: the store does not answer, or is
    /// full.
    pub fn is_transient(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Unreachable | ErrorKind::Full)
    }

    /// Whether the store answered. `false` is an outage: always of
    /// [`Unreachable`](ErrorKind::Unreachable); and of a [`Timeout`](ErrorKind::Timeout) when the
    /// store had been silent for all of the wait or for longer than a heartbeat at its end, so that
    /// nothing is known of who holds the lock. What is found out without asking the store, such as
    /// a bad name, says `true`.
    ///
    /// ```
    /// use leasehold::{Error, ErrorKind};
    /// fn advice(error: &Error) -> &'static str {
    ///     match error.kind() {
    ///         ErrorKind::Timeout if error.store_answered() => "somebody else is at it: come back later",
    ///         _ if !error.store_answered() => "the store is away: call the operator",
    ///         _ => "see the error",
    ///     }
    /// }
    /// # assert!(advice(&Error::new(ErrorKind::Unreachable, "")).contains("away"));
    /// ```
    pub fn store_answered(&self) -> bool {
        self.0.kind != ErrorKind::Unreachable && !self.0.silent
    }

    /// Whether the client that asked holds the lock itself, by another guard: another of its tasks
    /// does, or the same one, which would have waited for itself.
    /// (An [`Owner`](crate::Owner) may re-enter.) For [`Contended`](ErrorKind::Contended) and
    /// [`Timeout`](ErrorKind::Timeout).
    pub fn held_by_this_client(&self) -> bool {
        self.0.own
    }

    pub(crate) fn by_this_client(mut self) -> Self {
        self.0.own = true;
        self
    }

    /// The operation that failed (`"lock"`, `"release"`, …), where there was one.
    pub fn operation(&self) -> Option<&'static str> {
        self.0.operation
    }

    /// The lock, where there was one.
    pub fn name(&self) -> Option<&Name> {
        self.0.name.as_ref()
    }

    /// The store's URL without credentials, where one was known.
    pub fn store(&self) -> Option<&str> {
        self.0.store.as_deref()
    }

    /// Who holds the lock, as far as the store said.
    pub fn holders(&self) -> &[HolderInfo] {
        &self.0.holders
    }

    /// Both versions, if this is [`ErrorKind::StaleVersion`].
    pub fn stale_version(&self) -> Option<StaleVersion> {
        match self.0.stale {
            Some(Stale::Version(stale)) => Some(stale),
            _ => None,
        }
    }

    /// Both tokens, if this is [`ErrorKind::StaleToken`].
    pub fn stale_token(&self) -> Option<StaleToken> {
        match self.0.stale {
            Some(Stale::Token(stale)) => Some(stale),
            _ => None,
        }
    }

    /// Why a held lock was lost, if this is [`ErrorKind::Lost`].
    pub fn lost_reason(&self) -> Option<LostReason> {
        self.0.lost
    }

    /// Message and cause without the kind, for an error of which this is a part.
    pub fn reason(&self) -> String {
        match &self.0.source {
            Some(source) => format!("{}: {}", self.0.message, first_line(&**source)),
            None => self.0.message.clone(),
        }
    }
}

fn first_line(source: &(dyn StdError + Send + Sync + 'static)) -> String {
    source.to_string().lines().next().unwrap_or_default().to_owned()
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { kind, message, operation, name, store, holders, own, source, .. } = &*self.0;
        if let Some(operation) = operation {
            write!(f, "{operation} ")?;
        }
        if let Some(name) = name {
            write!(f, "{name} ")?;
        }
        if let Some(store) = store {
            write!(f, "on {store} ")?;
        }
        if operation.is_some() || name.is_some() || store.is_some() {
            write!(f, "{}: ", if *kind == ErrorKind::Lost { "found" } else { "failed" })?;
        }
        write!(f, "{kind}: {message}")?;
        if let [first, others @ ..] = holders.as_slice() {
            write!(f, " (held by {first}")?;
            match others.len() {
                0 => f.write_str(")")?,
                n => write!(f, ", and {n} more)")?,
            }
        }
        if *own {
            f.write_str(
                "; this client holds it itself, and a task that does waits for itself: see Owner",
            )?;
        }
        if let Some(source) = source {
            write!(f, ": {}", first_line(&**source))?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({:?}: {self})", self.0.kind)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|s| s as &(dyn StdError + 'static))
    }
}

/// For callers whose errors are of that type; ours is its inner one.
impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        use std::io::ErrorKind as Io;
        let kind = match error.kind() {
            ErrorKind::Contended => Io::WouldBlock,
            ErrorKind::Timeout => Io::TimedOut,
            ErrorKind::Unsupported => Io::Unsupported,
            ErrorKind::InvalidName | ErrorKind::Config => Io::InvalidInput,
            ErrorKind::Denied => Io::PermissionDenied,
            ErrorKind::Full => Io::StorageFull,
            ErrorKind::Corrupt => Io::InvalidData,
            ErrorKind::Unreachable => Io::NotConnected,
            _ => Io::Other,
        };
        Self::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_io_error_has_ours_in_it() {
        let error = std::io::Error::from(Error::lost(LostReason::Gone).during("run"));
        assert_eq!(error.kind(), std::io::ErrorKind::Other);
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()).unwrap();
        assert_eq!(inner.lost_reason(), Some(LostReason::Gone));
        let busy = std::io::Error::from(Error::new(ErrorKind::Contended, "held"));
        assert_eq!(busy.kind(), std::io::ErrorKind::WouldBlock);
    }

    #[test]
    fn an_error_is_one_line_that_says_everything() {
        let holder = Holder { host: "web-1".into(), pid: 7, label: "nightly".into() };
        let info = HolderInfo::new(holder, Token::new(42).unwrap(), Duration::from_secs(75));
        let error = Error::new(ErrorKind::Contended, "try again later, or wait with lock()")
            .during("try_lock")
            .on(&Name::new("order:42").unwrap())
            .at("memory:")
            .held_by(vec![info]);
        assert_eq!(
            error.to_string(),
            "try_lock \"order:42\" on memory: failed: held by somebody else: try again later, or \
             wait with lock() (held by web-1 pid 7 (nightly), token 42, for 1 min 15 s)"
        );
        assert!(error.is_retryable());
    }

    #[test]
    fn the_source_never_adds_a_line() {
        let error = Error::new(ErrorKind::Unreachable, "no answer").because("one\ntwo");
        assert_eq!(error.to_string().lines().count(), 1);
    }
}
