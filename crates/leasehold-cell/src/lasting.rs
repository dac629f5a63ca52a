//! Cells in a system where nothing ends by itself, and which can do no more than write a value under a condition:
//! objects in a bucket, or whatever an adapter tells as [`Values`].
//!
//! - *What is atomic*: a write that names what it replaces, or that it replaces nothing. Each value begins with a
//!   random line, so that no version comes again where versions follow content (`lasting/framed.rs`).
//! - *Whose clock*: whoever looks judges what is over (`lasting/aging.rs`): by its own clock since it first
//!   saw what is there, or by the age that the system tells. What lasts for a while is a session, or a mark
//!   beside a lock; a queue is there for good.
//! - *Who judges may be wrong*: it saw what was, and is no more. So nothing follows from that alone. Whoever
//!   takes a session for gone writes in its place, if it is still what was seen; one that was touched since
//!   is there, and lives ([`System::looks_behind`]).
//! - *A value is removed* by a mark in its place first, under a condition, and then without one: nothing but
//!   another mark ever comes in the place of what was removed. Who dies between the two leaves a mark, which
//!   is as good as nothing.
//! - *The answer to a write is lost, the caller's future is dropped, we die*: it may be done, also later,
//!   until somebody else has written; as [`Cells`] expects.

mod aging;
mod framed;

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::try_join_all;
use leasehold_core::{Clock, Result};

use self::aging::{Ages, Life, Look};
use crate::cells::{Answer, Cells, Found, Request, System, Version};

/// Maximum overhead of a value over the content of its cell, in bytes.
pub const FRAME: usize = framed::LONGEST;

/// A value as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// The content.
    pub bytes: Vec<u8>,
    /// The version, for conditional writes.
    pub version: Version,
    /// The age of the value by the system's clock, if it is known; too high by at most the
    /// [`grain`](System::grain). One read is then enough to see that a value has expired. Without
    /// an age, it takes a second read after its lifetime.
    pub age: Option<Duration>,
}

/// A system that can write a value if it has not changed since it was read.
///
/// Do not repeat a write whose reply was lost. If the first one succeeded, the second would be
/// refused and reported as if nothing had been written.
///
/// # Cancel safety
/// Not cancel safe: a write whose future is dropped, or that returns an error, may or may not have
/// happened, and may still happen later.
#[async_trait]
pub trait Values: fmt::Debug + Send + Sync + 'static {
    /// Returns the value of a key, even if another program wrote it.
    ///
    /// # Errors
    /// The errors of the system.
    async fn get(&self, key: &str) -> Result<Option<Value>>;

    /// Writes a value if the key has the version `on`, or does not exist if `on` is `None`. Returns
    /// the new version, or `None` if nothing was written.
    ///
    /// # Errors
    /// The errors of the system. It is then unknown whether the value was written.
    async fn put(&self, key: &str, bytes: Vec<u8>, on: Option<&Version>)
    -> Result<Option<Version>>;

    /// Removes the key, if it exists.
    ///
    /// # Errors
    /// The errors of the system.
    async fn delete(&self, key: &str) -> Result<()>;

    /// Returns the keys with this prefix. Keys that are created or removed at the same time may be
    /// missing.
    ///
    /// # Errors
    /// The errors of the system.
    async fn keys(&self, prefix: &str) -> Result<Vec<String>>;
}

/// A value of ours as it was read.
struct Read {
    value: Vec<u8>,
    version: Version,
    is_over: bool,
}

/// The cells of such a system, from the view of one client.
#[derive(Debug)]
pub struct Lasting<V> {
    values: V,
    system: System,
    ages: Ages,
    clock: Clock,
}

impl<V: Values> Lasting<V> {
    /// Creates cells on these values. `grain` is the maximum error of the ages that the system
    /// reports.
    pub fn new(values: V, longest_key: usize, largest_value: usize, grain: Duration) -> Self {
        let lasting = System::lasting(longest_key, largest_value);
        // Who is gone is made sure of by a write.
        let system = System { grain, looks_behind: true, ..lasting };
        Self { values, system, ages: Ages::default(), clock: Clock::default() }
    }

