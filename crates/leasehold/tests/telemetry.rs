//! The metrics and events that operators see, with the features `metrics` and `tracing`.
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use leasehold::store::{Evict, MemoryStore};
use leasehold::{Builder, ErrorKind};
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::FmtSpan;

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

/// What the recorder has received so far.
#[derive(Default)]
struct Recorded {
    seen: BTreeSet<String>,
    labels: BTreeSet<String>,
    /// The series, including those whose value is zero.
    series: BTreeSet<String>,
    undescribed: BTreeSet<String>,
    gauges: BTreeMap<String, f64>,
}

impl Recorded {
    fn look(&mut self, metrics: &Snapshotter) {
        for (key, _, description, value) in metrics.snapshot().into_vec() {
            let name = key.key().name().to_owned();
            if description.is_none() {
                self.undescribed.insert(name.clone());
            }
            let is_more_than_nothing = match &value {
                DebugValue::Counter(n) => *n > 0,
                DebugValue::Gauge(n) => n.into_inner() != 0.0,
                DebugValue::Histogram(all) => !all.is_empty(),
            };
            let labels = key.key().labels();
            self.series.extend(labels.map(|l| format!("{name} {}={}", l.key(), l.value())));
            let labels = key.key().labels().filter(|_| is_more_than_nothing);
            self.labels.extend(labels.map(|l| format!("{name} {}={}", l.key(), l.value())));
            if let DebugValue::Gauge(since_the_last) = value {
                *self.gauges.entry(name.clone()).or_default() += since_the_last.into_inner();
            }
            self.seen.insert(name);
        }
    }
}

const NAME: &str = "line\u{2028}break";

/// Returns the name in the form in which it is shown.
fn lock_name() -> String {
    leasehold::Name::new(NAME).unwrap().to_string()
}

