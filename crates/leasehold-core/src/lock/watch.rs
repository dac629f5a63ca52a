//! Reports the state of a hold to tasks that do not own its guard.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::client::lease::{Lease, State};
use crate::types::error::{Error, ErrorKind, Result};
use crate::types::name::Name;
use crate::types::token::{FencingToken, Token};

/// Reports the state of one hold. Cheap to clone, and created by
/// [`Hold::watch`](crate::Hold::watch).
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// use leasehold::State;
/// let guard = locks.mutex("order:42").lock().await?;
/// let mut watch = guard.watch();
/// watch.wait_until_held().await?; // returns while held, waits while at risk, fails when lost
/// let change = tokio::spawn(async move { watch.changed().await });
/// guard.release().await?;
/// assert_eq!(change.await.unwrap(), State::Released);
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # use std::time::Duration;
/// # let locks = leasehold::connect("memory:").await?;
/// use leasehold::State;
/// let guard = locks.mutex("order:42").lock().await?;
/// let watch = guard.watch(); // for a task that does not own the guard
/// assert_eq!((watch.name(), watch.grant()), (guard.name(), guard.grant()));
/// assert_eq!(watch.fencing_token(), Some(guard.token()));
/// watch.ensure(Duration::from_secs(1))?; // certain, even if the store fails
/// assert!(watch.remaining() > Duration::from_secs(1));
/// guard.release().await?;
/// assert_eq!(watch.state(), State::Released);
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Watch {
    lease: Arc<Lease>,
    changes: watch::Receiver<State>,
}

/// Checks that the lock is certainly held for at least `min`.
pub(crate) fn ensure(lease: &Lease, min: Duration) -> Result<()> {
    let left = lease.remaining();
    let error = match lease.state() {
        State::Lost(reason) => Error::lost(reason),
        State::Released => Error::new(ErrorKind::Closed, "the lock was released"),
        State::Held | State::AtRisk(_) if left >= min && !left.is_zero() => return Ok(()),
        State::Held | State::AtRisk(_) => {
            let what = format!("only {left:?} of the lease is left, but {min:?} is required");
            Error::new(ErrorKind::AtRisk, what).with_hint("wait for a renewal, or stop")
        }
    };
    Err(error.with_operation("ensure").with_lock(&lease.claim.name))
}

impl Watch {
    pub(crate) fn new(lease: Arc<Lease>) -> Self {
        let changes = lease.subscribe();
        Self { lease, changes }
    }

    /// Returns the number of the grant; see [`Hold::grant`](crate::Hold::grant).
    pub fn grant(&self) -> Token {
        self.lease.token
    }

    /// Returns the fencing token, or `None` for a reader or a permit; see
    /// [`Hold::fencing_token`](crate::Hold::fencing_token).
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.lease.fencing_token()
    }

    /// Returns the name of the lock.
    pub fn name(&self) -> &Name {
        &self.lease.claim.name
    }

    /// Checks that the lock is certainly held for at least `min`, like
    /// [`Hold::ensure`](crate::Hold::ensure). No I/O.
    ///
    /// # Errors
    /// - [`Lost`](ErrorKind::Lost): the lock was lost.
    /// - [`AtRisk`](ErrorKind::AtRisk): the lock is held, but less than `min` of its lease is left.
    /// - [`Closed`](ErrorKind::Closed): the lock was released.
    pub fn ensure(&self, min: Duration) -> Result<()> {
        ensure(&self.lease, min)
    }

    /// Returns the state of the hold. No I/O.
    pub fn state(&self) -> State {
        self.lease.state()
    }

    /// Returns how much longer the lock is certainly held even if no further renewal succeeds. No
    /// I/O.
    pub fn remaining(&self) -> Duration {
        self.lease.remaining()
    }

    /// Waits while the hold is [`AtRisk`](State::AtRisk), and returns once it is
    /// [`Held`](State::Held).
    ///
    /// Call it between two steps of work that must pause while the hold is uncertain. It returns
    /// immediately while the hold is `Held`. No I/O. Works in any executor.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    ///
    /// # Errors
    /// - [`Lost`](ErrorKind::Lost): the lock is lost, or was lost during the wait.
    /// - [`Closed`](ErrorKind::Closed): the lock was released.
    pub async fn wait_until_held(&mut self) -> Result<()> {
        loop {
            // The current state is published, read and marked as seen. So any later publication is
            // reported as a change, and `changed` misses none.
            self.lease.publish();
            let seen = *self.changes.borrow_and_update();
            let error = match seen {
                State::Held => return Ok(()),
                State::AtRisk(_) => {
                    self.changed().await;
                    continue;
                }
                State::Lost(reason) => Error::lost(reason),
                State::Released => Error::new(ErrorKind::Closed, "the lock was released"),
            };
            return Err(error.with_operation("wait_until_held").with_lock(&self.lease.claim.name));
        }
    }

    /// Waits until the state differs from the last one seen, and returns the new state.
    ///
    /// After [`State::Lost`] or [`State::Released`] it never resolves again.
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing. No change is missed.
    pub async fn changed(&mut self) -> State {
        match self.changes.changed().await {
            Ok(()) => *self.changes.borrow_and_update(),
            // `self.lease` owns the sender, so the channel cannot be closed.
            Err(_) => std::future::pending().await,
        }
    }
}
