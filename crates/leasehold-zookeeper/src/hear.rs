//! What ZooKeeper tells unasked: who was evicted.
//!
//! Whoever evicts makes `CHROOT/%evicted/ID`, with the claim's id, and deletes it again. No lock has such a node.
//! Each client has one watch on what comes there, and an event says the name: so nobody reads anything, and who
//! takes a lock sends no more than before. A watch on each child that is held would be a request for each hold.
//!
//! It is a hint, so all of it may fail: then the next renewal finds out. *The connection breaks, the session ends*: the
//! watch begins anew. *The evictor dies in between*: what it made goes with its session. The node above is a
//! container, which the server deletes when it stays empty.

use std::sync::Weak;
use std::time::Duration;

use tokio::time::{sleep, timeout};
use zookeeper_client::{AddWatchMode, CreateMode, Error as Fault, EventType, PersistentWatcher};

use super::session::{Answer, Session};
use super::shared::Shared;
use leasehold_core::ClaimId;

/// The node in which it is told who was evicted: encoded names have a `%` before two digits only.
const TOLD: &str = "%evicted";
/// How long it pauses before a watch is begun anew, at first and at most.
const PAUSE: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(10)];
/// In which all are told who were evicted, if they are.
const SOON: Duration = Duration::from_secs(1);

/// Tells the clients' ears who was evicted, for as long as there is a store.
pub(super) async fn hear(shared: Weak<Shared>, mut watcher: PersistentWatcher) {
    loop {
        loop {
            let event = watcher.changed().await;
            let Some(shared) = shared.upgrade() else { return };
            match event.event_type {
                EventType::Session => break,
                EventType::NodeCreated => {
                    let id = event.path.rsplit_once('/').and_then(|(_, id)| ClaimId::from_hex(id));
                    id.iter().for_each(|id| shared.ears.ask(*id));
                }
                _ => {}
            }
        }
        let [mut pause, longest] = PAUSE;
        watcher = loop {
            sleep(pause).await;
            pause = (pause * 2).min(longest);
            let Some(shared) = shared.upgrade() else { return };
            let session = shared.current();
            if session.is_over() {
                continue;
            }
            if let Ok(anew) = shared.watch_evicted(&session).await {
                break anew;
            }
        };
    }
}

impl Shared {
    /// What comes under the node, from now on.
    pub(super) async fn watch_evicted(&self, session: &Session) -> Answer<PersistentWatcher> {
        let told = self.url.path(TOLD);
        session.read(|c| c.watch(&told, AddWatchMode::PersistentRecursive)).await
    }

    /// Tells all clients that these were evicted, or as many as can be told soon: nobody waits for a hint.
    pub(super) async fn tell_evicted(&self, session: &Session, evicted: &[ClaimId]) {
        let all = async {
            for id in evicted {
                self.tell(session, *id).await?;
            }
            Answer::Ok(())
        };
        let _ = timeout(SOON, all).await;
    }

    async fn tell(&self, session: &Session, evicted: ClaimId) -> Answer<()> {
        let told = self.url.path(TOLD);
        let path = format!("{told}/{}", evicted.to_hex());
        let notice = CreateMode::Ephemeral.with_acls(self.acls());
        let say = || session.write(|c| c.create(&path, &[], &notice));
        match say().await {
            Err(Fault::NoNode) => {
                let above = CreateMode::Container.with_acls(self.acls());
                // Or somebody else has made it meanwhile.
                let _ = session.write(|c| c.create(&told, &[], &above)).await;
                say().await?
            }
            said => said?,
        };
        session.write(|c| c.delete(&path, None)).await
    }
}
