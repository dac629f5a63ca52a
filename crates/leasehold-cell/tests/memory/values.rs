//! An object store in memory with faults of proxies and stores. It repeats each write and returns
//! the answer to the repetition, or it answers some keys late or never. It counts the requests.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_cell::Version;
use leasehold_cell::lasting::{Value, Values};
use leasehold_core::{Error, ErrorKind, Result};

#[derive(Debug, Default)]
pub(crate) struct Objects(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    all: BTreeMap<String, (Vec<u8>, u64)>,
    writes: u64,
    repeats: bool,
    /// Reads of keys with these endings fail.
    ill: Vec<String>,
    takes: Duration,
    /// Number of reads and writes of each key.
    asked: BTreeMap<String, [u64; 2]>,
}

impl Objects {
    fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut self.0.lock().unwrap())
    }

    /// Does each write twice, so that the repetition is refused.
    pub(crate) fn repeat(&self, repeats: bool) {
        self.with(|state| state.repeats = repeats);
    }

    /// Makes reads of keys with this ending fail from now on.
    pub(crate) fn fail(&self, ends: &str) {
        self.with(|state| state.ill.push(ends.to_owned()));
    }

    /// Sets the time that each reply takes.
    pub(crate) fn take(&self, takes: Duration) {
        self.with(|state| state.takes = takes);
    }

    /// Returns the number of reads and writes of keys that contain `part`, and resets all counts.
    pub(crate) fn asked(&self, part: &str) -> [u64; 2] {
        self.with(|state| {
            let asked = state.asked.iter().filter(|(key, _)| key.contains(part));
            let sum = asked.fold([0; 2], |sum, (_, n)| [sum[0] + n[0], sum[1] + n[1]]);
            state.asked.clear();
            sum
        })
    }

    async fn arrives(&self, key: &str, what: usize) {
        let takes = self.with(|state| {
            state.asked.entry(key.to_owned()).or_default()[what] += 1;
            state.takes
        });
        match takes.is_zero() {
            true => tokio::task::yield_now().await,
            false => tokio::time::sleep(takes).await,
        }
    }
}

impl State {
    fn put(&mut self, key: &str, bytes: Vec<u8>, on: Option<&Version>) -> Option<Version> {
        let there = self.all.get(key).map(|(_, version)| version.to_string());
        if there.as_deref() != on.map(|version| &*version.0) {
            return None;
        }
        self.writes += 1;
        self.all.insert(key.to_owned(), (bytes, self.writes));
        Some(Version(self.writes.to_string()))
    }
}

#[async_trait]
impl Values for Objects {
    async fn get(&self, key: &str) -> Result<Option<Value>> {
        self.arrives(key, 0).await;
        self.with(|state| {
            if state.ill.iter().any(|ends| key.ends_with(ends)) {
                return Err(Error::new(ErrorKind::Unreachable, "503 for this key"));
            }
            let there = state.all.get(key).cloned();
            Ok(there.map(|(bytes, version)| {
                let version = Version(version.to_string());
                Value { bytes, version, age: None }
            }))
        })
    }

    async fn put(
        &self,
        key: &str,
        bytes: Vec<u8>,
        on: Option<&Version>,
    ) -> Result<Option<Version>> {
        self.arrives(key, 1).await;
        let (done, repeats) = self.with(|state| (state.put(key, bytes.clone(), on), state.repeats));
        if !repeats {
            return Ok(done);
        }
        tokio::task::yield_now().await;
        Ok(self.with(|state| state.put(key, bytes, on)))
    }

    async fn delete(&self, key: &str) -> Result<()> {
        self.arrives(key, 1).await;
        self.with(|state| state.all.remove(key));
        Ok(())
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        Ok(self.with(|state| {
            state.all.keys().filter(|key| key.starts_with(prefix)).cloned().collect()
        }))
    }
}
