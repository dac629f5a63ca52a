//! Watches that notify this client of evictions, and of changes in queues that it follows.
//!
//! **Evictions.** A client that evicts a claim creates `CHROOT/%evicted/ID`, with the claim's ID,
//! and deletes it again. No lock can have such a node. Each client has one watch on the children of
//! that node, and the event contains the child's name. So no client reads anything, and acquiring a
//! lock takes no further request. A watch on each held child would cost a request per lock.
//!
//! **Changes in queues.** The client has one watch on the lock's node and everything below it, or
//! on the chroot if it follows all queues with a prefix. A follower polls after the watch exists.
//! If a session ends, its nodes are deleted, which is reported.
//!
//! **Failures.** All notifications are hints, so they may fail. The client then finds out at its
//! next renewal or poll. If the connection breaks or the session ends, the watch is created again,
//! and followers then poll. If the evictor crashes in between, its node is deleted with its
//! session. The node above is a container, which the server deletes when it stays empty.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{sleep, timeout};
use zookeeper_client::{AddWatchMode, CreateMode, Error as Fault, EventType, PersistentWatcher};

use super::fault::explain;
use super::path::decode;
use super::session::{Answer, Session};
use super::shared::Shared;
use leasehold_core::kit::Ends;
use leasehold_core::store::{Follow, Notifier, Queues};
use leasehold_core::{ClaimId, Result};

/// Node whose children announce evictions. In encoded lock names, `%` is always followed by two
/// hexadecimal digits.
const EVICTED_NODE: &str = "%evicted";
/// Pause before a watch is created again, at first and at most.
const PAUSE: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(10)];
/// Time limit for announcing evictions to all clients.
const SOON: Duration = Duration::from_secs(1);

/// Notifies the listeners of evictions, as long as the store exists.
pub(super) async fn notify_evictions(shared: Weak<Shared>, mut watcher: PersistentWatcher) {
    loop {
        loop {
            let event = watcher.changed().await;
            let Some(shared) = shared.upgrade() else { return };
            match event.event_type {
                EventType::Session => break,
                EventType::NodeCreated => {
                    let id = event.path.rsplit_once('/').and_then(|(_, id)| ClaimId::from_hex(id));
                    id.iter().for_each(|id| shared.listeners.ask(*id));
                }
                _ => {}
            }
        }
        let path = |shared: &Shared| shared.url.path(EVICTED_NODE);
        let Some(recreated) = recreate(&shared, path).await else { return };
        watcher = recreated;
    }
}

/// Creates the watch again, as soon as possible. Returns `None` if the store does not exist any
/// more.
async fn recreate(
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

/// Watches this node and everything below it from now on.
async fn watch(session: &Session, path: &str) -> Answer<PersistentWatcher> {
    session.read(|c| c.watch(path, AddWatchMode::PersistentRecursive)).await
}

/// Returns the path of the followed queues.
fn followed_path(shared: &Shared, queues: &Queues) -> String {
    match queues {
        Queues::Of(name) => shared.lock_path(name),
        Queues::All(_) => shared.url.root().to_owned(),
    }
}

/// Returns whether an event at this path concerns the followed queues.
fn concerns(root: &str, queues: &Queues, path: &str) -> bool {
    let below = path.strip_prefix(root).unwrap_or_default().trim_start_matches('/');
    let node = below.split('/').next().unwrap_or_default();
    decode(node).is_some_and(|name| queues.has(name.as_str()))
}

/// Notifies a follower of changes, as long as the follower and the store exist.
async fn report_changes(
    shared: Weak<Shared>,
    queues: Queues,
    mut watcher: PersistentWatcher,
    notifier: Notifier,
) {
    loop {
        loop {
            let event = watcher.changed().await;
            let Some(shared) = shared.upgrade() else { return };
            if event.event_type == EventType::Session {
                break;
            }
            if concerns(shared.url.root(), &queues, &event.path) && !notifier.notify() {
                return;
            }
        }
        let path = |shared: &Shared| followed_path(shared, &queues);
        let Some(recreated) = recreate(&shared, path).await else { return };
        watcher = recreated;
        notifier.notify();
    }
}

impl Shared {
    /// Watches the node whose children announce evictions, from now on.
    pub(super) async fn watch_evicted(&self, session: &Session) -> Answer<PersistentWatcher> {
        watch(session, &self.url.path(EVICTED_NODE)).await
    }

    /// Implements [`Store::follow`](leasehold_core::store::Store::follow).
    pub(super) async fn follow_all(self: Arc<Self>, queues: Queues) -> Result<Follow> {
        let session = self.session().await?;
        let path = followed_path(&self, &queues);
        let watcher = watch(&session, &path).await.map_err(|fault| explain(fault, &path))?;
        let (follow, notifier) = Follow::new();
        let reporting = report_changes(Arc::downgrade(&self), queues, watcher, notifier);
        Ok(follow.keeping(Ends::new(&self.runtime.spawn(reporting))))
    }

    /// Announces these evictions to all clients, as many as possible within `SOON`. Evictions are
    /// announced as a hint, so the caller does not wait longer.
    pub(super) async fn announce_evictions(&self, session: &Session, evicted: &[ClaimId]) {
        let all = async {
            for id in evicted {
                self.notify(session, *id).await?;
            }
            Answer::Ok(())
        };
        let _ = timeout(SOON, all).await;
    }

    async fn notify(&self, session: &Session, evicted: ClaimId) -> Answer<()> {
        let parent = self.url.path(EVICTED_NODE);
        let path = format!("{parent}/{}", evicted.to_hex());
        let notice = CreateMode::Ephemeral.with_acls(self.acls());
        let announce = || session.write(|c| c.create(&path, &[], &notice));
        match announce().await {
            Err(Fault::NoNode) => {
                let above = CreateMode::Container.with_acls(self.acls());
                // An error is ignored, because another client may have created it in the meantime.
                let _ = session.write(|c| c.create(&parent, &[], &above)).await;
                announce().await?
            }
            created => created?,
        };
        session.write(|c| c.delete(&path, None)).await
    }
}

#[cfg(test)]
mod tests {
    use leasehold_core::Name;

    use super::*;

    #[test]
    fn events_of_other_paths_notify_no_follower() {
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
