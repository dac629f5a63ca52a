//! Free loopback ports.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::sync::{Mutex, PoisonError};

/// A loopback port that was free just now; another process may be faster, so starts are retried. No
/// port is given twice to this process: whoever loses such a race would find the winner's server
/// ready, and take it for its own.
///
/// From below the range that the kernel gives to outgoing connections. From inside it, a client
/// that keeps calling a server that is down would at last get the server's port as its own, be
/// connected to itself, and block the server's return.
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
