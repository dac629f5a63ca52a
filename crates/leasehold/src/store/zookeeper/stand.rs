//! Standing in the queue: what is in a claim's way is watched, and nothing else, until it is gone; and
//! where a claim stands, when somebody asks.

use std::sync::{Arc, Weak};

use zookeeper_client::{Error as Fault, OneshotWatcher};

use super::claims::Standing;
use super::fault::explain;
use super::join::token_of;
use super::node::{Node, Stand};
use super::queue::Looked;
use super::session::Session;
use super::watch::{Heard, Watches};
use super::{Shared, all_of, node};
use crate::claim::{Claim, ClaimId};
use crate::clock::Moment;
use crate::error::Result;
use crate::store::{Joined, Place, Renew, Renewal};

/// Waits for what is in a claim's way, and tells it of its turn.
pub(super) async fn listen(
    shared: Weak<Shared>,
    session: Weak<Session>,
    claim: Claim,
    standing: Standing,
    mut watches: Watches,
) {
    loop {
        let heard = watches.next().await;
        let (Some(shared), Some(session)) = (shared.upgrade(), session.upgrade()) else { return };
        let granted = match heard {
            Heard::Free => true,
            Heard::Changed => false,
            Heard::Over => return shared.claims.tell_to_ask(claim.id),
        };
        if granted {
            let certain = session.certain_until();
            return shared.claims.granted(claim.id, claim.waiter_lease, certain);
        }
        // Whatever else happened: who is in the way now?
        loop {
            let stand = match shared.look(&session, &standing).await {
                Ok(Looked::Stands(stand)) => stand,
                Ok(Looked::Gone) | Err(_) => return shared.claims.tell_to_ask(claim.id),
            };
            if stand.blockers.is_empty() {
                let certain = session.certain_until();
                return shared.claims.granted(claim.id, claim.waiter_lease, certain);
            }
            shared.claims.stands_behind(claim.id, stand.ahead);
            match shared.watch(&session, &standing, stand).await {
                Ok(Some(new)) => {
                    watches = new;
                    break;
                }
                Ok(None) => {}
                // The heartbeat listens anew.
                Err(_) => return shared.claims.tell_to_ask(claim.id),
            }
        }
    }
}

impl Shared {
    /// Stands in the queue: listens for what is in the way, before it is told that it waits.
    pub(super) async fn wait(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: &Claim,
        started: Moment,
        mut stand: Stand,
    ) -> Result<Joined> {
        loop {
            let Some((standing, _)) = self.claims.known(claim.id) else {
                return Ok(Joined::Busy { holders: Vec::new() });
            };
            self.claims.waits(claim, stand.ahead, started);
            let ahead = stand.ahead;
            if let Some(watches) = self.watch(session, &standing, stand).await? {
                let listening = listen(
                    Arc::downgrade(self),
                    Arc::downgrade(session),
                    claim.clone(),
                    standing.clone(),
                    watches,
                );
                self.claims.listens(claim.id, self.runtime.spawn(listening).abort_handle());
                let token = Some(standing.token);
                return Ok(Joined::Waiting(Place { ahead, head_remaining: None, token }));
            }
            match self.look(session, &standing).await? {
                Looked::Gone => {
                    self.claims.remove(claim.id);
                    return Ok(Joined::Busy { holders: Vec::new() });
                }
                Looked::Stands(now) if now.blockers.is_empty() => {
                    return self.hold(session, claim, started, standing.token);
                }
                Looked::Stands(now) => stand = now,
            }
        }
    }

    /// Watches the claim's own child and what is in its way; `None` if one of them is gone already.
    pub(super) async fn watch(
        &self,
        session: &Session,
        standing: &Standing,
        stand: Stand,
    ) -> Result<Option<Watches>> {
        let Stand { blockers, excess, .. } = stand;
        let paths: Vec<String> =
            blockers.iter().map(|b| format!("{}/{}", standing.lock, b.name)).collect();
        let own = standing.path();
        let asked = session.read(|c| async {
            let all = [&own].into_iter().chain(&paths).map(|path| c.get_and_watch_data(path));
            Ok(all_of(all.collect()).await)
        });
        let answers = asked.await.map_err(|fault| explain(fault, &own))?;
        let mut watchers = Vec::with_capacity(answers.len());
        for (answer, path) in answers.into_iter().zip([&own].into_iter().chain(&paths)) {
            watchers.push(match answer {
                Ok((_, _, watcher)) => watcher,
                Err(Fault::NoNode) => return Ok(None),
                Err(Fault::NoAuth) => match self.watch_closed(session, path).await? {
                    Some(watcher) => watcher,
                    None => return Ok(None),
                },
                Err(fault) => return Err(explain(fault, path)),
            });
        }
        let mut watchers = watchers.into_iter();
        let Some(mine) = watchers.next() else { return Ok(None) };
        let others = blockers.iter().map(|blocker| blocker.weight).zip(watchers).collect();
        Ok(Some(Watches::new(mine, others, excess)))
    }

    /// Watches a child of another client's that is closed to us. Anybody may ask whether a node is
    /// there; but of one that is not, that leaves a watch behind.
    pub(super) async fn watch_closed(
        &self,
        session: &Session,
        path: &str,
    ) -> Result<Option<OneshotWatcher>> {
        let asked = session.read(|c| c.check_and_watch_stat(path)).await;
        let (stat, watcher) = asked.map_err(|fault| explain(fault, path))?;
        Ok(stat.map(|_| watcher))
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
