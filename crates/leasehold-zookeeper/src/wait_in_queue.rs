//! Waiting in a queue: a claim watches the claims that block it and its own child, and nothing
//! else.
//!
//! **One departure wakes one waiter of a mutex.** A waiter watches the nearest claims ahead that
//! together leave no room for it. For a mutex that is its predecessor, for a reader the writer
//! ahead, and for one of n permits the n claims ahead. The waiter cannot be granted while all of
//! these stay. So the cost of a hand-over depends on the kind of the lock, and not on how many
//! clients wait. The server notifies only the clients of claims that the departed one blocked.
//!
//! **An evicted waiter never mistakes the departure of another claim for its own grant.** The
//! waiter also watches its own child. The server notifies in the order of its transactions, and the
//! watch on the waiter's own child is checked first ([`watch`](super::watch)).
//!
//! # Failures
//! - *A child departs before it is watched.* Setting the watch is a read, whose reply shows that
//!   the child is missing.
//! - *The connection breaks.* The driver sets all watches again with the last transaction that it
//!   has received. The server then reports what happened since, but in any order. So a claim that
//!   is granted on another connection than its watches were set on is notified to poll, because its
//!   own child may be gone too.
//! - *The session ends.* Every watch ends, and the claim is notified to poll.
//! - *A watch cannot be set.* The claim is notified to poll, and its heartbeat watches again.
//! - *The caller's future is dropped.* The watches belong to a task of the client, which ends when
//!   the claim is removed.

use std::sync::{Arc, Weak};

use zookeeper_client::{Error as Fault, OneshotWatcher};

use super::claims::{ClaimNode, WatchTask};
use super::fault::explain;
use super::join::token_of;
use super::join_all::join_all;
use super::node;
use super::node::{Blocker, Node, QueuePosition};
use super::queue::QueueRead;
use super::session::{Session, Watching};
use super::shared::Shared;
use super::watch::{Event, NextWatch, OwnWatch, QueueEvent, Watches, event};
use leasehold_core::store::{Joined, Renew, Renewal};
use leasehold_core::{Claim, ClaimId, Moment, Result};

/// Waits until nothing blocks the claim, and then notifies the claim.
pub(super) async fn watch_blockers(
    shared: Weak<Shared>,
    session: Weak<Session>,
    claim: Claim,
    claim_node: ClaimNode,
    mut watches: Watches,
    connection: Option<u64>,
    _watching: Watching,
) {
    let grant = |shared: &Shared, session: &Session, own: Option<Event>| match session.connection()
        == connection
    {
        true => shared.claims.granted(claim.id, session.certain_until(), own.map(OwnWatch)),
        false => shared.claims.notify_to_poll(claim.id),
    };
    loop {
        let reported = watches.next().await;
        let (Some(shared), Some(session)) = (shared.upgrade(), session.upgrade()) else { return };
        let now = match reported {
            QueueEvent::Free => return grant(&shared, &session, watches.into_own()),
            QueueEvent::Over => return shared.claims.notify_to_poll(claim.id),
            QueueEvent::NeedsWatch => shared.settle(&session, &claim_node, Next::On(watches)).await,
            QueueEvent::Changed => {
                let next = Next::Anew(watches.take());
                shared.settle(&session, &claim_node, next).await
            }
        };
        match now {
            Ok(WaitState::Waits(new)) => {
                shared.claims.set_ahead(claim.id, new.ahead);
                watches = new;
            }
            Ok(WaitState::Fits(own)) => return grant(&shared, &session, own),
            // The claim's heartbeat watches again.
            Ok(WaitState::Gone) | Err(_) => return shared.claims.notify_to_poll(claim.id),
        }
    }
}

/// The state of a claim whose watches are being set.
pub(super) enum WaitState {
    /// The claim can be granted. Contains the watch on its own child.
    Fits(Option<Event>),
    Waits(Watches),
    /// The claim's own child does not exist.
    Gone,
}

/// The next step for a waiting claim.
enum Next {
    /// Watch more claims, if those that are watched do not block the claim any more.
    On(Watches),
    /// Read the queue. The existing watches are kept.
    Anew(Set),
}

/// Existing watches, on the claim's own child and on others.
type Set = (Option<Event>, Vec<(Blocker, Event)>);

