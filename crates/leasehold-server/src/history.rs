//! The holds of each lock that this server has observed, for `GET /v1/locks/{name}/history`.
//!
//! **What is observed.** The server sees the calls of its own clients exactly. It sees the holds of
//! other servers and clients only in lists. Between two lists, a short hold goes unnoticed, and the
//! end of a hold is noticed late. Such an end is `gone`, because a list does not show how it
//! happened.
//!
//! **The history is bounded**, in total and per lock, with separate limits for open holds and for
//! ended ones. Of the ended holds, those that ended first are dropped. Above the limit of open
//! holds, new ones are not recorded. Otherwise each list would replace the records of the list
//! before. The response states from which time on the history is complete.
//!
//! **A list that is older than a call changes nothing.** A list that began before a hold was last
//! seen does not end it, and a hold that has ended is not opened again: its token never returns.
//!
//! **A file is optional** (`history_file.rs`). It has the same holds, so a restart does not lose
//! them.
//!
//! Records have no claim IDs. Open holds are found by the handle of their claim.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use leasehold_core::kit::{locked, wall_micros};
use leasehold_core::store::{ClaimInfo, Evict, LockInfo, Queues};
use leasehold_core::{Claim, Holder, Kind, Name, Token};
use leasehold_http::wire::{HistoryResponse, HoldEnd, PastHold};
use serde::{Deserialize, Serialize};

use crate::access::handle;

/// The longest host name or label of a record, in bytes.
const LONGEST_TEXT: usize = 256;

/// When the history is full, an open hold that has not been seen for this long is dropped.
const STALE: Micros = 600_000_000;
/// The interval at which stale holds are dropped.
const SWEEP_EVERY: Micros = 60_000_000;

/// A time in microseconds since 1970.
pub(crate) type Micros = u64;

/// A hold, as a line of a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Line {
    pub(crate) lock: Name,
    /// The handle of the claim, if this server's client made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    handle: Option<String>,
    #[serde(flatten)]
    pub(crate) hold: PastHold,
}

/// The history of all locks.
#[derive(Debug)]
pub(crate) struct History {
    records: Mutex<Records>,
    /// Whether the server lists the locks when the store reports a change.
    watches_store: AtomicBool,
}

#[derive(Debug)]
struct Records {
    most: usize,
    most_per_lock: usize,
    /// Before this time, records may be missing.
    since: Micros,
    next: u64,
    all: BTreeMap<u64, Record>,
    open: BTreeSet<u64>,
    /// The ended holds, by the time of their end.
    ended: BTreeSet<(Micros, u64)>,
    swept: Micros,
    locks: HashMap<Name, OfLock>,
    /// The open holds of this server's clients, by the handle of the claim.
    claims: HashMap<String, u64>,
    /// The records that have changed since they were written to a file, if there is one.
    changed: Option<BTreeSet<u64>>,
}

/// The records of a lock. Calls find a record through these indexes, without a scan.
#[derive(Debug, Default)]
struct OfLock {
    by_token: BTreeMap<Token, u64>,
    open: BTreeSet<u64>,
    /// The ended holds, by the time of their end.
    ended: BTreeSet<(Micros, u64)>,
    since: Micros,
}

#[derive(Debug)]
struct Record {
    name: Name,
    handle: Option<String>,
    holder: Holder,
    token: Token,
    kind: Kind,
    weight: u32,
    from: Micros,
    seen: Micros,
    /// Whether the client has tried to release the lock.
    is_releasing: bool,
    end: Option<(Micros, HoldEnd)>,
}

impl History {
    /// Creates a history with room for `most` open holds and `most` ended ones, and per lock for
    /// `most_per_lock` of each.
    pub(crate) fn new(most: usize, most_per_lock: usize) -> Self {
        let records = Records {
            most,
            most_per_lock,
            since: wall_micros(),
            next: 0,
            all: BTreeMap::new(),
            open: BTreeSet::new(),
            ended: BTreeSet::new(),
            swept: 0,
            locks: HashMap::new(),
            claims: HashMap::new(),
            changed: None,
        };
        Self { records: Mutex::new(records), watches_store: AtomicBool::new(false) }
    }

    /// Adds holds from a file. Of several lines about a hold, the last one is valid.
    pub(crate) fn restore(&self, lines: Vec<Line>) {
        let mut last = BTreeMap::new();
        for line in lines {
            last.insert((line.lock.clone(), line.hold.token), line);
        }
        let mut records = locked(&self.records);
        for line in last.into_values() {
            records.restore(line);
        }
    }

