//! `fence::memcached` and `fence::nats` on their servers: late writers, lost replies, many writers,
//! and foreign values.

use std::sync::Arc;
use std::time::Duration;

use leasehold::fence::memcached::{self, Values};
use leasehold::fence::nats;
use leasehold::store::cell::nats::async_nats::{self, jetstream};
use leasehold::{ErrorKind, FencingToken};
use leasehold_test_support::*;
use testbed::{Memcached, Nats, Proxy};
use tokio::runtime::Handle;

const WRITERS: u64 = 8;
const ROUNDS: u64 = 20;

fn token(n: u64) -> FencingToken {
    FencingToken::new(n).unwrap()
}

fn plus_one(old: Option<&[u8]>) -> Option<Vec<u8>> {
    let old = old.map_or(0, |old| String::from_utf8_lossy(old).parse::<u64>().unwrap());
    Some((old + 1).to_string().into_bytes())
}

async fn values(url: &str) -> Values {
    Values::connect(url, &Handle::current()).await.unwrap()
}

async fn bucket(url: &str) -> jetstream::kv::Store {
    let client = async_nats::ConnectOptions::new().request_timeout(Some(Duration::from_secs(1)));
    let context = jetstream::new(client.connect(url).await.unwrap());
    let config = jetstream::kv::Config { bucket: "state".into(), ..Default::default() };
    context.create_or_update_key_value(config).await.unwrap()
}

/// Runs the same steps on either store. `$at` is where the values are.
macro_rules! late_writers_are_refused {
    ($fence:ident, $at:expr) => {{
        let at = $at;
        assert_eq!($fence::read(at, "r35", token(5)).await.unwrap(), None);
        $fence::put(at, "r35", token(5), b"five").await.unwrap();
        $fence::put(at, "r35", token(5), b"five again").await.unwrap();
        let error = $fence::put(at, "r35", token(4), b"four").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StaleToken, "{error}");
        let stale = error.stale_token().unwrap();
        assert_eq!((stale.seen, stale.offered), (token(5), token(4)));
        // A read presents its token too.
        let read = $fence::read(at, "r35", token(7)).await.unwrap().unwrap();
        assert_eq!(read, b"five again");
        let error = $fence::change(at, "r35", token(6), plus_one).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StaleToken, "{error}");
        // The late writer reads before the next holder writes, and writes after it.
        let mut came_by = false;
        let late = $fence::change(at, "late", token(5), |_| {
            if !std::mem::replace(&mut came_by, true) {
                tokio::task::block_in_place(|| {
                    Handle::current().block_on($fence::put(at, "late", token(9), b"next"))
                })
                .unwrap();
            }
            Some(b"late".to_vec())
        });
        assert_eq!(late.await.unwrap_err().kind(), ErrorKind::StaleToken);
        let read = $fence::read(at, "late", token(9)).await.unwrap().unwrap();
        assert_eq!(read, b"next");
        // A guard can be used as a token.
        let locks = connect("memory:").await;
        let guard = locks.mutex("x").lock().await.unwrap();
        $fence::put(at, "guarded", &guard, b"mine").await.unwrap();
        for bad in ["", "a b"] {
            let error = $fence::put(at, bad, token(1), b"").await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        }
    }};
}

macro_rules! nothing_is_lost_among_many {
    ($fence:ident, $at:expr) => {{
        let mut running = Vec::new();
        for _ in 0..WRITERS {
            let at = Arc::new($at);
            running.push(tokio::spawn(async move {
                let mut done = 0;
                while done < ROUNDS {
                    match $fence::change(&at, "counted", token(7), plus_one).await {
                        Ok(_) => done += 1,
                        Err(error) => assert_eq!(error.kind(), ErrorKind::Conflict, "{error}"),
                    }
                }
            }));
        }
        for writer in running {
            writer.await.unwrap();
        }
        let counted = $fence::read(&$at, "counted", token(7)).await.unwrap().unwrap();
        assert_eq!(counted, (WRITERS * ROUNDS).to_string().as_bytes());
    }};
}