    /// Uses this clock, for tests.
    #[must_use]
    pub fn clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }

    /// One that comes from a queue, which knows by itself what is not ours.
    async fn asked(&self, request: Request) -> Result<Answer> {
        let Request::Get { key } = request else { return self.one(request).await };
        let Some((Value { bytes, version, age }, look)) = self.look(&key).await? else {
            return Ok(Answer::Absent);
        };
        Ok(match framed::read(&bytes) {
            Ok((life, _)) if self.ages.is_over(&key, &version.0, life, look, age) => Answer::Absent,
            Ok((_, value)) => found(value.to_vec(), version),
            Err(_) => found(bytes, version),
        })
    }

    /// One that finds only what is ours.
    pub(crate) async fn one(&self, request: Request) -> Result<Answer> {
        let life = |lives: Option<_>| lives.map_or(Life::Lasting, Life::Short);
        match request {
            Request::Get { key } => Ok(match self.read(&key).await? {
                Some(Read { value, version, is_over: false }) => found(value, version),
                _ => Answer::Absent,
            }),
            Request::Create { key, value, lives } => self.create(&key, &value, life(lives)).await,
            Request::Replace { key, value, version, lives } => {
                self.put(&key, &value, life(lives), Some(&version)).await
            }
            Request::Touch { key, value, version, lives } => {
                self.put(&key, &value, Life::Short(lives), Some(&version)).await
            }
            Request::Remove { key, version } => self.remove(&key, &version).await,
        }
    }

    /// In the place of nothing, or of what is over.
    async fn create(&self, key: &str, value: &[u8], life: Life) -> Result<Answer> {
        let created = self.put(key, value, life, None).await?;
        // What lasts is in the place of nothing that does not.
        if created != Answer::Refused || life == Life::Lasting {
            return Ok(created);
        }
        match self.read(key).await? {
            Some(read) if read.is_over => self.put(key, value, life, Some(&read.version)).await,
            _ => Ok(Answer::Refused),
        }
    }

    async fn remove(&self, key: &str, version: &Version) -> Result<Answer> {
        match self.put(key, b"", Life::Over, Some(version)).await? {
            Answer::Written(_) => self.delete(key).await.map(|()| Answer::Done),
            refused => Ok(refused),
        }
    }

    /// Whatever is there.
    pub(crate) async fn delete(&self, key: &str) -> Result<()> {
        self.ages.forget(key);
        self.values.delete(key).await
    }

    async fn put(
        &self,
        key: &str,
        value: &[u8],
        life: Life,
        on: Option<&Version>,
    ) -> Result<Answer> {
        let written = self.values.put(key, framed::written(value, life)?, on).await?;
        Ok(written.map_or(Answer::Refused, Answer::Written))
    }

    async fn read(&self, key: &str) -> Result<Option<Read>> {
        let Some((Value { bytes, version, age }, look)) = self.look(key).await? else {
            return Ok(None);
        };
        let (life, value) = framed::read(&bytes)?;
        let is_over = self.ages.is_over(key, &version.0, life, look, age);
        Ok(Some(Read { value: value.to_vec(), version, is_over }))
    }

    async fn look(&self, key: &str) -> Result<Option<(Value, Look)>> {
        let sent = self.clock.now();
        let Some(value) = self.values.get(key).await? else {
            self.ages.forget(key);
            return Ok(None);
        };
        Ok(Some((value, Look { sent, answered: self.clock.now() })))
    }
}

fn found(value: Vec<u8>, version: Version) -> Answer {
    Answer::Found(Found { value, version, remaining: None })
}

#[async_trait]
impl<V: Values> Cells for Lasting<V> {
    fn system(&self) -> &System {
        &self.system
    }

    async fn run(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        match <[Request; 2]>::try_from(requests) {
            Ok([write, look]) if write.key() == look.key() => {
                let written = self.asked(write).await?;
                let is_done = written != Answer::Refused;
                let seen = if is_done { Answer::Absent } else { self.asked(look).await? };
                Ok(vec![written, seen])
            }
            Ok(both) => try_join_all(both.map(|request| self.asked(request))).await,
            Err(all) => try_join_all(all.into_iter().map(|request| self.asked(request))).await,
        }
    }

    fn wall_micros(&self) -> u64 {
        self.clock.wall_micros()
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        self.values.keys(prefix).await
    }
}
