//! Requests to the bucket, and the meaning of their replies.
//!
//! - *A read* goes to the stream's leader (`STREAM.MSG.GET`), regardless of `allow_direct`, because
//!   replicas may be behind. A leader that has not noticed that it was replaced may be behind too.
//!   So a reply that is older than what this client knows of a key is rejected.
//! - *A write* contains the number of the value that it replaces
//!   (`Nats-Expected-Last-Subject-Sequence`), or 0. The marker of a deleted value counts as no
//!   value, but a write that creates the value again contains the marker's number.
//! - *A lifetime* has whole seconds (`Nats-TTL`), and is rounded up.

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

/// The header of messages that delete a key.
const OPERATION: &str = "KV-Operation";
/// Time that the marker of a deleted key is kept, for other watchers of the bucket.
const MARKER: Duration = Duration::from_secs(60);
/// Maximum time for which a replaced leader continues to answer.
const BEHIND: Duration = Duration::from_secs(30);
/// Time for which the known size of the bucket is used before it is read again.
const ROOM: Duration = Duration::from_secs(2);
/// Approximate overhead of a message over its key and value, in bytes.
const MESSAGE: usize = 150;
/// Maximum number of keys whose latest number is remembered.
const MOST: usize = 16_384;

/// Access to the bucket.
pub(super) struct Link {
    context: Context,
    bucket: Stream<()>,
    /// The prefix of the keys' subjects.
    subjects: String,
    servers: String,
    newest: Newest,
    /// The key of this client's session, which is renewed.
    ours: Mutex<Option<String>>,
    /// Maximum size of the bucket; `None` if it is unlimited.
    most: Option<u64>,
    /// The size of the bucket, and when it was read.
    used: tokio::sync::Mutex<Option<(u64, Moment)>>,
}

/// The latest known sequence number of each key, and when it was recorded.
#[derive(Default)]
struct Newest {
    all: Mutex<HashMap<String, (u64, Moment)>>,
    clock: Clock,
}

impl Newest {
    /// Returns the lowest number that a read sent now may return. If a bucket is deleted and
    /// created again, its numbers start again, so numbers that were recorded longer than `BEHIND`
    /// ago are ignored.
    fn least(&self, key: &str) -> u64 {
        let now = self.clock.now();
        let all = locked(&self.all);
        all.get(key).filter(|(_, at)| now.since(*at) < BEHIND).map_or(0, |(number, _)| *number)
    }

