//! One server: its cells, its properties and its guarantees.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::{redacted, unescape, wall_micros};
use leasehold_core::store::{Durability, Guarantees, StoreInfo, Survival};
use leasehold_core::{Error, ErrorKind, Result};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::doctor::{Stats, judge};
use super::link::{Connection, Link};
use super::url::MemcachedUrl;
use super::{fault, wire};
use crate::cells::{Answer, Cells, IDLE, Request, SLOW, System};
use crate::store::{CellStore, Options, promises};

/// Time limit for listing all keys.
const LISTING: Duration = Duration::from_secs(20);
/// The pause after a reply that the crawler is busy with another client's request.
const BUSY: Duration = Duration::from_millis(50);
/// Maximum size of a value's header, in bytes.
const HEAD: usize = 128;
/// Maximum number of claims in a queue. With more claims, the polls of all waiters would saturate a
/// 1 Gbit/s link.
const CROWD: usize = 500;
/// Maximum number of lines that a listing returns.
const MOST: usize = 100_000;

/// The cells of one memcached server.
#[derive(Debug)]
struct Memcached {
    system: System,
    url: MemcachedUrl,
    link: Link,
    /// A connection only for renewals of the session, so that large values do not delay them.
    touches: Link,
    runtime: Handle,
}

fn system() -> System {
    System {
        longest_key: 250,
        largest_value: wire::LARGEST,
        crowd: CROWD,
        slow: SLOW,
        grain: Duration::from_secs(2),
        forgets: true,
        looks_behind: false,
        idle: Some(IDLE),
    }
}

/// Connects to the server that `url` names, and returns its store.
pub(super) async fn connected(
    parsed: MemcachedUrl,
    url: &str,
    runtime: &Handle,
) -> Result<CellStore> {
    let (link, largest_item) = linked(&parsed, runtime).await?;
    let options = parsed.options.clone();
    let identity = format!("memcached:{}/{}", parsed.host, options.prefix);
    let info = StoreInfo::new(redacted(url), guarantees(&options)).identified(identity);
    let mut system = system();
    // An item includes its key and header. The server would refuse a larger item and delete the old
    // one.
    system.largest_value =
        system.largest_value.min(largest_item.saturating_sub(system.longest_key + HEAD));
    let touches = {
        let _entered = runtime.enter();
        Link::new(parsed.clone(), None)
    };
    let cells = Memcached { system, url: parsed, link, touches, runtime: runtime.clone() };
    Ok(CellStore::new(Arc::new(cells), options, info, runtime))
}

/// Connects to a server that supports compare-and-set. Also returns the maximum size of an item.
pub(super) async fn linked(url: &MemcachedUrl, runtime: &Handle) -> Result<(Link, usize)> {
    let server = url.clone();
    // The caller's runtime may have no I/O.
    let opened = runtime.spawn(async move {
        let mut first = Connection::open(&server).await?;
        let settings = Stats::of(&first.lines("stats settings", MOST, |_| true).await?);
        if settings.get("cas_enabled") == Some("no") {
            let what = "this memcached was started with -C, which disables compare-and-set";
            return Err(Error::new(ErrorKind::Config, what).with_hint("start it without -C"));
        }
        let item = settings.number("item_size_max").and_then(|size| usize::try_from(size).ok());
        Ok((Link::new(server, Some(first)), item.unwrap_or(usize::MAX)))
    });
    opened.await.map_err(|_| fault::unreachable(&url.host, "the runtime was shut down"))?
}

impl Memcached {
    /// Returns the wanted lines of a reply. Uses a separate connection, so that no other call is
    /// delayed, and runs on our runtime, because the caller's may have no I/O.
    async fn lines(
        &self,
        what: &'static str,
        wanted: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Result<Vec<String>> {
        let url = self.url.clone();
        let asked = self.runtime.spawn(async move {
            let lines = async {
                let mut open = Connection::open(&url).await?;
                // The crawler serves one request at a time.
                loop {
                    match open.lines(what, MOST, &wanted).await {
                        Err(error) if error.reason().contains("BUSY") => {
                            tokio::time::sleep(BUSY).await;
                        }
                        reply => return reply,
                    }
                }
            };
            let reply = timeout(LISTING, lines).await;
            reply.unwrap_or_else(|_| Err(fault::unreachable(&url.host, "no reply in time")))
        });
        let ended = |_| fault::unreachable(&self.url.host, "the runtime was shut down");
        asked.await.map_err(ended)?
    }
}

/// Returns the key in a line of `lru_crawler metadump`.
fn dumped(line: &str) -> Option<String> {
    unescape(line.split_ascii_whitespace().next()?.strip_prefix("key=")?)
}

#[async_trait]
impl Cells for Memcached {
    fn system(&self) -> &System {
        &self.system
    }

    async fn run(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        match requests[..] {
            // A touch names no version, so any connection will do.
            [Request::Touch { .. }] => self.touches.run(requests).await,
            _ => self.link.run(requests).await,
        }
    }

