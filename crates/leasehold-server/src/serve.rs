//! Serves connections within limits, and drains them at shutdown.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tower_service::Service as _;

use crate::access::{Client, Peer};
use crate::service::{Service, drained};
use crate::tls::Tls;

/// How long the kernel waits for an acknowledgment before a connection counts as closed.
const UNACKNOWLEDGED: Duration = Duration::from_secs(10);
/// How long the store has to confirm the releases when the server ends.
const CLOSE: Duration = Duration::from_secs(5);
/// How long requests may last that clients have sent when the last stream ended.
const LAST_REQUESTS: Duration = Duration::from_secs(1);
/// The interval between checks whether the token file or a certificate has changed.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The pause after a connection could not be accepted, for example because there are too many open
/// files.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// The maximum number of headers in a request.
const MAX_HEADERS: usize = 64;

/// Where the server accepts connections.
#[derive(Debug)]
pub enum Listener {
    /// TCP. Every request needs a token, unless the access is [open](crate::Access::open).
    Tcp(TcpListener),
    /// TCP with TLS. Every request needs a token, or a client certificate of an identity.
    Tls(TcpListener, Arc<Tls>),
    /// A Unix socket. Processes of the server's own user need no token. Processes of other users
    /// need one.
    Unix(UnixListener),
}

/// Serves until `shutdown` is ready, then drains. While it drains, it accepts no new claims, and
/// notifies open streams. It waits for open requests and streams for about
/// [`Limits::drain`](crate::Limits) at most, and then a few seconds for the store to confirm the
/// last releases. Until the last stream has ended, it executes renewals and releases, so that
/// clients without another server keep their locks.
///
/// # Cancel safety
/// Cancel safe: dropping the future closes all connections, and releases the locks of hold streams
/// in the background.
pub async fn serve(service: Service, listeners: Vec<Listener>, shutdown: impl Future<Output = ()>) {
    let router = service.router();
    let places = Arc::new(Semaphore::new(service.limits().connections));
    // Closed when the last connection from before the drain has ended.
    let (open, mut all_closed) = mpsc::channel::<Infallible>(1);
    let closing = watch::Sender::new(false);
    let mut tasks = JoinSet::new();
    let mut encrypted = Vec::new();
    for listener in listeners {
        if let Listener::Tls(_, tls) = &listener {
            encrypted.push(tls.clone());
        }
        let end = (open.clone(), closing.subscribe());
        tasks.spawn(accept(service.clone(), router.clone(), listener, places.clone(), end));
    }
    drop(open);
    tokio::select! {
        () = shutdown => {}
        () = reload(&service, &encrypted) => {}
    }
    service.drain();
    let limit = service.limits().drain + Duration::from_secs(1);
    let _ = tokio::time::timeout(limit, all_closed.recv()).await;
    closing.send_replace(true);
    let all_done = async { while tasks.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(LAST_REQUESTS, all_done).await;
    let _ = tokio::time::timeout(CLOSE, service.close()).await;
    let _ = tokio::time::timeout(CLOSE, service.close_history()).await;
}

/// Reads the token file and the certificates again whenever they have changed.
async fn reload(service: &Service, encrypted: &[Arc<Tls>]) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        for tls in encrypted {
            match tls.reload() {
                Ok(true) => {
                    tracing::info!(target: "leasehold_server", "read the certificates again")
                }
                Ok(false) => {}
                Err(error) => tracing::error!(
                    target: "leasehold_server",
                    error = format!("{error:#}"),
                    "the server keeps using the earlier certificates"
                ),
            }
        }
        if !service.access().has_changed() {
            continue;
        }
        match service.reload() {
            Ok(()) => tracing::info!(target: "leasehold_server", "read the token file again"),
            Err(error) => tracing::error!(
                target: "leasehold_server",
                error = format!("{error:#}"),
                "the current tokens stay valid"
            ),
        }
    }
}

