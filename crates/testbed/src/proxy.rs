//! A TCP proxy that breaks connections in the ways in which networks do.
//!
//! Each connection has two threads, one per direction. A thread forwards the data that it has read
//! once the current mode allows it. Until then it keeps the data, so nothing is lost or reordered.
//! Every change of mode wakes all threads.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

/// The beginning of data that is a message published by Redis.
const MESSAGE: &[u8] = b">3\r\n$7\r\nmessage\r\n";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Requests,
    Replies,
}

#[derive(Debug, Default)]
struct State {
    frozen: bool,
    replies_held: bool,
    requests_held: bool,
    /// Number of replies that still pass before the others are dropped.
    replies_left: Option<usize>,
    /// Whether messages published by Redis are dropped.
    messages_dropped: bool,
    refusing: bool,
    ended: bool,
    delay: Duration,
    /// Number of connections that have been accepted.
    came: usize,
    /// The first `silent` connections are silenced: no more data is passed on them.
    silent: usize,
    /// Requests on the first `held` connections are held.
    held: usize,
    /// No data is passed on connections after the first `admitted`, if this is set.
    admitted: Option<usize>,
    /// Both ends of every connection that was not cut yet.
    connections: Vec<[TcpStream; 2]>,
    dropped: bool,
    round_trips: usize,
    requests: usize,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }
}

/// A proxy for a port of this machine. When it is dropped, it cuts its connections and stops
/// listening.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

impl Proxy {
    /// Starts a proxy for this loopback port.
    pub fn before(target: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, crate::port::free()))
            .or_else(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
            .expect("a free loopback port");
        let port = listener.local_addr().expect("it is bound").port();
        let shared = Arc::<Shared>::default();
        let accepting = shared.clone();
        std::thread::spawn(move || accept(&listener, target, &accepting));
        Self { port, shared }
    }

    /// Returns the port on which the server listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns `url` with this proxy's port instead of `target`.
    pub fn in_front_of(&self, target: u16, url: &str) -> String {
        let before = format!(":{target}/");
        assert!(url.contains(&before), "{url} does not lead to port {target}");
        url.replace(&before, &format!(":{}/", self.port))
    }

    /// Stops all data without losing any, until [`thaw`](Self::thaw).
    pub fn freeze(&self) {
        self.shared.change(|state| state.frozen = true);
    }

    /// Accepts new connections, but passes no data on them. Existing connections continue.
    pub fn freeze_new(&self) {
        self.shared.change(|state| state.admitted = Some(state.came));
    }

    /// Holds requests on the existing connections. New connections are not affected.
    pub fn hold_requests_so_far(&self) {
        self.shared.change(|state| state.held = state.came);
    }

    /// Ends all freezes and holds.
    pub fn thaw(&self) {
        self.shared.change(|state| {
            (state.replies_held, state.requests_held) = (false, false);
            (state.frozen, state.admitted, state.held) = (false, None, 0);
        });
    }

    /// Passes no more data on the existing connections, without closing them, like a firewall that
    /// has forgotten them. New connections are served.
    pub fn silence(&self) {
        self.shared.change(|state| state.silent = state.came);
    }

    /// Passes requests and holds their replies.
    pub fn hold_replies(&self) {
        self.shared.change(|state| state.replies_held = true);
    }

    /// Holds requests and passes what the server sends.
    pub fn hold_requests(&self) {
        self.shared.change(|state| state.requests_held = true);
    }

    /// Passes this many more replies. After that, requests are passed, but their replies are lost.
    /// The existing connections are then unusable and should be cut.
    pub fn drop_replies_after(&self, replies: usize) {
        self.shared.change(|state| state.replies_left = Some(replies));
    }

    /// Stops dropping replies after [`drop_replies_after`](Self::drop_replies_after).
    pub fn pass_replies(&self) {
        self.shared.change(|state| state.replies_left = None);
    }

    /// Drops the messages that a Redis server publishes (over RESP3), and passes everything else.
    /// So a message is lost on a connection that stays up.
    pub fn drop_messages(&self, on: bool) {
        self.shared.change(|state| state.messages_dropped = on);
    }

    /// Returns whether a reply was dropped since the last call.
    pub fn has_dropped(&self) -> bool {
        std::mem::take(&mut self.shared.state().dropped)
    }

    /// Delays all data by this time, in each direction.
    pub fn delay(&self, by: Duration) {
        self.shared.change(|state| state.delay = by);
    }

    /// Resets every existing connection. New ones are served.
    pub fn cut(&self) {
        self.shared.change(|state| {
            for ends in state.connections.drain(..) {
                ends.iter().for_each(reset);
            }
        });
    }

    /// Resets all existing connections and, while `on`, all new ones.
    pub fn refuse(&self, on: bool) {
        self.shared.change(|state| state.refusing = on);
        if on {
            self.cut();
        }
    }

    /// Returns how often a client sent a request after it had been answered, over all connections.
    /// That is the number of round trips, unless the server sends data without a request.
    pub fn round_trips(&self) -> usize {
        self.shared.state().round_trips
    }

    /// Returns how many pieces of data clients have sent. This shows whether a request has reached
    /// the proxy.
    pub fn requests(&self) -> usize {
        self.shared.state().requests
    }

    /// Returns how many connections were accepted and were not cut by [`cut`](Self::cut).
    pub fn connections(&self) -> usize {
        self.shared.state().connections.len()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.change(|state| state.ended = true);
        self.cut();
        // This wakes the accepting thread, so that it notices the end.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
    }
}

