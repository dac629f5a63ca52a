//! A lock's queue as etcd keeps it: keys `NAME/LEASE`, in the order of their create revisions.
//!
//! `NAME` is the lock's name as it is, and `LEASE` the lease that the key hangs on, in hexadecimal, as in the
//! official Go client. A lease that goes from one claim to the next makes the same key again: etcd
//! keeps what it ever heard of a key until it compacts, and steps over all of them when it looks at a
//! lock's, so with a new key for each use locks would become slower and slower. So a claim is told by
//! its id in the value, and a place by the revision that created it, never by the key alone.
//!
//! What a key belongs to is what stands before its *last* slash,
//! so two names never share a key; but the range of the keys of `a` holds those of `a/b` as well, so
//! whoever reads it must leave them out ([`is_place`]). The Go client does not: there a lock `a` waits
//! for the holders of `a/b`.
//!
//! A place of ours has a value that begins with the lock's kind and capacity, ordered so that one
//! comparison of a whole range tells that all in it agree ([`agree`]). A key without such a value is a
//! place of another client, that is of a mutex, if it hangs on a lease.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::proto::{Compare, KeyValue, Operand, Relation, Target};
use crate::claim::{Claim, ClaimId, Holder, Kind, Token};
use crate::clock::wall_micros;
use crate::error::HolderInfo;
use crate::queue::granted;
use crate::store::{ClaimInfo, Standing};

/// One claim in a queue.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: Vec<u8>,
    /// The create revision.
    pub(super) token: Token,
    /// With which revision it was last written.
    pub(super) written: i64,
    pub(super) lease: i64,
    /// `None`: another client's.
    pub(super) claim: Option<ClaimId>,
    pub(super) kind: Kind,
    pub(super) capacity: u32,
    pub(super) weight: u32,
    pub(super) departed: bool,
    pub(super) holder: Arc<Holder>,
    /// When it joined by its own machine's clock, in microseconds since 1970; 0: unknown.
    since: u64,
}

/// What our values say after the kind.
#[derive(Debug, Serialize, Deserialize)]
struct Value {
    claim: String,
    weight: u32,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    departed: bool,
    since: u64,
    holder: Holder,
}

/// A queue, or the front of one.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    pub(super) entries: Vec<Entry>,
    /// How many of the front hold.
    pub(super) granted: usize,
}

/// What the keys of a lock begin with.
pub(super) fn prefix(namespace: &str, name: &str) -> Vec<u8> {
    format!("{namespace}{name}/").into_bytes()
}

/// The key of a claim for this lock on this lease.
pub(super) fn key(namespace: &str, name: &str, lease: i64) -> Vec<u8> {
    format!("{namespace}{name}/{lease:x}").into_bytes()
}

/// Where the keys that begin so end.
pub(super) fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // All keys, which only an empty prefix means.
    vec![0]
}

/// Whether a key is a place of the lock with this prefix, and not of another below it, nor
/// anything else that lies there.
pub(super) fn is_place(prefix: &[u8], kv: &KeyValue) -> bool {
    let id = kv.key.strip_prefix(prefix);
    kv.lease != 0 && id.is_some_and(|id| !id.is_empty() && !id.contains(&b'/'))
}

/// Whether a place is one of ours whose holder has departed.
pub(super) fn is_departed(kv: &KeyValue) -> bool {
    Written::by_us(&kv.value).is_some_and(|written| written.value.departed)
}

/// The lock's name, if this may be the key of a place.
pub(super) fn name_of<'a>(namespace: &str, kv: &'a KeyValue) -> Option<&'a str> {
    let text = std::str::from_utf8(&kv.key).ok()?.strip_prefix(namespace)?;
    let (name, id) = text.rsplit_once('/')?;
    // A place whose holder has departed hangs on another lease.
    let theirs = || id == format!("{:x}", kv.lease);
    (kv.lease != 0 && (theirs() || Written::by_us(&kv.value).is_some())).then_some(name)
}

fn kind_text(kind: Kind, capacity: u32) -> String {
    let kind = match kind {
        Kind::Mutex => "mutex",
        Kind::RwLock => "rwlock",
        Kind::Semaphore => "semaphore",
    };
    format!("{kind}:{capacity} ")
}

/// The value of a claim's place.
pub(super) fn value(claim: &Claim, departed: bool) -> Vec<u8> {
    let since = wall_micros();
    let holder = Holder::clone(&claim.holder);
    let value = Value { claim: claim.id.to_hex(), weight: claim.weight, departed, since, holder };
    let mut bytes = kind_text(claim.kind, claim.capacity).into_bytes();
    // Numbers and strings: nothing in it can fail.
    bytes.extend(serde_json::to_vec(&value).unwrap_or_default());
    bytes
}

