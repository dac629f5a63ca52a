//! Ownership as a condition of the caller's own transaction in etcd: late holders, evictions, a
//! paused process.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::etcd_common::*;
use leasehold::store::Evict;
use leasehold::{ErrorKind, EtcdGuardExt};

fn put_if(compare: &str, key: &str, value: &str) -> bool {
    crate::etcd_common::put_if(testbed::etcd().etcdctl_command(), compare, key, value)
}

fn value_of(key: &str) -> String {
    testbed::etcd().etcdctl(&["get", key, "--print-value-only"])
}

// R35
#[test]
fn ownership_can_guard_the_callers_transaction() {
    run(async {
        let locks = connect(&testbed::etcd().url()).await;
        let guard = locks.mutex("cond \"é\" \\ a/b").lock().await.unwrap();
        let compare = guard.etcd_compare().unwrap();
        assert_eq!(compare.create_revision, i64::try_from(guard.token().get()).unwrap());
        assert!(!compare.to_protobuf().is_empty());
        assert!(put_if(&compare.to_string(), "guarded", "mine"), "the holder's write was refused");
        release(guard).await;
        let next = locks.mutex("cond \"é\" \\ a/b").lock().await.unwrap();
        assert!(
            !put_if(&compare.to_string(), "guarded", "late"),
            "a stale holder's write was accepted"
        );
        assert!(put_if(&next.etcd_compare().unwrap().to_string(), "guarded", "next"));
        assert_eq!(value_of("guarded"), "next");
        release(next).await;
        let memory = connect("memory:").await;
        let guard = memory.mutex("x").lock().await.unwrap();
        assert_eq!(guard.etcd_compare().unwrap_err().kind(), ErrorKind::Unsupported);
    });
}

// R35
#[test]
fn permits_and_readers_cannot_be_used_as_fences() {
    run(async {
        let locks = connect(&testbed::etcd().url()).await;
        let permit = locks.semaphore("no-fence-s", 2).acquire().await.unwrap();
        let reader = locks.rwlock("no-fence-r").read().await.unwrap();
        for shared in [&*permit, &*reader] {
            let error = shared.etcd_compare().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(format!("{error:#}").contains("exclusive"), "{error}");
        }
        let writer = locks.rwlock("no-fence-w").write().await.unwrap();
        writer.etcd_compare().unwrap();
    });
}

// R35
/// A holder that writes as fast as it can is evicted. Its last write never replaces the value of
/// its successor.
#[test]
fn evicted_holder_never_overwrites_its_successor() {
    run(async {
        let url = testbed::etcd().url();
        let (locks, other) = (connect(&url).await, connect(&url).await);
        for round in 0..8 {
            let late = locks.mutex("evicted-writer").lock().await.unwrap();
            let compare = late.etcd_compare().unwrap().to_string();
            assert!(put_if(&compare, "evicted-data", "late"));
            let writing = tokio::task::spawn_blocking(move || {
                let mut written = 0;
                while put_if(&compare, "evicted-data", "late") {
                    written += 1;
                    assert!(written < 10_000, "the writes of an evicted holder are never refused");
                }
            });
            tokio::time::sleep(Duration::from_millis(7 * round)).await;
            assert_eq!(locks.evict("evicted-writer", Evict::Holders).await.unwrap(), 1);
            let next = other.mutex("evicted-writer").lock().await.unwrap();
            let (compare, value) = (next.etcd_compare().unwrap().to_string(), round.to_string());
            let written = tokio::task::spawn_blocking(move || {
                put_if(&compare, "evicted-data", &round.to_string())
            });
            assert!(written.await.unwrap(), "the holder's write was refused");
            writing.await.unwrap();
            assert_eq!(value_of("evicted-data"), value);
            release(next).await;
            drop(late);
        }
    });
}

const LEASE: Duration = Duration::from_secs(5);

/// Runs as the child of the test below. It holds the lock, is paused, and then writes as if nothing
/// had happened.
#[test]
fn child_process_that_is_paused() {
    let Ok(url) = std::env::var("LEASEHOLD_TEST_CHILD") else { return };
    run(async {
        let locks = connect(&url).await;
        let guard = locks.mutex("r40").lease(LEASE).lock().await.unwrap();
        let compare = guard.etcd_compare().unwrap().to_string();
        let etcdctl = || {
            let mut command = Command::new("etcdctl");
            command.env("ETCDCTL_API", "3");
            command.arg(format!("--endpoints={}", url.strip_prefix("etcd://").unwrap()));
            // On a busy machine a reply may take longer than etcdctl's five seconds.
            command.arg("--command-timeout=60s");
            command
        };
        assert!(crate::etcd_common::put_if(etcdctl(), &compare, "r40-data", "child"));
        println!("wrote under {}", guard.token());
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        let late = crate::etcd_common::put_if(etcdctl(), &compare, "r40-data", "late");
        println!("late {late}");
        println!("held {}", guard.is_held());
    });
}

// R40
#[test]
fn late_write_of_a_paused_process_is_refused_by_etcd() {
    run(async {
        let url = testbed::etcd().url();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "fence_etcd::child_process_that_is_paused",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("LEASEHOLD_TEST_CHILD", &url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let (tell, mut receiver) = tokio::sync::mpsc::unbounded_channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            stdout.lines().map_while(Result::ok).try_for_each(|line| tell.send(line))
        });
        let mut line = async |start: &str| loop {
            let printed = tokio::time::timeout(PATIENCE, receiver.recv()).await;
            let printed = printed.expect("the child prints nothing").expect("the child ended");
            if let Some((_, rest)) = printed.split_once(start) {
                return rest.to_owned();
            }
        };
        line("wrote under ").await;
        // SAFETY: this is a plain `kill` of a child process that was not waited for yet.
        unsafe { libc::kill(pid, libc::SIGSTOP) };
        let locks = connect(&url).await;
        let guard = locks.mutex("r40").lock_timeout(PATIENCE).await.unwrap();
        assert!(put_if(&guard.etcd_compare().unwrap().to_string(), "r40-data", "parent"));
        child.stdin.take().unwrap().write_all(b"go\n").unwrap();
        // SAFETY: as above.
        unsafe { libc::kill(pid, libc::SIGCONT) };
        assert_eq!(line("late ").await, "false", "a late write was accepted");
        assert_eq!(line("held ").await, "false");
        assert!(child.wait().unwrap().success());
        assert_eq!(value_of("r40-data"), "parent");
        release(guard).await;
    });
}
