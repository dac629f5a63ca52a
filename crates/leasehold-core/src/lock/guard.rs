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

/// What became of a [release](Guard::release). Whichever it is, this client holds the lock no more
/// and the caller has nothing left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Released {
    /// The store knows: the next in the queue may hold already.
    Now,
    /// The store did not answer. The client goes on telling it in the background, and where there
    /// are leases this one ends the hold in any case: until then the next one waits.
    Owed,
    /// Another guard of the same [`Owner`](crate::Owner) holds on; the last of them releases.
    Shared,
}

/// A held lock. Dropping it releases the lock in the background; [`release`](Self::release) also
/// tells whether that worked.
///
/// A guard never claims more than it knows: [`is_held`](Self::is_held) is judged by this machine's
/// boot clock against a deadline that no store can have undercut, so it is false *before* anybody
/// else can get the lock. It cannot stop your code, though: check the [token](Self::token) at the
/// resource, or work inside [`run`](crate::Mutex::run), which cancels when the lock is lost.
///
/// A guard of a fork's parent is inert in the child: not held, and its drop releases nothing.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # use std::time::Duration;
/// # let locks = leasehold::connect("memory:").await?;
/// let guard = locks.mutex("order:42").lock().await?;
/// // Each write says under which hold it is made; the resource refuses what is late.
/// println!("write, token {}", guard.token());
/// // Before a step that cannot be undone: is enough left for it?
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

    /// The fencing token of this hold. Hand it to whatever the lock protects.
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

    /// This hold as a printable string, which whoever it is shown to can have
    /// [checked](crate::Leasehold::check) at the store. No I/O.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let locks = leasehold::connect("memory:").await?;
    /// let guard = locks.mutex("a").lock().await?;
    /// let shown = guard.sequencer().to_string(); // to another program, which asks:
    /// locks.check(&shown.parse()?).await?;
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    pub fn sequencer(&self) -> Sequencer {
        let (name, side) = (self.name().clone(), self.lease().side());
        Sequencer::new(name, side, self.token(), self.hold.core.identity.clone())
    }

    /// The lock's name.
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

    /// What kind of lock is held.
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

    /// How many permits are held (a mutex: 1).
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

    /// How many replicas of the store had this grant as it was made, where the store waits for
    /// them (`redis:` with `replicas=N`); else, and after the release, `None`. No I/O.
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

    /// Whether the lock is certainly held now. No I/O.
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

    /// For how long the lock is certainly held if no renewal succeeds any more; zero once lost,
    /// [`Duration::MAX`] where the store has no leases. No I/O.
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

    /// How the hold stands now. No I/O.
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

    /// To be called before a step that cannot be undone: is at least `min` of validity left?
    /// No I/O.
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
    /// [`ErrorKind::Lost`] if the lock is lost, [`ErrorKind::AtRisk`] if it is held but less than
    /// `min` is left.
    pub fn ensure(&self, min: Duration) -> Result<()> {
        ensure(self.lease(), min).map_err(|e| e.at(self.hold.core.store.url()))
    }

    /// Renews the lease now, and tells for how long the lock is certain then: one round trip. For a lock taken with
    /// [`no_renewal`](crate::Mutex::no_renewal), whose holder says by this that it still works; any other is renewed
    /// by itself, and need not be. [`max_hold`](crate::Mutex::max_hold) stays.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # use std::time::Duration;
    /// # let locks = leasehold::connect("memory:").await?;
    /// let guard = locks.mutex("import").lease(Duration::from_secs(60)).no_renewal().lock().await?;
    /// for _part in 0..3 {
    ///     // A part that hangs costs the lock; one that ends has a minute more for the next.
    ///     guard.renew().await?;
    /// }
    /// # Ok::<(), leasehold::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Cancel safety
    /// Dropped, it may have been renewed; the guard does not believe it.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if the lock is lost. Where the store is silent (for a third of the lease, 5 s at most)
    /// or fails, nothing has changed: the lock is held for as long as [`remaining`](Self::remaining) says.
    pub async fn renew(&self) -> Result<Duration> {
        let (core, lease) = (&self.hold.core, self.lease());
        let renewing = pin!(renew(core, lease));
        let renewed = core.background.with_runtime(renewing).await;
        renewed.map_err(|e| e.during("renew").on(self.name()).at(core.store.url()))
    }

    /// Resolves when the lock is lost, and tells why. Works in any executor. It resolves when the background
    /// thread notices, which after a pause of the whole process may be a moment after
    /// [`is_held`](Self::is_held) turned false.
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
    /// It only waits: drop it, and call it again.
    pub async fn lost(&self) -> LostReason {
        let mut watch = self.watch();
        loop {
            if let State::Lost(reason) = watch.state() {
                return reason;
            }
            watch.changed().await;
        }
    }

    /// Follows the state of the hold, from wherever it is wanted; outlives the guard.
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

    /// Releases the lock and hands it to the next in the queue: one round trip.
    ///
    /// A store that does not answer is no error: the work was done under the lock, and the release
    /// is [`Owed`](Released::Owed) after a lease (15 s at most), while the background thread goes
    /// on. So `guard.release().await?` in a loop ends it for a lost lock only.
    ///
    /// With an [`Owner`](crate::Owner), the lock is released with the outermost guard; the others
    /// return at once.
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
    /// A future that is dropped has released all the same: the background thread goes on.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if the lock was lost before, so that what was done under it may have
    /// been done by somebody else as well; what else the store answers, such as
    /// [`ErrorKind::Denied`].
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

