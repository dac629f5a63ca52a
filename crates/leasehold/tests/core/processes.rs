//! The blocking API on runtimes and in threads that end, and processes that are forked.

use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use leasehold::store::{Evict, MemoryStore};
use leasehold::{ErrorKind, Result};

// S08
/// The blocking API must not depend on the runtime whose thread it blocks.
#[tokio::test]
async fn blocking_client_works_on_a_runtime_that_it_blocks() {
    let odd = Odd { joins_sleep: true, ..Odd::new(&Arc::new(MemoryStore::new())) };
    let locks: leasehold::blocking::Client = client(Arc::new(odd)).into();
    locks.mutex("a").lock().unwrap().release().unwrap();
}

// S11
/// A guard that lives in a thread-local is dropped after tokio's own thread-locals.
#[test]
fn guard_can_be_dropped_by_an_exiting_thread() {
    use std::cell::RefCell;
    thread_local!(static KEPT: RefCell<Option<leasehold::blocking::MutexGuard>> = const { RefCell::new(None) });
    let locks = leasehold::blocking::Client::from(client(Arc::new(MemoryStore::new())));
    let in_thread = locks.clone();
    let thread = std::thread::spawn(move || {
        // Registers this thread-local before tokio's, which is therefore destroyed first.
        KEPT.with(|kept| drop(kept.borrow_mut().take()));
        let guard = in_thread.mutex("a").lock().unwrap();
        KEPT.with(|kept| *kept.borrow_mut() = Some(guard));
    });
    thread.join().unwrap();
    locks.mutex("a").lock_timeout(Duration::from_secs(5)).unwrap().release().unwrap();
}

// S13
/// A forked child has no background thread, so its locks would be neither renewed nor released.
#[test]
fn forked_child_cannot_acquire_or_hold_a_lock() {
    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(code: i32) -> !;
    }
    let locks = leasehold::blocking::Client::from(client(Arc::new(MemoryStore::new())));
    let guard = locks.mutex("a").lock().unwrap();
    let lock = locks.mutex("b");
    // SAFETY: the child exits with `_exit`, and uses no lock that another thread may hold.
    let child = unsafe { fork() };
    assert!(child >= 0);
    if child == 0 {
        let refused = lock.try_lock().is_err_and(|e| e.kind() == ErrorKind::Closed);
        let inert = !guard.is_held();
        drop(guard);
        // SAFETY: ends this process and nothing else.
        unsafe { _exit(if refused && inert { 0 } else { 1 }) }
    }
    let mut status = -1;
    // SAFETY: waits for a child of this process, with a valid pointer for its status.
    assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert!(guard.is_held());
    assert_eq!(locks.mutex("a").try_lock().unwrap_err().kind(), ErrorKind::Contended);
}

// F30
/// A forked child has no thread and no connection of its own. Its calls fail immediately.
#[test]
fn every_call_of_a_forked_child_fails_immediately() {
    let memory = Arc::new(MemoryStore::new());
    let remote = Arc::new(Remote::new(&memory));
    let locks = leasehold::blocking::Client::from(client(remote.clone()));
    let guard = locks.mutex("a").lock().unwrap();
    let sequencer = guard.sequencer();
    // A call that would never return in the child must fail before it is sent.
    remote.all(Network::Silent);
    // SAFETY: the child makes calls and exits with `_exit`. The alarm ends it if it hangs.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        // SAFETY: the alarm only ends this process, by default.
        unsafe { libc::alarm(20) };
        fn kind<T>(result: Result<T>) -> Option<ErrorKind> {
            result.err().map(|e| e.kind())
        }
        let kinds = [
            kind(locks.inspect("a")),
            kind(locks.list("")),
            kind(locks.evict("a", Evict::Holders)),
            kind(locks.check(&sequencer)),
            kind(locks.diagnose()),
            kind(locks.mutex("b").try_lock()),
            kind(locks.close()),
        ];
        let wrong = kinds.iter().position(|kind| *kind != Some(ErrorKind::Closed));
        let code = wrong.map_or(100, |i| i32::try_from(i).unwrap_or(99));
        // SAFETY: ends this process immediately and skips the exit code of the test harness.
        unsafe { libc::_exit(code) }
    }
    let mut status = -1;
    // SAFETY: waits for a child of this process, with a valid pointer for its status.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status), "the child hung");
    assert_eq!(libc::WEXITSTATUS(status), 100, "the call with this number was not refused");
    remote.all(Network::Well);
    assert!(guard.is_held());
    guard.release().unwrap();
}
