//! One fair queue with fencing tokens in any system that can do one thing: write a value if it is still
//! what was read ([`Cells`]): memcached, NATS JetStream, objects in S3.
//!
//! # The cells
//! - One for each *lock*: its queue, in which each claim stands with its token and the session of its
//!   client (`text.rs`, `keys.rs`).
//! - One for each *client*, its session, which all its claims refer to and which ends by the system's own
//!   clock unless it is touched (`session.rs`). So what is held costs one write a period, however much it
//!   is.
//! - One for the *epoch*, where the system may lose everything and go on (`epoch.rs`).
//!
//! # One call
//! Read the queue, remove those in front whose sessions are gone, apply [`queue`](leasehold_core::queue),
//! write it if it is still what was read, else again (`shared.rs`).
//!
//! - *join* (`join.rs`): a look and a write; only the write, where this client wrote last and left the lock
//!   free. A try at a lock that is held writes nothing: one look, and one at its holder's session.
//! - *leave* (`leave.rs`): the write, where nobody has come since we did; else a look before it. Whoever is next
//!   is granted in the same write.
//! - *renew* (`renew.rs`): a look at the queues, hundreds in one round trip; nothing is written.
//! - *changed* (`wake.rs`): looks, with growing pauses; where clients can tell each other ([`Bells`]), whoever lets
//!   somebody in tells exactly that one.
//!
//! # One holder
//! The cell has one value at a time, and each value was worked out from the one before it. So there is one
//! order of events for each lock, and in it the rule of the queue holds. A claim leaves the queue in three ways:
//! its client takes it out; a person does (and the client learns of it by a bell, or at the next renewal); or
//! its session's cell was not there. That cell is there for longer than its client believes in anything
//! (`session.rs`), and never comes back. What a holder is promised ends with its lease, or with what is certain of the session,
//! whichever is sooner.
//!
//! # Whose clock
//! The system's, and only for how long a session's cell lives. No two clocks are compared, and whoever looks
//! once knows as much as who looks all the time. Leases within a session are counted by the client that has
//! them (`claims.rs`): it gives up what was not renewed. Tokens are drawn above the queue's last, and not
//! below the clock, so that they go on rising where a queue was forgotten, if the clock did not fall back.
//!
//! # What if
//! - *a write is repeated on its way*, and only the refusal of the repetition comes back: what is in the cell decides
//!   (`shared.rs`, `lasting.rs`);
//! - *one cell hangs, or is answered by an error*: it costs only its own claims (`renew.rs`);
//! - *the reply to a write is lost*: the next look finds the claim by its id, or does not. If it does not, the
//!   write may still be under way, so that a `leave` writes the cell as it is: after that it is refused;
//! - *the caller's future is dropped*: the same. The `leave` that follows waits for the call's turn, and knows
//!   that something was sent (`claims.rs`);
//! - *we die*: our session's cell ends, and whoever is next finds that out at its next look;
//! - *a look is stale*: what is written by it is refused, and nobody is taken for dead by it. A `leave` that
//!   does not find its claim where that can be writes too, for an old look may be older than the claim;
//! - *a write is late*: refused as soon as anybody has written since, for versions never come again;
//! - *many want it at once*: each refusal means that somebody else was let in, and each pause is random. To
//!   join is the only race: afterwards everybody stands in the queue;
//! - *we are cut off*: what we hold ends by our own clock before our session's cell does;
//! - *the system forgets a lock*: then two may hold, until the first finds out at its next renewal. It is the
//!   adapter's to say whether that can happen ([`promises`] does not know);
//! - *the system forgets all*: nobody is let in until all who were forgotten have ceased to believe
//!   (`epoch.rs`);
//! - *something else is where a queue should be*: it is told of, and never written over.
//!
//! A lock-delay, and a lock that is kept after its release, are not to be had: nothing but sessions ends by a
//! clock here.
//!
//! # An adapter
//! Is a [`Cells`], and a function that makes a [`CellStore`] of it; [`memory`] is a short one. Where nothing
//! ends by itself, it is four functions: [`lasting`] does the rest.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod cells;
mod claims;
mod epoch;
#[cfg(any(
    feature = "memcached",
    feature = "nats",
    feature = "s3",
    feature = "gs",
    feature = "az"
))]
mod fence;
mod heartbeat;
mod inspect;
mod join;
mod keys;
mod known;
#[cfg(feature = "lasting")]
pub mod lasting;
mod leave;
#[cfg(feature = "memcached")]
pub mod memcached;
pub mod memory;
#[cfg(feature = "nats")]
pub mod nats;
#[cfg(any(feature = "s3", feature = "gs", feature = "az"))]
pub mod objects;
mod renew;
mod reweigh;
mod session;
mod shared;
mod store;
mod text;
mod wake;

pub use self::cells::{Answer, Bells, Cells, Found, Heard, Request, System, Version};
pub use self::store::{CellStore, Options, promises};