/// Resets a connection in both directions. Data in transit is lost, and readers get an error.
fn reset(end: &TcpStream) {
    // Either call may fail on a connection that is already closed.
    let _ = set_socket_linger(end, Some(Duration::ZERO));
    let _ = end.shutdown(Shutdown::Both);
}

fn accept(listener: &TcpListener, target: u16, shared: &Arc<Shared>) {
    for client in listener.incoming() {
        // A client may already be gone, which must not end the proxy.
        let Ok(client) = client else { continue };
        let mut state = shared.state();
        if state.ended {
            return;
        }
        let server = TcpStream::connect((Ipv4Addr::LOCALHOST, target));
        let (false, Ok(server)) = (state.refusing, server) else {
            reset(&client);
            continue;
        };
        let copy = |stream: &TcpStream| stream.try_clone().expect("one more descriptor");
        for end in [&client, &server] {
            end.set_nodelay(true).expect("a fresh socket");
        }
        state.connections.push([copy(&client), copy(&server)]);
        let number = state.came;
        state.came += 1;
        drop(state);
        let last = Arc::new(Mutex::new(Direction::Replies));
        for (from, to, direction) in [
            (copy(&client), copy(&server), Direction::Requests),
            (server, client, Direction::Replies),
        ] {
            let (shared, last) = (shared.clone(), last.clone());
            std::thread::spawn(move || {
                // Any error ends the connection.
                let _ = forward(&from, &to, (number, direction), &shared, &last);
                let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
            });
        }
    }
}

fn forward(
    mut from: &TcpStream,
    mut to: &TcpStream,
    (number, direction): (usize, Direction),
    shared: &Shared,
    last: &Mutex<Direction>,
) -> std::io::Result<()> {
    let mut buffer = [0; 16 * 1024];
    loop {
        let n = from.read(&mut buffer)?;
        if n == 0 {
            return Ok(());
        }
        let before =
            std::mem::replace(&mut *last.lock().unwrap_or_else(PoisonError::into_inner), direction);
        let mut state = shared.state();
        if direction == Direction::Requests {
            state.requests += 1;
            state.round_trips += usize::from(before == Direction::Replies);
        }
        let delay = state.delay;
        drop(state);
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
        let must_wait = |state: &mut State| {
            let waits = state.frozen
                || number < state.silent
                || state.admitted.is_some_and(|admitted| number >= admitted)
                || match direction {
                    Direction::Requests => state.requests_held || number < state.held,
                    Direction::Replies => state.replies_held,
                };
            !state.ended && waits
        };
        let mut state = shared
            .changed
            .wait_while(shared.state(), must_wait)
            .unwrap_or_else(PoisonError::into_inner);
        let passes = match (direction, &mut state.replies_left) {
            (Direction::Requests, _) | (Direction::Replies, None) => true,
            (Direction::Replies, Some(0)) => false,
            (Direction::Replies, Some(left)) => {
                *left -= 1;
                true
            }
        };
        let pushed = direction == Direction::Replies && buffer[..n].starts_with(MESSAGE);
        let passes = passes && !(pushed && state.messages_dropped);
        state.dropped |= !passes;
        drop(state);
        if passes {
            to.write_all(&buffer[..n])?;
        }
    }
}
