//! Explains why a lock is not available: the chain of locks for which its holders wait, and
//! deadlocks.
//!
//! A client is a process (host and process ID). It is *stuck* if it waits, and none of the locks
//! for which it waits can become available while the clients that hold them are stuck. A claim that
//! needs all of its lock cannot be granted if one holder is stuck. Any other claim cannot be
//! granted if all holders are stuck. The largest set of stuck clients contains every deadlock, and
//! following the holders in it finds the cycle. A client is one process. So a process with one task
//! that holds a lock and another task that waits is reported too, although it may still finish.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use leasehold_core::Name;
use leasehold_core::store::{ClaimInfo, LockInfo};
use leasehold_http::wire::{LockView, WaitsFor, WhyResponse};

type Client = (String, u32);

fn client(claim: &ClaimInfo) -> Client {
    (claim.holder.host.clone(), claim.holder.pid)
}

/// A client's wait for a lock.
struct Wait<'a> {
    lock: &'a LockInfo,
    /// Whether the waiting claim needs all of the lock, so that one holder blocks it.
    is_exclusive: bool,
}

impl Wait<'_> {
    /// Returns whether the wait cannot end while these clients are stuck.
    fn is_stuck(&self, stuck: &BTreeSet<Client>) -> bool {
        let mut holders = self.lock.holders().map(|claim| stuck.contains(&client(claim)));
        match self.is_exclusive {
            true => holders.any(|is_stuck| is_stuck),
            false => self.lock.holders().next().is_some() && holders.all(|is_stuck| is_stuck),
        }
    }
}

fn waits(locks: &[LockInfo]) -> BTreeMap<Client, Vec<Wait<'_>>> {
    let mut waits: BTreeMap<Client, Vec<Wait<'_>>> = BTreeMap::new();
    for lock in locks {
        for claim in lock.waiters() {
            let is_exclusive = claim.weight >= lock.capacity;
            waits.entry(client(claim)).or_default().push(Wait { lock, is_exclusive });
        }
    }
    waits
}

/// Returns the chain of locks that begins with this one, and the deadlock to which the chain leads,
/// if any.
pub(crate) fn why(locks: &[LockInfo], name: &Name) -> WhyResponse {
    let waits = waits(locks);
    let mut stuck: BTreeSet<Client> = waits.keys().cloned().collect();
    loop {
        let is_stuck = |client: &&Client| {
            waits.get(client).is_some_and(|waits| waits.iter().all(|w| w.is_stuck(&stuck)))
        };
        let still: BTreeSet<Client> = stuck.iter().filter(is_stuck).cloned().collect();
        if still.len() == stuck.len() {
            break;
        }
        stuck = still;
    }
    let mut chain: Vec<&LockInfo> = Vec::new();
    let mut next: VecDeque<&LockInfo> = locks.iter().filter(|l| l.name == *name).collect();
    while let Some(lock) = next.pop_front() {
        if chain.iter().any(|seen| seen.name == lock.name) {
            continue;
        }
        chain.push(lock);
        let holders = lock.holders().filter_map(|claim| waits.get(&client(claim)));
        next.extend(holders.flatten().map(|wait| wait.lock));
    }
    let first = chain.iter().find_map(|lock| step(lock, &stuck));
    WhyResponse {
        deadlock: first.map(|first| cycle(first, &waits, &stuck)).unwrap_or_default(),
        chain: chain.into_iter().map(LockView::from).collect(),
    }
}

/// Returns this lock with a stuck holder of it, if it has one.
fn step<'a>(lock: &'a LockInfo, stuck: &BTreeSet<Client>) -> Option<(&'a LockInfo, Client)> {
    let mut holders = lock.holders().map(client);
    holders.find(|holder| stuck.contains(holder)).map(|holder| (lock, holder))
}

/// Follows stuck holders until one is reached again.
fn cycle(
    first: (&LockInfo, Client),
    waits: &BTreeMap<Client, Vec<Wait<'_>>>,
    stuck: &BTreeSet<Client>,
) -> Vec<WaitsFor> {
    let (mut holds, mut holder) = (first.0.name.clone(), first.1);
    let mut walked: Vec<WaitsFor> = Vec::new();
    loop {
        let is_here = |w: &WaitsFor| (&w.host, w.pid) == (&holder.0, holder.1);
        if let Some(start) = walked.iter().position(is_here) {
            // The walk reached the first party through a different lock than the one that closes
            // the cycle.
            walked[start].holds = holds;
            return walked.split_off(start);
        }
        let waits = waits.get(&holder).into_iter().flatten();
        let Some((lock, next)) = waits.filter_map(|wait| step(wait.lock, stuck)).next() else {
            return Vec::new();
        };
        let (host, pid) = holder;
        walked.push(WaitsFor { host, pid, holds, waits_for: lock.name.clone() });
        (holds, holder) = (lock.name.clone(), next);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold_core::store::ClaimState;
    use leasehold_core::{Holder, Kind};

    use super::*;

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
        let why = why(locks, &Name::new(name).unwrap());
        let chain = why.chain.iter().map(|lock| lock.name.as_str().to_owned()).collect();
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
        // A client that waits for itself.
        let own = [lock("a", 1, &[1], &[1])];
        assert_eq!(found(&own, "a").1, [party(1, "a", "a")]);
    }

    #[test]
    fn a_permit_that_another_client_will_release_breaks_the_cycle() {
        let cycle = [lock("a", 2, &[1, 5], &[2]), lock("b", 1, &[2], &[1])];
        assert_eq!(found(&cycle, "a").1, []);
        let full = [lock("a", 2, &[1, 1], &[2]), lock("b", 1, &[2], &[1])];
        assert_eq!(found(&full, "a").1.len(), 2);
    }
}
