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
//!
//! *Who disagrees what the lock is holds alone.* Another client waits for all who came before and for
//! nobody who comes later, so whoever stands behind it waits for it: it weighs the whole capacity, and so
//! does every place whose kind or capacity is not that of the first ([`Queue::of`]).
//!
//! *Other versions of ours.* The key, the order, and the kind and capacity with which a value begins are
//! the same for ever: the comparisons of every version rest on them. The JSON behind may get more
//! fields, which older versions ignore, and which they cannot lose: nobody rewrites another's value.
//! What cannot be read behind a kind weighs the whole capacity: its claimant is waited for by all.
//!
//! *In doubt a key blocks, and in doubt nobody deletes it.* By a person's order only those go that are
//! certainly places: ours, and keys without a value that are named for the lease on which they hang, as
//! the Go client's mutex writes them ([`Entry::certain`]). A service's own record may lie there as well.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::leases::delay;
use super::proto::{Compare, KeyValue, Operand, Relation, Target};
use leasehold_core::kit::wall_micros;
use leasehold_core::queue::granted;
use leasehold_core::store::{ClaimInfo, Standing};
use leasehold_core::{Claim, ClaimId, Holder, HolderInfo, Kind, Token};

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
    /// How much of its lease is a lock-delay.
    pub(super) delay: Duration,
    /// It is a place in a lock's queue, and nothing else.
    pub(super) certain: bool,
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
    /// The lock-delay that its lease has behind its own time, in seconds.
    #[serde(default, skip_serializing_if = "is_zero")]
    delay: u64,
    holder: Holder,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(delay: &u64) -> bool {
    *delay == 0
}

/// A queue, or the front of one.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    pub(super) entries: Vec<Entry>,
    /// How many of the front hold.
    pub(super) granted: usize,
    /// Keys lie among these that are no places of this lock.
    pub(super) mixed: bool,
}

/// What the keys of a lock begin with.
pub(super) fn prefix(namespace: &str, name: &str) -> Vec<u8> {
    format!("{namespace}{name}/").into_bytes()
}

/// The key of a claim for this lock on this lease.
pub(super) fn key(namespace: &str, name: &str, lease: i64) -> Vec<u8> {
    format!("{namespace}{name}/{lease:x}").into_bytes()
}

/// What the keys begin with in which clients tell each other who was evicted, and where they end. Those of locks
/// have a slash behind the name.
pub(super) fn notices(namespace: &str) -> (Vec<u8>, Vec<u8>) {
    let from = format!("{namespace}leasehold:told:").into_bytes();
    let end = end_of(&from);
    (from, end)
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

/// As the Go client's mutex names its key: for the lease on which it hangs.
fn is_named_for_its_lease(kv: &KeyValue) -> bool {
    let id = kv.key.rsplit(|byte| *byte == b'/').next();
    id == Some(format!("{:x}", kv.lease).as_bytes())
}

/// Whether a place is one of ours whose holder has departed.
pub(super) fn is_departed(kv: &KeyValue) -> bool {
    Written::by_us(&kv.value).is_some_and(|written| written.value.departed)
}

/// The lock's name, if this may be the key of a place; its value need not have been read.
pub(super) fn name_of<'a>(namespace: &str, kv: &'a KeyValue) -> Option<&'a str> {
    let text = std::str::from_utf8(&kv.key).ok()?.strip_prefix(namespace)?;
    let (name, id) = text.rsplit_once('/')?;
    // A place whose holder has departed hangs on another lease, so it may be one if it is named for any.
    let may_be = id.len() <= 16 && i64::from_str_radix(id, 16).is_ok_and(|id| id > 0);
    (kv.lease != 0 && may_be).then_some(name)
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
    let delay = if departed { 0 } else { delay(claim).as_secs() };
    let (id, weight) = (claim.id.to_hex(), claim.weight);
    let value = Value { claim: id, weight, departed, since, delay, holder };
    let mut bytes = kind_text(claim.kind, claim.capacity).into_bytes();
    // Numbers and strings: nothing in it can fail.
    bytes.extend(serde_json::to_vec(&value).unwrap_or_default());
    bytes
}

