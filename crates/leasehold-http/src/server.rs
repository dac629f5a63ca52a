//! The server's side: a layer that rejects requests with stale tokens.

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::header::{CONTENT_TYPE, HeaderValue};
use http::request::Parts;
use http::{HeaderMap, Request, Response, StatusCode};
use serde_json::{Value, json};
use tower_layer::Layer;
use tower_service::Service;

use super::{TOKEN_HEADER, TokenStorage};
use leasehold_core::fence::Fence;
use leasehold_core::{Error, FencingToken, Name, Result, StaleToken, telemetry};

type Resource = dyn Fn(&Parts) -> Option<String> + Send + Sync;

/// A `tower` layer that rejects requests with a stale fencing token; see the [module](crate).
///
/// Cheap to clone. Clones share the token storage.
///
/// ```
/// use leasehold::fence::http::{FenceLayer, FileMemory, InMemory};
/// let named = |request: &http::request::Parts| Some(request.uri.path().to_owned());
/// let fence = FenceLayer::new(InMemory::new(), named).allow_missing(); // some clients do not use locks yet
/// # let folder = tempfile::tempdir().unwrap();
/// # let file = folder.path().join("marks");
/// let durable = FenceLayer::new(FileMemory::open(file)?, named);
/// # let _ = (fence, durable); Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
pub struct FenceLayer {
    memory: Arc<dyn TokenStorage>,
    resource: Arc<Resource>,
    missing_passes: bool,
}

impl FenceLayer {
    /// Creates a layer that protects the requests for which `resource` returns a name. All others
    /// pass unchecked.
    ///
    /// Two requests concern the same resource if and only if their names are equal byte for byte.
    /// So derive the name from what the handler will write, not from how the request spells it. A
    /// name has 1 to 512 bytes and no control characters. Requests with other names are answered
    /// with 400.
    pub fn new(
        memory: impl TokenStorage,
        resource: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        Self { memory: Arc::new(memory), resource: Arc::new(resource), missing_passes: false }
    }

    /// Accepts requests without a token, and passes them on without [`Fenced`]. For a service with
    /// clients that do not use locks yet. Their writes are not protected from other writes, nor
    /// other writes from them.
    #[must_use]
    pub fn allow_missing(mut self) -> Self {
        self.missing_passes = true;
        self
    }

    /// Decides how to handle a request.
    fn look(&self, parts: &Parts) -> Look {
        let Some(resource) = (self.resource)(parts) else { return Look::Pass };
        let resource = match Name::new(&resource) {
            Ok(resource) => resource,
            Err(error) => {
                let body = json!({ "error": "bad resource", "detail": error.reason() });
                return Look::Refuse(StatusCode::BAD_REQUEST, body);
            }
        };
        match token(&parts.headers) {
            Ok(Some(token)) => Look::Check(Fenced { resource, token }),
            Ok(None) if self.missing_passes => Look::Pass,
            Ok(None) => refused("missing token", &resource),
            Err(Malformed) => refused("malformed token", &resource),
        }
    }
}

/// How to handle a request, as decided before its body is read.
enum Look {
    Pass,
    Check(Fenced),
    Refuse(StatusCode, Value),
}

fn refused(error: &str, resource: &Name) -> Look {
    let body = json!({
        "error": error,
        "resource": resource.as_str(),
        "header": TOKEN_HEADER.as_str(),
    });
    Look::Refuse(StatusCode::BAD_REQUEST, body)
}

/// The header exists but is not a token.
struct Malformed;

fn token(headers: &HeaderMap) -> std::result::Result<Option<FencingToken>, Malformed> {
    let mut all = headers.get_all(TOKEN_HEADER).iter();
    let Some(first) = all.next() else { return Ok(None) };
    // With two headers, different readers of the request could use different ones.
    if all.next().is_some() {
        return Err(Malformed);
    }
    let text = first.to_str().map_err(|_| Malformed)?;
    let token: FencingToken = text.parse().map_err(|_| Malformed)?;
    // Only one spelling is accepted, without a sign or a leading zero.
    if token.to_string() == text { Ok(Some(token)) } else { Err(Malformed) }
}

impl fmt::Debug for FenceLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FenceLayer")
            .field("memory", &self.memory)
            .field("missing_passes", &self.missing_passes)
            .finish_non_exhaustive()
    }
}

impl<S> Layer<S> for FenceLayer {
    type Service = FenceService<S>;

