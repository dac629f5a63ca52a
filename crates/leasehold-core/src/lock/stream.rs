//! A stream of the results of a repeated request.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::Stream;

type PendingRequest<S, T> = Pin<Box<dyn Future<Output = (S, T)> + Send>>;

/// A stream that makes a request for each item. Requests progress only while the stream is polled.
/// It never ends.
pub(crate) struct RequestStream<S, T, A> {
    request: A,
    pending: PendingRequest<S, T>,
}

impl<S, T, A, F> RequestStream<S, T, A>
where
    A: FnMut(S) -> F + Unpin,
    F: Future<Output = (S, T)> + Send + 'static,
{
    /// Creates the stream. Each call of `request` gets the value that the previous request
    /// returned.
    pub(crate) fn of(state: S, mut request: A) -> Self {
        let pending = Box::pin(request(state));
        Self { request, pending }
    }
}

impl<S, T, A, F> Stream for RequestStream<S, T, A>
where
    A: FnMut(S) -> F + Unpin,
    F: Future<Output = (S, T)> + Send + 'static,
{
    type Item = T;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let this = self.get_mut();
        let (state, item) = ready!(this.pending.as_mut().poll(cx));
        this.pending = Box::pin((this.request)(state));
        Poll::Ready(Some(item))
    }
}
