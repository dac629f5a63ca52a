//! The fenced resource in ZooKeeper: a node for each entry. A transaction that checks the hold's
//! node creates it ([`Hold::zookeeper_node`]). ZooKeeper's sequence number of a node is its
//! version.

use async_trait::async_trait;
use leasehold::{Hold, Result, ZooKeeperGuardExt};
use zookeeper_client::{Acls, CheckWriteError, CheckWriter, Client, CreateMode, Error as Refusal};

use super::{Entry, Ledger, Proof, failed, foreign, parts};
use crate::resource::Read;

pub(crate) struct ZooKeeper {
    servers: String,
    user: Option<String>,
    /// The client, which is replaced when its session has ended.
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

    /// Returns the node whose children are a lock's entries.
    fn list(&self, lock: usize) -> String {
        format!("{}/{lock}", self.root)
    }

    async fn entry(&self, client: &Client, lock: usize, child: &str) -> Result<(usize, Entry)> {
        let path = format!("{}/{child}", self.list(lock));
        let (data, _) = client.get_data(&path).await.map_err(failed)?;
        let number = child.trim_start_matches(CHILD).parse::<usize>().map_err(failed)?;
        // Sequence numbers begin at 0, which is not a valid version.
        Ok((number + 1, serde_json::from_slice(&data).map_err(failed)?))
    }

    /// Lists the entries' nodes in the order of their sequence numbers, which have ten digits each.
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

/// Begins a transaction that requires the hold's node to exist, with any version.
fn on<'a>(client: &'a Client, proof: &Proof) -> Result<CheckWriter<'a>> {
    let Proof::Node(node) = proof else { return Err(foreign(proof)) };
    client.new_check_writer(node, None).map_err(failed)
}

/// Returns whether the transaction was committed. If not, the hold's node is gone.
async fn committed(writer: CheckWriter<'_>) -> Result<bool> {
    match writer.commit().await {
        Ok(_) => Ok(true),
        Err(CheckWriteError::CheckFailed { source: Refusal::NoNode }) => Ok(false),
        Err(e) => Err(failed(e)),
    }
}

#[async_trait]
impl Ledger for ZooKeeper {
    fn prove(&self, guard: &Hold) -> Result<Proof> {
        guard.zookeeper_node().map(Proof::Node)
    }

    async fn read(&self, lock: usize, proof: &Proof) -> Result<Option<Read>> {
        let client = self.client().await?;
        let mut writer = on(&client, proof)?;
        // A write that changes nothing synchronizes this session. Later reads of the session are at
        // least as recent as this write.
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
