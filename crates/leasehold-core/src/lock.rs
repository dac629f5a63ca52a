//! What programs see: a client, its kinds of lock, and the guard that means "held".

pub(crate) mod acquire;
pub mod blocking;
pub(crate) mod builder;
pub(crate) mod changes;
pub(crate) mod election;
pub mod fence;
pub(crate) mod guard;
pub(crate) mod leasehold;
mod looks;
pub(crate) mod mutex;
pub(crate) mod once_per;
mod options;
pub(crate) mod owner;
mod reweigh;
mod run;
pub(crate) mod rwlock;
pub(crate) mod semaphore;
pub(crate) mod several;
mod stream;
mod wait;
pub(crate) mod wanted;
