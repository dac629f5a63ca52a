//! What a store is built with, ours and yours, beside [`Store`](crate::store::Store): time limits, URLs, waiters, and
//! what is wrong with a disk.
//!
//! - The rule that every queue follows is [`Queue`](crate::queue::Queue).
//! - A URL's scheme comes to a store through a [`Registry`](crate::Registry).
//! - What a store finds out about its set-up it tells as a [`Finding`](crate::doctor::Finding).
//! - What else a hold can be used for at a store (`guard.etcd_compare()`) is a trait of the store's
//!   own, which finds with [`ownership`] what it needs.

use crate::lock::fence;
use crate::lock::guard::Guard;
use crate::words::error::{Error, ErrorKind, Result};

pub use crate::base::clock::wall_micros;
#[cfg(feature = "serde")]
pub use crate::base::duration::parse as parse_duration;
pub use crate::base::duration::short;
pub use crate::base::ends::Ends;
pub use crate::base::locked::locked;
pub use crate::base::park::listen;
pub use crate::base::percent::{Escaped, decoded, decoded_bytes, unescape};
pub use crate::base::similar::did_you_mean;
pub use crate::base::world::spawn_on;
pub use crate::store::inbox::Inbox;
pub use crate::store::machine::{boot_id, file_system, identity_of, magic, remote};
pub use crate::store::url::parts::{Host, UrlParts};
pub use crate::store::url::redacted;
pub use crate::store::url::tls::{Pem, Tls, TlsWords, no_tls};
pub use crate::store::waiters::Waiters;
pub use crate::words::limits::{drift, request_timeout};

/// The key at the store of this hold, which a caller's own transaction in the same store can check, where
/// the store's URLs begin with `scheme`. `operation` is what the caller was asked for.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if the lock is kept in another kind of store, or held with others (permits,
/// readers); [`ErrorKind::Lost`] if the hold is known to be gone.
pub fn ownership(guard: &Guard, scheme: &str, operation: &'static str) -> Result<Vec<u8>> {
    let (store, claim) = (guard.store(), &guard.lease().claim);
    let key = store.ownership(claim).and_then(|owned| {
        let owned = owned.filter(|owned| owned.scheme == scheme).ok_or_else(|| {
            let what = format!("this lock is not kept there: connect by a URL of {scheme}:");
            Error::new(ErrorKind::Unsupported, what)
        })?;
        fence::exclusive(guard.lease())?;
        Ok(owned.key)
    });
    key.map_err(|e| e.during(operation).on(guard.name()).at(store.url()))
}