    /// Returns all holds, as lines of a file. From now on, changes are noted for
    /// [`take_changes`](Self::take_changes).
    pub(crate) fn snapshot(&self) -> Vec<Line> {
        let mut records = locked(&self.records);
        records.changed = Some(BTreeSet::new());
        records.all.values().map(Line::from).collect()
    }

    /// Returns the holds that have changed since the last call.
    pub(crate) fn take_changes(&self) -> Vec<Line> {
        let mut records = locked(&self.records);
        let changed = records.changed.as_mut().map(std::mem::take).unwrap_or_default();
        changed.iter().filter_map(|n| records.all.get(n)).map(Line::from).collect()
    }

    pub(crate) fn set_watches_store(&self, watches: bool) {
        self.watches_store.store(watches, Ordering::Relaxed);
    }

    /// Records that the claim holds its lock.
    pub(crate) fn held(&self, claim: &Claim, token: Token) {
        let now = wall_micros();
        let handle = handle(claim.id);
        let mut records = locked(&self.records);
        let own = records.claims.get(&handle).copied();
        let has_token = |n: &u64| records.all.get(n).is_some_and(|r| r.token == token);
        if let Some(n) = own.filter(has_token).or_else(|| records.find(&claim.name, token)) {
            records.renewed(n, claim, handle, now);
            return;
        }
        // The claim was lost and joined again with the same ID.
        if let Some(n) = own {
            records.end(n, HoldEnd::Lost);
        }
        records.add(Record {
            name: claim.name.clone(),
            handle: Some(handle),
            holder: shortened(&claim.holder),
            token,
            kind: claim.kind,
            weight: claim.weight,
            from: now,
            seen: now,
            is_releasing: false,
            end: None,
        });
    }

    /// Records that the client tries to release the claim. Returns whether it has tried before.
    pub(crate) fn begin_release(&self, claim: &Claim) -> bool {
        let mut records = locked(&self.records);
        let Some(n) = records.claims.get(&handle(claim.id)).copied() else { return false };
        let record = records.all.get_mut(&n);
        record.is_some_and(|record| std::mem::replace(&mut record.is_releasing, true))
    }

    /// Records that the claim does not hold its lock any more, if it did.
    pub(crate) fn ended(&self, claim: &Claim, how: HoldEnd) {
        let mut records = locked(&self.records);
        if let Some(n) = records.claims.get(&handle(claim.id)).copied() {
            records.end(n, how);
        }
    }

    /// Returns the open holds of a lock, for [`evicted`](Self::evicted).
    pub(crate) fn open_of(&self, name: &Name) -> Vec<u64> {
        locked(&self.records).open_of(name)
    }

    /// Records the eviction of those holds in `open` that `which` selects. `open` contains the
    /// holds that were open before the eviction, because a list can end them before the eviction
    /// returns.
    pub(crate) fn evicted(&self, open: Vec<u64>, which: Evict) {
        let mut records = locked(&self.records);
        for n in open {
            let token = records.all.get(&n).map(|record| record.token);
            if matches!(which, Evict::Holders)
                || matches!(which, Evict::Token(t) if Some(t) == token)
            {
                records.end(n, HoldEnd::Evicted);
            }
        }
    }

    /// Records the holders of these locks. If `queues` is given, `locks` contains all locks in
    /// these queues, so all other holds in them have ended. The list was requested at the time
    /// `started`.
    pub(crate) fn listed(&self, started: Micros, locks: &[LockInfo], queues: Option<&Queues>) {
        let now = wall_micros();
        let mut records = locked(&self.records);
        for lock in locks {
            for claim in lock.holders() {
                records.list_one(now, started, lock, claim);
            }
        }
        let Some(queues) = queues else { return };
        let unreadable: BTreeSet<&Name> =
            locks.iter().filter(|lock| lock.unreadable.is_some()).map(|lock| &lock.name).collect();
        let is_gone = |n: &u64| {
            records.all.get(n).is_some_and(|record| {
                record.seen < started
                    && queues.has(record.name.as_str())
                    && !unreadable.contains(&record.name)
            })
        };
        let candidates: Vec<u64> = match queues {
            Queues::Of(name) => records.open_of(name),
            Queues::All(_) => records.open.iter().copied().collect(),
        };
        let gone: Vec<u64> = candidates.into_iter().filter(is_gone).collect();
        for n in gone {
            records.end(n, HoldEnd::Gone);
        }
    }

