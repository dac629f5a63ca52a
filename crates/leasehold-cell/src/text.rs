//! Encodes and decodes the content of cells, without I/O. The input is untrusted. A value that does
//! not match our format exactly belongs to another program and is never overwritten.
//!
//! ```text
//! leasehold queue 1 NAME-PERCENT-ENCODED    a lock's queue
//! {"kind":"mutex",…}
//!
//! leasehold session 1                       a client's session
//! leasehold session 1 gone                  a client's session that has certainly ended
//! leasehold epoch 1 DIGITS closed           the epoch: since when the system has kept its data
//! leasehold epoch 1 DIGITS open a:1,b:1     the epoch of several systems, which are listed
//! ```
//!
//! A queue is validated when it is decoded, so that later code can rely on it. Weights are within
//! the capacity, tokens rise, each claim occurs once, and session IDs consist of digits. The memory
//! used is proportional to the length of the text, which is limited.

use std::collections::HashSet;

use leasehold_core::kit::{Escaped, unescape};
use leasehold_core::queue::Queue;
use leasehold_core::store::ClaimState;
use leasehold_core::{ClaimId, Error, ErrorKind, Name, Result, Token};

/// The format number in the headers below. A version of leasehold that changes the format increases
/// it.
const FORMAT: u32 = 1;
/// Prefixes of a queue's value: unframed, and framed as an object.
const FORMS: [&str; 2] = ["leasehold queue ", "leasehold object "];
/// The beginning of a queue in the current format.
const QUEUE: &str = "leasehold queue 1 ";
/// The value of a session.
pub(crate) const SESSION: &[u8] = b"leasehold session 1";
/// The marker that replaces a session that is gone, so that the session cannot be created again.
pub(crate) const GONE: &[u8] = b"leasehold session 1 gone";
/// The beginning of the value of an epoch.
const EPOCH: &str = "leasehold epoch 1 ";
/// The beginning of the message to the client of an evicted claim.
const EVICTED: &str = "evicted ";
/// Number of hexadecimal digits of the IDs of sessions and epochs.
const DIGITS: usize = 32;

/// Encodes a queue.
pub(crate) fn written(name: &Name, queue: &Queue, largest: usize) -> Result<Vec<u8>> {
    let mut text = format!("{QUEUE}{}\n", Escaped(name.as_str())).into_bytes();
    let json = serde_json::to_writer(&mut text, queue);
    json.map_err(|e| corrupt("cannot serialize the queue", "").with_source(e.to_string()))?;
    if text.len() > largest {
        let what = format!(
            "the queue of this lock has {} bytes, but a value can have at most {largest}",
            text.len()
        );
        let hint = "retry when fewer clients wait for this lock";
        return Err(Error::new(ErrorKind::Full, what).with_hint(hint));
    }
    Ok(text)
}

