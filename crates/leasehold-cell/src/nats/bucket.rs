//! Finds or creates the bucket, and checks its settings.
//!
//! - *It must keep each value* until the value is replaced or expires. So it must keep one value
//!   per key, and have no maximum age, no limit that deletes old values, and no copies from other
//!   streams. With a history, the previous value of an expired key would reappear.
//! - *Keys must be able to expire* by the server's clock (`allow_msg_ttl`).
//! - *A reply must mean that a write was stored.* So the bucket uses files, and does not write
//!   asynchronously.

use std::error::Error as _;

use async_nats::jetstream::context::{RequestError, RequestErrorKind};
use async_nats::jetstream::stream::{
    Config, DiscardPolicy, Info, PersistenceMode, RetentionPolicy, StorageType,
};
use async_nats::jetstream::{Context, ErrorCode, context};
use leasehold_core::kit::no_store;
use leasehold_core::{Error, ErrorKind, Result};

use super::fault::{self, Doing};
use super::url::NatsUrl;

/// Default number of replicas in a cluster.
const COPIES: usize = 3;

/// Returns the name of the bucket's stream.
pub(super) fn stream(bucket: &str) -> String {
    format!("KV_{bucket}")
}

/// Returns the prefix of the subjects of the bucket's keys.
pub(super) fn subjects(bucket: &str) -> String {
    format!("$KV.{bucket}.")
}

/// The reason why the bucket was not found or created.
pub(super) enum Missing {
    /// JetStream did not reply in time. The user may lack a permission.
    Silent(String),
    Failed(Error),
}

/// Returns the bucket named in `url`, if it exists.
pub(super) async fn find(url: &NatsUrl, context: &Context) -> Result<Option<Info>, Missing> {
    use context::GetStreamErrorKind::JetStream;
    match context.get_stream(stream(&url.bucket)).await {
        Ok(found) => Ok(Some(found.cached_info().clone())),
        Err(error) => match error.kind() {
            JetStream(error) if fault::is_no_stream(&error.error_code()) => Ok(None),
            JetStream(error) => {
                Err(Missing::Failed(fault::refused(&url.servers(), &error, Doing::Connects)))
            }
            _ => {
                let cause = error.source().and_then(|cause| cause.downcast_ref::<RequestError>());
                match cause.map(RequestError::kind) {
                    Some(RequestErrorKind::NoResponders) => {
                        Err(Missing::Failed(fault::no_jetstream(&url.servers())))
                    }
                    _ => Err(Missing::Silent(error.to_string())),
                }
            }
        },
    }
}

/// Creates the bucket. Another client may do the same concurrently.
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
            "run `nats kv add {bucket} --replicas={copies} --marker-ttl=1m`; a client creates the \
             bucket itself, unless the URL contains create=no"
        );
        let error = no_store(format!("the bucket {bucket:?} does not exist"));
        return Err(Missing::Failed(error.with_hint(hint)));
    }
    match context.create_stream(wanted(&url.bucket, copies)).await {
        Ok(made) => Ok(made.cached_info().clone()),
        Err(error) => match error.kind() {
            // Another client has created the bucket in the meantime with other settings.
            JetStream(error) if error.error_code() == ErrorCode::STREAM_NAME_EXIST => {
                let found = find(url, context).await?;
                found.ok_or_else(|| Missing::Silent(GONE_AGAIN.into()))
            }
            JetStream(error) => {
                Err(Missing::Failed(fault::refused(&url.servers(), &error, Doing::Connects)))
            }
            JetStreamUnavailable => Err(Missing::Failed(fault::no_jetstream(&url.servers()))),
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

/// Returns an error if the bucket cannot store locks.
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

/// The error text if a bucket that has just been found or created is missing.
pub(super) const GONE_AGAIN: &str = "the bucket was deleted in the meantime";

/// Returns the first setting that breaks locks, and how to fix it.
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
            "it deletes values after they are read (retention)".to_owned(),
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
    fn unsafe_bucket_settings_are_named() {
        let good = || wanted("b", 3);
        assert!(flaw("b", &good()).is_none());
        // A bucket created by `nats kv add --marker-ttl`, with a size limit that refuses new
        // values.
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
            let (what, fix) =
                flaw("b", &config).unwrap_or_else(|| panic!("{says}: the bucket was accepted"));
            assert!(what.contains(says) && !fix.is_empty(), "{says}: {what}. {fix}");
        }
    }
}
