//! One request to the bucket, and what its answer means.
//!
//! - *A look* goes to the stream's leader (`STREAM.MSG.GET`), whatever `allow_direct` says: copies may be
//!   behind. A leader that was replaced and does not know it may be, too. What is older than what we know of a
//!   key is taken for no answer.
//! - *A write* names the number of the value that it replaces (`Nats-Expected-Last-Subject-Sequence`), or 0.
//!   A marker that something was here is nothing, and its number is what a creation names.
//! - *A life* is told in whole seconds (`Nats-TTL`), never fewer than asked for.

use std::collections::HashMap;
use std::error::Error as _;
use std::fmt;
use std::sync::Mutex;
use std::time::Duration;

use async_nats::header::{
    HeaderMap, NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, NATS_MARKER_REASON, NATS_MESSAGE_TTL,
};
use async_nats::jetstream::context::PublishErrorKind;
use async_nats::jetstream::stream::{LastRawMessageErrorKind, Stream};
use async_nats::jetstream::{self, Context};
use leasehold_core::kit::locked;
use leasehold_core::{Clock, Error, ErrorKind, Moment, Result};

use super::fault::{self, Doing};
use crate::cells::{Answer, Found, Request, Version};
use crate::text::SESSION;

/// What clients of the bucket say in a header of what they remove.
const OPERATION: &str = "KV-Operation";
/// How long a marker stays that something was removed: others may watch the bucket.
const MARKER: Duration = Duration::from_secs(60);
/// For longer nobody leads who was replaced.
const BEHIND: Duration = Duration::from_secs(30);
/// How long it is believed how full the bucket is.
const ROOM: Duration = Duration::from_secs(2);
/// What a message takes beside its key and value, about.
const MESSAGE: usize = 150;
/// Of how many keys is known how new they are.
const MOST: usize = 16_384;

/// The way to the bucket.
pub(super) struct Link {
    context: Context,
    bucket: Stream<()>,
    /// What the keys' subjects begin with.
    subjects: String,
    servers: String,
    newest: Newest,
    /// The session of this client, which is touched.
    ours: Mutex<Option<String>>,
    /// How much the bucket may have; `None`: no limit.
    most: Option<u64>,
    /// How much it had, and when that was asked.
    used: tokio::sync::Mutex<Option<(u64, Moment)>>,
}

/// The newest number that is known of a key, and since when.
#[derive(Default)]
struct Newest {
    all: Mutex<HashMap<String, (u64, Moment)>>,
    clock: Clock,
}

impl Newest {
    /// The least number that a look may show that is sent now. A bucket that was made anew begins to count
    /// anew, so that what was known long ago is nothing.
    fn least(&self, key: &str) -> u64 {
        let now = self.clock.now();
        let all = locked(&self.all);
        all.get(key).filter(|(_, at)| now.since(*at) < BEHIND).map_or(0, |(number, _)| *number)
    }

    /// An answer showed this number, and was to show so much at least. Of two that come at the same time,
    /// the older may come last.
    fn note(&self, key: &str, number: u64, least: u64) {
        let now = self.clock.now();
        let mut all = locked(&self.all);
        if all.len() >= MOST && !all.contains_key(key) {
            all.clear();
        }
        let (newest, at) = all.entry(key.to_owned()).or_insert((number, now));
        if number >= *newest || least == 0 {
            (*newest, *at) = (number, now);
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("subjects", &self.subjects).finish_non_exhaustive()
    }
}

/// What is under a key: its number, and the value, if it is not only a marker.
struct Seen {
    number: u64,
    value: Option<Vec<u8>>,
}

/// How many whole seconds.
fn seconds(lives: Duration) -> u64 {
    (lives.as_secs() + u64::from(lives.subsec_nanos() > 0)).max(1)
}

/// The key as a part of a subject: a token for each part of it. `%` stands in escapes only, and `=` in
/// none of our keys.
fn subject_of(key: &str) -> String {
    key.replace('.', "=2E").replace('~', "=7E").replace('%', "=").replace(':', ".")
}

/// Back again: perhaps with an escape more, which means the same.
fn key_of(subject: &str) -> String {
    subject.replace('.', ":").replace('=', "%")
}

/// Whether this is the key of a lock's queue.
fn is_queue(key: &str) -> bool {
    let kind = key.rsplit_once(':').map_or("", |(kind, _)| kind);
    kind.ends_with(['l', 'h'])
}

impl Link {
    pub(super) fn new(
        context: Context,
        bucket: Stream<()>,
        subjects: String,
        servers: String,
        most: i64,
    ) -> Self {
        let most = u64::try_from(most).ok().filter(|most| *most > 0);
        let (newest, ours, used) = Default::default();
        Self { context, bucket, subjects, servers, newest, ours, most, used }
    }

