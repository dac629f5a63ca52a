//! Fencing tokens, as a resource checks them.
//!
//! A lock alone cannot stop a holder that was paused: its lease expires, another client acquires
//! the lock, and then the first client resumes and writes. Only the resource can reject that write.
//! The resource stores the highest token seen and rejects smaller tokens, in the same atomic step
//! as the write. `leasehold::fence` lists what a fence needs, and provides fences for SQL, Redis,
//! HTTP and others.

use crate::client::lease::{Lease, State};
use crate::lock::guard::{Guard, mode};
use crate::types::error::{Error, ErrorKind, Result};
use crate::types::sequencer::Side;
use crate::types::token::FencingToken;

/// A source of a fencing token.
///
/// This trait is implemented for [`FencingToken`], for [`MutexGuard`](crate::MutexGuard) and for
/// [`WriteGuard`](crate::WriteGuard). A guard returns an error if its lock was lost or released.
///
/// ```compile_fail,E0277
/// # async fn example(locks: leasehold::Client) -> leasehold::Result<()> {
/// use leasehold::fence::Fence;
/// fn write(fence: impl Fence) {}
/// write(locks.rwlock("config").read().await?); // a reader has no fencing token
/// # Ok(()) }
/// ```
pub trait Fence {
    /// Returns the token.
    ///
    /// # Errors
    /// - [`Unsupported`](ErrorKind::Unsupported): the write hold was downgraded through another
    ///   guard.
    /// - [`Lost`](ErrorKind::Lost): the lock was lost.
    /// - [`Closed`](ErrorKind::Closed): the lock was released.
    fn fence(&self) -> Result<FencingToken>;
}

impl Fence for FencingToken {
    fn fence(&self) -> Result<FencingToken> {
        Ok(*self)
    }
}

impl<M: mode::Exclusive> Fence for Guard<M> {
    fn fence(&self) -> Result<FencingToken> {
        shown(self.lease())
    }
}

/// Rejects a hold if other clients can hold the lock at the same time.
pub(crate) fn exclusive(lease: &Lease) -> Result<()> {
    match lease.side() {
        Side::Mutex | Side::Write => Ok(()),
        Side::Read | Side::Semaphore => {
            let what = "a fence needs an exclusive hold, and this one is shared (reader or permit)";
            let hint = "use a mutex or a write lock";
            Err(Error::new(ErrorKind::Unsupported, what).with_hint(hint))
        }
    }
}

/// Returns the token of a hold that is exclusive and not lost.
pub(crate) fn shown(lease: &Lease) -> Result<FencingToken> {
    let error = match (exclusive(lease), lease.state()) {
        (Err(error), _) => error,
        (_, State::Lost(reason)) => Error::lost(reason),
        (_, State::Released) => Error::new(ErrorKind::Closed, "the lock was released"),
        (Ok(()), State::Held | State::AtRisk(_)) => {
            return Ok(FencingToken::of(lease.token));
        }
    };
    Err(error.with_operation("fence").with_lock(&lease.claim.name))
}

impl<F: Fence + ?Sized> Fence for &F {
    fn fence(&self) -> Result<FencingToken> {
        (**self).fence()
    }
}
