//! What goes wrong on the way to a memcached server, in words that say what to do.

use leasehold_core::kit::Host;
use leasehold_core::{Error, ErrorKind};

/// Nobody answers there, or not in time.
pub(super) fn unreachable(host: &Host, why: &str) -> Error {
    let what = format!("memcached at {host} does not respond");
    let hint = "check that it is running, and host and port in the URL";
    Error::new(ErrorKind::Unreachable, what).with_hint(hint).because(shown(why))
}

/// The server speaks another protocol.
pub(super) fn stranger(host: &Host, said: &[u8]) -> Error {
    let what = format!("the server at {host} does not speak memcached's protocol");
    let hint = "check host and port in the URL";
    let said = shown(&String::from_utf8_lossy(said));
    Error::new(ErrorKind::Config, what).with_hint(hint).because(said)
}

/// The server refused a request, in these words.
pub(super) fn refused(said: &str) -> Error {
    let (kind, what, hint) = if said.contains("unauthenticated") || said.contains("authentication")
    {
        (
            ErrorKind::Denied,
            "memcached requires a user name and a password",
            "put a user of its -Y file into the URL: memcached://user:password@host",
        )
    } else if said.contains("too large") {
        (
            ErrorKind::Full,
            "the queue of this lock is larger than the server's largest value",
            "retry when fewer clients wait for this lock, or raise the limit: `memcached -I SIZE`",
        )
    } else if said.contains("out of memory") {
        (
            ErrorKind::Full,
            "the server's memory is full, and it does not evict values (-M)",
            "start it with more memory: `memcached -m MEGABYTES`",
        )
    } else {
        (ErrorKind::Corrupt, "memcached rejected a request", "report this as a bug")
    };
    Error::new(kind, what).with_hint(hint).because(shown(said))
}

fn shown(said: &str) -> String {
    said.chars().filter(|c| !c.is_control()).take(200).collect()
}
