//! Renews claims: a claim exists as long as its session does.
//!
//! A waiter's heartbeat writes nothing while its watches are set. The watches report when the
//! waiter can be granted and when its own child is gone, in the order of the transactions. So a
//! write that proves that the child exists would add nothing. The client relies on a grant only if
//! the session certainly lives until the claim's deadline. If no write has proved that recently,
//! the first renewal of the holder does.
//!
//! What remains is one read per lock, whatever the number of waiters, and one listing if a child
//! was added or removed. The listing returns the length of the queue, detects foreign children, and
//! finds events that the driver or a server failed to report. The read also keeps the session
//! alive.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use zookeeper_client::{Error as Fault, MultiWriteError};

use super::claims::{ClaimNode, NodeState};
use super::fault::{ends_session, explain};
use super::join_all::join_all;
use super::node::Places;
use super::session::Session;
use super::shared::Shared;
use leasehold_core::store::{Joined, Place, Renew, Renewal};
use leasehold_core::{ClaimId, Error, ErrorKind, Moment, Result};

/// Approximate maximum size of all paths in one request. The server rejects requests above a
/// megabyte.
const REQUEST_BYTES: usize = 256 * 1024;

impl Shared {
    pub(super) async fn renew(self: Arc<Self>, renewals: Vec<Renew>) -> Result<Vec<Renewal>> {
        let started = self.clock.now();
        self.renew_on(&self.current(), &renewals, started).await
    }

    /// Renews the claims that have a child of this session. All others are lost.
    pub(super) async fn renew_on(
        self: &Arc<Self>,
        session: &Arc<Session>,
        renewals: &[Renew],
        started: Moment,
    ) -> Result<Vec<Renewal>> {
        let mut answers = vec![Renewal::Lost; renewals.len()];
        if session.is_over() {
            return Ok(answers);
        }
        let mut open: Vec<(usize, ClaimNode)> = Vec::with_capacity(renewals.len());
        let mut waiting: BTreeMap<String, Vec<(usize, ClaimNode)>> = BTreeMap::new();
        for (i, Renew { claim, .. }) in renewals.iter().enumerate() {
            let known = self.claims.known(claim.id);
            let here = known.filter(|(claim_node, _)| claim_node.session == session.id());
            let Some((claim_node, known)) = here else { continue };
            if matches!(known, NodeState::Waiting(_)) && self.claims.is_watching(claim.id) {
                // The watch on the waiter's own child reports if the child is deleted.
                waiting.entry(claim_node.lock.clone()).or_default().push((i, claim_node));
            } else {
                open.push((i, claim_node));
            }
        }
        let open = self.existing(session, open).await?;
        for (i, claim_node) in open {
            let Renew { claim, lease } = &renewals[i];
            if let Some(holding) = self.renew_holder(session, claim.id, *lease, started) {
                answers[i] = holding;
            } else if let Some((_, NodeState::Waiting(_))) = self.claims.known(claim.id) {
                waiting.entry(claim_node.lock.clone()).or_default().push((i, claim_node));
            }
        }
        if !waiting.is_empty() {
            self.let_rest(session, renewals, started, &mut waiting, &mut answers).await?;
        }
        if waiting.is_empty() {
            return Ok(answers);
        }
        // One listing per lock serves all waiters on it.
        let listed = session.read(|c| async {
            Ok(join_all(waiting.keys().map(|lock| c.get_children(lock)).collect()).await)
        });
        let listed = listed.await.map_err(|fault| explain(fault, self.url.root()))?;
        for ((lock, waiters), names) in waiting.into_iter().zip(listed) {
            let children = match names {
                // The lock's node is gone, and with it all waiters.
                Err(Fault::NoNode) => continue,
                Err(fault) => Err(explain(fault, &lock)),
                Ok((names, stat)) => {
                    let version = (stat.czxid, stat.cversion);
                    for (i, _) in &waiters {
                        self.claims.listed(renewals[*i].claim.id, version);
                    }
                    self.order(&lock, names)
                }
            };
            let children = match children {
                Ok(children) => children,
                Err(error) => {
                    for (i, _) in waiters {
                        answers[i] = self.refuse(session, &renewals[i], started, &error);
                    }
                    continue;
                }
            };
            // The children are ordered once, however many waiters there are.
            let places = children.places();
            for (i, claim_node) in waiters {
                let renew = &renewals[i];
                let renewed = self.renew_waiter(session, renew, started, &claim_node, &places);
                let renewed = renewed.await;
                answers[i] =
                    renewed.unwrap_or_else(|error| self.refuse(session, renew, started, &error));
            }
        }
        Ok(answers)
    }

    /// Renews the waiters on locks where nothing has changed, without a listing. A listing for each
    /// waiter would be as long as the queue.
    async fn let_rest(
        &self,
        session: &Session,
        renewals: &[Renew],
        started: Moment,
        waiting: &mut BTreeMap<String, Vec<(usize, ClaimNode)>>,
        answers: &mut [Renewal],
    ) -> Result<()> {
        let stats = session.read(|c| async {
            Ok(join_all(waiting.keys().map(|lock| c.check_stat(lock)).collect()).await)
        });
        let stats = stats.await.map_err(|fault| explain(fault, self.url.root()))?;
        let mut stats = stats.into_iter();
        waiting.retain(|_, waiters| {
            let Some(Ok(Some(stat))) = stats.next() else { return true };
            let version = (stat.czxid, stat.cversion);
            let rests = |id| self.claims.may_rest(id, version);
            if !waiters.iter().all(|(i, _)| rests(renewals[*i].claim.id)) {
                return true;
            }
            for (i, _) in waiters {
                let Renew { claim, lease } = &renewals[*i];
                let Some((_, NodeState::Waiting(place))) = self.claims.known(claim.id) else {
                    // The claim was granted in the meantime, or given up.
                    let holding = self.renew_holder(session, claim.id, *lease, started);
                    answers[*i] = holding.unwrap_or(Renewal::Lost);
                    continue;
                };
                self.claims.waits(claim, place.ahead, started);
                answers[*i] = Renewal::Waiting(place);
            }
            false
        });
        Ok(())
    }

