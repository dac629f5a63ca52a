//! Building blocks for stores, in addition to [`Store`](crate::store::Store): time limits, URLs,
//! waiters and checks of file systems.
//!
//! - [`Queue`](crate::queue::Queue) implements the rule that every queue follows.
//! - A [`Registry`](crate::Registry) maps the schemes of URLs to stores.
//! - A store reports problems with its configuration as a [`Finding`](crate::doctor::Finding).
//! - If a store can use a hold in another way (`guard.etcd_compare()`), it offers a trait for that,
//!   which uses [`ownership`].

use crate::lock::fence;
use crate::lock::hold::Hold;
use crate::types::error::{Error, ErrorKind, Result};

pub use crate::store::addresses::Addresses;
pub use crate::store::encryption::{Encryption, Stream};
pub use crate::store::inbox::Inbox;
pub use crate::store::machine::{boot_id, file_system, identity_of, magic, remote};
pub use crate::store::missing::{is_no_store, no_store};
pub use crate::store::namespaced::namespaced;
pub use crate::store::secrets::{
    Password, default_namespace, default_store, public_secrets, store_of_environment, store_url,
    with_passwords,
};
pub use crate::store::url::parts::{Host, UrlParts};
pub use crate::store::url::tls::{Pem, Tls, TlsWords, no_tls};
pub use crate::store::url::{redacted, split_query};
pub use crate::store::waiters::Waiters;
pub use crate::types::answer::frozen_label;
pub use crate::types::limits::{LISTED_HOLDERS, drift, request_timeout};
pub use crate::util::clock::wall_micros;
#[cfg(feature = "serde")]
pub use crate::util::duration::parse as parse_duration;
pub use crate::util::duration::short;
pub use crate::util::ends::Ends;
pub use crate::util::locked::locked;
pub use crate::util::park::listen;
pub use crate::util::percent::{Escaped, decoded, decoded_bytes, unescape};
pub use crate::util::similar::did_you_mean;
pub use crate::util::world::spawn_on;

/// Returns the key of this hold at the store. A caller's own transaction in the same store can
/// check this key.
///
/// `scheme` is the URL scheme of the store. `operation` is the name of the user's call, for the
/// error.
///
/// # Errors
/// - [`Unsupported`](ErrorKind::Unsupported): the lock is in another kind of store, or the hold is
///   shared (a permit or a reader).
/// - [`Lost`](ErrorKind::Lost): the lock was lost.
pub fn ownership(hold: &Hold, scheme: &str, operation: &'static str) -> Result<Vec<u8>> {
    let (store, claim) = (hold.store(), &hold.lease().claim);
    let key = store.ownership(claim).and_then(|owned| {
        let owned = owned.filter(|owned| owned.scheme == scheme).ok_or_else(|| {
            let what = format!("this lock is in another store: this call needs a {scheme}: store");
            Error::new(ErrorKind::Unsupported, what)
        })?;
        fence::exclusive(hold.lease())?;
        Ok(owned.key)
    });
    key.map_err(|e| e.with_operation(operation).with_lock(hold.name()).with_store(store.url()))
}
