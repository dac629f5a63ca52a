//! Fencing tokens, as a resource checks them.
//!
//! A lock alone cannot stop a holder that was paused: its lease expires, another client acquires
//! the lock, and then the first client resumes and writes. Only the resource can reject that write.
//! It stores the highest token seen and rejects smaller ones, in the same atomic step as the write.
//! `leasehold::fence` lists what a fence needs, and has fences for SQL, Redis and HTTP.

use crate::client::lease::{Lease, State};
use crate::lock::guard::{Guard, Watch};
use crate::words::error::{Error, ErrorKind, Result};
use crate::words::sequencer::Side;
use crate::words::token::Token;

/// A source of a fencing token.
///
/// It is implemented for [`Token`], for [`Guard`] and for [`Watch`]. A guard or a watch returns an
/// error unless its hold is exclusive and neither lost nor released. With a plain [`Token`], the
/// caller guarantees that it comes from an exclusive hold.
pub trait Fence {
    /// Returns the token.
    ///
    /// # Errors
    /// - [`Unsupported`](ErrorKind::Unsupported): the hold is shared (a reader or a permit).
    /// - [`Lost`](ErrorKind::Lost): the lock was lost.
    /// - [`Closed`](ErrorKind::Closed): the lock was released.
    fn fence(&self) -> Result<Token>;
}

impl Fence for Token {
    fn fence(&self) -> Result<Token> {
        Ok(*self)
    }
}

impl Fence for Guard {
    fn fence(&self) -> Result<Token> {
        shown(self.lease())
    }
}

impl Fence for Watch {
    fn fence(&self) -> Result<Token> {
        shown(self.lease())
    }
}

/// Refuses holds beside which there are others.
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

/// The token of a hold that may be shown.
fn shown(lease: &Lease) -> Result<Token> {
    let error = match (exclusive(lease), lease.state()) {
        (Err(error), _) => error,
        (_, State::Lost(reason)) => Error::lost(reason),
        (_, State::Released) => Error::new(ErrorKind::Closed, "the lock was released"),
        (Ok(()), State::Held | State::AtRisk(_)) => return Ok(lease.token),
    };
    Err(error.during("fence").on(&lease.claim.name))
}

impl<F: Fence + ?Sized> Fence for &F {
    fn fence(&self) -> Result<Token> {
        (**self).fence()
    }
}
