//! Connections to a store's servers that can be cut. Each worker reaches the store through its own
//! relays in the parent, one for each server in the store's URL.
//!
//! A relay copies bytes and does not interpret the protocol. After lost answers a connection is
//! unusable, so it is closed as soon as its line is up again.
//!
//! Relays cannot be used for servers that redirect their clients to other addresses (Redis Sentinel
//! and Cluster). They cannot be used with TLS either, because the certificate names the server and
//! not the relay.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::history::WorkerId;
use super::line::{Line, Lines};

/// The schemes whose clients connect only to the servers in the URL, with the servers' default
/// port.
const PORTS: [(&str, u16); 11] = [
    ("redis", 6379),
    ("redlock", 6379),
    ("postgres", 5432),
    ("postgresql", 5432),
    ("mysql", 3306),
    ("mariadb", 3306),
    ("zookeeper", 2181),
    ("etcd", 2379),
    ("memcached", 11211),
    ("nats", 4222),
    ("http", 8484),
];

/// The schemes whose URLs name the server in `endpoint=`, unless it is the provider's.
const BY_ENDPOINT: [&str; 3] = ["s3", "gs", "az"];
const ENDPOINT: &str = "endpoint=http://";

/// Returns the shortest lease that the store of this URL grants exactly. etcd extends shorter
/// leases to two seconds, and then a pause that should outlast the lease would not.
pub(super) fn shortest_lease(url: &str) -> Duration {
    match url.split(':').next() {
        Some("etcd" | "etcds") => Duration::from_secs(2),
        _ => Duration::from_millis(500),
    }
}

/// A store's URL whose servers can be replaced by relays.
#[derive(Debug)]
pub(super) struct Relays {
    /// The part of the URL before its servers, and the part after them.
    around: (String, String),
    servers: Vec<String>,
    pub(super) lines: Lines,
}

impl Relays {
    /// Parses a URL. `None`: this store's clients cannot use a relay.
    pub(super) fn of(url: &str) -> Option<Self> {
        let (scheme, rest) = url.split_once("://")?;
        if BY_ENDPOINT.contains(&scheme) {
            return Self::by_endpoint(url);
        }
        let (_, port) = PORTS.iter().find(|(known, _)| *known == scheme)?;
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        // The last @ ends the credentials.
        let start = rest[..end].rfind('@').map_or(0, |at| at + 1);
        let tls = rest[end..].contains("verify") || rest[end..].contains("require");
        if start == end || tls {
            return None;
        }
        Some(Self {
            around: (format!("{scheme}://{}", &rest[..start]), rest[end..].to_owned()),
            servers: rest[start..end].split(',').map(|server| with_port(server, *port)).collect(),
            lines: Lines::default(),
        })
    }

    fn by_endpoint(url: &str) -> Option<Self> {
        let (before, rest) = url.split_once(ENDPOINT)?;
        let end = rest.find(['/', '&']).unwrap_or(rest.len());
        Some(Self {
            around: (format!("{before}{ENDPOINT}"), rest[end..].to_owned()),
            servers: vec![with_port(&rest[..end], 80)],
            lines: Lines::default(),
        })
    }

    /// Starts a worker's relays, which run until its line is forgotten. Returns the store's URL
    /// through them. Must be called in a tokio runtime, which does the work.
    pub(super) fn start(&self, worker: WorkerId) -> io::Result<String> {
        let relayed: Vec<String> = self
            .servers
            .iter()
            .map(|server| {
                let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
                listener.set_nonblocking(true)?;
                let port = listener.local_addr()?.port();
                let listener = TcpListener::from_std(listener)?;
                tokio::spawn(accept(listener, server.clone(), self.lines.of(worker)));
                Ok(format!("127.0.0.1:{port}"))
            })
            .collect::<io::Result<_>>()?;
        Ok(format!("{}{}{}", self.around.0, relayed.join(","), self.around.1))
    }
}

fn with_port(server: &str, port: u16) -> String {
    let has_one = server.parse::<SocketAddr>().is_ok()
        || server.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if has_one { server.to_owned() } else { format!("{server}:{port}") }
}

async fn accept(listener: TcpListener, server: String, mut line: watch::Receiver<Line>) {
    let connections = line.clone();
    let forgotten = async { while line.changed().await.is_ok() {} };
    let accepting = async {
        loop {
            match listener.accept().await {
                Ok((client, _)) => {
                    drop(tokio::spawn(relay(client, server.clone(), connections.clone())));
                }
                // No descriptors are left. Some will be closed soon.
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
            }
        }
    };
    tokio::select! {
        () = forgotten => {}
        () = accepting => {}
    }
}

/// Relays one connection, until either side or the line closes it.
async fn relay(client: TcpStream, server: String, mut line: watch::Receiver<Line>) {
    match line.wait_for(|l| *l != Line::Frozen).await {
        Ok(state) if *state != Line::Closed => {}
        _ => return,
    }
    let Ok(server) = TcpStream::connect(server).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let ((from_client, to_client), (from_server, to_server)) =
        (client.into_split(), server.into_split());
    tokio::select! {
        () = copy(from_client, to_server, line.clone(), false) => {}
        () = copy(from_server, to_client, line, true) => {}
    }
}

