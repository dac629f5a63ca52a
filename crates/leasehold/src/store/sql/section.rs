//! The slow path: one lock's queue, worked on with its row locked.
//!
//! A **section** is a short transaction: it locks the lock's row, reads the clock and the claims into
//! a [`Queue`](crate::queue::Queue), lets that decide, writes back what changed, and tells the clients of those that were
//! granted. If we die in it, the database undoes it.

use std::collections::HashSet;

use super::fault::Failure;
use super::loaded::{self, Loaded, Reach, Write};
use super::wire::Wire;
use super::{LISTENS, Shared};
use crate::claim::{Claim, ClaimId, Token};
use crate::name::Name;
use crate::store::Signal;

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
        let mut writes = loaded.changes(&self.sql, name);
        for (id, token, session) in &granted {
            if *session != self.session && session.starts_with(LISTENS) {
                writes.extend(self.notice(session, *id, *token));
            }
        }
        loaded::write(wire, &self.sql, writes).await?;
        wire.raw("COMMIT").await?;
        for (id, token, _) in granted {
            self.waiters.tell(id, Signal::Granted(token));
        }
        Ok(Some(done))
    }

    /// Those that the section granted: claim, token, client.
    fn granted(&self, loaded: &mut Loaded) -> Vec<(ClaimId, Token, String)> {
        let fresh: HashSet<ClaimId> = loaded.queue.take_fresh_grants().into_iter().collect();
        let new = loaded.queue.entries().filter(|e| fresh.contains(&e.id));
        new.map(|e| (e.id, e.token, e.session.clone())).collect()
    }

    /// What tells another client of a grant, where that can be done.
    #[cfg_attr(not(feature = "postgres"), allow(unused_variables))]
    fn notice(&self, session: &str, id: ClaimId, token: Token) -> Option<Write<'_>> {
        #[cfg(feature = "postgres")]
        {
            let message = super::postgres::message(id, token);
            Some((&self.sql.notify, vec![session.into(), message.into()]))
        }
        #[cfg(not(feature = "postgres"))]
        None
    }
}
