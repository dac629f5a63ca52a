//! What may go to another thread, as programs rely on it: it must not be lost by a field.

use leasehold::{
    Changes, Claim, Clock, Deadline, Election, Error, Guard, Guards, Leasehold, LockOptions, Mutex,
    Name, Observer, Owner, Registry, RwLock, Semaphore, Sequencer, Token, Wanted, Watch, blocking,
};

const fn everywhere<T: Send + Sync + Unpin + 'static>() {}

const _: () = {
    everywhere::<Leasehold>();
    everywhere::<blocking::Leasehold>();
    everywhere::<leasehold::Builder>();
    everywhere::<Mutex>();
    everywhere::<RwLock>();
    everywhere::<Semaphore>();
    everywhere::<Guard>();
    everywhere::<Guards>();
    everywhere::<blocking::Guard>();
    everywhere::<blocking::Mutex>();
    everywhere::<Election>();
    everywhere::<Observer>();
    everywhere::<Changes>();
    everywhere::<Watch>();
    everywhere::<Wanted>();
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
fn the_futures_of_a_lock_may_be_spawned() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let locks = runtime.block_on(leasehold::connect("memory:")).unwrap();
    let (mutex, rwlock) = (locks.mutex("x"), locks.rwlock("y"));
    sent(mutex.lock());
    sent(mutex.try_lock());
    sent(rwlock.read());
    sent(rwlock.write());
    sent(locks.semaphore("z", 2).acquire());
    sent(locks.read("x"));
    sent(leasehold::connect("memory:"));
    let guard = runtime.block_on(mutex.lock()).unwrap();
    sent(guard.lost());
    sent(guard.release());
}
