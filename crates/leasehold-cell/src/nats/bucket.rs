//! The bucket: found, or made as locks need it; and what of its settings would break them.
//!
//! - *It must keep what it has*, one value a key, until that is replaced or its own time is over: no ages, no
//!   limit that throws the oldest away, no history (when a value's time is over, the one before it would be
//!   back), no copies from elsewhere.
//! - *Keys must be able to end by themselves*, by the server's clock: `allow_msg_ttl`.
//! - *An answer must mean that it was done*: files, and not asynchronously.

use std::error::Error as _;

use async_nats::jetstream::context::{RequestError, RequestErrorKind};
use async_nats::jetstream::stream::{
    Config, DiscardPolicy, Info, PersistenceMode, RetentionPolicy, StorageType,
};
use async_nats::jetstream::{Context, ErrorCode, context};
use leasehold_core::{Error, ErrorKind, Result};

use super::fault::{self, Doing};
use super::url::NatsUrl;

/// How many copies there are where there is a cluster, unless the URL says otherwise.
const COPIES: usize = 3;

/// The stream that is the bucket.
pub(super) fn stream(bucket: &str) -> String {
    format!("KV_{bucket}")
}

/// What the subjects of its keys begin with.
pub(super) fn subjects(bucket: &str) -> String {
    format!("$KV.{bucket}.")
}

/// Why there is none.
pub(super) enum Missing {
    /// Nobody answers for JetStream, or not in time: perhaps we may not ask.
    Silent(String),
    Told(Error),
}

/// The bucket of this URL, as it is.
pub(super) async fn find(url: &NatsUrl, context: &Context) -> Result<Option<Info>, Missing> {
    use context::GetStreamErrorKind::JetStream;
    match context.get_stream(stream(&url.bucket)).await {
        Ok(found) => Ok(Some(found.cached_info().clone())),
        Err(error) => match error.kind() {
            JetStream(error) if fault::is_no_stream(&error.error_code()) => Ok(None),
            JetStream(error) => {
                Err(Missing::Told(fault::refused(&url.servers(), &error, Doing::Connects)))
            }
            _ => {
                let cause = error.source().and_then(|cause| cause.downcast_ref::<RequestError>());
                match cause.map(RequestError::kind) {
                    Some(RequestErrorKind::NoResponders) => {
                        Err(Missing::Told(fault::no_jetstream(&url.servers())))
                    }
                    _ => Err(Missing::Silent(error.to_string())),
                }
            }
        },
    }
}

/// Makes it; somebody else may do the same at the same time.
pub(super) async fn make(
    url: &NatsUrl,
    context: &Context,
    has_cluster: bool,
) -> Result<Info, Missing> {
    use context::CreateStreamErrorKind::{JetStream, JetStreamUnavailable};
    let copies = url.replicas.unwrap_or(if has_cluster { COPIES } else { 1 });
    if !url.create {
        let bucket = &url.bucket;
        let hint = format!(
            "run `nats kv add {bucket} --replicas={copies} --marker-ttl=1m`, or remove create=no \
             from the URL"
        );
        let error = Error::new(ErrorKind::Config, format!("the bucket {bucket:?} does not exist"));
        return Err(Missing::Told(error.with_hint(hint)));
    }
    match context.create_stream(wanted(&url.bucket, copies)).await {
        Ok(made) => Ok(made.cached_info().clone()),
        Err(error) => match error.kind() {
            // Somebody else has made it since, in another way.
            JetStream(error) if error.error_code() == ErrorCode::STREAM_NAME_EXIST => {
                let found = find(url, context).await?;
                found.ok_or_else(|| Missing::Silent(GONE_AGAIN.into()))
            }
            JetStream(error) => {
                Err(Missing::Told(fault::refused(&url.servers(), &error, Doing::Connects)))
            }
            JetStreamUnavailable => Err(Missing::Told(fault::no_jetstream(&url.servers()))),
            _ => Err(Missing::Silent(error.to_string())),
        },
    }
}

fn wanted(bucket: &str, copies: usize) -> Config {
    Config {
        name: stream(bucket),
        subjects: vec![subjects(bucket) + ">"],
        description: Some("locks of leasehold".into()),
        max_messages_per_subject: 1,
        max_messages: -1,
        max_bytes: -1,
        max_message_size: -1,
        max_consumers: -1,
        discard: DiscardPolicy::New,
        storage: StorageType::File,
        num_replicas: copies,
        allow_rollup: true,
        deny_delete: true,
        allow_message_ttl: true,
        ..Config::default()
    }
}

