//! The chain of locks for which the holders of a lock wait, and deadlocks.
//!
//! A client is a process (host and process ID). It is *stuck* if it waits, and none of the locks
//! for which it waits can become available while the clients that hold them are stuck. A claim that
//! needs all of its lock cannot be granted if one holder is stuck. Any other claim cannot be
//! granted if all holders are stuck. The largest set of stuck clients contains every deadlock, and
//! following the holders in it finds the cycle.
//!
//! **A reported deadlock is only possible.** A client is one process. In a process with several
//! tasks, the task that holds a lock may not be the one that waits. A process that waits for a lock
//! which it holds itself is not reported, because it is mostly two tasks that contend.
//!
//! Clients of other libraries store no process ID. They are never stuck, because it is unknown
//! which of their claims belong together.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

use crate::types::answer::{ClaimInfo, LockInfo};
use crate::types::name::Name;

/// Why a lock is not available: its holders, the locks for which they wait, and so on.
///
/// Returned by [`Client::wait_chain`](crate::Client::wait_chain). Its lists are those of one moment
/// per lock, so a chain that changes quickly may never have existed as a whole.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WaitChain {
    /// The lock, then the locks for which holders of earlier locks in the chain wait. Empty if the
    /// lock is not in use.
    pub locks: Vec<LockInfo>,
    /// The clients that wait for each other, if the chain may lead to a deadlock. Empty otherwise.
    ///
    /// A client is a process. If it has several tasks, the one that holds a lock may not be the one
    /// that waits.
    pub deadlock: Vec<WaitsFor>,
}

/// One party of a deadlock: a client that holds one lock and waits for another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct WaitsFor {
    /// The client's host name.
    pub host: String,
    /// The client's process ID.
    pub pid: u32,
    /// The lock that the client holds.
    pub holds: Name,
    /// The lock for which the client waits.
    pub waits_for: Name,
}

impl fmt::Display for WaitsFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, pid, holds, waits_for } = self;
        write!(f, "{} pid {pid} holds {holds} and waits for {waits_for}", host.escape_debug())
    }
}

type Client = (String, u32);

fn client(claim: &ClaimInfo) -> Client {
    (claim.holder.host.clone(), claim.holder.pid)
}

/// A client's wait for a lock.
#[derive(Clone, Copy)]
struct Wait {
    /// The lock's number.
    lock: usize,
    /// Whether the waiting claim needs all of the lock, so that one holder blocks it.
    is_exclusive: bool,
}

/// The holders of a lock, and how many of them are stuck.
#[derive(Clone, Copy, Default)]
struct Holders {
    all: usize,
    stuck: usize,
}

impl Holders {
    /// Returns whether the wait lasts for as long as these holders are stuck.
    fn block(self, wait: Wait) -> bool {
        if wait.is_exclusive { self.stuck > 0 } else { self.all > 0 && self.stuck == self.all }
    }
}

/// Which clients wait for which locks.
struct Graph<'a> {
    locks: &'a [LockInfo],
    waits: BTreeMap<Client, Vec<Wait>>,
}

impl<'a> Graph<'a> {
    fn of(locks: &'a [LockInfo]) -> Self {
        let mut waits: BTreeMap<Client, Vec<Wait>> = BTreeMap::new();
        for (number, lock) in locks.iter().enumerate() {
            // A process that waits for its own lock has several tasks, and mostly just contends.
            let holders: BTreeSet<Client> = lock.holders().map(client).collect();
            for claim in lock.waiters().filter(|claim| claim.holder.pid != 0) {
                let waiter = client(claim);
                if !holders.contains(&waiter) {
                    let wait = Wait { lock: number, is_exclusive: claim.weight >= lock.capacity };
                    waits.entry(waiter).or_default().push(wait);
                }
            }
        }
        Self { locks, waits }
    }

    fn waits_of(&self, claim: &ClaimInfo) -> &[Wait] {
        self.waits.get(&client(claim)).map_or(&[], Vec::as_slice)
    }

