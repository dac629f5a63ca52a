//! Inspection and eviction for operators: the holders and waiters of one lock or of all.

use std::sync::Arc;
use std::time::Duration;

use zookeeper_client::{Error as Fault, Stat};

use super::fault::explain;
use super::join::token_of;
use super::join_all::{MAX_CONCURRENT_READS, join_all};
use super::leave::is_ephemeral;
use super::node::{Children, Node};
use super::path;
use super::queue::foreign_child;
use super::session::Session;
use super::shared::Shared;
use leasehold_core::kit::{LISTED_HOLDERS, wall_micros};
use leasehold_core::store::{ClaimInfo, ClaimState as Shown, Evict, LockInfo};
use leasehold_core::{Error, ErrorKind, Holder, Kind, Name, Result, Token};

/// Parses the data of a child, which describes its creator. Other clients may use any format.
pub(super) fn holder(data: &[u8]) -> Holder {
    serde_json::from_slice(data).unwrap_or_else(|_| {
        let text = String::from_utf8_lossy(data);
        let host: String = text.chars().filter(|c| !c.is_control()).take(256).collect();
        let host = if host.is_empty() { "unknown".to_owned() } else { host };
        Holder { host, pid: 0, label: "another client".into() }
    })
}

/// Returns the error for a child of a queue that may belong to another program.
fn not_ours(lock: &str, child: &str) -> Error {
    let shown: String = child.escape_debug().take(80).collect();
    let what = format!(
        "the child {shown} of {} was kept: its name ends like that of a lock, but it may belong \
         to another program (its name is unusual, or it is not ephemeral)",
        lock.escape_debug()
    );
    let hint = "find the program that created it; to delete it, run `delete` in zkCli.sh";
    Error::new(ErrorKind::Mismatch, what).with_hint(hint)
}

/// A placeholder for a child that this user may not read (since ZooKeeper 3.9). Only its existence
/// is known.
const CLOSED: Stat = Stat {
    czxid: 0,
    mzxid: 0,
    pzxid: 0,
    ctime: 0,
    mtime: 0,
    version: 0,
    cversion: 0,
    aversion: 0,
    ephemeral_owner: 0,
    data_length: 0,
    num_children: 0,
};

impl Shared {
    /// Reads these children. Returns `None` for a child that no longer exists.
    pub(super) async fn read_nodes(
        &self,
        session: &Session,
        lock: &str,
        nodes: &[Node],
    ) -> Result<Vec<Option<(Vec<u8>, Stat)>>> {
        let mut seen = Vec::with_capacity(nodes.len());
        for some in nodes.chunks(MAX_CONCURRENT_READS) {
            let paths: Vec<String> = some.iter().map(|n| format!("{lock}/{}", n.name)).collect();
            let read = session.read(|c| async {
                Ok(join_all(paths.iter().map(|path| c.get_data(path)).collect()).await)
            });
            let read = read.await.map_err(|fault| explain(fault, lock))?;
            for (answer, path) in read.into_iter().zip(&paths) {
                seen.push(match answer {
                    Ok(seen) => Some(seen),
                    Err(Fault::NoNode) => None,
                    // The child belongs to another client and cannot be read, but it still counts.
                    Err(Fault::NoAuth) => match session.read(|c| c.check_stat(path)).await {
                        Ok(stat) => stat.map(|stat| (Vec::new(), stat)),
                        Err(Fault::NoAuth) => Some((Vec::new(), CLOSED)),
                        Err(fault) => return Err(explain(fault, path)),
                    },
                    Err(fault) => return Err(explain(fault, path)),
                });
            }
        }
        Ok(seen)
    }

    /// Returns a description of a queue for display.
    pub(super) fn describe<'a>(
        &self,
        name: &Name,
        children: &Children,
        seen: impl Iterator<Item = (&'a Node, Option<(Vec<u8>, Stat)>)>,
    ) -> LockInfo {
        let holding = children.holding();
        let now = self.clock.now();
        let claims = seen.enumerate().filter_map(|(i, (node, seen))| {
            let (data, stat) = seen?;
            let claim_state = if i < holding { Shown::Holding } else { Shown::Waiting };
            let created = u64::try_from(stat.ctime).unwrap_or(0).saturating_mul(1_000);
            let since = match created {
                0 => Duration::ZERO,
                created => Duration::from_micros(wall_micros().saturating_sub(created)),
            };
            let own = node.id(self.naming());
            let remaining = own.and_then(|id| self.claims.remaining(id, now));
            let weight = children.weight(node);
            Some(ClaimInfo::new(
                claim_state,
                holder(&data),
                token_of(&stat),
                weight,
                since,
                remaining,
            ))
        });
        let claims = claims.collect();
        let (kind, capacity) = children.lock().unwrap_or((Kind::Mutex, 1));
        LockInfo::new(name.clone(), kind, capacity, claims)
    }

