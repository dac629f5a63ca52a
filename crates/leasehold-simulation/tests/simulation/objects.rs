//! An object store in which nothing expires, and the network in front of it. A read may be stale.
//! If it returns an age, the error of that age is up to the difference of its servers' clocks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_cell::Version;
use leasehold_cell::lasting::{Value, Values};
use leasehold_core::{Clock, Error, ErrorKind, Moment, Result};
use tokio::time::timeout;

use crate::cells::{Past, brief};
use crate::ground::SKEW;
use crate::net::Wire;

/// All objects. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Objects(Arc<Server>);

#[derive(Debug)]
struct Server {
    clock: Clock,
    state: Mutex<State>,
    past: Past<Option<Object>>,
}

#[derive(Debug)]
struct State {
    all: BTreeMap<String, Object>,
    writes: u64,
    rng: fastrand::Rng,
}

#[derive(Clone, Debug)]
struct Object {
    bytes: Vec<u8>,
    version: u64,
    modified: Moment,
}

impl Objects {
    pub(crate) fn new(clock: Clock, rng: fastrand::Rng) -> Self {
        let state = Mutex::new(State { all: BTreeMap::new(), writes: 0, rng });
        Self(Arc::new(Server { clock, state, past: Past::default() }))
    }

    /// Reads the current value, or an earlier one. The answer may contain its age. For the observer
    /// it always does.
    fn look(&self, key: &str, is_behind: bool, ages: bool) -> Option<Value> {
        let mut state = self.0.state.lock().unwrap();
        let mut seen = state.all.get(key).cloned();
        if is_behind {
            seen = self.0.past.old(key, &mut state.rng).unwrap_or(seen);
        } else {
            self.0.past.keep(key, &seen);
        }
        let Object { bytes, version, modified } = seen?;
        let wrong = SKEW.mul_f64(state.rng.f64());
        let age =
            (ages || state.rng.u32(0..4) > 0).then(|| self.0.clock.now().since(modified) + wrong);
        Some(Value { bytes, version: Version(version.to_string()), age })
    }

    fn write(&self, key: &str, bytes: Vec<u8>, on: Option<&Version>) -> Option<Version> {
        let mut state = self.0.state.lock().unwrap();
        let there = state.all.get(key).map(|object| object.version.to_string());
        if there.as_ref() != on.map(|version| &version.0) {
            return None;
        }
        state.writes += 1;
        let version = state.writes;
        let object = Object { bytes, version, modified: self.0.clock.now() };
        state.all.insert(key.to_owned(), object);
        Some(Version(version.to_string()))
    }

    fn remove(&self, key: &str) {
        self.0.state.lock().unwrap().all.remove(key);
    }
}

/// The observer's access to the objects.
#[async_trait]
impl Values for Objects {
    async fn get(&self, key: &str) -> Result<Option<Value>> {
        Ok(self.look(key, false, true))
    }

    async fn put(
        &self,
        key: &str,
        bytes: Vec<u8>,
        on: Option<&Version>,
    ) -> Result<Option<Version>> {
        Ok(self.write(key, bytes, on))
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.remove(key);
        Ok(())
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        let state = self.0.state.lock().unwrap();
        Ok(state.all.keys().filter(|key| key.starts_with(prefix)).cloned().collect())
    }
}

/// The objects, as one process reaches them.
#[derive(Debug)]
pub(crate) struct ValueWire {
    pub(crate) objects: Objects,
    pub(crate) wire: Arc<Wire>,
    /// Time limit for an answer.
    pub(crate) limit: Duration,
}

impl ValueWire {
    async fn call<T: Send + 'static>(
        &self,
        what: impl FnOnce() -> String,
        describe: fn(&T) -> String,
        done: impl Fn(&Objects) -> T + Clone + Send + 'static,
    ) -> Result<T> {
        let what = if self.wire.air.judge.is_told() { what() } else { String::new() };
        let asked = self.wire.call(what, describe, false, || {
            let (objects, done) = (self.objects.clone(), done.clone());
            async move { Ok(done(&objects)) }
        });
        let late = || Error::new(ErrorKind::Unreachable, "no answer in time");
        timeout(self.limit, asked).await.unwrap_or_else(|_| Err(late()))
    }
}

#[async_trait]
impl Values for ValueWire {
    async fn get(&self, key: &str) -> Result<Option<Value>> {
        let is_behind = self.wire.air.happens("behind", |weather| weather.stale);
        let key = key.to_owned();
        let what = format!("get {key}");
        let describe = |found: &Option<Value>| match found {
            Some(value) => format!("{} is {}", value.version.0, brief(&value.bytes)),
            None => "absent".into(),
        };
        self.call(|| what, describe, move |objects| objects.look(&key, is_behind, false)).await
    }

    async fn put(
        &self,
        key: &str,
        bytes: Vec<u8>,
        on: Option<&Version>,
    ) -> Result<Option<Version>> {
        let (key, on) = (key.to_owned(), on.cloned());
        let shown = (key.clone(), brief(&bytes), on.clone());
        // A proxy repeats the request, and returns the answer to the repetition.
        let repeats = self.wire.air.happens("repeated", |weather| weather.doubled);
        let put = move |objects: &Objects| {
            let first = objects.write(&key, bytes.clone(), on.as_ref());
            if repeats { objects.write(&key, bytes.clone(), on.as_ref()) } else { first }
        };
        self.call(|| format!("put {shown:?}"), |done| format!("{done:?}"), put).await
    }

    async fn delete(&self, key: &str) -> Result<()> {
        let key = key.to_owned();
        let what = format!("delete {key}");
        self.call(|| what, |()| "done".into(), move |objects| objects.remove(&key)).await
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        self.objects.keys(prefix).await
    }
}
