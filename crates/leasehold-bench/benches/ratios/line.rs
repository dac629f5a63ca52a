//! A line between client and server that takes its time, as between two machines: each piece that is sent
//! arrives so much later, however many are under way.
//!
//! Two threads for each direction of a connection, one that reads and one that waits and writes: the timers of
//! a runtime tick in milliseconds, and what is measured here is less.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use crate::measure::Result;

/// Lives as long as the benchmark does.
#[derive(Clone, Copy)]
pub(crate) struct Line {
    port: u16,
}

impl Line {
    /// To this port of this machine; this is what a round trip takes longer.
    pub(crate) fn to(target: u16, round_trip: Duration) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                // Whoever cannot be connected sees it: the connection ends.
                let _ = connect(client, target, round_trip / 2);
            }
        });
        Ok(Self { port })
    }

    /// The URL of the server, through this line.
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
