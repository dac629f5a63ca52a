//! Connects to a host name with several addresses, some of which may drop packets.
//!
//! Drivers try one address after the other, each until the kernel gives up, which takes minutes. So
//! if the first attempt takes longer than a head start, the addresses of the name are tried too,
//! each after a pause, and the first connection wins (RFC 8305). The attempts are full connections,
//! because servers count a connection without a login as an attack. The address that worked is
//! tried first the next time.
//!
//! The first attempt uses the name, because certificates are checked against it and proxies may
//! select a database by it. If an attempt with an address fails for one of these reasons, the
//! attempt with the name continues.

use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::pin::pin;
use std::sync::Mutex;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::util::locked::locked;

/// The pause between two attempts, and the head start of an address that worked before.
const PAUSE: Duration = Duration::from_millis(250);

/// The addresses of one server.
#[derive(Debug)]
pub struct Addresses {
    head_start: Duration,
    /// The address that worked when the name did not.
    served: Mutex<Option<IpAddr>>,
}

impl Addresses {
    /// Creates the addresses of a server to which a connection usually takes less than
    /// `head_start`.
    pub fn new(head_start: Duration) -> Self {
        Self { head_start, served: Mutex::default() }
    }

    /// Returns the address to use if only one can be tried.
    pub fn served(&self) -> Option<IpAddr> {
        *locked(&self.served)
    }

    /// Connects with `connect`, which is called with an address, or with `None` if it must look up
    /// the name itself. Without a `host`, such as for a Unix socket, it is called once, with
    /// `None`. Sets no time limit.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future drops all attempts.
    ///
    /// # Errors
    /// - The error of the attempt that used the name, or else of the first attempt that failed.
    pub async fn connect<C, E, F>(
        &self,
        host: Option<(&str, u16)>,
        connect: impl Fn(Option<IpAddr>) -> F,
    ) -> Result<C, E>
    where
        C: Send + 'static,
        E: From<io::Error> + Send + 'static,
        F: Future<Output = Result<C, E>> + Send + 'static,
    {
        let Some((host, port)) = host else { return connect(None).await };
        self.race(lookup(host, port), connect).await
    }

    /// Connects to the address that worked before, or else by the name. If that takes too long,
    /// tries the other addresses too.
    async fn race<C, E, F>(
        &self,
        lookup: impl Future<Output = Vec<IpAddr>>,
        connect: impl Fn(Option<IpAddr>) -> F,
    ) -> Result<C, E>
    where
        C: Send + 'static,
        E: From<io::Error> + Send + 'static,
        F: Future<Output = Result<C, E>> + Send + 'static,
    {
        let mut tried = JoinSet::new();
        let attempt = |tried: &mut JoinSet<_>, by: Option<IpAddr>| {
            let connecting = connect(by);
            tried.spawn(async move { (by, connecting.await) });
        };
        let served = self.served();
        attempt(&mut tried, served);
        let mut by_name = served.is_none();
        let mut next = Instant::now() + if by_name { self.head_start } else { PAUSE };
        let mut lookup = pin!(lookup);
        // The addresses that remain to be tried. They are looked up once the attempt with the name
        // is late.
        let mut left: Option<Vec<IpAddr>> = None;
        let mut first_error = None;
        loop {
            let is_due = Instant::now() >= next;
            if is_due && !by_name {
                attempt(&mut tried, None);
                (by_name, next) = (true, Instant::now() + self.head_start);
                continue;
            }
            if is_due && let Some(by) = left.as_mut().and_then(Vec::pop) {
                attempt(&mut tried, Some(by));
                next = Instant::now() + PAUSE;
                continue;
            }
            tokio::select! {
                biased;
                Some(done) = tried.join_next() => {
                    next = Instant::now();
                    match done {
                        Ok((by, Ok(connection))) => {
                            *locked(&self.served) = by;
                            return Ok(connection);
                        }
                        Ok((by, Err(error))) => {
                            // The user can act on the error of the attempt with the name.
                            if by.is_none() || first_error.is_none() {
                                first_error = Some(error);
                            }
                            // An attempt with the name has tried all addresses.
                            if by.is_none() && served.is_none() && left.is_none() {
                                break;
                            }
                        }
                        Err(_) => {}
                    }
                }
                mut found = &mut lookup, if is_due && left.is_none() => {
                    found.reverse();
                    left = Some(found);
                }
                () = sleep_until(next), if !is_due => {}
                else => break,
            }
        }
        let ended = || io::Error::other("no connection attempt completed").into();
        Err(first_error.unwrap_or_else(ended))
    }
}

