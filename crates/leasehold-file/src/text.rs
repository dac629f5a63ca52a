//! Hand-written reading and writing of a queue as the text of a control file.
//!
//! The format is serde's format of [`Queue`]. This code is only faster, because with thirty claims
//! serde took most of a section's time. The *written* text is byte for byte that of serde. The
//! hand-written *reader* accepts only text in exactly this form. All other text is passed to serde,
//! which also reports errors in it. So every file has the same meaning as with serde.
//!
//! Claims change often, but their holders stay the same. So the text of each holder is parsed once
//! and cached with the result.

use std::sync::Arc;

use leasehold_core::queue::{Entry, Queue};
use leasehold_core::store::ClaimState;
use leasehold_core::{ClaimId, Holder, Kind, Token};

/// Number of holders that are cached per lock.
const REMEMBERED: usize = 256;

const KINDS: [(Kind, &[u8]); 3] =
    [(Kind::Mutex, b"mutex"), (Kind::RwLock, b"rwlock"), (Kind::Semaphore, b"semaphore")];
const STATES: [(ClaimState, &[u8]); 3] = [
    (ClaimState::Holding, b"holding"),
    (ClaimState::Waiting, b"waiting"),
    (ClaimState::Cooldown, b"departed"),
];

/// Holders and their texts.
#[derive(Debug, Default)]
pub(super) struct Holders {
    known: Vec<(Vec<u8>, Arc<Holder>)>,
    /// Likely position of the next holder, because queues keep their order between sections.
    next: usize,
}

impl Holders {
    fn find(&mut self, is_it: impl Fn(&(Vec<u8>, Arc<Holder>)) -> bool) -> Option<usize> {
        let (before, after) = self.known.split_at(self.next.min(self.known.len()));
        let later = after.iter().position(&is_it).map(|i| before.len() + i);
        let found = later.or_else(|| before.iter().position(is_it))?;
        self.next = found + 1;
        Some(found)
    }

    fn remember(&mut self, text: Vec<u8>, holder: Arc<Holder>) {
        if self.known.len() >= REMEMBERED {
            self.known.clear();
        }
        self.known.push((text, holder));
        self.next = self.known.len();
    }

    fn write(&mut self, holder: &Arc<Holder>, text: &mut Vec<u8>) -> serde_json::Result<()> {
        if let Some(i) = self.find(|(_, known)| Arc::ptr_eq(known, holder)) {
            text.extend_from_slice(&self.known[i].0);
            return Ok(());
        }
        let written = serde_json::to_vec(&**holder)?;
        text.extend_from_slice(&written);
        self.remember(written, holder.clone());
        Ok(())
    }

    fn read(&mut self, text: &mut Words<'_>) -> Option<Arc<Holder>> {
        if let Some(i) = self.find(|(known, _)| text.0.starts_with(known)) {
            let (known, holder) = &self.known[i];
            text.0 = &text.0[known.len()..];
            return Some(holder.clone());
        }
        let mut parsed = serde_json::Deserializer::from_slice(text.0).into_iter::<Holder>();
        let holder = Arc::new(parsed.next()?.ok()?);
        let (value, rest) = text.0.split_at_checked(parsed.byte_offset())?;
        text.0 = rest;
        // Text in another form is parsed every time.
        if serde_json::to_vec(&*holder).is_ok_and(|ours| ours == value) {
            self.remember(value.to_vec(), holder.clone());
        }
        Some(holder)
    }
}

