//! The value that means "held".

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::client::ask::renew_one;
use crate::client::core::Core;
use crate::client::lease::{Granted, Lease, State};
use crate::client::telemetry;
use crate::store::Store;
use crate::words::answer::Renewal;
use crate::words::claim::Kind;
use crate::words::error::{Error, ErrorKind, LostReason, Result};
use crate::words::limits::{DEFAULT_LEASE, request_timeout};
use crate::words::name::Name;
use crate::words::sequencer::Sequencer;
use crate::words::token::Token;

/// How long the first answer to a release is waited for, at most; the next one twice as long.
const SAID_AGAIN: Duration = Duration::from_secs(1);

/// The result of a [release](Guard::release). In each case, this client no longer holds the lock,
/// and the caller has nothing left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Released {
    /// The store has released the lock. The next waiter may already hold it.
    Now,
    /// The store did not answer. The client retries in the background. If that fails, the hold ends
    /// when its lease expires, and waiters wait until then.
    Owed,
    /// Another guard of the same [`Owner`](crate::Owner) still holds the lock. The last guard
    /// releases it.
    Shared,
}

/// A held lock. Dropping the guard releases the lock in the background; [`release`](Self::release)
/// also reports whether that succeeded.
///
/// A guard never claims more than it knows. [`is_held`](Self::is_held) compares this machine's boot
/// clock with a deadline, and returns `false` *before* any other client can acquire the lock. But
/// the guard cannot stop your code. Check the [token](Self::token) at the resource, or work inside
/// [`run`](crate::Mutex::run), which cancels the work when the lock is lost.
///
/// In a forked child process, a guard of the parent is inert: it is not held, and dropping it
/// releases nothing.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # use std::time::Duration;
/// # let locks = leasehold::connect("memory:").await?;
/// let guard = locks.mutex("order:42").lock().await?;
/// // Each write carries the token of its hold, and the resource rejects stale ones.
/// println!("write, token {}", guard.token());
/// // Before a step that cannot be undone, check that enough of the lease is left.
/// guard.ensure(Duration::from_secs(2))?;
/// guard.release().await?;
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[must_use = "the lock is released when the guard is dropped"]
pub struct Guard {
    hold: Arc<Hold>,
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("name", self.name())
            .field("token", &self.token())
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

impl Guard {
    pub(crate) fn new(hold: Hold) -> Self {
        Self { hold: Arc::new(hold) }
    }

    /// Another guard of the same hold: the lock is released with the last of them.
    pub(crate) fn share(hold: Arc<Hold>) -> Self {
        Self { hold }
    }

    pub(crate) fn hold(&self) -> &Arc<Hold> {
        &self.hold
    }

    /// The store that keeps this hold: see [`kit`](crate::kit).
    pub(crate) fn store(&self) -> &dyn Store {
        &*self.hold.core.store
    }

    pub(crate) fn core(&self) -> Arc<Core> {
        self.hold.core.clone()
    }

    pub(crate) fn lease(&self) -> &Lease {
        &self.hold.lease
    }

    /// Returns the fencing token of this hold. Pass it to the resource that the lock protects.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let lock = locks.mutex("a");
    /// let first = lock.lock().await?;
    /// let token = first.token();
    /// first.release().await?;
    /// assert!(lock.lock().await?.token() > token);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn token(&self) -> Token {
        self.lease().token
    }

