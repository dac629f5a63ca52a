//! The error type, and its details about a lock.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use super::holder::Holder;
use super::name::Name;
use super::token::{FencingToken, Token};
use crate::util::duration::short;

/// A `Result` with leasehold's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an error, for callers to branch on.
///
/// *Retryable* kinds are those for which [`Error::is_retryable`] is `true`. The HTTP status is the
/// one that `leasehold::fence::http::status` returns.
///
/// ```
/// use leasehold::{Error, ErrorKind};
/// fn advice(error: &Error) -> &'static str {
///     match error.kind() {
///         ErrorKind::Contended | ErrorKind::Timeout => "the lock is busy: come back later",
///         ErrorKind::Unreachable => "the store is down: call the operator",
///         _ => "see the error",
///     }
/// }
/// # assert!(advice(&Error::new(ErrorKind::Unreachable, "")).contains("down"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum ErrorKind {
    /// Another client holds the lock, and the call does not wait. Retryable; HTTP 423.
    Contended,
    /// The lock was not available within the caller's time limit. The queue position was given up.
    /// Retryable; HTTP 423. If the store was not answering when the time limit ended, the kind is
    /// [`Unreachable`](Self::Unreachable).
    Timeout,
    /// The lock was held, and was lost; see [`Error::lost_reason`]. Retryable; HTTP 503.
    Lost,
    /// The lock is held, but less of its lease is left than requested. Retryable; HTTP 503.
    AtRisk,
    /// The store does not answer. The request may or may not have been executed. The client cleans
    /// up once the store is reachable again. Otherwise the lease expires. Retryable; HTTP 503.
    Unreachable,
    /// The lock was granted on fewer replicas of the store than required, and was released.
    /// HTTP 500.
    Unconfirmed,
    /// The store does not support the operation. HTTP 500.
    Unsupported,
    /// The name is in use as another kind of lock or with another capacity. Or an idempotency key
    /// is used for another request. HTTP 500.
    Mismatch,
    /// The name is empty, too long, or contains control characters. HTTP 400.
    InvalidName,
    /// An option, a URL or the configuration of the machine is invalid. HTTP 500.
    Config,
    /// The store rejects the request: missing permission or wrong credentials. HTTP 500.
    Denied,
    /// The store is full. Retryable; HTTP 503.
    Full,
    /// The data in the store is damaged, or was not written by leasehold. HTTP 500.
    Corrupt,
    /// The client ([`Client`](crate::Client)) was closed, or the lock was released. HTTP 500.
    Closed,
    /// The database ended the caller's transaction because of another one (a deadlock or a
    /// serialization failure). Roll back and run the whole transaction again. Retryable; HTTP 503.
    Conflict,
    /// The row has changed since it was read; see [`Error::stale_version`]. HTTP 409.
    StaleVersion,
    /// The resource has seen a larger fencing token; see [`Error::stale_token`]. HTTP 409.
    StaleToken,
}

impl ErrorKind {
    /// Returns the kind as one word, which does not change between versions: `contended`,
    /// `at_risk`, … The word is in the text of errors and in the labels of metrics.
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
            Self::Contended => "held by another client",
            Self::Timeout => "timed out",
            Self::Lost => "lost",
            Self::AtRisk => "too little validity left",
            Self::Unreachable => "store unreachable",
            Self::Unconfirmed => "too few replicas",
            Self::Unsupported => "unsupported",
            Self::Mismatch => "mismatch",
            Self::InvalidName => "invalid name",
            Self::Config => "invalid configuration",
            Self::Denied => "permission denied",
            Self::Full => "store full",
            Self::Corrupt => "corrupt data",
            Self::Closed => "closed",
            Self::Conflict => "transaction conflict",
            Self::StaleVersion => "stale version",
            Self::StaleToken => "stale token",
        })
    }
}

/// Both versions of a compare-and-set that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StaleVersion {
    /// The version that the caller had read.
    pub expected: i64,
    /// The version that the row has now, or `None` if the row is gone.
    pub found: Option<i64>,
}

/// Both tokens of a write that was rejected because its token is stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StaleToken {
    /// The highest token that the resource has seen.
    pub seen: FencingToken,
    /// The token of the write.
    pub offered: FencingToken,
}

