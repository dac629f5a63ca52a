//! A TCP proxy that breaks connections in the ways in which networks do.
//!
//! Two threads for each connection, one a direction. What a thread has read it forwards once the
//! current mode lets it; while the mode says "wait" it keeps the bytes, so that nothing is lost
//! or reordered. Every change of mode wakes all of them.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

/// What a piece begins with that is a message of Redis's.
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
    /// How many more replies pass before the others are dropped.
    replies_left: Option<usize>,
    /// What Redis publishes is dropped.
    messages_dropped: bool,
    refusing: bool,
    ended: bool,
    delay: Duration,
    /// How many connections have come.
    came: usize,
    /// Of those, the first so many are silent for good.
    silent: usize,
    /// Requests of the first so many wait.
    held: usize,
    /// Those that come after the first so many wait.
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

/// A proxy before a port of this machine. Dropped, it cuts its connections and stops listening.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

impl Proxy {
    /// In front of this loopback port.
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

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The same URL, through this proxy.
    pub fn in_front_of(&self, target: u16, url: &str) -> String {
        let before = format!(":{target}/");
        assert!(url.contains(&before), "{url} does not lead to port {target}");
        url.replace(&before, &format!(":{}/", self.port))
    }

    /// Nothing passes, nothing is lost; [`thaw`](Self::thaw) lets it go on.
    pub fn freeze(&self) {
        self.shared.change(|state| state.frozen = true);
    }

    /// Connections that come from now on get no further than to be accepted; those that there are
    /// go on.
    pub fn freeze_new(&self) {
        self.shared.change(|state| state.admitted = Some(state.came));
    }

    /// Requests wait on the connections that there are; those that come from now on go on.
    pub fn hold_requests_so_far(&self) {
        self.shared.change(|state| state.held = state.came);
    }

    /// Ends what freezes and holds.
    pub fn thaw(&self) {
        self.shared.change(|state| {
            (state.replies_held, state.requests_held) = (false, false);
            (state.frozen, state.admitted, state.held) = (false, None, 0);
        });
    }

    /// Nothing passes any more on the connections that there are, and nobody is told: a firewall
    /// has forgotten them. New ones are served.
    pub fn silence(&self) {
        self.shared.change(|state| state.silent = state.came);
    }

    /// Requests arrive, their replies wait.
    pub fn hold_replies(&self) {
        self.shared.change(|state| state.replies_held = true);
    }

    /// Requests wait; what the server sends passes.
    pub fn hold_requests(&self) {
        self.shared.change(|state| state.requests_held = true);
    }

    /// So many more replies pass; after them requests arrive, and their replies never do. For the
    /// connections as they are: cut them afterwards.
    pub fn drop_replies_after(&self, replies: usize) {
        self.shared.change(|state| state.replies_left = Some(replies));
    }

    /// Ends [`drop_replies_after`](Self::drop_replies_after).
    pub fn pass_replies(&self) {
        self.shared.change(|state| state.replies_left = None);
    }

    /// What a Redis server publishes (over RESP3) is dropped, and all else passes: a message is lost
    /// on a connection that stays up.
    pub fn drop_messages(&self, on: bool) {
        self.shared.change(|state| state.messages_dropped = on);
    }

    /// Whether a reply was dropped since it was last asked for.
    pub fn has_dropped(&self) -> bool {
        std::mem::take(&mut self.shared.state().dropped)
    }

    /// Everything takes this much longer, in each direction.
    pub fn delay(&self, by: Duration) {
        self.shared.change(|state| state.delay = by);
    }

    /// Resets every connection that there is. New ones are served.
    pub fn cut(&self) {
        self.shared.change(|state| {
            for ends in state.connections.drain(..) {
                ends.iter().for_each(reset);
            }
        });
    }

    /// Resets every connection that there is, and new ones too, until told otherwise.
    pub fn refuse(&self, on: bool) {
        self.shared.change(|state| state.refusing = on);
        if on {
            self.cut();
        }
    }

    /// How often a client has asked after it had been answered, over all connections: the number
    /// of round trips, as long as nobody sends unasked.
    pub fn round_trips(&self) -> usize {
        self.shared.state().round_trips
    }

    /// How many pieces clients have sent. Tells when a request has got this far.
    pub fn requests(&self) -> usize {
        self.shared.state().requests
    }

    /// How many connections have come and were not cut by [`cut`](Self::cut).
    pub fn connections(&self) -> usize {
        self.shared.state().connections.len()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.change(|state| state.ended = true);
        self.cut();
        // Wakes the thread that accepts, to see that it is over.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
    }
}

/// Ends a connection at once and for both sides: what is under way is lost, a reader gets an error.
fn reset(end: &TcpStream) {
    // Either may fail, on a connection that is gone already.
    let _ = set_socket_linger(end, Some(Duration::ZERO));
    let _ = end.shutdown(Shutdown::Both);
}

fn accept(listener: &TcpListener, target: u16, shared: &Arc<Shared>) {
    for client in listener.incoming() {
        // A client that has gone again is no reason to stop.
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
                // An error is the end of the connection, however it comes.
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
