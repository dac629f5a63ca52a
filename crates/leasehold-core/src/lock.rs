//! The public API: clients, the kinds of lock, and guards, which represent held locks.

pub(crate) mod acquire;
pub mod blocking;
pub(crate) mod builder;
pub(crate) mod client;
pub(crate) mod convert;
pub(crate) mod election;
pub(crate) mod events;
pub mod fence;
pub(crate) mod guard;
pub(crate) mod hold;
pub(crate) mod mutex;
pub(crate) mod once_per;
mod options;
pub(crate) mod owner;
mod poll_schedule;
pub(crate) mod request;
mod run;
pub(crate) mod rwlock;
pub(crate) mod semaphore;
pub(crate) mod several;
mod stream;
mod wait;
pub(crate) mod wait_chain;
pub(crate) mod watch;
