//! Connections to one replica: TCP, TLS or a Unix socket.
//!
//! A connection is made by a task of the client's own runtime. The caller's runtime may have no
//! I/O driver, or may end before the connection does.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use leasehold_core::kit::{Addresses, Encryption, Host, Stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Handle;
use tower_service::Service;

use super::url::Server;

/// How long the first address of a host has before its other addresses are tried as well.
const HEAD_START: Duration = Duration::from_millis(500);

/// Connects to one replica, whatever the URI of the request is.
#[derive(Clone)]
pub(super) struct Connector(Arc<Target>);

struct Target {
    server: Server,
    addresses: Addresses,
    encryption: Option<Arc<Encryption>>,
    runtime: Handle,
}

impl Connector {
    pub(super) fn new(
        server: Server,
        encryption: Option<Arc<Encryption>>,
        runtime: Handle,
    ) -> Self {
        let addresses = Addresses::new(HEAD_START);
        Self(Arc::new(Target { server, addresses, encryption, runtime }))
    }
}

impl Target {
    async fn connect(&self) -> io::Result<Line> {
        match &self.server {
            Server::Unix(path) => Ok(Line(Box::new(UnixStream::connect(path).await?))),
            Server::Tcp(host) => {
                let to = Some((host.name.as_str(), host.port));
                let (host, encryption) = (host.clone(), self.encryption.clone());
                let by = |ip| connect_tcp(host.clone(), ip, encryption.clone());
                self.addresses.connect(to, by).await
            }
        }
    }
}

async fn connect_tcp(
    host: Host,
    ip: Option<std::net::IpAddr>,
    encryption: Option<Arc<Encryption>>,
) -> io::Result<Line> {
    let stream = match ip {
        Some(ip) => TcpStream::connect((ip, host.port)).await?,
        None => TcpStream::connect((host.name.as_str(), host.port)).await?,
    };
    stream.set_nodelay(true)?;
    match encryption {
        None => Ok(Line(Box::new(stream))),
        Some(encryption) => Ok(Line(encryption.greet(&host, stream).await?)),
    }
}

impl<T> Service<T> for Connector {
    type Response = TokioIo<Line>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: T) -> Self::Future {
        let target = self.0.clone();
        let connecting = self.0.runtime.spawn(async move { target.connect().await });
        Box::pin(async move {
            let connected = connecting.await.map_err(io::Error::other)?;
            connected.map(TokioIo::new)
        })
    }
}

/// One connection.
pub(super) struct Line(Box<dyn Stream>);

impl Connection for Line {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl AsyncRead for Line {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for Line {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
