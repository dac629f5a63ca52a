//! The local port that the driver connects to. Its connections are forwarded to the members.
//!
//! There are two reasons for this port. First, the driver may retry a member that has just become
//! silent, and does not change members as quickly as locks require. So leasehold itself decides
//! which member to use and how long it may be silent ([`members`](super::members),
//! [`relay`](super::relay)). Second, the driver's own TLS depends on a second cryptographic
//! library. So the driver's plain connection to 127.0.0.1 is forwarded through rustls. A
//! certificate is verified against the name or address in the URL.
//!
//! The driver offers no other way, because it takes addresses and no connector.
//!
//! # Which process may use the port
//! Only this process. A connection is served only if the socket at its other end is open in this
//! process. The kernel's list of connections (`/proc/net/tcp`) contains that socket's inode, and
//! `/proc/self/fd` contains this process's own sockets. The socket is open from before the
//! connection is accepted until after it is served, and open sockets do not share inodes. So no
//! other process passes this check.
//!
//! With a client certificate, another process could otherwise impersonate this one. Without TLS,
//! the other process could still end this client's connection, because only one connection is
//! served at a time. That would end the session and all its locks. *Only a connection that has
//! passed the check replaces the one that is served.* The other direction is safe as well. This
//! process binds the port before the driver knows it, and keeps it for as long as the driver uses
//! it.
//!
//! If `/proc` cannot be read, no connection is served with TLS. Without TLS, a connection is served
//! only if no other is served at that time. Then another process can prevent the driver from
//! connecting again, but cannot end a connection.
//!
//! # If another process connects again and again
//! - *It sends nothing, or something other than the driver would.* The driver sends first,
//!   immediately, and its first bytes contain its session. A connection that does not do so is
//!   closed before `/proc` is read, which is the most expensive step. Each connection waits in a
//!   separate task, so the next one is accepted in the meantime.
//! - *It opens many silent connections.* If there are more than [`STRANGERS`], the oldest is
//!   closed. The driver's connection is not among them, because the driver sends as soon as it has
//!   connected.
//! - *It knows the session's ID.* It does not pass the check of `/proc`. [`CHECKS`] of these checks
//!   run at a time, and [`STRANGERS`] connections wait for theirs. Further connections are closed.
//!   One of the driver's connections may be among them, and the driver then tries again.
//! - *Two connections of the driver pass at the same time.* The later one is served, whichever
//!   passes first.

use leasehold_core::kit::locked;
use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::fault::shut_down;
use super::members::Members;
use super::relay::relay;
use super::url::ZooKeeperUrl;
use leasehold_core::kit::Encryption;
use leasehold_core::{Error, ErrorKind, Result};

/// Pause if no file descriptor is left.
const LATER: Duration = Duration::from_millis(100);
/// Time limit for a connection to send its session. The driver sends it immediately.
const GREETING: Duration = Duration::from_secs(5);
/// Maximum number of silent connections, and of connections that wait for their check.
const STRANGERS: usize = 64;
/// Maximum number of concurrent checks of `/proc`.
const CHECKS: usize = 2;
/// Position of the session's ID in a request to connect. It follows the length, the protocol's
/// version, the last transaction seen and the timeout.
const SESSION: Range<usize> = 20..28;

/// A local port that forwards to the members. Dropping the tunnel stops it from accepting
/// connections. A connection that is already open stays open until the driver closes it.
#[derive(Debug)]
pub(super) struct Tunnel {
    /// The address for the driver, in place of the servers.
    pub(super) host: String,
    pub(super) members: Arc<Members>,
    listening: AbortHandle,
    door: Arc<Door>,
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

impl Tunnel {
    /// Opens a tunnel to the servers of this URL.
    pub(super) async fn open(url: &ZooKeeperUrl, runtime: &Handle) -> Result<Self> {
        let tls = url.tls.as_ref().map(|tls| Encryption::of(tls, &url.hosts)).transpose()?;
        let has_tls = tls.is_some();
        let members = Arc::new(Members::new(&url.hosts, tls, url.session));
        let bind = async || {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            let address = listener.local_addr()?;
            io::Result::Ok((listener, address))
        };
        let bound = runtime.spawn(async move { bind().await }).await;
        let (listener, address) = bound.map_err(|_| shut_down())?.map_err(no_port)?;
        let door = Arc::new(Door::new(address, has_tls, members.clone()));
        let listening = runtime.spawn(serve(listener, door.clone())).abort_handle();
        Ok(Self { host: address.to_string(), members, listening, door })
    }

