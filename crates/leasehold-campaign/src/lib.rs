//! The campaign: runs torture on every store for hours, and makes the table of the results.
//!
//! `leasehold torture` runs for seconds, keeps all events in memory, and checks them. A campaign
//! makes many such runs, one after the other. It runs each store on the oldest and on the newest
//! version of its servers. It runs them with each fault alone, with all of them, and with disturbed
//! servers. Each combination is a [`Piece`].
//!
//! **The state** is one file with one [`Run`] per line, as JSON. The next piece is the one that was
//! run least often, so a stopped campaign continues where it was. A run is recorded when it is over
//! and checked. An interrupted run is repeated. The file is locked while a campaign uses it. An
//! incomplete line, which only a machine crash leaves, is removed.
//!
//! **Nothing is left out.** A run that broke a promise is a line with its violations, and its
//! history is kept. A run that failed is a line with the reason. The page that is made from the
//! lines (`docs/internals/reliability.md`) contains all of them.

#![forbid(unsafe_code)]

mod asked;
pub mod breakable;
mod campaign;
mod faults;
mod piece;
mod run;
mod state;
mod store;
pub mod table;

pub use asked::Asked;
pub use breakable::Breakable;
pub use campaign::{Campaign, Ended};
pub use faults::Faults;
pub use piece::{Piece, pieces};
pub use run::{Outcome, Promise, Run};
pub use state::{State, read};
pub use store::Store;