/// Why a hold ended without being released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// The lease expired, by this machine's clock, before a renewal was acknowledged.
    Expired,
    /// The store no longer has the claim: an operator evicted it, it expired there, or the store
    /// lost its data.
    Gone,
    /// `max_hold` has elapsed.
    MaxHold,
    /// This is a forked child process, which does not hold its parent's locks.
    Forked,
    /// [`Client::close`](crate::Client::close) released the lock.
    Closed,
}

impl LostReason {
    #[cfg(feature = "metrics")]
    pub(crate) const ALL: [Self; 5] =
        [Self::Expired, Self::Gone, Self::MaxHold, Self::Forked, Self::Closed];

    /// Returns the reason as one word, for the labels of metrics: `expired`, `max_hold`, …
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
            Self::Expired => "its lease expired before a renewal was acknowledged",
            Self::Gone => {
                "the store no longer has this hold (evicted, expired or its data was lost)"
            }
            Self::MaxHold => "its max_hold has elapsed",
            Self::Forked => "this is a forked child process, and only the parent holds it",
            Self::Closed => "the client was closed",
        })
    }
}

/// A holder of a lock, as errors list it.
///
/// ```
/// use std::time::Duration;
/// use leasehold::{Error, ErrorKind, Holder, HolderInfo, Token};
/// let token = Token::new(7).expect("a valid token");
/// let holder = HolderInfo::new(Holder::this_process("backup"), token, Duration::from_secs(90));
/// println!("held by {holder}"); // held by web-1 pid 4711 (backup) for 1 min 30 s, token 7
/// let error = Error::new(ErrorKind::Contended, "held by another client").held_by(vec![holder]);
/// assert_eq!(error.holders()[0].token, token);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct HolderInfo {
    /// The process that holds the lock.
    pub holder: Holder,
    /// The token of the hold.
    pub token: Token,
    /// How long this holder has held the lock.
    pub since: Duration,
}

impl HolderInfo {
    /// Creates the information about a holder.
    pub fn new(holder: Holder, token: Token, since: Duration) -> Self {
        Self { holder, token, since }
    }
}

impl fmt::Display for HolderInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {}, token {}", self.holder, short(self.since), self.token)
    }
}

