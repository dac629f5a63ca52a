//! The warnings that programs find in their logs, with the feature `tracing`.

use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock};

use testbed::{Redis, Setup, ZooKeeper, ZooKeeperSetup};
use tracing_subscriber::fmt::MakeWriter;

/// What was logged so far by all tests of this program.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn get() -> &'static Self {
        static LOG: OnceLock<Log> = OnceLock::new();
        LOG.get_or_init(|| {
            let log = Self::default();
            let writer = log.clone();
            tracing_subscriber::fmt().with_ansi(false).with_writer(writer).init();
            log
        })
    }

    /// Returns the warnings with this text.
    fn warnings(&self, text: &str) -> Vec<String> {
        let bytes = self.0.lock().unwrap().clone();
        let lines = String::from_utf8(bytes).unwrap();
        let found = lines.lines().filter(|line| line.contains(" WARN ") && line.contains(text));
        found.map(str::to_owned).collect()
    }
}

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

// S20
#[tokio::test]
async fn connecting_to_an_evicting_redis_logs_a_warning() {
    let log = Log::get();
    let with_policy = |policy: &str| {
        let setup = Setup::new().fast().arg("--maxmemory").arg("100mb");
        Redis::with(setup.arg("--maxmemory-policy").arg(policy))
    };
    let keeping = with_policy("noeviction");
    leasehold::connect(keeping.url()).await.unwrap();
    assert_eq!(log.warnings("maxmemory-policy"), [""; 0]);
    let evicting = with_policy("allkeys-lru");
    leasehold::connect(evicting.url()).await.unwrap();
    let warnings = log.warnings("maxmemory-policy");
    assert!(matches!(&warnings[..], [one] if one.contains("allkeys-lru")), "{warnings:?}");
}

// S73
#[tokio::test]
async fn zookeeper_sequences_that_run_out_are_logged_once_and_long_before() {
    let log = Log::get();
    let server = ZooKeeper::with(&ZooKeeperSetup::new().sequences_at("/late", 1 << 30));
    let locks =
        leasehold::connect(format!("zookeeper://127.0.0.1:{}/", server.port())).await.unwrap();
    for name in ["early", "late", "late"] {
        locks.mutex(name).lock().await.unwrap().release().await.unwrap();
    }
    let warnings = log.warnings("running out of sequence numbers");
    assert!(matches!(&warnings[..], [one] if one.contains("/late")), "{warnings:?}");
}
