//! Leaving: the claim's child is deleted, and whoever watches it goes on. What was not renewed in time, or
//! whose caller went away, is deleted by the client itself while its session lives.

use std::sync::{Arc, Weak};
use std::time::Duration;

use zookeeper_client::Error as Fault;

use super::claims::{Stage, Standing};
use super::fault::explain;
use super::node::LATE_SEQUENCE;
use super::node::Naming;
use super::session::{Answer, Session};
use super::shared::Shared;
use leasehold_core::{Claim, ClaimId, Result};

/// The owner that the server names for a container.
const CONTAINER: i64 = i64::MIN;

/// Whether a node ends with a client's session: no container, and none that ends by the clock.
pub(super) fn is_ephemeral(owner: i64) -> bool {
    owner != 0 && owner != CONTAINER && owner >> 56 != -1
}

/// Deletes what of this client's was not renewed in time. Ends with the store.
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
        // Of one that nothing is known of, nothing is kept for the next try.
        if left.is_ok() || unknown {
            self.claims.remove(claim.id);
        }
        left
    }

    async fn leave_from(&self, stage: Stage, claim: &Claim) -> Result<bool> {
        let session = self.session().await?;
        match stage {
            Stage::Standing(standing) => self.delete(&session, &standing).await,
            Stage::Asked { lock } => self.delete_of(&session, claim.id, &lock).await,
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

    /// Deletes a claim's child; tells whether it was there.
    pub(super) async fn delete(&self, session: &Session, standing: &Standing) -> Result<bool> {
        let deleted = self.delete_path(session, &standing.path()).await?;
        let late = !(0..LATE_SEQUENCE).contains(&standing.sequence);
        if late && self.naming() == Naming::Curator {
            // It fails where somebody else stands; there the numbers go on.
            let _ = self.begin_numbers_anew(session, &standing.lock).await;
        }
        Ok(deleted)
    }

    /// Deletes the lock's node, if nobody stands there and it is a lock's and nothing else: a container,
    /// or as empty as it was made.
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

    /// A claim that nobody has renewed goes, for as long as it takes to tell the servers.
    pub(super) async fn give_up(self: Arc<Self>, id: ClaimId) {
        let _turn = self.claims.enter(id).await;
        if self.claims.is_given_up(id) {
            self.end_given_up(id).await;
            self.claims.remove(id);
        } else if let Stage::New = self.claims.stage(id) {
            // Somebody was faster, and asking for our turn has made this.
            self.claims.remove(id);
        }
    }

    /// Deletes the child of a claim that was given up, whose turn it is.
    pub(super) async fn end_given_up(&self, id: ClaimId) {
        let mut pause = Duration::from_millis(50);
        loop {
            let session = self.current();
            let done = match self.claims.stage(id) {
                Stage::New => true,
                // With its session its child goes too.
                Stage::Standing(standing) if standing.session != session.id() => true,
                Stage::Standing(standing) => self.delete(&session, &standing).await.is_ok(),
                Stage::Asked { lock } => self.delete_of(&session, id, &lock).await.is_ok(),
            };
            if done || session.is_over() {
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }
}
