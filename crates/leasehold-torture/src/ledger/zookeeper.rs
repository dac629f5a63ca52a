//! The fenced resource in ZooKeeper: a node for each entry, created by a transaction that checks the
//! hold's node ([`Guard::zookeeper_node`]). The number that ZooKeeper gives to a node is its version.

use async_trait::async_trait;
use leasehold::{Guard, Result, ZooKeeperGuardExt};
use zookeeper_client::{Acls, CheckWriteError, CheckWriter, Client, CreateMode, Error as Refusal};

use super::{Entry, Ledger, Proof, failed, foreign, parts};
use crate::resource::Read;

pub(crate) struct ZooKeeper {
    servers: String,
    user: Option<String>,
    /// A session that has ended is replaced.
    client: tokio::sync::Mutex<Option<Client>>,
    root: String,
}

impl ZooKeeper {
    pub(crate) async fn open(url: &str, run: &str, make: usize) -> Result<Self> {
        let of = parts(url)?;
        let chroot = if of.path.is_empty() { String::new() } else { format!("/{}", of.path) };
        let keeper = Self {
            servers: of.servers.to_owned(),
            user: of.user.map(|(user, password)| format!("{user}:{password}")),
            client: tokio::sync::Mutex::default(),
            root: format!("{chroot}/leasehold-torture-{run}"),
        };
        let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
        for lock in 0..make {
            let list = keeper.list(lock);
            keeper.client().await?.mkdir(&list, &options).await.map_err(failed)?;
        }
        Ok(keeper)
    }

    async fn client(&self) -> Result<Client> {
        let mut kept = self.client.lock().await;
        if let Some(client) = kept.as_ref().filter(|client| !client.state().is_terminated()) {
            return Ok(client.clone());
        }
        let mut connector = Client::connector();
        if let Some(user) = &self.user {
            connector = connector.with_auth("digest", user.as_bytes());
        }
        let client = connector.connect(&self.servers).await.map_err(failed)?;
        Ok(kept.insert(client).clone())
    }

    /// The node whose children are a lock's entries.
    fn list(&self, lock: usize) -> String {
        format!("{}/{lock}", self.root)
    }

    async fn entry(&self, client: &Client, lock: usize, child: &str) -> Result<(usize, Entry)> {
        let path = format!("{}/{child}", self.list(lock));
        let (data, _) = client.get_data(&path).await.map_err(failed)?;
        let number = child.trim_start_matches(CHILD).parse::<usize>().map_err(failed)?;
        // Numbers begin at 0, which is nobody's version.
        Ok((number + 1, serde_json::from_slice(&data).map_err(failed)?))
    }

    /// The entries' nodes in the order of their numbers, which are ten digits each.
    async fn children(&self, client: &Client, lock: usize) -> Result<Vec<String>> {
        match client.list_children(&self.list(lock)).await {
            Ok(mut children) => {
                children.sort_unstable();
                Ok(children)
            }
            Err(Refusal::NoNode) => Ok(Vec::new()),
            Err(e) => Err(failed(e)),
        }
    }
}

const CHILD: &str = "entry-";

/// A transaction on the condition that the hold's node is there, whatever its version.
fn on<'a>(client: &'a Client, proof: &Proof) -> Result<CheckWriter<'a>> {
    let Proof::Node(node) = proof else { return Err(foreign(proof)) };
    client.new_check_writer(node, None).map_err(failed)
}

/// Whether it was done; the alternative is that the hold's node is gone.
async fn committed(writer: CheckWriter<'_>) -> Result<bool> {
    match writer.commit().await {
        Ok(_) => Ok(true),
        Err(CheckWriteError::CheckFailed { source: Refusal::NoNode }) => Ok(false),
        Err(e) => Err(failed(e)),
    }
}

#[async_trait]
impl Ledger for ZooKeeper {
    fn prove(&self, guard: &Guard) -> Result<Proof> {
        guard.zookeeper_node().map(Proof::Node)
    }

    async fn read(&self, lock: usize, proof: &Proof) -> Result<Option<Read>> {
        let client = self.client().await?;
        let mut writer = on(&client, proof)?;
        // A write, if an idle one: what this session reads after it is no older than it.
        writer.add_set_data(&self.list(lock), b"", None).map_err(failed)?;
        if !committed(writer).await? {
            return Ok(None);
        }
        let (version, value) = match self.children(&client, lock).await?.last() {
            Some(last) => {
                let (version, entry) = self.entry(&client, lock, last).await?;
                (version, entry.value)
            }
            None => (0, 0),
        };
        Ok(Some(Read { version, value }))
    }

    async fn write(&self, lock: usize, proof: &Proof, entry: Entry) -> Result<bool> {
        let client = self.client().await?;
        let mut writer = on(&client, proof)?;
        let (path, data) = (format!("{}/{CHILD}", self.list(lock)), serde_json::to_vec(&entry));
        let options = CreateMode::PersistentSequential.with_acls(Acls::anyone_all());
        writer.add_create(&path, &data.map_err(failed)?, &options).map_err(failed)?;
        committed(writer).await
    }

    async fn entries(&self, lock: usize) -> Result<Vec<(usize, Entry)>> {
        let client = self.client().await?;
        client.sync(&self.root).await.map_err(failed)?;
        let mut entries = Vec::new();
        for child in self.children(&client, lock).await? {
            entries.push(self.entry(&client, lock, &child).await?);
        }
        Ok(entries)
    }

    async fn remove(&self, locks: usize) -> Result<()> {
        let client = self.client().await?;
        for lock in 0..locks {
            for child in self.children(&client, lock).await? {
                let path = format!("{}/{child}", self.list(lock));
                client.delete(&path, None).await.map_err(failed)?;
            }
            match client.delete(&self.list(lock), None).await {
                Ok(()) | Err(Refusal::NoNode) => {}
                Err(e) => return Err(failed(e)),
            }
        }
        client.delete(&self.root, None).await.map_err(failed)
    }
}
