//! The slow path: one lock's queue, worked on with its row locked.
//!
//! A **section** is a short transaction: it locks the lock's row, reads the clock and the claims into
//! a [`Queue`](leasehold_core::queue::Queue), lets that decide, and writes back what changed. If we die in it, the database
//! undoes it. When it is committed, the clients of those that were granted are told: the server does
//! both one after the other, as it reads them from one message, so that dying here loses no news but
//! with the server. News that is lost all the same (the server died in between) is made good by the
//! waiters' heartbeats.

use std::collections::HashSet;

use super::fault::{self, Failure};
use super::loaded::{self, Loaded, Reach};
use super::shared::{LISTENS, Shared};
use super::wire::Wire;
use leasehold_core::store::Signal;
use leasehold_core::{Claim, ClaimId, Name, Token};

impl Shared {
    /// The slow path: works on the queue of `name` with its row locked. With `create`, makes the
    /// row if there is none. `work` is done again, on all of the queue, where the part of it in
    /// `reach` was not enough.
    pub(super) async fn section<T>(
        &self,
        wire: &mut dyn Wire,
        name: &Name,
        reach: Reach,
        create: Option<&Claim>,
        work: impl Fn(&mut Loaded) -> T + Send,
    ) -> Result<Option<T>, Failure> {
        wire.raw(self.sql.begin).await?;
        let mut loaded = loaded::load(wire, &self.sql, name, reach).await?;
        if let (None, Some(claim)) = (&loaded, create) {
            loaded::create(wire, &self.sql, claim).await?;
            loaded = loaded::load(wire, &self.sql, name, reach).await?;
        }
        let Some(mut loaded) = loaded else {
            wire.raw("COMMIT").await?;
            return Ok(None);
        };
        let mut done = work(&mut loaded);
        // Asking again from far back, a claim that joins is told how many are before it.
        let uncounted = create.is_some() && loaded.has_uncounted();
        if uncounted || !loaded.is_enough() {
            let all = loaded::load(wire, &self.sql, name, Reach::All).await?;
            loaded = all.ok_or(Failure::Conflict(sqlx::Error::RowNotFound))?;
            done = work(&mut loaded);
        }
        let granted = self.granted(&mut loaded);
        loaded::write(wire, &self.sql, loaded.changes(&self.sql, name)).await?;
        self.commit(wire, &granted).await?;
        for (id, token, _) in granted {
            self.waiters.tell(id, Signal::Granted(token));
        }
        Ok(Some(done))
    }

    /// Those that the section granted: claim, token, client.
    fn granted(&self, loaded: &mut Loaded) -> Vec<Granted> {
        let fresh: HashSet<ClaimId> = loaded.queue.take_fresh_grants().into_iter().collect();
        let new = loaded.queue.entries().filter(|e| fresh.contains(&e.id));
        new.map(|e| (e.id, e.token, e.session.clone())).collect()
    }

    /// Commits, and tells other clients of their grants where they listen.
    async fn commit(&self, wire: &mut dyn Wire, granted: &[Granted]) -> Result<(), Failure> {
        #[cfg(feature = "postgres")]
        {
            let elsewhere = |session: &str| session != self.session && session.starts_with(LISTENS);
            let told: Vec<(&str, String)> = granted
                .iter()
                .filter(|(_, _, session)| elsewhere(session))
                .map(|(id, token, session)| {
                    (session.as_str(), super::postgres::message(*id, *token))
                })
                .collect();
            if !told.is_empty() {
                let sql = super::postgres::commit_and_tell(&told);
                return match wire.raw(&sql).await {
                    // Committed, and then there was no room for the news: heartbeats bring it.
                    Err(error) if fault::is_full_of_news(&error) => Ok(()),
                    // Which of the two was undone for others' sake, or cut short? Not to be repeated
                    // as if nothing had been done.
                    Err(error) => Err(Failure::from(error).in_doubt()),
                    Ok(()) => Ok(()),
                };
            }
        }
        Ok(wire.raw("COMMIT").await?)
    }
}

/// Claim, token, client.
type Granted = (ClaimId, Token, String);
