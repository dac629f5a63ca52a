//! For people: who holds and waits, on this lock and on all, and taking a lock away.

use std::sync::Arc;
use std::time::Duration;

use zookeeper_client::{Error as Fault, Stat};

use super::fault::explain;
use super::join::token_of;
use super::leave::is_ephemeral;
use super::node::{Children, Node};
use super::path;
use super::queue::foreign_child;
use super::session::Session;
use super::shared::Shared;
use super::together::{READ_TOGETHER, all_of};
use leasehold_core::kit::{LISTED_HOLDERS, wall_micros};
use leasehold_core::store::{ClaimInfo, Evict, LockInfo, Standing as Shown};
use leasehold_core::{Error, ErrorKind, Holder, Kind, Name, Result, Token};

/// Who made a child: as we write it, or whatever another client wrote.
pub(super) fn holder(data: &[u8]) -> Holder {
    serde_json::from_slice(data).unwrap_or_else(|_| {
        let text = String::from_utf8_lossy(data);
        let host: String = text.chars().filter(|c| !c.is_control()).take(256).collect();
        let host = if host.is_empty() { "unknown".to_owned() } else { host };
        Holder { host, pid: 0, label: "another client".into() }
    })
}

/// What stands in a queue, but may be anything.
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

/// What is known of a child that is closed to us, since ZooKeeper 3.9: that it is there.
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
    /// What is in these children: `None` for one that is gone by now.
    pub(super) async fn look_at(
        &self,
        session: &Session,
        lock: &str,
        nodes: &[Node],
    ) -> Result<Vec<Option<(Vec<u8>, Stat)>>> {
        let mut seen = Vec::with_capacity(nodes.len());
        for some in nodes.chunks(READ_TOGETHER) {
            let paths: Vec<String> = some.iter().map(|n| format!("{lock}/{}", n.name)).collect();
            let read = session.read(|c| async {
                Ok(all_of(paths.iter().map(|path| c.get_data(path)).collect()).await)
            });
            let read = read.await.map_err(|fault| explain(fault, lock))?;
            for (answer, path) in read.into_iter().zip(&paths) {
                seen.push(match answer {
                    Ok(seen) => Some(seen),
                    Err(Fault::NoNode) => None,
                    // Another client's, and closed to us: it is there all the same, whoever it is.
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

    /// What people see of a queue.
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
            let standing = if i < holding { Shown::Holding } else { Shown::Waiting };
            let created = u64::try_from(stat.ctime).unwrap_or(0).saturating_mul(1_000);
            let since = match created {
                0 => Duration::ZERO,
                created => Duration::from_micros(wall_micros().saturating_sub(created)),
            };
            let own = node.id(self.naming());
            let remaining = own.and_then(|id| self.claims.remaining(id, now));
            let weight = children.weight(node);
            Some(ClaimInfo::new(standing, holder(&data), token_of(&stat), weight, since, remaining))
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
        let seen = self.look_at(session, &lock, children.nodes()).await?;
        let info = self.describe(name, &children, children.nodes().iter().zip(seen));
        Ok((!info.claims.is_empty()).then_some(info))
    }

    /// The children of a lock in their order, as they were committed.
    async fn children(&self, session: &Session, lock: &str) -> Result<Option<Children>> {
        let Some(names) = self.list_synced(session, lock).await? else { return Ok(None) };
        let ordered = Children::order(self.naming(), names);
        ordered.map(Some).map_err(|foreign| foreign_child(self.naming(), lock, foreign))
    }

    /// The first holders, or all if one with a token is looked for: one list of names, and one
    /// request for each holder. The waiters are not read.
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
        let seen = self.look_at(&session, &lock, holding).await?;
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
        for some in names.chunks(READ_TOGETHER) {
            let read = some.iter().map(|name| self.read_on(&session, name)).collect();
            for info in all_of(read).await {
                match info {
                    Ok(info) => locks.extend(info),
                    // Beside locks there may be other things, and locks that are not for us.
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
        let seen = self.look_at(&session, &lock, nodes).await?;
        let seen = nodes.iter().zip(seen).filter_map(|(node, seen)| Some((node, seen?.1)));
        let chosen: Vec<(&Node, Stat)> = match which {
            Evict::Holders => seen.collect(),
            Evict::Token(token) => seen.filter(|(_, stat)| token_of(stat) == Some(token)).collect(),
        };
        // All or none: who is let in when half of them are gone?
        for (node, stat) in &chosen {
            if !(node.is_surely_a_claim(self.naming()) && is_ephemeral(stat.ephemeral_owner)) {
                return Err(not_ours(&lock, &node.name));
            }
        }
        let mut ours = Vec::new();
        let deleted = async {
            let mut evicted = 0;
            for (node, _) in chosen {
                // Also where no answer comes: it may be gone all the same.
                ours.extend(node.id(self.naming()));
                let path = format!("{lock}/{}", node.name);
                evicted += usize::from(self.delete_path(&session, &path).await?);
            }
            Ok(evicted)
        };
        let evicted = deleted.await;
        self.tell_evicted(&session, &ours).await;
        evicted
    }
}
