//! The conformance suite on this store, and tests that are specific to git.

use std::path::Path;
use std::process::{Child, Command};
use std::sync::LazyLock;
use std::time::Duration;

use leasehold_core::{Builder, Client, ErrorKind, Registry};
use tempfile::TempDir;

/// One repository for all cases. Each case has its own lock names.
static PLACE: LazyLock<TempDir> = LazyLock::new(repository);

fn repository() -> TempDir {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    git(place.path(), &["init", "--quiet", "--bare"]);
    place
}

fn git(at: &Path, words: &[&str]) -> String {
    let out = Command::new("git").arg("-C").arg(at).args(words).output().unwrap();
    assert!(out.status.success(), "{words:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

async fn connect(at: &Path) -> Client {
    let registry = Registry::default().with("git", &["git"], own_cell::open);
    Builder::new(registry).connect(format!("git:{}", at.display())).await.unwrap()
}

leasehold_conformance::conformance_suite!(git, slow, async { connect(PLACE.path()).await });

/// Checks that the example is as short as it claims to be.
#[test]
fn adapter_has_at_most_130_lines_of_code() {
    let is_code = |line: &&str| !line.is_empty() && !line.starts_with("//");
    let lines = include_str!("../src/lib.rs").lines().map(str::trim);
    let counted = lines.filter(is_code).count();
    assert!(counted <= 130, "{counted} lines");
}

// S90
#[tokio::test]
async fn foreign_refs_are_left_unchanged() {
    let place = repository();
    let theirs = git(place.path(), &["hash-object", "-w", "--stdin"]);
    git(place.path(), &["update-ref", "refs/leasehold/l/taken", theirs.trim()]);
    let locks = connect(place.path()).await;
    let error = locks.mutex("taken").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(git(place.path(), &["rev-parse", "refs/leasehold/l/taken"]), theirs);
    // Names that a ref may not have.
    for name in ["a.lock", "..", "a b/é~^:?*[", "@{1}", "-d", &"n".repeat(255)] {
        let guard = locks.mutex(name).try_lock().await.unwrap();
        assert_eq!(locks.list(name).await.unwrap().len(), 1, "{name}");
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn directory_without_a_repository_is_rejected() {
    let place = tempfile::tempdir().unwrap();
    let registry = Registry::default().with("git", &["git"], own_cell::open);
    let url = format!("git:{}", place.path().display());
    let error = Builder::new(registry).connect(url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(format!("{error:#}").contains("git init --bare"), "{error}");
}

/// Set in a child process of the test below. Contains the directory of its repository.
const WORKS_AT: &str = "OWN_CELL_WORKS_AT";
const PROCESSES: usize = 8;
const TURNS: usize = 10;

/// Several processes increment a number in a file, and one is killed while it holds the lock.
#[tokio::test]
async fn processes_count_exactly_and_a_killed_holder_is_replaced() {
    if let Ok(at) = std::env::var(WORKS_AT) {
        return works(Path::new(&at)).await;
    }
    let place = repository();
    std::fs::write(place.path().join("number"), "0").unwrap();
    let start = |holds: bool| -> Child {
        let name = "processes_count_exactly_and_a_killed_holder_is_replaced";
        let mut process = Command::new(std::env::current_exe().unwrap());
        process.args(["--exact", name]).env(WORKS_AT, place.path());
        process.envs(holds.then_some(("OWN_CELL_HOLDS", "yes")));
        process.spawn().unwrap()
    };
    let mut holder = start(true);
    let locks = connect(place.path()).await;
    while locks.inspect("counted").await.unwrap().is_none() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let workers: Vec<Child> = (0..PROCESSES).map(|_| start(false)).collect();
    holder.kill().unwrap();
    holder.wait().unwrap();
    for mut worker in workers {
        assert!(worker.wait().unwrap().success());
    }
    let number = std::fs::read_to_string(place.path().join("number")).unwrap();
    assert_eq!(number, (PROCESSES * TURNS).to_string());
}

async fn works(at: &Path) {
    let (locks, number) = (connect(at).await, at.join("number"));
    for _ in 0..TURNS {
        let guard = locks.mutex("counted").lock_timeout(Duration::from_secs(60)).await.unwrap();
        if std::env::var_os("OWN_CELL_HOLDS").is_some() {
            std::future::pending::<()>().await;
        }
        let seen: usize = std::fs::read_to_string(&number).unwrap().parse().unwrap();
        std::fs::write(&number, (seen + 1).to_string()).unwrap();
        guard.release().await.unwrap();
    }
}
