//! An object, said as the object store's driver understands it.
//!
//! The driver never repeats a request by itself: the second of a write that was done would be refused, and
//! told as if nothing had been written. What was lost is asked again above, by a look.

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

/// What stands between the two parts of a version.
const AND: char = '\n';

/// Requests of one bucket.
pub(super) struct Link {
    store: Arc<dyn ObjectStore>,
    /// For people.
    url: ObjectsUrl,
    /// The largest object that may be ours.
    largest: usize,
    lanes: Arc<Lanes>,
    /// How long an answer may take.
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

    /// Does this when its turn comes.
    async fn in_turn<T>(&self, request: impl Future<Output = Result<T>>) -> Result<T> {
        let Ok(_turn) = timeout(self.limit, self.lanes.turn()).await else {
            return Err(fault::unreachable(&self.url, "too many requests wait for an answer"));
        };
        match timeout(self.limit, request).await {
            Ok(answer) => answer,
            Err(_) => Err(fault::unreachable(&self.url, "no answer in time")),
        }
    }
}

impl Link {
    /// What is there, ours or not: of what is larger than anything of ours, nothing.
    async fn get_now(&self, key: &str) -> Result<Option<Value>> {
        let path = path(key)?;
        let mut told = self.store.get(&path).await;
        // A connection that the server closes as it is used again: a look may be sent twice.
        if let Err(error @ Driver::Generic { .. }) = &told
            && !fault::is_busy(error)
        {
            told = self.store.get(&path).await;
        }
        let found = match told {
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
        // Who caches what everybody may read would show what was.
        let attributes = Attributes::from_iter([(Attribute::CacheControl, "no-store")]);
        let options = PutOptions { attributes, ..PutOptions::from(mode) };
        match self.store.put_opts(&path(key)?, bytes.into(), options).await {
            Ok(done) => version(done.e_tag, done.version).map(Some),
            Err(Driver::AlreadyExists { .. } | Driver::Precondition { .. }) => Ok(None),
            Err(Driver::NotModified { .. }) => Ok(None),
            // Of an object that is gone; a bucket that is gone refuses what is new as well.
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
        // Lists are of folders.
        let folder = beginning.rsplit_once('/').map_or("", |(folder, _)| folder);
        let listed = self.store.list(Some(&path(folder)?));
        let listed = listed
            .map_ok(|found| found.location.to_string())
            .try_filter(|key| std::future::ready(key.starts_with(beginning)));
        listed.try_collect().await.map_err(|error| fault::of(&self.url, &error))
    }
}

/// Where a cell is, under its own key: what is escaped there stays as it is.
fn path(key: &str) -> Result<Path> {
    Path::parse(key).map_err(|error| {
        Error::new(ErrorKind::Config, format!("invalid object key {key:?}"))
            .because(error.to_string())
    })
}

/// A tag, or a number, or both: which of them counts is the driver's to know.
fn version(tag: Option<String>, number: Option<String>) -> Result<Version> {
    if tag.is_none() && number.is_none() {
        let what = "the object store returns neither an ETag nor a version, so it cannot write \
                    conditionally";
        return Err(Error::new(ErrorKind::Config, what).with_hint(fault::CONDITIONAL));
    }
    Ok(Version(format!("{}{AND}{}", tag.unwrap_or_default(), number.unwrap_or_default())))
}

/// Whether the bucket kept versions as this was written.
pub(super) fn is_versioned(version: &Version) -> bool {
    version.0.split_once(AND).is_some_and(|(_, number)| !number.is_empty())
}

fn condition(version: &Version) -> UpdateVersion {
    let (tag, number) = version.0.split_once(AND).unwrap_or((&version.0, ""));
    let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    UpdateVersion { e_tag: some(tag), version: some(number) }
}
