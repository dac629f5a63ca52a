//! Joins a queue: the client creates a sequential child of the lock's node and lists the children.
//! Both requests are sent together. A try lists first, and creates no child if it cannot be
//! granted. A claim that does not fit watches what blocks it
//! ([`wait_in_queue`](super::wait_in_queue)). A claim that is rejected deletes its child.

use std::sync::{Arc, Weak};
use std::time::Duration;

use zookeeper_client::{CreateMode, CreateSequence, Error as Fault, Stat};

use super::claims::{ClaimNode, Stage};
use super::fault::explain;
use super::node;
use super::node::Children;
use super::session::Session;
use super::shared::Shared;
use leasehold_core::store::{Joined, Mode, Place, holders_of, mismatch};
use leasehold_core::{Claim, Error, ErrorKind, Moment, Result, Token};

/// How often the client creates the lock's node again, if the node is deleted each time before the
/// child is created.
const MAKE_TRIES: u32 = 8;

/// A new child, and the listing that was requested with its creation.
type Made = (Stat, CreateSequence, Result<Vec<String>, Fault>);

pub(super) fn token_of(stat: &Stat) -> Option<Token> {
    u64::try_from(stat.czxid).ok().and_then(Token::new)
}

async fn if_any<F: Future>(future: Option<F>) -> Option<F::Output> {
    Some(future?.await)
}

impl Shared {
    /// Joins the queue. The caller still waits for the result as long as `caller` has a strong
    /// reference.
    pub(super) async fn join(
        self: Arc<Self>,
        claim: Claim,
        mode: Mode,
        caller: Weak<()>,
    ) -> Result<Joined> {
        if !claim.lock_delay.is_zero() {
            let what = "lock_delay is not supported by zookeeper:";
            let hint = "remove lock_delay, or use postgres:, mysql:, sqlite:, redis: or etcd:";
            return Err(Error::new(ErrorKind::Unsupported, what).with_hint(hint));
        }
        let _turn = self.claims.enter(claim.id).await;
        if self.claims.is_given_up(claim.id) {
            self.end_given_up(claim.id).await;
            self.claims.begin_anew(claim.id);
        }
        let started = self.clock.now();
        let stage = self.claims.stage(claim.id);
        if caller.strong_count() == 0 {
            // The caller is gone, so no caller would own the new claim.
            if let Stage::New = stage {
                self.claims.remove(claim.id);
            }
            return Err(explain(Fault::Timeout, self.url.root()));
        }
        let session = match self.session().await {
            Ok(session) => session,
            Err(error) => {
                if let Stage::New = stage {
                    self.claims.remove(claim.id);
                }
                return Err(error);
            }
        };
        let claim_node = match stage {
            Stage::New => None,
            Stage::Requested { lock } => self.search(&session, &claim, &lock).await?,
            Stage::Created(claim_node) => Some(claim_node),
        };
        match claim_node {
            None => self.enter_queue(&session, claim, mode, started).await,
            Some(claim_node) if claim_node.session == session.id() => {
                match self.ask(&session, claim.clone(), started).await? {
                    // The claim was evicted or has just expired. It joins again after its first
                    // child is deleted, so it never has two children.
                    Joined::Busy { .. } => {
                        self.delete(&session, &claim_node).await?;
                        self.claims.begin_anew(claim.id);
                        self.enter_queue(&session, claim, mode, started).await
                    }
                    // The try was not granted, so its child should already have been deleted.
                    Joined::Waiting(_) if mode == Mode::Try && self.claims.is_trying(claim.id) => {
                        self.delete(&session, &claim_node).await?;
                        self.claims.remove(claim.id);
                        Ok(Joined::Busy { holders: Vec::new() })
                    }
                    joined => Ok(joined),
                }
            }
            // A new session inherits nothing.
            Some(_) => Ok(Joined::Busy { holders: Vec::new() }),
        }
    }

