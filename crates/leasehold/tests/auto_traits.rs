//! What may go to another thread, as programs rely on it: it must not be lost by a field.

use leasehold::{
    Claim, Clock, Error, Guard, Leasehold, Mutex, Owner, RwLock, Semaphore, Sequencer, Watch,
    blocking,
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
    everywhere::<Watch>();
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