/// Copies one direction.
async fn copy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut line: watch::Receiver<Line>,
    answers: bool,
) {
    let mut bytes = vec![0; 16 * 1024];
    let mut lost = false;
    loop {
        let over = |l: &Line| *l == Line::Closed || (lost && *l != Line::Deaf);
        let read = tokio::select! {
            read = from.read(&mut bytes) => read.unwrap_or(0),
            _ = line.wait_for(over) => 0,
        };
        if read == 0 {
            return;
        }
        // Data that was read while the line is frozen has not arrived yet.
        let passes = |l: &Line| *l != Line::Frozen && !(answers && *l == Line::Withheld);
        let Ok(state) = line.wait_for(passes).await.map(|l| *l) else { return };
        match state {
            Line::Deaf if answers => lost = true,
            Line::Closed => return,
            _ if lost => return,
            _ => match to.write_all(&bytes[..read]).await {
                Ok(()) => {}
                Err(_) => return,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_stores_that_follow_their_url_are_relayed() {
        let url = "postgres://u:p@h,b:1,[::1]:7/db?x=1";
        let relays = Relays::of(url).unwrap();
        assert_eq!(relays.servers, ["h:5432", "b:1", "[::1]:7"]);
        assert_eq!(relays.around, ("postgres://u:p@".into(), "/db?x=1".into()));
        let relays = Relays::of("s3://b/f?endpoint=http://h:8333&poll_ms=50").unwrap();
        assert_eq!(relays.servers, ["h:8333"]);
        let around = ("s3://b/f?endpoint=http://".into(), "&poll_ms=50".into());
        assert_eq!(relays.around, around);
        for other in [
            "s3://bucket/folder?region=eu-central-1",
            "s3://bucket/folder?endpoint=https://h",
            "memory:",
            "file:/x",
            "sqlite:/x",
            "rediss://h",
            "redis+cluster://h",
            "redis+sentinel://h/m",
            "postgres:///db?host=/run",
            "postgres://h/db?sslmode=verify-full",
        ] {
            assert!(Relays::of(other).is_none(), "{other}");
        }
    }

    /// Starts a server that answers every byte with the next higher one.
    async fn server() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                tokio::spawn(async move {
                    while let Ok(byte) = client.read_u8().await {
                        client.write_u8(byte + 1).await.unwrap();
                    }
                });
            }
        });
        format!("redis://{at}/")
    }

    async fn connect(relayed: &str) -> TcpStream {
        let at = relayed.trim_start_matches("redis://").trim_end_matches('/');
        TcpStream::connect(at).await.unwrap()
    }

    async fn ask(connection: &mut TcpStream, byte: u8) -> io::Result<u8> {
        connection.write_u8(byte).await?;
        connection.read_u8().await
    }

    #[tokio::test]
    async fn line_can_be_frozen_deafened_closed_and_restored() {
        let relays = Relays::of(&server().await).unwrap();
        let (one, two) = (relays.start(1).unwrap(), relays.start(2).unwrap());
        let (mut a, mut b) = (connect(&one).await, connect(&two).await);
        assert_eq!(ask(&mut a, 1).await.unwrap(), 2);

        relays.lines.set(1, Line::Frozen);
        assert_eq!(ask(&mut b, 1).await.unwrap(), 2, "a fault of one line affects another line");
        let waiting = tokio::time::timeout(Duration::from_millis(50), ask(&mut a, 3)).await;
        assert!(waiting.is_err(), "a frozen line passed data");
        relays.lines.set(1, Line::Up);
        assert_eq!(a.read_u8().await.unwrap(), 4, "a frozen line lost data");

        relays.lines.set(1, Line::Withheld);
        let waiting = tokio::time::timeout(Duration::from_millis(50), ask(&mut a, 3)).await;
        assert!(waiting.is_err(), "a line that withholds replies passed one");
        relays.lines.set(1, Line::Up);
        assert_eq!(a.read_u8().await.unwrap(), 4, "a withheld reply was lost");

        relays.lines.set(1, Line::Deaf);
        let waiting = tokio::time::timeout(Duration::from_millis(500), ask(&mut a, 5)).await;
        assert!(waiting.is_err(), "a line that drops replies passed one");
        relays.lines.set(1, Line::Up);
        assert!(a.read_u8().await.is_err(), "a connection passed data after a dropped reply");

        relays.lines.set(1, Line::Closed);
        let mut closed = connect(&one).await;
        assert!(ask(&mut closed, 1).await.is_err());
        relays.lines.set(1, Line::Up);
        assert_eq!(ask(&mut connect(&one).await, 1).await.unwrap(), 2);

        relays.lines.forget(1);
        assert!(ask(&mut b, 1).await.is_ok());
        let at = one.trim_start_matches("redis://").trim_end_matches('/').to_owned();
        while TcpStream::connect(&at).await.is_ok() {
            tokio::task::yield_now().await;
        }
    }
}