    /// Sets the driver's session. From here on only connections with this session are served.
    pub(super) fn belongs_to(&self, session: i64) {
        self.door.session.store(session, Relaxed);
    }

    /// Returns the number of the driver's connection that is served now, or was served last.
    pub(super) fn connection(&self) -> Option<u64> {
        locked(&self.door.served).as_ref().map(|served| served.number)
    }

    /// Ends the driver's connection. The driver connects again, and its session moves to whichever
    /// member responds then.
    pub(super) fn begin_anew(&self) {
        self.door.end_served();
    }
}

fn no_port(why: io::Error) -> Error {
    let what = "cannot open a local port on 127.0.0.1 for the connection to ZooKeeper";
    let hint = "raise the limit of open files (`ulimit -n`), and allow connections to 127.0.0.1";
    Error::new(ErrorKind::Unreachable, what).with_hint(hint).with_source(why)
}

/// Accepts connections, each in a separate task.
async fn serve(listener: TcpListener, door: Arc<Door>) {
    let mut silent = VecDeque::new();
    for number in 0.. {
        let (local, peer) = loop {
            match listener.accept().await {
                Ok(accepted) => break accepted,
                Err(_) => tokio::time::sleep(LATER).await,
            }
        };
        silent.retain(|listening: &AbortHandle| !listening.is_finished());
        if silent.len() >= STRANGERS
            && let Some(oldest) = silent.pop_front()
        {
            oldest.abort();
        }
        let comer = Comer { number, local, peer };
        silent.push_back(tokio::spawn(greet(door.clone(), comer)).abort_handle());
    }
}

/// A connection that was accepted.
#[derive(Debug)]
struct Comer {
    /// How many connections were accepted before it.
    number: u64,
    local: TcpStream,
    peer: SocketAddr,
}

/// Reads the first bytes of a connection, and checks the connection if the driver could have sent
/// them.
async fn greet(door: Arc<Door>, mut comer: Comer) {
    let received = timeout(GREETING, first_words(&mut comer.local)).await;
    if let Ok(Ok(received)) = received
        && door.expects(&received)
        && let Ok(place) = door.waiting.clone().try_acquire_owned()
    {
        // From here on, the connection must not be closed for being the oldest.
        tokio::spawn(async move {
            door.check(comer, received).await;
            drop(place);
        });
    }
}

/// Reads the start of the driver's first message, which is a request to connect with its length in
/// front. Reads up to the end of the session's ID.
async fn first_words(local: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut received = vec![0; SESSION.end];
    local.read_exact(&mut received).await?;
    Ok(received)
}

/// Admits connections of the driver, and of no other process.
#[derive(Debug)]
struct Door {
    here: SocketAddr,
    has_tls: bool,
    members: Arc<Members>,
    /// The driver's session. 0 until the driver has one.
    session: AtomicI64,
    waiting: Arc<Semaphore>,
    checks: Semaphore,
    served: Mutex<Option<Served>>,
}

/// The connection that is served.
#[derive(Debug)]
struct Served {
    /// How many connections were accepted before it.
    number: u64,
    relay: AbortHandle,
}

impl Door {
    fn new(here: SocketAddr, has_tls: bool, members: Arc<Members>) -> Self {
        let (waiting, checks) = (Arc::new(Semaphore::new(STRANGERS)), Semaphore::new(CHECKS));
        let session = AtomicI64::new(0);
        Self { here, has_tls, members, session, waiting, checks, served: Mutex::default() }
    }