    fn layer(&self, inner: S) -> FenceService<S> {
        FenceService { layer: self.clone(), inner }
    }
}

/// A service that [`FenceLayer`] wraps, so that it gets no requests with stale tokens.
#[derive(Clone, Debug)]
pub struct FenceService<S> {
    layer: FenceLayer,
    inner: S,
}

impl<S, B, R> Service<Request<B>> for FenceService<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
    R: From<String>,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // Calls the service that was polled ready, and keeps the clone.
        let next = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, next);
        let layer = self.layer.clone();
        let (mut parts, body) = request.into_parts();
        Box::pin(async move {
            match layer.look(&parts) {
                Look::Pass => {}
                Look::Refuse(status, body) => return Ok(response(status, &body)),
                Look::Check(fenced) => {
                    match layer.memory.raise(&fenced.resource, fenced.token).await {
                        Ok(seen) if seen <= fenced.token => {
                            parts.extensions.insert(fenced);
                        }
                        Ok(seen) => return Ok(fenced.stale(seen)),
                        Err(error) => return Ok(unknown(&fenced, &error)),
                    }
                }
            }
            inner.call(Request::from_parts(parts, body)).await
        })
    }
}

/// The resource and token of an accepted request, for its handler.
///
/// It is a request extension, which clients cannot forge. It is a [`Fence`], to be checked again
/// where the write is atomic.
///
/// ```
/// use leasehold::fence::http::Fenced;
/// /// The handler of a write that the layer has accepted.
/// fn write(fenced: &Fenced) -> Result<(), http::Response<String>> {
///     println!("{} under token {}", fenced.resource(), fenced.token());
///     // `fence::sql::check(&mut tx, fenced.resource(), fenced)` first, then the write
///     let checked: leasehold::Result<()> = Ok(());
///     checked.map_err(|error| fenced.refusal(&error)) // the layer's own 412
/// }
/// # let _ = write;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fenced {
    resource: Name,
    token: FencingToken,
}

impl Fenced {
    /// Returns the name of the resource.
    pub fn resource(&self) -> &Name {
        &self.resource
    }

    /// Returns the token of the request, which the layer has accepted.
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// Returns the response to a request whose write failed after the layer had accepted its token.
    /// It is 412 for [`StaleToken`](leasehold_core::ErrorKind::StaleToken), as from the layer
    /// itself. It is 503 for all other errors, because something may have been written.
    pub fn refusal<R: From<String>>(&self, error: &Error) -> Response<R> {
        match error.stale_token() {
            Some(StaleToken { seen, .. }) => self.stale(seen),
            None => unknown(self, error),
        }
    }

    fn stale<R: From<String>>(&self, seen: FencingToken) -> Response<R> {
        telemetry::fence_refused(&self.resource, seen, self.token);
        let body = json!({
            "error": "stale token",
            "resource": self.resource.as_str(),
            "seen": seen.get(),
            "offered": self.token.get(),
        });
        response(StatusCode::PRECONDITION_FAILED, &body)
    }
}

impl Fence for Fenced {
    fn fence(&self) -> Result<FencingToken> {
        Ok(self.token)
    }
}

/// Returns the response if the token could not be checked. The error is logged and not sent to the
/// client.
fn unknown<R: From<String>>(fenced: &Fenced, error: &Error) -> Response<R> {
    telemetry::fence_failed(&fenced.resource, error);
    let body = json!({ "error": "fence unavailable", "resource": fenced.resource.as_str() });
    response(StatusCode::SERVICE_UNAVAILABLE, &body)
}

fn response<R: From<String>>(status: StatusCode, body: &Value) -> Response<R> {
    let mut response = Response::new(R::from(body.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_header_is_a_canonical_token_or_rejected(
            text in testbed::texts(&["42", "9223372036854775807"]),
            twice in proptest::prelude::any::<bool>(),
        ) {
            let mut headers = HeaderMap::new();
            if let Ok(value) = http::HeaderValue::from_str(&text) {
                headers.append(TOKEN_HEADER, value.clone());
                if twice {
                    headers.append(TOKEN_HEADER, value);
                }
            }
            match token(&headers) {
                Ok(Some(token)) => {
                    proptest::prop_assert!(!twice);
                    proptest::prop_assert_eq!(token.to_string(), text);
                }
                Ok(None) => proptest::prop_assert!(headers.is_empty()),
                Err(Malformed) => {}
            }
        }
    }
}
