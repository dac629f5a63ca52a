//! Reads and writes objects with the object store's driver.
//!
//! The driver never repeats a request. If a write that was done were repeated, the repetition would
//! be refused, and reported as if nothing had been written. After a lost reply, the caller reads
//! the object.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{Error, ErrorKind, Result};
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, Error as Driver, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    UpdateVersion,
};
use tokio::time::timeout;

use super::lanes::Lanes;
use super::url::ObjectsUrl;
use super::{dates, fault};
use crate::cells::Version;
use crate::lasting::{FRAME, Value, Values};

/// Separates the two parts of a version.
const AND: char = '\n';

/// Access to the objects of one bucket.
pub(super) struct Link {
    store: Arc<dyn ObjectStore>,
    /// Used in error messages.
    url: ObjectsUrl,
    /// Maximum size of an object that leasehold writes.
    largest: usize,
    lanes: Arc<Lanes>,
    /// Time limit for a reply.
    limit: Duration,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Link {
    pub(super) fn new(
        store: Arc<dyn ObjectStore>,
        url: ObjectsUrl,
        largest: usize,
        lanes: Arc<Lanes>,
        limit: Duration,
    ) -> Self {
        Self { store, url, largest: largest + FRAME, lanes, limit }
    }

    /// Runs the request when its turn comes.
    async fn in_turn<T>(&self, request: impl Future<Output = Result<T>>) -> Result<T> {
        let Ok(_turn) = timeout(self.limit, self.lanes.turn()).await else {
            return Err(fault::unreachable(&self.url, "too many requests wait for an answer"));
        };
        match timeout(self.limit, request).await {
            Ok(answer) => answer,
            Err(_) => Err(fault::unreachable(&self.url, "no reply in time")),
        }
    }
}

impl Link {
    /// Reads an object, even if another program wrote it. An object that is too large to be one of
    /// leasehold's is returned as empty.
    async fn get_now(&self, key: &str) -> Result<Option<Value>> {
        let path = path(key)?;
        let mut reply = self.store.get(&path).await;
        // The server may close an idle connection just when it is used again, so a read is repeated
        // once.
        if let Err(error @ Driver::Generic { .. }) = &reply
            && !fault::is_busy(error)
        {
            reply = self.store.get(&path).await;
        }
        let found = match reply {
            Ok(found) => found,
            Err(Driver::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(fault::of(&self.url, &error)),
        };
        let age = dates::age(&found);
        let version = version(found.meta.e_tag.clone(), found.meta.version.clone())?;
        if found.meta.size > u64::try_from(self.largest).unwrap_or(u64::MAX) {
            return Ok(Some(Value { bytes: Vec::new(), version, age }));
        }
        let bytes = found.bytes().await.map_err(|error| fault::of(&self.url, &error))?.to_vec();
        Ok(Some(Value { bytes, version, age }))
    }

    async fn put_now(
        &self,
        key: &str,
        bytes: Vec<u8>,
        on: Option<&Version>,
    ) -> Result<Option<Version>> {
        let mode = on.map_or(PutMode::Create, |read| PutMode::Update(condition(read)));
        // A cache of a public object would return an old state.
        let attributes = Attributes::from_iter([(Attribute::CacheControl, "no-store")]);
        let options = PutOptions { attributes, ..PutOptions::from(mode) };
        match self.store.put_opts(&path(key)?, bytes.into(), options).await {
            Ok(done) => version(done.e_tag, done.version).map(Some),
            Err(Driver::AlreadyExists { .. } | Driver::Precondition { .. }) => Ok(None),
            Err(Driver::NotModified { .. }) => Ok(None),
            // The object to replace is gone. If the bucket is missing, creations fail as well.
            Err(Driver::NotFound { .. }) if on.is_some() => Ok(None),
            Err(error) => Err(fault::of(&self.url, &error)),
        }
    }

    async fn delete_now(&self, key: &str) -> Result<()> {
        match self.store.delete(&path(key)?).await {
            Ok(()) | Err(Driver::NotFound { .. }) => Ok(()),
            Err(error) => Err(fault::of(&self.url, &error)),
        }
    }
}

#[async_trait]
impl Values for Link {
    async fn get(&self, key: &str) -> Result<Option<Value>> {
        self.in_turn(self.get_now(key)).await
    }

    async fn put(
        &self,
        key: &str,
        bytes: Vec<u8>,
        on: Option<&Version>,
    ) -> Result<Option<Version>> {
        self.in_turn(self.put_now(key, bytes, on)).await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.in_turn(self.delete_now(key)).await
    }

    async fn keys(&self, beginning: &str) -> Result<Vec<String>> {
        use futures_util::TryStreamExt;
        // The driver can only list folders.
        let folder = beginning.rsplit_once('/').map_or("", |(folder, _)| folder);
        let listed = self.store.list(Some(&path(folder)?));
        let listed = listed
            .map_ok(|found| found.location.to_string())
            .try_filter(|key| std::future::ready(key.starts_with(beginning)));
        listed.try_collect().await.map_err(|error| fault::of(&self.url, &error))
    }
}

/// Returns the path of a cell, which is its key without further escaping.
fn path(key: &str) -> Result<Path> {
    Path::parse(key).map_err(|error| {
        Error::new(ErrorKind::Config, format!("invalid object key {key:?}"))
            .with_source(error.to_string())
    })
}

/// Returns a version from an ETag, a version number, or both. The driver decides which of them it
/// uses.
fn version(tag: Option<String>, number: Option<String>) -> Result<Version> {
    if tag.is_none() && number.is_none() {
        let what = "the object store returns neither an ETag nor a version, so it cannot write \
                    conditionally";
        return Err(Error::new(ErrorKind::Config, what).with_hint(fault::CONDITIONAL));
    }
    Ok(Version(format!("{}{AND}{}", tag.unwrap_or_default(), number.unwrap_or_default())))
}

/// Returns whether the bucket had versioning enabled when `version` was written.
pub(super) fn is_versioned(version: &Version) -> bool {
    version.0.split_once(AND).is_some_and(|(_, number)| !number.is_empty())
}

fn condition(version: &Version) -> UpdateVersion {
    let (tag, number) = version.0.split_once(AND).unwrap_or((&version.0, ""));
    let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    UpdateVersion { e_tag: some(tag), version: some(number) }
}
