//! Waiting in a queue: a claim watches what is in its way and its own child, and nothing else.
//!
//! *One departure wakes one waiter of a mutex.* A waiter watches the nearest claims ahead that
//! together leave no room for it: of a mutex its predecessor, of a reader the writer ahead, of one
//! of n permits the n ahead. While they all stay it cannot hold. So the cost of a hand-over depends
//! on the kind of the lock, and not on how many clients wait: the server notifies only the claims
//! that the departed one blocked.
//!
//! *A claim that is evicted while it waits never takes the departure of another for its turn.* It
//! watches its own child as well, the server notifies in the order of its transactions, and the
//! watch on the own child is looked at first ([`watch`](super::watch)).
//!
//! # What if
//! - *a child departs before it is watched*: the watch is a read, whose answer is that the child is
//!   missing;
//! - *the connection breaks*: the driver sets all watches again with the last transaction that it
//!   has seen, and the server notifies of what happened since, but in any order. So a claim whose
//!   turn comes on another connection than its watches were set on is told to ask: its own child
//!   may be gone too;
//! - *the session ends*: every watch ends, and the claim is told to ask;
//! - *a watch cannot be set*: the claim is told to ask, and its heartbeat listens again;
//! - *the caller's future is dropped*: the watches belong to a task of the client's own, which ends
//!   when the claim is removed.

use std::sync::{Arc, Weak};

use zookeeper_client::{Error as Fault, OneshotWatcher};

use super::claims::{Listening, Standing};
use super::fault::explain;
use super::join::token_of;
use super::node;
use super::node::{Blocker, Node, Stand};
use super::queue::Looked;
use super::session::{Session, Watching};
use super::shared::Shared;
use super::together::all_of;
use super::watch::{Event, Heard, Lacks, OwnWatch, Watches, event};
use leasehold_core::store::{Joined, Renew, Renewal};
use leasehold_core::{Claim, ClaimId, Moment, Result};

/// Waits for what is in a claim's way, and tells it of its turn.
pub(super) async fn listen(
    shared: Weak<Shared>,
    session: Weak<Session>,
    claim: Claim,
    standing: Standing,
    mut watches: Watches,
    connection: Option<u64>,
    _watching: Watching,
) {
    let grant = |shared: &Shared, session: &Session, own: Option<Event>| match session.connection()
        == connection
    {
        true => shared.claims.granted(claim.id, session.certain_until(), own.map(OwnWatch)),
        false => shared.claims.tell_to_ask(claim.id),
    };
    loop {
        let heard = watches.next().await;
        let (Some(shared), Some(session)) = (shared.upgrade(), session.upgrade()) else { return };
        let now = match heard {
            Heard::Free => return grant(&shared, &session, watches.into_own()),
            Heard::Over => return shared.claims.tell_to_ask(claim.id),
            Heard::Lacking => shared.settle(&session, &standing, Next::On(watches)).await,
            Heard::Changed => {
                let next = Next::Anew(watches.take());
                shared.settle(&session, &standing, next).await
            }
        };
        match now {
            Ok(Watched::Waits(new)) => {
                shared.claims.stands_behind(claim.id, new.ahead);
                watches = new;
            }
            Ok(Watched::Fits(own)) => return grant(&shared, &session, own),
            // The heartbeat listens anew.
            Ok(Watched::Gone) | Err(_) => return shared.claims.tell_to_ask(claim.id),
        }
    }
}

/// How a claim stands whose watches are being set.
pub(super) enum Watched {
    /// With the watch on its own child.
    Fits(Option<Event>),
    Waits(Watches),
    /// Its own child is not there.
    Gone,
}

/// What is to be done next for one that waits.
enum Next {
    /// One of those that are watched has left, or none has: enough must be.
    On(Watches),
    /// The queue must be looked at; what is set already is kept.
    Anew(Set),
}

/// Watches that are set already: of the own child, and of others.
type Set = (Option<Event>, Vec<(Blocker, Event)>);

impl Shared {
    /// Stands in the queue: listens for what is in the way, before it is told that it waits.
    pub(super) async fn wait(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: &Claim,
        started: Moment,
        stand: Stand,
    ) -> Result<Joined> {
        let Some((standing, _)) = self.claims.known(claim.id) else {
            return Ok(Joined::Busy { holders: Vec::new() });
        };
        self.claims.waits(claim, stand.ahead, started);
        let connection = session.connection();
        let mut now = self.watch(session, &standing, stand, (None, Vec::new())).await?;
        if let Watched::Waits(watches) = now {
            now = self.settle(session, &standing, Next::On(watches)).await?;
        }
        match now {
            Watched::Gone => {
                self.claims.remove(claim.id);
                Ok(Joined::Busy { holders: Vec::new() })
            }
            Watched::Fits(_) => self.hold(session, claim, started, standing.token),
            Watched::Waits(watches) => {
                let ahead = watches.ahead;
                self.claims.waits(claim, ahead, started);
                let listening = listen(
                    Arc::downgrade(self),
                    Arc::downgrade(session),
                    claim.clone(),
                    standing.clone(),
                    watches,
                    connection,
                    session.watching(),
                );
                let task = self.runtime.spawn(listening).abort_handle();
                self.claims.listens(claim.id, Listening(task));
                Ok(self.waiting(&standing, ahead))
            }
        }
    }

