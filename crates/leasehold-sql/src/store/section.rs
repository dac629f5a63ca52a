//! The slow path, which works on one lock's queue with the lock's row locked.
//!
//! A **section** is a short transaction. It locks the lock's row, and reads the clock and the
//! claims into a [`Queue`](leasehold_core::queue::Queue). The queue decides, and the section writes
//! back what changed.
//!
//! On PostgreSQL and MySQL it takes two messages, *begin, lock, read* and *write, commit, notify*.
//! The server executes the statements of a message in order and stops at the first that fails. A
//! write that does not change exactly one row fails too. So either all writes are committed or
//! none. If the client crashes in between, the database rolls back.
//!
//! After the COMMIT, the same message notifies the clients of the granted claims. So a crash of
//! this client loses no notification. If the server crashes in between, the notification is lost,
//! and the waiters' heartbeats find the grants.

#[cfg(feature = "mysql")]
use std::collections::BTreeSet;
use std::collections::HashSet;

use super::fault::Failure;
use super::queue_snapshot::{self, QueueSnapshot, ReadScope, SectionStart};
#[cfg(feature = "postgres")]
use super::session::LISTENS;
use super::shared::Shared;
use super::statements::Write;
use super::url::Dialect;
use super::wire::{Step, Wire};
use leasehold_core::store::Signal;
use leasehold_core::{Claim, ClaimId, Name, Token};

impl Shared {
    /// Runs `work` on the queue of `name` with the lock's row locked, and returns its result. If
    /// the row does not exist, it is created for the claim `create`. Without one, `None` is
    /// returned. `work` is repeated on the whole queue if the part in `scope` was not enough.
    pub(super) async fn section<T>(
        &self,
        wire: &mut dyn Wire,
        name: &Name,
        scope: ReadScope,
        create: Option<&Claim>,
        work: impl Fn(&mut QueueSnapshot) -> T + Send,
    ) -> Result<Option<T>, Failure> {
        let start = SectionStart::Begin;
        let mut loaded = queue_snapshot::load(wire, &self.sql, name, scope, start).await?;
        if let (None, Some(claim)) = (&loaded, create) {
            let start = SectionStart::Create(claim);
            loaded = queue_snapshot::load(wire, &self.sql, name, scope, start).await?;
        }
        let Some(mut loaded) = loaded else {
            wire.raw("COMMIT").await?;
            return Ok(None);
        };
        let mut done = work(&mut loaded);
        // A claim that joins again from far back must learn how many claims are ahead of it.
        let uncounted = create.is_some() && loaded.has_uncounted();
        if uncounted || !loaded.is_enough() {
            let (scope, start) = (ReadScope::All, SectionStart::Again);
            let all = queue_snapshot::load(wire, &self.sql, name, scope, start).await?;
            loaded = all.ok_or(Failure::Conflict(sqlx::Error::RowNotFound))?;
            done = work(&mut loaded);
        }
        let granted = self.granted(&mut loaded);
        self.commit(wire, loaded.changes(&self.sql, name), &granted).await?;
        for (id, token, session) in granted {
            #[cfg(feature = "sqlite")]
            self.notify_grant(&session, id, token);
            #[cfg(not(feature = "sqlite"))]
            drop(session);
            self.waiters.notify(id, Signal::Granted(token));
        }
        Ok(Some(done))
    }

    /// Returns the claims that the section granted.
    fn granted(&self, loaded: &mut QueueSnapshot) -> Vec<Granted> {
        let fresh: HashSet<ClaimId> = loaded.queue.take_fresh_grants().into_iter().collect();
        let new = loaded.queue.entries().filter(|e| fresh.contains(&e.id));
        new.map(|e| (e.id, e.token, e.session.clone())).collect()
    }

    /// Writes, commits, and notifies the other clients that listen. This is one message if the
    /// database supports it. Steps after the COMMIT may fail, and then the heartbeats find the
    /// grants.
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
        // If one of several notifications fails, the ones after it were not sent.
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

    /// Returns the statements that notify other clients of their grants.
    fn news(&self, granted: &[Granted]) -> Vec<String> {
        #[cfg(any(feature = "postgres", feature = "mysql"))]
        let elsewhere = || granted.iter().filter(|(_, _, session)| *session != self.session);
        match self.dialect {
            // The notification FIFOs are written after the COMMIT.
            #[cfg(feature = "sqlite")]
            Dialect::Sqlite => {
                let _ = granted;
                Vec::new()
            }
            #[cfg(feature = "postgres")]
            Dialect::Postgres => {
                let notification =
                    elsewhere().filter(|(_, _, session)| session.starts_with(LISTENS));
                let notification: Vec<(&str, String)> = notification
                    .map(|(id, token, session)| {
                        (session.as_str(), super::postgres::message(*id, *token))
                    })
                    .collect();
                super::postgres::notify_statement(&notification).into_iter().collect()
            }
            #[cfg(feature = "mysql")]
            Dialect::MySql => {
                let sessions: BTreeSet<&str> = elsewhere().map(|(_, _, s)| s.as_str()).collect();
                sessions.into_iter().filter_map(super::mysql::wake::waking).collect()
            }
        }
    }
}

/// A claim that was granted: its ID, its token, and the session of its client.
type Granted = (ClaimId, Token, String);
