//! The resource's side of the fencing token: what makes a late writer harmless.
//!
//! A lock alone cannot stop a holder that was paused: its lease ends, the next one holds, and then
//! the first wakes and writes. Only the resource can refuse that write: it remembers the greatest
//! token it has seen and refuses smaller ones.
//!
//! What a fence needs, whatever the resource:
//! - **Check and write are one atomic step.** A check that is followed by a separate write lets a
//!   greater token in between.
//! - **Reads carry the token too**, if what is written depends on what was read. A fence knows of a
//!   new holder only once that holder has come by: a late write that arrives *before* the new
//!   holder's first step is accepted, in token order. If the new holder had read before that
//!   without showing its token, its write then overwrites the late one unseen. A read that
//!   raises the mark closes the door behind it. So: first thing, check.
//! - **One place keeps the mark.** A resource of many nodes keeps it where its writes are ordered,
//!   beside the data; a mark on another node than the data is not atomic with it.
//! - **The hold is exclusive.** Permits of a semaphore and readers hold side by side: the greatest
//!   token among them is no reason to refuse the others.

pub mod sql;

use crate::claim::{Kind, Token};
use crate::error::{Error, ErrorKind, Result};
use crate::guard::Guard;
use crate::lease::State;

/// What may be shown to a fence: a [`Token`] (of an exclusive hold: that is the caller's word), or
/// the [`Guard`] itself, which is refused unless it is exclusive and not lost.
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
        let shared = match self.kind() {
            Kind::Mutex => false,
            Kind::RwLock => self.permits() == 1,
            Kind::Semaphore => true,
        };
        if shared {
            let what = "a fence is for exclusive holds; permits and readers hold side by side";
            return Err(Error::new(ErrorKind::Unsupported, what).during("fence").on(self.name()));
        }
        if let State::Lost(reason) = self.state() {
            return Err(Error::lost(reason).during("fence").on(self.name()));
        }
        Ok(self.token())
    }
}

impl<F: Fence + ?Sized> Fence for &F {
    fn fence(&self) -> Result<Token> {
        (**self).fence()
    }
}