/// The value of the same place with another weight; `None`: it is not one of ours.
pub(super) fn reweighed(value: &[u8], weight: u32) -> Option<Vec<u8>> {
    let Written { claim: Some(_), kind, capacity, mut value } = Written::by_us(value)? else {
        return None;
    };
    value.weight = weight;
    let mut bytes = kind_text(kind, capacity).into_bytes();
    // Numbers and strings: nothing in it can fail.
    bytes.extend(serde_json::to_vec(&value).unwrap_or_default());
    Some(bytes)
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
        let space = value.iter().position(|byte| *byte == b' ')?;
        let (kind, rest) = value.split_at(space);
        let (kind, capacity) = std::str::from_utf8(kind).ok()?.split_once(':')?;
        let kind = match kind {
            "mutex" => Kind::Mutex,
            "rwlock" => Kind::RwLock,
            "semaphore" => Kind::Semaphore,
            _ => return None,
        };
        let capacity = capacity.parse::<u32>().ok().filter(|c| *c > 0)?;
        let read = serde_json::from_slice(rest).ok().and_then(|value: Value| {
            let claim = Some(ClaimId::from_hex(&value.claim)?);
            Some(Self { claim, kind, capacity, value })
        });
        Some(read.unwrap_or_else(|| {
            let value = Value::unread(capacity, "another version of leasehold".into());
            Self { claim: None, kind, capacity, value }
        }))
    }

    /// Another client knows one kind of lock only.
    fn by_others(lease: i64) -> Self {
        let value = Value::unread(1, format!("another client of etcd, lease {lease:x}"));
        Self { claim: None, kind: Kind::Mutex, capacity: 1, value }
    }
}

impl Value {
    /// In place of one that says nothing to us.
    fn unread(weight: u32, label: String) -> Self {
        let holder = Holder { host: "?".into(), pid: 0, label };
        Self { claim: String::new(), weight, departed: false, since: 0, delay: 0, holder }
    }
}

impl Entry {
    fn of(kv: &KeyValue) -> Option<Self> {
        let token = u64::try_from(kv.create_revision).ok().and_then(Token::new)?;
        let by_us = Written::by_us(&kv.value);
        let certain = by_us.is_some() || kv.value.is_empty() && is_named_for_its_lease(kv);
        let written = by_us.unwrap_or_else(|| Written::by_others(kv.lease));
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
            delay: Duration::from_secs(value.delay),
            certain,
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
        let mut mixed = false;
        let places = kvs.into_iter().filter(|kv| {
            let is = is_place(prefix, kv);
            mixed |= !is;
            is
        });
        let mut entries: Vec<Entry> = places.filter_map(Entry::of).collect();
        // Keys that one transaction made have one revision: their own order is as good as any.
        entries.sort_by(|a, b| (a.token, &a.key).cmp(&(b.token, &b.key)));
        let first = entries.first().map(|e| (e.kind, e.capacity));
        let capacity = first.map_or(0, |(_, capacity)| capacity);
        for entry in entries.iter_mut().filter(|e| Some((e.kind, e.capacity)) != first) {
            entry.weight = capacity;
        }
        let granted = granted(entries.iter().map(|e| e.weight), capacity);
        Self { entries, granted, mixed }
    }

    /// What the lock is, by whoever came first.
    pub(super) fn kind(&self) -> Option<(Kind, u32)> {
        self.entries.first().map(|e| (e.kind, e.capacity))
    }