    fn wall_micros(&self) -> u64 {
        self.link.wall_micros()
    }

    /// Lists keys with the server's crawler, which misses keys that are being moved.
    async fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        let beginning = prefix.to_owned();
        let is_wanted =
            move |line: &str| dumped(line).is_some_and(|key| key.starts_with(&beginning));
        let lines = self.lines("lru_crawler metadump hash", is_wanted).await?;
        Ok(lines.iter().filter_map(|line| dumped(line)).collect())
    }

    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let before = wall_micros();
        let stats = self.lines("stats", |_| true).await?;
        let after = wall_micros();
        let settings = self.lines("stats settings", |_| true).await?;
        let closed = self.url.options.closed_for(self.system.grain);
        Ok(judge(&Stats::of(&stats), &Stats::of(&settings), (before, after), closed))
    }

    fn round_trips(&self) -> u64 {
        self.link.round_trips() + self.touches.round_trips()
    }
}

pub(super) fn guarantees(options: &Options) -> Guarantees {
    let mut promised = promises(&system(), options);
    (promised.grant, promised.token) = (Durability::Process, Durability::Process);
    let grain = system().grain;
    let usual = Options { restart_delay: None, ..options.clone() };
    let waits_long_enough = options.closed_for(grain) >= usual.closed_for(grain);
    // This holds if all clients observe the delay.
    promised.on_store_crash = if waits_long_enough { Survival::Fenced } else { Survival::Unsafe };
    promised.on_failover = Survival::NotApplicable;
    promised.on_partition = Survival::Fenced;
    promised.notes = Cow::Borrowed(NOTES);
    promised
}

const NOTES: &[Cow<'static, str>] = &[
    Cow::Borrowed(
        "UNSAFE when the server's memory is full: memcached evicts the least recently used values, which can be held \
         locks. Two clients then hold, until the first one's next renewal. With -M memcached rejects writes and \
         discards the values that they would have replaced. Clients then grant nothing until every forgotten hold has \
         expired, but two may hold for a moment before that.",
    ),
    Cow::Borrowed(
        "A restart or flush_all loses all locks. Clients detect this and grant nothing until every forgotten hold \
         has expired. This requires the same session_ms on all clients, and no shorter restart_delay_ms on any. A \
         new server starts the same way.",
    ),
    Cow::Borrowed(
        "Tokens increase while the server keeps the lock's value, which is one day after its last use. After a loss \
         they restart from the clients' clocks, limited to a few seconds around the server's. They increase unless \
         these clocks are behind the last token.",
    ),
    Cow::Borrowed(
        "While a client lives, its claims end with their leases. If the client dies, they end with its \
         session, whatever lease was requested.",
    ),
    Cow::Borrowed(
        "A server that was paused for nearly a session can end a session that it has just extended. Check tokens.",
    ),
    Cow::Borrowed(
        "Waiters poll, at most poll_ms apart. Each poll and each change reads the whole queue, which holds a few \
         thousand claims at most.",
    ),
    Cow::Borrowed(
        "Anyone with access to the server can read, change and remove all locks. Listing iterates over all of the \
         server's keys.",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_from_the_dump() {
        let line = "key=leasehold%3Al%3Aa%2520b exp=-1 la=1 cas=2 fetch=yes cls=1 size=70";
        assert_eq!(dumped(line).as_deref(), Some("leasehold:l:a%20b"));
        for bad in ["", "key=", "key=%", "OK", "exp=1 key=a"] {
            assert!(dumped(bad).is_none_or(|key| key.is_empty()), "{bad}");
        }
    }

    #[test]
    fn require_refuses_guarantees_that_a_restart_breaks() {
        use leasehold_core::store::Guarantee;
        let promised = guarantees(&Options::default());
        for wanted in [
            Guarantee::ExclusiveOnStoreCrash,
            Guarantee::GrantDurability(Durability::Machine),
            Guarantee::TokenDurability(Durability::Machine),
            Guarantee::LockDelay,
            Guarantee::MinHold,
            Guarantee::Push,
        ] {
            assert!(!promised.meets(wanted), "{wanted}");
        }
        assert!(promised.meets(Guarantee::Fifo));
        let at_once = Options { restart_delay: Some(Duration::ZERO), ..Options::default() };
        assert_eq!(guarantees(&at_once).on_store_crash, Survival::Unsafe);
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_dump_line_is_parsed_or_ignored(
            line in testbed::texts(&["key=leasehold%3Al%3Aa%2520b exp=-1 la=1 cas=7 fetch=no cls=1 size=90"]),
        ) {
            if let Some(key) = dumped(&line) {
                let again = format!("key={} exp=-1", leasehold_core::kit::Escaped(&key));
                proptest::prop_assert_eq!(dumped(&again), Some(key));
            }
        }
    }
}
