//! What may be shown to a fence: the resource's side of the fencing token.
//!
//! A lock alone cannot stop a holder that was paused: its lease ends, the next one holds, and then
//! the first wakes and writes. Only the resource can refuse that write: it remembers the greatest
//! token it has seen and refuses smaller ones, in one atomic step with the write. `leasehold::fence`
//! says what else a fence needs, and has those for SQL, Redis and HTTP.

use crate::client::lease::{Lease, State};
use crate::lock::guard::{Guard, Watch};
use crate::words::error::{Error, ErrorKind, Result};
use crate::words::sequencer::Side;
use crate::words::token::Token;

/// What may be shown to a fence: a [`Token`] (of an exclusive hold: that is the caller's word), or
/// the [`Guard`] itself or a [`Watch`] of it, which are refused unless the hold is exclusive and
/// neither lost nor released.
pub trait Fence {
    /// The token.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the hold is shared, [`ErrorKind::Lost`] if it is lost.
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
            let what = "a fence is for exclusive holds; permits and readers hold side by side";
            Err(Error::new(ErrorKind::Unsupported, what))
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
