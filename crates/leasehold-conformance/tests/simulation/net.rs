//! The network between one process and the store.
//!
//! What was sent is on its way whatever becomes of the sender: each request runs in a task of its own, on
//! the test's runtime and in no process. It may come late, or twice, or never, and so may its answer; two
//! that were sent one after the other may arrive in the other order. Nothing says which of it happened.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::store::{
    Evict, Joined, LockInfo, Mode, Renew, Renewal, Reweighed, Signal, Store, StoreInfo,
};
use leasehold_core::{Claim, Error, ErrorKind, Name, Result};
use tokio::sync::oneshot;

use crate::judge::Judge;
use crate::plan::Weather;

/// What all processes' messages go through.
#[derive(Debug)]
pub(crate) struct Air {
    pub(crate) weather: Mutex<Weather>,
    pub(crate) dice: Mutex<fastrand::Rng>,
    pub(crate) judge: Arc<Judge>,
}

/// The store, as one process reaches it.
#[derive(Debug)]
pub(crate) struct Net {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) info: StoreInfo,
    pub(crate) air: Arc<Air>,
    pub(crate) process: usize,
    /// Whether nothing gets through just now.
    pub(crate) cut: Mutex<bool>,
}

/// What becomes of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Arrives(Duration),
    Lost,
    /// The connection breaks instead, which is noticed.
    Broken(Duration),
}

impl Net {
    fn fate(&self, what: &'static str) -> Fate {
        let weather = self.air.weather.lock().unwrap().clone();
        let mut dice = self.air.dice.lock().unwrap();
        let mut happens = |chance: u32| dice.u32(0..1_000) < chance;
        let (lost, broken, late) =
            (happens(weather.lost), happens(weather.broken), happens(weather.late));
        let nanos = |d: Duration| u64::try_from(d.as_nanos()).expect("short");
        let quick = Duration::from_nanos(dice.u64(100_000..=nanos(weather.quick)));
        let slow = Duration::from_nanos(dice.u64(100_000..=nanos(weather.slow)));
        drop(dice);
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

    fn is_doubled(&self) -> bool {
        let chance = self.air.weather.lock().unwrap().doubled;
        let doubled = self.air.dice.lock().unwrap().u32(0..1_000) < chance;
        if doubled {
            self.air.judge.saw("doubled");
        }
        doubled
    }

    /// One call: the request's way, what the store does, the answer's way.
    async fn call<T, F>(&self, what: String, ask: impl Fn(Arc<dyn Store>) -> F) -> Result<T>
    where
        T: std::fmt::Debug + Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let (answer, answered) = oneshot::channel();
        let (there, back) = (self.fate("request lost"), self.fate("reply lost"));
        let again = self.is_doubled().then(|| (self.fate("request lost"), ask(self.store.clone())));
        let first = ask(self.store.clone());
        let judge = self.air.judge.clone();
        let who = self.process;
        judge.tell(|| format!("  {who} sends {what}: {there:?}, {back:?}"));
        tokio::spawn(async move {
            match there {
                Fate::Arrives(after) => tokio::time::sleep(after).await,
                // Nobody notices: the answer never comes.
                Fate::Lost => return std::mem::forget(answer),
                Fate::Broken(after) => return tokio::time::sleep(after).await,
            }
            let done = first.await;
            judge.tell(|| format!("  {who} sent {what}: {}", shown(&done)));
            match back {
                Fate::Arrives(after) => tokio::time::sleep(after).await,
                Fate::Lost => return std::mem::forget(answer),
                Fate::Broken(after) => return tokio::time::sleep(after).await,
            }
            let _ = answer.send(done);
        });
        if let Some((Fate::Arrives(after), second)) = again {
            let judge = self.air.judge.clone();
            tokio::spawn(async move {
                tokio::time::sleep(after).await;
                let done = second.await;
                judge.tell(|| format!("  a double of {who}'s: {}", shown(&done)));
            });
        }
        let broke = || Error::new(ErrorKind::Unreachable, "the connection broke");
        answered.await.unwrap_or_else(|_| Err(broke()))
    }
}

fn shown<T: std::fmt::Debug>(done: &Result<T>) -> String {
    match done {
        Ok(done) => format!("{done:?}"),
        Err(error) => error.to_string(),
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

    async fn reweigh(&self, claim: &Claim) -> Result<Reweighed> {
        let reweigh = |store: Arc<dyn Store>| {
            let claim = claim.clone();
            async move { store.reweigh(&claim).await }
        };
        self.call(format!("reweigh {:?} {}", claim.name, claim.weight), reweigh).await
    }

    /// A push: it may be late, or be lost, and nobody notices.
    async fn changed(&self, claim: &Claim) -> Result<Signal> {
        let signal = self.store.changed(claim).await?;
        self.air.judge.tell(|| format!("  {} is told {signal:?}", self.process));
        match self.fate("push lost") {
            Fate::Arrives(after) | Fate::Broken(after) => tokio::time::sleep(after).await,
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
