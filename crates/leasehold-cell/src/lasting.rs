//! Cells in a system where nothing expires, and which only supports conditional writes of values,
//! such as objects in a bucket. An adapter describes the system as [`Values`].
//!
//! - *Atomicity.* A write is atomic and names the version that it replaces, or requires a new key.
//!   Each value begins with a random line, so no version is reused even if versions depend only on
//!   the content (`lasting/framed.rs`).
//! - *Clock.* Each client decides on its own whether something has expired (`lasting/aging.rs`). It
//!   uses the time since it first saw the value, by its own clock, or the age that the system
//!   reports. Only sessions and markers next to a lock expire. A queue is kept permanently.
//! - *Wrong decisions.* A read may be stale, so its result alone has no consequences. A client that
//!   considers a session dead replaces it with a marker, provided that the session has not changed.
//!   If the session was renewed since, the write is refused, and the session is alive
//!   ([`System::looks_behind`]).
//! - *Removal.* A value is first replaced by a marker, conditionally, and then deleted
//!   unconditionally. Only another marker ever takes the place of a removed value. A client that
//!   crashes between the two steps leaves a marker, which has the same meaning as no value.
//! - *Lost replies, dropped futures, crashes.* The write may still be done later, until another
//!   client writes. [`Cells`] allows this.
//! - *Repeated writes.* If a proxy or the store repeats a write that was done, the repetition is
//!   refused, and only that answer arrives. So a refusal alone proves nothing. The client reads the
//!   value and compares the digits in it with its own (`lasting/framed.rs`).
//! - *Same digits.* The write was done, because no other write has these digits. The result is the
//!   version that was read.
//! - *Digits of a successor*, or of a much later write that does not list ours any more. It is [in
//!   doubt](Answer::InDoubt) whether our write was done.
//! - *One order of events.* A refused write is never reported as done for any other reason. A write
//!   is done at most once, because each repetition has the same condition and no version is reused.

mod aging;
mod framed;

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::{join_all, try_join_all};
use leasehold_core::{Clock, Result};

use self::aging::{Ages, Left, Life, Look};
use self::framed::Kin;
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
    /// an age, a second read is needed after the value's lifetime.
    pub age: Option<Duration>,
}

/// A system that can write a value if it has not changed since it was read.
///
/// A write that succeeded may be answered as refused if a proxy or the system repeats it.
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

/// A value that leasehold wrote, as it was read.
struct Read {
    value: Vec<u8>,
    version: Version,
    is_over: bool,
}

/// The result of a write.
enum Put {
    Done(Version),
    /// Nothing was written. Contains the current value, and its relation to this write.
    Refused {
        there: Option<(Value, Look)>,
        kin: Kin,
    },
}