    /// Creates the claim's child and determines the claims ahead of it.
    pub(super) async fn enter_queue(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: Claim,
        mode: Mode,
        started: Moment,
    ) -> Result<Joined> {
        let lock = self.lock_path(&claim.name);
        let prefix = format!("{lock}/{}", node::prefix(self.naming(), &claim));
        let data = serde_json::to_vec(&*claim.holder).unwrap_or_default();
        if mode == Mode::Try {
            let refused = self.check_before_try(session, &claim, &lock).await.transpose();
            if let Some(refused) = refused {
                self.claims.remove(claim.id);
                return refused;
            }
        }
        let mut tries = 0;
        loop {
            self.claims.creation_requested(&claim, mode, &lock, self.clock.now());
            match self.make_child(session, &lock, &prefix, &data, tries > 0).await {
                Ok((stat, sequence, listed)) => {
                    let Some(token) = token_of(&stat) else {
                        let what =
                            "the ZooKeeper server does not report transaction ids of new nodes";
                        let error = Error::new(ErrorKind::Unsupported, what);
                        return Err(error.with_hint("upgrade it to ZooKeeper 3.6 or later"));
                    };
                    let node = format!("{}{sequence}", &prefix[lock.len() + 1..]);
                    let (session_id, sequence) = (session.id(), sequence.into_i64());
                    let claim_node = ClaimNode { session: session_id, lock, node, token, sequence };
                    let joined =
                        self.record_child(session, &claim, mode, started, claim_node, listed);
                    return joined.await;
                }
                Err((Fault::NoNode, refused)) if tries < MAKE_TRIES => {
                    tries += 1;
                    if let Some(fault) = refused
                        && let Err(error) = self.make_above(session, fault, &lock).await
                    {
                        self.claims.remove(claim.id);
                        return Err(error);
                    }
                }
                Err((fault, _)) => {
                    let error = explain(fault, &lock);
                    // A rejected creation leaves no child. Otherwise the child may exist, and the
                    // next join looks for it.
                    if error.kind() != ErrorKind::Unreachable {
                        self.claims.remove(claim.id);
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Creates a child and lists the queue. With `make_lock`, it first creates the lock's node. The
    /// second fault in an error is the reason why the lock's node cannot be created.
    async fn make_child(
        &self,
        session: &Session,
        lock: &str,
        prefix: &str,
        data: &[u8],
        make_lock: bool,
    ) -> Result<Made, (Fault, Option<Fault>)> {
        let options = CreateMode::EphemeralSequential.with_acls(self.acls());
        let above = self.lock_mode().with_acls(self.acls());
        let sent = session.write(|c| async {
            // The requests are sent in the order of these lines, without waiting for replies. If
            // the lock's node was missing, its creation is the first of them.
            let make = make_lock.then(|| c.create(lock, &[], &above));
            let create = c.create(prefix, data, &options);
            let list = c.list_children(lock);
            let (made, created, listed) = tokio::join!(if_any(make), create, list);
            match created {
                Ok((stat, sequence)) => Ok((stat, sequence, listed)),
                // The second fault explains why the lock's node could not be created. The first one
                // only shows that the node is missing.
                Err(Fault::NoNode) => {
                    let refused = made.and_then(Result::err);
                    Err((Fault::NoNode, refused.filter(|fault| *fault != Fault::NodeExists)))
                }
                Err(fault) => Err((fault, None)),
            }
        });
        sent.await
    }

    /// Records a claim's new child. Returns the result for the claim, according to the listing that
    /// was requested with the creation.
    async fn record_child(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: &Claim,
        mode: Mode,
        started: Moment,
        claim_node: ClaimNode,
        listed: Result<Vec<String>, Fault>,
    ) -> Result<Joined> {
        if !self.claims.created(claim.id, claim_node.clone()) {
            self.delete(session, &claim_node).await?;
            return Err(explain(Fault::Timeout, &claim_node.lock));
        }
        match self.decide(session, claim, mode, started, &claim_node, listed).await {
            // The caller does not repeat a rejected join, and does not call `leave` for it.
            Err(error) if error.kind() != ErrorKind::Unreachable => {
                Err(self.undone(session, claim, &claim_node, error).await)
            }
            decided => decided,
        }
    }

    /// Determines from the listing whether a new child's claim holds, waits, or is rejected.
    async fn decide(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: &Claim,
        mode: Mode,
        started: Moment,
        claim_node: &ClaimNode,
        listed: Result<Vec<String>, Fault>,
    ) -> Result<Joined> {
        let names = listed.map_err(|fault| explain(fault, &claim_node.lock))?;
        let children = self.order(&claim_node.lock, names)?;
        if let Some((kind, capacity)) = children.mismatch(claim, &claim_node.node) {
            return Err(mismatch(claim, kind, capacity));
        }
        match children.position_of(&claim_node.node) {
            None => {
                self.claims.remove(claim.id);
                Ok(Joined::Busy { holders: Vec::new() })
            }
            Some(position) if position.blockers.is_empty() => {
                self.hold(session, claim, started, claim_node.token)
            }
            Some(position) if mode == Mode::Try => {
                let front = children.front(children.holding().min(position.ahead));
                let (left, busy) = tokio::join!(
                    self.delete(session, claim_node),
                    self.busy(session, claim, &claim_node.lock, &front)
                );
                left?;
                self.claims.remove(claim.id);
                busy
            }
            Some(position) => self.wait(session, claim, started, position).await,
        }
    }

    /// Returns the result for a try while these children hold the lock.
    async fn busy(
        &self,
        session: &Session,
        claim: &Claim,
        lock: &str,
        front: &Children,
    ) -> Result<Joined> {
        let seen = self.read_nodes(session, lock, front.nodes()).await?;
        let info = self.describe(&claim.name, front, front.nodes().iter().zip(seen));
        Ok(Joined::Busy { holders: holders_of(&info) })
    }

    /// Checks whether a try would be granted, before it creates a child. Returns the try's result
    /// if it would not be granted. The listing is as new as the leader's state, so it includes
    /// every release before the try.
    async fn check_before_try(
        &self,
        session: &Session,
        claim: &Claim,
        lock: &str,
    ) -> Result<Option<Joined>> {
        let Some(names) = self.list_synced(session, lock).await? else { return Ok(None) };
        let children = self.order(lock, names)?;
        if let Some((kind, capacity)) = children.mismatch(claim, "") {
            return Err(mismatch(claim, kind, capacity));
        }
        if children.has_room_for(claim) {
            return Ok(None);
        }
        let front = children.front(children.holding());
        self.busy(session, claim, lock, &front).await.map(Some)
    }

    /// Returns the result for a waiter with `ahead` claims ahead of it.
    pub(super) fn waiting(&self, claim_node: &ClaimNode, ahead: usize) -> Joined {
        let token = Some(claim_node.token);
        Joined::Waiting(Place { ahead, head_remaining: None, token })
    }

    /// Deletes the child of a rejected claim, and returns the reason for the rejection. If the
    /// deletion fails, returns the error of the deletion instead.
    pub(super) async fn undone(
        &self,
        session: &Session,
        claim: &Claim,
        claim_node: &ClaimNode,
        refusal: Error,
    ) -> Error {
        match self.delete(session, claim_node).await {
            Ok(_) => {
                self.claims.remove(claim.id);
                refusal
            }
            Err(error) => error,
        }
    }

    /// Returns for how long from `started` on a lease that was requested then is certainly valid.
    pub(super) fn remaining(
        &self,
        session: &Session,
        lease: Duration,
        started: Moment,
    ) -> Duration {
        lease.min(session.certain_until().since(started))
    }

    pub(super) fn hold(
        &self,
        session: &Session,
        claim: &Claim,
        started: Moment,
        token: Token,
    ) -> Result<Joined> {
        if !self.claims.holds(claim.id, self.clock.now().plus(claim.lease)) {
            return Ok(Joined::Busy { holders: Vec::new() });
        }
        let remaining = Some(self.remaining(session, claim.lease, started));
        Ok(Joined::Holding { token, remaining })
    }
}