    pub(super) async fn read(self: Arc<Self>, name: Name) -> Result<Option<LockInfo>> {
        let session = self.session().await?;
        self.read_on(&session, &name).await
    }

    pub(super) async fn read_on(&self, session: &Session, name: &Name) -> Result<Option<LockInfo>> {
        let lock = self.lock_path(name);
        let Some(children) = self.children(session, &lock).await? else { return Ok(None) };
        let seen = self.read_nodes(session, &lock, children.nodes()).await?;
        let info = self.describe(name, &children, children.nodes().iter().zip(seen));
        Ok((!info.claims.is_empty()).then_some(info))
    }

    /// Returns the committed children of a lock, in their order.
    async fn children(&self, session: &Session, lock: &str) -> Result<Option<Children>> {
        let Some(names) = self.list_synced(session, lock).await? else { return Ok(None) };
        let ordered = Children::order(self.naming(), names);
        ordered.map(Some).map_err(|foreign| foreign_child(self.naming(), lock, foreign))
    }

    /// Reads the first holders, or all of them if a token is given. This takes one listing, and one
    /// request for each holder. Waiters are not read.
    pub(super) async fn holders(
        self: Arc<Self>,
        name: Name,
        token: Option<Token>,
    ) -> Result<Option<LockInfo>> {
        let session = self.session().await?;
        let lock = self.lock_path(&name);
        let Some(children) = self.children(&session, &lock).await? else { return Ok(None) };
        let most = if token.is_some() { usize::MAX } else { LISTED_HOLDERS };
        let (holding, _) = children.nodes().split_at(children.holding().min(most));
        let seen = self.read_nodes(&session, &lock, holding).await?;
        let info = self.describe(&name, &children, holding.iter().zip(seen));
        Ok((!info.claims.is_empty()).then_some(info))
    }

    pub(super) async fn list(self: Arc<Self>, prefix: String) -> Result<Vec<LockInfo>> {
        let session = self.session().await?;
        let root = self.url.root();
        let nodes = self.list_synced(&session, root).await?;
        let nodes = nodes.ok_or_else(|| explain(Fault::NoNode, root))?;
        let names = nodes.iter().filter_map(|node| path::decode(node));
        let mut names: Vec<Name> = names.filter(|n| n.as_str().starts_with(&prefix)).collect();
        names.sort_unstable();
        let mut locks = Vec::new();
        for some in names.chunks(MAX_CONCURRENT_READS) {
            let read = some.iter().map(|name| self.read_on(&session, name)).collect();
            for info in join_all(read).await {
                match info {
                    Ok(info) => locks.extend(info),
                    // The path may contain other nodes, and locks that this user may not access.
                    Err(error)
                        if matches!(error.kind(), ErrorKind::Mismatch | ErrorKind::Denied) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(locks)
    }

    pub(super) async fn evict(self: Arc<Self>, name: Name, which: Evict) -> Result<usize> {
        let session = self.session().await?;
        let lock = self.lock_path(&name);
        let Some(children) = self.children(&session, &lock).await? else { return Ok(0) };
        let nodes = match which {
            Evict::Holders => &children.nodes()[..children.holding()],
            Evict::Token(_) => children.nodes(),
        };
        let seen = self.read_nodes(&session, &lock, nodes).await?;
        let seen = nodes.iter().zip(seen).filter_map(|(node, seen)| Some((node, seen?.1)));
        let chosen: Vec<(&Node, Stat)> = match which {
            Evict::Holders => seen.collect(),
            Evict::Token(token) => seen.filter(|(_, stat)| token_of(stat) == Some(token)).collect(),
        };
        // All claims are checked before any is deleted, because a partial eviction would leave the
        // resulting holders unclear.
        for (node, stat) in &chosen {
            if !(node.is_surely_a_claim(self.naming()) && is_ephemeral(stat.ephemeral_owner)) {
                return Err(not_ours(&lock, &node.name));
            }
        }
        let mut ours = Vec::new();
        let deleted = async {
            let mut evicted = 0;
            for (node, _) in chosen {
                // Even if no reply arrives, the child may have been deleted, so its eviction is
                // announced in any case.
                ours.extend(node.id(self.naming()));
                let path = format!("{lock}/{}", node.name);
                evicted += usize::from(self.delete_path(&session, &path).await?);
            }
            Ok(evicted)
        };
        let evicted = deleted.await;
        self.announce_evictions(&session, &ours).await;
        evicted
    }
}
