//! Building blocks for stores, beside [`Store`](crate::store::Store): time limits, URLs, waiters
//! and checks of file systems.
//!
//! - [`Queue`](crate::queue::Queue) implements the rule that every queue follows.
//! - A [`Registry`](crate::Registry) maps the schemes of URLs to stores.
//! - A store reports problems with its configuration as a [`Finding`](crate::doctor::Finding).
//! - If a hold has another use at a store (`guard.etcd_compare()`), the store offers a trait for
//!   it, which uses [`ownership`].

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
pub use crate::store::secrets::{
    default_store, public_secrets, store_of_environment, store_url, with_passwords,
};
pub use crate::store::url::parts::{Host, UrlParts};
pub use crate::store::url::redacted;
pub use crate::store::url::tls::{Pem, Tls, TlsWords, no_tls};
pub use crate::store::waiters::Waiters;
pub use crate::words::limits::{LISTED_HOLDERS, drift, request_timeout};

/// Returns the key of this hold at the store, which a caller's own transaction in the same store
/// can check.
///
/// `scheme` is how the URLs of the store begin. `operation` is the call of the user, for the error.
///
/// # Errors
/// - [`Unsupported`](ErrorKind::Unsupported): the lock is in another kind of store, or the hold is
///   shared (a permit or a reader).
/// - [`Lost`](ErrorKind::Lost): the lock was lost.
pub fn ownership(guard: &Guard, scheme: &str, operation: &'static str) -> Result<Vec<u8>> {
    let (store, claim) = (guard.store(), &guard.lease().claim);
    let key = store.ownership(claim).and_then(|owned| {
        let owned = owned.filter(|owned| owned.scheme == scheme).ok_or_else(|| {
            let what = format!("this lock is in another store: this call needs a {scheme}: store");
            Error::new(ErrorKind::Unsupported, what)
        })?;
        fence::exclusive(guard.lease())?;
        Ok(owned.key)
    });
    key.map_err(|e| e.during(operation).on(guard.name()).at(store.url()))
}