/// The error of every call: a cause, a [kind](ErrorKind), the context and often a hint.
///
/// # How it is printed
/// `Display` prints the cause, the context in brackets, and the hint on a line of its own:
///
/// ```text
/// "order:42" is held by web-1 pid 7 (nightly) for 12 s, token 41 [contended; try_lock "order:42" on memory:]
/// hint: retry later, or wait with lock()
/// ```
///
/// - **Cause.** What went wrong, in one line.
/// - **Context.** [`ErrorKind::as_str`], then the [operation](Self::operation), the
///   [lock](Self::name) and the [store](Self::store), as far as they are known. The brackets are
///   always present, at the end of the first line.
/// - **[Hint](Self::hint).** The next step, if there is one. Its line begins with `hint: `.
///
/// The text may change between versions. To branch on an error, use [`kind`](Self::kind) and the
/// other accessors.
///
/// The [source](StdError::source) is not part of `Display`, so code that prints the whole chain
/// (such as `anyhow`) prints it once. The other forms print it after the cause:
///
/// | form | prints | use it for |
/// |---|---|---|
/// | `{error}` | cause, context; hint | code that prints the chain |
/// | [`error.report()`](Self::report), `{error:?}` | cause, sources, context; hint | a terminal |
/// | `{error:#}` | the same on one line, with `(hint: …)` at the end | a log |
/// | [`error.reason()`](Self::reason) | cause and sources only | part of another message |
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// use leasehold::ErrorKind;
/// let _held = locks.mutex("order:42").label("the nightly job").lock().await?;
/// let error = locks.mutex("order:42").try_lock().await.unwrap_err();
/// match error.kind() {
///     ErrorKind::Contended => println!("{} holds it", error.holders()[0].holder),
///     _ if error.is_retryable() => println!("retrying later: {error:#}"),
///     _ => println!("giving up: {}", error.report()),
/// }
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// A store or a fence of your own creates errors like this:
///
/// ```
/// # fn f() -> leasehold::Result<()> {
/// use std::time::Duration;
/// use leasehold::{Error, ErrorKind, FencingToken, LostReason, Name};
///
/// let reset = std::io::Error::other("connection reset");
/// let error = Error::new(ErrorKind::Unreachable, "the server closed the connection")
///     .with_hint("check that the server is running, then retry")
///     .with_operation("lock")
///     .with_lock(&Name::new("order:42")?)
///     .with_store("mine://host")
///     .with_source(reset);
/// let context = r#"[unreachable; lock "order:42" on mine://host]"#;
/// let hint = "check that the server is running, then retry";
/// assert_eq!(error.to_string(), format!("the server closed the connection {context}\nhint: {hint}"));
/// assert_eq!(
///     format!("{error:#}"),
///     format!("the server closed the connection: connection reset {context} (hint: {hint})")
/// );
/// assert_eq!(error.reason(), "the server closed the connection: connection reset");
/// assert_eq!(error.hint(), Some(hint));
/// assert_eq!(error.operation(), Some("lock"));
/// assert_eq!(error.name().map(Name::as_str), Some("order:42"));
/// assert_eq!(error.store(), Some("mine://host"));
/// assert!(error.is_transient() && !error.held_by_this_client());
/// assert!(error.with_kind(ErrorKind::Denied).held_by(vec![]).holders().is_empty());
/// let silent = Error::no_reply(Duration::from_secs(5)).with_retry_after(Duration::from_secs(1));
/// assert_eq!(silent.kind(), ErrorKind::Unreachable);
/// assert_eq!(silent.retry_after(), Some(Duration::from_secs(1)));
///
/// // Some kinds have details of their own.
/// assert_eq!(Error::lost(LostReason::Expired).lost_reason(), Some(LostReason::Expired));
/// let [seen, offered] = [34, 33].map(|n| FencingToken::new(n).expect("a valid token"));
/// assert_eq!(Error::stale_fence(seen, offered).stale_token().map(|t| t.seen), Some(seen));
/// assert_eq!(Error::stale_row(1, Some(2)).stale_version().and_then(|v| v.found), Some(2));
/// # Ok(()) }
/// # f().unwrap();
/// ```
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    hint: Option<String>,
    operation: Option<&'static str>,
    name: Option<Name>,
    store: Option<String>,
    holders: Vec<HolderInfo>,
    lost: Option<LostReason>,
    stale: Option<Stale>,
    /// Whether the client that requested the lock already holds it.
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
    /// Creates an error of this kind.
    ///
    /// `message` is the cause: what went wrong, in one line and without credentials. The next step
    /// belongs in [`with_hint`](Self::with_hint).
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: message.into(),
            hint: None,
            operation: None,
            name: None,
            store: None,
            holders: Vec::new(),
            lost: None,
            stale: None,
            own: false,
            not_before: None,
            source: None,
        }))
    }

    /// Sets the hint: the next step for the user, in one line. Replaces an earlier hint.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Sets the operation, unless one is set.
    #[must_use]
    pub fn with_operation(mut self, operation: &'static str) -> Self {
        self.0.operation.get_or_insert(operation);
        self
    }

    /// Sets the lock, unless one is set.
    #[must_use]
    pub fn with_lock(mut self, name: &Name) -> Self {
        self.0.name.get_or_insert_with(|| name.clone());
        self
    }

    /// Sets the store, as a URL without credentials, unless one is set.
    #[must_use]
    pub fn with_store(mut self, store: &str) -> Self {
        self.0.store.get_or_insert_with(|| store.to_owned());
        self
    }

    /// Sets the [holders](Self::holders). They are not printed, so name the first one in the
    /// message.
    #[must_use]
    pub fn held_by(mut self, holders: Vec<HolderInfo>) -> Self {
        self.0.holders = holders;
        self
    }

    /// Sets the [source](StdError::source).
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Sets how long the caller must wait before a retry can succeed, according to the store.
    #[must_use]
    pub fn with_retry_after(mut self, time: Duration) -> Self {
        self.0.not_before = Some(time);
        self
    }

    /// Returns how long the caller must wait before a retry can succeed, according to the store.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.not_before
    }

    /// Replaces the kind.
    #[must_use]
    pub fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// Creates the error of a call that the store did not answer within this time.
    pub fn no_reply(silent: Duration) -> Self {
        Self::new(
            ErrorKind::Unreachable,
            format!("no answer from the store within {}", short(silent)),
        )
        .with_hint(CHECK_THE_STORE)
    }

    /// Creates the error for a held lock and a caller that does not wait.
    pub(crate) fn contended(name: &Name, holders: Vec<HolderInfo>) -> Self {
        let what = match shown_holders(&holders) {
            Some(holders) => format!("{name} is held by {holders}"),
            None => format!("{name} is held by another client"),
        };
        Self::new(ErrorKind::Contended, what)
            .with_hint("retry later, or wait with lock()")
            .held_by(holders)
    }

    /// Replaces the hint with that of the error that caused this one, if the cause has a hint.
    pub(crate) fn hinted_by(mut self, cause: &Self) -> Self {
        self.0.hint = cause.0.hint.clone().or(self.0.hint);
        self
    }

    /// Creates the error for a client that was closed.
    pub(crate) fn closed() -> Self {
        Self::new(ErrorKind::Closed, "this client was closed").with_hint("connect again")
    }

    /// Creates the error of a hold that ended for this reason.
    pub fn lost(reason: LostReason) -> Self {
        let mut error = Self::new(ErrorKind::Lost, format!("the lock was lost: {reason}"));
        error.0.lost = Some(reason);
        match reason {
            LostReason::Expired | LostReason::Gone => error.with_hint(
                "another client may have held the lock since its loss: check the work done after it, or \
                 check tokens at the resource",
            ),
            LostReason::MaxHold => error.with_hint("raise max_hold, or split the work"),
            LostReason::Forked => error.with_hint("connect and acquire the lock in the child"),
            LostReason::Closed => error,
        }
    }

    /// Creates the error of a row that no longer has the expected version. `found` is `None` if the
    /// row is gone.
    pub fn stale_row(expected: i64, found: Option<i64>) -> Self {
        let (message, hint) = match found {
            Some(found) => (
                format!("the row is at version {found}, not {expected}"),
                "read the row again, and retry",
            ),
            None => (
                format!("the row no longer exists (version {expected} was expected)"),
                "treat the row as deleted",
            ),
        };
        let mut error = Self::new(ErrorKind::StaleVersion, message).with_hint(hint);
        error.0.stale = Some(Stale::Version(StaleVersion { expected, found }));
        error
    }

    /// Creates the error with which a fence of your own rejects a token smaller than one that the
    /// resource has seen.
    pub fn stale_fence(seen: FencingToken, offered: FencingToken) -> Self {
        let message = format!("stale token {offered}: the resource has already seen token {seen}");
        let mut error = Self::new(ErrorKind::StaleToken, message)
            .with_hint("another client has acquired the lock since: stop, and roll back");
        error.0.stale = Some(Stale::Token(StaleToken { seen, offered }));
        error
    }

    /// Returns the kind, for callers to branch on.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns whether retrying the same call may succeed.
    ///
    /// To survive outages, retry with back-off while this is `true`.
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
    ///             eprintln!("{error:#}; retrying in {pause:?}");
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

    /// Returns whether the cause is an outage that may end soon: the store is unreachable or full.
    ///
    /// A call that waits keeps trying after such an error. In the queue, it also keeps trying after
    /// [`Denied`](ErrorKind::Denied), [`Config`](ErrorKind::Config) and
    /// [`Corrupt`](ErrorKind::Corrupt).
    pub fn is_transient(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Unreachable | ErrorKind::Full)
    }

    /// Returns whether the error may pass, for a claim that the store has accepted before. In
    /// addition to outages, an operator may be changing permissions, tables or a proxy.
    ///
    /// Holders and waiters keep trying after such an error, up to the same limits as in an outage.
    pub(crate) fn may_pass(&self) -> bool {
        use ErrorKind::{Config, Corrupt, Denied};
        self.is_transient() || matches!(self.0.kind, Denied | Config | Corrupt)
    }

    /// Returns whether this client already holds the lock, through another guard.
    ///
    /// The holder is another task of this client, or the same task. In the same task, waiting is a
    /// deadlock, but an [`Owner`](crate::Owner) can re-enter. Only errors of the kinds
    /// [`Contended`](ErrorKind::Contended) and [`Timeout`](ErrorKind::Timeout) can return `true`.
    pub fn held_by_this_client(&self) -> bool {
        self.0.own
    }

    pub(crate) fn by_this_client(mut self) -> Self {
        self.0.own = true;
        self.0.message.push_str("; this client already holds it");
        self.with_hint(
            "if the same task holds it, waiting is a deadlock: release it first, or use the same Owner \
             for both locks",
        )
    }

    /// Returns the next step for the user, if there is one.
    pub fn hint(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// Returns the operation that failed (`"lock"`, `"release"`, …), if it is known.
    pub fn operation(&self) -> Option<&'static str> {
        self.0.operation
    }

    /// Returns the name of the lock, if the error concerns one.
    pub fn name(&self) -> Option<&Name> {
        self.0.name.as_ref()
    }

    /// Returns the store's URL without credentials, if it is known.
    pub fn store(&self) -> Option<&str> {
        self.0.store.as_deref()
    }

    /// Returns the holders of the lock, as far as the store reported them.
    pub fn holders(&self) -> &[HolderInfo] {
        &self.0.holders
    }

    /// Returns the expected and the found version, for [`ErrorKind::StaleVersion`].
    pub fn stale_version(&self) -> Option<StaleVersion> {
        match self.0.stale {
            Some(Stale::Version(stale)) => Some(stale),
            _ => None,
        }
    }

    /// Returns the token of the write and the highest token seen, for [`ErrorKind::StaleToken`].
    pub fn stale_token(&self) -> Option<StaleToken> {
        match self.0.stale {
            Some(Stale::Token(stale)) => Some(stale),
            _ => None,
        }
    }

    /// Returns why the lock was lost, for [`ErrorKind::Lost`].
    pub fn lost_reason(&self) -> Option<LostReason> {
        self.0.lost
    }

    /// Returns the cause and its [sources](StdError::source) in one line, without context and hint.
    ///
    /// Use it as a part of another message.
    pub fn reason(&self) -> String {
        let mut text = self.0.message.clone();
        let mut next = self.source();
        while let Some(source) = next {
            let shown = source.to_string();
            let line = shown.lines().next().unwrap_or_default();
            // Many drivers repeat their source in their own text.
            if !text.contains(line) {
                text.push_str(": ");
                text.push_str(line);
            }
            next = source.source();
        }
        text
    }

    /// Returns the full text for a terminal: cause, [sources](StdError::source) and context on the
    /// first line, the hint on the second.
    ///
    /// ```
    /// use leasehold::{Error, ErrorKind};
    /// let error = Error::new(ErrorKind::Unreachable, "cannot connect").with_source("connection refused");
    /// assert_eq!(error.report().to_string(), "cannot connect: connection refused [unreachable]");
    /// ```
    pub fn report(&self) -> impl fmt::Display + '_ {
        fmt::from_fn(|f| {
            write!(f, "{} {}", self.reason(), self.context())?;
            match self.hint() {
                Some(hint) => write!(f, "\nhint: {hint}"),
                None => Ok(()),
            }
        })
    }

    /// Returns the context, such as `[kind; operation "lock" on store]`.
    fn context(&self) -> impl fmt::Display + '_ {
        fmt::from_fn(|f| {
            let Inner { kind, operation, name, store, .. } = &*self.0;
            write!(f, "[{}", kind.as_str())?;
            let mut before = "; ";
            if let Some(operation) = operation {
                write!(f, "{before}{operation}")?;
                before = " ";
            }
            if let Some(name) = name {
                write!(f, "{before}{name}")?;
                before = " ";
            }
            match (store, operation) {
                (Some(store), Some("connect")) => write!(f, "{before}to {store}")?,
                (Some(store), _) => write!(f, "{before}on {store}")?,
                (None, _) => {}
            }
            f.write_str("]")
        })
    }
}

