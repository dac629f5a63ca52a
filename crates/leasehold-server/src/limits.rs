//! Limits of one request, and of all requests together.

use std::time::Duration;

/// The limits of a server.
///
/// ```
/// use std::time::Duration;
/// let mut limits = leasehold_server::Limits::default();
/// limits.drain = Duration::from_secs(60); // how long clients have to finish
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// How long a client has to send the headers of a request, and then again to send its body.
    pub request_time: Duration,
    /// The maximum size of all headers of a request, in bytes. Values below 8192 count as 8192.
    pub header_bytes: usize,
    /// The maximum size of a request's body, in bytes.
    pub body_bytes: usize,
    /// The maximum number of open connections.
    pub connections: usize,
    /// How long open streams and requests have to finish when the server shuts down.
    pub drain: Duration,
    /// The maximum number of ended holds, and also of open ones, in the history of all locks. With
    /// 0, the server keeps no history.
    pub history: usize,
    /// The same limit for the history of one lock.
    pub history_per_lock: usize,
    /// Whether the history includes the holds of other servers and clients. If so, and if the store
    /// reports changes, the server lists the locks after changes, at most once a second.
    pub watch_store: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            request_time: Duration::from_secs(30),
            header_bytes: 16 << 10,
            body_bytes: leasehold_http::wire::MAX_BODY_BYTES,
            connections: 50_000,
            drain: Duration::from_secs(30),
            history: 10_000,
            history_per_lock: 100,
            watch_store: true,
        }
    }
}
