//! How clients tell each other: messages that NATS passes on and keeps nowhere. Each session has a subject
//! of its own, `leasehold.BUCKET.SESSION`, on which its client is told what it is let into: one message for
//! each, however many wait.
//!
//! They arrive at once, or not at all: if the connection was gone meanwhile, the client looks. A user who may not
//! use these subjects is not told anything, which is found out as it connects: it rings its own bell.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_nats::{Client, Event, ServerError, Subscriber};
use async_trait::async_trait;
use futures_util::StreamExt;
use leasehold_core::kit::locked;
use leasehold_core::{ClaimId, Clock, Error, ErrorKind, Moment, Result};
use tokio::runtime::Handle;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::cells::{Bells, Heard};

/// How long one's own bell may take.
const OWN: Duration = Duration::from_secs(1);

/// What the connection tells of itself.
#[derive(Debug, Default)]
pub(super) struct News {
    /// The last thing that the user was not allowed to do, and when.
    violation: Mutex<Option<(String, Moment)>>,
    clock: Clock,
    /// Who is to know that something may have been missed.
    heard: Mutex<Option<UnboundedSender<Heard>>>,
}

impl News {
    /// Something happened to the connection.
    pub(super) fn tell(&self, event: Event) {
        match event {
            Event::Connected => {
                if let Some(heard) = &*locked(&self.heard) {
                    // Nobody listens any more: then nobody has missed anything.
                    let _ = heard.send(Heard::Missed);
                }
            }
            Event::ServerError(ServerError::Other(said)) if said.contains("ermissions") => {
                *locked(&self.violation) = Some((said, self.clock.now()));
            }
            _ => {}
        }
    }

    /// What the user was not allowed to do within this time. What it may not do with bells refuses nothing else.
    pub(super) fn take_violation(&self, within: Duration) -> Option<String> {
        let (said, at) = locked(&self.violation).take()?;
        let is_bell = said.contains("\"leasehold.");
        (!is_bell && self.clock.now().since(at) <= within).then_some(said)
    }
}

/// The bells of one client.
pub(super) struct NatsBells {
    client: Client,
    news: Arc<News>,
    /// What the subjects begin with.
    subjects: String,
    runtime: Handle,
    listening: Mutex<Option<AbortHandle>>,
}

impl fmt::Debug for NatsBells {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsBells").field("subjects", &self.subjects).finish_non_exhaustive()
    }
}

impl NatsBells {
    pub(super) fn new(client: Client, news: Arc<News>, bucket: &str, runtime: Handle) -> Self {
        let subjects = format!("leasehold.{bucket}.");
        Self { client, news, subjects, runtime, listening: Mutex::default() }
    }

    /// Whether we may ring, and hear it.
    pub(super) async fn are_heard(&self) -> Result<bool> {
        let name = ClaimId::random()?.to_hex();
        let mut heard = self.subscribe(&name).await?;
        self.ring(&name, "me".into()).await;
        let heard = timeout(OWN, heard.next()).await;
        Ok(matches!(heard, Ok(Some(_))))
    }

    async fn subscribe(&self, name: &str) -> Result<Subscriber> {
        let subscribed = self.client.subscribe(format!("{}{name}", self.subjects)).await;
        let closed = || Error::new(ErrorKind::Closed, "the connection to NATS was closed");
        subscribed.map_err(|why| closed().with_hint("connect again").because(why.to_string()))
    }
}

#[async_trait]
impl Bells for NatsBells {
    async fn listen(&self, name: &str, heard: UnboundedSender<Heard>) -> Result<()> {
        let mut messages = self.subscribe(name).await?;
        *locked(&self.news.heard) = Some(heard.clone());
        let listens = self.runtime.spawn(async move {
            while let Some(message) = messages.next().await {
                let said = String::from_utf8_lossy(&message.payload).into_owned();
                if heard.send(Heard::Said(said)).is_err() {
                    return;
                }
            }
        });
        let before = locked(&self.listening).replace(listens.abort_handle());
        before.iter().for_each(AbortHandle::abort);
        Ok(())
    }

    async fn ring(&self, name: &str, what: String) {
        // Not rung, who waits finds out by itself.
        let _ = self.client.publish(format!("{}{name}", self.subjects), what.into()).await;
    }
}

impl Drop for NatsBells {
    fn drop(&mut self) {
        locked(&self.listening).iter().for_each(AbortHandle::abort);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_fresh_violation_of_the_bucket_explains_a_missing_answer() {
        let told = |said: &str| {
            let news = News::default();
            news.tell(Event::ServerError(ServerError::Other(said.into())));
            news
        };
        let bucket = r#"Permissions Violation for Publish to "$KV.locks.leasehold.l.a""#;
        let within = Duration::from_secs(60);
        assert_eq!(told(bucket).take_violation(within).as_deref(), Some(bucket));
        let bell = r#"Permissions Violation for Publish to "leasehold.locks.0123""#;
        assert_eq!(told(bell).take_violation(within), None);
        let news = told(bucket);
        while news.clock.now().since(locked(&news.violation).as_ref().unwrap().1).is_zero() {}
        assert_eq!(news.take_violation(Duration::ZERO), None, "it is old");
    }
}
