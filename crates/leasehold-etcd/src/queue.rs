//! A lock's queue in etcd: keys `NAME/LEASE`, in the order of their create revisions.
//!
//! **Keys.** A key that belongs to a claim in the queue is called an *entry*. `NAME` is the
//! unchanged name of the lock. `LEASE` is the lease that the key is attached to, in hexadecimal, as
//! in the official Go client. If another claim reuses the lease, it creates the same key again.
//! etcd keeps the history of a key until it compacts, and scans that history whenever it reads the
//! lock's keys. With a new key for each use, locks would become slower and slower. So a claim is
//! identified by the ID in the value, and an entry by the revision that created it, never by the
//! key alone.
//!
//! **Names.** A key belongs to the name before its *last* slash, so two names never share a
//! key. But the range of the keys of `a` also contains those of `a/b`, so a reader must ignore the
//! latter ([`is_place`]). The Go client does not, so its lock `a` also waits for the holders of
//! `a/b`.
//!
//! **Values.** The value of an entry that leasehold created begins with the lock's kind and
//! capacity. The format is ordered, so that comparisons of the whole range show whether all its
//! entries agree ([`agree`]). A key without such a value is an entry of another client if it is
//! attached to a lease. It then counts as a mutex.
//!
//! **A claim that disagrees about the lock's kind or capacity is granted alone.** A client other
//! than leasehold waits for all claims ahead of its own and for none after it. So all claims after
//! it have to wait for it, and it gets the weight of the whole capacity. The same applies to every
//! entry whose kind or capacity differs from that of the first entry ([`Queue::of`]).
//!
//! **Other versions of leasehold.** The key, the order, and the kind and capacity at the start of a
//! value never change, because the comparisons of all versions depend on them. The JSON after them
//! may get more fields. Older versions ignore these, and cannot lose them, because no client
//! rewrites another client's value. If the part after a kind cannot be read, the claim gets the
//! weight of the whole capacity, so that all others wait for it.
//!
//! **A doubtful key blocks the lock, but is never deleted.** An operator can only evict keys that
//! are certainly entries ([`Entry::certain`]). These are leasehold's own keys, and keys without a
//! value whose name contains the lease that they are attached to, as the Go client's mutex creates
//! them. Other keys may be records of another service.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::leases::delay;
use super::proto::{Compare, KeyValue, Operand, Relation, Target};
use leasehold_core::kit::wall_micros;
use leasehold_core::queue::granted;
use leasehold_core::store::{ClaimInfo, ClaimState};
use leasehold_core::{Claim, ClaimId, Holder, HolderInfo, Kind, Token};

/// One claim in a queue.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: Vec<u8>,
    /// The create revision.
    pub(super) token: Token,
    /// The revision that last wrote the key.
    pub(super) written: i64,
    pub(super) lease: i64,
    /// The claim's ID. `None` if leasehold did not create the entry, or the value cannot be read.
    pub(super) claim: Option<ClaimId>,
    pub(super) kind: Kind,
    pub(super) capacity: u32,
    pub(super) weight: u32,
    pub(super) departed: bool,
    /// The part of the lease that is a lock delay.
    pub(super) delay: Duration,
    /// Whether the key is certainly an entry in a lock's queue.
    pub(super) certain: bool,
    pub(super) holder: Arc<Holder>,
    /// When the claim joined, according to its own machine's clock, in microseconds since 1970. 0
    /// if unknown.
    since: u64,
}

/// The part of leasehold's values after the kind.
#[derive(Debug, Serialize, Deserialize)]
struct Value {
    claim: String,
    weight: u32,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    departed: bool,
    since: u64,
    /// The lock delay at the end of the lease, in seconds.
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
    /// How many claims at the front are holders.
    pub(super) granted: usize,
    /// Whether the range contains keys that are not entries of this lock.
    pub(super) mixed: bool,
}

/// Returns the prefix of a lock's keys.
pub(super) fn prefix(namespace: &str, name: &str) -> Vec<u8> {
    format!("{namespace}{name}/").into_bytes()
}

/// Returns the key of a claim for this lock on this lease.
pub(super) fn key(namespace: &str, name: &str, lease: i64) -> Vec<u8> {
    format!("{namespace}{name}/{lease:x}").into_bytes()
}

/// Returns the start and the end of the range of keys in which clients announce evictions. A lock's
/// keys are different, because they have a slash after the name.
pub(super) fn notices(namespace: &str) -> (Vec<u8>, Vec<u8>) {
    let from = format!("{namespace}leasehold:told:").into_bytes();
    let end = end_of(&from);
    (from, end)
}

/// Returns the end of the range of keys with this prefix.
pub(super) fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // This means all keys, and only an empty prefix leads here.
    vec![0]
}

/// Returns whether a key is an entry of the lock with this prefix. Other keys in the range belong
/// to locks with longer names, or to other programs.
pub(super) fn is_place(prefix: &[u8], kv: &KeyValue) -> bool {
    let id = kv.key.strip_prefix(prefix);
    kv.lease != 0 && id.is_some_and(|id| !id.is_empty() && !id.contains(&b'/'))
}

