//! Scenario 76: real kazoo and real Curator compete with leasehold on the same paths, each with its
//! naming.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use crate::zookeeper_common::*;
use leasehold::{Client, ErrorKind, Hold};
use testbed::zookeeper;

/// A program that uses another client.
#[derive(Clone, Copy, Debug)]
enum Peer {
    Kazoo,
    Curator,
}

/// Debian's packages of Curator and all that it needs.
const JARS: [&str; 8] = [
    "curator-recipes.jar",
    "curator-framework.jar",
    "curator-client.jar",
    "zookeeper.jar",
    "zookeeper-jute.jar",
    "guava.jar",
    "slf4j-api.jar",
    "slf4j-nop.jar",
];

/// Returns the class path with the test's Curator program, which is compiled once.
fn classes() -> &'static str {
    static CLASSES: OnceLock<String> = OnceLock::new();
    CLASSES.get_or_init(|| {
        let jars: Vec<String> = JARS.iter().map(|jar| format!("/usr/share/java/{jar}")).collect();
        for jar in &jars {
            assert!(Path::new(jar).exists(), "no {jar}: run ./test.sh");
        }
        let out = concat!(env!("CARGO_TARGET_TMPDIR"), "/curator-peer");
        let path = format!("{out}:{}", jars.join(":"));
        let mut javac = Command::new("javac");
        javac.args(["-nowarn", "-d", out, "-cp", &path]);
        javac.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/interop/CuratorPeer.java"));
        let compiled = javac.output().unwrap_or_else(|e| panic!("javac: {e}: run ./test.sh"));
        let stderr = String::from_utf8_lossy(&compiled.stderr);
        assert!(compiled.status.success(), "{stderr}");
        path
    })
}

impl Peer {
    fn naming(self) -> &'static str {
        match self {
            Self::Kazoo => "kazoo",
            Self::Curator => "curator",
        }
    }

    fn command(self, path: &str, work: &[&str]) -> Command {
        let mut command = match self {
            Self::Kazoo => {
                let mut python = Command::new(testbed::python());
                python.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/interop/kazoo_peer.py"));
                python
            }
            Self::Curator => {
                let mut java = Command::new("java");
                java.args(["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", classes()]);
                java.arg("CuratorPeer");
                java
            }
        };
        command.arg(format!("127.0.0.1:{}", zookeeper().port())).arg(path).args(work);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }

    /// Holds the lock until the returned value is released.
    fn hold(self, path: &str, kind: &str) -> Held {
        let mut child = self.command(path, &["hold", kind]).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "held", "{self:?}");
        Held(child)
    }

    fn gets(self, path: &str, kind: &str) -> bool {
        let output = self.command(path, &["try", kind]).output().unwrap();
        match String::from_utf8_lossy(&output.stdout).trim() {
            "yes" => true,
            "no" => false,
            other => panic!("{self:?} {kind}: {other}: {output:?}"),
        }
    }

    async fn locks(self, chroot: &str) -> Client {
        let naming = self.naming();
        connect(&format!("{}{chroot}?create=yes&naming={naming}", zookeeper().url())).await
    }
}

/// Another client that holds the lock.
struct Held(Child);

