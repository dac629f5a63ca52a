//! A connection with latency between client and server, as between two machines. Each piece of data
//! arrives later by a fixed time, however many are in transit.
//!
//! Each direction of a connection has two threads. One reads, and one waits and writes. A runtime's
//! timers have a resolution of milliseconds, and the times here are shorter.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use crate::measure::Result;

/// A delayed connection to a server. It exists as long as the benchmark.
#[derive(Clone, Copy)]
pub(crate) struct Line {
    port: u16,
}

impl Line {
    /// Creates a connection to this port of this machine, which adds `round_trip` to each round
    /// trip.
    pub(crate) fn to(target: u16, round_trip: Duration) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                // If the target cannot be reached, the client notices that its connection ends.
                let _ = connect(client, target, round_trip / 2);
            }
        });
        Ok(Self { port })
    }

    /// Returns the URL of the server through this line.
    pub(crate) fn before(self, target: u16, url: &str) -> String {
        url.replace(&format!(":{target}"), &format!(":{}", self.port))
    }
}

fn connect(client: TcpStream, target: u16, delay: Duration) -> Result<()> {
    let server = TcpStream::connect((Ipv4Addr::LOCALHOST, target))?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    for (from, to) in
        [(client.try_clone()?, server.try_clone()?), (server.try_clone()?, client.try_clone()?)]
    {
        let (sent, arrives) = channel();
        std::thread::spawn(move || read(from, &sent, delay));
        std::thread::spawn(move || write(to, &arrives));
    }
    Ok(())
}

fn read(mut from: TcpStream, sent: &Sender<(Instant, Vec<u8>)>, delay: Duration) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        if sent.send((Instant::now() + delay, buffer[..n].to_vec())).is_err() {
            return;
        }
    }
}

fn write(mut to: TcpStream, arrives: &Receiver<(Instant, Vec<u8>)>) {
    for (when, piece) in arrives {
        std::thread::sleep(when.saturating_duration_since(Instant::now()));
        if to.write_all(&piece).is_err() {
            break;
        }
    }
    // The other end may be gone.
    let _ = to.shutdown(Shutdown::Both);
}
