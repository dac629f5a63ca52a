//! The slow path: one lock's queue, worked on with its row locked.
//!
//! A **section** is a short transaction: it locks the lock's row, reads the clock and the claims into a
//! [`Queue`](leasehold_core::queue::Queue), lets that decide, and writes back what changed. On PostgreSQL and
//! MySQL it is two messages: *begin, lock, read*, and *write, commit, tell*. The server does what is in a
//! message one statement after the other and stops at the first that fails, also where a write changes not
//! just the row that it should: so nothing is committed but all of it. If we die in between, the database
//! undoes it. When it is committed, the clients of those that were granted are told, by the same message, so
//! that dying here loses no news but with the server. News that is lost all the same (the server died in
//! between) is made good by the waiters' heartbeats.

use std::collections::{BTreeSet, HashSet};

use super::fault::Failure;
use super::loaded::{self, First, Loaded, Reach};
#[cfg(feature = "postgres")]
use super::session::LISTENS;
use super::shared::Shared;
use super::statements::Write;
use super::url::Dialect;
use super::wire::{Step, Wire};
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
        let mut loaded = loaded::load(wire, &self.sql, name, reach, First::Begin).await?;
        if let (None, Some(claim)) = (&loaded, create) {
            let first = First::Create(claim);
            loaded = loaded::load(wire, &self.sql, name, reach, first).await?;
        }
        let Some(mut loaded) = loaded else {
            wire.raw("COMMIT").await?;
            return Ok(None);
        };
        let mut done = work(&mut loaded);
        // Asking again from far back, a claim that joins is told how many are before it.
        let uncounted = create.is_some() && loaded.has_uncounted();
        if uncounted || !loaded.is_enough() {
            let all = loaded::load(wire, &self.sql, name, Reach::All, First::Again).await?;
            loaded = all.ok_or(Failure::Conflict(sqlx::Error::RowNotFound))?;
            done = work(&mut loaded);
        }
        let granted = self.granted(&mut loaded);
        self.commit(wire, loaded.changes(&self.sql, name), &granted).await?;
        for (id, token, session) in granted {
            #[cfg(feature = "sqlite")]
            self.ring(&session, id, token);
            #[cfg(not(feature = "sqlite"))]
            drop(session);
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

    /// Writes, commits, and tells other clients of their grants where they listen: one message, where
    /// the database can. What comes after the COMMIT may fail: the heartbeats bring the news.
    async fn commit(
        &self,
        wire: &mut dyn Wire,
        writes: Vec<Write<'_>>,
        granted: &[Granted],
    ) -> Result<(), Failure> {
        let mut steps: Vec<Step<'_>> =
            writes.into_iter().map(|(sql, args)| Step::One(sql, args)).collect();
        steps.push(Step::Raw("COMMIT".into()));
        let durable = steps.len();
        let mut news = self.news(granted);
        steps.extend(news.iter().map(|sql| Step::Raw(sql.into())));
        let mut done = Vec::new();
        let mut sent = wire.script(steps, &mut done).await;
        match sent {
            Err(error) if done.len() < durable => return Err(error.into()),
            Ok(()) | Err(_) => drop(news.drain(..done.len() - durable)),
        }
        // Of several, the first that fails keeps the others from being told.
        while let (Err(sqlx::Error::Database(_)), true) = (&sent, news.len() > 1) {
            news.remove(0);
            done.clear();
            sent = wire
                .script(news.iter().map(|sql| Step::Raw(sql.into())).collect(), &mut done)
                .await;
            drop(news.drain(..done.len()));
        }
        Ok(())
    }

    /// What tells other clients of their grants.
    fn news(&self, granted: &[Granted]) -> Vec<String> {
        let elsewhere = granted.iter().filter(|(_, _, session)| *session != self.session);
        match self.dialect {
            #[cfg(feature = "sqlite")]
            Dialect::Sqlite => Vec::new(),
            #[cfg(feature = "postgres")]
            Dialect::Postgres => {
                let told = elsewhere.filter(|(_, _, session)| session.starts_with(LISTENS));
                let told: Vec<(&str, String)> = told
                    .map(|(id, token, session)| {
                        (session.as_str(), super::postgres::message(*id, *token))
                    })
                    .collect();
                super::postgres::telling(&told).into_iter().collect()
            }
            #[cfg(feature = "mysql")]
            Dialect::MySql => {
                let sessions: BTreeSet<&str> = elsewhere.map(|(_, _, s)| s.as_str()).collect();
                sessions.into_iter().filter_map(super::wake::waking).collect()
            }
        }
    }
}

/// Claim, token, client.
type Granted = (ClaimId, Token, String);
