//! Objects: the costs of calls, the detection of dead clients by one read, and lost replies.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::time::{Duration, Instant};

use leasehold::store::cell::{CellStore, objects};
use leasehold::{Builder, Client, ErrorKind, MutexGuard};
use leasehold_test_support::*;
use testbed::{Proxy, SeaweedFs};
use tokio::runtime::Handle;

/// Returns the URL with the proxy instead of the server.
fn through(proxy: &Proxy, server: &SeaweedFs, url: &str) -> String {
    url.replace(&server.endpoint(), &format!("http://127.0.0.1:{}", proxy.port()))
}

async fn with_store(url: &str) -> (Client, Arc<CellStore>) {
    let url = format!("{url}&{LONG_SESSION}");
    let store = Arc::new(objects::connect(&url, &Handle::current()).await.unwrap());
    (Builder::default().store(store.clone()).unwrap(), store)
}

// R13
#[test]
fn object_store_pairs_take_two_writes_and_failed_tries_write_nothing() {
    const PAIRS: usize = 50;
    run(async {
        let server = testbed::seaweed();
        let url = server.url("r13");
        let (locks, store) = with_store(&url).await;
        let (others, theirs) = with_store(&url).await;
        locks.mutex("r13").lock().await.unwrap().release().await.unwrap();
        let mut costs = Vec::new();
        for _ in 0..PAIRS {
            let before = store.round_trips();
            locks.mutex("r13").lock().await.unwrap().release().await.unwrap();
            costs.push(store.round_trips() - before);
        }
        costs.sort_unstable();
        // The client repeats a request if a busy server does not answer it in time.
        assert_eq!(costs[..PAIRS * 4 / 5], [2; PAIRS * 4 / 5], "{costs:?}");
        let guard = locks.mutex("r13").lock().await.unwrap();
        others.mutex("r13").try_lock().await.unwrap_err();
        let kept = server.ask("GET", "r13/l:r13", "");
        let before = theirs.round_trips();
        others.mutex("r13").try_lock().await.unwrap_err();
        assert!(theirs.round_trips() - before <= 3, "{}", theirs.round_trips() - before);
        // Each write would change the digits.
        assert_eq!(
            server.ask("GET", "r13/l:r13", ""),
            kept,
            "a failed try_lock wrote to the store"
        );
        guard.release().await.unwrap();
    });
}

/// Counts the requests per minute before the server. The page of the store contains these numbers.
#[test]
fn requests_per_minute_match_the_documentation() {
    const SECONDS: u32 = 20;
    run(async {
        let server = testbed::seaweed();
        let asked: [Arc<[AtomicU32; 2]>; 2] = Default::default();
        let counting = |asked: &Arc<[AtomicU32; 2]>| {
            let asked = asked.clone();
            crate::objects_front::front(server.port(), move |first| {
                asked[usize::from(!first.starts_with("GET"))].fetch_add(1, SeqCst);
                crate::objects_front::Does::Passes
            })
        };
        let url = server.url("minute");
        let through =
            |port: u16| url.replace(&server.endpoint(), &format!("http://127.0.0.1:{port}"));
        let holder = connect(&through(counting(&asked[0]))).await;
        let waiter = connect(&through(counting(&asked[1]))).await;
        let guard = holder.mutex("minute").lock().await.unwrap();
        let waiting =
            tokio::spawn(
                async move { waiter.mutex("minute").lock_timeout(PATIENCE).await.map(drop) },
            );
        until_queued(&holder, "minute", 2).await;
        // The first polls of a waiter come soon after one another.
        tokio::time::sleep(Duration::from_secs(3)).await;
        let before = asked.each_ref().map(|asked| asked.each_ref().map(|n| n.load(SeqCst)));
        tokio::time::sleep(Duration::from_secs(SECONDS.into())).await;
        let minute = |who: usize, what: usize| {
            (asked[who][what].load(SeqCst) - before[who][what]) * 60 / SECONDS
        };
        let [holds, waits] = [0, 1].map(|who| [minute(who, 0), minute(who, 1)]);
        println!("reads and writes per minute: holder {holds:?}, waiter {waits:?}");
        // The holder has 12 reads and 20 writes. The waiter has 60, 30 and 12 reads, and 20 writes.
        // Each may be one more at either end.
        assert!(holds[0] <= 18 && holds[1] <= 26, "reads and writes of the holder: {holds:?}");
        assert!(waits[0] <= 120 && waits[1] <= 26, "reads and writes of the waiter: {waits:?}");
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap();
    });
}

