//! The client's side: adds the token of the current hold to every request, or returns an error.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{HeaderValue, Request};
use tower_layer::Layer;
use tower_service::Service;

use super::TOKEN_HEADER;
use leasehold_core::fence::Fence;
use leasehold_core::mode::Exclusive;
use leasehold_core::{Guard, Result, Watch};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A `tower` layer that adds the token of one hold to requests, and sends none once the lock is
/// lost or released.
///
/// Create one layer per hold. The layer and the layered service are cheap:
///
/// ```no_run
/// # use leasehold::fence::http::TokenLayer;
/// # async fn f<C: Clone>(guard: leasehold::MutexGuard, client: C) -> leasehold::Result<()> {
/// use tower_layer::Layer;
/// let client = TokenLayer::new(&guard)?.layer(client.clone());
/// # let _ = client; Ok(()) }
/// ```
///
/// A request that is already being sent when the lock is lost still arrives. That is why the server
/// checks the token.
#[derive(Clone, Debug)]
pub struct TokenLayer {
    hold: Watch,
    value: HeaderValue,
    least: Duration,
}

impl TokenLayer {
    /// Creates the layer for this hold. The layer does not keep the lock held.
    ///
    /// # Errors
    /// - [`Unsupported`](leasehold_core::ErrorKind::Unsupported): the write hold was downgraded
    ///   through another guard.
    /// - [`Lost`](leasehold_core::ErrorKind::Lost): the lock was lost.
    pub fn new<M: Exclusive>(guard: &Guard<M>) -> Result<Self> {
        let token = guard.fence()?.get();
        Ok(Self { hold: guard.watch(), value: HeaderValue::from(token), least: Duration::ZERO })
    }

    /// Sends requests only while at least this much of the lease is left. Set it to the time that a
    /// request takes. Default: zero, which sends requests until the lock is lost.
    ///
    /// ```
    /// # pollster::block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// # use std::time::Duration;
    /// use leasehold::fence::http::TokenLayer;
    /// let guard = locks.mutex("order:42").lock().await?;
    /// let layer = TokenLayer::new(&guard)?.min_validity(Duration::from_secs(2));
    /// // tower::ServiceBuilder::new().layer(layer).service(client)
    /// # let _ = layer;
    /// # Ok::<(), leasehold::Error>(()) })?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    #[must_use]
    pub fn min_validity(mut self, least: Duration) -> Self {
        self.least = least;
        self
    }
}

impl<S> Layer<S> for TokenLayer {
    type Service = Tokened<S>;

    fn layer(&self, inner: S) -> Tokened<S> {
        Tokened { layer: self.clone(), inner }
    }
}

/// A client wrapped by [`TokenLayer`], which adds the token to each request.
///
/// Errors come from the wrapped client or from leasehold. If
/// `error.downcast_ref::<leasehold::Error>()` has the kind
/// [`Lost`](leasehold_core::ErrorKind::Lost), [`AtRisk`](leasehold_core::ErrorKind::AtRisk) or
/// [`Closed`](leasehold_core::ErrorKind::Closed) (released), nothing was sent.
#[derive(Clone)]
pub struct Tokened<S> {
    layer: TokenLayer,
    inner: S,
}

impl<S> fmt::Debug for Tokened<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokened").field("layer", &self.layer).finish_non_exhaustive()
    }
}

impl<S, B> Service<Request<B>> for Tokened<S>
where
    S: Service<Request<B>>,
    S::Future: Send + 'static,
    S::Response: 'static,
    S::Error: Into<BoxError>,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        // Checked last, immediately before the request is sent.
        if let Err(error) = self.layer.hold.ensure(self.layer.least) {
            return Box::pin(async { Err(error.into()) });
        }
        // Replaces any other value, which does not belong to this hold.
        request.headers_mut().insert(TOKEN_HEADER, self.layer.value.clone());
        let sent = self.inner.call(request);
        Box::pin(async move { sent.await.map_err(Into::into) })
    }
}
