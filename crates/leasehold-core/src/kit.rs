//! What a store is built with, ours and yours, beside [`Store`]: time limits, URLs, waiters, and
//! what is wrong with a disk.
//!
//! - The rule that every queue follows is [`Queue`](crate::queue::Queue).
//! - A URL's scheme comes to a store through a [`Registry`](crate::Registry).
//! - What a store finds out about its set-up it tells as a [`Finding`](crate::doctor::Finding).
//! - What else a hold can be used for at a store (`guard.etcd_compare()`) is a trait of the store's
//!   own, which finds with [`store_of`] and [`claim_of`] what it needs.

use crate::lock::fence;
use crate::lock::guard::Guard;
use crate::store::Store;
use crate::words::claim::Claim;
use crate::words::error::Result;

pub use crate::base::clock::wall_micros;
pub use crate::base::duration::short;
pub use crate::base::locked::locked;
pub use crate::base::percent::{Escaped, decoded, decoded_bytes, unescape};
pub use crate::store::machine::{boot_id, file_system, identity_of, magic, remote};
pub use crate::store::url::parts::{Host, UrlParts};
pub use crate::store::url::redacted;
pub use crate::store::url::tls::{Pem, Tls, TlsWords, no_tls};
pub use crate::store::waiters::Waiters;
pub use crate::words::limits::{answer_limit, drift};

/// The store that keeps this hold.
pub fn store_of(guard: &Guard) -> &dyn Store {
    guard.store()
}

/// The claim that this hold is, as its store knows it. Its id is a secret.
pub fn claim_of(guard: &Guard) -> &Claim {
    &guard.lease().claim
}

/// Refuses holds beside which there are others: permits, and readers.
///
/// # Errors
/// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for these.
pub fn exclusive(guard: &Guard) -> Result<()> {
    fence::exclusive(guard.lease())
}