impl Held {
    fn release(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // If it was released, it has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn take(locks: &Client, kind: &str) -> Result<Hold, leasehold::Error> {
    match kind {
        "mutex" => locks.mutex("x").try_lock().await.map(Hold::from),
        "read" => locks.rwlock("x").try_read().await.map(Hold::from),
        _ => locks.rwlock("x").try_write().await.map(Hold::from),
    }
}

/// Checks that the second client is refused or granted at the same time, in either order.
async fn excludes(peer: Peer) {
    let chroot = format!("/excludes-{}", peer.naming());
    let (locks, path) = (peer.locks(&chroot).await, format!("{chroot}/x"));
    for (first, second, beside) in [
        ("mutex", "mutex", false),
        ("write", "write", false),
        ("write", "read", false),
        ("read", "write", false),
        ("read", "read", true),
    ] {
        let theirs = peer.hold(&path, first);
        match take(&locks, second).await {
            Ok(guard) => {
                assert!(beside, "{peer:?} holds {first}, but leasehold got {second}");
                release(guard).await;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
                assert!(
                    !beside,
                    "{peer:?} holds {first}, and leasehold did not get {second}: {error}"
                );
                assert!(!error.holders().is_empty(), "{error}");
            }
        }
        // A waiter gets the lock when the other client releases it.
        let waiting = tokio::spawn({
            let locks = locks.clone();
            let second = second.to_owned();
            async move {
                match second.as_str() {
                    "mutex" => locks.mutex("x").lock_timeout(PATIENCE).await.map(Hold::from),
                    "read" => locks.rwlock("x").read_timeout(PATIENCE).await.map(Hold::from),
                    _ => locks.rwlock("x").write_timeout(PATIENCE).await.map(Hold::from),
                }
            }
        });
        until("asked", async || {
            locks.inspect("x").await.unwrap().is_some_and(|info| info.claims.len() == 2)
        })
        .await;
        theirs.release();
        let ours = waiting.await.unwrap().unwrap();
        release(ours).await;
        let ours = take(&locks, first).await.unwrap();
        let got = tokio::task::spawn_blocking({
            let path = path.clone();
            move || peer.gets(&path, second)
        });
        assert_eq!(
            got.await.unwrap(),
            beside,
            "leasehold holds {first}, and {peer:?} tried {second}"
        );
        assert!(ours.is_held());
        release(ours).await;
    }
}

/// Has processes of the other client and leasehold's tasks count in one file.
async fn counts(peer: Peer) {
    const PROCESSES: usize = 3;
    const TASKS: usize = 3;
    const ROUNDS: usize = 30;
    let chroot = format!("/counts-{}", peer.naming());
    let (locks, path) = (peer.locks(&chroot).await, format!("{chroot}/x"));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("counter");
    std::fs::write(&file, "0").unwrap();
    let (shown, rounds) = (file.display().to_string(), ROUNDS.to_string());
    let start = |_| peer.command(&path, &["count", &shown, &rounds]).spawn().unwrap();
    let mut theirs: Vec<Child> = (0..PROCESSES).map(start).collect();
    // leasehold's tasks begin while the other processes are counting.
    until("the other processes count", async || {
        std::fs::read_to_string(&file).unwrap().trim() != "0"
    })
    .await;
    let mut ours = Vec::new();
    for _ in 0..TASKS {
        let (locks, file) = (locks.clone(), file.clone());
        ours.push(tokio::spawn(async move {
            let mut last = 0;
            for _ in 0..ROUNDS {
                let guard = locks.mutex("x").lock_timeout(PATIENCE).await.unwrap();
                assert!(guard.token().get() > last);
                last = guard.token().get();
                let n: usize = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
                std::fs::write(&file, (n + 1).to_string()).unwrap();
                release(guard).await;
            }
        }));
    }
    for task in ours {
        task.await.unwrap();
    }
    for child in &mut theirs {
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }
    let counted = std::fs::read_to_string(&file).unwrap();
    assert_eq!(counted.trim(), ((PROCESSES + TASKS) * ROUNDS).to_string());
}

// S76
#[test]
fn kazoo_and_leasehold_exclude_each_other() {
    run(excludes(Peer::Kazoo));
}

// S76
#[test]
fn kazoo_and_leasehold_count_exactly() {
    run(counts(Peer::Kazoo));
}

// S76
#[test]
#[ignore = "runs with ./test.sh --all"]
fn curator_and_leasehold_exclude_each_other() {
    run(excludes(Peer::Curator));
}

// S76
#[test]
fn curator_and_leasehold_count_exactly() {
    run(counts(Peer::Curator));
}