impl Shared {
    /// Waits in the queue. The watches are set before the caller gets the result that the claim
    /// waits.
    pub(super) async fn wait(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: &Claim,
        started: Moment,
        position: QueuePosition,
    ) -> Result<Joined> {
        let Some((claim_node, _)) = self.claims.known(claim.id) else {
            return Ok(Joined::Busy { holders: Vec::new() });
        };
        self.claims.waits(claim, position.ahead, started);
        let connection = session.connection();
        let mut now = self.watch(session, &claim_node, position, (None, Vec::new())).await?;
        if let WaitState::Waits(watches) = now {
            now = self.settle(session, &claim_node, Next::On(watches)).await?;
        }
        match now {
            WaitState::Gone => {
                self.claims.remove(claim.id);
                Ok(Joined::Busy { holders: Vec::new() })
            }
            WaitState::Fits(_) => self.hold(session, claim, started, claim_node.token),
            WaitState::Waits(watches) => {
                let ahead = watches.ahead;
                self.claims.waits(claim, ahead, started);
                let watching = watch_blockers(
                    Arc::downgrade(self),
                    Arc::downgrade(session),
                    claim.clone(),
                    claim_node.clone(),
                    watches,
                    connection,
                    session.watching(),
                );
                let task = self.runtime.spawn(watching).abort_handle();
                self.claims.set_watch_task(claim.id, WatchTask(task));
                Ok(self.waiting(&claim_node, ahead))
            }
        }
    }

    /// Sets watches until enough claims are watched, or until the claim fits.
    async fn settle(
        &self,
        session: &Session,
        claim_node: &ClaimNode,
        mut next: Next,
    ) -> Result<WaitState> {
        loop {
            next = match next {
                Next::Anew(set) => match self.read_position(session, claim_node).await? {
                    QueueRead::Gone => return Ok(WaitState::Gone),
                    QueueRead::At(position) if position.blockers.is_empty() => {
                        return Ok(WaitState::Fits(set.0));
                    }
                    QueueRead::At(position) => {
                        match self.watch(session, claim_node, position, set).await? {
                            WaitState::Waits(watches) => Next::On(watches),
                            decided => return Ok(decided),
                        }
                    }
                },
                Next::On(mut watches) => match watches.next_watch() {
                    NextWatch::Enough => return Ok(WaitState::Waits(watches)),
                    NextWatch::Unknown => Next::Anew(watches.take()),
                    NextWatch::One(one) => {
                        let path = format!("{}/{}", claim_node.lock, one.name);
                        match self.watch_all(session, &[path]).await?.pop().flatten() {
                            Some(event) => watches.watch(one, event),
                            None if watches.left(one.weight) => {
                                return Ok(WaitState::Fits(watches.into_own()));
                            }
                            None => {}
                        }
                        Next::On(watches)
                    }
                },
            };
        }
    }

    /// Watches the claim's own child and those of its blockers that still exist.
    async fn watch(
        &self,
        session: &Session,
        claim_node: &ClaimNode,
        mut position: QueuePosition,
        (own, mut set): Set,
    ) -> Result<WaitState> {
        let blockers = std::mem::take(&mut position.blockers);
        set.retain(|(is, _)| blockers.iter().any(|b| b.name == is.name));
        let is_missing = |b: &Blocker| set.iter().all(|(is, _)| is.name != b.name);
        let missing: Vec<Blocker> = blockers.into_iter().filter(is_missing).collect();
        let own_path = own.is_none().then(|| claim_node.path());
        let others = missing.iter().map(|b| format!("{}/{}", claim_node.lock, b.name));
        let paths: Vec<String> = own_path.into_iter().chain(others).collect();
        let mut events = self.watch_all(session, &paths).await?.into_iter();
        let Some(own) = own.or_else(|| events.next().flatten()) else { return Ok(WaitState::Gone) };
        let mut watches = Watches::new(own, position);
        let mut fits = false;
        for (blocker, event) in missing.into_iter().zip(events) {
            match event {
                Some(event) => watches.watch(blocker, event),
                None => fits |= watches.left(blocker.weight),
            }
        }
        set.into_iter().for_each(|(blocker, event)| watches.watch(blocker, event));
        Ok(if fits { WaitState::Fits(watches.into_own()) } else { WaitState::Waits(watches) })
    }

