//! A stream of the answers to one question that is asked again and again.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::Stream;

type Asking<S, T> = Pin<Box<dyn Future<Output = (S, T)> + Send>>;

/// Asks when it is polled, and not before. It has no end.
pub(crate) struct Asked<S, T, A> {
    ask: A,
    asking: Asking<S, T>,
}

impl<S, T, A, F> Asked<S, T, A>
where
    A: FnMut(S) -> F + Unpin,
    F: Future<Output = (S, T)> + Send + 'static,
{
    /// Asks so, of whom the answer before gave back.
    pub(crate) fn of(whom: S, mut ask: A) -> Self {
        let asking = Box::pin(ask(whom));
        Self { ask, asking }
    }
}

impl<S, T, A, F> Stream for Asked<S, T, A>
where
    A: FnMut(S) -> F + Unpin,
    F: Future<Output = (S, T)> + Send + 'static,
{
    type Item = T;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let this = self.get_mut();
        let (whom, answer) = ready!(this.asking.as_mut().poll(cx));
        this.asking = Box::pin((this.ask)(whom));
        Poll::Ready(Some(answer))
    }
}