    /// Returns this hold as a printable string, which others can [check](crate::Leasehold::check)
    /// at the store. No I/O.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let guard = locks.mutex("a").lock().await?;
    /// let shown = guard.sequencer().to_string(); // sent to another program, which checks it:
    /// locks.check(&shown.parse()?).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn sequencer(&self) -> Sequencer {
        let (name, side) = (self.name().clone(), self.lease().side());
        Sequencer::new(name, side, self.token(), self.hold.core.identity.clone())
    }

    /// Returns the name of the lock.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// assert_eq!(locks.mutex("a").lock().await?.name().as_str(), "a");
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn name(&self) -> &Name {
        &self.lease().claim.name
    }

    /// Returns the kind of the lock.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// assert_eq!(locks.mutex("a").lock().await?.kind(), leasehold::Kind::Mutex);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn kind(&self) -> Kind {
        self.lease().claim.kind
    }

    /// Returns the number of permits that are held (1 for a mutex).
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// assert_eq!(locks.semaphore("s", 3).acquire_many(2).await?.permits(), 2);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn permits(&self) -> u32 {
        self.lease().weight.now()
    }

    /// Returns how many replicas of the store had the grant when it was made, if the store waits
    /// for replicas (`redis:` with `replicas=N`). Otherwise, and after the release, `None`. No I/O.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let guard = locks.mutex("order:42").lock().await?;
    /// assert_eq!(guard.replicas(), None); // of `redis://host?replicas=1` it is Some(1)
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn replicas(&self) -> Option<u32> {
        self.hold.core.store.confirmed(&self.lease().claim)
    }

    /// Returns whether the lock is certainly held now. No I/O.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let guard = locks.mutex("a").lock().await?;
    /// while guard.is_held() {
    ///     // … a step …
    ///     # break;
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn is_held(&self) -> bool {
        self.lease().is_held()
    }

    /// Returns how long the lock is certainly held even if no further renewal succeeds. No I/O.
    ///
    /// It is zero once the lock is lost, and [`Duration::MAX`] if the store has no leases.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let guard = locks.mutex("a").lock().await?;
    /// assert!(guard.remaining() <= leasehold::DEFAULT_LEASE);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn remaining(&self) -> Duration {
        self.lease().remaining()
    }

    /// Returns the state of the hold. No I/O.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// use leasehold::State;
    /// let guard = locks.mutex("a").lock().await?;
    /// match guard.state() {
    ///     State::Held => println!("go on"),
    ///     State::AtRisk(until) => println!("begin nothing new: {:?} left", until.remaining()),
    ///     other => println!("stop: {other:?}"),
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn state(&self) -> State {
        self.lease().state()
    }

    /// Checks that the lock is certainly held for at least `min`. Call it before a step that cannot
    /// be undone. No I/O.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let guard = locks.mutex("a").lock().await?;
    /// // The payment takes up to two seconds, and cannot be undone.
    /// guard.ensure(std::time::Duration::from_secs(2))?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Errors
    /// - [`Lost`](ErrorKind::Lost): the lock was lost.
    /// - [`AtRisk`](ErrorKind::AtRisk): the lock is held, but less than `min` of its lease is left.
    pub fn ensure(&self, min: Duration) -> Result<()> {
        ensure(self.lease(), min).map_err(|e| e.at(self.hold.core.store.url()))
    }

    /// Renews the lease now, and returns how long the lock is certainly held. One round trip.
    ///
    /// Use it for a lock with [`no_renewal`](crate::Mutex::no_renewal), to show that the holder is
    /// still working. Other locks are renewed automatically. [`max_hold`](crate::Mutex::max_hold)
    /// is not extended.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// # let locks = leasehold::connect("memory:").await?;
    /// let guard = locks.mutex("import").lease(Duration::from_secs(60)).no_renewal().lock().await?;
    /// for _part in 0..3 {
    ///     // If a part hangs, the lock is lost. If it ends, the next part has another minute.
    ///     guard.renew().await?;
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Not cancel safe: the operation may or may not have happened. The guard assumes that it has
    /// not.
    ///
    /// # Errors
    /// - [`Lost`](ErrorKind::Lost): the lock was lost.
    /// - [`Unreachable`](ErrorKind::Unreachable): the store did not answer within a third of the
    ///   lease (5 s at most).
    ///
    /// After any error except `Lost`, the lock is still held for the time that
    /// [`remaining`](Self::remaining) returns.
    pub async fn renew(&self) -> Result<Duration> {
        let (core, lease) = (&self.hold.core, self.lease());
        let renewing = pin!(renew(core, lease));
        let renewed = core.background.with_runtime(renewing).await;
        renewed.map_err(|e| e.during("renew").on(self.name()).at(core.store.url()))
    }

    /// Waits until the lock is lost, and returns the reason. Works in any executor.
    ///
    /// It resolves when the background thread detects the loss. After a pause of the whole process,
    /// that can be a moment after [`is_held`](Self::is_held) began to return `false`.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// use leasehold::{LostReason, store::Evict};
    /// let short = std::time::Duration::from_millis(300);
    /// let guard = locks.mutex("a").lease(short).lock().await?;
    /// locks.evict("a", Evict::Holders).await?;
    /// assert_eq!(guard.lost().await, LostReason::Gone);
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future changes nothing.
    pub async fn lost(&self) -> LostReason {
        let mut watch = self.watch();
        loop {
            if let State::Lost(reason) = watch.state() {
                return reason;
            }
            watch.changed().await;
        }
    }

    /// Returns a handle that reports the state of this hold to other tasks. It can outlive the
    /// guard.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let guard = locks.mutex("a").lock().await?;
    /// let watch = guard.watch(); // for the part of the program that does the work
    /// assert_eq!(watch.token(), guard.token());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn watch(&self) -> Watch {
        Watch { lease: self.hold.lease.clone(), changes: self.lease().subscribe() }
    }

    /// Releases the lock and hands it over to the next waiter. One round trip.
    ///
    /// A store that does not answer is not an error, because the work was done under the lock.
    /// After a lease (15 s at most) the call returns [`Owed`](Released::Owed), and the background
    /// thread keeps retrying. So `guard.release().await?` in a loop fails only for a lost lock or a
    /// request that the store rejects.
    ///
    /// With an [`Owner`](crate::Owner), the last guard releases the lock. The others return
    /// immediately.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// use leasehold::Released;
    /// let guard = locks.mutex("order:42").lock().await?;
    /// if guard.release().await? == Released::Owed {
    ///     eprintln!("the store is away: the next one waits until it is back, or for the lease");
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background.
    ///
    /// # Errors
    /// - [`Lost`](ErrorKind::Lost): the lock was lost before, so another client may have held it
    ///   during the work.
    /// - [`Denied`](ErrorKind::Denied), [`Corrupt`](ErrorKind::Corrupt) and other errors with which
    ///   the store rejects the release.
    pub async fn release(self) -> Result<Released> {
        match Arc::into_inner(self.hold) {
            Some(hold) => hold.release().await,
            None => Ok(Released::Shared),
        }
    }
}

