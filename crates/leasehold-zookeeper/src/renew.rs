//! Renewing: what stands in this session stands on, as long as the session does. Who waits is told of its
//! turn by what it watches, so a heartbeat looks at the queue only to tell how long it is, and for what a
//! watch does not see: where the lock's node says that nobody has come or gone it does not. One listing
//! for each lock, whatever the number of waiters.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use zookeeper_client::{Error as Fault, MultiWriteError};

use super::claims::{Known, Standing};
use super::fault::{ends_session, explain};
use super::node::Places;
use super::session::Session;
use super::shared::Shared;
use super::together::all_of;
use leasehold_core::store::{Joined, Place, Renew, Renewal};
use leasehold_core::{ClaimId, Error, ErrorKind, Moment, Result};

/// How much of paths goes into one request: the server refuses requests above a megabyte.
const REQUEST_BYTES: usize = 256 * 1024;

impl Shared {
    pub(super) async fn renew(self: Arc<Self>, renewals: Vec<Renew>) -> Result<Vec<Renewal>> {
        let started = self.clock.now();
        self.renew_on(&self.current(), &renewals, started).await
    }

    /// Renews what stands in this session; what does not is lost.
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
        let mut open: Vec<(usize, Standing)> = Vec::with_capacity(renewals.len());
        for (i, renew) in renewals.iter().enumerate() {
            let known = self.claims.known(renew.claim.id);
            let here = known.filter(|(standing, _)| standing.session == session.id());
            open.extend(here.map(|(standing, _)| (i, standing)));
        }
        let open = self.existing(session, open).await?;
        let mut waiting: BTreeMap<String, Vec<(usize, Standing)>> = BTreeMap::new();
        for (i, standing) in open {
            let Renew { claim, lease } = &renewals[i];
            if let Some(holding) = self.renew_holder(session, claim.id, *lease, started) {
                answers[i] = holding;
            } else if let Some((_, Known::Waiting(_))) = self.claims.known(claim.id) {
                waiting.entry(standing.lock.clone()).or_default().push((i, standing));
            }
        }
        if !waiting.is_empty() {
            self.let_rest(session, renewals, started, &mut waiting, &mut answers).await?;
        }
        if waiting.is_empty() {
            return Ok(answers);
        }
        // One listing for each lock, whoever waits there.
        let listed = session.read(|c| async {
            Ok(all_of(waiting.keys().map(|lock| c.get_children(lock)).collect()).await)
        });
        let listed = listed.await.map_err(|fault| explain(fault, self.url.root()))?;
        for ((lock, waiters), names) in waiting.into_iter().zip(listed) {
            let children = match names {
                // Its node is gone, and so are all who waited.
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
            // Ordered once, however many wait here.
            let places = children.places();
            for (i, standing) in waiters {
                let renew = &renewals[i];
                let renewed = self.renew_waiter(session, renew, started, &standing, &places).await;
                answers[i] =
                    renewed.unwrap_or_else(|error| self.refuse(session, renew, started, &error));
            }
        }
        Ok(answers)
    }

    /// Answers those who wait where nothing has changed, without a listing: it would be as long as the
    /// queue, for each that waits in it.
    async fn let_rest(
        &self,
        session: &Session,
        renewals: &[Renew],
        started: Moment,
        waiting: &mut BTreeMap<String, Vec<(usize, Standing)>>,
        answers: &mut [Renewal],
    ) -> Result<()> {
        let stats = session.read(|c| async {
            Ok(all_of(waiting.keys().map(|lock| c.check_stat(lock)).collect()).await)
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
                let Some((_, Known::Waiting(place))) = self.claims.known(claim.id) else {
                    // It was granted meanwhile, or given up.
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

    /// What those hear who wait for a lock that is no good any more: they are lost, and told why when
    /// they join anew. What was not answered is asked again. Who holds or waits elsewhere hears nothing
    /// of it.
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
        // It was granted in between, and holds what it has.
        self.renew_holder(session, claim.id, *lease, started).unwrap_or(Renewal::Lost)
    }

    /// The answer about a claim whose child exists, if it holds.
    pub(super) fn renew_holder(
        &self,
        session: &Session,
        id: ClaimId,
        lease: Duration,
        started: Moment,
    ) -> Option<Renewal> {
        let Some((_, Known::Holding(token))) = self.claims.known(id) else { return None };
        let holds = self.claims.holds(id, self.clock.now().plus(lease));
        let remaining = Some(self.remaining(session, lease, started));
        holds.then_some(Renewal::Holding { token, remaining })
    }

    pub(super) async fn renew_waiter(
        self: &Arc<Self>,
        session: &Arc<Session>,
        Renew { claim, lease }: &Renew,
        started: Moment,
        standing: &Standing,
        places: &Places<'_>,
    ) -> Result<Renewal> {
        let joined = match places.of(&standing.node) {
            None => return Ok(Renewal::Lost),
            Some((_, true)) => {
                let mut claim = claim.clone();
                claim.lease = *lease;
                self.hold(session, &claim, started, standing.token)?
            }
            Some((ahead, false)) if self.claims.is_listening(claim.id) => {
                self.claims.waits(claim, ahead, started);
                let token = Some(standing.token);
                Joined::Waiting(Place { ahead, head_remaining: None, token })
            }
            Some(_) => match places.stand(&standing.node) {
                Some(stand) => self.wait(session, claim, started, stand).await?,
                None => return Ok(Renewal::Lost),
            },
        };
        Ok(match joined {
            Joined::Holding { token, remaining } => Renewal::Holding { token, remaining },
            Joined::Waiting(place) => Renewal::Waiting(place),
            Joined::Busy { .. } => Renewal::Lost,
        })
    }

    /// Those of `open` whose children exist, by a majority's word.
    pub(super) async fn existing(
        &self,
        session: &Session,
        open: Vec<(usize, Standing)>,
    ) -> Result<Vec<(usize, Standing)>> {
        let mut existing = Vec::with_capacity(open.len());
        let mut open = open.into_iter().peekable();
        while open.peek().is_some() {
            let mut bytes = 0;
            let mut some = Vec::new();
            while let Some((i, standing)) = open.next_if(|_| bytes < REQUEST_BYTES) {
                bytes += standing.lock.len() + standing.node.len() + 32;
                some.push((i, standing));
            }
            existing.extend(self.checked(session, some).await?);
        }
        Ok(existing)
    }

    pub(super) async fn checked(
        &self,
        session: &Session,
        mut some: Vec<(usize, Standing)>,
    ) -> Result<Vec<(usize, Standing)>> {
        while !some.is_empty() {
            let done = session.write(|c| async {
                let mut writer = c.new_multi_writer();
                for (_, standing) in &some {
                    writer.add_check_version(&standing.path(), -1)?;
                }
                writer.commit().await
            });
            match done.await {
                Ok(_) => break,
                Err(MultiWriteError::OperationFailed { source: Fault::NoNode, .. }) => {
                    // One is gone, and where one is others may be: all are looked at.
                    let paths: Vec<String> = some.iter().map(|(_, s)| s.path()).collect();
                    let found = session.read(|c| async {
                        Ok(all_of(paths.iter().map(|path| c.check_stat(path)).collect()).await)
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
