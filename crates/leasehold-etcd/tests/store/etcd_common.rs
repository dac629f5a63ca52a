//! Helpers of the tests of the etcd store.

use std::future::Future;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold::store::etcd::EtcdStore;
use leasehold::store::{Claim, Signal, Store};
use leasehold::{Builder, Client, ErrorKind, Hold, Kind, LostReason, MutexGuard, Name, State};
pub(crate) use leasehold_test_support::{PATIENCE, connect, queued, until, until_queued};
use testbed::Etcd;

pub(crate) fn run(test: impl Future<Output = ()>) {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(PATIENCE * 3, test).await.unwrap() });
}

/// Returns a client and its store.
pub(crate) async fn with_store(url: &str) -> (Client, Arc<EtcdStore>) {
    let store = EtcdStore::open(url, &tokio::runtime::Handle::current()).await.unwrap();
    let store = Arc::new(store);
    (Builder::default().store(store.clone()).unwrap(), store)
}

pub(crate) async fn release(hold: impl Into<Hold>) {
    hold.into().release().await.unwrap();
}

pub(crate) fn claim(name: &str) -> Claim {
    Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap()
}

/// Returns a claim that needs no heartbeat during a test.
pub(crate) fn patient(name: &str) -> Claim {
    let mut claim = claim(name);
    (claim.lease, claim.waiter_lease) = (Duration::from_secs(55), Duration::from_secs(50));
    claim
}

/// Waits for the next notification of a waiter.
pub(crate) async fn next_signal(store: &dyn Store, claim: &Claim) -> Signal {
    tokio::time::timeout(PATIENCE, store.changed(claim)).await.unwrap().unwrap()
}

/// Waits until the store sends nothing for more than a second.
pub(crate) async fn quiet(store: &EtcdStore) {
    let end = Instant::now() + PATIENCE / 3;
    loop {
        let before = store.requests();
        tokio::time::sleep(Duration::from_millis(1_200)).await;
        if store.requests() == before {
            return;
        }
        assert!(Instant::now() < end, "the client never stops sending requests");
    }
}

/// Returns the lease that the only key with this prefix is attached to, as etcdctl writes it.
pub(crate) fn lease_of(server: &Etcd, prefix: &str) -> String {
    let json = server.etcdctl(&["get", "--prefix", prefix, "-w", "json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let kvs = json["kvs"].as_array().unwrap();
    assert_eq!(kvs.len(), 1, "{json}");
    format!("{:x}", kvs[0]["lease"].as_i64().unwrap())
}

/// Puts a value under a condition, as a caller of `etcdctl txn`. Returns whether the condition was
/// true.
pub(crate) fn put_if(mut etcdctl: Command, compare: &str, key: &str, value: &str) -> bool {
    etcdctl.arg("txn").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = etcdctl.spawn().unwrap();
    let script = format!("{compare}\n\nput {key} {value}\n\n\n\n");
    child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success(), "{text}");
    assert!(text.starts_with("SUCCESS") || text.starts_with("FAILURE"), "{text}");
    text.starts_with("SUCCESS")
}

/// Breaks the holder's connection while another client waits. Checks that the holder learns of its
/// loss before the other client is granted. Returns the other client's guard.
pub(crate) async fn lost_before_the_next_holds(
    (held, lease): (&Client, Duration),
    other: &Client,
    name: &str,
    breaking: impl FnOnce(),
) -> MutexGuard {
    let (guard, waiting) = loop {
        let guard = held.mutex(name).lease(lease).lock_timeout(PATIENCE).await.unwrap();
        let (late, lock) = (guard.watch(), other.mutex(name).lease(lease));
        let waiting = tokio::spawn(async move {
            let next = lock.lock_timeout(PATIENCE).await.unwrap();
            // The guard decides by its own clock, whether or not any task has been woken.
            (next, late.state())
        });
        until("the expected queue", async || {
            waiting.is_finished() || queued(other, name).await == Some(2)
        })
        .await;
        if guard.is_held() {
            break (guard, waiting);
        }
        // If the machine paused, the lease is over before anything is broken.
        release(waiting.await.unwrap().0).await;
    };
    breaking();
    let reason = tokio::time::timeout(PATIENCE, guard.lost()).await.unwrap();
    assert_eq!(reason, LostReason::Expired, "{name}");
    let (next, state) = waiting.await.unwrap();
    assert_eq!(state, State::Lost(LostReason::Expired), "{name}: two clients hold the lock");
    assert!(next.token() > guard.token());
    next
}

/// Has many tasks increment a counter that only the lock protects, and checks the tokens.
pub(crate) async fn hammer(clients: &[Client], name: &str, tasks: usize, rounds: usize) {
    let inside = Arc::new(AtomicBool::new(false));
    let counted = Arc::new(AtomicU64::new(0));
    let last = Arc::new(AtomicU64::new(0));
    let mut running = tokio::task::JoinSet::new();
    for task in 0..tasks {
        let lock = clients[task % clients.len()].mutex(name);
        let (inside, counted, last) = (inside.clone(), counted.clone(), last.clone());
        running.spawn(async move {
            for _ in 0..rounds {
                let guard = loop {
                    match lock.lock().await {
                        Ok(guard) => break guard,
                        // The members were unreachable for longer than a client waits.
                        Err(e) if e.kind() == ErrorKind::Unreachable => {}
                        Err(e) => panic!("{e}"),
                    }
                };
                assert!(!inside.swap(true, Ordering::SeqCst), "two clients hold the lock");
                let before = last.swap(guard.token().get(), Ordering::SeqCst);
                assert!(guard.token().get() > before, "token {} after {before}", guard.token());
                let n = counted.load(Ordering::SeqCst);
                tokio::task::yield_now().await;
                counted.store(n + 1, Ordering::SeqCst);
                assert!(
                    guard.is_held(),
                    "the lock was lost while the cluster had a majority: {guard:?}"
                );
                inside.store(false, Ordering::SeqCst);
                match guard.release().await {
                    Ok(_) => {}
                    // The claim is released in the background.
                    Err(e) if e.kind() == ErrorKind::Unreachable => {}
                    Err(e) => panic!("{e}"),
                }
            }
        });
    }
    running.join_all().await;
    assert_eq!(counted.load(Ordering::SeqCst), (tasks * rounds) as u64);
}

/// Runs `etcdctl lock NAME`, which holds the lock until it is interrupted or the command ends.
pub(crate) fn etcdctl_lock(server: &Etcd, name: &str, command: &[&str]) -> Child {
    let mut lock = server.etcdctl_command();
    lock.args(["lock", name, "--"]).args(command).stdin(Stdio::null()).stdout(Stdio::piped());
    lock.spawn().unwrap()
}

pub(crate) fn interrupt(child: &Child) {
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}
