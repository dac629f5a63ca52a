//! **Broken on purpose: do not copy.** The queue in ZooKeeper in which everybody watches the same node.

use zookeeper_client::{Acls, Client, CreateMode, OneshotWatcher};

use crate::trouble::{Result, Trouble};

const FOLDER: &str = "/herd";

/// Makes the node under which the queue is.
pub(crate) async fn begin(client: &Client) -> Result<()> {
    let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
    client.mkdir(FOLDER, &options).await?;
    Ok(())
}

/// Stands in the queue; returns its own node.
pub(crate) async fn stand(client: &Client) -> Result<String> {
    let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    let (_, sequence) = client.create(&format!("{FOLDER}/n-"), b"", &options).await?;
    Ok(format!("n-{sequence}"))
}

/// Looks who is first, and watches that node; `None`: it is one's own, and the lock is held.
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
