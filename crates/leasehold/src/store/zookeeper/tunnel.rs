//! TLS before the driver: for each server a port of this machine that leads to it through TLS.
//!
//! The driver's own TLS brings a second cryptographic library with it, so the driver speaks plainly to
//! 127.0.0.1, and what it says goes on through rustls here. A certificate is verified against the name or
//! address that the URL has.
//!
//! # Who may use the port
//! This process alone: with a certificate of ours, whoever gets through is us. A connection is served only
//! if the socket at its other end is open in this process: the kernel's list of connections
//! (`/proc/net/tcp`) names that socket's inode, and `/proc/self/fd` our own sockets. It is there from before
//! the connection came until after it is served, and inodes of open sockets are not shared, so nobody
//! else's passes; where `/proc` cannot be read, nobody is served. The way back is safe too: the port is
//! bound, by us, before the driver hears of it, and as long as the driver has it.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio_rustls::TlsConnector;

use super::session::shut_down;
use super::url::Tls;
use crate::error::{Error, ErrorKind, Result};

/// How long a server may take to greet.
const GREETING: Duration = Duration::from_secs(5);
/// How long what was sent last may take to leave.
const FAREWELL: Duration = Duration::from_secs(1);

/// Ports of this machine that lead to the servers. Dropped, it takes no more connections; those that
/// there are end with the driver's.
#[derive(Debug)]
pub(super) struct Tunnel {
    /// Instead of the servers, for the driver.
    pub(super) hosts: String,
    listening: Vec<AbortHandle>,
    fault: Arc<Mutex<Option<String>>>,
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.listening.iter().for_each(AbortHandle::abort);
    }
}

/// One server at the other end.
struct Server {
    host: String,
    port: u16,
    name: ServerName<'static>,
}

impl Tunnel {
    /// In front of these servers, `host:port,host:port`.
    pub(super) async fn open(hosts: &str, tls: &Tls, runtime: &Handle) -> Result<Self> {
        let connector = TlsConnector::from(Arc::new(config(tls)?));
        let servers: Result<Vec<Server>> = hosts.split(',').map(server).collect();
        let servers = servers?;
        let fault = Arc::<Mutex<Option<String>>>::default();
        let mut tunnel = Self { hosts: String::new(), listening: Vec::new(), fault };
        let bind = async |n: usize| {
            let mut all = Vec::with_capacity(n);
            for _ in 0..n {
                all.push(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?);
            }
            io::Result::Ok(all)
        };
        let count = servers.len();
        let bound = runtime.spawn(async move { bind(count).await }).await;
        let listeners = bound.map_err(|_| shut_down())?.map_err(no_port)?;
        let mut ports = Vec::with_capacity(count);
        for (listener, server) in listeners.into_iter().zip(servers) {
            ports.push(listener.local_addr().map_err(no_port)?.to_string());
            let serving =
                serve(listener, Arc::new(server), connector.clone(), tunnel.fault.clone());
            tunnel.listening.push(runtime.spawn(serving).abort_handle());
        }
        tunnel.hosts = ports.join(",");
        Ok(tunnel)
    }