/// The reply to a write is lost. The result is reported as unknown, and repeating the write is
/// harmless.
macro_rules! lost_replies_are_told_and_said_again {
    ($fence:ident, $at:expr, $proxy:expr) => {{
        let (at, proxy) = ($at, $proxy);
        $fence::put(at, "lost", token(5), b"before").await.unwrap();
        // The reply to the read arrives, and the reply to the write is lost.
        proxy.drop_replies_after(1);
        let error = $fence::put(at, "lost", token(6), b"written").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        proxy.pass_replies();
        let mut again = $fence::put(at, "lost", token(6), b"written").await;
        for _ in 0..50 {
            if again.is_ok() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            again = $fence::put(at, "lost", token(6), b"written").await;
        }
        again.unwrap();
        let read = $fence::read(at, "lost", token(6)).await.unwrap().unwrap();
        assert_eq!(read, b"written");
        let error = $fence::put(at, "lost", token(5), b"late").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StaleToken, "{error}");
    }};
}

// R35
#[test]
fn late_writers_of_a_value_in_memcached_are_refused() {
    run(async {
        let values = values(&testbed::memcached().url()).await;
        late_writers_are_refused!(memcached, &values);
    });
}

// R35
#[test]
fn late_writers_of_a_key_in_nats_are_refused() {
    run(async {
        let server = Nats::start();
        late_writers_are_refused!(nats, &bucket(&server.url()).await);
    });
}

// R35
#[test]
fn no_update_is_lost_among_many_writers_of_one_value() {
    run(async {
        let (cache, server) = (Memcached::start(), Nats::start());
        nothing_is_lost_among_many!(memcached, values(&cache.url()).await);
        nothing_is_lost_among_many!(nats, bucket(&server.url()).await);
    });
}

// R44
#[test]
fn fenced_write_with_a_lost_reply_may_be_retried() {
    run(async {
        let (cache, server) = (Memcached::start(), Nats::start());
        let proxy = Proxy::before(cache.port());
        let through = values(&proxy.in_front_of(cache.port(), &cache.url())).await;
        lost_replies_are_told_and_said_again!(memcached, &through, &proxy);
        let proxy = Proxy::before(server.port());
        let through = bucket(&proxy.in_front_of(server.port(), &(server.url() + "/"))).await;
        lost_replies_are_told_and_said_again!(nats, &through, &proxy);
    });
}

// S90
#[test]
fn values_without_a_fence_header_are_not_overwritten() {
    run(async {
        let (cache, server) = (Memcached::start(), Nats::start());
        let (values, bucket) = (values(&cache.url()).await, bucket(&server.url()).await);
        for foreign in ["", "42", "leasehold fence 1 x\n", "leasehold fence 1 007\n"] {
            let length = foreign.len();
            assert_eq!(cache.say(&format!("set theirs 0 0 {length}\r\n{foreign}")), ["STORED"]);
            let error = memcached::put(&values, "theirs", token(5), b"ours").await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert_eq!(
                cache.say("mg theirs s"),
                [format!("HD s{length}")],
                "the foreign value was overwritten"
            );
            bucket.put("theirs", foreign.into()).await.unwrap();
            let error = nats::put(&bucket, "theirs", token(5), b"ours").await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert_eq!(bucket.get("theirs").await.unwrap().unwrap(), foreign.as_bytes());
        }
        // A deleted key is like one that never existed.
        nats::put(&bucket, "deleted", token(5), b"five").await.unwrap();
        bucket.delete("deleted").await.unwrap();
        nats::put(&bucket, "deleted", token(4), b"four").await.unwrap();
        // memcached loses the token together with the value. A value that is too large has no
        // effect.
        memcached::put(&values, "forgotten", token(5), b"five").await.unwrap();
        let large = vec![b'x'; 1_000_001];
        let error = memcached::put(&values, "forgotten", token(5), &large).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        let error = memcached::put(&values, "forgotten", token(4), b"four").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StaleToken, "{error}");
        cache.restart();
        let mut written = memcached::put(&values, "forgotten", token(4), b"four").await;
        while written.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
            written = memcached::put(&values, "forgotten", token(4), b"four").await;
        }
    });
}