/// Tries to acquire the lock until the server answers. On a busy machine, it takes seconds.
async fn answered(locks: &Client) -> leasehold::Result<MutexGuard> {
    let end = Instant::now() + PATIENCE;
    loop {
        match locks.mutex("p5").try_lock().await {
            Err(error) if error.kind() == ErrorKind::Unreachable && Instant::now() < end => {}
            answered => return answered,
        }
    }
}

// P5
/// The client is cut off permanently. The client that finds it dead has never read the session
/// before, and uses the servers' timestamps.
#[test]
fn one_read_of_an_object_store_detects_an_expired_session() {
    run(async {
        let server = testbed::seaweed();
        let proxy = Proxy::before(server.port());
        // A third of the session is the limit for a request, which a busy server needs.
        let url = server.url("p5") + "&session_ms=9000";
        let gone = connect(&through(&proxy, server, &url)).await;
        let guard = gone.mutex("p5").lock().await.unwrap();
        proxy.refuse(true);
        proxy.cut();
        // The session's 9 s, a fifth of it, and 2 s for the difference between clocks. The sleep
        // below adds time for the resolution of timestamps.
        let lives = Duration::from_millis(9_000 + 1_800 + 2_000);
        let cut = Instant::now();
        let early = connect(&url).await;
        assert_eq!(answered(&early).await.unwrap_err().kind(), ErrorKind::Contended);
        tokio::time::sleep((lives + Duration::from_secs(2)).saturating_sub(cut.elapsed())).await;
        let fresh = connect(&url).await;
        let next = answered(&fresh).await.unwrap();
        assert!(!guard.is_held(), "two clients believe that they hold the lock");
        assert!(next.token() > guard.token());
        next.release().await.unwrap();
    });
}

// S06
#[test]
fn lost_replies_of_an_object_store_are_recognized() {
    run(async {
        let server = testbed::seaweed();
        let proxy = Proxy::before(server.port());
        let url = server.url("s06") + "&poll_ms=50";
        let ours = connect(&through(&proxy, server, &url)).await;
        let witness = connect(&url).await;
        lost_replies_are_recognized(&proxy, &ours, &witness, 8).await;
    });
}

// R10
/// All clients start at once and acquire the lock repeatedly. None is starved.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn thirty_two_clients_of_an_object_store_all_make_progress() {
    run(async {
        let url = testbed::seaweed().url("r10") + "&poll_ms=50";
        thirty_two_get_on(&url, Duration::from_secs(3), Duration::from_secs(15)).await;
    });
}

/// Another implementation of S3's protocol than SeaweedFS. It must meet the same assumptions.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn locks_on_moto_are_exclusive() {
    run(async {
        let server = testbed::Moto::start();
        let url = server.url("counted") + "&poll_ms=50";
        // Connecting has run the race.
        let locks = connect(&url).await;
        let counted = Arc::new(AtomicUsize::new(0));
        let mut workers = tokio::task::JoinSet::new();
        for _ in 0..MOTO_WORKERS {
            let (url, counted) = (url.clone(), counted.clone());
            workers.spawn(async move {
                let mutex = connect(&url).await.mutex("counted");
                let mut tokens = Vec::new();
                for _ in 0..MOTO_TURNS {
                    let guard = mutex.lock_timeout(PATIENCE).await.unwrap();
                    let seen = counted.load(SeqCst);
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    counted.store(seen + 1, SeqCst);
                    tokens.push(guard.token());
                    guard.release().await.unwrap();
                }
                tokens
            });
        }
        let mut tokens: Vec<_> = workers.join_all().await.concat();
        assert_eq!(counted.load(SeqCst), MOTO_WORKERS * MOTO_TURNS);
        tokens.sort_unstable();
        tokens.dedup();
        assert_eq!(tokens.len(), MOTO_WORKERS * MOTO_TURNS, "a token was assigned twice");
        let found = locks.diagnose().await.unwrap();
        assert!(found.iter().all(|found| found.id != "conditions"), "{found:?}");
    });
}

const MOTO_WORKERS: usize = 6;
const MOTO_TURNS: usize = 5;