/// Cells that are stored as [`Values`], as seen by one client.
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
        // A write confirms that a session is gone. By any clock, a lifetime begins with the write
        // and not with the reply, so a late reply proves as much as an early one.
        let slow = Duration::from_secs(60);
        let system = System { grain, slow, looks_behind: true, ..lasting };
        Self { values, system, ages: Ages::default(), clock: Clock::default() }
    }

    /// Uses `clock` instead of the system's clock, for tests.
    #[must_use]
    pub fn clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }

    /// Runs a request for a queue. Returns foreign values unchanged, because the queue's decoder
    /// recognizes them.
    async fn asked(&self, request: Request) -> Result<Answer> {
        Ok(self.write(request).await?.0)
    }

    /// Runs a request for a key that must contain only values that leasehold wrote.
    pub(crate) async fn one(&self, request: Request) -> Result<Answer> {
        match request {
            Request::Get { key } => Ok(match self.read(&key).await? {
                Some(Read { value, version, is_over: false }) => found(value, version, None),
                _ => Answer::Absent,
            }),
            write => Ok(self.write(write).await?.0),
        }
    }

    /// Returns the answer for a queue, even if another program wrote the value.
    fn shown(&self, key: &str, there: Option<(Value, Look)>) -> Answer {
        let Some((Value { bytes, version, age }, look)) = there else { return Answer::Absent };
        match framed::read(&bytes) {
            Ok((life, value)) => match self.ages.left(key, &version.0, life, look, age) {
                Left::Nothing => Answer::Absent,
                Left::Some(remaining) => found(value.to_vec(), version, Some(remaining)),
                Left::All => found(value.to_vec(), version, None),
            },
            Err(_) => found(bytes, version, None),
        }
    }

    /// Runs a write. If it is refused, also returns the current cell.
    async fn write(&self, request: Request) -> Result<(Answer, Option<Answer>)> {
        let life = |lives: Option<_>| lives.map_or(Life::Lasting, Life::Short);
        let is_doubted = matches!(request, Request::Replace { .. });
        let (key, put) = match request {
            Request::Create { key, value, lives } => {
                let put = self.create(&key, &value, life(lives)).await?;
                (key, put)
            }
            Request::Replace { key, value, version, lives } => {
                let put = self.put(&key, &value, life(lives), Some(&version)).await?;
                (key, put)
            }
            Request::Touch { key, value, version, lives } => {
                let put = self.put(&key, &value, Life::Short(lives), Some(&version)).await?;
                (key, put)
            }
            Request::Remove { key, version } => {
                return match self.put(&key, b"", Life::Over, Some(&version)).await? {
                    Put::Done(_) => self.delete(&key).await.map(|()| (Answer::Done, None)),
                    Put::Refused { there, .. } => {
                        Ok((Answer::Refused, Some(self.shown(&key, there))))
                    }
                };
            }
            Request::Get { key } => return Ok((self.shown(&key, self.look(&key).await?), None)),
        };
        Ok(match put {
            Put::Done(version) => (Answer::Written(version), None),
            Put::Refused { there, kin } => {
                let is_doubted = is_doubted && kin == Kin::Successor;
                let answer = if is_doubted { Answer::InDoubt } else { Answer::Refused };
                (answer, Some(self.shown(&key, there)))
            }
        })
    }

    /// Creates a value if the key has no value or an expired one.
    async fn create(&self, key: &str, value: &[u8], life: Life) -> Result<Put> {
        let created = self.put(key, value, life, None).await?;
        // A permanent value never replaces one that expires.
        let Put::Refused { there: Some((there, look)), .. } = &created else { return Ok(created) };
        if life == Life::Lasting {
            return Ok(created);
        }
        let (theirs, _) = framed::read(&there.bytes)?;
        match self.ages.is_over(key, &there.version.0, theirs, *look, there.age) {
            true => self.put(key, value, life, Some(&there.version)).await,
            false => Ok(created),
        }
    }

    /// Deletes the key unconditionally.
    pub(crate) async fn delete(&self, key: &str) -> Result<()> {
        self.ages.forget(key);
        self.values.delete(key).await
    }

    /// Writes the value. If the write is refused, the current value decides whether the write was
    /// done.
    async fn put(&self, key: &str, value: &[u8], life: Life, on: Option<&Version>) -> Result<Put> {
        let (parent, theirs) = on.map_or(("", None), |on| {
            let (parent, theirs) = on.0.split_once(BESIDE).unwrap_or(("", &on.0));
            (parent, Some(Version(theirs.to_owned())))
        });
        let (bytes, nonce) = framed::written(value, life, parent)?;
        if let Some(version) = self.values.put(key, bytes, theirs.as_ref()).await? {
            return Ok(Put::Done(named(&nonce, &version)));
        }
        let there = self.look(key).await?;
        let theirs = there.as_ref().map_or("", |(value, _)| framed::nonce(&value.bytes));
        let kin = framed::kin(theirs, &nonce);
        Ok(match there {
            Some((value, _)) if kin == Kin::Same => Put::Done(value.version),
            there => Put::Refused { there, kin },
        })
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
        let Some(mut value) = self.values.get(key).await? else {
            self.ages.forget(key);
            return Ok(None);
        };
        value.version = named(framed::nonce(&value.bytes), &value.version);
        Ok(Some((value, Look { sent, answered: self.clock.now() })))
    }
}

/// Separates the digits of the write from the system's version.
const BESIDE: char = ' ';

/// Returns a version that also identifies the write that made it.
fn named(nonce: &str, version: &Version) -> Version {
    Version(format!("{nonce}{BESIDE}{}", version.0))
}

fn found(value: Vec<u8>, version: Version, remaining: Option<Duration>) -> Answer {
    Answer::Found(Found { value, version, remaining })
}

#[async_trait]
impl<V: Values> Cells for Lasting<V> {
    fn system(&self) -> &System {
        &self.system
    }

    async fn run(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        match <[Request; 2]>::try_from(requests) {
            Ok([write, look]) if write.key() == look.key() => {
                // A successful write needs no read after it. A refused write has already read the
                // cell.
                let (written, seen) = match write {
                    Request::Get { .. } => {
                        (self.asked(write).await?, Some(self.asked(look).await?))
                    }
                    write => self.write(write).await?,
                };
                Ok(vec![written, seen.unwrap_or(Answer::Absent)])
            }
            Ok(both) => try_join_all(both.map(|request| self.asked(request))).await,
            Err(all) => try_join_all(all.into_iter().map(|request| self.asked(request))).await,
        }
    }

    async fn looks(&self, keys: Vec<String>, _limit: Duration) -> Vec<Result<Answer>> {
        join_all(keys.into_iter().map(|key| self.asked(Request::Get { key }))).await
    }

    fn wall_micros(&self) -> u64 {
        self.clock.wall_micros()
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        self.values.keys(prefix).await
    }
}