    /// Why the last server that was tried cannot be reached, if it cannot.
    pub(super) fn fault(&self) -> Option<String> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn no_port(why: io::Error) -> Error {
    let what = "no port of this machine's can be had for TLS: allow more open files, or 127.0.0.1";
    Error::new(ErrorKind::Unreachable, what).because(why)
}

/// `host:port` or `[v6]:port`, as the URL was checked to have it.
fn server(text: &str) -> Result<Server> {
    let refused = || Error::new(ErrorKind::Config, "TLS needs hosts by name or by address");
    let (host, port) = text.rsplit_once(':').ok_or_else(refused)?;
    let host = host.trim_matches(['[', ']']).to_owned();
    let name = ServerName::try_from(host.clone()).map_err(|_| refused())?;
    Ok(Server { host, port: port.parse().map_err(|_| refused())?, name })
}

/// What the URL says of certificates, read from its files.
fn config(tls: &Tls) -> Result<ClientConfig> {
    let refused = |what: String, why: &dyn std::fmt::Display| {
        Error::new(ErrorKind::Config, what).because(why.to_string())
    };
    let unread = |what: &str, path: &str, why: &dyn std::fmt::Display| {
        refused(format!("cannot use {what}={path:?}: a readable PEM file is needed"), why)
    };
    let read = |what: &str, path: &str| -> Result<Vec<CertificateDer<'static>>> {
        let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
        let all: Vec<_> = all.map_err(|why| unread(what, path, &why))?;
        if all.is_empty() { Err(unread(what, path, &"it has no certificate")) } else { Ok(all) }
    };
    let mut roots = RootCertStore::empty();
    match &tls.ca {
        Some(path) => {
            for certificate in read("ca", path)? {
                roots.add(certificate).map_err(|why| unread("ca", path, &why))?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|why| refused("this build has no TLS".into(), &why))?
        .with_root_certificates(roots);
    let (Some(cert), Some(key)) = (&tls.cert, &tls.key) else {
        return Ok(builder.with_no_client_auth());
    };
    let chain = read("cert", cert)?;
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|why| unread("key", key, &why))?;
    let shown = builder.with_client_auth_cert(chain, secret);
    shown.map_err(|why| refused(format!("key={key:?} does not belong to cert={cert:?}"), &why))
}

async fn serve(
    listener: TcpListener,
    server: Arc<Server>,
    connector: TlsConnector,
    fault: Arc<Mutex<Option<String>>>,
) {
    loop {
        let Ok((local, peer)) = listener.accept().await else {
            // No descriptor is left: later, perhaps.
            tokio::time::sleep(FAREWELL / 10).await;
            continue;
        };
        let (server, connector, fault) = (server.clone(), connector.clone(), fault.clone());
        // It ends with the driver's connection.
        tokio::spawn(async move {
            let reached = match local.local_addr() {
                Ok(here) if is_ours(peer, here).await => reach(&server, &connector).await,
                _ => return,
            };
            let (reached, why) = match reached {
                Ok(remote) => (Some(remote), None),
                Err(why) => (None, Some(format!("{}:{}: {why}", server.host, server.port))),
            };
            *fault.lock().unwrap_or_else(PoisonError::into_inner) = why;
            if let Some(remote) = reached {
                carry(local, remote).await;
            }
        });
    }
}

type Remote = tokio_rustls::client::TlsStream<TcpStream>;

async fn reach(server: &Server, connector: &TlsConnector) -> io::Result<Remote> {
    let greeted = async {
        let stream = TcpStream::connect((server.host.as_str(), server.port)).await?;
        stream.set_nodelay(true)?;
        connector.connect(server.name.clone(), stream).await
    };
    tokio::time::timeout(GREETING, greeted).await?
}

/// Passes everything on, until either side is done.
async fn carry(local: TcpStream, remote: Remote) {
    if local.set_nodelay(true).is_err() {
        return;
    }
    let (mut from_driver, mut to_driver) = local.into_split();
    let (mut from_server, mut to_server) = tokio::io::split(remote);
    // However it ends, the driver sees that it has, and connects anew.
    tokio::select! {
        _ = copy(&mut from_driver, &mut to_server) => {
            let _ = tokio::time::timeout(FAREWELL, to_server.shutdown()).await;
        }
        _ = copy(&mut from_server, &mut to_driver) => {}
    }
}

/// Whether the other end of a connection to `here` is open in this process.
async fn is_ours(peer: SocketAddr, here: SocketAddr) -> bool {
    let looked = tokio::task::spawn_blocking(move || {
        let inode = inode_of(&std::fs::read_to_string("/proc/net/tcp").ok()?, peer, here)?;
        let wanted = format!("socket:[{inode}]");
        let open = std::fs::read_dir("/proc/self/fd").ok()?;
        let mut open = open.flatten().filter_map(|fd| std::fs::read_link(fd.path()).ok());
        open.find(|link| link.as_os_str() == wanted.as_str())
    });
    looked.await.is_ok_and(|found| found.is_some())
}

/// The inode of the socket at `from` that is connected with `to`, in the kernel's list.
fn inode_of(list: &str, from: SocketAddr, to: SocketAddr) -> Option<u64> {
    let written = |address: SocketAddr| match address {
        // As the machine keeps the four bytes.
        SocketAddr::V4(v4) => {
            let bytes = u32::from_ne_bytes(v4.ip().octets());
            Some(format!("{bytes:08X}:{:04X}", v4.port()))
        }
        SocketAddr::V6(_) => None,
    };
    let (from, to) = (written(from)?, written(to)?);
    list.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        if words.next()? != from || words.next()? != to {
            return None;
        }
        words.nth(6)?.parse().ok().filter(|inode| *inode != 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
    }

    #[test]
    fn connections_of_this_process_are_known() {
        run(async {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            let here = listener.local_addr().unwrap();
            let ours = TcpStream::connect(here).await.unwrap();
            let (_served, peer) = listener.accept().await.unwrap();
            assert!(is_ours(peer, here).await);
            drop(ours);
            let other = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
            assert!(!is_ours(other, here).await, "nobody is there");
        });
    }

    #[test]
    fn connections_of_other_processes_are_not_served() {
        run(async {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            let here = listener.local_addr().unwrap();
            let connect = format!("exec 3<>/dev/tcp/127.0.0.1/{}; read", here.port());
            let mut child = std::process::Command::new("bash")
                .args(["-c", &connect])
                .stdin(std::process::Stdio::piped())
                .spawn()
                .unwrap();
            let (_served, peer) = listener.accept().await.unwrap();
            let list = std::fs::read_to_string("/proc/net/tcp").unwrap();
            assert!(inode_of(&list, peer, here).is_some(), "{list}");
            assert!(!is_ours(peer, here).await);
            drop(child.stdin.take());
            child.wait().unwrap();
        });
    }
}
