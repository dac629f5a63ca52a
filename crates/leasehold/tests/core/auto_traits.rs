//! The types that programs send to other threads. A new field must not take that away.

use leasehold::store::{Claim, Registry};
use leasehold::{
    Client, Clock, Deadline, Election, Error, LockEvents, LockOptions, LockRequest, MultiGuard,
    Mutex, MutexGuard, Name, Observer, Owner, RwLock, Semaphore, Sequencer, Token, Watch, blocking,
};

const fn everywhere<T: Send + Sync + Unpin + 'static>() {}

const _: () = {
    everywhere::<Client>();
    everywhere::<blocking::Client>();
    everywhere::<leasehold::Builder>();
    everywhere::<Mutex>();
    everywhere::<RwLock>();
    everywhere::<Semaphore>();
    everywhere::<MutexGuard>();
    everywhere::<MultiGuard>();
    everywhere::<blocking::MutexGuard>();
    everywhere::<blocking::Mutex>();
    everywhere::<Election>();
    everywhere::<Observer>();
    everywhere::<LockEvents>();
    everywhere::<Watch>();
    everywhere::<LockRequest>();
    everywhere::<LockOptions>();
    everywhere::<Registry>();
    everywhere::<Deadline>();
    everywhere::<Name>();
    everywhere::<Token>();
    everywhere::<leasehold::store::MemoryStore>();
    everywhere::<Owner>();
    everywhere::<Sequencer>();
    everywhere::<Claim>();
    everywhere::<Clock>();
    everywhere::<Error>();
};

fn sent<T: Send>(_: T) {}

#[test]
fn lock_futures_are_send() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let locks = runtime.block_on(leasehold::connect("memory:")).unwrap();
    let (mutex, rwlock) = (locks.mutex("x"), locks.rwlock("y"));
    sent(mutex.lock());
    sent(mutex.try_lock());
    sent(rwlock.read());
    sent(rwlock.write());
    sent(locks.semaphore("z", 2).acquire());
    sent(locks.inspect("x"));
    sent(leasehold::connect("memory:"));
    let guard = runtime.block_on(mutex.lock()).unwrap();
    sent(guard.lost());
    sent(guard.release());
}
