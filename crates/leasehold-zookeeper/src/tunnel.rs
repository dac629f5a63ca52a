//! What the driver connects to: a port of this machine that leads to the members.
//!
//! It is ours for two reasons. The driver may try a member again that has just gone silent, and does not
//! leave one for another as soon as a lock needs it: so which member serves, and for how long one may be
//! silent, is decided here ([`members`](super::members), [`relay`](super::relay)). And the driver's own
//! TLS brings a second cryptographic library with it, so what it says plainly to 127.0.0.1 goes on through
//! rustls; a certificate is verified against the name or address that the URL has.
//!
//! # Who may use the port
//! With TLS this process alone: with a certificate of ours, whoever gets through is us. A connection is
//! served only if the socket at its other end is open in this process: the kernel's list of connections
//! (`/proc/net/tcp`) names that socket's inode, and `/proc/self/fd` our own sockets. It is there from before
//! the connection came until after it is served, and inodes of open sockets are not shared, so nobody
//! else's passes; where `/proc` cannot be read, nobody is served. Without TLS anybody of this machine
//! may: whoever it is gets no further than to the same servers, as itself, which it reaches without us.
//! The way back is safe too: the port is bound, by us, before the driver hears of it, and as long as the
//! driver has it.

use leasehold_core::kit::locked;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::fault::shut_down;
use super::members::Members;
use super::relay::relay;
use super::tls::Encryption;
use super::url::ZooKeeperUrl;
use leasehold_core::{Error, ErrorKind, Result};

/// How long to wait where no descriptor is left.
const LATER: Duration = Duration::from_millis(100);

/// A port of this machine that leads to the members. Dropped, it takes no more connections; the one that
/// there is ends with the driver's.
#[derive(Debug)]
pub(super) struct Tunnel {
    /// Instead of the servers, for the driver.
    pub(super) host: String,
    pub(super) members: Arc<Members>,
    listening: AbortHandle,
    serving: Arc<Mutex<Option<AbortHandle>>>,
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

impl Tunnel {
    /// To the servers of this URL.
    pub(super) async fn open(url: &ZooKeeperUrl, runtime: &Handle) -> Result<Self> {
        let tls = url.tls.as_ref().map(|tls| Encryption::of(tls, &url.hosts)).transpose()?;
        let checked = tls.is_some();
        let members = Arc::new(Members::new(&url.hosts, tls, url.session));
        let bind = async || {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            let address = listener.local_addr()?;
            io::Result::Ok((listener, address))
        };
        let bound = runtime.spawn(async move { bind().await }).await;
        let (listener, address) = bound.map_err(|_| shut_down())?.map_err(no_port)?;
        let serving = Arc::<Mutex<Option<AbortHandle>>>::default();
        let listening = serve(listener, checked, members.clone(), serving.clone());
        let listening = runtime.spawn(listening).abort_handle();
        Ok(Self { host: address.to_string(), members, listening, serving })
    }

    /// Ends the driver's connection: it comes again, and its session is moved to whichever member serves
    /// then.
    pub(super) fn begin_anew(&self) {
        set(&self.serving, None);
    }
}

/// There is one connection at a time: whatever an older one still says must not come after the newer.
fn set(serving: &Mutex<Option<AbortHandle>>, new: Option<AbortHandle>) {
    let mut serving = locked(serving);
    if let Some(before) = std::mem::replace(&mut *serving, new) {
        before.abort();
    }
}

fn no_port(why: io::Error) -> Error {
    let what = "cannot open a local port on 127.0.0.1 for the connection to ZooKeeper";
    let hint = "raise the limit of open files (`ulimit -n`), and allow connections to 127.0.0.1";
    Error::new(ErrorKind::Unreachable, what).with_hint(hint).because(why)
}

async fn serve(
    listener: TcpListener,
    checked: bool,
    members: Arc<Members>,
    serving: Arc<Mutex<Option<AbortHandle>>>,
) {
    loop {
        let Ok((local, peer)) = listener.accept().await else {
            tokio::time::sleep(LATER).await;
            continue;
        };
        if checked {
            match local.local_addr() {
                Ok(here) if is_ours(peer, here).await => {}
                _ => continue,
            }
        }
        set(&serving, None);
        // It ends with the driver's connection.
        let passing = tokio::spawn(relay(local, members.clone()));
        set(&serving, Some(passing.abort_handle()));
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
    use tokio::net::TcpStream;

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