    /// What somebody takes the lock for who does not agree with this claim. After the first of them
    /// leaves, it is what all behind it have to agree with.
    pub(super) fn disagrees(&self, claim: &Claim) -> Option<(Kind, u32)> {
        let all = self.entries.iter().map(|e| (e.kind, e.capacity));
        all.into_iter().find(|what| *what != (claim.kind, claim.capacity))
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

    /// Tells by what is left of its lease, in whole seconds, whether a holder is gone and its lock-delay
    /// has begun; and what is to be shown as left, rounded up again.
    pub(super) fn tell_delay(&mut self, at: usize, left: &mut Option<Duration>) {
        let granted = self.granted;
        let Some(entry) = self.entries.get_mut(at) else { return };
        let whole = left.unwrap_or_default();
        // The delay is in whole seconds, so this is exact.
        entry.departed |= at < granted && !entry.delay.is_zero() && whole < entry.delay;
        let delay = if entry.departed { Duration::ZERO } else { entry.delay };
        *left = Some(match left {
            Some(left) => left.saturating_sub(delay) + Duration::from_secs(1),
            None => Duration::ZERO,
        });
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
    use leasehold_core::Name;

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
        // It may be a place whose holder has departed: its value tells.
        assert_eq!(name_of("", &foreign("jobs/694d81417acd4754", 1)), Some("jobs"));
        assert_eq!(name_of("", &foreign("sd/service-1", 7)), None);
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
        for strange in [&b""[..], b"host7", b"\xff", b"semaphore:x {}", b"mutex:0 {}", b"rwlock:3"]
        {
            let queue = Queue::of(&p, [&kv(b"s/1f", 3, strange.to_vec())]);
            assert_eq!(queue.kind(), Some((Kind::Mutex, 1)), "{strange:?}");
            assert_eq!(queue.entries[0].claim, None, "{strange:?}");
            assert!(!queue.entries[0].certain, "{strange:?}");
        }
        assert!(Queue::of(&p, [&kv(b"s/7", 3, Vec::new())]).entries[0].certain);
        assert!(!Queue::of(&p, [&kv(b"s/7", 3, b"10.0.0.1".to_vec())]).entries[0].certain);
    }

    #[test]
    fn f44_values_are_those_of_every_version() {
        let golden = include_str!("../golden/values.txt");
        let (p, k) = (prefix("", "s"), key("", "s", 7));
        let read = |value: &[u8]| Queue::of(&p, [&kv(&k, 9, value.to_vec())]).entries.remove(0);
        for line in golden.lines() {
            let entry = read(line.as_bytes());
            let mut same = claim("s", entry.kind, entry.weight, entry.capacity);
            same.id = entry.claim.unwrap();
            same.holder = entry.holder.clone();
            same.lock_delay = entry.delay;
            let written = String::from_utf8(value(&same, entry.departed)).unwrap();
            let since = |text: &str| text.split_once("\"since\":").unwrap().1[..16].to_owned();
            assert_eq!(written.replace(&since(&written), &since(line)), line);
            let heavier = reweighed(line.as_bytes(), entry.capacity).unwrap();
            assert_eq!(read(&heavier).weight, entry.capacity);
            assert_eq!(reweighed(&heavier, entry.weight).unwrap(), line.as_bytes());
            // What a later version may add is nothing to us.
            let newer = line.replacen('{', "{\"later\":{\"a\":[1]},", 1);
            assert_eq!(read(newer.as_bytes()).claim, entry.claim);
            // And what we cannot read leaves no room beside it.
            let unread = read(format!("{}\u{0}", line.split_once(' ').unwrap().0).as_bytes());
            assert_eq!(unread.capacity, 1, "without the space it is not ours");
            let unread = read(format!("{} 2", line.split_once(' ').unwrap().0).as_bytes());
            assert_eq!((unread.kind, unread.capacity), (entry.kind, entry.capacity));
            assert_eq!((unread.claim, unread.weight), (None, unread.capacity));
            assert!(unread.certain && !unread.departed);
        }
    }

    #[test]
    fn f03_whoever_disagrees_weighs_the_whole_capacity() {
        let shares = |revision, of| {
            let claim = claim("s", Kind::Semaphore, 1, of);
            kv(&key("", "s", revision), revision, value(&claim, false))
        };
        let foreign = |revision| kv(&key("", "s", revision), revision, Vec::new());
        let p = prefix("", "s");
        let granted = |kvs: &[KeyValue]| Queue::of(&p, kvs).granted;
        assert_eq!(granted(&[shares(1, 9), shares(2, 9), foreign(3), shares(4, 9)]), 2);
        assert_eq!(granted(&[foreign(3), shares(4, 9), shares(5, 9)]), 1);
        assert_eq!(granted(&[shares(1, 3), shares(2, 9), shares(3, 3)]), 1);
        let queue = Queue::of(&p, &[shares(1, 9), foreign(2)]);
        let asks = |of| claim("s", Kind::Semaphore, 1, of);
        assert_eq!(queue.disagrees(&asks(9)), Some((Kind::Mutex, 1)));
        assert!(!queue.fits(&asks(9)));
        assert_eq!(Queue::of(&p, &[shares(1, 9)]).disagrees(&asks(9)), None);
        assert_eq!(Queue::of(&p, &[shares(1, 9)]).disagrees(&asks(8)), Some((Kind::Semaphore, 9)));
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

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn places_from_outside_are_read_and_granted_no_more_than_there_is(
            texts in proptest::collection::vec(testbed::texts(&[
                "mutex:1 {\"claim\":\"0123456789abcdef0123456789abcdef\",\"weight\":1,\"since\":5,\"holder\":{\"host\":\"h\",\"pid\":1,\"label\":\"\"}}",
                "semaphore:9 {\"claim\":\"0123456789abcdef0123456789abcdef\",\"weight\":3,\"departed\":true,\"since\":18446744073709551615,\"delay\":5,\"holder\":{\"host\":\"h\",\"pid\":1,\"label\":\"\"}}",
                "",
            ]), 1..4),
        ) {
            let kvs: Vec<KeyValue> = texts.into_iter().zip(1..).map(|(text, revision)| {
                kv(&key("", "q", revision), revision, text.into_bytes())
            }).collect();
            let p = prefix("", "q");
            let queue = Queue::of(&p, &kvs);
            proptest::prop_assert!(queue.granted <= kvs.len());
            let claims = queue.claims(&vec![None; kvs.len()]);
            proptest::prop_assert_eq!(claims.len(), kvs.len());
            let _ = (queue.holders(), queue.kind());
        }
    }
}
