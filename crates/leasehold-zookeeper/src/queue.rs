//! A lock's queue as it is read: its children in their order.

use zookeeper_client::Error as Fault;

use super::claims::Standing;
use super::fault::explain;
use super::node::{Children, LAST_SEQUENCE, LATE_SEQUENCE, Naming, Node, Stand};
use super::session;
use super::session::Session;
use super::shared::Shared;
use leasehold_core::kit::locked;
use leasehold_core::{Error, ErrorKind, Result};

/// One more look at the queue is needed.
pub(super) enum Looked {
    Stands(Stand),
    /// The child is not there any more.
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
                    "the node {lock} contains locks with naming={other} ({shown}), which do not \
                     exclude clients with another naming"
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
    /// Where a claim stands by now.
    pub(super) async fn look(&self, session: &Session, standing: &Standing) -> Result<Looked> {
        let listed = session.read(|c| c.list_children(&standing.lock)).await;
        self.looked(standing, listed)
    }

    pub(super) fn looked(
        &self,
        standing: &Standing,
        listed: session::Answer<Vec<String>>,
    ) -> Result<Looked> {
        let names = match listed {
            Ok(names) => names,
            Err(Fault::NoNode) => return Ok(Looked::Gone),
            Err(fault) => return Err(explain(fault, &standing.lock)),
        };
        let children = self.order(&standing.lock, names)?;
        Ok(children.stand(&standing.node).map_or(Looked::Gone, Looked::Stands))
    }

    /// The children in order, if they are what they should be.
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

    /// The children as of now, and not as of what this member has heard; `None` without the node.
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