/// Renews a hold out of turn.
async fn renew(core: &Core, lease: &Lease) -> Result<Duration> {
    if let State::Lost(reason) = lease.state() {
        return Err(Error::lost(reason));
    }
    let sent = core.clock.now();
    let limit = || request_timeout(lease.claim.lease);
    let claim = lease.claim_now();
    let renewing = renew_one(&*core.store, &claim, lease.next_lease(sent));
    let renewing = lease.holding.call("renew", renewing);
    let renewal = core.background.within(limit, renewing).await;
    let is_held = match renewal.unwrap_or_else(|| Err(Error::no_reply(limit())))? {
        Renewal::Holding { token, remaining } if token == lease.token => {
            lease.acknowledge(Granted { sent, remaining })
        }
        // Another token is another grant: see the keeper, who would say the same.
        _ => {
            lease.lose(LostReason::Gone);
            core.keeper.forget(lease.claim.id);
            false
        }
    };
    match is_held {
        true => Ok(lease.remaining()),
        false => Err(Error::lost(lease.lost_reason().unwrap_or(LostReason::Expired))),
    }
}

/// Reports the state of one hold. Cheap to clone, and made by [`Guard::watch`].
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
/// assert_eq!((watch.name(), watch.token()), (guard.name(), guard.token()));
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

/// Whether at least `min` is left.
fn ensure(lease: &Lease, min: Duration) -> Result<()> {
    let left = lease.remaining();
    let error = match lease.state() {
        State::Lost(reason) => Error::lost(reason),
        State::Released => Error::new(ErrorKind::Closed, "the lock was released"),
        State::Held | State::AtRisk(_) if left >= min && !left.is_zero() => return Ok(()),
        State::Held | State::AtRisk(_) => {
            let what = format!("only {left:?} of the lease is left, {min:?} required");
            Error::new(ErrorKind::AtRisk, what).with_hint("wait for a renewal, or stop")
        }
    };
    Err(error.during("ensure").on(&lease.claim.name))
}

impl Watch {
    pub(crate) fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Returns the fencing token of the hold.
    pub fn token(&self) -> Token {
        self.lease.token
    }