/// Refuses a bucket that cannot keep locks.
pub(super) fn check(url: &NatsUrl, config: &Config) -> Result<()> {
    let bucket = &url.bucket;
    if let Some((what, fix)) = flaw(bucket, config) {
        let what = format!("the bucket {bucket:?} cannot store locks: {what}");
        return Err(Error::new(ErrorKind::Config, what).with_hint(fix));
    }
    match url.replicas {
        Some(wanted) if wanted != config.num_replicas => {
            let what = format!(
                "the bucket {bucket:?} has replicas={}, but the URL has replicas={wanted}",
                config.num_replicas
            );
            let hint = format!(
                "run `nats stream edit {} --replicas={wanted}`, or remove replicas from the URL",
                stream(bucket)
            );
            Err(Error::new(ErrorKind::Config, what).with_hint(hint))
        }
        _ => Ok(()),
    }
}

/// Why a bucket that has just been found or created is missing.
pub(super) const GONE_AGAIN: &str = "the bucket was deleted in the meantime";

/// What breaks locks in these settings, and what to do.
pub(super) fn flaw(bucket: &str, config: &Config) -> Option<(String, String)> {
    let stream = stream(bucket);
    let edit = |how: &str| format!("run `nats stream edit {stream} {how}`");
    let another = || "name another bucket in the URL; leasehold creates it".to_owned();
    let is_limited = config.max_bytes > 0 || config.max_messages > 0;
    let subject = subjects(bucket) + ">";
    let flaws = [
        (
            config.subjects != [subject.as_str()],
            "its subjects show that another program uses the stream (subjects)".to_owned(),
            another(),
        ),
        (
            !config.allow_message_ttl,
            "its keys cannot expire (allow_msg_ttl)".to_owned(),
            edit("--allow-msg-ttl"),
        ),
        (
            config.max_messages_per_subject != 1,
            format!(
                "it keeps {} values of each key instead of one (history, max_msgs_per_subject)",
                config.max_messages_per_subject
            ),
            edit("--max-msgs-per-subject=1"),
        ),
        (
            !config.max_age.is_zero(),
            "it deletes old values, which can include held locks (ttl, max_age)".to_owned(),
            another(),
        ),
        (
            config.discard != DiscardPolicy::New && is_limited,
            "it deletes the oldest values when it is full (discard, max_bytes)".to_owned(),
            edit("--discard=new"),
        ),
        (
            config.discard_new_per_subject,
            "it does not allow overwriting a key (discard_new_per_subject)".to_owned(),
            another(),
        ),
        (
            config.storage != StorageType::File,
            "a server restart loses its data (storage memory)".to_owned(),
            another(),
        ),
        (
            config.persist_mode == Some(PersistenceMode::Async),
            "it acknowledges writes before they are stored (persist_mode async)".to_owned(),
            another(),
        ),
        (config.mirror.is_some(), "it is a copy of another stream (mirror)".to_owned(), another()),
        (
            config.sources.as_ref().is_some_and(|sources| !sources.is_empty()),
            "it imports values from other streams (sources)".to_owned(),
            another(),
        ),
        (
            config.subject_transform.is_some(),
            "it renames keys (subject_transform)".to_owned(),
            another(),
        ),
        (
            config.retention != RetentionPolicy::Limits,
            "it deletes values that were read (retention)".to_owned(),
            another(),
        ),
        (
            config.no_ack || config.sealed,
            "it rejects writes, or does not acknowledge them (no_ack, sealed)".to_owned(),
            another(),
        ),
    ];
    flaws.into_iter().find_map(|(is_so, what, fix)| is_so.then_some((what, fix)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_breaks_locks_is_called_by_its_name() {
        let good = || wanted("b", 3);
        assert!(flaw("b", &good()).is_none());
        // As `nats kv add --marker-ttl` makes it, and with a limit that refuses.
        let theirs = Config {
            allow_direct: true,
            subject_delete_marker_ttl: Some(Duration::from_secs(60)),
            max_bytes: 1 << 20,
            ..good()
        };
        assert!(flaw("b", &theirs).is_none());
        let source = || async_nats::jetstream::stream::Source::default();
        for (config, says) in [
            (wanted("other", 3), "subjects"),
            (Config { allow_message_ttl: false, ..good() }, "allow_msg_ttl"),
            (Config { max_messages_per_subject: 5, ..good() }, "history"),
            (Config { max_age: Duration::from_secs(1), ..good() }, "max_age"),
            (Config { discard: DiscardPolicy::Old, max_bytes: 9, ..good() }, "discard"),
            (Config { discard_new_per_subject: true, ..good() }, "discard_new_per_subject"),
            (Config { storage: StorageType::Memory, ..good() }, "storage"),
            (Config { persist_mode: Some(PersistenceMode::Async), ..good() }, "persist_mode"),
            (Config { mirror: Some(source()), ..good() }, "mirror"),
            (Config { sources: Some(vec![source()]), ..good() }, "sources"),
            (Config { retention: RetentionPolicy::WorkQueue, ..good() }, "retention"),
            (Config { sealed: true, ..good() }, "sealed"),
        ] {
            let (what, fix) = flaw("b", &config).unwrap_or_else(|| panic!("{says} is taken"));
            assert!(what.contains(says) && !fix.is_empty(), "{says}: {what}. {fix}");
        }
    }
}
