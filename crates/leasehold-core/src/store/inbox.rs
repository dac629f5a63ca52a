//! The notifications of one waiter, kept until it polls. So none is lost between the result
//! "waiting" and [`changed`](super::Store::changed). A grant stays; a notification to poll is
//! delivered once.

use std::sync::Mutex;

use tokio::sync::Notify;

use crate::base::locked::locked;
use crate::words::answer::Signal;
use crate::words::token::Token;

/// The notifications of one waiter.
#[derive(Debug, Default)]
pub struct Inbox {
    told: Mutex<Told>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct Told {
    granted: Option<Token>,
    ask: bool,
}

impl Inbox {
    /// Delivers a notification. The same grant is delivered once.
    pub fn tell(&self, signal: Signal) {
        {
            let mut told = locked(&self.told);
            match signal {
                Signal::Granted(token) if told.granted == Some(token) => return,
                Signal::Granted(token) => told.granted = Some(token),
                Signal::Ask => told.ask = true,
            }
        }
        self.wake.notify_one();
    }

    /// Returns the grant that was delivered, if any.
    pub fn granted(&self) -> Option<Token> {
        locked(&self.told).granted
    }

    /// Removes the notification to poll, because the claim is being polled.
    pub fn asked(&self) {
        locked(&self.told).ask = false;
    }

    /// Removes all notifications, because the claim waits in a new position.
    pub fn clear(&self) {
        *locked(&self.told) = Told::default();
    }

    /// Waits for the next notification and returns it.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing. No notification is missed.
    pub async fn news(&self) -> Signal {
        loop {
            // Looked at after each wake-up, so that what came before this call is found as well.
            {
                let mut told = locked(&self.told);
                if let Some(token) = told.granted {
                    return Signal::Granted(token);
                }
                if std::mem::take(&mut told.ask) {
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
    fn a_grant_stays_told_and_a_hint_is_told_once() {
        let (inbox, token) = (Inbox::default(), Token::new(7).unwrap());
        assert_eq!(now(&inbox), None);
        inbox.tell(Signal::Ask);
        assert_eq!((now(&inbox), now(&inbox)), (Some(Signal::Ask), None));
        inbox.tell(Signal::Ask);
        inbox.asked();
        assert_eq!(now(&inbox), None);
        inbox.tell(Signal::Granted(token));
        assert_eq!(inbox.granted(), Some(token));
        assert_eq!(
            (now(&inbox), now(&inbox)),
            (Some(Signal::Granted(token)), Some(Signal::Granted(token)))
        );
        inbox.clear();
        assert_eq!((inbox.granted(), now(&inbox)), (None, None));
    }
}
