//! Errors of memcached servers, with hints.

use leasehold_core::kit::Host;
use leasehold_core::{Error, ErrorKind};

/// Returns the error for a server that did not reply in time.
pub(super) fn unreachable(host: &Host, why: &str) -> Error {
    let what = format!("memcached at {host} does not respond");
    let hint = "check that it is running, and check the host and port in the URL; with memcacheds:, \
                also check ca=, and cert= and key= if the server requires them";
    Error::new(ErrorKind::Unreachable, what).with_hint(hint).with_source(shown(why))
}

/// Returns the error for a server that speaks another protocol.
pub(super) fn stranger(host: &Host, reply: &[u8]) -> Error {
    let what = format!("the server at {host} does not speak memcached's protocol");
    let hint = "check the host and port in the URL";
    let reply = shown(&String::from_utf8_lossy(reply));
    Error::new(ErrorKind::Config, what).with_hint(hint).with_source(reply)
}

/// Returns the error for a request that the server refused with the text `reply`.
pub(super) fn refused(reply: &str) -> Error {
    let (kind, what, hint) = if reply.contains("unauthenticated")
        || reply.contains("authentication")
    {
        (
            ErrorKind::Denied,
            "memcached requires a user name and a password",
            "put a user of its -Y file into the URL: memcached://user:password@host",
        )
    } else if reply.contains("too large") {
        (
            ErrorKind::Full,
            "the queue of this lock is larger than the server's largest value",
            "retry when fewer clients wait for this lock, or raise the limit: `memcached -I SIZE`",
        )
    } else if reply.contains("out of memory") {
        (
            ErrorKind::Full,
            "the server's memory is full, and it does not evict values (-M)",
            "start it with more memory: `memcached -m MEGABYTES`",
        )
    } else if reply.starts_with("CLIENT_ERROR") || reply == "ERROR" {
        // Every server since 1.6 supports these requests, so this one was damaged in transit.
        (
            ErrorKind::Unreachable,
            "memcached did not understand a request",
            "connect to the server directly, without a proxy",
        )
    } else {
        // SERVER_ERROR with any other text is transient in most cases, such as no room for buffers.
        (
            ErrorKind::Unreachable,
            "memcached failed to process a request",
            "see its log if this persists",
        )
    };
    Error::new(kind, what).with_hint(hint).with_source(shown(reply))
}

fn shown(reply: &str) -> String {
    reply.chars().filter(|c| !c.is_control()).take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waiters, elections and the cleanup continue after temporary errors.
    #[test]
    fn memcached_errors_map_to_the_right_kind() {
        for (reply, kind) in [
            ("CLIENT_ERROR unauthenticated", ErrorKind::Denied),
            ("CLIENT_ERROR authentication failure", ErrorKind::Denied),
            ("SERVER_ERROR object too large for cache", ErrorKind::Full),
            ("SERVER_ERROR out of memory storing object", ErrorKind::Full),
            ("SERVER_ERROR out of memory writing get response", ErrorKind::Full),
            ("SERVER_ERROR out of memory preparing response", ErrorKind::Full),
            ("SERVER_ERROR temporary failure", ErrorKind::Unreachable),
            ("SERVER_ERROR backend unavailable", ErrorKind::Unreachable),
            ("SERVER_ERROR proxy overloaded", ErrorKind::Unreachable),
            ("SERVER_ERROR an unknown error", ErrorKind::Unreachable),
            ("CLIENT_ERROR bad data chunk", ErrorKind::Unreachable),
            ("CLIENT_ERROR bad command line format", ErrorKind::Unreachable),
            ("ERROR", ErrorKind::Unreachable),
            ("ERROR Too many open connections", ErrorKind::Unreachable),
        ] {
            let error = refused(reply);
            assert_eq!(error.kind(), kind, "{reply}: {error}");
            assert!(error.reason().contains(reply), "{error}");
        }
    }
}