// R14
#[tokio::test]
async fn metrics_and_events_report_the_lifecycle_of_a_lock() {
    let recorder = DebuggingRecorder::new();
    let metrics = recorder.snapshotter();
    recorder.install().unwrap();
    let log = Log::default();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_span_events(FmtSpan::NEW | FmtSpan::CLOSE)
        .with_writer(log.clone())
        .init();

    let locks = Builder::default().store(Arc::new(MemoryStore::new())).unwrap();
    let lock = locks.mutex(NAME).lease(Duration::from_secs(9));
    // Metrics for alerts begin at zero, so that the first increase is visible.
    let mut at_first = Recorded::default();
    at_first.look(&metrics);
    for name in ["leasehold_lost_total", "leasehold_renewal_failures_total", "leasehold_waiting"] {
        assert!(at_first.seen.contains(name), "{name} is not in {:?}", at_first.seen);
    }
    assert!(at_first.labels.is_empty(), "{:?}", at_first.labels);
    let guard = lock.lock().await.unwrap();
    assert_eq!(lock.try_lock().await.unwrap_err().kind(), ErrorKind::Contended);
    let token = guard.token();
    let mut collected = Recorded::default();
    // Another thread counts and then logs the event, after it has notified the guard.
    let until = async |collected: &mut Recorded, name: &str, event: &str| {
        for _ in 0..3_000 {
            collected.look(&metrics);
            let logged = String::from_utf8_lossy(&log.0.lock().unwrap()).contains(event);
            if logged && collected.seen.contains(name) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    // The numbers of holds and waits are updated by the call that changes them, so they are correct
    // immediately.
    let now = |collected: &mut Recorded| {
        collected.look(&metrics);
        ["leasehold_held", "leasehold_waiting"].map(|name| collected.gauges.get(name).copied())
    };
    let of = |held, waiting| [Some(held), Some(waiting)];
    assert_eq!(now(&mut collected), of(1.0, 0.0));
    until(&mut collected, "leasehold_renewals_total", "renewed").await;
    // f80: a task that waits for its own client's lock is reported after a while.
    let again = lock.clone();
    let waiting = tokio::spawn(async move { again.lock().await });
    until(
        &mut collected,
        "leasehold_renewals_total",
        "waiting for a lock that this client already holds",
    )
    .await;
    assert_eq!(now(&mut collected), of(1.0, 1.0));
    let since = collected.gauges["leasehold_oldest_wait_timestamp_seconds"];
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
    assert!((0.0..60.0).contains(&(clock - since)), "{since} at {clock}");
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    assert_eq!(now(&mut collected), of(1.0, 0.0));
    guard.release().await.unwrap();
    assert_eq!(now(&mut collected), of(0.0, 0.0));
    drop(lock.lock().await.unwrap());
    assert_eq!(now(&mut collected), of(0.0, 0.0));
    let guard = lock.lock().await.unwrap();
    locks.evict(guard.name().as_str(), Evict::Holders).await.unwrap();
    tokio::time::timeout(Duration::from_secs(30), guard.lost()).await.unwrap();
    until(&mut collected, "leasehold_lost_total", "lock lost").await;
    assert_eq!(now(&mut collected), of(0.0, 0.0));
    drop(guard);
    assert_eq!(now(&mut collected), of(0.0, 0.0));

    for name in [
        "leasehold_acquired_total",
        "leasehold_acquire_seconds",
        "leasehold_not_acquired_total",
        "leasehold_released_total",
        "leasehold_renewals_total",
        "leasehold_lost_total",
    ] {
        assert!(collected.seen.contains(name), "{name} is not in {:?}", collected.seen);
    }
    // f71: each label is one word from a fixed set, and all metrics are described.
    assert_eq!(collected.undescribed, BTreeSet::new());
    let expected = [
        "leasehold_acquire_seconds kind=mutex",
        "leasehold_acquired_total kind=mutex",
        "leasehold_held kind=mutex",
        "leasehold_lost_total kind=mutex",
        "leasehold_lost_total reason=gone",
        "leasehold_not_acquired_total kind=mutex",
        "leasehold_not_acquired_total reason=contended",
        "leasehold_oldest_wait_timestamp_seconds kind=mutex",
        "leasehold_released_total kind=mutex",
        "leasehold_waiting kind=mutex",
    ];
    assert_eq!(collected.labels.iter().map(String::as_str).collect::<Vec<_>>(), expected);
    // Only the requested number of locks get names as labels. A loss of such a lock also begins at
    // zero.
    leasehold::telemetry::label_names(1);
    for name in ["first", "second", "third", "first"] {
        locks.mutex(name).lock().await.unwrap().release().await.unwrap();
    }
    let mut named = Recorded::default();
    named.look(&metrics);
    for metric in ["leasehold_acquired_total", "leasehold_acquire_seconds", "leasehold_lost_total"]
    {
        let begins = format!("{metric} name=");
        let names = named.series.iter().filter_map(|series| series.strip_prefix(&begins));
        assert_eq!(names.collect::<Vec<_>>(), ["first", "other"], "of {metric}");
    }
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    for event in ["acquired", "not acquired", "released", "renewed", "lock lost"] {
        assert!(log.contains(event), "{event:?} is not in the log: {log}");
    }
    assert!(log.contains(&token.to_string()));
    // Waits and holds have spans, which contain the store calls for them.
    let hold = format!("hold{{name={} kind=mutex token={token}}}", lock_name());
    for (span, then) in [
        (format!("wait{{operation=\"try_lock\" name={}}}", lock_name()), "close"),
        (format!("wait{{operation=\"lock\" name={}}}:call{{what=\"join\"}}", lock_name()), "close"),
        (hold.clone(), "new"),
        (format!("{hold}:call{{what=\"leave\"}}"), "close"),
        (hold, "close"),
        ("call{what=\"renew\"}".into(), "close"),
    ] {
        let collected =
            |line: &str| line.contains(&format!("{span}: leasehold::telemetry: {then}"));
        assert!(log.lines().any(collected), "{span} {then} is not in the log: {log}");
    }
    // s90, s91: each event is one line, whatever the lock's name, and no event contains the secret
    // of a claim.
    assert!(!log.contains('\u{2028}'), "{log}");
    let secret = |word: &str| word.len() == 32 && word.bytes().all(|b| b.is_ascii_hexdigit());
    assert!(!log.split(|c: char| !c.is_ascii_alphanumeric()).any(secret), "{log}");
}

/// Acquires a lock of a store, if another test runs this in a child process, and logs everything to
/// stdout.
#[test]
fn logs_what_a_client_does() {
    let Ok(url) = std::env::var("LEASEHOLD_TEST_LOGGED") else { return };
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(std::io::stdout)
        .init();
    leasehold_test_support::run(async {
        let locks = match leasehold::connect(&*url).await {
            Ok(locks) => locks,
            Err(error) => return println!("connect: {error:#} {error:?}"),
        };
        let guard = locks.mutex("logged").lock().await.unwrap();
        let waited = locks.mutex("logged").lock_timeout(Duration::from_millis(100)).await;
        println!("lock: {:#}", waited.unwrap_err());
        guard.release().await.unwrap();
    });
}

// S91, S94
#[cfg(all(feature = "redis", feature = "postgres"))]
#[test]
fn logs_of_clients_and_drivers_contain_no_secrets() {
    const PASSWORD: &str = "s3cretword";
    let setup = testbed::Setup::new().fast().arg("--requirepass").arg(PASSWORD);
    let redis = testbed::Redis::with(setup);
    let postgres = testbed::Postgres::with(testbed::Setup::new().fast());
    let url = postgres.database();
    let database = url.rsplit('/').next().unwrap();
    postgres.admin(database, &format!("ALTER ROLE lh PASSWORD '{PASSWORD}'"));
    let of_postgres = postgres.url("lh", PASSWORD, database);
    for (url, expected) in [
        (format!("redis://:{PASSWORD}@127.0.0.1:{}/", redis.port()), "lock: "),
        (format!("redis://:{PASSWORD}-wrong@127.0.0.1:{}/", redis.port()), "connect: "),
        (of_postgres.clone(), "lock: "),
        (of_postgres.replace(PASSWORD, &format!("{PASSWORD}-wrong")), "connect: "),
    ] {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "logs_what_a_client_does", "--nocapture"]);
        let output = child.env("LEASEHOLD_TEST_LOGGED", &url).output().unwrap();
        let log = String::from_utf8(output.stdout).unwrap();
        assert!(log.contains(expected), "{url}: {log}");
        assert!(!log.contains(PASSWORD), "{log}");
        let secret = |word: &str| word.len() == 32 && word.bytes().all(|b| b.is_ascii_hexdigit());
        assert!(!log.split(|c: char| !c.is_ascii_alphanumeric()).any(secret), "{log}");
    }
}