    /// Returns the result for a waiter on a lock that cannot be used any more. The waiter is lost,
    /// and gets the reason when it joins again. If the error is transient, the heartbeat is
    /// repeated. Claims on other locks are not affected.
    pub(super) fn refuse(
        self: &Arc<Self>,
        session: &Session,
        Renew { claim, lease }: &Renew,
        started: Moment,
        error: &Error,
    ) -> Renewal {
        if error.kind() == ErrorKind::Unreachable {
            return Renewal::unknown(error);
        }
        if self.claims.refuse(claim.id) {
            leasehold_core::telemetry::place_given_up(claim, error);
            self.runtime.spawn(self.clone().give_up(claim.id));
            return Renewal::Lost;
        }
        // The claim was granted in between, and stays a holder.
        self.renew_holder(session, claim.id, *lease, started).unwrap_or(Renewal::Lost)
    }

    /// Returns the result for a claim whose child exists, if it is a holder.
    pub(super) fn renew_holder(
        &self,
        session: &Session,
        id: ClaimId,
        lease: Duration,
        started: Moment,
    ) -> Option<Renewal> {
        let Some((_, NodeState::Holding(token))) = self.claims.known(id) else { return None };
        let holds = self.claims.holds(id, self.clock.now().plus(lease));
        let remaining = Some(self.remaining(session, lease, started));
        holds.then_some(Renewal::Holding { token, remaining })
    }

    pub(super) async fn renew_waiter(
        self: &Arc<Self>,
        session: &Arc<Session>,
        Renew { claim, lease }: &Renew,
        started: Moment,
        claim_node: &ClaimNode,
        places: &Places<'_>,
    ) -> Result<Renewal> {
        let joined = match places.of(&claim_node.node) {
            None => return Ok(Renewal::Lost),
            Some((_, true)) => {
                // The listing may be older than an eviction.
                if self.existing(session, vec![(0, claim_node.clone())]).await?.is_empty() {
                    return Ok(Renewal::Lost);
                }
                let mut claim = claim.clone();
                claim.lease = *lease;
                self.hold(session, &claim, started, claim_node.token)?
            }
            Some((ahead, false)) if self.claims.is_watching(claim.id) => {
                self.claims.waits(claim, ahead, started);
                let token = Some(claim_node.token);
                Joined::Waiting(Place { ahead, head_remaining: None, token })
            }
            Some(_) => match places.position_of(&claim_node.node) {
                Some(position) => self.wait(session, claim, started, position).await?,
                None => return Ok(Renewal::Lost),
            },
        };
        Ok(match joined {
            Joined::Holding { token, remaining } => Renewal::Holding { token, remaining },
            Joined::Waiting(place) => Renewal::Waiting(place),
            Joined::Busy { .. } => Renewal::Lost,
        })
    }

    /// Returns the claims in `open` whose children exist, as a majority has confirmed.
    pub(super) async fn existing(
        &self,
        session: &Session,
        open: Vec<(usize, ClaimNode)>,
    ) -> Result<Vec<(usize, ClaimNode)>> {
        let mut existing = Vec::with_capacity(open.len());
        let mut open = open.into_iter().peekable();
        while open.peek().is_some() {
            let mut bytes = 0;
            let mut some = Vec::new();
            while let Some((i, claim_node)) = open.next_if(|_| bytes < REQUEST_BYTES) {
                bytes += claim_node.lock.len() + claim_node.node.len() + 32;
                some.push((i, claim_node));
            }
            existing.extend(self.checked(session, some).await?);
        }
        Ok(existing)
    }

    pub(super) async fn checked(
        &self,
        session: &Session,
        mut some: Vec<(usize, ClaimNode)>,
    ) -> Result<Vec<(usize, ClaimNode)>> {
        while !some.is_empty() {
            let done = session.write(|c| async {
                let mut writer = c.new_multi_writer();
                for (_, claim_node) in &some {
                    writer.add_check_version(&claim_node.path(), -1)?;
                }
                writer.commit().await
            });
            match done.await {
                Ok(_) => break,
                Err(MultiWriteError::OperationFailed { source: Fault::NoNode, .. }) => {
                    // If one child is gone, others may be too, so all are checked.
                    let paths: Vec<String> = some.iter().map(|(_, s)| s.path()).collect();
                    let found = session.read(|c| async {
                        Ok(join_all(paths.iter().map(|path| c.check_stat(path)).collect()).await)
                    });
                    let found = found.await.map_err(|fault| explain(fault, self.url.root()))?;
                    let mut found = found.into_iter();
                    let mut failed = None;
                    some.retain(|_| match found.next() {
                        Some(Ok(stat)) => stat.is_some(),
                        Some(Err(fault)) => {
                            failed = Some(fault);
                            true
                        }
                        None => true,
                    });
                    if let Some(fault) = failed {
                        return Err(explain(fault, self.url.root()));
                    }
                }
                Err(error) => {
                    let fault = Fault::from(error);
                    if ends_session(&fault) {
                        return Ok(Vec::new());
                    }
                    return Err(explain(fault, self.url.root()));
                }
            }
        }
        Ok(some)
    }
}
