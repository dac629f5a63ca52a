//! A work, and the name of its future.
//!
//! Who spawns what calls [`run_in`](super::Once::run_in) needs a future that may be sent. A bound on `AsyncFnOnce`
//! cannot say that of what it returns, and left to the compiler it is asked of the closure for every lifetime that the
//! transaction's type might have, which a closure has not. So it is asked once, at the call.

use std::future::Future;

/// What an async closure is anyway: nobody implements this.
pub trait Work<I, O> {
    /// The work as it goes on.
    type Begun: Future<Output = O>;

    /// Begins.
    fn begin(self, with: I) -> Self::Begun;
}

impl<I, F, W> Work<I, W::Output> for F
where
    F: FnOnce(I) -> W,
    W: Future,
{
    type Begun = W;

    fn begin(self, with: I) -> W {
        self(with)
    }
}
