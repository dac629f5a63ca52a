//! The slow path: one lock's queue, worked on with its row locked.
//!
//! A **section** is a short transaction: it locks the lock's row, reads the clock and the claims into
//! a [`Queue`], lets that decide, writes back what changed, and tells the clients of those that were
//! granted. If we die in it, the database undoes it.

use std::collections::HashSet;

use super::fault::Failure;
use super::loaded::{self, Loaded};
use super::wire::Wire;
use super::{LISTENS, Shared};
use crate::claim::{Claim, ClaimId, Token};
use crate::name::Name;
use crate::queue::Queue;
use crate::store::Signal;

impl Shared {
    /// The slow path: works on the queue of `name` with its row locked. With `create`, makes the
    /// row if there is none.
    pub(super) async fn section<T>(
        &self,
        wire: &mut dyn Wire,
        name: &Name,
        create: Option<&Claim>,
        work: impl FnOnce(&mut Queue, u64) -> T + Send,
    ) -> Result<Option<T>, Failure> {
        wire.raw(self.sql.begin).await?;
        let mut loaded = loaded::load(wire, &self.sql, name).await?;
        if let (None, Some(claim)) = (&loaded, create) {
            loaded::create(wire, &self.sql, claim).await?;
            loaded = loaded::load(wire, &self.sql, name).await?;
        }
        let Some(mut loaded) = loaded else {
            wire.raw("COMMIT").await?;
            return Ok(None);
        };
        let now = loaded.now;
        let done = work(&mut loaded.queue, now);
        let granted = self.granted(&mut loaded);
        loaded.save(wire, &self.sql, name).await?;
        for (id, token, session) in &granted {
            if *session != self.session && session.starts_with(LISTENS) {
                self.notify(wire, session, *id, *token).await?;
            }
        }
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

    #[cfg_attr(not(feature = "postgres"), allow(unused_variables, clippy::unused_async))]
    async fn notify(
        &self,
        wire: &mut dyn Wire,
        session: &str,
        id: ClaimId,
        token: Token,
    ) -> Result<(), Failure> {
        #[cfg(feature = "postgres")]
        wire.run(
            &self.sql.notify,
            vec![session.into(), super::postgres::message(id, token).into()],
        )
        .await?;
        Ok(())
    }
}
