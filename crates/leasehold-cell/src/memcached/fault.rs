//! What goes wrong on the way to a memcached server, in words that say what to do.

use leasehold_core::kit::Host;
use leasehold_core::{Error, ErrorKind};

/// Nobody answers there, or not in time.
pub(super) fn unreachable(host: &Host, why: &str) -> Error {
    let what = format!(
        "memcached at {host} does not answer: check that it runs, and that host and port are right"
    );
    Error::new(ErrorKind::Unreachable, what).because(shown(why))
}

/// What answers is no memcached.
pub(super) fn stranger(host: &Host, said: &[u8]) -> Error {
    let what = format!("what answers at {host} is no memcached: check host and port");
    Error::new(ErrorKind::Config, what).because(shown(&String::from_utf8_lossy(said)))
}

/// The server refused a request, in these words.
pub(super) fn refused(said: &str) -> Error {
    let (kind, what) = if said.contains("unauthenticated") || said.contains("authentication") {
        (
            ErrorKind::Denied,
            "this memcached wants a user: put user and password of its -Y file into the URL, \
             memcached://user:password@host",
        )
    } else if said.contains("too large") {
        (
            ErrorKind::Full,
            "the queue of this lock is larger than the server's largest value (-I): try again when \
             fewer wait",
        )
    } else if said.contains("out of memory") {
        (
            ErrorKind::Full,
            "the server's memory is full, and it throws nothing away (-M): give it more (-m)",
        )
    } else {
        (ErrorKind::Corrupt, "memcached refused a request of leasehold's: report this")
    };
    Error::new(kind, what).because(shown(said))
}

fn shown(said: &str) -> String {
    said.chars().filter(|c| !c.is_control()).take(200).collect()
}