    /// Returns the history of a lock.
    pub(crate) fn of(&self, name: &Name) -> HistoryResponse {
        let records = locked(&self.records);
        let of_lock = records.locks.get(name);
        let all = of_lock.into_iter().flat_map(|of| of.by_token.values().rev());
        let mut holds: Vec<PastHold> =
            all.filter_map(|n| records.all.get(n)).map(PastHold::from).collect();
        holds.sort_by(|a, b| b.from.total_cmp(&a.from));
        HistoryResponse {
            now: seconds(wall_micros()),
            since: seconds(of_lock.map_or(0, |of| of.since).max(records.since)),
            watches_store: self.watches_store.load(Ordering::Relaxed),
            holds,
        }
    }
}

impl Records {
    /// Notes that the record must be written to the file.
    fn changed(&mut self, n: u64) {
        if let Some(changed) = &mut self.changed {
            changed.insert(n);
        }
    }

    /// Adds a hold from a file, unless it is known.
    fn restore(&mut self, Line { lock, handle, hold }: Line) {
        // The clock may have been wrong, and then the hold would never be found to be gone.
        let now = wall_micros();
        let time = |seconds| micros(seconds).map(|time| time.min(now));
        let (Some(from), Some(seen)) = (time(hold.from), time(hold.seen)) else { return };
        if self.find(&lock, hold.token).is_some() {
            return;
        }
        let record = Record {
            name: lock,
            handle,
            holder: Holder { host: hold.host, pid: hold.pid, label: hold.label },
            token: hold.token,
            kind: hold.kind,
            weight: hold.weight,
            from,
            seen,
            is_releasing: false,
            end: None,
        };
        match hold.to.and_then(time).zip(hold.end) {
            Some((time, how)) => {
                let n = self.insert(record);
                self.end_at(n, time, how);
            }
            None => self.add(record),
        }
    }

    /// Returns the record of this hold.
    fn find(&self, name: &Name, token: Token) -> Option<u64> {
        self.locks.get(name)?.by_token.get(&token).copied()
    }

    /// Records that the claim still holds its lock.
    fn renewed(&mut self, n: u64, claim: &Claim, handle: String, now: Micros) {
        let Some(record) = self.all.get_mut(&n) else { return };
        match record.end {
            // A list was wrong, for example because the clock was set.
            Some((time, HoldEnd::Gone)) => {
                record.end = None;
                self.ended.remove(&(time, n));
                self.open.insert(n);
                if let Some(of_lock) = self.locks.get_mut(&record.name) {
                    of_lock.ended.remove(&(time, n));
                    of_lock.open.insert(n);
                }
                self.changed(n);
            }
            Some(_) => return,
            None => {}
        }
        let Some(record) = self.all.get_mut(&n) else { return };
        record.seen = now;
        let is_converted = std::mem::replace(&mut record.weight, claim.weight) != claim.weight;
        if record.handle.as_ref() != Some(&handle) {
            record.handle = Some(handle.clone());
        }
        self.claims.insert(handle, n);
        if is_converted {
            self.changed(n);
        }
    }

    fn open_of(&self, name: &Name) -> Vec<u64> {
        self.locks.get(name).into_iter().flat_map(|of| &of.open).copied().collect()
    }

    fn list_one(&mut self, now: Micros, started: Micros, lock: &LockInfo, claim: &ClaimInfo) {
        let Some(token) = claim.token else { return };
        if let Some(n) = self.find(&lock.name, token) {
            if let Some(record) = self.all.get_mut(&n).filter(|record| record.end.is_none()) {
                record.seen = record.seen.max(started);
            }
            return;
        }
        let since = u64::try_from(claim.since.as_micros()).unwrap_or(u64::MAX);
        // A hold must not begin after it was first seen, even if it was granted while the list was
        // made.
        let from = now.saturating_sub(since).min(started);
        self.add(Record {
            name: lock.name.clone(),
            handle: None,
            holder: shortened(&claim.holder),
            token,
            kind: lock.kind,
            weight: claim.weight,
            from,
            seen: started,
            is_releasing: false,
            end: None,
        });
    }

    /// Adds an open hold, unless there are too many of them.
    fn add(&mut self, record: Record) {
        let now = wall_micros();
        self.sweep(now);
        if self.open.len() >= self.most {
            self.since = now;
            return;
        }
        let of_lock = self.locks.entry(record.name.clone()).or_default();
        if of_lock.open.len() >= self.most_per_lock {
            of_lock.since = now;
            return;
        }
        self.insert(record);
    }

