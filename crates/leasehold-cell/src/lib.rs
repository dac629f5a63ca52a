//! A fair queue with fencing tokens, on any system that can write a value if it has not changed
//! since it was read ([`Cells`]). Examples are memcached, NATS JetStream and objects in S3.
//!
//! # Cells
//! - One cell per *lock* contains its queue. Each claim in the queue has its token and the session
//!   of its client (`text.rs`, `keys.rs`).
//! - One cell per *client* is its session. All claims of the client refer to it, and it expires by
//!   the system's own clock unless it is renewed (`session.rs`). So all holds of a client together
//!   cost one write per period.
//! - One cell is the *epoch*, if the system may lose all data and continue (`epoch.rs`).
//!
//! # Operations
//! A change reads the queue, removes the claims at the front whose sessions are gone, and applies
//! the rules of [`queue`](leasehold_core::queue). It then writes the queue if the cell has not
//! changed since it was read, and otherwise starts again (`shared.rs`).
//!
//! - *join* (`join.rs`) costs a read and a write. It costs only the write if this client wrote the
//!   cell last and left the lock free. A try at a held lock writes nothing, and reads the queue and
//!   the holder's session.
//! - *leave* (`leave.rs`) costs the write, plus a read if another client has written since this
//!   client joined. The same write grants the next waiter.
//! - *renew* (`renew.rs`) reads the queues, hundreds in one round trip, and writes nothing.
//! - *changed* (`notifications.rs`) polls with growing pauses. If clients can send each other
//!   messages ([`Messenger`]), the client that grants a lock notifies exactly the new holder.
//!
//! # Mutual exclusion
//! A cell has one value at a time, and each value was computed from the previous one. So the events
//! of a lock have one order, in which the rule of the queue holds.
//!
//! A claim leaves the queue in three ways. Its client releases it. An operator evicts it, which the
//! client finds out from a message or at its next renewal. Or another client finds that the cell of
//! its session is missing. That cell outlives everything that its client relies on (`session.rs`),
//! and is never created again. A hold is valid until its lease ends or the guaranteed lifetime of
//! the session ends, whichever is sooner.
//!
//! # Clocks
//! Only the system's clock matters, and only for the lifetime of a session's cell. No two clocks
//! are compared, so a client that reads once knows as much as one that polls all the time.
//!
//! Each client times the leases of its own claims (`claims.rs`) and gives up a claim that was not
//! renewed. A new token is above the last token of the queue and not below the wall clock. So
//! tokens keep rising after the system has lost a queue, unless that clock was set back.
//!
//! # Faults
//! - *A write is repeated on its way*, and only the refusal of the repetition arrives. The content
//!   of the cell decides (`shared.rs`, `lasting.rs`).
//! - *One cell hangs or fails.* Only the claims in that cell are affected (`renew.rs`).
//! - *The reply to a write is lost.* The next read finds the claim by its ID, or does not. If it
//!   does not, the write may still arrive later. So a `leave` writes the cell unchanged, and the
//!   late write is then refused.
//! - *The caller's future is dropped.* This is handled like a lost reply. The `leave` that follows
//!   waits until the dropped call has ended, and knows that a request was sent (`claims.rs`).
//! - *The client crashes.* Its session's cell expires, which the next client finds out when it
//!   reads that cell.
//! - *A read is stale.* A write that is based on it is refused, and no session is considered dead
//!   because of it alone. A `leave` that does not find its claim also writes if reads can be stale,
//!   because an old read may be older than the claim.
//! - *A write arrives late.* It is refused if another client has written since, because versions
//!   are never reused.
//! - *Many clients want the lock at once.* Each refusal means that another client was faster, and
//!   each pause is random. Only joins race. Afterwards all claims are in the queue.
//! - *The client is partitioned from the system.* Its holds end by its own clock before its
//!   session's cell expires.
//! - *The system loses one lock.* Two clients may then hold it until the first one finds out at its
//!   next renewal. The adapter must state whether that can happen, because [`promises`] does not
//!   know.
//! - *The system loses all data.* No lock is granted until all lost holds have ended (`epoch.rs`).
//! - *A queue's key contains a foreign value.* The value is reported as an error, and never
//!   overwritten.
//!
//! Cooldowns (`lock_delay` and `min_hold`) are not supported, because only sessions expire by a
//! clock.
//!
//! # Writing an adapter
//! An adapter is a [`Cells`] and a function that creates a [`CellStore`] from it. [`memory`] is a
//! short one. If nothing expires in the system, an adapter is four functions, and [`lasting`] does
//! the rest.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod cells;
mod claims;
mod convert;
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
mod last_writes;
#[cfg(feature = "lasting")]
pub mod lasting;
mod leave;
#[cfg(feature = "memcached")]
pub mod memcached;
pub mod memory;
#[cfg(feature = "nats")]
pub mod nats;
mod notifications;
#[cfg(any(feature = "s3", feature = "gs", feature = "az"))]
pub mod objects;
mod renew;
mod session;
mod shared;
mod store;
mod text;

pub use self::cells::{Answer, Cells, Found, Message, Messenger, Request, System, Version};
pub use self::store::{CellStore, Options, promises};
