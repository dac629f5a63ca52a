//! A fence in NATS, for keys of a key-value bucket that programs use. The lock itself may be in any
//! store.
//!
//! A write names the revision that was read (expected last sequence). So a late writer is rejected
//! because of its token, or because another client has written since. [`change`] reads and writes
//! in one step, [`put`] replaces the value, and [`read`] presents the token before you use what you
//! read. All three reject a stale token without writing anything.
//!
//! **Reads can be stale** if the bucket allows servers other than the leader to reply
//! (`allow_direct`), or while a leader has not noticed that it was replaced. A write that is based
//! on a stale read is rejected. [`read`] confirms its result with a write.
//!
//! **The token is lost with the key.** After a key is deleted, or expires (`max_age`), the first
//! write succeeds with any token. A value that another client wrote with a plain `put` has no token
//! and is rejected with an error. Watchers of the key must skip the first line.
//!
//! **Lost replies.** If the reply to a write is lost, it is unknown whether the write happened.
//! Repeating it is harmless, because the token is the same.

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
    /// The revision; 0 if the key never had a value.
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
    let (kind, what, hint) = match is_no_key {
        true => (
            ErrorKind::Config,
            "invalid NATS key",
            "use letters, digits and -/_=, with single dots between",
        ),
        false => (
            ErrorKind::Unreachable,
            "NATS does not respond, or this user may not use the bucket",
            "check that the servers are running, and that this user may read and write the bucket",
        ),
    };
    Error::new(kind, what).with_hint(hint).with_operation("fence").with_source(error.to_string())
}

/// Writes a key, unless a higher token has written it. Two round trips, and two more for each
/// concurrent change.
///
/// # Cancel safety
/// Not cancel safe: the operation may or may not have happened.
///
/// # Errors
/// - [`ErrorKind::StaleToken`] (see [`Error::stale_token`]): nothing was written.
/// - [`ErrorKind::Corrupt`]: the existing value has no token; it was left unchanged.
/// - [`ErrorKind::Conflict`]: other clients changed the value during every attempt.
/// - [`ErrorKind::Unreachable`]: the write may or may not have happened.
/// - The errors of [`Fence::fence`], and any error of the servers.
///
/// ```no_run
/// # async fn example(guard: leasehold_core::MutexGuard) -> Result<(), Box<dyn std::error::Error>> {
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

/// Changes a key with `work` and returns the new value.
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
/// # async fn example(guard: leasehold_core::MutexGuard) -> Result<(), Box<dyn std::error::Error>> {
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

/// Reads a key and presents the token; from then on no smaller token can write it. Use it when you
/// base other work on the value.
///
/// A missing key has no token, so create it with [`change`]. Two round trips, one of which writes.
///
/// # Cancel safety
/// Not cancel safe: the token may or may not have been presented.
///
/// # Errors
/// The errors of [`put`].
///
/// ```no_run
/// # async fn example(guard: leasehold_core::MutexGuard) -> Result<(), Box<dyn std::error::Error>> {
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