/// Decodes a value that [`written`] has encoded for the lock `name`.
pub(crate) fn read(name: &Name, value: &[u8]) -> Result<Queue> {
    let (theirs, queue) = parsed(value)?;
    if theirs.as_str().to_lowercase() == name.as_str().to_lowercase() && theirs != *name {
        let what = format!(
            "this store cannot distinguish \"{name}\" from \"{theirs}\": use names in lower case"
        );
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    if theirs != *name {
        let what = "another lock with a long name has the same key";
        return Err(Error::new(ErrorKind::Corrupt, what).with_hint("use a shorter lock name"));
    }
    Ok(queue)
}

/// Decodes the name and the queue in a cell.
pub(crate) fn parsed(value: &[u8]) -> Result<(Name, Queue)> {
    let foreign = || {
        corrupt(
            "the value of this key belongs to another program; it was left unchanged",
            "set another prefix or folder in the URL",
        )
    };
    let text = std::str::from_utf8(value).map_err(|_| foreign())?;
    if let Some(error) = FORMS.iter().find_map(|form| later(text, form)) {
        return Err(error);
    }
    let (name, json) =
        text.strip_prefix(QUEUE).and_then(|rest| rest.split_once('\n')).ok_or_else(foreign)?;
    let name = unescape(name).and_then(|name| Name::new(name).ok()).ok_or_else(foreign)?;
    let queue: Queue =
        serde_json::from_str(json).map_err(|e| foreign().with_source(e.to_string()))?;
    match flaw(&queue) {
        None => Ok((name, queue)),
        Some(flaw) => {
            let what = "the queue of this lock is corrupt; it was left unchanged";
            let hint = "when no client holds the lock, delete its key, or use another lock name";
            Err(corrupt(what, hint).with_source(flaw))
        }
    }
}

/// Returns an error if a newer version wrote the value. Programs are upgraded one after the other,
/// so an older one can read what a newer one wrote. Such a value is one of leasehold's, but this
/// version cannot decode it.
pub(crate) fn later(text: &str, sort: &str) -> Option<Error> {
    let (number, _) = text.strip_prefix(sort)?.split_once([' ', '\n'])?;
    let number: u32 = number.parse().ok().filter(|number| *number > FORMAT)?;
    let what = format!(
        "the value was written by a newer leasehold (format {number}, this version supports \
         {FORMAT}), and was left unchanged"
    );
    Some(Error::new(ErrorKind::Corrupt, what).with_hint("upgrade this leasehold"))
}

fn corrupt(what: &str, hint: &str) -> Error {
    let error = Error::new(ErrorKind::Corrupt, what);
    if hint.is_empty() { error } else { error.with_hint(hint) }
}

/// Returns the first flaw of the queue that leasehold would never write.
fn flaw(queue: &Queue) -> Option<&'static str> {
    let capacity = queue.capacity();
    let mut ids = HashSet::new();
    let mut last = 0;
    for entry in queue.entries() {
        let rises = std::mem::replace(&mut last, entry.token.get()) < entry.token.get();
        if !rises {
            return Some("its tokens do not rise");
        }
        if entry.weight == 0 || entry.weight > capacity {
            return Some("a claim's weight exceeds the capacity");
        }
        if entry.expires.is_some() || entry.state == ClaimState::Cooldown {
            return Some("a claim expires or is in a cooldown, which this store never writes");
        }
        if !is_id(&entry.session) {
            return Some("a claim has an invalid session");
        }
        if !ids.insert(entry.id) {
            return Some("a claim occurs twice");
        }
    }
    if last > queue.last_token() || queue.last_token() > Token::MAX {
        return Some("its last token is wrong");
    }
    let mut after_holders = queue.entries().skip_while(|entry| entry.state == ClaimState::Holding);
    if after_holders.any(|entry| entry.state == ClaimState::Holding) {
        return Some("a holder follows a waiter");
    }
    (capacity == 0 || queue.has_leases())
        .then_some("its capacity is 0, or it has leases of its own")
}

/// Returns the message that notifies a claim of its grant.
pub(crate) fn granted(id: ClaimId, token: Token) -> String {
    format!("granted {} {token}", id.to_hex())
}

/// Decodes a message that [`granted`] created.
pub(crate) fn parse_granted(message: &str) -> Option<(ClaimId, Token)> {
    let (id, token) = message.strip_prefix("granted ")?.split_once(' ')?;
    Some((ClaimId::from_hex(id)?, Token::new(token.parse().ok()?)?))
}

/// Returns the message that notifies a claim's client of its eviction.
pub(crate) fn evicted(id: ClaimId) -> String {
    format!("{EVICTED}{}", id.to_hex())
}

/// Decodes a message that [`evicted`] created.
pub(crate) fn parse_evicted(message: &str) -> Option<ClaimId> {
    ClaimId::from_hex(message.strip_prefix(EVICTED)?)
}

/// Returns whether the text is the ID of a session or an epoch.
fn is_id(text: &str) -> bool {
    text.len() == DIGITS && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// A period in which the system has lost no data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Epoch {
    pub(crate) id: String,
    /// Whether all holds that the system may have lost have ended.
    pub(crate) is_open: bool,
    /// The systems that the lock names are distributed over (see `Options::members`), as given by
    /// the client that began the epoch.
    pub(crate) members: Option<String>,
}

impl Epoch {
    pub(crate) fn written(&self) -> Vec<u8> {
        let state = if self.is_open { "open" } else { "closed" };
        let members = self.members.iter().map(|members| format!(" {members}"));
        format!("{EPOCH}{} {state}{}", self.id, members.collect::<String>()).into_bytes()
    }

    pub(crate) fn read(value: &[u8]) -> Result<Self> {
        let parse = || {
            let text = std::str::from_utf8(value).ok()?;
            let (id, rest) = text.strip_prefix(EPOCH)?.split_once(' ')?;
            let (state, members) = match rest.split_once(' ') {
                Some((state, members)) => (state, Some(members.to_owned())),
                None => (rest, None),
            };
            let is_plain = |text: &String| {
                !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic())
            };
            let is_open = match state {
                "open" => true,
                "closed" => false,
                _ => return None,
            };
            let is_ours = is_id(id) && members.as_ref().is_none_or(is_plain);
            is_ours.then(|| Self { id: id.to_owned(), is_open, members })
        };
        let text = std::str::from_utf8(value).unwrap_or_default();
        parse().ok_or_else(|| later(text, "leasehold epoch ").unwrap_or_else(foreign_epoch))
    }
}

