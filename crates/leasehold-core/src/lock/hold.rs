//! A held lock, whatever its kind.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use crate::client::ask::renew_one;
use crate::client::core::Core;
use crate::client::lease::{Granted, Lease, State};
use crate::client::telemetry;
use crate::lock::watch::{Watch, ensure};
use crate::store::Store;
use crate::types::answer::Renewal;
use crate::types::claim::Kind;
use crate::types::error::{Error, LostReason, Result};
use crate::types::limits::{DEFAULT_LEASE, request_timeout};
use crate::types::name::Name;
use crate::types::sequencer::Sequencer;
use crate::types::token::{FencingToken, Token};

/// The maximum wait for the answer to the first attempt of a release. It doubles with each retry.
const SAID_AGAIN: Duration = Duration::from_secs(1);

/// The result of a [release](Hold::release). In each case, this guard no longer holds the lock, and
/// the caller has nothing left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Released {
    /// The store has released the lock. The next waiter may already hold it.
    Now,
    /// The store did not answer. The client retries in the background. If that fails, the hold ends
    /// when its lease expires, and waiters wait until then.
    Pending,
    /// Another guard of the same [`Owner`](crate::Owner) still holds the lock. The last guard
    /// releases it.
    Shared,
}

/// A held lock of any kind. Dropping it releases the lock in the background;
/// [`release`](Self::release) also reports whether the release succeeded.
///
/// All guards ([`MutexGuard`](crate::MutexGuard), [`ReadGuard`](crate::ReadGuard),
/// [`WriteGuard`](crate::WriteGuard), [`Permit`](crate::Permit)) have these methods. Use this type
/// for code that does not depend on the kind of lock; each guard converts into it.
///
/// [`is_held`](Self::is_held) compares this machine's boot clock with a deadline, and returns
/// `false` *before* any other client can acquire the lock. But it cannot stop your code. Check the
/// [token](crate::MutexGuard::token) at the resource, or work inside [`run`](crate::Mutex::run),
/// which cancels the work when the lock is lost.
///
/// In a forked child process, a hold of the parent is inert: it is not held, and dropping it
/// releases nothing.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # use std::time::Duration;
/// # let locks = leasehold::connect("memory:").await?;
/// use leasehold::Hold;
/// fn report(hold: &Hold) {
///     println!("{} is held for {:?}", hold.name(), hold.remaining());
/// }
/// report(&locks.mutex("order:42").lock().await?.into());
/// report(&*locks.semaphore("convert", 3).acquire().await?);
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[must_use = "the lock is released when the guard is dropped"]
pub struct Hold {
    owned: Arc<OwnedClaim>,
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold")
            .field("name", self.name())
            .field("grant", &self.grant())
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

impl Hold {
    pub(crate) fn new(owned: Arc<OwnedClaim>) -> Self {
        Self { owned }
    }

    /// Returns another handle of the same hold. The lock is released with the last handle.
    pub(crate) fn share(&self) -> Self {
        Self::new(self.owned.clone())
    }

    pub(crate) fn owned(&self) -> &Arc<OwnedClaim> {
        &self.owned
    }

    /// Returns the store of this hold; see [`kit`](crate::kit).
    pub(crate) fn store(&self) -> &dyn Store {
        &*self.owned.core.store
    }

    pub(crate) fn core(&self) -> Arc<Core> {
        self.owned.core.clone()
    }

    pub(crate) fn lease(&self) -> &Lease {
        &self.owned.lease
    }

    /// Returns the number of this grant, which identifies the hold in listings, logs and
    /// sequencers.
    ///
    /// Readers and permits also have such a number, so it is not a fencing token: fences accept
    /// only a [`FencingToken`].
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let permit = locks.semaphore("convert", 3).acquire().await?;
    /// let lock = locks.inspect("convert").await?.expect("a permit is held");
    /// assert_eq!(lock.claims[0].token, Some(permit.grant()));
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn grant(&self) -> Token {
        self.lease().token
    }

    /// Returns the fencing token, or `None` if other clients can hold the lock at the same time (a
    /// reader or a permit). [`MutexGuard`](crate::MutexGuard) and
    /// [`WriteGuard`](crate::WriteGuard) always have one.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let both = locks.lock_all(["account:1", "account:2"]).await?;
    /// let token = both.get("account:1").and_then(|hold| hold.fencing_token());
    /// assert!(token.is_some());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.lease().fencing_token()
    }

    /// Returns the sequencer of this hold: a printable value that other programs can
    /// [check](crate::Client::check) at the store. No I/O.
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
        Sequencer::new(name, side, self.grant(), self.owned.core.identity.clone())
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

    /// Returns how much of the lock's capacity this hold takes: its permits of a semaphore, 1 for a
    /// mutex or a reader, and [`MAX_READERS`](crate::MAX_READERS) for a writer.
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
        self.owned.core.store.confirmed(&self.lease().claim)
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

    /// Returns how much longer the lock is certainly held even if no further renewal succeeds. No
    /// I/O.
    ///
    /// The result is zero once the lock is lost, and [`Duration::MAX`] if the store has no leases.
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
    ///     State::Held => println!("continue"),
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
    /// - [`Lost`](crate::ErrorKind::Lost): the lock was lost.
    /// - [`AtRisk`](crate::ErrorKind::AtRisk): the lock is held, but less than `min` of its lease
    ///   is left.
    pub fn ensure(&self, min: Duration) -> Result<()> {
        ensure(self.lease(), min).map_err(|e| e.with_store(self.owned.core.store.url()))
    }