/// Writes `{"leasehold":FORMAT,"queue":QUEUE}`.
pub(super) fn write(
    format: u32,
    queue: &Queue,
    holders: &mut Holders,
    text: &mut Vec<u8>,
) -> serde_json::Result<()> {
    let entries = queue.entries();
    text.reserve(128 + entries.len() * 256);
    text.extend_from_slice(b"{\"leasehold\":");
    number(u64::from(format), text);
    text.extend_from_slice(b",\"queue\":{\"kind\":\"");
    text.extend_from_slice(word_of(&KINDS, &queue.kind()));
    text.extend_from_slice(b"\",\"capacity\":");
    number(u64::from(queue.capacity()), text);
    text.extend_from_slice(if queue.has_leases() {
        b",\"leases\":true,\"last\":"
    } else {
        b",\"leases\":false,\"last\":"
    });
    number(queue.last_token(), text);
    text.extend_from_slice(b",\"entries\":[");
    for (i, entry) in entries.enumerate() {
        if i > 0 {
            text.push(b',');
        }
        write_entry(entry, holders, text)?;
    }
    text.extend_from_slice(b"]}}");
    Ok(())
}

fn write_entry(e: &Entry, holders: &mut Holders, text: &mut Vec<u8>) -> serde_json::Result<()> {
    text.extend_from_slice(b"{\"id\":\"");
    digits(e.id, text);
    text.extend_from_slice(b"\",\"token\":");
    number(e.token.get(), text);
    text.extend_from_slice(b",\"weight\":");
    number(u64::from(e.weight), text);
    text.extend_from_slice(b",\"standing\":\"");
    text.extend_from_slice(word_of(&STATES, &e.state));
    text.extend_from_slice(b"\",\"since\":");
    number(e.since, text);
    if let Some(expires) = e.expires {
        text.extend_from_slice(b",\"expires\":");
        number(expires, text);
    }
    if e.lock_delay > 0 {
        text.extend_from_slice(b",\"lock_delay\":");
        number(e.lock_delay, text);
    }
    text.extend_from_slice(b",\"holder\":");
    holders.write(&e.holder, text)?;
    if !e.session.is_empty() {
        text.extend_from_slice(b",\"session\":");
        match e.session.bytes().all(is_plain) {
            true => {
                text.push(b'"');
                text.extend_from_slice(e.session.as_bytes());
                text.push(b'"');
            }
            false => serde_json::to_writer(&mut *text, &e.session)?,
        }
    }
    text.push(b'}');
    Ok(())
}

/// Parses a queue, if it has this format and the form that [`write`] produces.
pub(super) fn read(format: u32, text: &[u8], holders: &mut Holders) -> Option<Queue> {
    let mut text = Words(text);
    text.skip(b"{\"leasehold\":")?;
    (text.number()? == u64::from(format)).then_some(())?;
    text.skip(b",\"queue\":{\"kind\":\"")?;
    let kind = text.one_of(&KINDS)?;
    text.skip(b"\",\"capacity\":")?;
    let capacity = u32::try_from(text.number()?).ok()?;
    text.skip(b",\"leases\":false,\"last\":")?;
    let last = text.number()?;
    text.skip(b",\"entries\":[")?;
    let mut entries = Vec::with_capacity(text.0.len() / 192);
    while text.skip(b"]}}").is_none() {
        if !entries.is_empty() {
            text.skip(b",")?;
        }
        entries.push(read_entry(&mut text, holders)?);
    }
    let is_all = text.0.is_empty() || text.0 == b"\n";
    is_all.then(|| Queue::restored_without_leases(kind, capacity, last, entries))
}

fn read_entry(text: &mut Words<'_>, holders: &mut Holders) -> Option<Entry> {
    text.skip(b"{\"id\":\"")?;
    let id = text.id()?;
    text.skip(b"\",\"token\":")?;
    let token = Token::new(text.number()?)?;
    text.skip(b",\"weight\":")?;
    let weight = u32::try_from(text.number()?).ok()?;
    text.skip(b",\"standing\":\"")?;
    let state = text.one_of(&STATES)?;
    text.skip(b"\",\"since\":")?;
    let since = text.number()?;
    let expires = match text.skip(b",\"expires\":") {
        Some(()) => Some(text.number()?),
        None => None,
    };
    let lock_delay = match text.skip(b",\"lock_delay\":") {
        Some(()) => text.number()?,
        None => 0,
    };
    text.skip(b",\"holder\":")?;
    let holder = holders.read(text)?;
    let session = match text.skip(b",\"session\":\"") {
        Some(()) => text.plain()?,
        None => String::new(),
    };
    text.skip(b"}")?;
    Some(Entry { id, token, weight, state, since, expires, lock_delay, holder, session })
}

