//! A fence in a value of memcached's: for what programs keep there themselves, while the lock may live anywhere.
//!
//! A value is written with the number that was read with it (compare and set), so a late writer is refused by
//! its token, or because somebody has written since. [`change`] reads and writes as one step, [`put`]
//! replaces, and [`read`] shows the token before something else is made of what is read. Each refuses a stale
//! token, and has written nothing then.
//!
//! **What memcached forgets it forgets with the mark.** Where the value was thrown away, or the server
//! restarted, any token may write first. So the fence keeps late writers from a value that is there; it is
//! none for data elsewhere. For the same reason a value does not expire. What others write by a plain `set`
//! has no mark, and is refused as it is found.
//!
//! **What is lost**: of a write whose answer is lost it is unknown whether it was done. To say it again is
//! harmless, for the token is the same.

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

/// The longest key that memcached takes.
const LONGEST_KEY: usize = 250;
/// What a mark takes at most.
const MARK: usize = 64;

/// The values of one memcached server. Clients of a lock in the same server have connections of their own.
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
    /// Connects to the server of this URL, `memcached://host` or `memcached://user:password@host`. The
    /// connection lives on `runtime`, and is made again when it breaks. Three round trips.
    ///
    /// # Cancel safety
    /// Dropped, nothing is left of it.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for a URL that names several servers or a server that cannot compare and set; as
    /// [`memcached::connect`](super::connect) otherwise.
    pub async fn connect(url: &str, runtime: &Handle) -> Result<Self> {
        let Ok([server]) = <[_; 1]>::try_from(MemcachedUrl::parse(url)?) else {
            let what = "values that are fenced are on one memcached server: name it alone";
            return Err(Error::new(ErrorKind::Config, what).during("fence"));
        };
        let (link, item) = linked(&server, runtime).await.map_err(|e| e.during("fence"))?;
        let largest = item.min(wire::LARGEST).saturating_sub(LONGEST_KEY + 2 * MARK);
        Ok(Self { link, largest })
    }

    fn at<'a>(&'a self, key: &'a str) -> Result<Value<'a>> {
        let is_key = key.bytes().all(|byte| byte.is_ascii_graphic());
        if key.is_empty() || key.len() > LONGEST_KEY || !is_key {
            let what = "a key of memcached's is 1 to 250 printable ASCII characters without spaces";
            return Err(Error::new(ErrorKind::Config, what).during("fence"));
        }
        Ok(Value { values: self, key })
    }
}

/// One of them.
struct Value<'a> {
    values: &'a Values,
    key: &'a str,
}

impl Value<'_> {
    async fn ask(&self, request: Request) -> Result<Answer> {
        let answers = self.values.link.run(vec![request]).await;
        let answer = answers.map_err(|error| error.during("fence"))?.pop();
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
        // One that is too large would be refused, and the old value be gone by it.
        if value.len() > self.values.largest {
            let what = format!("a value is at most {} bytes on this server", self.values.largest);
            return Err(Error::new(ErrorKind::Full, what).during("fence"));
        }
        let (key, lives) = (self.key.to_owned(), None);
        let request = match read.clone() {
            None => Request::Create { key, value, lives },
            Some(version) => Request::Replace { key, value, version, lives },
        };
        Ok(matches!(self.ask(request).await?, Answer::Written(_)))
    }
}

/// Writes a value, if no greater token has written it: two round trips, and two more for each change that others make
/// meanwhile.
///
/// # Cancel safety
/// Dropped, it may have been written or not: as after [`ErrorKind::Unreachable`].
///
/// # Errors
/// [`ErrorKind::StaleToken`] (see [`Error::stale_token`]), and nothing was written; [`ErrorKind::Corrupt`] if
/// what is there has no mark, and it stays; [`ErrorKind::Conflict`] if others were always faster;
/// [`ErrorKind::Full`] if it is too large. Those of [`Fence::fence`], and what the server answers;
/// [`ErrorKind::Unreachable`] leaves open whether it was written.
///
/// ```no_run
/// # async fn example(guard: leasehold_core::Guard) -> leasehold_core::Result<()> {
/// use leasehold_cell::memcached::fence::{self, Values};
/// let values = Values::connect("memcached://cache.example", &tokio::runtime::Handle::current()).await?;
/// fence::put(&values, "report:today", &guard, b"42 orders").await?;
/// # Ok(())
/// # }
/// ```
pub async fn put(values: &Values, key: &str, fence: impl Fence, value: &[u8]) -> Result<()> {
    change(values, key, fence, |_| Some(value.to_vec())).await.map(drop)
}

/// Changes a value: `work` is given what is there and says what is to be there, or `None` to leave it. It is
/// asked again when somebody else has changed it meanwhile. Returns what is there then. Round trips as
/// [`put`].
///
/// # Cancel safety
/// As [`put`].
///
/// # Errors
/// As [`put`].
///
/// ```no_run
/// # async fn example(guard: leasehold_core::Guard) -> leasehold_core::Result<()> {
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

/// Reads a value and shows it the token, before something is made of what is read: from here on no smaller
/// token writes it. What is not there keeps no mark, so who makes it writes by [`change`]. One round trip if
/// this token has been shown, two otherwise.
///
/// # Cancel safety
/// As [`put`].
///
/// # Errors
/// As [`put`].
///
/// ```no_run
/// # async fn example(guard: leasehold_core::Guard) -> leasehold_core::Result<()> {
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