/// Returns whether the key is named after the lease that it is attached to, as the Go client's
/// mutex names its keys.
fn is_named_for_its_lease(kv: &KeyValue) -> bool {
    let id = kv.key.rsplit(|byte| *byte == b'/').next();
    id == Some(format!("{:x}", kv.lease).as_bytes())
}

/// Returns whether leasehold created the entry and it is in cooldown.
pub(super) fn is_departed(kv: &KeyValue) -> bool {
    Written::by_us(&kv.value).is_some_and(|written| written.value.departed)
}

/// Returns the lock's name if this may be the key of an entry. The value is not needed.
pub(super) fn name_of<'a>(namespace: &str, kv: &'a KeyValue) -> Option<&'a str> {
    let text = std::str::from_utf8(&kv.key).ok()?.strip_prefix(namespace)?;
    let (name, id) = text.rsplit_once('/')?;
    // An entry in cooldown is attached to another lease, so any lease in the name is accepted.
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

/// Returns the value of a claim's entry.
pub(super) fn value(claim: &Claim, departed: bool) -> Vec<u8> {
    let since = wall_micros();
    let holder = Holder::clone(&claim.holder);
    let delay = if departed { 0 } else { delay(claim).as_secs() };
    let (id, weight) = (claim.id.to_hex(), claim.weight);
    let value = Value { claim: id, weight, departed, since, delay, holder };
    let mut bytes = kind_text(claim.kind, claim.capacity).into_bytes();
    // Numbers and strings can always be serialized.
    bytes.extend(serde_json::to_vec(&value).unwrap_or_default());
    bytes
}

/// Returns the value of the same entry with another weight. Returns `None` if leasehold did not
/// create the value.
pub(super) fn converted(value: &[u8], weight: u32) -> Option<Vec<u8>> {
    let Written { claim: Some(_), kind, capacity, mut value } = Written::by_us(value)? else {
        return None;
    };
    value.weight = weight;
    let mut bytes = kind_text(kind, capacity).into_bytes();
    // Numbers and strings can always be serialized.
    bytes.extend(serde_json::to_vec(&value).unwrap_or_default());
    Some(bytes)
}

/// Returns comparisons that are true if all claims in the range are for a lock of this kind and
/// capacity. The values of a mutex are the smallest of all, so a mutex agrees with the empty values
/// of other clients.
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

/// A parsed value.
struct Written {
    /// `None` if another client wrote the value, or another version that cannot be read.
    claim: Option<ClaimId>,
    kind: Kind,
    capacity: u32,
    value: Value,
}

impl Written {
    /// Parses a value that leasehold wrote. Returns `None` if another client wrote it.
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

    /// Returns the value for a key of another client, which only knows mutexes.
    fn by_others(lease: i64) -> Self {
        let value = Value::unread(1, format!("another client of etcd, lease {lease:x}"));
        Self { claim: None, kind: Kind::Mutex, capacity: 1, value }
    }
}

