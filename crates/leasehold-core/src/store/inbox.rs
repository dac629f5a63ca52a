//! The notifications of one waiter, kept until it polls. So no notification is lost between the
//! result "waiting" and [`changed`](super::Store::changed). A grant stays until it is cleared. A
//! notification to poll is delivered once.

use std::sync::Mutex;

use tokio::sync::Notify;

use crate::types::answer::Signal;
use crate::types::token::Token;
use crate::util::locked::locked;

/// The notifications of one waiter.
#[derive(Debug, Default)]
pub struct Inbox {
    pending: Mutex<Pending>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct Pending {
    granted: Option<Token>,
    ask: bool,
}

impl Inbox {
    /// Delivers a notification. The same grant is delivered once.
    pub fn notify(&self, signal: Signal) {
        {
            let mut pending = locked(&self.pending);
            match signal {
                Signal::Granted(token) if pending.granted == Some(token) => return,
                Signal::Granted(token) => pending.granted = Some(token),
                Signal::Ask => pending.ask = true,
            }
        }
        self.wake.notify_one();
    }

    /// Returns the grant that was delivered, if any.
    pub fn granted(&self) -> Option<Token> {
        locked(&self.pending).granted
    }

    /// Removes the notification to poll, because the claim is being polled.
    pub fn asked(&self) {
        locked(&self.pending).ask = false;
    }

    /// Removes all notifications, because the claim waits in a new position.
    pub fn clear(&self) {
        *locked(&self.pending) = Pending::default();
    }

    /// Waits for the next notification and returns it.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing. No notification is missed.
    pub async fn news(&self) -> Signal {
        loop {
            // Checked before waiting and after each wake-up, so a notification from before this
            // call is found too.
            {
                let mut pending = locked(&self.pending);
                if let Some(token) = pending.granted {
                    return Signal::Granted(token);
                }
                if std::mem::take(&mut pending.ask) {
                    return Signal::Ask;
                }
            }
            self.wake.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn now(inbox: &Inbox) -> Option<Signal> {
        match pin!(inbox.news()).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(signal) => Some(signal),
            Poll::Pending => None,
        }
    }

    #[test]
    fn inbox_keeps_a_grant_and_delivers_a_hint_once() {
        let (inbox, token) = (Inbox::default(), Token::new(7).unwrap());
        assert_eq!(now(&inbox), None);
        inbox.notify(Signal::Ask);
        assert_eq!((now(&inbox), now(&inbox)), (Some(Signal::Ask), None));
        inbox.notify(Signal::Ask);
        inbox.asked();
        assert_eq!(now(&inbox), None);
        inbox.notify(Signal::Granted(token));
        assert_eq!(inbox.granted(), Some(token));
        assert_eq!(
            (now(&inbox), now(&inbox)),
            (Some(Signal::Granted(token)), Some(Signal::Granted(token)))
        );
        inbox.clear();
        assert_eq!((inbox.granted(), now(&inbox)), (None, None));
    }
}