    /// Returns the largest set of clients that are stuck. Begins with all that wait. Removes those
    /// that can continue, and then those for which they made a lock available. Each client is
    /// removed once, so the time grows with the number of claims.
    fn stuck(&self) -> BTreeSet<Client> {
        let mut stuck: BTreeSet<Client> = self.waits.keys().cloned().collect();
        let mut holders = vec![Holders::default(); self.locks.len()];
        let mut held: BTreeMap<Client, Vec<usize>> = BTreeMap::new();
        for (number, lock) in self.locks.iter().enumerate() {
            for holder in lock.holders().map(client) {
                holders[number].all += 1;
                holders[number].stuck += usize::from(stuck.contains(&holder));
                held.entry(holder).or_default().push(number);
            }
        }
        let mut behind: Vec<Vec<&Client>> = vec![Vec::new(); self.locks.len()];
        for (waiter, waits) in &self.waits {
            for wait in waits {
                behind[wait.lock].push(waiter);
            }
        }
        let mut next: Vec<&Client> = self.waits.keys().collect();
        while let Some(waiter) = next.pop() {
            let mut waits = self.waits.get(waiter).into_iter().flatten();
            if waits.all(|wait| holders[wait.lock].block(*wait)) || !stuck.remove(waiter) {
                continue;
            }
            for &number in held.get(waiter).into_iter().flatten() {
                let before = holders[number];
                holders[number].stuck -= 1;
                // Only then does an answer of `block` change.
                if before.stuck == before.all || before.stuck == 1 {
                    next.extend(&behind[number]);
                }
            }
        }
        stuck
    }

    /// Returns the lock with this name, and the locks for which holders of earlier ones wait.
    fn chain(&self, name: &Name) -> Vec<&'a LockInfo> {
        let mut seen = BTreeSet::new();
        let mut chain: Vec<&LockInfo> = Vec::new();
        let named = |lock: &LockInfo| lock.name == *name;
        let mut next: VecDeque<usize> = self.locks.iter().position(named).into_iter().collect();
        while let Some(number) = next.pop_front() {
            if seen.insert(number) {
                let lock = &self.locks[number];
                chain.push(lock);
                next.extend(lock.holders().flat_map(|claim| self.waits_of(claim)).map(|w| w.lock));
            }
        }
        chain
    }

    /// Follows stuck holders until one is reached again.
    fn cycle(&self, first: (&LockInfo, Client), stuck: &BTreeSet<Client>) -> Vec<WaitsFor> {
        let (mut holds, mut holder) = (first.0.name.clone(), first.1);
        let mut walked: Vec<WaitsFor> = Vec::new();
        loop {
            let is_here = |w: &WaitsFor| (&w.host, w.pid) == (&holder.0, holder.1);
            if let Some(start) = walked.iter().position(is_here) {
                // The walk reached the first party through a different lock than the one that
                // closes the cycle.
                walked[start].holds = holds;
                return walked.split_off(start);
            }
            let locks = self.waits.get(&holder).into_iter().flatten();
            let mut locks = locks.map(|wait| &self.locks[wait.lock]);
            let Some((lock, next)) = locks.find_map(|lock| step(lock, stuck)) else {
                return Vec::new();
            };
            let (host, pid) = holder;
            walked.push(WaitsFor { host, pid, holds, waits_for: lock.name.clone() });
            (holds, holder) = (lock.name.clone(), next);
        }
    }
}

impl WaitChain {
    /// Returns the chain that begins with this lock. `locks` are all locks that may be in it.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// use leasehold::WaitChain;
    /// let guard = locks.mutex("app/a").lock().await?;
    /// let chain = WaitChain::of(&locks.list("app/").await?, guard.name());
    /// assert_eq!(chain.locks.len(), 1);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn of(locks: &[LockInfo], name: &Name) -> Self {
        let graph = Graph::of(locks);
        let chain = graph.chain(name);
        let stuck = graph.stuck();
        let first = chain.iter().find_map(|lock| step(lock, &stuck));
        Self {
            deadlock: first.map(|first| graph.cycle(first, &stuck)).unwrap_or_default(),
            locks: chain.into_iter().cloned().collect(),
        }
    }
}