/// Accepts connections until the server closes, then waits for their end. The connections from
/// before the drain keep `open`.
async fn accept(
    service: Service,
    router: Router,
    listener: Listener,
    places: Arc<Semaphore>,
    (open, mut closing): (mpsc::Sender<Infallible>, watch::Receiver<bool>),
) {
    let mut connections = JoinSet::new();
    let mut draining = service.draining();
    let mut open = Some(open);
    loop {
        let accepted = async {
            let place = places.clone().acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            accepted = accepted => accepted,
            // Removes ended connections, so that they do not accumulate.
            Some(_) = connections.join_next() => continue,
            () = drained(&mut draining), if open.is_some() => {
                open = None;
                continue;
            }
            () = drained(&mut closing) => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(_) => {
                tokio::time::sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        let (service, router, open) = (service.clone(), router.clone(), open.clone());
        connections.spawn(async move {
            let before_drain = open.is_some();
            let _kept = (place, open);
            let client = Client { peer, address: stream.address() };
            match stream {
                Accepted::Tcp(stream) => {
                    connection(&service, router, stream, client, before_drain).await;
                }
                Accepted::Tls(stream, tls) => {
                    let mut draining = service.draining();
                    let accepted = tokio::select! {
                        accepted = tls.accept(stream) => accepted,
                        () = drained(&mut draining), if before_drain => None,
                    };
                    if let Some((stream, peer)) = accepted {
                        let client = Client { peer, ..client };
                        connection(&service, router, stream, client, before_drain).await;
                    }
                }
                Accepted::Unix(stream) => {
                    connection(&service, router, stream, client, before_drain).await;
                }
            }
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

enum Accepted {
    Tcp(TcpStream),
    Tls(TcpStream, Arc<Tls>),
    Unix(tokio::net::UnixStream),
}

impl Accepted {
    fn address(&self) -> Option<String> {
        Some(match self {
            Self::Tcp(stream) | Self::Tls(stream, _) => {
                let peer = stream.peer_addr().ok()?;
                // A listener for IPv6 reports addresses of IPv4 in another form.
                SocketAddr::new(peer.ip().to_canonical(), peer.port()).to_string()
            }
            Self::Unix(stream) => format!("pid {}", stream.peer_cred().ok()?.pid()?),
        })
    }
}

impl Listener {
    async fn accept(&self) -> io::Result<(Accepted, Peer)> {
        match self {
            Self::Tcp(listener) => Ok((Accepted::Tcp(accept_tcp(listener).await?), Peer::Other)),
            Self::Tls(listener, tls) => {
                Ok((Accepted::Tls(accept_tcp(listener).await?, tls.clone()), Peer::Other))
            }
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let own = rustix::process::geteuid().as_raw();
                let is_same = stream.peer_cred().is_ok_and(|peer| peer.uid() == own);
                let peer = if is_same { Peer::SameUser } else { Peer::Other };
                Ok((Accepted::Unix(stream), peer))
            }
        }
    }
}

async fn accept_tcp(listener: &TcpListener) -> io::Result<TcpStream> {
    let (stream, _) = listener.accept().await?;
    // A client whose machine has crashed sends no FIN.
    let limit = u32::try_from(UNACKNOWLEDGED.as_millis()).unwrap_or(u32::MAX);
    let _ = stream.set_nodelay(true);
    let _ = rustix::net::sockopt::set_tcp_user_timeout(&stream, limit);
    Ok(stream)
}

/// Serves the requests that this client sends on its connection. While the server drains, that is
/// one request, so that the client connects to another server if there is one.
async fn connection<S>(
    service: &Service,
    router: Router,
    stream: S,
    client: Client,
    before_drain: bool,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (limits, client) = (service.limits(), Arc::new(client));
    let handle = service_fn(move |request: hyper::Request<Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(client.clone());
        router.clone().call(request)
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.request_time)
        .max_buf_size(limits.header_bytes.max(8192))
        .max_headers(MAX_HEADERS);
    if !before_drain {
        builder.keep_alive(false);
        let _ = builder.serve_connection(TokioIo::new(stream), handle).await;
        return;
    }
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), handle));
    let mut draining = service.draining();
    tokio::select! {
        // An error of a connection concerns only its client.
        _ = connection.as_mut() => return,
        () = drained(&mut draining) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}
