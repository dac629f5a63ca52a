//! An HTTP proxy that repeats, loses, delays and refuses requests, as a test requests.

use std::io;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, Uri};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;
use tokio::sync::Notify;

use crate::common::runtime;

/// What happens to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It is forwarded once, and answered.
    None,
    /// It is forwarded twice, and the first answer is returned.
    Twice,
    /// It is forwarded twice, and the second answer is returned.
    Again,
    /// It is forwarded, and its connection is closed without an answer.
    LoseReply,
    /// It is forwarded, and the answer is returned this much later.
    LateReply(Duration),
    /// It is forwarded once [`release`](HttpProxy::release) is called, and its connection is closed
    /// before that.
    LateRequest,
    /// Its connection is closed, and it is not forwarded.
    Cut,
}

type Plan = Box<dyn FnMut(&Method, &str) -> Fault + Send>;
type Forward = Client<HttpConnector, Full<Bytes>>;

/// A proxy in front of a port of this machine.
pub(crate) struct HttpProxy {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    target: u16,
    client: Forward,
    plan: Mutex<Plan>,
    late: Arc<Notify>,
}

impl HttpProxy {
    /// Starts a proxy that breaks nothing yet.
    pub(crate) fn before(target: u16) -> Self {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let client = Client::builder(TokioExecutor::new()).build_http();
        let plan: Mutex<Plan> = Mutex::new(Box::new(|_, _| Fault::None));
        let shared = Arc::new(Shared { target, client, plan, late: Arc::default() });
        let serving = shared.clone();
        runtime()
            .spawn(async move { serve(TcpListener::from_std(listener).unwrap(), serving).await });
        Self { port, shared }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Decides with `plan` what happens to each request from now on, by its method and path.
    pub(crate) fn plan(&self, plan: impl FnMut(&Method, &str) -> Fault + Send + 'static) {
        *self.shared.plan.lock().unwrap_or_else(PoisonError::into_inner) = Box::new(plan);
    }

    /// Forwards the late requests.
    pub(crate) fn release(&self) {
        self.shared.late.notify_waiters();
    }
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let _ = stream.set_nodelay(true);
        let shared = shared.clone();
        tokio::spawn(async move {
            let service = service_fn(|request| answer(shared.clone(), request));
            // An error closes the connection, as intended.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

type Body = BoxBody<Bytes, hyper::Error>;

async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> io::Result<Response<Body>> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    let fault = {
        let mut plan = shared.plan.lock().unwrap_or_else(PoisonError::into_inner);
        (*plan)(&parts.method, &path)
    };
    let uri: Uri = format!("http://127.0.0.1:{}{path}", shared.target).parse().unwrap();
    let forward = {
        let shared = shared.clone();
        move || {
            let mut copy = Request::new(Full::new(body.clone()));
            (*copy.method_mut(), *copy.uri_mut()) = (parts.method.clone(), uri.clone());
            *copy.headers_mut() = parts.headers.clone();
            shared.client.request(copy)
        }
    };
    let closed = || io::Error::other("the proxy closes this connection");
    let first = match fault {
        Fault::Cut => return Err(closed()),
        Fault::LateRequest => {
            let released = shared.late.clone().notified_owned();
            tokio::spawn(async move {
                released.await;
                let _ = forward().await;
            });
            return Err(closed());
        }
        _ => forward().await,
    };
    // A server that is down closes the connection of its client as well.
    let answer = match fault {
        Fault::Again => {
            whole(first.map_err(io::Error::other)?).await;
            forward().await
        }
        Fault::Twice => {
            let first = first.map_err(io::Error::other)?;
            if let Ok(second) = forward().await {
                whole(second).await;
            }
            Ok(first)
        }
        Fault::LoseReply => {
            whole(first.map_err(io::Error::other)?).await;
            return Err(closed());
        }
        Fault::LateReply(by) => {
            tokio::time::sleep(by).await;
            first
        }
        _ => first,
    };
    Ok(answer.map_err(io::Error::other)?.map(|body| body.boxed()))
}

/// Receives the whole of an answer that is not returned.
async fn whole(answer: Response<Incoming>) {
    let _ = answer.into_body().collect().await.map(drop);
}