    fn insert(&mut self, record: Record) -> u64 {
        let of_lock = self.locks.entry(record.name.clone()).or_default();
        let n = self.next;
        self.next += 1;
        of_lock.by_token.insert(record.token, n);
        of_lock.open.insert(n);
        if let Some(handle) = &record.handle {
            self.claims.insert(handle.clone(), n);
        }
        self.open.insert(n);
        self.all.insert(n, record);
        self.changed(n);
        n
    }

    /// Drops holds that were not seen for a long time, if the history is full. Such holds
    /// accumulate if the store does not report changes and no client lists the locks.
    fn sweep(&mut self, now: Micros) {
        if self.open.len() < self.most || now < self.swept + SWEEP_EVERY {
            return;
        }
        self.swept = now;
        let seen = |n: &u64| self.all.get(n).map_or(0, |record| record.seen);
        let stale: Vec<u64> =
            self.open.iter().filter(|n| seen(n).saturating_add(STALE) < now).copied().collect();
        for n in stale {
            self.drop(n);
            self.since = now;
        }
    }

    /// Removes a record.
    fn drop(&mut self, n: u64) {
        let Some(record) = self.all.remove(&n) else { return };
        self.open.remove(&n);
        // The set stays bounded while the file cannot be written.
        if let Some(changed) = &mut self.changed {
            changed.remove(&n);
        }
        if let Some((time, _)) = record.end {
            self.ended.remove(&(time, n));
        }
        if let Some(handle) = &record.handle
            && self.claims.get(handle) == Some(&n)
        {
            self.claims.remove(handle);
        }
        if let Some(of_lock) = self.locks.get_mut(&record.name) {
            of_lock.by_token.remove(&record.token);
            of_lock.open.remove(&n);
            if let Some((time, _)) = record.end {
                of_lock.ended.remove(&(time, n));
            }
            if of_lock.by_token.is_empty() {
                // The time from which this lock's records are complete is removed with the lock, so
                // the time for all locks is raised to it.
                self.since = self.since.max(of_lock.since);
                self.locks.remove(&record.name);
            }
        }
    }

    fn end(&mut self, n: u64, how: HoldEnd) {
        self.end_at(n, wall_micros(), how);
    }

    fn end_at(&mut self, n: u64, time: Micros, how: HoldEnd) {
        let Some(record) = self.all.get_mut(&n) else { return };
        let time = match record.end {
            None => time,
            // A list first noticed that the hold was gone, and this call knows how it ended.
            Some((time, HoldEnd::Gone)) => time,
            Some(_) => return,
        };
        record.end = Some((time, how));
        // A claim whose hold is gone can still be found, because the call that ended the hold may
        // not have returned.
        if let Some(handle) = &record.handle
            && how != HoldEnd::Gone
        {
            self.claims.remove(handle);
        }
        let name = record.name.clone();
        self.open.remove(&n);
        self.ended.insert((time, n));
        self.changed(n);
        let Some(of_lock) = self.locks.get_mut(&name) else { return };
        of_lock.open.remove(&n);
        of_lock.ended.insert((time, n));
        if of_lock.ended.len() > self.most_per_lock
            && let Some((time, first)) = of_lock.ended.first().copied()
        {
            of_lock.since = of_lock.since.max(time);
            self.drop(first);
        }
        if self.ended.len() > self.most
            && let Some((time, first)) = self.ended.first().copied()
        {
            self.drop(first);
            self.since = self.since.max(time);
        }
    }
}

fn shortened(holder: &Holder) -> Holder {
    let cut = |text: &str| text[..text.floor_char_boundary(LONGEST_TEXT)].to_owned();
    Holder { host: cut(&holder.host), pid: holder.pid, label: cut(&holder.label) }
}

/// Returns the time in seconds since 1970, as in events.
fn seconds(time: Micros) -> f64 {
    std::time::Duration::from_micros(time).as_secs_f64()
}

/// Returns a time of a response or a file in microseconds, if it is valid.
fn micros(seconds: f64) -> Option<Micros> {
    let time = std::time::Duration::try_from_secs_f64(seconds).ok()?;
    // A float is precise to less than a microsecond for times in this century.
    u64::try_from((time.as_nanos() + 500) / 1_000).ok()
}

impl From<&Record> for Line {
    fn from(record: &Record) -> Self {
        let (lock, handle) = (record.name.clone(), record.handle.clone());
        Self { lock, handle, hold: PastHold::from(record) }
    }
}

