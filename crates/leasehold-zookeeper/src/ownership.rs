//! Ownership of a lock as a condition of the caller's own transaction in ZooKeeper.

use leasehold_core::kit::ownership;
use leasehold_core::{Hold, Result};

/// The scheme of the store's URLs.
pub(super) const SCHEME: &str = "zookeeper";

/// Methods of guards whose lock is in ZooKeeper.
pub trait ZooKeeperGuardExt {
    /// Returns the path of this guard's node, as a condition for your own transaction in the same
    /// ensemble.
    ///
    /// This call does no I/O: ZooKeeper evaluates the condition when it runs the transaction.
    ///
    /// Put a check of this path with version −1 (any) before the changes of a `multi`. Nothing is
    /// changed once the lock is lost, even if the holder has not noticed, because the node
    /// disappears with the lock and its name is never used again. The resource stores no token, and
    /// the check cannot be outdated, because ZooKeeper evaluates it together with the changes. With
    /// `zookeeper-client` call `Client::new_check_writer(path, None)`, with Curator
    /// `client.transactionOp().check().forPath(path)`, with kazoo `transaction.check(path, -1)`.
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
    /// The name of the node contains the claim's secret. Anyone who knows the name and may delete
    /// nodes can release the lock.
    ///
    /// # Errors
    /// - [`Unsupported`](leasehold_core::ErrorKind::Unsupported): the lock is in another store, or
    ///   the guard is a permit or a reader.
    /// - [`Lost`](leasehold_core::ErrorKind::Lost): the node is known to be gone.
    fn zookeeper_node(&self) -> Result<String>;
}

impl ZooKeeperGuardExt for Hold {
    fn zookeeper_node(&self) -> Result<String> {
        let path = ownership(self, SCHEME, "zookeeper_node")?;
        Ok(String::from_utf8_lossy(&path).into_owned())
    }
}