    /// Watches these nodes. Returns `None` for a node that does not exist.
    async fn watch_all(&self, session: &Session, paths: &[String]) -> Result<Vec<Option<Event>>> {
        if paths.is_empty() {
            // Without a request there would be no reply, so this must not count as a sign of life.
            return Ok(Vec::new());
        }
        let answers = session.read(|c| async {
            Ok(join_all(paths.iter().map(|path| c.get_and_watch_data(path)).collect()).await)
        });
        let answers = answers.await.map_err(|fault| explain(fault, self.url.root()))?;
        let mut events = Vec::with_capacity(answers.len());
        for (answer, path) in answers.into_iter().zip(paths) {
            let watcher = match answer {
                Ok((_, _, watcher)) => Some(watcher),
                Err(Fault::NoNode) => None,
                Err(Fault::NoAuth) => self.watch_closed(session, path).await?,
                Err(fault) => return Err(explain(fault, path)),
            };
            events.push(watcher.map(event));
        }
        Ok(events)
    }

    /// Watches a child of another client that this user may not read. Before ZooKeeper 3.9, every
    /// user may check whether a node exists. If the node does not exist, this check leaves a watch
    /// behind.
    async fn watch_closed(&self, session: &Session, path: &str) -> Result<Option<OneshotWatcher>> {
        match session.read(|c| c.check_and_watch_stat(path)).await {
            Ok((stat, watcher)) => Ok(stat.map(|_| watcher)),
            Err(Fault::NoAuth) => self.watch_among_others(session, path).await,
            Err(fault) => Err(explain(fault, path)),
        }
    }

    /// Watches a child through its parent. Since ZooKeeper 3.9, only users that may read a node may
    /// check whether it exists. So this sets a watch on the parent's list of children. After each
    /// change of the list, the node is looked up again.
    async fn watch_among_others(
        &self,
        session: &Session,
        path: &str,
    ) -> Result<Option<OneshotWatcher>> {
        let Some((lock, name)) = path.rsplit_once('/') else { return Ok(None) };
        match session.read(|c| c.list_and_watch_children(lock)).await {
            Ok((names, watcher)) => Ok(names.iter().any(|is| is == name).then_some(watcher)),
            Err(Fault::NoNode) => Ok(None),
            Err(fault) => Err(explain(fault, lock)),
        }
    }

    /// Polls the state of a claim that has a child.
    pub(super) async fn ask(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: Claim,
        started: Moment,
    ) -> Result<Joined> {
        let lease = claim.lease;
        let renewed = self.renew_on(session, &[Renew { claim, lease }], started).await?;
        Ok(match renewed.into_iter().next().map(Renewal::known).transpose()? {
            Some(Renewal::Holding { token, remaining }) => Joined::Holding { token, remaining },
            Some(Renewal::Waiting(place)) => Joined::Waiting(place),
            Some(Renewal::Lost | Renewal::Unknown { .. }) | None => {
                Joined::Busy { holders: Vec::new() }
            }
        })
    }

    /// Looks for the child of a claim if the request to create it got no reply.
    pub(super) async fn search(
        &self,
        session: &Session,
        claim: &Claim,
        lock: &str,
    ) -> Result<Option<ClaimNode>> {
        let Some(name) = self.named_after(session, claim.id, lock).await? else { return Ok(None) };
        let path = format!("{lock}/{name}");
        let stat = match session.read(|c| c.check_stat(&path)).await {
            Ok(Some(stat)) => stat,
            Ok(None) => return Ok(None),
            Err(fault) => return Err(explain(fault, &path)),
        };
        let sequence = Node::parse(self.naming(), name.clone()).map_or(-1, |node| node.sequence());
        let Some(token) = token_of(&stat) else { return Ok(None) };
        let (lock, session) = (lock.to_owned(), stat.ephemeral_owner);
        let claim_node = ClaimNode { session, lock, node: name, token, sequence };
        self.claims.created(claim.id, claim_node.clone());
        Ok(Some(claim_node))
    }

    /// Returns the name of the child that contains this claim's ID, as of the leader's state.
    pub(super) async fn named_after(
        &self,
        session: &Session,
        id: ClaimId,
        lock: &str,
    ) -> Result<Option<String>> {
        let names = match self.list_synced(session, lock).await? {
            Some(names) => names,
            None => return Ok(None),
        };
        let guid = node::guid(self.naming(), id);
        Ok(names.into_iter().find(|name| name.starts_with(&guid)))
    }
}