/// Comparisons that are true if all in the range are claims for a lock of this kind and capacity.
/// A mutex has the least value of all, so that it agrees with other clients' empty ones.
pub(super) fn agree(claim: &Claim, prefix: &[u8]) -> Vec<Compare> {
    let text = kind_text(claim.kind, claim.capacity).into_bytes();
    let is = |relation: Relation, value: Vec<u8>| Compare {
        result: relation.into(),
        target: Target::Value.into(),
        key: prefix.to_vec(),
        operand: Some(Operand::Value(value)),
        range_end: end_of(prefix),
    };
    let below = is(Relation::Less, end_of(&text));
    match (claim.kind, claim.capacity) {
        (Kind::Mutex, 1) => vec![below],
        _ => vec![is(Relation::Greater, text), below],
    }
}

/// What a value says.
struct Written {
    /// `None`: it is another client's.
    claim: Option<ClaimId>,
    kind: Kind,
    capacity: u32,
    value: Value,
}

impl Written {
    /// `None`: it is not one of ours.
    fn by_us(value: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(value).ok()?;
        let (kind, rest) = text.split_once(' ')?;
        let (kind, capacity) = kind.split_once(':')?;
        let kind = match kind {
            "mutex" => Kind::Mutex,
            "rwlock" => Kind::RwLock,
            "semaphore" => Kind::Semaphore,
            _ => return None,
        };
        let capacity = capacity.parse::<u32>().ok().filter(|c| *c > 0)?;
        let value: Value = serde_json::from_str(rest).ok()?;
        let claim = Some(ClaimId::from_hex(&value.claim)?);
        Some(Self { claim, kind, capacity, value })
    }

    /// Another client knows one kind of lock only.
    fn by_others(lease: i64) -> Self {
        let label = format!("another client of etcd, lease {lease:x}");
        let holder = Holder { host: "?".into(), pid: 0, label };
        let value = Value { claim: String::new(), weight: 1, departed: false, since: 0, holder };
        Self { claim: None, kind: Kind::Mutex, capacity: 1, value }
    }
}

impl Entry {
    fn of(kv: &KeyValue) -> Option<Self> {
        let token = u64::try_from(kv.create_revision).ok().and_then(Token::new)?;
        let written = Written::by_us(&kv.value).unwrap_or_else(|| Written::by_others(kv.lease));
        let Written { claim, kind, capacity, value } = written;
        Some(Self {
            key: kv.key.clone(),
            token,
            written: kv.mod_revision,
            lease: kv.lease,
            claim,
            kind,
            capacity,
            weight: value.weight.clamp(1, capacity),
            departed: value.departed,
            holder: Arc::new(value.holder),
            since: value.since,
        })
    }

    fn since(&self) -> Duration {
        match self.since {
            0 => Duration::ZERO,
            since => Duration::from_micros(wall_micros().saturating_sub(since)),
        }
    }
}

