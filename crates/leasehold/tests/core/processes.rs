//! The blocking face on runtimes and in threads that die, and processes that are forked.

use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use leasehold::store::{Evict, MemoryStore};
use leasehold::{ErrorKind, Result};

/// The blocking face must not depend on the runtime whose thread it blocks.
#[tokio::test]
async fn s08_the_blocking_face_works_on_a_runtime_that_it_blocks() {
    let odd = Odd { joins_sleep: true, ..Odd::new(&Arc::new(MemoryStore::new())) };
    let locks: leasehold::blocking::Leasehold = client(Arc::new(odd)).into();
    locks.mutex("a").lock().unwrap().release().unwrap();
}

/// A guard that lives in a thread-local is dropped after tokio's own thread-locals.
#[test]
fn s11_a_guard_may_be_dropped_by_a_dying_thread() {
    use std::cell::RefCell;
    thread_local!(static KEPT: RefCell<Option<leasehold::blocking::Guard>> = const { RefCell::new(None) });
    let locks = leasehold::blocking::Leasehold::from(client(Arc::new(MemoryStore::new())));
    let in_thread = locks.clone();
    let thread = std::thread::spawn(move || {
        // Registers ours before tokio's, which therefore goes first.
        KEPT.with(|kept| drop(kept.borrow_mut().take()));
        let guard = in_thread.mutex("a").lock().unwrap();
        KEPT.with(|kept| *kept.borrow_mut() = Some(guard));
    });
    thread.join().unwrap();
    locks.mutex("a").lock_timeout(Duration::from_secs(5)).unwrap().release().unwrap();
}

/// A fork has no background thread: nothing that it took would be renewed or given back.
#[test]
fn s13_a_forked_child_is_refused() {
    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(code: i32) -> !;
    }
    let locks = leasehold::blocking::Leasehold::from(client(Arc::new(MemoryStore::new())));
    let guard = locks.mutex("a").lock().unwrap();
    let lock = locks.mutex("b");
    // SAFETY: the child leaves by `_exit` and meets no lock that another thread may hold.
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
    // SAFETY: our own child, and a place for its status.
    assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert!(guard.is_held());
    assert_eq!(locks.mutex("a").try_lock().unwrap_err().kind(), ErrorKind::Contended);
}

/// A forked child has no thread and no connection of its own: it is told so, and at once.
#[test]
fn f30_a_forked_child_is_refused_whatever_it_asks() {
    let memory = Arc::new(MemoryStore::new());
    let remote = Arc::new(Remote::new(&memory));
    let locks = leasehold::blocking::Leasehold::from(client(remote.clone()));
    let guard = locks.mutex("a").lock().unwrap();
    let sequencer = guard.sequencer();
    // What would hang for ever in the child must fail before it is sent.
    remote.all(Network::Silent);
    // SAFETY: the child asks, and leaves by `_exit`; the alarm ends it if it hangs.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        // SAFETY: ends this process, and nothing else, by default.
        unsafe { libc::alarm(20) };
        fn kind<T>(result: Result<T>) -> Option<ErrorKind> {
            result.err().map(|e| e.kind())
        }
        let told = [
            kind(locks.read("a")),
            kind(locks.list("")),
            kind(locks.evict("a", Evict::Holders)),
            kind(locks.check(&sequencer)),
            kind(locks.diagnose()),
            kind(locks.mutex("b").try_lock()),
            kind(locks.close()),
        ];
        let wrong = told.iter().position(|kind| *kind != Some(ErrorKind::Closed));
        let code = wrong.map_or(100, |i| i32::try_from(i).unwrap_or(99));
        // SAFETY: ends this process at once, without the test harness noticing.
        unsafe { libc::_exit(code) }
    }
    let mut status = -1;
    // SAFETY: our own child, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status), "the child hung");
    assert_eq!(libc::WEXITSTATUS(status), 100, "the call of this number was not refused");
    remote.all(Network::Well);
    assert!(guard.is_held());
    guard.release().unwrap();
}