impl From<&Record> for PastHold {
    fn from(record: &Record) -> Self {
        Self {
            host: record.holder.host.clone(),
            pid: record.holder.pid,
            label: record.holder.label.clone(),
            token: record.token,
            kind: record.kind,
            weight: record.weight,
            from: seconds(record.from),
            seen: seconds(record.seen),
            to: record.end.map(|(time, _)| seconds(time)),
            end: record.end.map(|(_, how)| how),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use leasehold_core::store::ClaimState;

    use super::*;

    fn claim(id: u128, name: &str, label: &str) -> Claim {
        let mut claim = Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
        claim.id = leasehold_core::ClaimId::from_u128(id);
        claim.holder = Arc::new(Holder { host: "h".into(), pid: 1, label: label.into() });
        claim
    }

    fn token(n: u64) -> Token {
        Token::new(n).unwrap()
    }

    fn listed(name: &str, tokens: &[u64]) -> LockInfo {
        let holder = |n: &u64| {
            let holder = Holder { host: "other".into(), pid: 2, label: String::new() };
            let since = Duration::from_secs(5);
            ClaimInfo::new(ClaimState::Holding, holder, Some(token(*n)), 1, since, None)
        };
        let claims = tokens.iter().map(holder).collect();
        LockInfo::new(Name::new(name).unwrap(), Kind::Mutex, 1, claims)
    }

    fn all() -> Queues {
        Queues::All(String::new())
    }

    /// Returns tokens and ends of a lock, the latest first.
    fn found(history: &History, name: &str) -> Vec<(u64, Option<HoldEnd>)> {
        let holds = history.of(&Name::new(name).unwrap()).holds;
        holds.iter().map(|hold| (hold.token.get(), hold.end)).collect()
    }

    #[test]
    fn a_hold_is_recorded_once_with_its_end() {
        let history = History::new(100, 10);
        let (a, b) = (claim(1, "a", "one"), claim(2, "a", "two"));
        history.held(&a, token(1));
        history.held(&a, token(1));
        assert_eq!(found(&history, "a"), [(1, None)]);
        history.ended(&b, HoldEnd::Released);
        history.ended(&a, HoldEnd::Released);
        history.held(&b, token(2));
        history.evicted(history.open_of(&a.name), Evict::Token(token(1)));
        history.evicted(history.open_of(&a.name), Evict::Token(token(2)));
        history.ended(&b, HoldEnd::Lost);
        let ended = [(2, Some(HoldEnd::Evicted)), (1, Some(HoldEnd::Released))];
        assert_eq!(found(&history, "a"), ended);
        let labels: Vec<_> = history.of(&a.name).holds.into_iter().map(|h| h.label).collect();
        assert_eq!(labels, ["two", "one"]);
    }

    #[test]
    fn a_list_opens_and_ends_holds_of_other_clients() {
        let history = History::new(100, 10);
        let before = wall_micros();
        history.listed(before, &[listed("a", &[1]), listed("b", &[2])], Some(&all()));
        let hold = history.of(&Name::new("a").unwrap()).holds.remove(0);
        assert!(hold.from < seconds(before) - 4.0, "the age of the hold is not used");
        history.listed(wall_micros() + 1, &[listed("b", &[2])], Some(&Queues::All("b".into())));
        assert_eq!(found(&history, "a"), [(1, None)], "a list of another prefix ended a hold");
        history.listed(wall_micros() + 1, &[listed("b", &[])], None);
        assert_eq!(found(&history, "b"), [(2, None)], "an incomplete list ended a hold");
        let mut unreadable = listed("a", &[]);
        unreadable.unreadable = Some("why".into());
        history.listed(wall_micros() + 1, &[unreadable], Some(&all()));
        assert_eq!(found(&history, "a"), [(1, None)], "an unreadable queue ended a hold");
        assert_eq!(found(&history, "b"), [(2, Some(HoldEnd::Gone))]);
    }

    #[test]
    fn a_list_that_is_older_than_a_call_changes_nothing() {
        let history = History::new(100, 10);
        let a = claim(1, "a", "");
        let before = wall_micros();
        history.held(&a, token(1));
        history.listed(before, &[], Some(&all()));
        assert_eq!(found(&history, "a"), [(1, None)]);
        let before = wall_micros();
        history.ended(&a, HoldEnd::Released);
        history.listed(before, &[listed("a", &[1])], Some(&all()));
        assert_eq!(found(&history, "a"), [(1, Some(HoldEnd::Released))]);
    }

    #[test]
    fn later_call_explains_the_end_of_a_hold_that_was_gone() {
        let history = History::new(100, 10);
        let (a, b) = (claim(1, "a", ""), claim(2, "b", ""));
        history.held(&a, token(1));
        history.held(&b, token(2));
        let open = history.open_of(&b.name);
        history.listed(wall_micros() + 1, &[], Some(&all()));
        assert_eq!(found(&history, "a"), [(1, Some(HoldEnd::Gone))]);
        history.ended(&a, HoldEnd::Released);
        assert_eq!(found(&history, "a"), [(1, Some(HoldEnd::Released))]);
        history.evicted(open, Evict::Holders);
        assert_eq!(found(&history, "b"), [(2, Some(HoldEnd::Evicted))]);
        assert!(locked(&history.records).claims.is_empty());
    }

    #[test]
    fn records_are_bounded_per_lock_and_say_since_when_they_are_complete() {
        let history = History::new(100, 3);
        let name = Name::new("a").unwrap();
        let began = history.of(&name).since;
        // A long hold of a shared lock stays, although it is the oldest.
        history.held(&claim(99, "a", "long"), token(1));
        for n in 2..20 {
            let next = claim(n.into(), "a", "");
            history.held(&next, token(n));
            history.ended(&next, HoldEnd::Released);
        }
        let kept: Vec<u64> = found(&history, "a").into_iter().map(|(token, _)| token).collect();
        assert_eq!(kept, [19, 18, 17, 1]);
        let since = history.of(&name).since;
        assert!(since > began, "old records were dropped, but `since` did not move");
        assert!(history.of(&Name::new("b").unwrap()).since < since);
    }

    #[test]
    fn records_are_bounded_in_total_and_open_holds_do_not_replace_ended_ones() {
        let history = History::new(50, 10);
        let began = history.of(&Name::new("a").unwrap()).since;
        // The hold that ended last is kept, although it began first.
        history.held(&claim(0, "first", ""), token(9999));
        for n in 1..1000 {
            let next = claim(n.into(), &format!("lock {n}"), "");
            history.held(&next, token(n));
            if n % 2 == 0 {
                history.ended(&next, HoldEnd::Lost);
            }
        }
        history.ended(&claim(0, "first", ""), HoldEnd::Released);
        assert_eq!(found(&history, "first"), [(9999, Some(HoldEnd::Released))]);
        let many: Vec<LockInfo> =
            (2000..4000).map(|n| listed(&format!("other {n}"), &[n])).collect();
        history.listed(wall_micros() - 1_000_000, &many, Some(&all()));
        assert_eq!(found(&history, "first").len(), 1);
        assert!(history.of(&Name::new("a").unwrap()).since > began);
        let records = locked(&history.records);
        assert_eq!((records.open.len(), records.all.len()), (50, records.ended.len() + 50));
        assert!(records.ended.len() <= 50);
        assert_eq!(records.locks.len(), records.all.len());
        assert!(records.claims.len() <= 50);
    }

    #[test]
    fn changes_that_are_not_taken_are_bounded() {
        let history = History::new(50, 10);
        history.snapshot();
        for n in 1..1000 {
            let next = claim(n.into(), &format!("lock {n}"), "");
            history.held(&next, token(n));
            history.ended(&next, HoldEnd::Released);
        }
        assert_eq!(locked(&history.records).changed.as_ref().map(BTreeSet::len), Some(50));
        assert_eq!(history.take_changes().len(), 50);
    }

    #[test]
    fn stale_open_holds_are_dropped_for_new_ones() {
        let history = History::new(2, 2);
        history.listed(wall_micros() - 2 * STALE, &[listed("a", &[1]), listed("b", &[2])], None);
        history.held(&claim(3, "c", ""), token(3));
        assert_eq!(found(&history, "c"), [(3, None)]);
    }

    #[test]
    fn history_without_capacity_records_nothing() {
        let history = History::new(0, 10);
        history.held(&claim(1, "a", ""), token(1));
        assert_eq!(found(&history, "a"), []);
    }

    #[test]
    fn long_texts_are_truncated() {
        let history = History::new(10, 10);
        let long = claim(1, "a", &"é".repeat(5000));
        history.held(&long, token(1));
        assert_eq!(history.of(&long.name).holds[0].label.len(), LONGEST_TEXT);
    }
}
