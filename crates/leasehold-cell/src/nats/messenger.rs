//! Messages between clients, which NATS passes on without storing them. Each session has a subject,
//! `leasehold.BUCKET.SESSION`, on which its client is notified of grants. Each grant is one
//! message, regardless of the number of waiters.
//!
//! A message arrives immediately or not at all. After the connection was interrupted, the client
//! polls. A user without permission for these subjects is not notified. A client finds out whether
//! it has the permission by sending a test message to itself when it connects.

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

use crate::cells::{Message, Messenger};

/// Time limit for a client's test message to itself.
const OWN: Duration = Duration::from_secs(1);

/// Events of the connection.
#[derive(Debug, Default)]
pub(super) struct News {
    /// The last permission violation, and when it was reported.
    violation: Mutex<Option<(String, Moment)>>,
    clock: Clock,
    /// Notified when messages may have been lost.
    sender: Mutex<Option<UnboundedSender<Message>>>,
}

impl News {
    /// Handles an event of the connection.
    pub(super) fn send(&self, event: Event) {
        match event {
            Event::Connected => {
                if let Some(sender) = &*locked(&self.sender) {
                    // If the receiver is gone, no client has missed a message.
                    let _ = sender.send(Message::Missed);
                }
            }
            Event::ServerError(ServerError::Other(message)) if message.contains("ermissions") => {
                *locked(&self.violation) = Some((message, self.clock.now()));
            }
            _ => {}
        }
    }

    /// Returns the last permission violation, if it was reported in the last `within`. Ignores
    /// violations by messages between clients, because they do not make other requests fail.
    pub(super) fn take_violation(&self, within: Duration) -> Option<String> {
        let (message, at) = locked(&self.violation).take()?;
        let is_notification = message.contains("\"leasehold.");
        (!is_notification && self.clock.now().since(at) <= within).then_some(message)
    }
}

/// The messages of one client.
pub(super) struct NatsMessenger {
    client: Client,
    news: Arc<News>,
    /// The prefix of the subjects.
    subjects: String,
    runtime: Handle,
    listening: Mutex<Option<AbortHandle>>,
}

impl fmt::Debug for NatsMessenger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsMessenger").field("subjects", &self.subjects).finish_non_exhaustive()
    }
}

impl NatsMessenger {
    pub(super) fn new(client: Client, news: Arc<News>, bucket: &str, runtime: Handle) -> Self {
        let subjects = format!("leasehold.{bucket}.");
        Self { client, news, subjects, runtime, listening: Mutex::default() }
    }

    /// Returns whether this user may send messages and receive them.
    pub(super) async fn are_delivered(&self) -> Result<bool> {
        let name = ClaimId::random()?.to_hex();
        let mut received = self.subscribe(&name).await?;
        self.send(&name, "me".into()).await;
        let received = timeout(OWN, received.next()).await;
        Ok(matches!(received, Ok(Some(_))))
    }

    async fn subscribe(&self, name: &str) -> Result<Subscriber> {
        let subscribed = self.client.subscribe(format!("{}{name}", self.subjects)).await;
        let closed = || Error::new(ErrorKind::Closed, "the connection to NATS was closed");
        subscribed.map_err(|why| closed().with_hint("connect again").with_source(why.to_string()))
    }
}

#[async_trait]
impl Messenger for NatsMessenger {
    async fn listen(&self, name: &str, sender: UnboundedSender<Message>) -> Result<()> {
        let mut messages = self.subscribe(name).await?;
        *locked(&self.news.sender) = Some(sender.clone());
        let listens = self.runtime.spawn(async move {
            while let Some(message) = messages.next().await {
                let text = String::from_utf8_lossy(&message.payload).into_owned();
                if sender.send(Message::Text(text)).is_err() {
                    return;
                }
            }
        });
        let before = locked(&self.listening).replace(listens.abort_handle());
        before.iter().for_each(AbortHandle::abort);
        Ok(())
    }

    async fn send(&self, name: &str, what: String) {
        // If the message is lost, the waiter finds out at its next poll.
        let _ = self.client.publish(format!("{}{name}", self.subjects), what.into()).await;
    }
}

impl Drop for NatsMessenger {
    fn drop(&mut self) {
        locked(&self.listening).iter().for_each(AbortHandle::abort);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_recent_bucket_violation_explains_a_missing_reply() {
        let violation_after = |message: &str| {
            let news = News::default();
            news.send(Event::ServerError(ServerError::Other(message.into())));
            news
        };
        let bucket = r#"Permissions Violation for Publish to "$KV.locks.leasehold.l.a""#;
        let within = Duration::from_secs(60);
        assert_eq!(violation_after(bucket).take_violation(within).as_deref(), Some(bucket));
        let refused = r#"Permissions Violation for Publish to "leasehold.locks.0123""#;
        assert_eq!(violation_after(refused).take_violation(within), None);
        let news = violation_after(bucket);
        while news.clock.now().since(locked(&news.violation).as_ref().unwrap().1).is_zero() {}
        assert_eq!(news.take_violation(Duration::ZERO), None, "an old violation was returned");
    }
}