    /// Renews the lease now, and returns how much longer the lock is certainly held. One round
    /// trip.
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
    /// - [`Lost`](crate::ErrorKind::Lost): the lock was lost.
    /// - [`Unreachable`](crate::ErrorKind::Unreachable): the store did not answer within a third of
    ///   the lease (5 s at most).
    ///
    /// After any error except `Lost`, the lock is still held for the time that
    /// [`remaining`](Self::remaining) returns.
    pub async fn renew(&self) -> Result<Duration> {
        let (core, lease) = (&self.owned.core, self.lease());
        let renewing = pin!(renew(core, lease));
        let renewed = core.background.with_runtime(renewing).await;
        renewed.map_err(|e| {
            e.with_operation("renew").with_lock(self.name()).with_store(core.store.url())
        })
    }

    /// Waits until the lock is lost, and returns the reason. Works in any executor.
    ///
    /// The future resolves when the background thread detects the loss. After a pause of the whole
    /// process, that can be a moment after [`is_held`](Self::is_held) began to return `false`.
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
    /// assert_eq!(watch.grant(), guard.grant());
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn watch(&self) -> Watch {
        Watch::new(self.owned.lease.clone())
    }

    /// Releases the lock and hands it over to the next waiter. One round trip.
    ///
    /// A store that does not answer is not an error, because the work was done under the lock.
    /// After a lease (15 s at most) the call returns [`Pending`](Released::Pending), and the
    /// background thread keeps retrying. So `guard.release().await?` in a loop fails only for a
    /// lost lock or a request that the store rejects.
    ///
    /// With an [`Owner`](crate::Owner), the last guard releases the lock. The others return
    /// immediately.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// use leasehold::Released;
    /// let guard = locks.mutex("order:42").lock().await?;
    /// if guard.release().await? == Released::Pending {
    ///     eprintln!("the store is away: the next one waits until it is back, or for the lease");
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Cancel safe: dropping the future releases the lock in the background.
    ///
    /// # Errors
    /// - [`Lost`](crate::ErrorKind::Lost): the lock was lost before, so another client may have
    ///   held it during the work.
    /// - [`Denied`](crate::ErrorKind::Denied), [`Corrupt`](crate::ErrorKind::Corrupt) and other
    ///   errors with which the store rejects the release.
    pub async fn release(self) -> Result<Released> {
        match Arc::into_inner(self.owned) {
            Some(owned) => owned.release().await,
            None => Ok(Released::Shared),
        }
    }
}

/// Renews a hold immediately, outside the renewer's schedule.
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
        // Another token belongs to another grant, so this hold is lost. The renewer also treats
        // this as a loss.
        _ => {
            lease.lose(LostReason::Gone);
            core.renewer.forget(lease.claim.id);
            false
        }
    };
    match is_held {
        true => Ok(lease.remaining()),
        false => Err(Error::lost(lease.lost_reason().unwrap_or(LostReason::Expired))),
    }
}

/// The granted claim that all guards of one hold share. Dropping it releases the lock.
#[derive(Debug)]
pub(crate) struct OwnedClaim {
    core: Arc<Core>,
    lease: Arc<Lease>,
    done: bool,
}

impl OwnedClaim {
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
        let with_context = |e: Error| {
            e.with_operation("release").with_lock(&lease.claim.name).with_store(core.store.url())
        };
        released.map_err(with_context)
    }
}

/// Releases the claim, and retries for a lease (15 s at most).
///
/// Sets `done` once the store has removed the claim or does not have it. Until then, dropping the
/// hold continues the release in the background.
async fn leave(core: &Core, lease: &Lease, done: &mut bool) -> Result<Released> {
    if !lease.is_ours() {
        return Err(Error::lost(LostReason::Forked));
    }
    let started = core.clock.now();
    // The state is read before the lease is marked as released, because a deadline that has passed
    // would not be detected and reported afterwards.
    let before = lease.state_at(started);
    let claim = &*lease.claim_now();
    core.renewer.forget(claim.id);
    lease.mark_released();
    let mut pause = Duration::from_millis(10);
    let (mut first, mut said_again) = (true, SAID_AGAIN);
    let patient = claim.lease.min(DEFAULT_LEASE);
    loop {
        // A half-open connection reports no error, so the release is retried early, on another
        // connection.
        let limit = || request_timeout(claim.lease).min(said_again);
        let leave = core.store.leave(claim, core.keep(lease.keep_until));
        let leave = lease.holding.call("leave", leave);
        let error = match core.background.within(limit, leave).await {
            // Only the first attempt proves a loss. Later ones may not find the claim because an
            // earlier attempt has removed it.
            Some(Ok(false)) if first => {
                *done = true;
                if let State::Lost(reason) = lease.state() {
                    return Err(Error::lost(reason));
                }
                // The lease may have expired while the request was in flight.
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
            // A loss before the release is still reported.
            return match before {
                State::Lost(reason) => Err(Error::lost(reason)),
                _ => Ok(Released::Pending),
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

impl Drop for OwnedClaim {
    fn drop(&mut self) {
        // A forked child must not release what its parent holds. As in `leave`, the state is read
        // before the lease is marked as released, so that a loss is detected and reported.
        if self.done || self.lease.state() == State::Lost(LostReason::Forked) {
            return;
        }
        self.core.renewer.forget(self.lease.claim.id);
        self.lease.mark_released();
        self.lease.over();
        self.core.release_in_background(&self.lease.claim_now(), self.lease.keep_until);
        telemetry::released(&self.lease.claim, self.lease.token);
    }
}