    pub(super) async fn one(&self, request: Request) -> Result<Answer> {
        match request {
            Request::Get { key } => Ok(match self.look(&key).await? {
                Some(Seen { number, value: Some(value) }) => {
                    let version = Version(number.to_string());
                    Answer::Found(Found { value, version, remaining: None })
                }
                _ => Answer::Absent,
            }),
            Request::Create { key, value, lives } => self.create(&key, value, lives).await,
            Request::Replace { key, value, version, lives } => {
                self.write(&key, value, number(&version)?, lives, false).await
            }
            Request::Touch { key, value, version, lives } => {
                if locked(&self.ours).as_ref() != Some(&key) {
                    *locked(&self.ours) = Some(key.clone());
                }
                self.write(&key, value, number(&version)?, Some(lives), false).await
            }
            Request::Remove { key, version } => {
                let removed = self.write(&key, Vec::new(), number(&version)?, Some(MARKER), true);
                Ok(match removed.await? {
                    Answer::Written(_) => Answer::Done,
                    other => other,
                })
            }
        }
    }

    /// Whether there is room for a new name or a new client, so that those who hold can renew.
    async fn has_room(&self, more: usize) -> Result<bool> {
        let Some(most) = self.most else { return Ok(true) };
        let mut used = self.used.lock().await;
        let now = self.newest.clock.now();
        let fresh = used.filter(|(_, at)| now.since(*at) < ROOM);
        let bytes = match fresh {
            Some((bytes, _)) => bytes,
            None => {
                let info = self.bucket.get_info().await;
                let info = info.map_err(|error| fault::unreachable(&self.servers, error))?;
                *used = Some((info.state.bytes, now));
                info.state.bytes
            }
        };
        let has_room = bytes <= most / 5 * 4;
        if has_room && let Some((bytes, _)) = &mut *used {
            *bytes = bytes.saturating_add(u64::try_from(more + MESSAGE).unwrap_or(u64::MAX));
        }
        Ok(has_room)
    }

    async fn create(&self, key: &str, value: Vec<u8>, lives: Option<Duration>) -> Result<Answer> {
        if (is_queue(key) || value == SESSION) && !self.has_room(key.len() + value.len()).await? {
            let what = "the bucket is full to four fifths of its max_bytes, and the rest is kept for those who hold \
                        locks: raise its max_bytes";
            return Err(Error::new(ErrorKind::Full, what));
        }
        match self.write(key, value.clone(), 0, lives, false).await? {
            // It was here, and was removed.
            Answer::Refused => match self.look(key).await? {
                Some(Seen { number, value: None }) => {
                    self.write(key, value, number, lives, false).await
                }
                _ => Ok(Answer::Refused),
            },
            other => Ok(other),
        }
    }

    /// Whether a value that was there a moment ago is there: a queue, and a session that this client touches. Another
    /// client's session may have ended.
    fn lasts(&self, key: &str) -> bool {
        is_queue(key) || locked(&self.ours).as_deref() == Some(key)
    }

    async fn look(&self, key: &str) -> Result<Option<Seen>> {
        let subject = format!("{}{}", self.subjects, subject_of(key));
        let least = self.newest.least(key);
        let found = match self.bucket.get_last_raw_message_by_subject(&subject).await {
            Ok(found) => found,
            Err(error) => {
                return match error.kind() {
                    // Nothing, where something was a moment ago: what ended by itself since, or an old answer. A queue
                    // does not end so soon, nor does a session that is touched.
                    LastRawMessageErrorKind::NoMessageFound if least > 0 && self.lasts(key) => {
                        let what = "a member of NATS does not know a value that was there a moment ago: it may be \
                                    behind the others";
                        Err(Error::new(ErrorKind::Unreachable, what))
                    }
                    LastRawMessageErrorKind::NoMessageFound => Ok(None),
                    LastRawMessageErrorKind::JetStream(error) => {
                        Err(fault::refused(&self.servers, &error, Doing::Asks))
                    }
                    _ => Err(fault::unreachable(&self.servers, error)),
                };
            }
        };
        if found.sequence < least {
            let what = "a former leader of the NATS cluster sent a stale reply";
            return Err(Error::new(ErrorKind::Unreachable, what).with_hint("retry"));
        }
        self.newest.note(key, found.sequence, least);
        let has = |header: &str| found.headers.get(header).is_some();
        let is_marker = has(OPERATION) || found.headers.get(NATS_MARKER_REASON).is_some();
        let value = (!is_marker).then(|| found.payload.to_vec());
        Ok(Some(Seen { number: found.sequence, value }))
    }

