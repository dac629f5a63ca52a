//! Objects: what calls cost, who is found gone by how many looks, what becomes of answers that are lost.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::time::{Duration, Instant};

use leasehold::store::cell::{CellStore, objects};
use leasehold::{Builder, ErrorKind, Leasehold};
use leasehold_test_support::*;
use testbed::{Proxy, SeaweedFs};
use tokio::runtime::Handle;

/// The same URL, by way of the proxy.
fn through(proxy: &Proxy, server: &SeaweedFs, url: &str) -> String {
    url.replace(&server.endpoint(), &format!("http://127.0.0.1:{}", proxy.port()))
}

async fn with_store(url: &str) -> (Leasehold, Arc<CellStore>) {
    let store = Arc::new(objects::connect(url, &Handle::current()).await.unwrap());
    (Builder::default().store(store.clone()).unwrap(), store)
}

#[test]
fn r13_a_pair_of_objects_is_two_writes_and_a_failed_try_writes_nothing() {
    const PAIRS: u64 = 50;
    run(async {
        let server = testbed::seaweed();
        let url = server.url("r13");
        let (locks, store) = with_store(&url).await;
        let (others, theirs) = with_store(&url).await;
        locks.mutex("r13").lock().await.unwrap().release().await.unwrap();
        let before = store.round_trips();
        for _ in 0..PAIRS {
            locks.mutex("r13").lock().await.unwrap().release().await.unwrap();
        }
        let pairs = store.round_trips() - before;
        // Touches of the session may come between, on a machine that is slow.
        assert!((2 * PAIRS..2 * PAIRS + 8).contains(&pairs), "{pairs} for {PAIRS} pairs");
        let guard = locks.mutex("r13").lock().await.unwrap();
        others.mutex("r13").try_lock().await.unwrap_err();
        let kept = server.ask("GET", "r13/l:r13", "");
        let before = theirs.round_trips();
        others.mutex("r13").try_lock().await.unwrap_err();
        assert!(theirs.round_trips() - before <= 3, "{}", theirs.round_trips() - before);
        // Each write puts other digits there.
        assert_eq!(server.ask("GET", "r13/l:r13", ""), kept, "a failed try wrote something");
        guard.release().await.unwrap();
    });
}

/// What a minute costs, counted before the server: the page of the store has these numbers.
#[test]
fn a_minute_of_one_holder_and_one_waiter_costs_what_the_page_says() {
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
        crate::nats_common::until_queued(&holder, "minute", 2).await;
        // The first looks of a wait come soon after one another.
        tokio::time::sleep(Duration::from_secs(3)).await;
        let before = asked.each_ref().map(|asked| asked.each_ref().map(|n| n.load(SeqCst)));
        tokio::time::sleep(Duration::from_secs(SECONDS.into())).await;
        let minute = |who: usize, what: usize| {
            (asked[who][what].load(SeqCst) - before[who][what]) * 60 / SECONDS
        };
        let [holds, waits] = [0, 1].map(|who| [minute(who, 0), minute(who, 1)]);
        println!("looks and writes a minute: who holds {holds:?}, who waits {waits:?}");
        // 12 looks and 20 writes; 60, 30 and 12 looks and 20 writes: each with one more at either end.
        assert!(holds[0] <= 18 && holds[1] <= 26, "who holds: {holds:?}");
        assert!(waits[0] <= 120 && waits[1] <= 26, "who waits: {waits:?}");
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap();
    });
}

/// The client is cut off for good, and whoever finds it gone has never looked before: by the servers' stamps.
#[test]
fn p5_one_look_at_objects_is_enough_to_find_who_is_gone() {
    run(async {
        let server = testbed::seaweed();
        let proxy = Proxy::before(server.port());
        let url = server.url("p5") + "&session_ms=2000";
        let gone = connect(&through(&proxy, server, &url)).await;
        let guard = gone.mutex("p5").lock().await.unwrap();
        proxy.refuse(true);
        proxy.cut();
        // Its session: two seconds, a fifth, two that clocks may be apart, and the grain of a stamp.
        let lives = Duration::from_millis(2_000 + 400 + 2_000);
        let cut = Instant::now();
        let early = connect(&url).await;
        assert_eq!(early.mutex("p5").try_lock().await.unwrap_err().kind(), ErrorKind::Contended);
        tokio::time::sleep((lives + Duration::from_secs(2)).saturating_sub(cut.elapsed())).await;
        let fresh = connect(&url).await;
        let next = fresh.mutex("p5").try_lock().await.unwrap();
        assert!(!guard.is_held(), "two believe that they hold");
        assert!(next.token() > guard.token());
        next.release().await.unwrap();
    });
}

#[test]
fn s06_lost_replies_of_an_object_store_are_recognised() {
    run(async {
        let server = testbed::seaweed();
        let proxy = Proxy::before(server.port());
        let url = server.url("s06") + "&poll_ms=50";
        let ours = connect(&through(&proxy, server, &url)).await;
        let witness = connect(&url).await;
        lost_replies_are_recognised(&proxy, &ours, &witness, 8).await;
    });
}

/// All come at once, and again and again: nobody is kept out.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn r10_thirty_two_clients_of_an_object_store_get_on() {
    run(async {
        let url = testbed::seaweed().url("r10") + "&poll_ms=50";
        thirty_two_get_on(&url, Duration::from_secs(3), Duration::from_secs(15)).await;
    });
}

/// Another reading of S3's protocol than SeaweedFS's: what is taken for granted must be there too.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn moto_races_and_counts_as_well() {
    run(async {
        let server = testbed::Moto::start();
        let url = server.url("counted") + "&poll_ms=50";
        // Which has raced.
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
        assert_eq!(tokens.len(), MOTO_WORKERS * MOTO_TURNS, "a token came again");
        let found = locks.diagnose().await.unwrap();
        assert!(found.iter().all(|found| found.id != "conditions"), "{found:?}");
    });
}

const MOTO_WORKERS: usize = 6;
const MOTO_TURNS: usize = 5;