/// Follows the state of one hold. Cheap to clone.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// use leasehold::State;
/// let guard = locks.mutex("order:42").lock().await?;
/// let mut watch = guard.watch();
/// watch.wait_until_held().await?; // goes on while held, waits while at risk, fails when lost
/// let told = tokio::spawn(async move { watch.changed().await });
/// guard.release().await?;
/// assert_eq!(told.await.unwrap(), State::Released);
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
/// watch.ensure(Duration::from_secs(1))?; // so much is left, whatever becomes of the store
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
            let what = format!("{left:?} left, {min:?} asked for: wait for a renewal or stop");
            Error::new(ErrorKind::AtRisk, what)
        }
    };
    Err(error.during("ensure").on(&lease.claim.name))
}

impl Watch {
    pub(crate) fn lease(&self) -> &Lease {
        &self.lease
    }

    /// The fencing token of the hold.
    pub fn token(&self) -> Token {
        self.lease.token
    }

    /// The lock's name.
    pub fn name(&self) -> &Name {
        &self.lease.claim.name
    }

    /// As [`Guard::ensure`].
    ///
    /// # Errors
    /// As there, and [`ErrorKind::Closed`] if the lock was released.
    pub fn ensure(&self, min: Duration) -> Result<()> {
        ensure(&self.lease, min)
    }

    /// How the hold stands now. No I/O.
    pub fn state(&self) -> State {
        self.lease.state()
    }

    /// For how long the hold is certain if no renewal succeeds any more. No I/O.
    pub fn remaining(&self) -> Duration {
        self.lease.remaining()
    }

    /// The pause button of work that must not go on in jeopardy: returns at once while the hold is
    /// [`Held`](State::Held), waits while it is [`AtRisk`](State::AtRisk), and goes on when a renewal
    /// was acknowledged after all. Call it between two steps. No I/O; works in any executor.
    ///
    /// # Cancel safety
    /// May be dropped and called again: no change is missed.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if the lock is lost, or is by the end of the wait; [`ErrorKind::Closed`]
    /// if it was released.
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

    /// Waits for the state to change from what was last seen, and tells the new one. Does not
    /// resolve any more after [`State::Lost`] or [`State::Released`].
    ///
    /// # Cancel safety
    /// May be dropped and called again: no change is missed.
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
