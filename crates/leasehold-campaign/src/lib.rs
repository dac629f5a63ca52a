//! The campaign: torture of every store, for hours, and the table of what came out.
//!
//! `leasehold torture` runs for seconds, keeps all that happened in memory, and judges it. Here are many
//! such runs, one after the other: each store, on the oldest and on the newest of its servers, with
//! each fault alone, with all of them, and with its servers killed and stopped. Each is a [`Piece`].
//!
//! **The state** is one file of [`Run`]s, a line of JSON each, and nothing else: what is done next is the
//! piece that was done least often, so a campaign that is stopped goes on where it was. A piece is
//! written down when it is over and judged; one that is interrupted is done again. The file is locked
//! while a campaign works with it, and half a line, which only a machine that dies leaves behind, is
//! taken away.
//!
//! **Nothing is left out.** A run that broke a promise is a line with its stories, and its history is
//! kept; one that could not be held is a line that says why; and the page that is made of the lines
//! (`docs/internals/reliability.md`) has them all.

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
