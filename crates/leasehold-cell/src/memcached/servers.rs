//! Several servers that do not know of each other. Each lock is on one of them, together with its
//! queue, the sessions of its clients, and the epoch. So each server is a separate store, and this
//! module only selects the server for a name.
//!
//! - *Selection.* A lock is on the server with the highest weight for its name (rendezvous
//!   hashing). The weight depends on the server's name in the URL (`names=`, or its host and port)
//!   and the lock's name. The order of servers does not matter. An additional server takes over an
//!   equal share of the names of every other server.
//! - *One server is unreachable.* Its locks are not available, and their holders lose them when
//!   their leases end. The other servers' locks are not affected. A client that connects in the
//!   meantime uses the other servers, and contacts the missing one when one of its locks is
//!   requested.
//! - *The URLs of two clients differ*: they list different servers or names, or swap two servers
//!   (`names=`, DNS). The clients would then take the same lock on two servers. So each server's
//!   epoch contains its own name and the list of the first client that connected. Clients with
//!   another list or another own name get an error when they connect and at each join.
//! - *The list changes.* Some names move to another server, and clients with the new list do not
//!   see holders with the old one. A server only accepts a new list after it has lost its data. So
//!   once all clients have the new list, restart or flush every server. After that, no lock is
//!   granted until all old holds have ended (`epoch.rs`).

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::{locked, redacted};
use leasehold_core::store::{
    Converted, Evict, EvictionListener, Follow, Joined, LockInfo, Mode, Ownership, Queues, Renew,
    Renewal, Signal, Store, StoreInfo,
};
use leasehold_core::{Claim, Clock, Error, ErrorKind, Moment, Name, Result, Token};
use tokio::runtime::Handle;
use tokio::sync::OnceCell;

use super::server::{connected, guarantees};
use super::url::MemcachedUrl;
use crate::keys::digits;
use crate::store::CellStore;

/// Time to wait before contacting a server that did not reply again.
const AGAIN: Duration = Duration::from_secs(1);

/// The stores of several servers as one.
#[derive(Debug)]
pub(super) struct Servers {
    info: StoreInfo,
    longest_lease: Duration,
    members: Vec<Arc<Member>>,
}

/// One server, which this client may not have reached yet.
#[derive(Debug)]
struct Member {
    server: MemcachedUrl,
    /// The URL with all servers.
    url: String,
    runtime: Handle,
    store: OnceCell<CellStore>,
    /// When the last attempt to connect failed, and with which error.
    failed: Mutex<Option<(Moment, ErrorKind, String)>>,
    clock: Clock,
}

impl Member {
    async fn store(&self) -> Result<&CellStore> {
        // All calls that were made during an attempt get its result, so they do not make further
        // attempts one after the other.
        let came = self.clock.now();
        let last_error = || {
            let failed = locked(&self.failed);
            let (at, kind, why) = failed.as_ref()?;
            let is_fresh = *at > came || came.since(*at) < AGAIN;
            is_fresh.then(|| Error::new(*kind, why.clone()).with_store(&redacted(&self.url)))
        };
        if self.store.get().is_none()
            && let Some(error) = last_error()
        {
            return Err(error);
        }
        let opened = self.store.get_or_try_init(|| async {
            if let Some(error) = last_error() {
                return Err(error);
            }
            let opening = async {
                let store = connected(self.server.clone(), &self.url, &self.runtime).await?;
                store.agrees().await?;
                Ok(store)
            };
            let opened = opening.await;
            if let Err(error) = &opened {
                let failed: &Error = error;
                *locked(&self.failed) = Some((self.clock.now(), failed.kind(), failed.reason()));
            }
            opened
        });
        opened.await.map_err(|error: Error| error.with_store(&redacted(&self.url)))
    }

    /// Returns the server's weight for `name`. The lock is on the server with the highest weight.
    fn weight(&self, name: &Name) -> u64 {
        weight(&self.server.name, name)
    }
}

