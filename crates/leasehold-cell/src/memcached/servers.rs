//! Several servers that know nothing of each other: each lock is on one of them, and everything that belongs to it:
//! its queue, the session of each client that stands in it, the epoch. So each is a store of its own, and all that is
//! written here is which one a name is on.
//!
//! - *Where*: on the server whose own number for that name is the greatest (rendezvous hashing), from the
//!   server's name in the URL (`names=`, or its host and port) and the lock's. The order does not matter; one
//!   server more takes one name in so many from each of the others.
//! - *One is gone*: its locks cannot be had, and whoever holds one loses it with its lease; those of the
//!   others go on. A client that comes meanwhile connects to the others, and to that one when somebody asks
//!   for a lock there.
//! - *Not all name the same servers*, or not by the same names, or two of them are swapped (`names=`, DNS): then one
//!   name would be on two. So each server's epoch keeps its own name and the list of the client that was there first,
//!   which connecting is enough for. Other lists and other own names are refused: as a client connects, and at
//!   each join.
//! - *The list is changed*: names move, and who holds by the old list is not where those of the new one look.
//!   Old lists are refused only by servers that have forgotten them: after all clients have the new one,
//!   every server is to be restarted or emptied. Then nobody holds by an old one, and nobody is let in before
//!   that is so (`epoch.rs`).

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::doctor::Finding;
use leasehold_core::kit::{locked, redacted};
use leasehold_core::store::{
    Ear, Evict, Follow, Joined, LockInfo, Mode, Ownership, Queues, Renew, Renewal, Reweighed,
    Signal, Store, StoreInfo,
};
use leasehold_core::{Claim, Clock, Error, ErrorKind, Moment, Name, Result, Token};
use tokio::runtime::Handle;
use tokio::sync::OnceCell;

use super::server::{connected, guarantees};
use super::url::MemcachedUrl;
use crate::keys::digits;
use crate::store::CellStore;

/// How long a server is not asked again that did not answer.
const AGAIN: Duration = Duration::from_secs(1);

/// The stores of several servers as one.
#[derive(Debug)]
pub(super) struct Servers {
    info: StoreInfo,
    longest_lease: Duration,
    members: Vec<Arc<Member>>,
}

/// One of them, which need not be there yet.
#[derive(Debug)]
struct Member {
    server: MemcachedUrl,
    /// Of all.
    url: String,
    runtime: Handle,
    store: OnceCell<CellStore>,
    /// When it did not answer, and what was told then.
    failed: Mutex<Option<(Moment, ErrorKind, String)>>,
    clock: Clock,
}

impl Member {
    async fn store(&self) -> Result<&CellStore> {
        // All who came while it was asked have its answer: nobody waits in line for one who does not answer.
        let came = self.clock.now();
        let told = || {
            let failed = locked(&self.failed);
            let (at, kind, why) = failed.as_ref()?;
            let is_fresh = *at > came || came.since(*at) < AGAIN;
            is_fresh.then(|| Error::new(*kind, why.clone()).at(&redacted(&self.url)))
        };
        if self.store.get().is_none()
            && let Some(error) = told()
        {
            return Err(error);
        }
        let opened = self.store.get_or_try_init(|| async {
            if let Some(error) = told() {
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
        opened.await.map_err(|error: Error| error.at(&redacted(&self.url)))
    }

    /// What it has of this name; greater than all others', if the name is on it.
    fn weight(&self, name: &Name) -> u64 {
        weight(&self.server.name, name)
    }
}

/// The same in every version. What is summed up differs at its beginning, of which the last step leaves
/// every bit to chance (as in `SplitMix64`).
fn weight(server: &str, name: &Name) -> u64 {
    let sum = digits(&format!("{server} {}", name.as_str()));
    let folded = (sum >> 64) ^ sum;
    let mut mixed = u64::try_from(folded & u128::from(u64::MAX)).unwrap_or(0);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Servers {
    /// Connects to all at once; one that is not there is no hindrance, if another is.
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
        self.members[self.place(name)].store().await.map_err(|error| error.on(name))
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

    /// Those of one server together: the client asks for each server's on their own ([`shard`](Self::shard)).
    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let mut answers: Vec<Option<Renewal>> = vec![None; renewals.len()];
        for (place, member) in self.members.iter().enumerate() {
            let on_it = |at: &usize| self.place(&renewals[*at].claim.name) == place;
            let theirs: Vec<usize> = (0..renewals.len()).filter(on_it).collect();
            let asked: Vec<Renew> = theirs.iter().map(|&at| renewals[at].clone()).collect();
            if asked.is_empty() {
                continue;
            }
            let told = match member.store().await {
                Ok(store) => store.renew(&asked).await,
                Err(error) => Err(error),
            };
            match told {
                Ok(told) => {
                    theirs.iter().zip(told).for_each(|(&at, told)| answers[at] = Some(told))
                }
                Err(error) if theirs.len() == renewals.len() => return Err(error),
                Err(error) => {
                    theirs.iter().for_each(|&at| answers[at] = Some(Renewal::unknown(&error)));
                }
            }
        }
        Ok(answers.into_iter().map(|told| told.unwrap_or(Renewal::Lost)).collect())
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        self.of(&claim.name).await?.leave(claim, keep).await
    }

    async fn reweigh(&self, claim: &Claim) -> Result<Reweighed> {
        self.of(&claim.name).await?.reweigh(claim).await
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
            // What an older list has left on another server is no lock of this one.
            all.extend(listed.into_iter().filter(|lock| self.place(&lock.name) == place));
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        self.of(name).await?.evict(name, which).await
    }

    /// Of each server, by its name.
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
                    "restart it; it grants no lock for a while after its start",
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

    /// Nothing is told unasked by memcached, which has no bells.
    fn hear(&self, _ear: Weak<dyn Ear>) {}

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

    /// Another version must look for a lock where this one does.
    #[test]
    fn a_name_is_where_it_always_was() {
        let three = &HOSTS[..3];
        let places = ["a", "b", "order:42", "é", "nightly"].map(|name| place(three, name));
        assert_eq!(places, PLACES);
    }

    const PLACES: [&str; 5] = ["b:11211", "b:11211", "b:11211", "10.0.0.1:11211", "10.0.0.1:11211"];

    #[test]
    fn names_are_shared_out_evenly_and_few_move_to_a_server_more() {
        let names: Vec<String> = (0..12_000).map(|n| format!("job-{n}")).collect();
        let (three, four) = (&HOSTS[..3], &HOSTS[..]);
        for host in three {
            let on_it = names.iter().filter(|name| place(three, name) == *host).count();
            assert!((3_700..4_300).contains(&on_it), "{host}: {on_it} of 12,000");
        }
        let moved = names.iter().filter(|name| place(three, name) != place(four, name));
        let moved: Vec<&String> = moved.collect();
        assert!((2_700..3_300).contains(&moved.len()), "{} of 12,000 moved", moved.len());
        assert!(moved.iter().all(|name| place(four, name) == HOSTS[3]), "to an old server");
    }
}
