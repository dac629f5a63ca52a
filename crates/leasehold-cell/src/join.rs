//! Joining a queue, and polling the state of a claim.

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::queue::Queue;
use leasehold_core::store::{Joined, Mode, mismatch};
use leasehold_core::{Claim, Error, ErrorKind, Moment, Result};

use crate::last_writes::Guess;
use crate::session::Session;
use crate::shared::{ClaimEffect, Fit, Proof, QueueEdit, Shared};

impl Shared {
    pub(crate) async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let longest = claim.lease.max(claim.waiter_lease);
        let _gate = self.claims.enter(claim, self.clock.now().plus(longest)).await;
        // A repeated call proves that the client lives, so it extends the claim.
        self.claims.extend(claim.id, self.clock.now(), longest);
        if mode == Mode::Try
            && let Some(busy) = self.is_taken(claim).await?
        {
            if !self.claims.is_doubtful(claim.id) && !self.claims.is_given_up(claim.id) {
                self.claims.forget(claim.id);
            }
            return Ok(busy);
        }
        loop {
            if self.claims.is_given_up(claim.id) {
                // The claim was given up, but may still be in the queue.
                self.take_out(&claim.name, claim.id).await?;
                self.claims.begin_anew(claim.id, self.clock.now().plus(longest));
            }
            if let Some(joined) = self.join_once(claim, mode, longest).await? {
                return Ok(joined);
            }
        }
    }

    /// Returns [`Joined::Busy`] if other clients hold the lock. This check is only for clients
    /// without a session, on systems where each write is expensive, so that a failed try writes
    /// nothing. A client without a session has no claim in any queue.
    async fn is_taken(&self, claim: &Claim) -> Result<Option<Joined>> {
        let is_dear = !self.cells.system().forgets && self.cells.messenger().is_none();
        if !is_dear || self.sessions.current().is_some() {
            return Ok(None);
        }
        let mut seen = self.read_queue(&claim.name).await?;
        let is_ours = |queue: &Queue| queue.entries().any(|entry| entry.id == claim.id);
        // The claim may belong to an earlier session of this client that has ended.
        if is_ours(&seen.queue) || self.settle(&mut seen.queue, Proof::Shown).await? {
            return Ok(None);
        }
        let joined = seen.queue.join(claim, Mode::Try, self.time(), "");
        Ok(joined.ok().filter(|joined| matches!(joined, Joined::Busy { .. })))
    }

    /// Joins once. The caller has the claim's gate. Returns `None` if the claim was given up in the
    /// meantime.
    async fn join_once(
        &self,
        claim: &Claim,
        mode: Mode,
        longest: Duration,
    ) -> Result<Option<Joined>> {
        let session = self.session_for(longest).await?;
        if let Some(pause) = self.last_writes.others_first(&claim.name, self.clock.now()) {
            self.sleep(pause.mul_f64(0.5 + self.chance())).await;
        }
        let guess = self.last_writes.guess(&claim.name, Guess::Free, Queue::is_empty);
        let about = ClaimEffect::Joins(claim.id, Fit::of(claim));
        let joined = self
            .change(&claim.name, about, guess, |queue| self.stand(queue, claim, mode, &session.id));
        let joined = joined.await??;
        Ok(self.noted(claim, &session, joined))
    }

    /// Returns a session that certainly lives for at least `lease`.
    async fn session_for(&self, lease: Duration) -> Result<Arc<Session>> {
        loop {
            let session = self.sessions.open(|id| self.keys.session(id)).await?;
            if self.sessions.vouch(&session, lease).await? {
                return Ok(session);
            }
            // The session has turned out to have ended, so the next iteration opens a new one.
        }
    }

    /// Adds the claim to the queue, or finds it there.
    fn stand(
        &self,
        queue: &mut Queue,
        claim: &Claim,
        mode: Mode,
        session: &str,
    ) -> QueueEdit<Result<Joined>> {
        let there = queue.entries().find(|entry| entry.id == claim.id);
        let (is_there, is_another) =
            (there.is_some(), there.is_some_and(|entry| entry.session != session));
        if is_another {
            // The claim's former session has ended, so the claim has lost its queue position.
            queue.retain(self.time().now, |entry| entry.id != claim.id);
            return QueueEdit::Write(Ok(Joined::Busy { holders: Vec::new() }));
        }
        let (most, there) = (self.cells.system().crowd, queue.entries().len());
        if !is_there && mode == Mode::Wait && there >= most {
            let what = format!(
                "the queue of this lock is full: {there} clients hold it or wait for it, and this store takes {most}. \
                 Try again when fewer wait, or use a store that notifies waiters, such as redis: or postgres:"
            );
            return QueueEdit::Unchanged(Err(Error::new(ErrorKind::Full, what)));
        }
        match queue.join(claim, mode, self.time(), session) {
            Err(m) => QueueEdit::Unchanged(Err(mismatch(claim, m.kind, m.capacity))),
            Ok(joined @ Joined::Busy { .. }) => QueueEdit::Unchanged(Ok(joined)),
            // A write of this claim that is still under way is harmless, because it writes the same
            // queue position.
            Ok(joined) if is_there => QueueEdit::Unchanged(Ok(joined)),
            Ok(joined) => QueueEdit::Write(Ok(joined)),
        }
    }

    /// Records the result of a join, and limits the remaining time in it to what is certain.
    /// Returns `None` if the claim was given up.
    fn noted(&self, claim: &Claim, session: &Session, joined: Joined) -> Option<Joined> {
        let now = self.clock.now();
        let stands = |ends, ahead| self.claims.stands(claim.id, &session.id, ends, ahead);
        match joined {
            Joined::Holding { token, .. } => stands(now.plus(claim.lease), None).then(|| {
                let remaining = Some(self.remaining(claim, session, now));
                Joined::Holding { token, remaining }
            }),
            Joined::Waiting(place) => stands(now.plus(claim.waiter_lease), Some(place.ahead))
                .then_some(Joined::Waiting(place)),
            Joined::Busy { holders } => {
                // The claim is not in the queue, unless a write that is under way adds it.
                if !self.claims.is_doubtful(claim.id) {
                    self.claims.forget(claim.id);
                }
                Some(Joined::Busy { holders })
            }
        }
    }

    /// Returns how long the hold is certainly valid.
    pub(crate) fn remaining(&self, claim: &Claim, session: &Session, now: Moment) -> Duration {
        let ends = self.claims.ends(claim.id).unwrap_or(now);
        ends.min(session.certain()).since(now)
    }
}
