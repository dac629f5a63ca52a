//! Connects to a host name of several addresses, of which some may swallow packets.
//!
//! The driver tries one address after the other, each for as long as the kernel does, which is minutes. So when an
//! attempt by the name takes long ([`HEAD_START`]), each address of the name is tried besides, one after a pause, and
//! the first connection counts (as RFC 8305 has it). Nothing is opened and closed just to find out who answers:
//! servers count that as an attack. The address that served is tried first the next time.
//!
//! A name is what a certificate is checked against, and what a proxy may tell databases apart by: an attempt by
//! an address that fails for such a reason fails alone, and the name's own attempt goes on.

use std::net::IpAddr;
use std::sync::Mutex;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use leasehold_core::kit::locked;

/// How long the first attempt is alone: longer than a busy server takes for a login.
const HEAD_START: Duration = Duration::from_secs(2);
/// How long the first attempt by an address that served before is alone.
const PAUSE: Duration = Duration::from_millis(250);

/// The addresses of one server.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    /// The one that served when the name did not.
    served: Mutex<Option<IpAddr>>,
}

impl Addresses {
    /// The address to use where only one can be tried.
    pub(super) fn served(&self) -> Option<IpAddr> {
        *locked(&self.served)
    }

    /// Connects by `connect`, which is given an address, or nothing where the driver is to look up the name.
    pub(super) async fn connect<C, F>(
        &self,
        host: Option<(&str, u16)>,
        connect: impl Fn(Option<IpAddr>) -> F,
    ) -> sqlx::Result<C>
    where
        C: Send + 'static,
        F: Future<Output = sqlx::Result<C>> + Send + 'static,
    {
        let Some((host, port)) = host else { return connect(None).await };
        let mut tried = JoinSet::new();
        let served = self.served();
        let attempt = |tried: &mut JoinSet<_>, by: Option<IpAddr>| {
            let connecting = connect(by);
            tried.spawn(async move { (by, connecting.await) });
        };
        attempt(&mut tried, served);
        let mut next = Instant::now() + if served.is_some() { PAUSE } else { HEAD_START };
        // What is to be tried yet: not known before the first attempt is late.
        let mut left: Option<Vec<Option<IpAddr>>> = served.is_some().then(|| vec![None]);
        let mut first_error = None;
        loop {
            let is_last = left.as_ref().is_some_and(Vec::is_empty);
            tokio::select! {
                biased;
                done = tried.join_next() => match done {
                    Some(Ok((by, Ok(connection)))) => {
                        *locked(&self.served) = by;
                        return Ok(connection);
                    }
                    Some(Ok((by, Err(error)))) => {
                        // What the name's attempt says is what the user can do something about.
                        if by.is_none() || first_error.is_none() {
                            first_error = Some(error);
                        }
                        if by.is_none() && served.is_none() && left.is_none() {
                            break;
                        }
                        next = Instant::now();
                    }
                    Some(Err(_)) => {}
                    None if is_last => break,
                    None => sleep_until(next).await,
                },
                () = sleep_until(next), if !is_last => {}
            }
            if Instant::now() < next || is_last {
                continue;
            }
            next = Instant::now() + PAUSE;
            let left = match &mut left {
                Some(left) => left,
                None => left.insert(others(host, port).await),
            };
            if !left.is_empty() {
                attempt(&mut tried, left.remove(0));
            }
        }
        Err(first_error.unwrap_or(sqlx::Error::PoolClosed))
    }
}

/// All addresses of a name, if there are several: the first of them last, since that is the one that is late, and
/// the families by turns.
async fn others(host: &str, port: u16) -> Vec<Option<IpAddr>> {
    let Ok(found) = tokio::net::lookup_host((host, port)).await else { return Vec::new() };
    let mut all: Vec<IpAddr> = Vec::new();
    for address in found {
        if !all.contains(&address.ip()) {
            all.push(address.ip());
        }
    }
    in_turns(all).into_iter().map(Some).collect()
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
    fn families_take_turns_and_the_late_address_is_last() {
        let all = ["2001:db8::1", "2001:db8::2", "192.0.2.1", "192.0.2.2"].map(ip).to_vec();
        let expected = ["192.0.2.1", "2001:db8::2", "192.0.2.2", "2001:db8::1"].map(ip).to_vec();
        assert_eq!(in_turns(all), expected);
        assert_eq!(in_turns(vec![ip("192.0.2.1")]), Vec::<IpAddr>::new());
    }

    /// `localhost` has two addresses nearly everywhere; where it has one, there is nothing to try.
    #[tokio::test]
    async fn address_that_swallows_packets_delays_a_connection_by_seconds_only() {
        let addresses = Addresses::default();
        let began = Instant::now();
        let of_name = others("localhost", 1).await.len();
        let connect = |by: Option<IpAddr>| async move {
            match by {
                None => std::future::pending().await,
                Some(ip) => Ok(ip),
            }
        };
        if of_name == 0 {
            return;
        }
        let by = addresses.connect(Some(("localhost", 1)), connect).await.unwrap();
        assert!(began.elapsed() < HEAD_START * 2, "{:?}", began.elapsed());
        assert_eq!(addresses.served(), Some(by));
        // The next time it is tried first.
        let began = Instant::now();
        addresses.connect(Some(("localhost", 1)), connect).await.unwrap();
        assert!(began.elapsed() < PAUSE);
    }

    #[tokio::test]
    async fn error_by_the_name_is_the_one_that_is_reported() {
        let addresses = Addresses::default();
        let connect = |_: Option<IpAddr>| async { Err::<(), _>(sqlx::Error::WorkerCrashed) };
        let error = addresses.connect(Some(("localhost", 1)), connect).await.unwrap_err();
        assert!(matches!(error, sqlx::Error::WorkerCrashed));
        *locked(&addresses.served) = Some(ip("192.0.2.1"));
        let connect = |by: Option<IpAddr>| async move {
            match by {
                None => Ok(()),
                Some(_) => Err(sqlx::Error::WorkerCrashed),
            }
        };
        addresses.connect(Some(("localhost", 1)), connect).await.unwrap();
        assert_eq!(addresses.served(), None, "the name serves again");
    }
}