/// Text that is left to read.
struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn skip(&mut self, word: &[u8]) -> Option<()> {
        self.0 = self.0.strip_prefix(word)?;
        Some(())
    }

    fn one_of<T: Copy>(&mut self, words: &[(T, &[u8])]) -> Option<T> {
        words.iter().find(|(_, word)| self.skip(word).is_some()).map(|(meant, _)| *meant)
    }

    /// Reads a number without a sign or leading zeros.
    fn number(&mut self) -> Option<u64> {
        let digits = self.0.iter().take_while(|b| b.is_ascii_digit()).count();
        let (number, rest) = self.0.split_at(digits);
        if digits == 0 || (number[0] == b'0' && digits > 1) {
            return None;
        }
        self.0 = rest;
        number.iter().try_fold(0_u64, |n, b| n.checked_mul(10)?.checked_add(u64::from(b - b'0')))
    }

    /// Reads an id in lower case.
    fn id(&mut self) -> Option<ClaimId> {
        let (hex, rest) = self.0.split_at_checked(32)?;
        self.0 = rest;
        let id = hex.iter().try_fold(0_u128, |id, b| {
            let digit = match b {
                b'0'..=b'9' => b - b'0',
                b'a'..=b'f' => b - b'a' + 10,
                _ => return None,
            };
            Some(id << 4 | u128::from(digit))
        });
        id.map(ClaimId::from_u128)
    }

    /// Reads the rest of a string of letters and digits, including the closing quote.
    fn plain(&mut self) -> Option<String> {
        let len = self.0.iter().take_while(|b| is_plain(**b)).count();
        let (plain, rest) = self.0.split_at(len);
        self.0 = rest;
        self.skip(b"\"")?;
        (len > 0).then(|| String::from_utf8_lossy(plain).into_owned())
    }
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
}

fn word_of<'a, T: PartialEq>(words: &[(T, &'a [u8])], meant: &T) -> &'a [u8] {
    words.iter().find(|(one, _)| one == meant).map_or(b"", |(_, word)| word)
}

fn number(mut n: u64, text: &mut Vec<u8>) {
    let mut digits = [0; 20];
    let mut from = digits.len();
    loop {
        from -= 1;
        digits[from] = b'0' + u8::try_from(n % 10).unwrap_or(0);
        n /= 10;
        if n == 0 {
            break;
        }
    }
    text.extend_from_slice(&digits[from..]);
}