/// The hint of every error for a store that does not reply.
pub(crate) const CHECK_THE_STORE: &str =
    "check that the store is running and reachable, then retry";

/// Returns a text with the first holder and the number of the others.
pub(crate) fn shown_holders(holders: &[HolderInfo]) -> Option<String> {
    let (first, others) = holders.split_first()?;
    Some(match others.len() {
        0 => first.to_string(),
        1 => format!("{first}, and 1 other"),
        n => format!("{first}, and {n} others"),
    })
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let context = self.context();
        match (f.alternate(), self.hint()) {
            (true, Some(hint)) => write!(f, "{} {context} (hint: {hint})", self.reason()),
            (true, None) => write!(f, "{} {context}", self.reason()),
            (false, Some(hint)) => write!(f, "{} {context}\nhint: {hint}", self.0.message),
            (false, None) => write!(f, "{} {context}", self.0.message),
        }
    }
}

/// Prints the [report](Error::report), because `main` and `unwrap` use this form.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.report())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|s| s as &(dyn StdError + 'static))
    }
}

/// Wraps the error, for callers that return a `std::io::Error`.
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
    fn io_error_wraps_the_original_error() {
        let error = std::io::Error::from(Error::lost(LostReason::Gone).with_operation("run"));
        assert_eq!(error.kind(), std::io::ErrorKind::Other);
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()).unwrap();
        assert_eq!(inner.lost_reason(), Some(LostReason::Gone));
        let busy = std::io::Error::from(Error::new(ErrorKind::Contended, "held"));
        assert_eq!(busy.kind(), std::io::ErrorKind::WouldBlock);
    }

    #[test]
    fn display_prints_cause_context_and_hint() {
        let holder = Holder { host: "web-1".into(), pid: 7, label: "nightly".into() };
        let info = HolderInfo::new(holder, Token::new(42).unwrap(), Duration::from_secs(75));
        let name = Name::new("order:42").unwrap();
        let error = Error::contended(&name, vec![info])
            .with_operation("try_lock")
            .with_lock(&name)
            .with_store("memory:");
        assert_eq!(
            error.to_string(),
            "\"order:42\" is held by web-1 pid 7 (nightly) for 1 min 15 s, token 42 [contended; \
             try_lock \"order:42\" on memory:]\nhint: retry later, or wait with lock()"
        );
        assert!(error.is_retryable());
        let error =
            Error::new(ErrorKind::Config, "bad").with_operation("connect").with_store("x://h");
        assert_eq!(error.to_string(), "bad [config; connect to x://h]");
        assert_eq!(
            Error::new(ErrorKind::AtRisk, "late").with_lock(&name).to_string(),
            "late [at_risk; \"order:42\"]"
        );
        assert_eq!(
            Error::new(ErrorKind::Full, "full").with_store("x:").to_string(),
            "full [full; on x:]"
        );
    }

    #[test]
    fn further_holders_are_counted() {
        let name = Name::new("a").unwrap();
        let info = |pid| {
            let holder = Holder { host: "h".into(), pid, label: String::new() };
            HolderInfo::new(holder, Token::new(1).unwrap(), Duration::from_secs(1))
        };
        let text = |n| Error::contended(&name, (0..n).map(info).collect()).reason();
        assert_eq!(text(0), "\"a\" is held by another client");
        assert_eq!(text(1), "\"a\" is held by h pid 0 for 1 s, token 1");
        assert_eq!(text(2), "\"a\" is held by h pid 0 for 1 s, token 1, and 1 other");
        assert_eq!(text(3), "\"a\" is held by h pid 0 for 1 s, token 1, and 2 others");
    }

    #[test]
    fn sources_are_printed_once_and_never_add_a_line() {
        let error = Error::new(ErrorKind::Unreachable, "no answer").with_source("one\ntwo");
        assert_eq!(error.to_string(), "no answer [unreachable]");
        assert_eq!(error.report().to_string(), "no answer: one [unreachable]");
        let inner = Error::new(ErrorKind::Denied, "inner").with_source("deep").with_hint("dig");
        let outer = Error::new(ErrorKind::Denied, "outer").with_source(inner).with_hint("wait");
        assert_eq!(format!("{outer:#}"), "outer: inner [denied]: deep [denied] (hint: wait)");
        assert_eq!(format!("{outer:?}"), "outer: inner [denied]: deep [denied]\nhint: wait");
        let repeated = Error::new(ErrorKind::Full, "disk full: 0 bytes").with_source("0 bytes");
        assert_eq!(repeated.reason(), "disk full: 0 bytes");
    }

    #[test]
    fn the_last_hint_replaces_the_others() {
        let error = Error::new(ErrorKind::Unsupported, "x").with_hint("a").with_hint("b");
        assert_eq!(error.hint(), Some("b"));
    }
}
