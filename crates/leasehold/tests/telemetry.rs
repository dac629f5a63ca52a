//! What operators see, with the features `metrics` and `tracing`.
#![cfg(all(feature = "metrics", feature = "tracing"))]

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::store::{Evict, MemoryStore};
use leasehold::{Builder, ErrorKind};
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tracing_subscriber::fmt::MakeWriter;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

/// What the recorder was told so far.
#[derive(Default)]
struct Told {
    seen: BTreeSet<String>,
    labels: BTreeSet<String>,
    undescribed: BTreeSet<String>,
    gauges: BTreeMap<String, f64>,
}

impl Told {
    fn look(&mut self, metrics: &Snapshotter) {
        for (key, _, description, value) in metrics.snapshot().into_vec() {
            let name = key.key().name().to_owned();
            if description.is_none() {
                self.undescribed.insert(name.clone());
            }
            let labels = key.key().labels();
            self.labels.extend(labels.map(|l| format!("{name} {}={}", l.key(), l.value())));
            if let DebugValue::Gauge(since_the_last) = value {
                *self.gauges.entry(name.clone()).or_default() += since_the_last.into_inner();
            }
            self.seen.insert(name);
        }
    }
}

#[tokio::test]
async fn r14_metrics_and_events_tell_the_life_of_a_lock() {
    let recorder = DebuggingRecorder::new();
    let metrics = recorder.snapshotter();
    recorder.install().unwrap();
    let log = Log::default();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(log.clone())
        .init();

    let locks = Builder::default().store(Arc::new(MemoryStore::new())).unwrap();
    let lock = locks.mutex("line\u{2028}break").lease(Duration::from_secs(9));
    let guard = lock.lock().await.unwrap();
    assert_eq!(lock.try_lock().await.unwrap_err().kind(), ErrorKind::Contended);
    let token = guard.token();
    let mut told = Told::default();
    // It is counted, then logged, by another thread, and after the guard has been told.
    let until = async |told: &mut Told, name: &str, event: &str| {
        for _ in 0..3_000 {
            told.look(&metrics);
            let logged = String::from_utf8_lossy(&log.0.lock().unwrap()).contains(event);
            if logged && told.seen.contains(name) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    // How many are held and wait: told by whoever ends it, so at once.
    let now = |told: &mut Told| {
        told.look(&metrics);
        ["leasehold_held", "leasehold_waiting"].map(|name| told.gauges.get(name).copied())
    };
    let of = |held, waiting| [Some(held), waiting];
    assert_eq!(now(&mut told), of(1.0, None));
    until(&mut told, "leasehold_renewals_total", "renewed").await;
    // f80: who waits behind its own client is told of after a while.
    let again = lock.clone();
    let waiting = tokio::spawn(async move { again.lock().await });
    until(&mut told, "leasehold_renewals_total", "waits for a lock that this client holds itself")
        .await;
    assert_eq!(now(&mut told), of(1.0, Some(1.0)));
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    assert_eq!(now(&mut told), of(1.0, Some(0.0)));
    guard.release().await.unwrap();
    assert_eq!(now(&mut told), of(0.0, Some(0.0)));
    drop(lock.lock().await.unwrap());
    assert_eq!(now(&mut told), of(0.0, Some(0.0)));
    let guard = lock.lock().await.unwrap();
    locks.evict(guard.name().as_str(), Evict::Holders).await.unwrap();
    tokio::time::timeout(Duration::from_secs(30), guard.lost()).await.unwrap();
    until(&mut told, "leasehold_lost_total", "lock lost").await;
    assert_eq!(now(&mut told), of(0.0, Some(0.0)));
    drop(guard);
    assert_eq!(now(&mut told), of(0.0, Some(0.0)));

    for name in [
        "leasehold_acquired_total",
        "leasehold_acquire_seconds",
        "leasehold_not_acquired_total",
        "leasehold_released_total",
        "leasehold_renewals_total",
        "leasehold_lost_total",
    ] {
        assert!(told.seen.contains(name), "{name} is not in {:?}", told.seen);
    }
    // f71: one word each, of one kind of words, and all are described.
    assert_eq!(told.undescribed, BTreeSet::new());
    let expected = [
        "leasehold_acquire_seconds kind=mutex",
        "leasehold_acquired_total kind=mutex",
        "leasehold_held kind=mutex",
        "leasehold_lost_total kind=mutex",
        "leasehold_lost_total reason=gone",
        "leasehold_not_acquired_total kind=mutex",
        "leasehold_not_acquired_total reason=contended",
        "leasehold_released_total kind=mutex",
        "leasehold_waiting kind=mutex",
    ];
    assert_eq!(told.labels.iter().map(String::as_str).collect::<Vec<_>>(), expected);
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    for event in ["acquired", "not acquired", "released", "renewed", "lock lost"] {
        assert!(log.contains(event), "{event:?} is not in the log: {log}");
    }
    assert!(log.contains(&token.to_string()));
    // s90, s91: one line an event, whatever the name; never the secret of a claim.
    assert!(!log.contains('\u{2028}'), "{log}");
    let secret = |word: &str| word.len() == 32 && word.bytes().all(|b| b.is_ascii_hexdigit());
    assert!(!log.split(|c: char| !c.is_ascii_alphanumeric()).any(secret), "{log}");
}
