//! Removes a claim. The client deletes its child, and the server notifies the clients that watch
//! the child. The client also deletes children that were not renewed in time or whose caller is
//! gone, while its session lives.

use std::sync::{Arc, Weak};
use std::time::Duration;

use zookeeper_client::Error as Fault;

use super::claims::{ClaimNode, Stage};
use super::fault::explain;
use super::node::LATE_SEQUENCE;
use super::node::Naming;
use super::session::{Answer, Session};
use super::shared::Shared;
use leasehold_core::{Claim, ClaimId, Result};

/// The owner that the server reports for a container.
const CONTAINER: i64 = i64::MIN;

/// Returns whether a node is deleted when a client's session ends. Containers and nodes with a time
/// to live are not.
pub(super) fn is_ephemeral(owner: i64) -> bool {
    owner != 0 && owner != CONTAINER && owner >> 56 != -1
}

/// Deletes this client's child nodes that were not renewed in time. Runs until the store is
/// dropped.
pub(super) async fn reap(shared: Weak<Shared>) {
    loop {
        let Some(strong) = shared.upgrade() else { return };
        for id in strong.claims.expired(strong.clock.now()) {
            strong.runtime.spawn(strong.clone().give_up(id));
        }
        strong.claims.something_expires(strong.clock.now()).await;
    }
}

impl Shared {
    pub(super) async fn leave(self: Arc<Self>, claim: Claim) -> Result<bool> {
        let _turn = self.claims.enter(claim.id).await;
        let stage = self.claims.stage(claim.id);
        let unknown = matches!(stage, Stage::New);
        let left = self.leave_from(stage, &claim).await;
        // Unknown claims are not remembered for the next attempt.
        if left.is_ok() || unknown {
            self.claims.remove(claim.id);
        }
        left
    }

    async fn leave_from(&self, stage: Stage, claim: &Claim) -> Result<bool> {
        let session = self.session().await?;
        match stage {
            Stage::Created(claim_node) => self.delete(&session, &claim_node).await,
            Stage::Requested { lock } => self.delete_of(&session, claim.id, &lock).await,
            Stage::New => self.delete_of(&session, claim.id, &self.lock_path(&claim.name)).await,
        }
    }

    pub(super) async fn delete_of(
        &self,
        session: &Session,
        id: ClaimId,
        lock: &str,
    ) -> Result<bool> {
        match self.named_after(session, id, lock).await? {
            Some(name) => self.delete_path(session, &format!("{lock}/{name}")).await,
            None => Ok(false),
        }
    }

    /// Deletes a claim's child. Returns whether it existed.
    pub(super) async fn delete(&self, session: &Session, claim_node: &ClaimNode) -> Result<bool> {
        let deleted = self.delete_path(session, &claim_node.path()).await?;
        let late = !(0..LATE_SEQUENCE).contains(&claim_node.sequence);
        if late && self.naming() == Naming::Curator {
            // This fails if the queue has other claims. Then the numbers continue.
            let _ = self.begin_numbers_anew(session, &claim_node.lock).await;
        }
        Ok(deleted)
    }

    /// Deletes the lock's node if it belongs to a lock only, that is, if it has no data and nothing
    /// was changed since it was created. The server rejects the deletion if the node has children.
    async fn begin_numbers_anew(&self, session: &Session, lock: &str) -> Answer<()> {
        let Some(stat) = session.read(|c| c.check_stat(lock)).await? else { return Ok(()) };
        let untouched = stat.data_length == 0 && stat.version == 0 && stat.aversion == 0;
        if untouched && matches!(stat.ephemeral_owner, 0 | CONTAINER) {
            session.write(|c| c.delete(lock, Some(stat.version))).await?;
        }
        Ok(())
    }

    pub(super) async fn delete_path(&self, session: &Session, path: &str) -> Result<bool> {
        match session.write(|c| c.delete(path, None)).await {
            Ok(()) => Ok(true),
            Err(Fault::NoNode) => Ok(false),
            Err(fault) => Err(explain(fault, path)),
        }
    }

    /// Deletes the child of a claim that was not renewed, and retries until the servers have
    /// confirmed the deletion.
    pub(super) async fn give_up(self: Arc<Self>, id: ClaimId) {
        let _turn = self.claims.enter(id).await;
        if self.claims.is_given_up(id) {
            self.end_given_up(id).await;
            self.claims.remove(id);
        } else if let Stage::New = self.claims.stage(id) {
            // Another call was faster, and waiting for the gate has created this entry.
            self.claims.remove(id);
        }
    }

    /// Deletes the child of a claim that was given up. The caller has entered the gate.
    pub(super) async fn end_given_up(&self, id: ClaimId) {
        let mut pause = Duration::from_millis(50);
        loop {
            let session = self.current();
            let done = match self.claims.stage(id) {
                Stage::New => true,
                // The child is deleted with its session.
                Stage::Created(claim_node) if claim_node.session != session.id() => true,
                Stage::Created(claim_node) => self.delete(&session, &claim_node).await.is_ok(),
                Stage::Requested { lock } => self.delete_of(&session, id, &lock).await.is_ok(),
            };
            if done || session.is_over() {
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }
}
