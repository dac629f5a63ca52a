//! Into the queue, and "and now?".

use std::sync::Arc;
use std::time::Duration;

use leasehold_core::queue::Queue;
use leasehold_core::store::{Joined, Mode, mismatch};
use leasehold_core::{Claim, Error, ErrorKind, Moment, Result};

use crate::known::Guess;
use crate::session::Session;
use crate::shared::{About, Fit, Proof, Shared, Turn};

impl Shared {
    pub(crate) async fn join(&self, claim: &Claim, mode: Mode) -> Result<Joined> {
        let longest = claim.lease.max(claim.waiter_lease);
        let _gate = self.claims.enter(claim, self.clock.now().plus(longest)).await;
        // Who asks again lives.
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
                // Its place is over, and may still be there.
                self.take_out(&claim.name, claim.id).await?;
                self.claims.begin_anew(claim.id, self.clock.now().plus(longest));
            }
            if let Some(joined) = self.join_once(claim, mode, longest).await? {
                return Ok(joined);
            }
        }
    }

    /// Whether others hold it, for a client that has no session yet, where each write has its price: a try in vain
    /// writes nothing. No claim of this client stands anywhere then.
    async fn is_taken(&self, claim: &Claim) -> Result<Option<Joined>> {
        let is_dear = !self.cells.system().forgets && self.cells.bells().is_none();
        if !is_dear || self.sessions.current().is_some() {
            return Ok(None);
        }
        let mut seen = self.look(&claim.name).await?;
        let is_ours = |queue: &Queue| queue.entries().any(|entry| entry.id == claim.id);
        // Another session of ours, which is over.
        if is_ours(&seen.queue) || self.settle(&mut seen.queue, Proof::Shown).await? {
            return Ok(None);
        }
        let joined = seen.queue.join(claim, Mode::Try, self.time(), "");
        Ok(joined.ok().filter(|joined| matches!(joined, Joined::Busy { .. })))
    }

    /// With the gate of the claim in hand. `None`: it was given up meanwhile.
    async fn join_once(
        &self,
        claim: &Claim,
        mode: Mode,
        longest: Duration,
    ) -> Result<Option<Joined>> {
        let session = self.session_for(longest).await?;
        if let Some(pause) = self.known.others_first(&claim.name, self.clock.now()) {
            self.sleep(pause.mul_f64(0.5 + self.chance())).await;
        }
        let guess = self.known.guess(&claim.name, Guess::Free, Queue::is_empty);
        let about = About::Joins(claim.id, Fit::of(claim));
        let joined = self
            .change(&claim.name, about, guess, |queue| self.stand(queue, claim, mode, &session.id));
        let joined = joined.await??;
        Ok(self.noted(claim, &session, joined))
    }

    /// One that lives for as long as this.
    async fn session_for(&self, lease: Duration) -> Result<Arc<Session>> {
        loop {
            let session = self.sessions.open(|id| self.keys.session(id)).await?;
            if self.sessions.vouch(&session, lease).await? {
                return Ok(session);
            }
            // Its end was found out just now: the next one is another.
        }
    }

    /// Puts the claim into the queue, or finds it there.
    fn stand(
        &self,
        queue: &mut Queue,
        claim: &Claim,
        mode: Mode,
        session: &str,
    ) -> Turn<Result<Joined>> {
        let there = queue.entries().find(|entry| entry.id == claim.id);
        let (is_there, is_another) =
            (there.is_some(), there.is_some_and(|entry| entry.session != session));
        if is_another {
            // The session that it stood under is over, and its place with it.
            queue.retain(self.time().now, |entry| entry.id != claim.id);
            return Turn::Write(Ok(Joined::Busy { holders: Vec::new() }));
        }
        let (most, there) = (self.cells.system().crowd, queue.entries().len());
        if !is_there && mode == Mode::Wait && there >= most {
            let what = format!(
                "the queue of this lock is full: {there} clients hold it or wait for it, and this store takes {most}. \
                 Try again when fewer wait, or use a store that notifies waiters, such as redis: or postgres:"
            );
            return Turn::Told(Err(Error::new(ErrorKind::Full, what)));
        }
        match queue.join(claim, mode, self.time(), session) {
            Err(m) => Turn::Told(Err(mismatch(claim, m.kind, m.capacity))),
            Ok(joined @ Joined::Busy { .. }) => Turn::Told(Ok(joined)),
            // A write that is still under way would be no harm: it is the same place.
            Ok(joined) if is_there => Turn::Told(Ok(joined)),
            Ok(joined) => Turn::Write(Ok(joined)),
        }
    }

    /// Keeps in mind what is told, and tells no more than is certain; nothing, if the claim was given up.
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
                // Nothing of it is there, unless it may yet come.
                if !self.claims.is_doubtful(claim.id) {
                    self.claims.forget(claim.id);
                }
                Some(Joined::Busy { holders })
            }
        }
    }

    /// How long a hold is certain.
    pub(crate) fn remaining(&self, claim: &Claim, session: &Session, now: Moment) -> Duration {
        let ends = self.claims.ends(claim.id).unwrap_or(now);
        ends.min(session.certain()).since(now)
    }
}
