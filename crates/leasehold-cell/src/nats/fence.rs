//! A fence in a key of a NATS key-value bucket: for what programs keep there themselves, while the lock may
//! live anywhere.
//!
//! A value is written with the revision that was read (expected last sequence), so a late writer is refused
//! by its token, or because somebody has written since. [`change`] reads and writes as one step, [`put`]
//! replaces, and [`read`] shows the token before something else is made of what is read. Each refuses a stale
//! token, and has written nothing then.
//!
//! **A look may be old**, where the bucket lets other members than the leader answer (`allow_direct`), or a
//! leader has been replaced and does not know it yet. What is written by it is refused; and what [`read`]
//! returns was made sure of by a write.
//!
//! **Who deletes a key** deletes its mark with it, and so does an age (`max_age`) that comes: then any token
//! may write first. What others write by a plain `put` has no mark, and is refused as it is found. Whoever
//! watches the key skips the first line.
//!
//! **What is lost**: of a write whose answer is lost it is unknown whether it was done. To say it again is
//! harmless, for the token is the same.

use async_nats::jetstream::kv::{EntryErrorKind, Operation, Store, UpdateErrorKind};
use leasehold_core::fence::Fence;
use leasehold_core::{Error, ErrorKind, Result};

use crate::fence::Guarded;

/// One key of a bucket.
struct Key<'a> {
    bucket: &'a Store,
    key: &'a str,
}

impl Guarded for Key<'_> {
    /// The revision; 0: nothing was ever there.
    type Version = u64;
    const LOOKS_BEHIND: bool = true;

    async fn look(&self) -> Result<(Option<Vec<u8>>, u64)> {
        match self.bucket.entry(self.key).await {
            Ok(Some(entry)) => {
                let is_there = entry.operation == Operation::Put;
                Ok((is_there.then(|| entry.value.to_vec()), entry.revision))
            }
            Ok(None) => Ok((None, 0)),
            Err(error) => Err(explain(error.kind() == EntryErrorKind::InvalidKey, error)),
        }
    }

    async fn write(&self, value: Vec<u8>, read: &u64) -> Result<bool> {
        match self.bucket.update(self.key, value.into(), *read).await {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == UpdateErrorKind::WrongLastRevision => Ok(false),
            Err(error) => Err(explain(error.kind() == UpdateErrorKind::InvalidKey, error)),
        }
    }
}

fn explain(is_no_key: bool, error: impl std::error::Error) -> Error {
    let (kind, what) = match is_no_key {
        true => (ErrorKind::Config, "NATS has no such keys: letters, digits and -/_=. between"),
        false => (
            ErrorKind::Unreachable,
            "NATS does not answer, or not to this user: check that the servers run and that the bucket may be \
             read and written, then try again",
        ),
    };
    Error::new(kind, what).during("fence").because(error.to_string())
}

/// Writes a key, if no greater token has written it: two round trips, and two more for each change that others make
/// meanwhile.
///
/// # Cancel safety
/// Dropped, it may have been written or not: as after [`ErrorKind::Unreachable`].
///
/// # Errors
/// [`ErrorKind::StaleToken`] (see [`Error::stale_token`]), and nothing was written; [`ErrorKind::Corrupt`] if
/// what is there has no mark, and it stays; [`ErrorKind::Conflict`] if others were always faster. Those of
/// [`Fence::fence`], and what the servers answer; [`ErrorKind::Unreachable`] leaves open whether it was
/// written.
///
/// ```no_run
/// # async fn example(guard: leasehold_core::Guard) -> Result<(), Box<dyn std::error::Error>> {
/// use leasehold_cell::nats::{async_nats, fence};
/// let context = async_nats::jetstream::new(async_nats::connect("nats.example").await?);
/// let bucket = context.get_key_value("state").await?;
/// fence::put(&bucket, "leader", &guard, b"10.0.0.7").await?;
/// # Ok(())
/// # }
/// ```
pub async fn put(bucket: &Store, key: &str, fence: impl Fence, value: &[u8]) -> Result<()> {
    change(bucket, key, fence, |_| Some(value.to_vec())).await.map(drop)
}

/// Changes a key: `work` is given what is there and says what is to be there, or `None` to leave it. It is
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
/// # async fn example(guard: leasehold_core::Guard) -> Result<(), Box<dyn std::error::Error>> {
/// # use leasehold_cell::nats::{async_nats, fence};
/// # let context = async_nats::jetstream::new(async_nats::connect("nats.example").await?);
/// # let bucket = context.get_key_value("state").await?;
/// let next = fence::change(&bucket, "number", &guard, |old| {
///     let old = old.and_then(|old| std::str::from_utf8(old).ok()?.parse().ok());
///     Some((old.unwrap_or(0_u64) + 1).to_string().into_bytes())
/// });
/// println!("{:?}", next.await?);
/// # Ok(())
/// # }
/// ```
pub async fn change(
    bucket: &Store,
    key: &str,
    fence: impl Fence,
    work: impl FnMut(Option<&[u8]>) -> Option<Vec<u8>>,
) -> Result<Option<Vec<u8>>> {
    crate::fence::change(&Key { bucket, key }, fence, work).await
}

/// Reads a key and shows it the token, before something is made of what is read: from here on no smaller
/// token writes it. What is not there keeps no mark, so who makes it writes by [`change`]. Two round trips,
/// of which one writes.
///
/// # Cancel safety
/// As [`put`].
///
/// # Errors
/// As [`put`].
///
/// ```no_run
/// # async fn example(guard: leasehold_core::Guard) -> Result<(), Box<dyn std::error::Error>> {
/// # use leasehold_cell::nats::{async_nats, fence};
/// # let context = async_nats::jetstream::new(async_nats::connect("nats.example").await?);
/// # let bucket = context.get_key_value("state").await?;
/// if let Some(leader) = fence::read(&bucket, "leader", &guard).await? {
///     println!("{}", String::from_utf8_lossy(&leader));
/// }
/// # Ok(())
/// # }
/// ```
pub async fn read(bucket: &Store, key: &str, fence: impl Fence) -> Result<Option<Vec<u8>>> {
    crate::fence::read(&Key { bucket, key }, fence).await
}