    /// Goes on until enough is watched, or the claim fits.
    async fn settle(
        &self,
        session: &Session,
        standing: &Standing,
        mut next: Next,
    ) -> Result<Watched> {
        loop {
            next = match next {
                Next::Anew(set) => match self.look(session, standing).await? {
                    Looked::Gone => return Ok(Watched::Gone),
                    Looked::Stands(stand) if stand.blockers.is_empty() => {
                        return Ok(Watched::Fits(set.0));
                    }
                    Looked::Stands(stand) => {
                        match self.watch(session, standing, stand, set).await? {
                            Watched::Waits(watches) => Next::On(watches),
                            decided => return Ok(decided),
                        }
                    }
                },
                Next::On(mut watches) => match watches.lacks() {
                    Lacks::Nobody => return Ok(Watched::Waits(watches)),
                    Lacks::Unknown => Next::Anew(watches.take()),
                    Lacks::One(one) => {
                        let path = format!("{}/{}", standing.lock, one.name);
                        match self.watch_all(session, &[path]).await?.pop().flatten() {
                            Some(event) => watches.watch(one, event),
                            None if watches.left(one.weight) => {
                                return Ok(Watched::Fits(watches.into_own()));
                            }
                            None => {}
                        }
                        Next::On(watches)
                    }
                },
            };
        }
    }

    /// Watches the claim's own child and what is in its way, as far as they are there still.
    async fn watch(
        &self,
        session: &Session,
        standing: &Standing,
        mut stand: Stand,
        (own, mut set): Set,
    ) -> Result<Watched> {
        let blockers = std::mem::take(&mut stand.blockers);
        set.retain(|(is, _)| blockers.iter().any(|b| b.name == is.name));
        let is_missing = |b: &Blocker| set.iter().all(|(is, _)| is.name != b.name);
        let missing: Vec<Blocker> = blockers.into_iter().filter(is_missing).collect();
        let own_path = own.is_none().then(|| standing.path());
        let others = missing.iter().map(|b| format!("{}/{}", standing.lock, b.name));
        let paths: Vec<String> = own_path.into_iter().chain(others).collect();
        let mut events = self.watch_all(session, &paths).await?.into_iter();
        let Some(own) = own.or_else(|| events.next().flatten()) else { return Ok(Watched::Gone) };
        let mut watches = Watches::new(own, stand);
        let mut fits = false;
        for (blocker, event) in missing.into_iter().zip(events) {
            match event {
                Some(event) => watches.watch(blocker, event),
                None => fits |= watches.left(blocker.weight),
            }
        }
        set.into_iter().for_each(|(blocker, event)| watches.watch(blocker, event));
        Ok(if fits { Watched::Fits(watches.into_own()) } else { Watched::Waits(watches) })
    }

    /// Watches these nodes; `None` for one that is not there.
    async fn watch_all(&self, session: &Session, paths: &[String]) -> Result<Vec<Option<Event>>> {
        if paths.is_empty() {
            // Nothing asked is nothing heard.
            return Ok(Vec::new());
        }
        let asked = session.read(|c| async {
            Ok(all_of(paths.iter().map(|path| c.get_and_watch_data(path)).collect()).await)
        });
        let answers = asked.await.map_err(|fault| explain(fault, self.url.root()))?;
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

    /// Watches a child of another client's that is closed to us. Anybody may ask whether a node is
    /// there; but of one that is not, that leaves a watch behind.
    async fn watch_closed(&self, session: &Session, path: &str) -> Result<Option<OneshotWatcher>> {
        match session.read(|c| c.check_and_watch_stat(path)).await {
            Ok((stat, watcher)) => Ok(stat.map(|_| watcher)),
            Err(Fault::NoAuth) => self.watch_among_others(session, path).await,
            Err(fault) => Err(explain(fault, path)),
        }
    }

    /// Since ZooKeeper 3.9 only those may ask for a node who may read it. Then it is watched who comes
    /// and goes beside it: whatever happens there, the node is looked for again.
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

    /// "And now?" for a claim that has a child.
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

    /// The child of a claim whose creation was not answered.
    pub(super) async fn search(
        &self,
        session: &Session,
        claim: &Claim,
        lock: &str,
    ) -> Result<Option<Standing>> {
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
        let standing = Standing { session, lock, node: name, token, sequence };
        self.claims.stands(claim.id, standing.clone());
        Ok(Some(standing))
    }

    /// The name of the child that bears this claim's id, by the leader's word.
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
