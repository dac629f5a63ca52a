//! One request, said as the object store understands it.
//!
//! The driver never repeats a request by itself: the second of a write that was done would be refused, and
//! told as if nothing had been written. What was lost is asked again above, by a look.

use std::fmt;
use std::sync::Arc;

use leasehold_core::{Clock, Error, ErrorKind, Result};
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, Error as Driver, GetResult, ObjectStore, ObjectStoreExt, PutMode,
    PutOptions, UpdateVersion,
};

use super::aging::{Ages, Life, Look, Stamps};
use super::dates::Date;
use super::url::ObjectsUrl;
use super::{fault, framed};
use crate::cells::{Answer, Request, Version};

/// What stands between the two parts of a version.
const AND: char = '\n';

/// What becomes of an object that is written.
enum If {
    /// There is none.
    Absent,
    /// It is still what was read.
    Is(Version),
}

/// An object of ours as it was read.
struct Read {
    value: Vec<u8>,
    version: Version,
    is_over: bool,
}

/// An object as it is.
struct Seen {
    object: Vec<u8>,
    version: Version,
    look: Look,
    stamps: Option<Stamps>,
}

/// Requests of one bucket.
pub(super) struct Link {
    store: Arc<dyn ObjectStore>,
    /// For people.
    url: ObjectsUrl,
    /// The largest object that may be ours.
    largest: usize,
    ages: Ages,
    clock: Clock,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Link {
    pub(super) fn new(store: Arc<dyn ObjectStore>, url: ObjectsUrl, largest: usize) -> Self {
        let largest = largest + framed::LONGEST;
        Self { store, url, largest, ages: Ages::default(), clock: Clock::default() }
    }

    /// One that comes from a queue, which knows by itself what is not ours.
    pub(super) async fn asked(&self, request: Request) -> Result<Answer> {
        match request {
            Request::Get { key } => Ok(match self.look(&key).await? {
                None => Answer::Absent,
                Some(Seen { object, version, look, stamps }) => match framed::read(&object) {
                    Ok((life, _)) if self.ages.is_over(&key, &version.0, life, look, stamps) => {
                        Answer::Absent
                    }
                    Ok((_, value)) => Answer::found(value.to_vec(), version),
                    Err(_) => Answer::found(object, version),
                },
            }),
            other => self.one(other).await,
        }
    }

    /// One that finds only what is ours.
    pub(super) async fn one(&self, request: Request) -> Result<Answer> {
        let life = |lives: Option<_>| lives.map_or(Life::Lasting, Life::Short);
        match request {
            Request::Get { key } => Ok(match self.read(&key).await? {
                Some(Read { value, version, is_over: false }) => Answer::found(value, version),
                _ => Answer::Absent,
            }),
            Request::Create { key, value, lives } => self.create(&key, &value, life(lives)).await,
            Request::Replace { key, value, version, lives } => {
                self.put(&key, &value, life(lives), If::Is(version)).await
            }
            Request::Touch { key, value, version, lives } => {
                self.put(&key, &value, Life::Short(lives), If::Is(version)).await
            }
            Request::Remove { key, version } => self.remove(&key, version).await,
        }
    }

    /// In the place of nothing, or of what is over.
    async fn create(&self, key: &str, value: &[u8], life: Life) -> Result<Answer> {
        let created = self.put(key, value, life, If::Absent).await?;
        // What lasts is in the place of nothing that does not.
        if created != Answer::Refused || life == Life::Lasting {
            return Ok(created);
        }
        match self.read(key).await? {
            Some(read) if read.is_over => self.put(key, value, life, If::Is(read.version)).await,
            _ => Ok(Answer::Refused),
        }
    }

    /// The store deletes without a condition. So it is marked as removed first, under one; and nothing but another
    /// mark ever comes in the place of what was removed.
    async fn remove(&self, key: &str, version: Version) -> Result<Answer> {
        match self.put(key, b"", Life::Over, If::Is(version)).await? {
            Answer::Written(_) => {
                self.delete(key).await?;
                Ok(Answer::Done)
            }
            refused => Ok(refused),
        }
    }

    /// Whatever is there.
    pub(super) async fn delete(&self, key: &str) -> Result<()> {
        self.ages.forget(key);
        match self.store.delete(&path(key)?).await {
            Ok(()) | Err(Driver::NotFound { .. }) => Ok(()),
            Err(error) => Err(fault::of(&self.url, &error)),
        }
    }

    async fn put(&self, key: &str, value: &[u8], life: Life, on: If) -> Result<Answer> {
        let is_new = matches!(on, If::Absent);
        let mode = match on {
            If::Absent => PutMode::Create,
            If::Is(version) => PutMode::Update(condition(&version)),
        };
        let object = framed::written(value, life)?;
        // Who caches what everybody may read would show what was.
        let attributes = Attributes::from_iter([(Attribute::CacheControl, "no-store")]);
        let options = PutOptions { attributes, ..PutOptions::from(mode) };
        match self.store.put_opts(&path(key)?, object.into(), options).await {
            Ok(done) => {
                Ok(Answer::Written(version(done.e_tag, done.version).ok_or_else(no_version)?))
            }
            Err(Driver::AlreadyExists { .. } | Driver::Precondition { .. }) => Ok(Answer::Refused),
            Err(Driver::NotModified { .. }) => Ok(Answer::Refused),
            // Of an object that is gone; a bucket that is gone refuses what is new as well.
            Err(Driver::NotFound { .. }) if !is_new => Ok(Answer::Refused),
            Err(error) => Err(fault::of(&self.url, &error)),
        }
    }

    async fn read(&self, key: &str) -> Result<Option<Read>> {
        let Some(Seen { object, version, look, stamps }) = self.look(key).await? else {
            return Ok(None);
        };
        let (life, value) = framed::read(&object)?;
        let is_over = self.ages.is_over(key, &version.0, life, look, stamps);
        Ok(Some(Read { value: value.to_vec(), version, is_over }))
    }

    /// What is there, ours or not: of what is larger than anything of ours, nothing.
    async fn look(&self, key: &str) -> Result<Option<Seen>> {
        let path = path(key)?;
        let mut sent = self.clock.now();
        let mut told = self.store.get(&path).await;
        // A connection that the server closes as it is used again: a look may be sent twice.
        if matches!(told, Err(Driver::Generic { .. })) {
            sent = self.clock.now();
            told = self.store.get(&path).await;
        }
        let found = match told {
            Ok(found) => found,
            Err(Driver::NotFound { .. }) => {
                self.ages.forget(key);
                return Ok(None);
            }
            Err(error) => return Err(fault::of(&self.url, &error)),
        };
        let look = Look { sent, answered: self.clock.now() };
        let stamps = stamps(&found);
        let version = version(found.meta.e_tag.clone(), found.meta.version.clone());
        let version = version.ok_or_else(no_version)?;
        if found.meta.size > u64::try_from(self.largest).unwrap_or(u64::MAX) {
            return Ok(Some(Seen { object: Vec::new(), version, look, stamps }));
        }
        let object = found.bytes().await.map_err(|error| fault::of(&self.url, &error))?.to_vec();
        Ok(Some(Seen { object, version, look, stamps }))
    }

    /// The keys that begin so.
    pub(super) async fn keys(&self, beginning: &str) -> Result<Vec<String>> {
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
        Error::new(ErrorKind::Config, "this cannot be an object's key").because(error.to_string())
    })
}

fn stamps(found: &GetResult) -> Option<Stamps> {
    let Date(date) = *found.extensions.get::<Date>()?;
    Some(Stamps { modified: found.meta.last_modified.timestamp(), date })
}

/// A tag, or a number, or both: which of them counts is the driver's to know.
fn version(tag: Option<String>, number: Option<String>) -> Option<Version> {
    if tag.is_none() && number.is_none() {
        return None;
    }
    Some(Version(format!("{}{AND}{}", tag.unwrap_or_default(), number.unwrap_or_default())))
}

fn condition(version: &Version) -> UpdateVersion {
    let (tag, number) = version.0.split_once(AND).unwrap_or((&version.0, ""));
    let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    UpdateVersion { e_tag: some(tag), version: some(number) }
}

fn no_version() -> Error {
    let what = "the object store tells no ETag and no version of what it keeps, so that nothing can be \
                written under a condition: use another";
    Error::new(ErrorKind::Config, what)
}
