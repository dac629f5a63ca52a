//! A fence in memcached, for values that programs store there. The lock itself may be in any store.
//!
//! A write uses compare-and-set with the CAS number that was read. So a late writer is rejected
//! because of its token, or because another client has written since. [`change`] reads and writes
//! in one step, [`put`] replaces the value, and [`read`] presents the token before you use what you
//! read. All three reject a stale token without writing anything.
//!
//! **The token is lost with the value.** After an eviction or a server restart, the first write
//! succeeds with any token. So the fence protects only a value that exists in memcached, and no
//! data elsewhere. For the same reason, its values do not expire. A value that another client wrote
//! with a plain `set` has no token and is rejected with an error.
//!
//! **Lost replies.** If the reply to a write is lost, it is unknown whether the write happened.
//! Repeating it is harmless, because the token is the same.

use std::fmt;

use leasehold_core::fence::Fence;
use leasehold_core::{Error, ErrorKind, Result};
use tokio::runtime::Handle;

use super::link::Link;
use super::server::linked;
use super::url::MemcachedUrl;
use super::wire;
use crate::cells::{Answer, Request, Version};
use crate::fence::Guarded;

/// The longest key that memcached accepts.
const LONGEST_KEY: usize = 250;
/// Maximum length of the token line.
const MARK: usize = 64;

/// The values of one memcached server. Lock clients of the same server use separate connections.
pub struct Values {
    link: Link,
    largest: usize,
}

impl fmt::Debug for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Values").finish_non_exhaustive()
    }
}

impl Values {
    /// Connects to the server at `url`, `memcached://host` or `memcached://user:password@host`.
    ///
    /// The connection runs on `runtime` and is reopened when it breaks. Three round trips.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// - [`ErrorKind::Config`]: the URL names several servers, or the server does not support
    ///   compare-and-set.
    /// - The errors of [`memcached::connect`](super::connect).
    pub async fn connect(url: &str, runtime: &Handle) -> Result<Self> {
        let Ok([server]) = <[_; 1]>::try_from(MemcachedUrl::parse(url)?) else {
            let what = "the URL names several memcached servers, but a fence uses one";
            let error = Error::new(ErrorKind::Config, what).with_operation("fence");
            return Err(error.with_hint("use memcached://host"));
        };
        let (link, item) = linked(&server, runtime).await.map_err(|e| e.with_operation("fence"))?;
        let largest = item.min(wire::LARGEST).saturating_sub(LONGEST_KEY + 2 * MARK);
        Ok(Self { link, largest })
    }

    fn at<'a>(&'a self, key: &'a str) -> Result<Value<'a>> {
        let is_key = key.bytes().all(|byte| byte.is_ascii_graphic());
        if key.is_empty() || key.len() > LONGEST_KEY || !is_key {
            let shown: String = key.chars().take(60).collect();
            let what = format!("invalid memcached key {shown:?}");
            let hint = "use 1 to 250 printable ASCII characters without spaces";
            return Err(Error::new(ErrorKind::Config, what)
                .with_hint(hint)
                .with_operation("fence"));
        }
        Ok(Value { values: self, key })
    }
}

/// A value under one key.
struct Value<'a> {
    values: &'a Values,
    key: &'a str,
}

impl Value<'_> {
    async fn ask(&self, request: Request) -> Result<Answer> {
        let answers = self.values.link.run(vec![request]).await;
        let answer = answers.map_err(|error| error.with_operation("fence"))?.pop();
        Ok(answer.unwrap_or(Answer::Absent))
    }
}

impl Guarded for Value<'_> {
    type Version = Option<Version>;
    const LOOKS_BEHIND: bool = false;

    async fn look(&self) -> Result<(Option<Vec<u8>>, Self::Version)> {
        match self.ask(Request::Get { key: self.key.to_owned() }).await? {
            Answer::Found(found) => Ok((Some(found.value), Some(found.version))),
            _ => Ok((None, None)),
        }
    }

    async fn write(&self, value: Vec<u8>, read: &Self::Version) -> Result<bool> {
        // The server would refuse a value that is too large, and delete the old one.
        if value.len() > self.values.largest {
            let what = format!(
                "the value has {} bytes, but this server allows {}",
                value.len(),
                self.values.largest
            );
            let hint = "store a smaller value, or raise the limit: `memcached -I SIZE`";
            return Err(Error::new(ErrorKind::Full, what).with_hint(hint).with_operation("fence"));
        }
        let (key, lives) = (self.key.to_owned(), None);
        let request = match read.clone() {
            None => Request::Create { key, value, lives },
            Some(version) => Request::Replace { key, value, version, lives },
        };
        Ok(matches!(self.ask(request).await?, Answer::Written(_)))
    }
}

