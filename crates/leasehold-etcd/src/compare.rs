//! Ownership of a lock as a condition of the caller's own transaction in etcd.

use std::fmt;

use prost::Message;

use super::requests::still;
use leasehold_core::kit::ownership;
use leasehold_core::{Hold, Result, Token};

/// The scheme of the store's URLs.
pub(super) const SCHEME: &str = "etcd";

/// The condition that a lock is still held, for an etcd transaction: one key has one create
/// revision.
///
/// Use it in the `If` of a transaction that changes the protected data in the same etcd. Nothing is
/// changed once the lock is lost, even if the holder has not noticed. This is the strongest form of
/// fencing: the resource stores no token, and no check can be too late.
///
/// With a lock delay the condition stays true until the delay is over, because no other client can
/// acquire the lock before.
///
/// The condition is plain data and works with any etcd client. With the official Go client, use
/// `clientv3.Compare(clientv3.CreateRevision(key), "=", revision)`. With `etcdctl txn`, use the
/// condition's [`Display`](fmt::Display) form. For a client that is generated from etcd's protocol
/// files, [`to_protobuf`](Self::to_protobuf) returns the message `etcdserverpb.Compare`.
///
/// The condition contains the key of the claim. Anyone who knows the key and may write to etcd can
/// delete it and so release the lock.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EtcdCompare {
    /// The key of the claim.
    pub key: Vec<u8>,
    /// The revision at which the key was created, which is the fencing token.
    pub create_revision: i64,
}

impl EtcdCompare {
    fn new(key: Vec<u8>, token: Token) -> Self {
        // A token has 63 bits.
        let create_revision = i64::try_from(token.get()).unwrap_or(i64::MAX);
        Self { key, create_revision }
    }

    /// Returns the encoded message `etcdserverpb.Compare`.
    pub fn to_protobuf(&self) -> Vec<u8> {
        let revision = u64::try_from(self.create_revision).unwrap_or(0);
        still(self.key.clone(), revision).encode_to_vec()
    }
}

/// The syntax of `etcdctl txn`: `create("name/lease") = "42"`. Bytes of the key that are not
/// printable ASCII are escaped as in a Go string.
impl fmt::Display for EtcdCompare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("create(\"")?;
        for byte in &self.key {
            match byte {
                b'"' | b'\\' => write!(f, "\\{}", char::from(*byte))?,
                b' '..=b'~' => write!(f, "{}", char::from(*byte))?,
                other => write!(f, "\\x{other:02x}")?,
            }
        }
        write!(f, "\") = \"{}\"", self.create_revision)
    }
}

/// Omits the key, which does not belong in logs.
impl fmt::Debug for EtcdCompare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdCompare")
            .field("create_revision", &self.create_revision)
            .finish_non_exhaustive()
    }
}

/// Methods of guards whose lock is in etcd.
pub trait EtcdGuardExt {
    /// Returns the condition that this lock is still held, for your own transaction in the same
    /// etcd.
    ///
    /// This call does no I/O: etcd evaluates the condition when it runs the transaction.
    ///
    /// ```no_run
    /// # async fn example() -> leasehold::Result<()> {
    /// use leasehold::EtcdGuardExt;
    /// let locks = leasehold::connect("etcd://localhost").await?;
    /// let guard = locks.mutex("order:42").lock().await?;
    /// let condition = guard.etcd_compare()?;
    /// println!("{condition}"); // a line for the compares of `etcdctl txn`
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - [`Unsupported`](leasehold_core::ErrorKind::Unsupported): the lock is in another store, or
    ///   the guard is a permit or a reader.
    fn etcd_compare(&self) -> Result<EtcdCompare>;
}

impl EtcdGuardExt for Hold {
    fn etcd_compare(&self) -> Result<EtcdCompare> {
        let key = ownership(self, SCHEME, "etcd_compare")?;
        Ok(EtcdCompare::new(key, self.grant()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // S90
    #[test]
    fn key_is_escaped_in_a_transaction() {
        let key = "a\") = \"1\n\u{e9}\\/1f".as_bytes().to_vec();
        let compare = EtcdCompare { key, create_revision: 42 };
        let shown = "create(\"a\\\") = \\\"1\\x0a\\xc3\\xa9\\\\/1f\") = \"42\"";
        assert_eq!(compare.to_string(), shown);
        assert!(!format!("{compare:?}").contains("1f"));
    }
}
