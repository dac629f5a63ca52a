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
    } else if said.starts_with("CLIENT_ERROR") || said == "ERROR" {
        // Of what every server since 1.6 takes: what came there was not whole.
        (
            ErrorKind::Unreachable,
            "memcached did not understand a request: check that no proxy is before it",
        )
    } else {
        // SERVER_ERROR, and what it says. It may pass, as most of them do (no room for buffers, a backend that is away).
        (ErrorKind::Unreachable, "memcached failed to process a request: see its log if it lasts")
    };
    Error::new(kind, what).because(shown(said))
}

fn shown(said: &str) -> String {
    said.chars().filter(|c| !c.is_control()).take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A waiter, an election and the cleanup go on after what passes.
    #[test]
    fn each_refusal_of_memcached_is_told_by_what_follows_from_it() {
        for (said, kind) in [
            ("CLIENT_ERROR unauthenticated", ErrorKind::Denied),
            ("CLIENT_ERROR authentication failure", ErrorKind::Denied),
            ("SERVER_ERROR object too large for cache", ErrorKind::Full),
            ("SERVER_ERROR out of memory storing object", ErrorKind::Full),
            ("SERVER_ERROR out of memory writing get response", ErrorKind::Full),
            ("SERVER_ERROR out of memory preparing response", ErrorKind::Full),
            ("SERVER_ERROR temporary failure", ErrorKind::Unreachable),
            ("SERVER_ERROR backend unavailable", ErrorKind::Unreachable),
            ("SERVER_ERROR proxy overloaded", ErrorKind::Unreachable),
            ("SERVER_ERROR nobody knows this", ErrorKind::Unreachable),
            ("CLIENT_ERROR bad data chunk", ErrorKind::Unreachable),
            ("CLIENT_ERROR bad command line format", ErrorKind::Unreachable),
            ("ERROR", ErrorKind::Unreachable),
            ("ERROR Too many open connections", ErrorKind::Unreachable),
        ] {
            let told = refused(said);
            assert_eq!(told.kind(), kind, "{said}: {told}");
            assert!(told.to_string().contains(said), "{told}");
        }
    }
}
