//! The steps before each request's handler: limits, identity, and a line in the log.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, MatchedPath, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use leasehold_core::kit::parse_duration;
use leasehold_core::{ClaimId, Error, ErrorKind, Name};
use serde::de::DeserializeOwned;

use crate::access::{Caller, Client};
use crate::problem::{Failure, invalid};
use crate::service::Service;

/// Logs and counts the request.
///
/// The log has the route and not the path, because paths contain claim IDs.
pub(crate) async fn log(
    State(service): State<Service>,
    route: Option<MatchedPath>,
    request: Request,
    next: Next,
) -> Response {
    let started = Instant::now();
    let route = route.as_ref().map_or("unknown", MatchedPath::as_str);
    let method = request.method().clone();
    let response = next.run(request).await;
    let caller = response.extensions().get::<Caller>();
    let identity = caller.map(|caller| caller.identity.name.as_str());
    let status = response.status().as_u16();
    service.requests().count(identity.unwrap_or_default(), route, method.as_str(), status);
    tracing::info!(
        target: "leasehold_server",
        method = %method,
        route,
        status,
        identity = identity.unwrap_or("none"),
        ms = started.elapsed().as_secs_f64() * 1e3,
        "request"
    );
    response
}

/// Reads the whole body of the request.
async fn whole(service: &Service, request: Request) -> Result<Request, Failure> {
    let limits = service.limits();
    let (parts, body) = request.into_parts();
    let read = axum::body::to_bytes(body, limits.body_bytes);
    let read = tokio::time::timeout(limits.request_time, read).await.map_err(|_| {
        let what = "the body of the request did not arrive in time";
        let failure = invalid(what, "send the whole body without pauses");
        failure.with_status(StatusCode::REQUEST_TIMEOUT)
    })?;
    let bytes = read.map_err(|_| {
        let what = format!("the body of the request is larger than {} bytes", limits.body_bytes);
        invalid(what, "send fewer claims at once").with_status(StatusCode::PAYLOAD_TOO_LARGE)
    })?;
    Ok(Request::from_parts(parts, Body::from(bytes)))
}

/// Identifies the client, counts the request, and reads its body within its limits.
pub(crate) async fn identify(
    State(service): State<Service>,
    request: Request,
    next: Next,
) -> Response {
    let peer = request.extensions().get::<Arc<Client>>().map(|client| &client.peer);
    let caller = match service.access().caller(peer, request.headers()) {
        Ok(caller) => caller,
        Err(failure) => return failure.into_response(),
    };
    let whole = match caller.count_request() {
        Ok(()) => whole(&service, request).await,
        Err(failure) => Err(failure),
    };
    let mut response = match whole {
        Ok(mut request) => {
            request.extensions_mut().insert(caller.clone());
            next.run(request).await
        }
        Err(failure) => failure.into_response(),
    };
    response.extensions_mut().insert(caller);
    response
}

/// Returns the response to a path that has no route.
pub(crate) async fn not_found() -> Failure {
    let hint = "use a path below /v1/claims, /v1/locks, /v1/events, /v1/check or /v1/store; write a \
                / in a name as %2F";
    invalid("this path does not exist", hint).with_status(StatusCode::NOT_FOUND)
}

/// Returns the response to a method that the path does not support.
pub(crate) async fn not_allowed() -> Failure {
    let hint =
        "use GET to read and POST to change; on /v1/claims/{id}, PUT renews and DELETE releases";
    invalid("this path has no such method", hint).with_status(StatusCode::METHOD_NOT_ALLOWED)
}

/// A JSON body. A missing body and `null` are parsed as `{}`.
pub(crate) struct Json<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<Service> for Json<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, service: &Service) -> Result<Self, Failure> {
        let content_type = request.headers().get(header::CONTENT_TYPE);
        let content_type = content_type.and_then(|value| value.to_str().ok()).unwrap_or_default();
        let media = content_type.split(';').next().unwrap_or_default().trim();
        // A form of another site's page can send other types, but not this one.
        let is_json = media.eq_ignore_ascii_case("application/json");
        let bytes = Bytes::from_request(request, service).await.map_err(|_| {
            invalid("the body of the request cannot be read", "send the request again")
        })?;
        if !is_json && !bytes.is_empty() {
            let hint = "send the header \"Content-Type: application/json\" (curl --json)";
            return Err(invalid("the body of the request is not declared as JSON", hint)
                .with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE));
        }
        // A body whose fields are all optional may be missing.
        let body: &[u8] = if matches!(&bytes[..], b"" | b"null") { b"{}" } else { &bytes };
        serde_json::from_slice(body).map(Self).map_err(|error| not_json(&error))
    }
}

fn not_json(error: &serde_json::Error) -> Failure {
    invalid(format!("invalid request body: {error}"), "correct the field")
}

/// The query of a request.
pub(crate) struct Query<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequestParts<Service> for Query<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &Service) -> Result<Self, Failure> {
        parse(parts.uri.query().unwrap_or_default()).map(Self)
    }
}

fn parse<T: DeserializeOwned>(query: &str) -> Result<T, Failure> {
    serde_urlencoded::from_str(query)
        .map_err(|error| invalid(format!("invalid query: {error}"), "correct the parameter"))
}

/// Splits the parameters of a query into those in `names`, which belong to `A`, and all others,
/// which belong to `B`.
pub(crate) fn split<A: DeserializeOwned, B: DeserializeOwned>(
    query: &str,
    names: &[&str],
) -> Result<(A, B), Failure> {
    let is_first = |pair: &&str| names.contains(&pair.split('=').next().unwrap_or_default());
    let (first, second): (Vec<&str>, Vec<&str>) = query.split('&').partition(is_first);
    Ok((parse(&first.join("&"))?, parse(&second.join("&"))?))
}

/// The lock that the path names.
pub(crate) struct OfLock(pub(crate) Name);

impl FromRequestParts<Service> for OfLock {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, service: &Service) -> Result<Self, Failure> {
        let Path(name) =
            Path::<String>::from_request_parts(parts, service).await.map_err(|_| {
                let what = "the lock name in the path is not UTF-8";
                Error::new(ErrorKind::InvalidName, what)
                    .with_hint("escape the bytes of UTF-8 with %")
            })?;
        Ok(Self(Name::new(name)?))
    }
}

/// The claim whose ID is in the path.
pub(crate) struct OfClaim(pub(crate) ClaimId);

impl FromRequestParts<Service> for OfClaim {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, service: &Service) -> Result<Self, Failure> {
        let path = Path::<String>::from_request_parts(parts, service).await;
        let id = path.ok().and_then(|Path(hex)| ClaimId::from_hex(&hex));
        // The error does not repeat the text, which may be a secret with a typing error.
        id.map(Self).ok_or_else(|| {
            let hint = "draw 16 random bytes, and write them as hexadecimal digits";
            invalid("invalid claim ID in the path: expected 32 hexadecimal digits", hint)
        })
    }
}

impl FromRequestParts<Service> for Caller {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &Service) -> Result<Self, Failure> {
        let caller = parts.extensions.get::<Self>().cloned();
        caller.ok_or_else(|| Error::new(ErrorKind::Denied, "this request has no identity").into())
    }
}

/// Parses a duration of a query, such as `30s`.
pub(crate) fn duration(key: &str, text: Option<&str>) -> Result<Option<Duration>, Failure> {
    text.map(parse_duration).transpose().map_err(|why| {
        invalid(format!("invalid {key}: {why}"), "write a duration such as 30s or 1m")
    })
}