/// Writes a value, unless a higher token has written it. Two round trips, and two more for each
/// concurrent change.
///
/// # Cancel safety
/// Not cancel safe: the operation may or may not have happened.
///
/// # Errors
/// - [`ErrorKind::StaleToken`] (see [`Error::stale_token`]): nothing was written.
/// - [`ErrorKind::Corrupt`]: the existing value has no token; it was left unchanged.
/// - [`ErrorKind::Conflict`]: other clients changed the value during every attempt.
/// - [`ErrorKind::Full`]: the value is too large.
/// - [`ErrorKind::Unreachable`]: the write may or may not have happened.
/// - The errors of [`Fence::fence`], and any error of the server.
///
/// ```no_run
/// # async fn example(guard: leasehold_core::MutexGuard) -> leasehold_core::Result<()> {
/// use leasehold_cell::memcached::fence::{self, Values};
/// let values = Values::connect("memcached://cache.example", &tokio::runtime::Handle::current()).await?;
/// fence::put(&values, "report:today", &guard, b"42 orders").await?;
/// # Ok(())
/// # }
/// ```
pub async fn put(values: &Values, key: &str, fence: impl Fence, value: &[u8]) -> Result<()> {
    change(values, key, fence, |_| Some(value.to_vec())).await.map(drop)
}

/// Changes a value with `work` and returns the new value.
///
/// `work` gets the current value and returns the new one, or `None` to keep it. It is called again
/// if another client has changed the value in the meantime. Needs as many round trips as [`put`].
///
/// # Cancel safety
/// Not cancel safe: the operation may or may not have happened.
///
/// # Errors
/// The errors of [`put`].
///
/// ```no_run
/// # async fn example(guard: leasehold_core::MutexGuard) -> leasehold_core::Result<()> {
/// # use leasehold_cell::memcached::fence::{self, Values};
/// # let values = Values::connect("memcached://cache.example", &tokio::runtime::Handle::current()).await?;
/// let list = fence::change(&values, "done", &guard, |old| {
///     let mut list = old.unwrap_or_default().to_vec();
///     list.extend_from_slice(b"order:42\n");
///     Some(list)
/// });
/// println!("{:?}", list.await?);
/// # Ok(())
/// # }
/// ```
pub async fn change(
    values: &Values,
    key: &str,
    fence: impl Fence,
    work: impl FnMut(Option<&[u8]>) -> Option<Vec<u8>>,
) -> Result<Option<Vec<u8>>> {
    crate::fence::change(&values.at(key)?, fence, work).await
}

/// Reads a value and presents the token; from then on no smaller token can write it. Use it when
/// you base other work on the value.
///
/// A missing value has no token, so create it with [`change`]. One round trip if this token was
/// already presented, otherwise two.
///
/// # Cancel safety
/// Not cancel safe: the token may or may not have been presented.
///
/// # Errors
/// The errors of [`put`].
///
/// ```no_run
/// # async fn example(guard: leasehold_core::MutexGuard) -> leasehold_core::Result<()> {
/// # use leasehold_cell::memcached::fence::{self, Values};
/// # let values = Values::connect("memcached://cache.example", &tokio::runtime::Handle::current()).await?;
/// if let Some(list) = fence::read(&values, "done", &guard).await? {
///     println!("{} bytes", list.len());
/// }
/// # Ok(())
/// # }
/// ```
pub async fn read(values: &Values, key: &str, fence: impl Fence) -> Result<Option<Vec<u8>>> {
    crate::fence::read(&values.at(key)?, fence).await
}