    /// Returns the name of the lock.
    pub fn name(&self) -> &Name {
        &self.lease.claim.name
    }

    /// Checks that the lock is certainly held for at least `min`, like [`Guard::ensure`]. No I/O.
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

    /// Returns how long the hold is certain even if no further renewal succeeds. No I/O.
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
            // Judged by what is published, and marked as seen: then whatever is published after it
            // is news, and no change is slept through.
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
            return Err(error.during("wait_until_held").on(&self.lease.claim.name));
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
            // We hold the sender ourselves.
            Err(_) => std::future::pending().await,
        }
    }
}

/// What all guards of one hold share; its end is the release.
#[derive(Debug)]
pub(crate) struct Hold {
    core: Arc<Core>,
    lease: Arc<Lease>,
    done: bool,
}

impl Hold {
    pub(crate) fn new(core: Arc<Core>, lease: Arc<Lease>) -> Self {
        Self { core, lease, done: false }
    }

    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    pub(crate) fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    async fn release(mut self) -> Result<Released> {
        let (core, lease) = (&self.core, &self.lease);
        let leaving = pin!(leave(core, lease, &mut self.done));
        let released = core.background.with_runtime(leaving).await;
        let told = |e: Error| e.during("release").on(&lease.claim.name).at(core.store.url());
        released.map_err(told)
    }
}

/// Gives the claim back. Until it is answered, and `done`, dropping the hold goes on with it.
async fn leave(core: &Core, lease: &Lease, done: &mut bool) -> Result<Released> {
    if !lease.is_ours() {
        return Err(Error::lost(LostReason::Forked));
    }
    let started = core.clock.now();
    // Looked at before it is marked: a passed deadline is found and told.
    let before = lease.state_at(started);
    let claim = &*lease.claim_now();
    core.keeper.forget(claim.id);
    lease.mark_released();
    let mut pause = Duration::from_millis(10);
    let (mut first, mut said_again) = (true, SAID_AGAIN);
    let patient = claim.lease.min(DEFAULT_LEASE);
    loop {
        // Of a connection that fell silent nobody notices anything: soon said again, on another.
        let limit = || request_timeout(claim.lease).min(said_again);
        let leave = core.store.leave(claim, core.keep(lease.keep_until));
        let leave = lease.holding.call("leave", leave);
        let error = match core.background.within(limit, leave).await {
            // An attempt before this one may have taken it out; the first finds the truth.
            Some(Ok(false)) if first => {
                *done = true;
                if let State::Lost(reason) = lease.state() {
                    return Err(Error::lost(reason));
                }
                // The lease may have run out while this was on its way.
                let reason = match lease.has_ended(core.clock.now()) {
                    true => LostReason::Expired,
                    false => LostReason::Gone,
                };
                telemetry::lost(claim, lease.token, reason);
                return Err(Error::lost(reason));
            }
            Some(Ok(_)) => break,
            Some(Err(error)) => error,
            None => Error::no_reply(limit()),
        };
        said_again *= 2;
        if !error.is_transient() {
            return Err(error);
        }
        let spent = core.clock.now().since(started);
        if spent > patient {
            telemetry::release_owed(claim, lease.token, &error);
            // What was lost before is told all the same.
            return match before {
                State::Lost(reason) => Err(Error::lost(reason)),
                _ => Ok(Released::Owed),
            };
        }
        first = false;
        core.background.sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(500));
    }
    *done = true;
    lease.over();
    telemetry::released(claim, lease.token);
    match (before, lease.lost_reason()) {
        (State::Lost(reason), _) | (_, Some(reason)) => Err(Error::lost(reason)),
        _ => Ok(Released::Now),
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // A forked child must not release what its parent holds. The state is looked at before it
        // is marked: a passed deadline is found and told.
        if self.done || self.lease.state() == State::Lost(LostReason::Forked) {
            return;
        }
        self.core.keeper.forget(self.lease.claim.id);
        self.lease.mark_released();
        self.lease.over();
        self.core.leave_in_background(&self.lease.claim_now(), self.lease.keep_until);
        telemetry::released(&self.lease.claim, self.lease.token);
    }
}
