//! Reads of a lock's queue, which return its children in order.

use zookeeper_client::Error as Fault;

use super::claims::ClaimNode;
use super::fault::explain;
use super::node::{Children, LAST_SEQUENCE, LATE_SEQUENCE, Naming, Node, QueuePosition};
use super::session;
use super::session::Session;
use super::shared::Shared;
use leasehold_core::kit::locked;
use leasehold_core::{Error, ErrorKind, Result};

/// The result of a read of the queue.
pub(super) enum QueueRead {
    At(QueuePosition),
    /// The child does not exist any more.
    Gone,
}

pub(super) fn foreign_child(naming: Naming, lock: &str, child: String) -> Error {
    let other = match naming {
        Naming::Curator => Naming::Kazoo,
        Naming::Kazoo => Naming::Curator,
    };
    let (lock, shown) = (lock.escape_debug(), child.escape_debug().to_string());
    let shown: String = shown.chars().take(80).collect();
    let (what, hint) = match Node::parse(other, child) {
        Ok(_) => {
            let other = if other == Naming::Kazoo { "kazoo" } else { "curator" };
            (
                format!(
                    "the node {lock} contains claims in the format of naming={other} ({shown}); \
                     clients that use different formats could hold the lock at the same time"
                ),
                format!("add naming={other} to the URL, or use another path"),
            )
        }
        Err(_) => (
            format!(
                "the node {lock} contains the unknown child {shown}, so no client can acquire the \
                 lock"
            ),
            "if a newer leasehold created it, upgrade this one; if it belongs to another program, \
             use another lock name or path"
                .to_owned(),
        ),
    };
    Error::new(ErrorKind::Mismatch, what).with_hint(hint)
}

impl Shared {
    /// Reads the current position of a claim.
    pub(super) async fn read_position(
        &self,
        session: &Session,
        claim_node: &ClaimNode,
    ) -> Result<QueueRead> {
        let listed = session.read(|c| c.list_children(&claim_node.lock)).await;
        self.position_in(claim_node, listed)
    }

    pub(super) fn position_in(
        &self,
        claim_node: &ClaimNode,
        listed: session::Answer<Vec<String>>,
    ) -> Result<QueueRead> {
        let names = match listed {
            Ok(names) => names,
            Err(Fault::NoNode) => return Ok(QueueRead::Gone),
            Err(fault) => return Err(explain(fault, &claim_node.lock)),
        };
        let children = self.order(&claim_node.lock, names)?;
        Ok(children.position_of(&claim_node.node).map_or(QueueRead::Gone, QueueRead::At))
    }

    /// Returns the children in order, if all of them are valid.
    pub(super) fn order(&self, lock: &str, names: Vec<String>) -> Result<Children> {
        let children = match Children::order(self.naming(), names) {
            Ok(children) => children,
            Err(foreign) => return Err(foreign_child(self.naming(), lock, foreign)),
        };
        let last = children.last_sequence();
        if children.is_disordered() || last >= LAST_SEQUENCE {
            let lock = lock.escape_debug();
            let what = format!(
                "the sequence numbers of the node {lock} are used up ({last} of 2147483647), so \
                 its queue can no longer be ordered"
            );
            let hint = format!("when the node has no children, run `delete {lock}` in zkCli.sh");
            return Err(Error::new(ErrorKind::Full, what).with_hint(hint));
        }
        let mut warned = locked(&self.warned);
        if last >= LATE_SEQUENCE && warned.len() < 1_000 && warned.insert(lock.to_owned()) {
            leasehold_core::telemetry::sequences_run_out(lock, last);
        }
        Ok(children)
    }

    /// Lists the current children, not only those that this member knows. Returns `None` if the
    /// node does not exist.
    pub(super) async fn list_synced(
        &self,
        session: &Session,
        lock: &str,
    ) -> Result<Option<Vec<String>>> {
        let listed = session.read(|c| async {
            let (synced, listed) = tokio::join!(c.sync(lock), c.list_children(lock));
            match synced {
                Ok(()) | Err(Fault::NoNode) => listed,
                Err(fault) => Err(fault),
            }
        });
        match listed.await {
            Ok(names) => Ok(Some(names)),
            Err(Fault::NoNode) => Ok(None),
            Err(fault) => Err(explain(fault, lock)),
        }
    }
}
