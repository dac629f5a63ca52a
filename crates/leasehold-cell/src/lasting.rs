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
//! - *A write is repeated on its way*, by a proxy or by the store itself: the repetition of a write that was done is
//!   refused, and only that answer comes back. So a refusal alone proves nothing. The client reads the value, and
//!   compares the digits in it with those that it sent (`lasting/framed.rs`). The same digits: the write was done,
//!   for no other write has them, and it is answered as done, with the version that was read. Digits of a successor:
//!   the write is [in doubt](Answer::InDoubt). A refused write is never answered as done for any other reason,
//!   so the one order of events of each value stands: a write is done at most once, because each of its repetitions has
//!   the same condition, and no version comes again.

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
    /// an age, it takes a second read after its lifetime.
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

/// A value of ours as it was read.
struct Read {
    value: Vec<u8>,
    version: Version,
    is_over: bool,
}

/// The result of a write.
enum Put {
    Done(Version),
    /// The current value, and whether it may have been written in place of this write.
    Refused {
        there: Option<(Value, Look)>,
        kin: Kin,
    },
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
        // A life begins with the writing, by whatever clock, and not with the answer: a late one proves the same.
        let slow = Duration::from_secs(60);
        let system = System { grain, slow, looks_behind: true, ..lasting };
        Self { values, system, ages: Ages::default(), clock: Clock::default() }
    }

    /// Uses this clock, for tests.
    #[must_use]
    pub fn clock(self, clock: Clock) -> Self {
        Self { clock, ..self }
    }

    /// One that comes from a queue, which knows by itself what is not ours.
    async fn asked(&self, request: Request) -> Result<Answer> {
        Ok(self.write(request).await?.0)
    }

    /// One that finds only what is ours.
    pub(crate) async fn one(&self, request: Request) -> Result<Answer> {
        match request {
            Request::Get { key } => Ok(match self.read(&key).await? {
                Some(Read { value, version, is_over: false }) => found(value, version, None),
                _ => Answer::Absent,
            }),
            write => Ok(self.write(write).await?.0),
        }
    }

    /// What a queue is shown of this, whoever wrote it.
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

    /// Writes, and tells what is there where that was refused.
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

    /// In the place of nothing, or of what is over.
    async fn create(&self, key: &str, value: &[u8], life: Life) -> Result<Put> {
        let created = self.put(key, value, life, None).await?;
        // What lasts is in the place of nothing that does not.
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

    /// Whatever is there.
    pub(crate) async fn delete(&self, key: &str) -> Result<()> {
        self.ages.forget(key);
        self.values.delete(key).await
    }

    /// Writes it. Where that is refused, what is there decides whether it was done.
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

/// Between the digits of the write and the version that the system gave it.
const BESIDE: char = ' ';

/// A version that says which write made it.
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
                // Where the write is done, the look behind it is left out; where not, there was one.
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
