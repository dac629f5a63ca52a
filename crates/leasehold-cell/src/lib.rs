//! One fair queue with fencing tokens in any system that can do one thing: write a value if it is still
//! what was read ([`Cells`]).
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod cells;
mod claims;
mod epoch;
mod inspect;
mod join;
mod keys;
mod known;
mod leave;
#[cfg(feature = "memcached")]
pub mod memcached;
pub mod memory;
mod renew;
mod session;
mod shared;
mod store;
mod text;
mod wake;

pub use self::cells::{Answer, Cells, Found, Request, System, Version};
pub use self::store::{CellStore, Options, promises};