/// Returns the weight, which must be the same in every version of leasehold. The texts differ at
/// their beginning, so the last step mixes all bits (as in `SplitMix64`).
fn weight(server: &str, name: &Name) -> u64 {
    let sum = digits(&format!("{server} {}", name.as_str()));
    let folded = (sum >> 64) ^ sum;
    let mut mixed = u64::try_from(folded & u128::from(u64::MAX)).unwrap_or(0);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Servers {
    /// Connects to all servers at once. It succeeds if at least one is reachable.
    pub(super) async fn connect(
        servers: Vec<MemcachedUrl>,
        url: &str,
        runtime: Handle,
    ) -> Result<Self> {
        let Some(first) = servers.first() else {
            return Err(Error::new(ErrorKind::Config, "the URL names no server"));
        };
        let options = first.options.clone();
        let list = first.list.clone().unwrap_or_default();
        let mut promised = guarantees(&options);
        let notes = promised.notes.to_mut();
        notes.push(
            "Each lock is stored on one server. While that server is down, its locks are unavailable; other locks are \
             unaffected. To change the list of servers, give all clients the new list, then restart or flush every server."
                .into(),
        );
        let info = StoreInfo::new(redacted(url), promised)
            .identified(format!("memcached:{list}/{}", options.prefix));
        let member = |server| {
            let (url, runtime) = (url.to_owned(), runtime.clone());
            let (store, failed, clock) = Default::default();
            Arc::new(Member { server, url, runtime, store, failed, clock })
        };
        let members: Vec<Arc<Member>> = servers.into_iter().map(member).collect();
        let opening = members.iter().map(|member| {
            let member = member.clone();
            runtime.spawn(async move { member.store().await.map(drop) })
        });
        let (mut is_there, mut gone) = (false, None);
        for opened in opening.collect::<Vec<_>>() {
            let ended =
                |_| Error::new(ErrorKind::Closed, "the runtime of this client was shut down");
            match opened.await.map_err(ended)? {
                Ok(()) => is_there = true,
                Err(error) if error.kind() == ErrorKind::Unreachable => gone = Some(error),
                Err(error) => return Err(error),
            }
        }
        match gone.filter(|_| !is_there) {
            Some(error) => Err(error),
            None => Ok(Self { info, longest_lease: options.session, members }),
        }
    }

    fn place(&self, name: &Name) -> usize {
        let places = 0..self.members.len();
        places.max_by_key(|&place| self.members[place].weight(name)).unwrap_or(0)
    }

    async fn of(&self, name: &Name) -> Result<&CellStore> {
        self.members[self.place(name)].store().await.map_err(|error| error.with_lock(name))
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Store for Servers {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        self.of(&claim.name).await?.join(claim, mode).await
    }

    /// Renews the claims of each server together. The client calls this once per server
    /// ([`shard`](Self::shard)).
    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let mut answers: Vec<Option<Renewal>> = vec![None; renewals.len()];
        for (place, member) in self.members.iter().enumerate() {
            let on_it = |at: &usize| self.place(&renewals[*at].claim.name) == place;
            let theirs: Vec<usize> = (0..renewals.len()).filter(on_it).collect();
            let asked: Vec<Renew> = theirs.iter().map(|&at| renewals[at].clone()).collect();
            if asked.is_empty() {
                continue;
            }
            let renewed = match member.store().await {
                Ok(store) => store.renew(&asked).await,
                Err(error) => Err(error),
            };
            match renewed {
                Ok(renewed) => theirs
                    .iter()
                    .zip(renewed)
                    .for_each(|(&at, renewal)| answers[at] = Some(renewal)),
                Err(error) if theirs.len() == renewals.len() => return Err(error),
                Err(error) => {
                    theirs.iter().for_each(|&at| answers[at] = Some(Renewal::unknown(&error)));
                }
            }
        }
        Ok(answers.into_iter().map(|renewal| renewal.unwrap_or(Renewal::Lost)).collect())
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        self.of(&claim.name).await?.leave(claim, keep).await
    }

    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        self.of(&claim.name).await?.convert(claim).await
    }

    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        self.of(&claim.name).await?.changed(claim).await
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        self.of(name).await?.read(name).await
    }

    async fn holders(&self, name: &Name, token: Option<Token>) -> Result<Option<LockInfo>> {
        self.of(name).await?.holders(name, token).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let mut all = Vec::new();
        for (place, member) in self.members.iter().enumerate() {
            let listed = member.store().await?.list(prefix).await?;
            // A lock that was left on another server when the list changed is not part of this
            // store.
            all.extend(listed.into_iter().filter(|lock| self.place(&lock.name) == place));
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        self.of(name).await?.evict(name, which).await
    }

    /// Returns the findings of all servers, each with the server's host.
    async fn diagnose(&self) -> Result<Vec<Finding>> {
        let mut all = Vec::new();
        for member in &self.members {
            let found = match member.store().await {
                Ok(store) => store.diagnose().await,
                Err(error) => Err(error),
            };
            let host = &member.server.host;
            match found {
                Ok(found) => all.extend(found.into_iter().map(|mut finding| {
                    finding.what = format!("{host}: {}", finding.what);
                    finding
                })),
                Err(error) if error.kind() == ErrorKind::Unreachable => all.push(Finding::broken(
                    "server-gone",
                    format!("the server {host} does not respond"),
                    "its locks cannot be acquired; the other servers' locks can",
                    "restart it; it then grants no locks for a while",
                )),
                Err(error) => return Err(error),
            }
        }
        Ok(all)
    }

    async fn disconnect(&self) {
        for store in self.members.iter().filter_map(|member| member.store.get()) {
            store.disconnect().await;
        }
    }

    /// Does nothing, because memcached has no messages between clients.
    fn on_eviction(&self, _listener: Weak<dyn EvictionListener>) {}

    async fn follow(&self, _queues: &Queues) -> Result<Option<Follow>> {
        Ok(None)
    }

    fn confirmed(&self, _claim: &Claim) -> Option<u32> {
        None
    }

    fn ownership(&self, _claim: &Claim) -> Result<Option<Ownership>> {
        Ok(None)
    }

    fn lifeline(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn longest_lease(&self) -> Duration {
        self.longest_lease
    }

    fn shard(&self, name: &Name) -> u64 {
        self.place(name) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTS: [&str; 4] = ["a:11211", "b:11211", "10.0.0.1:11211", "10.0.0.2:11211"];

    fn place(hosts: &[&'static str], name: &str) -> &'static str {
        let name = Name::new(name).unwrap();
        hosts.iter().max_by_key(|host| weight(host, &name)).unwrap()
    }

    /// Every version of leasehold must use the same server for a lock.
    #[test]
    fn names_stay_on_the_same_server_across_versions() {
        let three = &HOSTS[..3];
        let places = ["a", "b", "order:42", "é", "nightly"].map(|name| place(three, name));
        assert_eq!(places, PLACES);
    }

    const PLACES: [&str; 5] = ["b:11211", "b:11211", "b:11211", "10.0.0.1:11211", "10.0.0.1:11211"];

    #[test]
    fn names_are_spread_evenly_and_few_move_to_a_new_server() {
        let names: Vec<String> = (0..12_000).map(|n| format!("job-{n}")).collect();
        let (three, four) = (&HOSTS[..3], &HOSTS[..]);
        for host in three {
            let on_it = names.iter().filter(|name| place(three, name) == *host).count();
            assert!((3_700..4_300).contains(&on_it), "{host}: {on_it} of 12,000");
        }
        let moved = names.iter().filter(|name| place(three, name) != place(four, name));
        let moved: Vec<&String> = moved.collect();
        assert!((2_700..3_300).contains(&moved.len()), "{} of 12,000 moved", moved.len());
        assert!(
            moved.iter().all(|name| place(four, name) == HOSTS[3]),
            "a name moved to an old server"
        );
    }
}
