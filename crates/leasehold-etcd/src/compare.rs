//! Ownership of a lock as a condition of the caller's own transaction in etcd.

use std::fmt;

use prost::Message;

use super::ask::still;
use leasehold_core::kit::ownership;
use leasehold_core::{Guard, Result, Token};

/// What URLs of the store begin with, as a word for its kind.
pub(super) const SCHEME: &str = "etcd";

/// The condition that a lock is still held: one key has one create revision.
///
/// Put it into the `If` of a transaction that changes what the lock protects, in the same etcd: then
/// nothing is changed once the lock is lost, whatever the holder believes. That is the strongest
/// fencing there is: no resource has to remember a token, and no check can come too late.
///
/// With a lock-delay it is true until the delay is over: the key is there as long as nobody else can hold.
///
/// It is plain data for whatever client of etcd the caller has: with the official Go client
/// `clientv3.Compare(clientv3.CreateRevision(key), "=", revision)`, with `etcdctl txn` its
/// [`Display`](fmt::Display) form, and for a client that is generated from etcd's own protocol files
/// [`to_protobuf`](Self::to_protobuf) is the message `etcdserverpb.Compare`.
///
/// Whoever has it and may write to etcd could end the hold: it names the key that is the hold.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EtcdCompare {
    /// The claim's key.
    pub key: Vec<u8>,
    /// The revision with which it was created: the fencing token.
    pub create_revision: i64,
}

impl EtcdCompare {
    fn new(key: Vec<u8>, token: Token) -> Self {
        // A token has 63 bits.
        let create_revision = i64::try_from(token.get()).unwrap_or(i64::MAX);
        Self { key, create_revision }
    }

    /// The message `etcdserverpb.Compare`, encoded.
    pub fn to_protobuf(&self) -> Vec<u8> {
        let revision = u64::try_from(self.create_revision).unwrap_or(0);
        still(self.key.clone(), revision).encode_to_vec()
    }
}

/// As `etcdctl txn` reads it: `create("name/lease") = "42"`. What is not printable ASCII in the key is
/// written as Go writes it in a string.
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

/// Without the key, which nobody should need to see in a log.
impl fmt::Debug for EtcdCompare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdCompare")
            .field("create_revision", &self.create_revision)
            .finish_non_exhaustive()
    }
}

/// What a hold can be beside, where etcd keeps it.
pub trait EtcdGuardExt {
    /// This hold as a condition for the caller's own transaction in the same etcd. No I/O: whether it
    /// is true, etcd decides when it does the transaction.
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
    /// [`Unsupported`](leasehold_core::ErrorKind::Unsupported) if the lock is kept in another store than
    /// etcd, or held with others (permits, readers).
    fn etcd_compare(&self) -> Result<EtcdCompare>;
}

impl EtcdGuardExt for Guard {
    fn etcd_compare(&self) -> Result<EtcdCompare> {
        let key = ownership(self, SCHEME, "etcd_compare")?;
        Ok(EtcdCompare::new(key, self.token()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s90_a_key_is_only_a_key_in_a_transaction() {
        let key = "a\") = \"1\n\u{e9}\\/1f".as_bytes().to_vec();
        let compare = EtcdCompare { key, create_revision: 42 };
        let shown = "create(\"a\\\") = \\\"1\\x0a\\xc3\\xa9\\\\/1f\") = \"42\"";
        assert_eq!(compare.to_string(), shown);
        assert!(!format!("{compare:?}").contains("1f"));
    }
}