    /// Writes it, if the number of what is there is `expected`.
    async fn write(
        &self,
        key: &str,
        value: Vec<u8>,
        expected: u64,
        lives: Option<Duration>,
        is_marker: bool,
    ) -> Result<Answer> {
        let mut headers = HeaderMap::new();
        headers.insert(NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, expected.to_string());
        if let Some(lives) = lives {
            headers.insert(NATS_MESSAGE_TTL, seconds(lives).to_string());
        }
        if is_marker {
            headers.insert(OPERATION, "DEL");
        }
        let subject = format!("{}{}", self.subjects, subject_of(key));
        let sent = async {
            self.context.publish_with_headers(subject, headers, value.into()).await?.await
        };
        let error = match sent.await {
            Ok(done) => {
                self.newest.note(key, done.sequence, expected);
                return Ok(Answer::Written(Version(done.sequence.to_string())));
            }
            Err(error) => error,
        };
        let told = error.source().and_then(|source| source.downcast_ref::<jetstream::Error>());
        match (error.kind(), told) {
            (PublishErrorKind::WrongLastSequence, _) => Ok(Answer::Refused),
            (_, Some(told)) if fault::is_refused(&told.error_code()) => Ok(Answer::Refused),
            (_, Some(told)) => Err(fault::refused(&self.servers, told, Doing::Asks)),
            (PublishErrorKind::StreamNotFound, _) => {
                let error = Error::new(ErrorKind::Unreachable, fault::NO_LEADER);
                Err(error.with_hint(fault::SEE_STREAM))
            }
            (PublishErrorKind::MaxPayloadExceeded, _) => {
                let what = "the queue of this lock is larger than NATS's max_payload";
                let hint = "retry when fewer clients wait for this lock, or raise max_payload";
                Err(Error::new(ErrorKind::Full, what).with_hint(hint))
            }
            _ => Err(fault::unreachable(&self.servers, error)),
        }
    }

    /// The keys that begin so.
    pub(super) async fn keys(&self, beginning: &str) -> Result<Vec<String>> {
        use futures_util::TryStreamExt;
        let wanted = subject_of(beginning);
        let tokens = wanted.rfind('.').map_or("", |dot| &wanted[..=dot]);
        let filter = format!("{}{tokens}>", self.subjects);
        let failed = |error| fault::unreachable(&self.servers, error);
        let all = self.bucket.info_with_subjects(filter).await.map_err(failed)?;
        let all: Vec<(String, usize)> = all.try_collect().await.map_err(failed)?;
        let keys = all.iter().filter_map(|(subject, _)| {
            let rest = subject.strip_prefix(&self.subjects)?.strip_prefix(&wanted)?;
            Some(format!("{beginning}{}", key_of(rest)))
        });
        Ok(keys.collect())
    }
}

fn number(version: &Version) -> Result<u64> {
    let ours = version.0.parse();
    ours.map_err(|_| {
        let message = format!("invalid revision number {:?}", version.0);
        Error::new(ErrorKind::Corrupt, message).with_hint("report this as a bug")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s90_any_key_is_a_subject_of_its_own() {
        let subject = subject_of("leasehold:l:a%20b%2F.~%C3%A9");
        assert_eq!(subject, "leasehold.l.a=20b=2F=2E=7E=C3=A9");
        assert_eq!(key_of(&subject), "leasehold:l:a%20b%2F%2E%7E%C3%A9");
        assert_eq!(subject_of(&key_of(&subject)), subject);
    }

    #[test]
    fn what_was_known_as_a_look_was_sent_is_the_least_that_it_shows() {
        let newest = Newest::default();
        assert_eq!(newest.least("a"), 0);
        newest.note("a", 7, 0);
        assert_eq!((newest.least("a"), newest.least("b")), (7, 0));
        // Sent before that was known, answered after it.
        newest.note("a", 9, 7);
        newest.note("a", 8, 7);
        assert_eq!(newest.least("a"), 9);
    }

    #[test]
    fn queues_are_told_from_sessions_by_their_keys() {
        for prefix in ["leasehold:", "l:", "", "mail"] {
            let keys = crate::keys::Keys::new(prefix.into(), 250);
            let name = leasehold_core::Name::new("s:a").unwrap();
            assert!(is_queue(&keys.lock(&name)), "{prefix}");
            assert!(!is_queue(&keys.session("0l")) && !is_queue(&keys.knock(&name)), "{prefix}");
        }
    }

    #[test]
    fn a_life_is_never_shorter_than_asked_for() {
        let told = |millis| seconds(Duration::from_millis(millis));
        assert_eq!([told(1), told(1_000), told(1_001), told(2_200)], [1, 1, 2, 3]);
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn s90_any_name_is_a_subject_and_is_read_from_it(name in testbed::texts(&["a.b", "*.>", "%2E=2E~"])) {
            let keys = crate::keys::Keys::new("leasehold:".into(), 250);
            if let Ok(name) = leasehold_core::Name::new(&name) {
                let key = keys.lock(&name);
                let subject = subject_of(&key);
                let is_part = |part: &str| {
                    !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_=/".contains(&b))
                };
                proptest::prop_assert!(subject.split('.').all(is_part), "{}", subject);
                let read = key_of(&subject);
                proptest::prop_assert_eq!(keys.name_of(&read), keys.name_of(&key));
                proptest::prop_assert_eq!(subject_of(&read), subject);
            }
        }

        #[test]
        fn any_subject_is_read_as_some_key(subject in testbed::texts(&["leasehold.l.a=20b=2F=2E=7E=C3=A9"])) {
            let keys = crate::keys::Keys::new("leasehold:".into(), 250);
            if let Some(name) = keys.name_of(&key_of(&subject)) {
                let again = key_of(&subject_of(&keys.lock(&name)));
                proptest::prop_assert!(again.contains(":h:") || keys.name_of(&again) == Some(name));
            }
        }
    }
}
