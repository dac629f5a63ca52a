//! The work of a transaction, with a name for the type of its future.
//!
//! To spawn a task that calls [`run_in`](super::Once::run_in), its future must be `Send`. A bound
//! on `AsyncFnOnce` cannot require this of the returned future. Without this trait, the compiler
//! would demand `Send` for every lifetime of the transaction's type. The trait requires it only
//! once, at the call.

use std::future::Future;

/// Implemented for every async closure; do not implement it yourself.
pub trait Work<I, O> {
    /// The future of the work.
    type Begun: Future<Output = O>;

    /// Starts the work.
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
