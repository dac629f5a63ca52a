//! Joining: a sequential child of the lock's node, and the listing that shows who is before it, in one
//! breath; without the listing where the queue is followed ([`follow`](super::follow)). Who tries looks
//! first, and makes no child where others hold. Who waits and does not fit is told of its turn by who follows
//! the queue, or watches what blocks it ([`stand`](super::stand)). A claim that is refused takes its child back.

use std::sync::{Arc, Weak};
use std::time::Duration;

use zookeeper_client::{CreateMode, CreateSequence, Error as Fault, Stat};

use super::claims::{Stage, Standing};
use super::fault::explain;
use super::followed::Followed;
use super::node;
use super::node::{Children, Stand};
use super::session::Session;
use super::shared::Shared;
use leasehold_core::store::{Joined, Mode, Place, holders_of, mismatch};
use leasehold_core::{Claim, Error, ErrorKind, Moment, Result, Token};

/// How often the lock's node is made when it vanishes again before its child is.
const MAKE_TRIES: u32 = 8;

/// What a child comes to, by who is before it.
pub(super) enum Verdict {
    Holds,
    Waits(Stand),
    /// It was to hold at once, but these do.
    Busy(Children),
    /// It is not there any more.
    Gone,
}

/// What is sent with the creation of a child.
#[derive(Clone, Copy)]
enum Beside {
    /// The queue is followed: nothing else is needed.
    Nothing,
    Listing,
    /// The creation of the lock's node before it, and the listing after it.
    LockAndListing,
}

/// A child as it was made, and the listing that came with it.
type Made = (Stat, CreateSequence, Option<Result<Vec<String>, Fault>>);

pub(super) fn token_of(stat: &Stat) -> Option<Token> {
    u64::try_from(stat.czxid).ok().and_then(Token::new)
}

async fn if_any<F: Future>(future: Option<F>) -> Option<F::Output> {
    match future {
        Some(future) => Some(future.await),
        None => None,
    }
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
        let followed = self.follows.of(session.id(), &lock);
        let followed = followed.filter(|followed| followed.picture().is_some());
        let mut tries = 0;
        loop {
            self.claims.asked(&claim, mode, &lock, self.clock.now());
            let beside = match (&followed, tries) {
                (Some(_), 0) => Beside::Nothing,
                (None, 0) => Beside::Listing,
                _ => Beside::LockAndListing,
            };
            match self.make_child(session, &lock, &prefix, &data, beside).await {
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
                    let known = (listed, followed.as_deref());
                    return self.stand(session, &claim, mode, started, standing, known).await;
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

    /// Makes a child, with what is to be sent beside it. A second fault tells why the lock's node cannot
    /// be made.
    async fn make_child(
        &self,
        session: &Session,
        lock: &str,
        prefix: &str,
        data: &[u8],
        beside: Beside,
    ) -> Result<Made, (Fault, Option<Fault>)> {
        let options = CreateMode::EphemeralSequential.with_acls(self.acls());
        let above = self.lock_mode().with_acls(self.acls());
        let sent = session.write(|c| async {
            // Requests go out in the order of these lines. Where the lock's node was not there, it is
            // made in the same breath.
            let make =
                matches!(beside, Beside::LockAndListing).then(|| c.create(lock, &[], &above));
            let create = c.create(prefix, data, &options);
            let list = (!matches!(beside, Beside::Nothing)).then(|| c.list_children(lock));
            let (made, created, listed) = tokio::join!(if_any(make), create, if_any(list));
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

    /// A child was made: what that comes to for its claim, by the listing that came with it or by what is
    /// known of a queue that is followed.
    async fn stand(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: &Claim,
        mode: Mode,
        started: Moment,
        standing: Standing,
        (listed, followed): (Option<Result<Vec<String>, Fault>>, Option<&Followed>),
    ) -> Result<Joined> {
        if !self.claims.stands(claim.id, standing.clone()) {
            self.delete(session, &standing).await?;
            return Err(explain(Fault::Timeout, &standing.lock));
        }
        let joined = match (&listed, followed) {
            (None, Some(followed)) => {
                self.stand_in(session, claim, mode, started, &standing, followed).await
            }
            _ => None,
        };
        let decided = match joined {
            Some(joined) => joined,
            None => self.look_and_stand(session, claim, mode, started, &standing, listed).await,
        };
        match decided {
            // Refused, it is not asked for again, and nobody would leave for it.
            Err(error) if error.kind() != ErrorKind::Unreachable => {
                Err(self.undone(session, claim, &standing, error).await)
            }
            decided => decided,
        }
    }

    /// What a listing means for a new child: the one that came with it, or another.
    async fn look_and_stand(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: &Claim,
        mode: Mode,
        started: Moment,
        standing: &Standing,
        listed: Option<Result<Vec<String>, Fault>>,
    ) -> Result<Joined> {
        let listed = match listed {
            Some(listed) => listed,
            None => session.read(|c| c.list_children(&standing.lock)).await,
        };
        let names = listed.map_err(|fault| explain(fault, &standing.lock))?;
        let children = self.order(&standing.lock, names)?;
        match self.judge(claim, mode, &standing.node, &children)? {
            Verdict::Waits(stand) => self.wait(session, claim, started, stand).await,
            verdict => self.answer(session, claim, started, standing, verdict).await,
        }
    }

    /// What a child of this name comes to among the others.
    pub(super) fn judge(
        &self,
        claim: &Claim,
        mode: Mode,
        own: &str,
        children: &Children,
    ) -> Result<Verdict> {
        if let Some((kind, capacity)) = children.mismatch(claim, own) {
            return Err(mismatch(claim, kind, capacity));
        }
        Ok(match children.stand(own) {
            None => Verdict::Gone,
            Some(stand) if stand.blockers.is_empty() => Verdict::Holds,
            Some(stand) if mode == Mode::Try => {
                Verdict::Busy(children.front(children.holding().min(stand.ahead)))
            }
            Some(stand) => Verdict::Waits(stand),
        })
    }

    /// The answer to one that was judged; who waits is told of its turn already.
    pub(super) async fn answer(
        &self,
        session: &Session,
        claim: &Claim,
        started: Moment,
        standing: &Standing,
        verdict: Verdict,
    ) -> Result<Joined> {
        match verdict {
            Verdict::Holds => self.hold(session, claim, started, standing.token),
            Verdict::Waits(stand) => Ok(self.waiting(standing, stand.ahead)),
            Verdict::Busy(front) => {
                let (left, busy) = tokio::join!(
                    self.delete(session, standing),
                    self.busy(session, claim, &standing.lock, &front)
                );
                left?;
                self.claims.remove(claim.id);
                busy
            }
            Verdict::Gone => {
                self.claims.remove(claim.id);
                Ok(Joined::Busy { holders: Vec::new() })
            }
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