fn foreign_epoch() -> Error {
    corrupt(
        "the key that ends with \"e\" under this prefix belongs to another program",
        "set another prefix in the URL",
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use leasehold_core::queue::StoreTime;
    use leasehold_core::store::{Evict, Mode};
    use leasehold_core::{Claim, Kind, MAX_NAME_BYTES, MAX_READERS};
    use proptest::prelude::*;

    use super::*;

    const LARGEST: usize = 1 << 20;
    const SESSION_ID: &str = "0123456789abcdef0123456789abcdef";

    fn name() -> Name {
        Name::new("a b/é").unwrap()
    }

    fn queue(kind: Kind, capacity: u32, weights: &[u32]) -> Queue {
        let mut queue = Queue::new(kind, capacity, false);
        for (i, &weight) in weights.iter().enumerate() {
            let mut claim = Claim::new(name(), kind, weight, capacity).unwrap();
            claim.lock_delay = Duration::from_micros(i as u64);
            let at = StoreTime { now: 5, stamp: 1_000_000 };
            queue.join(&claim, Mode::Wait, at, SESSION_ID).unwrap();
        }
        queue
    }

    fn text(queue: &Queue) -> Vec<u8> {
        written(&name(), queue, LARGEST).unwrap()
    }

    #[test]
    fn encoded_data_is_decoded_unchanged() {
        let samples = [
            queue(Kind::Mutex, 1, &[]),
            queue(Kind::Mutex, 1, &[1, 1]),
            queue(Kind::Semaphore, 5, &[2, 3, 1]),
            queue(Kind::RwLock, MAX_READERS, &[1, MAX_READERS, 1]),
        ];
        for queue in samples {
            let again = read(&name(), &text(&queue)).unwrap();
            assert_eq!(text(&again), text(&queue));
            assert_eq!(again.last_token(), queue.last_token());
        }
        for members in [None, Some("a:1,[::1]:2".to_owned())] {
            let epoch = Epoch { id: SESSION_ID.into(), is_open: members.is_none(), members };
            assert_eq!(Epoch::read(&epoch.written()).unwrap(), epoch);
        }
    }

    // F44
    /// Deployed clients write exactly these bytes. If the format changed, those clients could not
    /// use the locks, or mutual exclusion with them would be broken.
    #[test]
    fn value_format_is_the_same_in_every_version() {
        let value = concat!(
            "leasehold queue 1 a%20b%2F%C3%A9\n",
            r#"{"kind":"semaphore","capacity":5,"leases":false,"last":1000001,"entries":["#,
            r#"{"id":"d559baa2a239f24eb8a1c609688eb42a","token":1000000,"weight":5,"standing":"holding","#,
            r#""since":5,"lock_delay":1,"holder":{"host":"vm","pid":6480},"#,
            r#""session":"0123456789abcdef0123456789abcdef"},"#,
            r#"{"id":"1d9760d9d5c0218b97ff16940f7a5ca8","token":1000001,"weight":1,"standing":"waiting","#,
            r#""since":5,"holder":{"host":"vm","pid":6480,"label":"l"},"#,
            r#""session":"0123456789abcdef0123456789abcdef"}]}"#,
        );
        assert_eq!(
            String::from_utf8(text(&read(&name(), value.as_bytes()).unwrap())).unwrap(),
            value
        );
        for (value, is_open, members) in [
            ("leasehold epoch 1 0123456789abcdef0123456789abcdef open", true, None),
            (
                "leasehold epoch 1 0123456789abcdef0123456789abcdef closed a:1,b",
                false,
                Some("a:1,b"),
            ),
        ] {
            let epoch = Epoch::read(value.as_bytes()).unwrap();
            assert_eq!((epoch.is_open, epoch.members.as_deref()), (is_open, members));
            assert_eq!(epoch.written(), value.as_bytes());
        }
        let (id, token) = parse_granted("granted a0b562a53633bf84fffe8c7c952aa902 7").unwrap();
        assert_eq!(granted(id, token), "granted a0b562a53633bf84fffe8c7c952aa902 7");
        assert_eq!(parse_evicted(&evicted(id)), Some(id));
        assert_eq!(evicted(id), "evicted a0b562a53633bf84fffe8c7c952aa902");
    }

    #[test]
    fn grant_and_eviction_messages_are_distinct() {
        let (id, token) = (ClaimId::random().unwrap(), Token::new(7).unwrap());
        let (granted, gone) = (granted(id, token), evicted(id));
        assert_eq!((parse_granted(&granted), parse_evicted(&granted)), (Some((id, token)), None));
        assert_eq!((parse_granted(&gone), parse_evicted(&gone)), (None, Some(id)));
        assert_eq!(parse_evicted("evicted me"), None);
    }

    // S90
    #[test]
    fn foreign_values_are_reported_and_names_are_never_confused() {
        let other = Name::new("other").unwrap();
        let message = |result: Result<Queue>| result.map(drop).unwrap_err().to_string();
        assert!(
            message(read(&other, &text(&queue(Kind::Mutex, 1, &[1]))))
                .contains("another lock with a long name")
        );
        let damaged = |from: &str, to: &str| {
            let text = String::from_utf8(text(&queue(Kind::Mutex, 1, &[1, 1]))).unwrap();
            assert!(text.contains(from), "{text}");
            text.replacen(from, to, 1).into_bytes()
        };
        for bad in [
            b"".to_vec(),
            b"42".to_vec(),
            b"leasehold queue 0 a\n{}".to_vec(),
            b"\xff".to_vec(),
            damaged(SESSION_ID, "x y"),
            damaged("\"capacity\":1", "\"capacity\":0"),
            damaged("\"weight\":1", "\"weight\":0"),
            damaged("\"leases\":false", "\"leases\":true"),
            damaged("1000001", "1000000"),
            damaged("\"waiting\"", "\"departed\""),
            damaged("\"holding\"", "\"waiting\"").replacen_second(),
            damaged("\"kind\"", "\"new\":1,\"kind\""),
        ] {
            let error = read(&name(), &bad).map(drop).unwrap_err();
            let shown = String::from_utf8_lossy(&bad);
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{shown}");
            assert!(format!("{error:#}").contains("was left unchanged"), "{shown}: {error}");
        }
    }

    trait Second {
        /// Makes the last waiter a holder.
        fn replacen_second(self) -> Self;
    }

    impl Second for Vec<u8> {
        fn replacen_second(self) -> Self {
            let text = String::from_utf8(self).unwrap();
            let at = text.rfind("\"waiting\"").unwrap();
            format!("{}\"holding\"{}", &text[..at], &text[at + 9..]).into_bytes()
        }
    }

    #[test]
    fn oversized_queue_is_refused_as_full() {
        let error = written(&name(), &queue(Kind::Mutex, 1, &[1; 9]), 500).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full);
    }

    /// Checks that a queue can be used if it can be decoded.
    fn is_usable(value: &[u8]) {
        let Ok((name, mut queue)) = parsed(value) else { return };
        assert!(name.as_str().len() <= MAX_NAME_BYTES && queue.entries().len() <= value.len() / 50);
        let again = parsed(&written(&name, &queue, LARGEST).unwrap()).unwrap();
        assert_eq!(again.0, name);
        let claim = Claim::new(name, queue.kind(), 1, queue.capacity()).unwrap();
        let at = StoreTime { now: 7, stamp: 7 };
        let last = queue.last_token();
        if queue.join(&claim, Mode::Wait, at, SESSION_ID).is_ok() {
            assert!(queue.last_token() > last || last == Token::MAX);
        }
        queue.leave(claim.id, None, 8);
        queue.retain(9, |entry| entry.weight > 1);
        queue.evict(Evict::Holders, 9);
        let _ = (queue.claims(u64::MAX), queue.take_fresh_grants());
    }

    proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_bytes_are_read_or_refused(value in proptest::collection::vec(any::<u8>(), 0..300)) {
            is_usable(&value);
            let _ = Epoch::read(&value);
        }

        #[test]
        fn damaged_queues_are_read_or_refused(
            weights in proptest::collection::vec(1..4u32, 0..5),
            cuts in proptest::collection::vec((any::<prop::sample::Index>(), 0..4usize, any::<u8>()), 0..6),
        ) {
            let mut value = text(&queue(Kind::Semaphore, 5, &weights));
            for (at, what, byte) in cuts {
                let at = at.index(value.len().max(1));
                match what {
                    0 if at < value.len() => value[at] = byte,
                    1 => value.insert(at.min(value.len()), byte),
                    2 if at < value.len() => drop(value.remove(at)),
                    3 => value.extend_from_within(at.min(value.len())..),
                    _ => {}
                }
            }
            is_usable(&value);
        }

        #[test]
        fn damaged_texts_are_read_or_refused(text in testbed::texts(&[
            "leasehold queue 1 a\n{\"kind\":\"mutex\",\"capacity\":1,\"leases\":false,\"last\":1,\"entries\":[]}",
            "leasehold epoch 1 0123456789abcdef0123456789abcdef open",
            "leasehold epoch 1 0123456789abcdef0123456789abcdef closed a:1,b:2",
        ])) {
            is_usable(text.as_bytes());
            if let Ok(epoch) = Epoch::read(text.as_bytes()) {
                prop_assert_eq!(epoch.written(), text.into_bytes());
            }
        }
    }
}