fn digits(id: ClaimId, text: &mut Vec<u8>) {
    let mut hex = [0; 32];
    for (two, byte) in hex.chunks_exact_mut(2).zip(id.as_u128().to_be_bytes()) {
        let digit = |n: u8| b"0123456789abcdef"[usize::from(n)];
        two.copy_from_slice(&[digit(byte >> 4), digit(byte & 15)]);
    }
    text.extend_from_slice(&hex);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::{Deserialize, Serialize};

    use super::*;

    const FORMAT: u32 = 1;

    #[derive(Serialize)]
    struct Written<'a> {
        leasehold: u32,
        queue: &'a Queue,
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Found {
        leasehold: u32,
        queue: Queue,
    }

    fn by_serde(queue: &Queue) -> String {
        serde_json::to_string(&Written { leasehold: FORMAT, queue }).unwrap()
    }

    fn by_hand(queue: &Queue, holders: &mut Holders) -> String {
        let mut text = Vec::new();
        write(FORMAT, queue, holders, &mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    fn any_entry() -> impl Strategy<Value = Entry> {
        let numbers = (1..=Token::MAX, any::<u128>(), any::<u32>(), any::<u64>());
        let word = || proptest::sample::select(vec!["", "h", "a0", "a\"b", "\\", "\n\0", "é}"]);
        let rest = (0..3_usize, any::<Option<u64>>(), 0..3_u64, word());
        let holder = (word(), any::<u32>(), word());
        (numbers, rest, holder).prop_map(|(numbers, rest, (host, pid, label))| {
            let (token, id, weight, since) = numbers;
            let (state, expires, lock_delay, session) = rest;
            Entry {
                id: ClaimId::from_u128(id),
                token: Token::new(token).unwrap(),
                weight,
                state: STATES[state].0,
                since,
                expires,
                lock_delay,
                holder: Arc::new(Holder { host: host.into(), pid, label: label.into() }),
                session: session.into(),
            }
        })
    }

    proptest! {
        #![proptest_config(testbed::cases())]

        // F44
        #[test]
        fn hand_written_format_matches_serde(
            entries in proptest::collection::vec(any_entry(), 0..5),
            (kind, capacity, last) in (0..3_usize, any::<u32>(), any::<u64>()),
        ) {
            let queue = Queue::restored_without_leases(KINDS[kind].0, capacity, last, entries);
            let text = by_serde(&queue);
            let mut holders = Holders::default();
            prop_assert_eq!(&by_hand(&queue, &mut holders), &text);
            // The queue is written with and without the cached holders.
            for mut holders in [holders, Holders::default()] {
                if let Some(read) = read(FORMAT, text.as_bytes(), &mut holders) {
                    prop_assert_eq!(&by_serde(&read), &text);
                    prop_assert_eq!(&by_hand(&read, &mut holders), &text);
                } else {
                    prop_assert!(!queue.entries().all(|e| e.session.bytes().all(is_plain)));
                }
            }
        }

        #[test]
        fn hand_written_reader_agrees_with_serde(text in testbed::texts(&[
            "{\"leasehold\":1,\"queue\":{\"kind\":\"semaphore\",\"capacity\":4,\"leases\":false,\"last\":7,\"entries\":[{\"id\":\"0123456789abcdef0123456789abcdef\",\"token\":6,\"weight\":3,\"standing\":\"holding\",\"since\":5,\"lock_delay\":9,\"holder\":{\"host\":\"h\",\"pid\":1},\"session\":\"s\"},{\"id\":\"1123456789abcdef0123456789abcdef\",\"token\":7,\"weight\":2,\"standing\":\"waiting\",\"since\":6,\"expires\":99,\"holder\":{\"host\":\"h\",\"pid\":2,\"label\":\"x\"}}]}}",
        ])) {
            let mut holders = Holders::default();
            if let Some(queue) = read(FORMAT, text.as_bytes(), &mut holders) {
                let found: Found = serde_json::from_str(&text)
                    .expect("serde rejects a text that was read by hand");
                prop_assert_eq!(found.leasehold, FORMAT);
                prop_assert_eq!(by_serde(&found.queue), by_hand(&queue, &mut holders));
            }
        }
    }

    #[test]
    fn more_holders_than_the_cache_keeps_round_trip() {
        let entry = |pid: u32| Entry {
            id: ClaimId::from_u128(pid.into()),
            token: Token::new(u64::from(pid) + 1).unwrap(),
            weight: 1,
            state: ClaimState::Waiting,
            since: 0,
            expires: None,
            lock_delay: 0,
            holder: Arc::new(Holder { host: "h".into(), pid, label: String::new() }),
            session: String::new(),
        };
        let entries = (0..700).map(entry).collect();
        let queue = Queue::restored_without_leases(Kind::Mutex, 1, 900, entries);
        let mut holders = Holders::default();
        for _ in 0..2 {
            let text = by_hand(&queue, &mut holders);
            assert_eq!(text, by_serde(&queue));
            let again = read(FORMAT, text.as_bytes(), &mut holders).unwrap();
            assert_eq!(by_serde(&again), text);
            assert!(holders.known.len() <= REMEMBERED);
        }
    }
}
