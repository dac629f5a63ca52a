//! **Broken on purpose: do not copy.** A queue in ZooKeeper in which all clients watch the same
//! node.

use zookeeper_client::{Acls, Client, CreateMode, OneshotWatcher};

use crate::trouble::{Result, Trouble};

const FOLDER: &str = "/herd";

/// Creates the node that contains the queue.
pub(crate) async fn begin(client: &Client) -> Result<()> {
    let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
    client.mkdir(FOLDER, &options).await?;
    Ok(())
}

/// Joins the queue and returns the client's own node.
pub(crate) async fn stand(client: &Client) -> Result<String> {
    let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    let (_, sequence) = client.create(&format!("{FOLDER}/n-"), b"", &options).await?;
    Ok(format!("n-{sequence}"))
}

/// Finds the first node and watches it. `None` means that the first node is the client's own, so
/// the client holds the lock.
pub(crate) async fn look(client: &Client, mine: &str) -> Result<Option<OneshotWatcher>> {
    loop {
        let children = client.list_children(FOLDER).await?;
        let first = children.iter().min().ok_or_else(|| Trouble::new("the queue is empty"))?;
        if first == mine {
            return Ok(None);
        }
        let (stat, watcher) = client.check_and_watch_stat(&format!("{FOLDER}/{first}")).await?;
        if stat.is_some() {
            return Ok(Some(watcher));
        }
    }
}

/// Leaves the queue.
pub(crate) async fn leave(client: &Client, mine: &str) -> Result<()> {
    Ok(client.delete(&format!("{FOLDER}/{mine}"), None).await?)
}