/// Returns all addresses of a name, or none if it has only one. The first address comes last,
/// because the attempt that is late already uses it. The address families alternate.
async fn lookup(host: &str, port: u16) -> Vec<IpAddr> {
    let host = host.to_owned();
    let found = tokio::task::spawn_blocking(move || (host.as_str(), port).to_socket_addrs());
    let Ok(Ok(found)) = found.await else { return Vec::new() };
    let mut all: Vec<IpAddr> = Vec::new();
    for address in found {
        if !all.contains(&address.ip()) {
            all.push(address.ip());
        }
    }
    in_turns(all)
}

fn in_turns(all: Vec<IpAddr>) -> Vec<IpAddr> {
    let Some(first) = all.first().copied().filter(|_| all.len() > 1) else { return Vec::new() };
    let (same, mut other): (Vec<IpAddr>, Vec<IpAddr>) =
        all.into_iter().skip(1).partition(|address| address.is_ipv4() == first.is_ipv4());
    other.reverse();
    let mut ordered = Vec::new();
    let mut same = same.into_iter();
    loop {
        let next = [other.pop(), same.next()];
        if next == [None, None] {
            break;
        }
        ordered.extend(next.into_iter().flatten());
    }
    ordered.push(first);
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn address_families_alternate_and_the_slow_address_is_last() {
        let all = ["2001:db8::1", "2001:db8::2", "192.0.2.1", "192.0.2.2"].map(ip).to_vec();
        let expected = ["192.0.2.1", "2001:db8::2", "192.0.2.2", "2001:db8::1"].map(ip).to_vec();
        assert_eq!(in_turns(all), expected);
        assert_eq!(in_turns(vec![ip("192.0.2.1")]), Vec::<IpAddr>::new());
    }

    /// Returns the result of [`lookup`] for a name with these addresses.
    async fn of(all: &[&str]) -> Vec<IpAddr> {
        in_turns(all.iter().map(|text| ip(text)).collect())
    }

    /// Connects to `alive`. All other addresses drop packets. Returns the addresses that were
    /// tried, and `None` for the name.
    async fn tried(addresses: &Addresses, alive: &str, all: &[&str]) -> Vec<Option<IpAddr>> {
        let (alive, all_tried) = (ip(alive), Mutex::default());
        let connect = |by: Option<IpAddr>| {
            locked::<Vec<_>>(&all_tried).push(by);
            async move {
                match by {
                    Some(ip) if ip == alive => Ok::<_, io::Error>(ip),
                    _ => std::future::pending().await,
                }
            }
        };
        assert_eq!(addresses.race(of(all), connect).await.unwrap(), alive);
        assert_eq!(addresses.served(), Some(alive));
        all_tried.into_inner().unwrap()
    }

    #[tokio::test]
    async fn other_addresses_are_tried_when_one_drops_packets() {
        let addresses = Addresses::new(Duration::from_millis(1));
        let all = ["192.0.2.1", "192.0.2.2", "192.0.2.3"];
        let [first, second, third] = all.map(|text| Some(ip(text)));
        let others = tried(&addresses, all[2], &all).await;
        assert_eq!(others, [None, second, third]);
        assert_eq!(
            tried(&addresses, all[2], &all).await,
            [third],
            "the address that served must be tried first"
        );
        // When this address drops packets too, the others are tried after the name.
        assert_eq!(tried(&addresses, all[0], &all).await, [third, None, second, third, first]);
    }

    #[tokio::test]
    async fn error_of_the_host_name_is_reported() {
        let addresses = Addresses::new(Duration::from_secs(2));
        let connect = |_: Option<IpAddr>| async { Err::<(), _>(io::Error::other("by the name")) };
        let error = addresses.race(of(&["192.0.2.1"]), connect).await.unwrap_err();
        assert_eq!(error.to_string(), "by the name");
        *locked(&addresses.served) = Some(ip("192.0.2.2"));
        let connect = |by: Option<IpAddr>| async move {
            match by {
                None => Ok(()),
                Some(_) => Err(io::Error::other("by an address")),
            }
        };
        addresses.race(of(&["192.0.2.1", "192.0.2.2"]), connect).await.unwrap();
        assert_eq!(addresses.served(), None, "the name must serve again");
    }
}