    /// Returns whether the driver could have sent these first bytes. Until the session is known
    /// here, any session may be the driver's.
    fn expects(&self, received: &[u8]) -> bool {
        let session = self.session.load(Relaxed);
        session == 0 || received.get(SESSION) == Some(&session.to_be_bytes())
    }

    /// Serves a connection if it comes from this process.
    async fn check(&self, comer: Comer, received: Vec<u8>) {
        let Ok(_one) = self.checks.acquire().await else { return };
        match is_ours(comer.peer, self.here).await {
            Some(true) => self.admit(comer, received, true),
            None if !self.has_tls => self.admit(comer, received, false),
            Some(false) | None => {}
        }
    }

    /// Serves a connection in place of the current one. A connection that is older, or that may not
    /// replace another, is dropped.
    fn admit(&self, Comer { number, local, .. }: Comer, received: Vec<u8>, displaces: bool) {
        let mut served = locked(&self.served);
        let is_beaten =
            |now: &Served| now.number > number || (!displaces && !now.relay.is_finished());
        if served.as_ref().is_some_and(is_beaten) {
            return;
        }
        // The older connection must not forward anything after the newer one.
        if let Some(before) = served.take() {
            before.relay.abort();
        }
        // The relay task ends when the driver closes its connection.
        let relay = tokio::spawn(relay(local, received, self.members.clone())).abort_handle();
        *served = Some(Served { number, relay });
    }

