//! Tests that need a real process, because the process is paused or forked.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use leasehold::store::MemoryStore;
use leasehold::{Builder, Client, Error, ErrorKind, LostReason, State};

const LEASE: Duration = Duration::from_secs(3);

fn locks() -> Client {
    Builder::default().store(std::sync::Arc::new(MemoryStore::new())).unwrap()
}

/// The child of the test below. It holds a lock, and reports the guard's state right after it was
/// paused.
#[test]
fn child_process_that_is_paused() {
    if std::env::var_os("LEASEHOLD_TEST_CHILD").is_none() {
        return;
    }
    let locks: leasehold::blocking::Client = locks().into();
    let guard = locks.mutex("paused").with(|m| m.lease(LEASE)).lock().unwrap();
    // A pause appears as a gap between two reads of the clock, wherever it happens. So the first
    // read is before the parent is notified, and each read ends one gap and begins the next.
    let mut before = Instant::now();
    println!("held {}", guard.is_held());
    loop {
        let now = Instant::now();
        // The first check of the guard after a gap.
        let held = guard.is_held();
        if now - before > LEASE * 2 {
            println!("first sight {held} {:?}", guard.state());
            return;
        }
        before = now;
        std::thread::sleep(Duration::from_millis(1));
    }
}

// S09
#[test]
fn hold_is_lost_on_the_first_check_after_a_long_sigstop() {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_process_that_is_paused", "--nocapture", "--test-threads=1"])
        .env("LEASEHOLD_TEST_CHILD", "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut line = |start: &str| lines.find(|l| l.contains(start)).unwrap();
    assert!(line("held ").contains("held true"));
    // SAFETY: plain kills of a child that was not waited for yet.
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    std::thread::sleep(LEASE * 3);
    // SAFETY: the same as above.
    unsafe { libc::kill(pid, libc::SIGCONT) };
    assert!(line("first sight ").contains("first sight false Lost(Expired)"));
    assert!(child.wait().unwrap().success());
}

// S13
#[test]
fn a_forked_child_holds_nothing_and_releases_nothing() {
    let locks: leasehold::blocking::Client = locks().into();
    let guard = locks.mutex("forked").lock().unwrap();
    // SAFETY: the child only reads and drops the guard, and exits without unwinding.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let inert = !guard.is_held()
            && guard.state() == State::Lost(LostReason::Forked)
            && guard.remaining().is_zero()
            && guard.release().unwrap_err().lost_reason() == Some(LostReason::Forked);
        // SAFETY: ends the child immediately and skips the exit code of the test harness.
        unsafe { libc::_exit(if inert { 7 } else { 8 }) };
    }
    let mut status = 0;
    // SAFETY: waits for a child of this process.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(libc::WEXITSTATUS(status), 7, "the child believes that it holds the lock");
    assert!(guard.is_held());
    let tried = locks.mutex("forked").try_lock().map(drop).map_err(|e: Error| e.kind());
    assert_eq!(tried, Err(ErrorKind::Contended), "the child's drop released the parent's lock");
    guard.release().unwrap();
}

/// The child of the test below. It connects as its environment says, and prints the store's URL.
#[cfg(feature = "file")]
#[tokio::test]
async fn child_process_that_reads_its_environment() {
    if std::env::var_os("LEASEHOLD_TEST_CHILD").is_none() {
        return;
    }
    let locks = leasehold::from_env().await.unwrap();
    let guard = locks.mutex("a").lock().await.unwrap();
    // The blocking API reads the same environment.
    let tries = || leasehold::blocking::from_env()?.mutex("a").try_lock();
    let refused = std::thread::spawn(tries).join().unwrap().unwrap_err();
    let all = leasehold::connect(locks.url()).await.unwrap().list("").await.unwrap();
    let names: Vec<_> = all.iter().map(|lock| lock.name.as_str()).collect();
    println!("refused {} {:?} {names:?}", locks.url(), refused.kind());
    guard.release().await.unwrap();
}

#[cfg(feature = "file")]
#[test]
fn program_connects_as_its_environment_configures() {
    let place = tempfile::tempdir().unwrap();
    let store = format!("file:{}", place.path().display());
    let file = place.path().join("url");
    std::fs::write(&file, format!("{store}\n")).unwrap();
    let ask_by = |name: &str, value: &std::ffi::OsStr, namespace: Option<&str>| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child
            .args(["--exact", "child_process_that_reads_its_environment", "--nocapture"])
            .env("LEASEHOLD_TEST_CHILD", "1")
            .env_remove("LEASEHOLD_STORE")
            .env(name, value)
            .env_remove("LEASEHOLD_NAMESPACE")
            .envs(namespace.map(|prefix| ("LEASEHOLD_NAMESPACE", prefix)));
        let output = child.output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
        stdout
    };
    let ask = |namespace| ask_by("LEASEHOLD_STORE", store.as_ref(), namespace);
    let line = |names: &str| format!("refused {store} Contended [\"{names}\"]");
    assert!(ask(None).contains(&line("a")), "{}", ask(None));
    assert!(ask(Some("acme/")).contains(&line("acme/a")), "{}", ask(Some("acme/")));
    let in_file = ask_by("LEASEHOLD_STORE_FILE", file.as_os_str(), None);
    assert!(in_file.contains(&line("a")), "{in_file}");
}
