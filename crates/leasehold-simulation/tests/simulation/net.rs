//! The network between one process and the system that keeps the queues.
//!
//! A sent message stays in flight whatever happens to its sender. Each request runs in a task of
//! its own, on the test's runtime and in no process. It may arrive late, twice or never, and so may
//! its answer. Two requests may arrive in the other order. The sender cannot see which of these
//! happened.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::store::{
    Converted, Evict, Joined, LockInfo, Mode, Renew, Renewal, Signal, Store, StoreInfo,
};
use leasehold_core::{Claim, ClaimId, Error, ErrorKind, Name, Result};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until};

use crate::judge::Judge;
use crate::plan::Weather;

/// The part of the network that all processes share.
#[derive(Debug)]
pub(crate) struct Air {
    pub(crate) weather: Mutex<Weather>,
    pub(crate) rng: Mutex<fastrand::Rng>,
    pub(crate) judge: Arc<Judge>,
}

impl Air {
    /// Returns whether an event happens now. The weather contains its probability in parts per
    /// thousand.
    pub(crate) fn happens(&self, what: &'static str, chance: impl Fn(&Weather) -> u32) -> bool {
        let chance = chance(&self.weather.lock().unwrap());
        let happens = self.rng.lock().unwrap().u32(0..1_000) < chance;
        if happens {
            self.judge.saw(what);
        }
        happens
    }
}

/// The connection of one process to the system that keeps the queues.
#[derive(Debug)]
pub(crate) struct Wire {
    pub(crate) air: Arc<Air>,
    pub(crate) process: usize,
    /// Whether the connection is cut at present.
    pub(crate) cut: Mutex<bool>,
}

/// The fate of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Arrives(Duration),
    Lost,
    /// The connection breaks instead, which the client notices.
    Broken(Duration),
}

impl Wire {
    pub(crate) fn fate(&self, what: &'static str) -> Fate {
        let weather = self.air.weather.lock().unwrap().clone();
        let mut rng = self.air.rng.lock().unwrap();
        let mut happens = |chance: u32| rng.u32(0..1_000) < chance;
        let (lost, broken, late) =
            (happens(weather.lost), happens(weather.broken), happens(weather.late));
        let nanos = |d: Duration| u64::try_from(d.as_nanos()).expect("short");
        let quick = Duration::from_nanos(rng.u64(100_000..=nanos(weather.quick)));
        let slow = Duration::from_nanos(rng.u64(100_000..=nanos(weather.slow)));
        drop(rng);
        if *self.cut.lock().unwrap() || lost {
            self.air.judge.saw(what);
            return Fate::Lost;
        }
        if late {
            self.air.judge.saw("late");
        }
        match broken {
            true => Fate::Broken(quick),
            false => Fate::Arrives(if late { slow } else { quick }),
        }
    }

    /// Makes one call, which consists of the request's way, its execution and the answer's way.
    /// `overtakes` means that a duplicate may be executed first.
    pub(crate) async fn call<T, F>(
        &self,
        what: String,
        describe: fn(&T) -> String,
        overtakes: bool,
        ask: impl Fn() -> F,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let (answer, answered) = oneshot::channel();
        let (there, back) = (self.fate("request lost"), self.fate("reply lost"));
        let again = self.air.happens("doubled", |weather| weather.doubled);
        let again = again.then(|| (after(there, self.fate("request lost"), overtakes), ask()));
        let first = ask();
        let judge = self.air.judge.clone();
        let actor = self.process;
        judge.log(|| format!("  {actor} sends {what}: request {there:?}, reply {back:?}"));
        tokio::spawn(async move {
            match there {
                Fate::Arrives(after) => sleep(after).await,
                // The client does not notice this, because it only gets no answer.
                Fate::Lost => return std::mem::forget(answer),
                Fate::Broken(after) => return sleep(after).await,
            }
            let done = first.await;
            judge.log(|| format!("  {actor}'s {what} was executed: {}", shown(describe, &done)));
            match back {
                Fate::Arrives(after) => sleep(after).await,
                Fate::Lost => return std::mem::forget(answer),
                Fate::Broken(after) => return sleep(after).await,
            }
            let _ = answer.send(done);
        });
        if let Some((Fate::Arrives(after), second)) = again {
            let judge = self.air.judge.clone();
            tokio::spawn(async move {
                sleep(after).await;
                let done = second.await;
                judge.log(|| {
                    format!("  a duplicate of {actor}'s request: {}", shown(describe, &done))
                });
            });
        }
        let broke = || Error::new(ErrorKind::Unreachable, "the connection broke");
        answered.await.unwrap_or_else(|_| Err(broke()))
    }
}