    fn end_served(&self) {
        if let Some(served) = &*locked(&self.served) {
            served.relay.abort();
        }
    }
}

/// Returns whether the other end of a connection to `here` is open in this process. Returns `None`
/// if `/proc` cannot be read.
async fn is_ours(peer: SocketAddr, here: SocketAddr) -> Option<bool> {
    let looked = tokio::task::spawn_blocking(move || {
        let list = std::fs::read_to_string("/proc/net/tcp").ok()?;
        let open = std::fs::read_dir("/proc/self/fd").ok()?;
        let Some(inode) = inode_of(&list, peer, here) else { return Some(false) };
        let wanted = format!("socket:[{inode}]");
        let mut open = open.flatten().filter_map(|fd| std::fs::read_link(fd.path()).ok());
        Some(open.any(|link| link.as_os_str() == wanted.as_str()))
    });
    looked.await.ok()?
}

/// Returns the inode of the socket at `from` that is connected to `to`, according to the kernel's
/// list.
fn inode_of(list: &str, from: SocketAddr, to: SocketAddr) -> Option<u64> {
    let written = |address: SocketAddr| match address {
        // The list prints the four bytes as a number in the machine's byte order.
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
    use tokio::io::AsyncWriteExt;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
    }

    /// Starts a server that sends back everything that it receives.
    async fn echo() -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    let (mut from, mut to) = client.into_split();
                    tokio::io::copy(&mut from, &mut to).await
                });
            }
        });
        address
    }

    async fn tunnel_to(server: SocketAddr) -> Tunnel {
        let url = ZooKeeperUrl::parse(&format!("zookeeper://{server}")).unwrap();
        Tunnel::open(&url, &Handle::current()).await.unwrap()
    }

    fn greeting(session: i64) -> Vec<u8> {
        let mut bytes = vec![0; 49];
        bytes[3] = 45;
        bytes[SESSION].copy_from_slice(&session.to_be_bytes());
        bytes
    }

    /// Opens a connection as the driver does, sends its first bytes, and reads the reply.
    async fn driver(tunnel: &Tunnel, session: i64) -> TcpStream {
        let mut driver = TcpStream::connect(&tunnel.host).await.unwrap();
        say(&mut driver, &greeting(session)).await;
        driver
    }

    async fn say(driver: &mut TcpStream, words: &[u8]) {
        driver.write_all(words).await.unwrap();
        let mut again = vec![0; words.len()];
        timeout(PATIENCE, driver.read_exact(&mut again)).await.unwrap().unwrap();
        assert_eq!(again, words);
    }

    /// Another process that connects again and again. It sends nothing, or the greeting of this
    /// session.
    struct Attacker(std::process::Child);

    impl Attacker {
        /// Starts the process, and waits until it has connected many times.
        async fn begin(tunnel: &Tunnel, session: Option<i64>) -> Self {
            let port = tunnel.host.rsplit_once(':').unwrap().1;
            let bytes = session.map_or(Vec::new(), greeting);
            let bytes: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
            let attack = format!(
                "trap '' PIPE; for ((n = 0; ; n++)); do \
                 exec 3<>/dev/tcp/127.0.0.1/{port} && printf '{bytes}' >&3; \
                 ((n != 200)) || echo many; done"
            );
            let mut child = std::process::Command::new("bash")
                .args(["-c", &attack])
                .stdout(std::process::Stdio::piped())
                .stderr(std::process::Stdio::null())
                .spawn()
                .unwrap();
            let out = child.stdout.take().unwrap();
            let received = tokio::task::spawn_blocking(move || {
                let mut line = String::new();
                std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
                line
            });
            assert_eq!(timeout(PATIENCE, received).await.unwrap().unwrap(), "many\n");
            Self(child)
        }
    }

    impl Drop for Attacker {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Otherwise, such a process could end the driver's connection, and if it continued, the
    /// session and all its locks.
    #[test]
    fn other_processes_can_neither_end_nor_block_the_drivers_connection() {
        run(async {
            let tunnel = tunnel_to(echo().await).await;
            let mut before = driver(&tunnel, 0).await;
            tunnel.belongs_to(7);
            for session in [None, Some(8), Some(7)] {
                let _attacker = Attacker::begin(&tunnel, session).await;
                say(&mut before, b"the same connection").await;
                // The driver's own next connection is served instead, whatever the attacker does.
                let mut next = TcpStream::connect(&tunnel.host).await.unwrap();
                loop {
                    let written = next.write_all(&greeting(7)).await;
                    let mut again = [0; 49];
                    if written.is_ok() && next.read_exact(&mut again).await.is_ok() {
                        break;
                    }
                    // The connection was closed because too many were waiting for their check. The
                    // driver tries again.
                    next = TcpStream::connect(&tunnel.host).await.unwrap();
                }
                say(&mut next, b"the next one").await;
                let ended = timeout(PATIENCE, before.read(&mut [0])).await.unwrap();
                assert!(matches!(ended, Ok(0) | Err(_)), "two connections are served at once");
                before = next;
            }
        });
    }

    /// Of two connections that pass in the wrong order, the later one stays.
    #[test]
    fn an_older_connection_does_not_displace_a_newer_one() {
        run(async {
            let tunnel = tunnel_to(echo().await).await;
            let _first = driver(&tunnel, 0).await;
            let mut newer = driver(&tunnel, 0).await;
            let late = async |displaces: bool, number: u64| {
                let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
                let here = listener.local_addr().unwrap();
                let (_other, accepted) = tokio::join!(TcpStream::connect(here), listener.accept());
                let (local, peer) = accepted.unwrap();
                tunnel.door.admit(Comer { number, local, peer }, greeting(0), displaces);
            };
            late(true, 0).await;
            // A connection of unknown origin does not replace it either.
            late(false, 9).await;
            say(&mut newer, b"still served").await;
        });
    }

    #[test]
    fn connections_of_this_process_are_known() {
        run(async {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            let here = listener.local_addr().unwrap();
            let ours = TcpStream::connect(here).await.unwrap();
            let (_served, peer) = listener.accept().await.unwrap();
            assert_eq!(is_ours(peer, here).await, Some(true));
            drop(ours);
            let other = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
            assert_eq!(
                is_ours(other, here).await,
                Some(false),
                "there is no socket at this address"
            );
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
            assert_eq!(is_ours(peer, here).await, Some(false));
            drop(child.stdin.take());
            child.wait().unwrap();
        });
    }
}