impl Queue {
    /// The queue that these keys are, in whatever order they come.
    pub(super) fn of<'a>(prefix: &[u8], kvs: impl IntoIterator<Item = &'a KeyValue>) -> Self {
        let places = kvs.into_iter().filter(|kv| is_place(prefix, kv));
        let mut entries: Vec<Entry> = places.filter_map(Entry::of).collect();
        // Keys that one transaction made have one revision: their own order is as good as any.
        entries.sort_by(|a, b| (a.token, &a.key).cmp(&(b.token, &b.key)));
        let capacity = entries.first().map_or(0, |e| e.capacity);
        let granted = granted(entries.iter().map(|e| e.weight), capacity);
        Self { entries, granted }
    }

    /// What the lock is, by whoever came first.
    pub(super) fn kind(&self) -> Option<(Kind, u32)> {
        self.entries.first().map(|e| (e.kind, e.capacity))
    }

    /// Whether another claim would hold at once.
    pub(super) fn fits(&self, claim: &Claim) -> bool {
        let weights = self.entries.iter().map(|e| e.weight).chain([claim.weight]);
        granted(weights, claim.capacity) > self.entries.len()
    }

    pub(super) fn position(&self, key: &[u8]) -> Option<usize> {
        self.entries.iter().position(|e| e.key == key)
    }

    /// Where a claim stands, if the values were read.
    pub(super) fn find(&self, id: ClaimId) -> Option<usize> {
        self.entries.iter().position(|e| e.claim == Some(id))
    }

    /// Whether none behind this one was last written together with it.
    pub(super) fn is_last_written(&self, key: &[u8]) -> bool {
        let at = self.position(key).unwrap_or(self.entries.len());
        let (own, behind) = self.entries.split_at((at + 1).min(self.entries.len()));
        let own = own.last().map(|e| e.written);
        behind.iter().all(|e| Some(e.written) != own)
    }

    pub(super) fn holders(&self) -> Vec<HolderInfo> {
        let held = self.entries.iter().take(self.granted);
        held.map(|e| HolderInfo::new(Holder::clone(&e.holder), e.token, e.since())).collect()
    }

    pub(super) fn standing(&self, at: usize) -> Standing {
        match self.entries.get(at) {
            Some(entry) if entry.departed => Standing::Departed,
            Some(_) if at < self.granted => Standing::Holding,
            _ => Standing::Waiting,
        }
    }

    /// The queue for people; `remaining` of each lease, as far as it is known.
    pub(super) fn claims(&self, remaining: &[Option<Duration>]) -> Vec<ClaimInfo> {
        let shown = self.entries.iter().enumerate().map(|(at, e)| {
            ClaimInfo::new(
                self.standing(at),
                Holder::clone(&e.holder),
                Some(e.token),
                e.weight,
                e.since(),
                remaining.get(at).copied().flatten(),
            )
        });
        shown.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::Name;

    fn claim(name: &str, kind: Kind, weight: u32, capacity: u32) -> Claim {
        Claim::new(Name::new(name).unwrap(), kind, weight, capacity).unwrap()
    }

    fn kv(key: &[u8], revision: i64, value: Vec<u8>) -> KeyValue {
        let (create_revision, mod_revision) = (revision, revision);
        KeyValue { key: key.to_vec(), create_revision, mod_revision, value, lease: 7 }
    }

    #[test]
    fn s90_no_two_names_share_a_key() {
        let names = ["a", "a/b", "a/b/", "a//b", "/a", "a/../b", "b", "ä", "a/", "/"];
        for name in names {
            let key = kv(&key("ns/", name, 7), 1, Vec::new());
            assert_eq!(name_of("ns/", &key), Some(name));
            for other in names {
                assert_eq!(is_place(&prefix("ns/", other), &key), name == other, "{name} {other}");
            }
        }
    }

    #[test]
    fn what_is_not_a_lock_is_no_name() {
        let foreign = |key: &str, lease| KeyValue {
            key: key.as_bytes().to_vec(),
            create_revision: 1,
            mod_revision: 1,
            value: Vec::new(),
            lease,
        };
        assert_eq!(
            name_of("", &foreign("jobs/694d81417acd4754", 0x694d_8141_7acd_4754)),
            Some("jobs")
        );
        assert_eq!(name_of("", &foreign("jobs/694d81417acd4754", 1)), None);
        assert_eq!(name_of("", &foreign("config/a", 0)), None);
        assert_eq!(name_of("", &foreign(&format!("a/{}", "0".repeat(32)), 7)), None);
        assert_eq!(name_of("", &foreign("plain", 3)), None);
    }

    #[test]
    fn values_come_back_and_foreign_ones_are_a_mutex() {
        let claim = claim("s", Kind::Semaphore, 2, 5);
        let (p, k) = (prefix("", "s"), key("", "s", 7));
        let queue = Queue::of(&p, [&kv(&k, 9, value(&claim, false))]);
        let entry = &queue.entries[0];
        assert_eq!((entry.kind, entry.capacity, entry.weight), (Kind::Semaphore, 5, 2));
        assert_eq!((queue.granted, entry.token.get()), (1, 9));
        assert_eq!((entry.claim, queue.find(claim.id)), (Some(claim.id), Some(0)));
        assert_eq!(*entry.holder, *claim.holder);
        for strange in
            [&b""[..], b"host7", b"\xff", b"semaphore:x {}", b"mutex:0 {}", b"rwlock:3 []"]
        {
            let queue = Queue::of(&p, [&kv(b"s/1f", 3, strange.to_vec())]);
            assert_eq!(queue.kind(), Some((Kind::Mutex, 1)), "{strange:?}");
            assert_eq!(queue.entries[0].claim, None, "{strange:?}");
        }
    }

    #[test]
    fn s16_one_comparison_tells_the_kinds_apart() {
        let kinds = [
            (Kind::Mutex, 1),
            (Kind::Mutex, 2),
            (Kind::RwLock, 9),
            (Kind::RwLock, 90),
            (Kind::Semaphore, 5),
        ];
        let holds = |compare: &Compare, value: &[u8]| {
            let Some(Operand::Value(operand)) = &compare.operand else { panic!("no value") };
            match Relation::try_from(compare.result) {
                Ok(Relation::Less) => value < operand.as_slice(),
                Ok(Relation::Greater) => value > operand.as_slice(),
                _ => panic!("another relation"),
            }
        };
        for (kind, capacity) in kinds {
            let compares = agree(&claim("x", kind, 1, capacity), b"x/");
            for (other, others) in kinds.into_iter().chain([(Kind::Semaphore, 50)]) {
                let value = value(&claim("x", other, 1, others), false);
                let agreed = compares.iter().all(|c| holds(c, &value));
                assert_eq!(agreed, (kind, capacity) == (other, others), "{kind} {other}");
            }
            // Another client's.
            assert_eq!(
                compares.iter().all(|c| holds(c, b"")),
                (kind, capacity) == (Kind::Mutex, 1)
            );
        }
    }
}