/// Returns the fate of a duplicate.
fn after(first: Fate, double: Fate, overtakes: bool) -> Fate {
    match (first, double) {
        (Fate::Arrives(first), Fate::Arrives(double)) if !overtakes => {
            // Timers have whole milliseconds.
            Fate::Arrives(first + double + Duration::from_millis(1))
        }
        _ => double,
    }
}

fn shown<T>(describe: fn(&T) -> String, done: &Result<T>) -> String {
    match done {
        Ok(done) => describe(done),
        Err(error) => format!("{error:#}"),
    }
}

/// The store, as one process reaches it.
#[derive(Debug)]
pub(crate) struct Net {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) info: StoreInfo,
    pub(crate) wire: Arc<Wire>,
    /// Notifications that arrive a second time, and when.
    pub(crate) echoes: Mutex<HashMap<ClaimId, (Instant, Signal)>>,
}

impl Net {
    async fn call<T, F>(&self, what: String, ask: impl Fn(Arc<dyn Store>) -> F) -> Result<T>
    where
        T: std::fmt::Debug + Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.wire.call(what, |reply| format!("{reply:?}"), true, || ask(self.store.clone())).await
    }
}

#[async_trait]
impl Store for Net {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let join = |store: Arc<dyn Store>| {
            let claim = claim.clone();
            async move { store.join(&claim, mode).await }
        };
        self.call(format!("join {:?}", claim.name), join).await
    }

    async fn renew(&self, renewals: &[Renew]) -> Result<Vec<Renewal>> {
        let renew = |store: Arc<dyn Store>| {
            let renewals = renewals.to_vec();
            async move { store.renew(&renewals).await }
        };
        self.call(format!("renew {}", renewals.len()), renew).await
    }

    async fn leave(&self, claim: &Claim, keep: Option<Duration>) -> Result<bool> {
        let leave = |store: Arc<dyn Store>| {
            let claim = claim.clone();
            async move { store.leave(&claim, keep).await }
        };
        self.call(format!("leave {:?}", claim.name), leave).await
    }

    async fn convert(&self, claim: &Claim) -> Result<Converted> {
        let convert = |store: Arc<dyn Store>| {
            let claim = claim.clone();
            async move { store.convert(&claim).await }
        };
        self.call(format!("convert {:?} {}", claim.name, claim.weight), convert).await
    }

    /// Returns a notification. It may be late, lost or duplicated without a sign.
    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        let (echo, wire) = (self.echoes.lock().unwrap().remove(&claim.id), &self.wire);
        let again = async {
            match echo {
                Some((at, signal)) => {
                    sleep_until(at).await;
                    signal
                }
                None => std::future::pending().await,
            }
        };
        let signal = tokio::select! {
            biased;
            signal = again => {
                wire.air.judge.log(|| format!("  {} receives {signal:?} again", wire.process));
                return Ok(signal);
            }
            signal = self.store.changed(claim) => signal?,
        };
        wire.air.judge.log(|| format!("  {} receives {signal:?}", wire.process));
        if wire.air.happens("push doubled", |weather| weather.doubled)
            && let Fate::Arrives(after) = wire.fate("push lost")
        {
            self.echoes.lock().unwrap().insert(claim.id, (Instant::now() + after, signal));
        }
        match wire.fate("push lost") {
            Fate::Arrives(after) | Fate::Broken(after) => sleep(after).await,
            Fate::Lost => std::future::pending().await,
        }
        Ok(signal)
    }

    async fn read(&self, name: &Name) -> Result<Option<LockInfo>> {
        self.store.read(name).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        self.store.list(prefix).await
    }

    async fn evict(&self, name: &Name, which: Evict) -> Result<usize> {
        self.store.evict(name, which).await
    }
}
