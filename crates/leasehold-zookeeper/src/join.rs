//! Joining a queue: the client creates a sequential child of the lock's node and lists the
//! children. Both requests are sent together. A claim that only tries lists first, and creates no
//! child where others hold. A claim that does not fit watches what blocks it
//! ([`stand`](super::stand)). A claim that is refused deletes its child.

use std::sync::{Arc, Weak};
use std::time::Duration;

use zookeeper_client::{CreateMode, CreateSequence, Error as Fault, Stat};

use super::claims::{Stage, Standing};
use super::fault::explain;
use super::node;
use super::node::Children;
use super::session::Session;
use super::shared::Shared;
use leasehold_core::store::{Joined, Mode, Place, holders_of, mismatch};
use leasehold_core::{Claim, Error, ErrorKind, Moment, Result, Token};

/// How often the lock's node is made when it vanishes again before its child is.
const MAKE_TRIES: u32 = 8;

/// A child as it was made, and the listing that came with it.
type Made = (Stat, CreateSequence, Result<Vec<String>, Fault>);

pub(super) fn token_of(stat: &Stat) -> Option<Token> {
    u64::try_from(stat.czxid).ok().and_then(Token::new)
}

async fn if_any<F: Future>(future: Option<F>) -> Option<F::Output> {
    Some(future?.await)
}

impl Shared {
    /// Joins for a caller who is there as long as `caller` is.
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
            // Who asked has gone, and what comes now would be nobody's.
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
        let standing = match stage {
            Stage::New => None,
            Stage::Asked { lock } => self.search(&session, &claim, &lock).await?,
            Stage::Standing(standing) => Some(standing),
        };
        match standing {
            None => self.enter_queue(&session, claim, mode, started).await,
            Some(standing) if standing.session == session.id() => {
                match self.ask(&session, claim.clone(), started).await? {
                    // It was there, and was taken away, or expired just now: it stands anew, and
                    // never beside its first child.
                    Joined::Busy { .. } => {
                        self.delete(&session, &standing).await?;
                        self.claims.begin_anew(claim.id);
                        self.enter_queue(&session, claim, mode, started).await
                    }
                    // Its child should have been deleted when it did not hold.
                    Joined::Waiting(_) if mode == Mode::Try && self.claims.is_trying(claim.id) => {
                        self.delete(&session, &standing).await?;
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

    /// Makes the claim's child, and sees who is before it.
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
            let refused = self.look_first(session, &claim, &lock).await.transpose();
            if let Some(refused) = refused {
                self.claims.remove(claim.id);
                return refused;
            }
        }
        let mut tries = 0;
        loop {
            self.claims.asked(&claim, mode, &lock, self.clock.now());
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
                    let standing = Standing { session: session_id, lock, node, token, sequence };
                    return self.stand(session, &claim, mode, started, standing, listed).await;
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
                    // Refused, there is nothing of it; else it is looked for when asked again.
                    if error.kind() != ErrorKind::Unreachable {
                        self.claims.remove(claim.id);
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Makes a child and lists the queue; with `make_lock`, makes the lock's node first. A second
    /// fault is why the lock's node cannot be made.
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
            // Requests go out in the order of these lines. Where the lock's node was not there, it is
            // made in the same breath.
            let make = make_lock.then(|| c.create(lock, &[], &above));
            let create = c.create(prefix, data, &options);
            let list = c.list_children(lock);
            let (made, created, listed) = tokio::join!(if_any(make), create, list);
            match created {
                Ok((stat, sequence)) => Ok((stat, sequence, listed)),
                // Why the lock's node cannot be made, rather than that it is not there.
                Err(Fault::NoNode) => {
                    let refused = made.and_then(Result::err);
                    Err((Fault::NoNode, refused.filter(|fault| *fault != Fault::NodeExists)))
                }
                Err(fault) => Err((fault, None)),
            }
        });
        sent.await
    }

    /// A child was made: what that comes to for its claim, by the listing that came with it.
    async fn stand(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: &Claim,
        mode: Mode,
        started: Moment,
        standing: Standing,
        listed: Result<Vec<String>, Fault>,
    ) -> Result<Joined> {
        if !self.claims.stands(claim.id, standing.clone()) {
            self.delete(session, &standing).await?;
            return Err(explain(Fault::Timeout, &standing.lock));
        }
        match self.decide(session, claim, mode, started, &standing, listed).await {
            // Refused, it is not asked for again, and nobody would leave for it.
            Err(error) if error.kind() != ErrorKind::Unreachable => {
                Err(self.undone(session, claim, &standing, error).await)
            }
            decided => decided,
        }
    }

    /// What the listing means for a new child.
    async fn decide(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: &Claim,
        mode: Mode,
        started: Moment,
        standing: &Standing,
        listed: Result<Vec<String>, Fault>,
    ) -> Result<Joined> {
        let names = listed.map_err(|fault| explain(fault, &standing.lock))?;
        let children = self.order(&standing.lock, names)?;
        if let Some((kind, capacity)) = children.mismatch(claim, &standing.node) {
            return Err(mismatch(claim, kind, capacity));
        }
        match children.stand(&standing.node) {
            None => {
                self.claims.remove(claim.id);
                Ok(Joined::Busy { holders: Vec::new() })
            }
            Some(stand) if stand.blockers.is_empty() => {
                self.hold(session, claim, started, standing.token)
            }
            Some(stand) if mode == Mode::Try => {
                let front = children.front(children.holding().min(stand.ahead));
                let (left, busy) = tokio::join!(
                    self.delete(session, standing),
                    self.busy(session, claim, &standing.lock, &front)
                );
                left?;
                self.claims.remove(claim.id);
                busy
            }
            Some(stand) => self.wait(session, claim, started, stand).await,
        }
    }

    /// The answer to one that tries while these hold.
    async fn busy(
        &self,
        session: &Session,
        claim: &Claim,
        lock: &str,
        front: &Children,
    ) -> Result<Joined> {
        let seen = self.look_at(session, lock, front.nodes()).await?;
        let info = self.describe(&claim.name, front, front.nodes().iter().zip(seen));
        Ok(Joined::Busy { holders: holders_of(&info) })
    }

    /// Looks, before it makes a child, whether one that tries would hold; the answer, if not. By the
    /// leader's word: what was released before is free.
    async fn look_first(
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

    /// The answer to one that waits, behind so many.
    pub(super) fn waiting(&self, standing: &Standing, ahead: usize) -> Joined {
        let token = Some(standing.token);
        Joined::Waiting(Place { ahead, head_remaining: None, token })
    }

    /// The claim is refused: its child goes first.
    pub(super) async fn undone(
        &self,
        session: &Session,
        claim: &Claim,
        standing: &Standing,
        refusal: Error,
    ) -> Error {
        match self.delete(session, standing).await {
            Ok(_) => {
                self.claims.remove(claim.id);
                refusal
            }
            Err(error) => error,
        }
    }

    /// What is certain of a lease that was asked for at `started`.
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
