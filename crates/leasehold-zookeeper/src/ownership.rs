//! Ownership of a lock as a condition of the caller's own transaction in ZooKeeper.

use leasehold_core::kit::ownership;
use leasehold_core::{Guard, Result};

/// What URLs of the store begin with.
pub(super) const SCHEME: &str = "zookeeper";

/// What a hold can be beside, where ZooKeeper keeps it.
pub trait ZooKeeperGuardExt {
    /// The path of this hold's node: the condition for the caller's own transaction in the same
    /// ensemble. No I/O: whether it is true, ZooKeeper decides when it does the transaction.
    ///
    /// Put a check of this path, with the version −1 (any), before the changes of a `multi`: then
    /// nothing is changed once the lock is lost, whatever the holder believes, since the node is gone
    /// with the hold and its name never comes back. No resource has to remember a token, and no check
    /// can come too late. With `zookeeper-client` that is `Client::new_check_writer(path, None)`, with
    /// Curator `client.transactionOp().check().forPath(path)`, with kazoo `transaction.check(path, -1)`.
    ///
    /// ```no_run
    /// # async fn example() -> leasehold::Result<()> {
    /// use leasehold::ZooKeeperGuardExt;
    /// let locks = leasehold::connect("zookeeper://localhost/locks").await?;
    /// let guard = locks.mutex("order:42").lock().await?;
    /// println!("check {}", guard.zookeeper_node()?);
    /// # Ok(()) }
    /// ```
    ///
    /// Whoever may delete nodes there can release the lock by it: its name holds the claim's secret.
    ///
    /// # Errors
    /// [`Unsupported`](leasehold_core::ErrorKind::Unsupported) if the lock is kept in another store than
    /// ZooKeeper, or held with others (permits, readers); [`Lost`](leasehold_core::ErrorKind::Lost) if its
    /// node is known to be gone.
    fn zookeeper_node(&self) -> Result<String>;
}

impl ZooKeeperGuardExt for Guard {
    fn zookeeper_node(&self) -> Result<String> {
        let path = ownership(self, SCHEME, "zookeeper_node")?;
        Ok(String::from_utf8_lossy(&path).into_owned())
    }
}