impl Value {
    /// Returns a replacement for a value that cannot be read.
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
    /// Creates the queue from these keys, which may be in any order.
    pub(super) fn of<'a>(prefix: &[u8], kvs: impl IntoIterator<Item = &'a KeyValue>) -> Self {
        let mut mixed = false;
        let places = kvs.into_iter().filter(|kv| {
            let is = is_place(prefix, kv);
            mixed |= !is;
            is
        });
        let mut entries: Vec<Entry> = places.filter_map(Entry::of).collect();
        // Keys that one transaction created have the same revision. They are ordered by name.
        entries.sort_by(|a, b| (a.token, &a.key).cmp(&(b.token, &b.key)));
        let first = entries.first().map(|e| (e.kind, e.capacity));
        let capacity = first.map_or(0, |(_, capacity)| capacity);
        for entry in entries.iter_mut().filter(|e| Some((e.kind, e.capacity)) != first) {
            entry.weight = capacity;
        }
        let granted = granted(entries.iter().map(|e| e.weight), capacity);
        Self { entries, granted, mixed }
    }

    /// Returns the kind and capacity of the lock, which the first entry determines.
    pub(super) fn kind(&self) -> Option<(Kind, u32)> {
        self.entries.first().map(|e| (e.kind, e.capacity))
    }

    /// Returns the first kind and capacity in the queue that differ from the claim's. Once that
    /// entry is at the front, all entries after it have to agree with it.
    pub(super) fn disagrees(&self, claim: &Claim) -> Option<(Kind, u32)> {
        let all = self.entries.iter().map(|e| (e.kind, e.capacity));
        all.into_iter().find(|what| *what != (claim.kind, claim.capacity))
    }

    /// Returns whether `claim` would be granted immediately if it joined.
    pub(super) fn fits(&self, claim: &Claim) -> bool {
        let weights = self.entries.iter().map(|e| e.weight).chain([claim.weight]);
        granted(weights, claim.capacity) > self.entries.len()
    }

    pub(super) fn position(&self, key: &[u8]) -> Option<usize> {
        self.entries.iter().position(|e| e.key == key)
    }

    /// Returns the position of a claim, if the values were read.
    pub(super) fn find(&self, id: ClaimId) -> Option<usize> {
        self.entries.iter().position(|e| e.claim == Some(id))
    }

    /// Returns whether the write that last changed this entry changed no entry after it.
    pub(super) fn is_last_written(&self, key: &[u8]) -> bool {
        let at = self.position(key).unwrap_or(self.entries.len());
        let (own, behind) = self.entries.split_at((at + 1).min(self.entries.len()));
        let own = own.last().map(|e| e.written);
        behind.iter().all(|e| Some(e.written) != own)
    }

    /// Determines whether the holder at `at` is gone and its lock delay has begun. `left` is the
    /// remaining time of its lease in whole seconds, and is replaced with the remaining time to
    /// display, rounded up.
    pub(super) fn tell_delay(&mut self, at: usize, left: &mut Option<Duration>) {
        let granted = self.granted;
        let Some(entry) = self.entries.get_mut(at) else { return };
        let whole = left.unwrap_or_default();
        // The delay is in whole seconds, so this comparison is exact.
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

    pub(super) fn state_at(&self, at: usize) -> ClaimState {
        match self.entries.get(at) {
            Some(entry) if entry.departed => ClaimState::Cooldown,
            Some(_) if at < self.granted => ClaimState::Holding,
            _ => ClaimState::Waiting,
        }
    }

    /// Returns the queue for display. `remaining` contains the remaining time of each lease, if
    /// known.
    pub(super) fn claims(&self, remaining: &[Option<Duration>]) -> Vec<ClaimInfo> {
        let shown = self.entries.iter().enumerate().map(|(at, e)| {
            ClaimInfo::new(
                self.state_at(at),
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

    // S90
    #[test]
    fn no_two_names_share_a_key() {
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
    fn foreign_keys_are_not_listed_as_locks() {
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
        // It may be an entry in cooldown, which only its value shows.
        assert_eq!(name_of("", &foreign("jobs/694d81417acd4754", 1)), Some("jobs"));
        assert_eq!(name_of("", &foreign("sd/service-1", 7)), None);
        assert_eq!(name_of("", &foreign("config/a", 0)), None);
        assert_eq!(name_of("", &foreign(&format!("a/{}", "0".repeat(32)), 7)), None);
        assert_eq!(name_of("", &foreign("plain", 3)), None);
    }

    #[test]
    fn values_are_read_back_and_foreign_ones_count_as_a_mutex() {
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

    // F44
    #[test]
    fn value_format_is_the_same_in_every_version() {
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
            let heavier = converted(line.as_bytes(), entry.capacity).unwrap();
            assert_eq!(read(&heavier).weight, entry.capacity);
            assert_eq!(converted(&heavier, entry.weight).unwrap(), line.as_bytes());
            // Fields that a later version may add are ignored.
            let newer = line.replacen('{', "{\"later\":{\"a\":[1]},", 1);
            assert_eq!(read(newer.as_bytes()).claim, entry.claim);
            // A claim that cannot be read gets the whole capacity.
            let unread = read(format!("{}\u{0}", line.split_once(' ').unwrap().0).as_bytes());
            assert_eq!(unread.capacity, 1, "a value without the space belongs to another program");
            let unread = read(format!("{} 2", line.split_once(' ').unwrap().0).as_bytes());
            assert_eq!((unread.kind, unread.capacity), (entry.kind, entry.capacity));
            assert_eq!((unread.claim, unread.weight), (None, unread.capacity));
            assert!(unread.certain && !unread.departed);
        }
    }

    // F03
    #[test]
    fn claim_of_another_kind_takes_the_whole_capacity() {
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

    // S16
    #[test]
    fn one_comparison_distinguishes_lock_kinds() {
        let kinds = [
            (Kind::Mutex, 1),
            (Kind::Mutex, 2),
            (Kind::RwLock, 9),
            (Kind::RwLock, 90),
            (Kind::Semaphore, 5),
        ];
        let holds = |compare: &Compare, value: &[u8]| {
            let Some(Operand::Value(operand)) = &compare.operand else {
                panic!("the comparison has no value")
            };
            match Relation::try_from(compare.result) {
                Ok(Relation::Less) => value < operand.as_slice(),
                Ok(Relation::Greater) => value > operand.as_slice(),
                _ => panic!("unexpected relation"),
            }
        };
        for (kind, capacity) in kinds {
            let compares = agree(&claim("x", kind, 1, capacity), b"x/");
            for (other, others) in kinds.into_iter().chain([(Kind::Semaphore, 50)]) {
                let value = value(&claim("x", other, 1, others), false);
                let agreed = compares.iter().all(|c| holds(c, &value));
                assert_eq!(agreed, (kind, capacity) == (other, others), "{kind} {other}");
            }
            // The value of a claim of another client.
            assert_eq!(
                compares.iter().all(|c| holds(c, b"")),
                (kind, capacity) == (Kind::Mutex, 1)
            );
        }
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_queue_values_are_read_without_overgranting(
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