    /// Records the number in a reply. `least` is the lowest number that was acceptable when the
    /// request was sent. A number below the recorded one is ignored, because concurrent replies can
    /// arrive out of order. With a `least` of 0, any number is recorded, because the bucket may
    /// have been created again.
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

/// The sequence number of a key's last message, and its value unless the message is only a marker.
struct Seen {
    number: u64,
    value: Option<Vec<u8>>,
}

/// Rounds up to whole seconds.
fn seconds(lives: Duration) -> u64 {
    (lives.as_secs() + u64::from(lives.subsec_nanos() > 0)).max(1)
}

/// Encodes a key as part of a subject, with one subject token per part of the key. In our keys, `%`
/// occurs only in escapes, and `=` does not occur.
fn subject_of(key: &str) -> String {
    key.replace('.', "=2E").replace('~', "=7E").replace('%', "=").replace(':', ".")
}

/// Decodes a key. The result may contain more escapes than the original key, with the same meaning.
fn key_of(subject: &str) -> String {
    subject.replace('.', ":").replace('=', "%")
}

/// Returns whether `key` is the key of a lock's queue.
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
        let is_replaced = matches!(request, Request::Replace { .. });
        match self.asked(request).await? {
            // After any other request, the caller repeats the request or reads the key, whether it
            // was done or not.
            Answer::InDoubt if !is_replaced => Ok(Answer::Refused),
            answer => Ok(answer),
        }
    }

    async fn asked(&self, request: Request) -> Result<Answer> {
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

    /// Returns whether the bucket has room for a new lock or session, and if so, counts the `more`
    /// bytes as used. The last fifth of the bucket is reserved, so that existing holders can always
    /// renew.
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
            let what = "four fifths of the bucket's max_bytes are used, and the rest is reserved for holders: raise \
                        max_bytes";
            return Err(Error::new(ErrorKind::Full, what));
        }
        match self.write(key, value.clone(), 0, lives, false).await? {
            // The key existed and was deleted.
            Answer::Refused | Answer::InDoubt => match self.look(key).await? {
                Some(Seen { number, value: None }) => {
                    self.write(key, value, number, lives, false).await
                }
                _ => Ok(Answer::Refused),
            },
            other => Ok(other),
        }
    }

    /// Returns whether a value that existed a moment ago must still exist. This holds for a queue,
    /// and for the session that this client renews. Another client's session may have expired.
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
                    // A value that existed a moment ago is missing. Either it has expired, or the
                    // reply is stale. Queues, and sessions that are renewed, do not expire that
                    // soon.
                    LastRawMessageErrorKind::NoMessageFound if least > 0 && self.lasts(key) => {
                        let what = "a NATS server lacks a value that existed a moment ago: the server may lag behind \
                                    the others";
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

    /// Writes the value if the key's current sequence number is `expected`.
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
        let server_error =
            error.source().and_then(|source| source.downcast_ref::<jetstream::Error>());
        if let Some(refusal) =
            server_error.and_then(|server_error| fault::refusal(&server_error.error_code()))
        {
            return Ok(refusal);
        }
        match (error.kind(), server_error) {
            (PublishErrorKind::WrongLastSequence, _) => Ok(Answer::Refused),
            (_, Some(server_error)) => {
                Err(fault::refused(&self.servers, server_error, Doing::Asks))
            }
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

    /// Returns the keys with the prefix `beginning`.
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

    // S90
    #[test]
    fn each_key_maps_to_its_own_subject() {
        let subject = subject_of("leasehold:l:a%20b%2F.~%C3%A9");
        assert_eq!(subject, "leasehold.l.a=20b=2F=2E=7E=C3=A9");
        assert_eq!(key_of(&subject), "leasehold:l:a%20b%2F%2E%7E%C3%A9");
        assert_eq!(subject_of(&key_of(&subject)), subject);
    }

    #[test]
    fn late_replies_never_lower_the_newest_known_version() {
        let newest = Newest::default();
        assert_eq!(newest.least("a"), 0);
        newest.note("a", 7, 0);
        assert_eq!((newest.least("a"), newest.least("b")), (7, 0));
        // This reply belongs to an older request and arrives last.
        newest.note("a", 9, 7);
        newest.note("a", 8, 7);
        assert_eq!(newest.least("a"), 9);
    }

    #[test]
    fn queue_keys_are_distinguished_from_session_keys() {
        for prefix in ["leasehold:", "l:", "", "mail"] {
            let keys = crate::keys::Keys::new(prefix.into(), 250);
            let name = leasehold_core::Name::new("s:a").unwrap();
            assert!(is_queue(&keys.lock(&name)), "{prefix}");
            assert!(
                !is_queue(&keys.session("0l")) && !is_queue(&keys.contention_marker(&name)),
                "{prefix}"
            );
        }
    }

    #[test]
    fn lifetimes_are_rounded_up_to_seconds() {
        let rounded = |millis| seconds(Duration::from_millis(millis));
        assert_eq!([rounded(1), rounded(1_000), rounded(1_001), rounded(2_200)], [1, 1, 2, 3]);
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        // S90
        #[test]
        fn any_name_maps_to_a_valid_subject_and_back(name in testbed::texts(&["a.b", "*.>", "%2E=2E~"])) {
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
        fn any_subject_decodes_to_a_stable_key(subject in testbed::texts(&["leasehold.l.a=20b=2F=2E=7E=C3=A9"])) {
            let keys = crate::keys::Keys::new("leasehold:".into(), 250);
            if let Some(name) = keys.name_of(&key_of(&subject)) {
                let again = key_of(&subject_of(&keys.lock(&name)));
                proptest::prop_assert!(again.contains(":h:") || keys.name_of(&again) == Some(name));
            }
        }
    }
}