/// Returns this lock with a stuck holder of it, if it has one.
fn step<'a>(lock: &'a LockInfo, stuck: &BTreeSet<Client>) -> Option<(&'a LockInfo, Client)> {
    let mut holders = lock.holders().map(client);
    holders.find(|holder| stuck.contains(holder)).map(|holder| (lock, holder))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::types::answer::ClaimState;
    use crate::types::claim::Kind;
    use crate::types::holder::Holder;

    fn lock(name: &str, capacity: u32, holders: &[u32], waiters: &[u32]) -> LockInfo {
        let claim = |claim_state, pid: &u32| {
            let holder = Holder { host: "h".into(), pid: *pid, label: String::new() };
            ClaimInfo::new(claim_state, holder, None, 1, Duration::ZERO, None)
        };
        let holders = holders.iter().map(|pid| claim(ClaimState::Holding, pid));
        let waiters = waiters.iter().map(|pid| claim(ClaimState::Waiting, pid));
        let kind = if capacity == 1 { Kind::Mutex } else { Kind::Semaphore };
        LockInfo::new(Name::new(name).unwrap(), kind, capacity, holders.chain(waiters).collect())
    }

    fn found(locks: &[LockInfo], name: &str) -> (Vec<String>, Vec<(u32, String, String)>) {
        let why = WaitChain::of(locks, &Name::new(name).unwrap());
        let chain = why.locks.iter().map(|lock| lock.name.as_str().to_owned()).collect();
        let text = |name: &Name| name.as_str().to_owned();
        let party = |w: &WaitsFor| (w.pid, text(&w.holds), text(&w.waits_for));
        (chain, why.deadlock.iter().map(party).collect())
    }

    #[test]
    fn chain_without_a_cycle_is_not_a_deadlock() {
        let locks = [lock("a", 1, &[1], &[9]), lock("b", 1, &[2], &[1]), lock("c", 1, &[3], &[])];
        assert_eq!(found(&locks, "a"), (vec!["a".into(), "b".into()], vec![]));
        assert_eq!(found(&locks, "z"), (vec![], vec![]));
    }

    #[test]
    fn a_cycle_is_reported_with_all_parties_and_no_others() {
        let locks = [
            lock("a", 1, &[1], &[3, 9]),
            lock("b", 1, &[2], &[1]),
            lock("c", 1, &[3], &[2]),
            lock("d", 1, &[9], &[8]),
        ];
        let party = |pid, holds: &str, waits: &str| (pid, holds.to_owned(), waits.to_owned());
        let mut deadlock = found(&locks, "d").1;
        deadlock.sort();
        assert_eq!(deadlock, [party(1, "a", "b"), party(2, "b", "c"), party(3, "c", "a")]);
        // Two tasks of one client contend.
        let own = [lock("a", 1, &[1], &[1])];
        assert_eq!(found(&own, "a").1, []);
    }

    #[test]
    fn a_permit_that_another_client_will_release_breaks_the_cycle() {
        let cycle = [lock("a", 2, &[1, 5], &[2]), lock("b", 1, &[2], &[1])];
        assert_eq!(found(&cycle, "a").1, []);
        let full = [lock("a", 2, &[1, 1], &[2]), lock("b", 1, &[2], &[1])];
        assert_eq!(found(&full, "a").1.len(), 2);
    }

    #[test]
    fn clients_without_a_process_id_are_not_taken_for_one_client() {
        let locks = [lock("a", 1, &[0], &[0]), lock("b", 1, &[0], &[])];
        assert_eq!(found(&locks, "a"), (vec!["a".into()], vec![]));
    }

    #[test]
    fn long_chains_take_little_time() {
        // Client n holds lock n and waits for the next lock. With a quadratic search, this test
        // would take minutes.
        let locks: Vec<LockInfo> =
            (1..=20_000).map(|n| lock(&format!("{n}"), 1, &[n], &[n - 1])).collect();
        let (chain, deadlock) = found(&locks, "1");
        assert_eq!((chain.len(), deadlock.len()), (20_000, 0));
    }
}
