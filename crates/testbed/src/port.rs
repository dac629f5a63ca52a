//! Free loopback ports.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::sync::{Mutex, PoisonError};

/// Returns a loopback port that was free just now. Another process may take it first, so starts are
/// retried. This process never gets the same port twice. Otherwise a server that lost the race
/// would seem ready, because the other server on its port answers.
///
/// The port is below the kernel's range for outgoing connections. A client repeatedly calls a
/// server that is down. If the server's port were in that range, the client would eventually get it
/// as its own port. It would be connected to itself, and block the server's restart.
pub(crate) fn free() -> u16 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
    let lowest_outgoing = range
        .ok()
        .and_then(|text| text.split_whitespace().next()?.parse::<u16>().ok())
        .filter(|low| *low > 12_000)
        .unwrap_or(32_768);
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    (0..1_000)
        .map(|_| fastrand::u16(10_240..lowest_outgoing))
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok() && given.insert(*port))
        .expect("no free loopback port in 1,000 tries")
}
