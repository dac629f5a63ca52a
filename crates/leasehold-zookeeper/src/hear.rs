//! What ZooKeeper tells unasked: who was evicted, and what stirs in queues that are followed.
//!
//! *Who was evicted*: whoever evicts makes `CHROOT/%evicted/ID`, with the claim's id, and deletes it again. No
//! lock has such a node. Each client has one watch on what comes there, and an event says the name: so nobody
//! reads anything, and who takes a lock sends no more than before. A watch on each child that is held would be
//! a request for each hold.
//!
//! *What stirs*: one watch on the lock's node and all below it, or on the chroot where the queues of a prefix are
//! followed. Whoever follows looks after the watch is there. A session that ends deletes its nodes, which is told.
//!
//! All are hints, so they may fail: then the next renewal or look finds out. *The connection breaks, the session
//! ends*: the watch begins anew, and whoever follows looks then. *The evictor dies in between*: what it made
//! goes with its session. The node above is a container, which the server deletes when it stays empty.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{sleep, timeout};
use zookeeper_client::{AddWatchMode, CreateMode, Error as Fault, EventType, PersistentWatcher};

use super::fault::explain;
use super::path::decode;
use super::session::{Answer, Session};
use super::shared::Shared;
use leasehold_core::kit::Ends;
use leasehold_core::store::{Follow, Queues, Stirrer};
use leasehold_core::{ClaimId, Result};

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
        let told = |shared: &Shared| shared.url.path(TOLD);
        let Some(anew) = anew(&shared, told).await else { return };
        watcher = anew;
    }
}

/// Watches again, as soon as it can be done. `None`: there is no store any more.
async fn anew(
    shared: &Weak<Shared>,
    path: impl Fn(&Shared) -> String,
) -> Option<PersistentWatcher> {
    let [mut pause, longest] = PAUSE;
    loop {
        sleep(pause).await;
        pause = (pause * 2).min(longest);
        let shared = shared.upgrade()?;
        let session = shared.current();
        if session.is_over() {
            continue;
        }
        if let Ok(watcher) = watch(&session, &path(&shared)).await {
            return Some(watcher);
        }
    }
}

/// What comes, changes and goes at this node and below it, from now on.
async fn watch(session: &Session, path: &str) -> Answer<PersistentWatcher> {
    session.read(|c| c.watch(path, AddWatchMode::PersistentRecursive)).await
}

/// Where what is followed is.
fn place(shared: &Shared, queues: &Queues) -> String {
    match queues {
        Queues::Of(name) => shared.lock_path(name),
        Queues::All(_) => shared.url.root().to_owned(),
    }
}

/// Whether what happened there concerns whoever follows these.
fn concerns(root: &str, queues: &Queues, path: &str) -> bool {
    let below = path.strip_prefix(root).unwrap_or_default().trim_start_matches('/');
    let node = below.split('/').next().unwrap_or_default();
    decode(node).is_some_and(|name| queues.has(name.as_str()))
}

/// Tells of what stirs, for as long as somebody follows and there is a store.
async fn go_on(
    shared: Weak<Shared>,
    queues: Queues,
    mut watcher: PersistentWatcher,
    stirrer: Stirrer,
) {
    loop {
        loop {
            let event = watcher.changed().await;
            let Some(shared) = shared.upgrade() else { return };
            if event.event_type == EventType::Session {
                break;
            }
            if concerns(shared.url.root(), &queues, &event.path) && !stirrer.stir() {
                return;
            }
        }
        let Some(anew) = anew(&shared, |shared| place(shared, &queues)).await else { return };
        watcher = anew;
        stirrer.stir();
    }
}

impl Shared {
    /// What comes under the node, from now on.
    pub(super) async fn watch_evicted(&self, session: &Session) -> Answer<PersistentWatcher> {
        watch(session, &self.url.path(TOLD)).await
    }

    /// [`Store::follow`](leasehold_core::store::Store::follow).
    pub(super) async fn follow_all(self: Arc<Self>, queues: Queues) -> Result<Follow> {
        let session = self.session().await?;
        let path = place(&self, &queues);
        let watcher = watch(&session, &path).await.map_err(|fault| explain(fault, &path))?;
        let (follow, stirrer) = Follow::new();
        let going_on = go_on(Arc::downgrade(&self), queues, watcher, stirrer);
        Ok(follow.keeping(Ends::new(&self.runtime.spawn(going_on))))
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

#[cfg(test)]
mod tests {
    use leasehold_core::Name;

    use super::*;

    #[test]
    fn what_happens_elsewhere_stirs_nobody() {
        let one = Queues::Of(Name::new("a/b").unwrap());
        let some = Queues::All("a".into());
        for (path, of_one, of_some) in [
            ("/locks/a%2fb", true, true),
            ("/locks/a%2fb/_c_0-lock-0000000001", true, true),
            ("/locks/ab", false, true),
            ("/locks/b/a%2fb", false, false),
            ("/locks/%evicted/a", false, false),
            ("/locks", false, false),
            ("/", false, false),
        ] {
            assert_eq!(concerns("/locks", &one, path), of_one, "{path}");
            assert_eq!(concerns("/locks", &some, path), of_some, "{path}");
        }
        assert!(concerns("/", &some, "/ab/x"));
    }
}
