//! Acquires locks: joins the queue, waits for the grant, or gives up. Futures may be dropped at
//! every await.
//!
//! # The argument
//! - *What is atomic*: joining is one call that either grants the lock or adds the claim to the
//!   queue. The store identifies the claim by an ID, which is random and is chosen before anything
//!   is sent.
//! - *A reply is lost*: the client sends the same claim again, and the store answers for the claim
//!   that is already there. Once an earlier grant may have been made *and* have expired unnoticed,
//!   the client uses a new ID instead. So one claim never gets two grants. While a claim waits, the
//!   client only renews it, and a renewal never joins.
//! - *The future is dropped, or the call gives up*: [`Attempt`] exists before the first byte is
//!   sent. Dropping it sends a `leave` in the background, which is retried for as long as the claim
//!   could exist. A delayed `join` may arrive even after that `leave`. So if a `join` has no reply,
//!   the `leave` is repeated for some seconds. No client renews the claim that an even later `join`
//!   creates, so that claim expires within a lease.
//! - *The process crashes*: its queue position expires with the waiter lease, and its grant expires
//!   with the lease.
//! - *A notification is lost*: the renewer's heartbeat polls every third of the waiter lease.
//! - *A guard of this lock was just dropped*: another thread is still sending its release. The call
//!   waits for the answer, because otherwise the claim would queue after a hold of its own client
//!   ([`pending_releases`](crate::client::pending_releases)).
//! - *A grant arrives late*: its deadline is counted from the last request that was sent before the
//!   grant could have been made. A grant that is already at risk is renewed before the caller gets
//!   it. If the store is unreachable or too slow for that renewal, a waiting call retries for as
//!   long as it does after any other outage. A renewal never joins the queue, so its answer is
//!   final. Either the grant is still valid, or the client makes a new claim.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use crate::client::ask::{outage_timeout, renew_one};
use crate::client::core::Core;
use crate::client::lease::{Granted, Lease, NewLease};
use crate::client::waiting::{Outcome, WaiterEvent, Waiting};
use crate::client::{spans, telemetry};
use crate::lock::hold::{Hold, OwnedClaim};
use crate::lock::owner::{HoldRequest, Owner};
use crate::lock::wait::Wait;
use crate::types::answer::{
    Joined, LockInfo, Mode, Place, Renewal, Signal, foreigner_of, holders_of,
};
use crate::types::claim::{Claim, Kind};
use crate::types::error::{CHECK_THE_STORE, Error, ErrorKind, Result, shown_holders};
use crate::types::holder::Holder;
use crate::types::limits::{drift, request_timeout, waiter_lease};
use crate::types::name::Name;
use crate::types::options::LockOptions;
use crate::types::token::Token;
use crate::util::clock::Moment;
use crate::util::duration::short;

pub(crate) type OnWaiting = Arc<dyn Fn(Place) + Send + Sync>;

/// The state of a lock handle, whatever the kind of lock.
#[derive(Clone)]
pub(crate) struct LockHandle {
    pub(crate) core: Arc<Core>,
    /// The valid name, or the given text if it is not a valid name.
    pub(crate) name: Result<Name, String>,
    pub(crate) kind: Kind,
    pub(crate) capacity: u32,
    pub(crate) options: LockOptions,
    pub(crate) owner: Option<Owner>,
    pub(crate) on_waiting: Option<OnWaiting>,
}

impl std::fmt::Debug for LockHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = self.name.as_ref().map(Name::as_str);
        write!(f, "{} {name:?} on {}", self.kind, self.core.store.url())
    }
}

impl LockHandle {
    pub(crate) fn new(core: &Arc<Core>, name: &str, kind: Kind, capacity: u32) -> Self {
        Self {
            core: core.clone(),
            name: Name::new(name).map_err(|_| name.to_owned()),
            kind,
            capacity,
            options: core.options.clone(),
            owner: None,
            on_waiting: None,
        }
    }

    pub(crate) fn set_options(&mut self, options: LockOptions) {
        self.options = options;
        if self.options.label.is_empty() {
            self.options.label.clone_from(&self.core.options.label);
        }
    }

    /// Acquires the lock. Used for all kinds of locks, with any limit for the wait.
    pub(crate) async fn acquire(
        &self,
        operation: &'static str,
        weight: u32,
        wait: Wait,
    ) -> Result<Hold> {
        let taken = pin!(spans::wait(operation, &self.name, self.take(weight, wait)));
        let taken = self.core.background.with_runtime(taken).await;
        match taken {
            Ok(guard) => {
                guard.lease().begins();
                Ok(guard)
            }
            Err(error) => Err(self.not_acquired(operation, error)),
        }
    }

    /// Acquires the lock if it is free, as one of several locks.
    ///
    /// A lock that is not free is not reported in telemetry, because the caller then waits for it
    /// or tries once more.
    pub(crate) async fn take_if_free(&self, operation: &'static str, weight: u32) -> Result<Hold> {
        let taken = pin!(spans::wait(operation, &self.name, self.take(weight, Wait::Try)));
        let taken = self.core.background.with_runtime(taken).await;
        taken
            .inspect(|guard| guard.lease().begins())
            .map_err(|e| e.with_operation(operation).with_store(self.core.store.url()))
    }

    /// Returns the holders and the waiters.
    pub(crate) async fn read(&self) -> Result<Option<LockInfo>> {
        self.show(true).await
    }

    /// Returns the holders, without the waiters.
    pub(crate) async fn holders(&self) -> Result<Option<LockInfo>> {
        self.show(false).await
    }

    async fn show(&self, whole: bool) -> Result<Option<LockInfo>> {
        let read = async {
            let name = self.name.as_ref().map_or_else(Name::new, |name| Ok(name.clone()))?;
            let store = self.core.ours()?;
            let read = match whole {
                true => store.read(&name).await,
                false => store.holders(&name, None).await,
            };
            read.map_err(|e| e.with_lock(&name))
        };
        let read = self.core.background.with_runtime(pin!(read)).await;
        read.map_err(|e| e.with_operation("show").with_store(self.core.store.url()))
    }

    #[cold]
    fn not_acquired(&self, operation: &'static str, error: Error) -> Error {
        let core = &self.core;
        let mut error = error.with_operation(operation).with_store(core.store.url());
        let busy = matches!(error.kind(), ErrorKind::Contended | ErrorKind::Timeout);
        if busy && error.name().is_some_and(|name| core.renewer.holds(name)) {
            error = error.by_this_client();
        }
        telemetry::not_acquired(self.kind, &error);
        error
    }

    async fn take(&self, weight: u32, wait: Wait) -> Result<Hold> {
        // A local store answers immediately. Without this line, a task that acquires one lock after
        // another would never yield to the other tasks of its runtime.
        tokio::task::coop::consume_budget().await;
        let name = match &self.name {
            Ok(name) => name,
            Err(given) => &Name::new(given)?,
        };
        let taken = match self.check(name, weight) {
            Ok(()) => match &self.owner {
                Some(owner) => Box::pin(self.take_for(owner, name, weight, wait)).await,
                None => acquire_once(self, name, weight, wait).await,
            },
            Err(error) => Err(error),
        };
        taken.map_err(|e| e.with_lock(name))
    }

    async fn take_for(&self, owner: &Owner, name: &Name, weight: u32, wait: Wait) -> Result<Hold> {
        // A forked child must not lock the owner's mutexes, because a thread that exists only in
        // the parent may have held them at the fork.
        self.core.check_ours()?;
        let take = |wait| acquire_once(self, name, weight, wait);
        owner.acquire(&self.hold_request(name, weight), wait, take).await
    }

    /// Returns an error for a request that can never succeed, before anything is sent.
    fn check(&self, name: &Name, weight: u32) -> Result<()> {
        self.core.check_open()?;
        self.options.check(self.lease())?;
        let unsupported = |what: String, hint: &str| {
            Err(Error::new(ErrorKind::Unsupported, what).with_hint(hint).with_lock(name))
        };
        let refused = |what: String| Err(Error::new(ErrorKind::Config, what).with_lock(name));
        let promises = self.core.store.guarantees();
        if !promises.keeps(self.kind) {
            let what = format!("this store does not support locks of the kind {}", self.kind);
            return unsupported(what, "use another store");
        }
        if !self.options.lock_delay.is_zero() && !promises.lock_delay {
            let what =
                "this store does not support lock_delay: it keeps no record of a crashed holder";
            let hint = "remove lock_delay, or use sqlite:, postgres:, mysql:, redis: or etcd:";
            return unsupported(what.into(), hint);
        }
        if !self.options.min_hold.is_zero() && !promises.min_hold {
            let what =
                "this store does not support min_hold: it cannot keep a released lock unavailable";
            let hint = "remove min_hold, or use file:, sqlite:, postgres:, mysql:, redis: or etcd:";
            return unsupported(what.into(), hint);
        }
        if self.capacity == 0 || (self.kind == Kind::Semaphore && self.capacity > MAX_PERMITS) {
            return refused(format!(
                "invalid number of permits {} for a semaphore: expected 1 to {MAX_PERMITS}",
                self.capacity
            ));
        }
        if weight == 0 || weight > self.capacity {
            return refused(format!(
                "cannot acquire {weight} permits from a semaphore of {0}: expected 1 to {0}",
                self.capacity
            ));
        }
        Ok(())
    }

    /// Returns the requested lease, or the longest one that the store can guarantee if that is
    /// shorter.
    fn lease(&self) -> Duration {
        self.options.lease.min(self.core.store.longest_lease())
    }

    fn hold_request<'a>(&'a self, name: &'a Name, weight: u32) -> HoldRequest<'a> {
        HoldRequest {
            core: &self.core,
            name,
            kind: self.kind,
            capacity: self.capacity,
            weight,
            min_validity: self.options.min_validity,
        }
    }

    /// Creates a new claim, for which nothing has been sent yet. Fails in a forked child process.
    fn claim(&self, name: &Name, weight: u32, now: Moment) -> Result<Claim> {
        let lease = self.lease();
        let holder = match self.options.label == self.core.options.label {
            true => self.core.holder.clone(),
            false => Arc::new(Holder::this_process(&self.options.label)),
        };
        Ok(Claim {
            id: self.core.draw(now)?,
            name: name.clone(),
            kind: self.kind,
            weight,
            capacity: self.capacity,
            lease,
            waiter_lease: waiter_lease(lease),
            lock_delay: self.options.lock_delay,
            seen: self.core.seen(),
            holder,
        })
    }
}

/// The maximum number of renewals of a late grant in a call that does not wait.
const RENEWALS_BEFORE_HOLDING: u32 = 3;

/// The maximum number of permits of a semaphore.
const MAX_PERMITS: u32 = i32::MAX as u32;

/// Acquires the lock, and makes a new claim each time that the previous one has been lost.
pub(crate) async fn acquire_once(
    handle: &LockHandle,
    name: &Name,
    weight: u32,
    wait: Wait,
) -> Result<Hold> {
    let core = &handle.core;
    let started = core.clock.now();
    let give_up = match wait {
        Wait::For(d) => started.plus(d),
        Wait::Try | Wait::Forever => Moment::NEVER,
    };
    let (mut began, mut last_reply) = (started, started);
    if core.has_pending_releases() {
        Box::pin(core.earlier_releases_done(name, give_up)).await?;
        (began, last_reply) = (core.clock.now(), core.clock.now());
    }
    loop {
        let claim = handle.claim(name, weight, began)?;
        let taken = {
            let last_reply = &mut last_reply;
            let (armed, may_join_late) = (false, false);
            let mut attempt = Attempt {
                handle,
                claim,
                wait,
                started,
                began,
                give_up,
                last_reply,
                armed,
                may_join_late,
            };
            attempt.run().await?
        };
        if let Some(guard) = taken {
            return Ok(guard);
        }
        if wait == Wait::Try {
            let what = format!(
                "the lease of {} expired before the store's answer arrived",
                short(handle.lease())
            );
            return Err(Error::new(ErrorKind::Lost, what).with_hint("retry, or use a longer lease"));
        }
        // This pause prevents a busy loop if each claim is lost as soon as it has joined.
        let pause = LISTEN_AGAIN.min(give_up.since(core.clock.now()));
        Box::pin(core.background.sleep(pause)).await;
        began = core.clock.now();
    }
}

/// One claim that is being acquired. Dropping it while it is armed removes the claim from the store
/// in the background.
struct Attempt<'a> {
    handle: &'a LockHandle,
    claim: Claim,
    wait: Wait,
    /// The start of the call.
    started: Moment,
    /// The time at which this claim was made, before anything was sent for it.
    began: Moment,
    give_up: Moment,
    /// The time of the store's last answer to this call. The limit for an outage is counted from
    /// this time.
    last_reply: &'a mut Moment,
    armed: bool,
    /// Whether a request to join has no reply, so it may take effect later.
    may_join_late: bool,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        // A forked child must not lock the renewer's mutex, because a thread that exists only in
        // the parent may have held it at the fork.
        if self.armed && self.core().holder_is_us() {
            self.core().renewer.forget(self.claim.id);
            self.core().leave_given_up(&self.claim, self.may_join_late);
        }
    }
}

/// The maximum number of consecutive polls that the store may request although the queue position
/// does not change.
///
/// After that, the call pauses before it listens again, so a store that notifies all the time does
/// not cause a busy loop.
const ASKED_IN_VAIN: u32 = 8;
/// The initial pause before the call listens for notifications again after a failure.
const LISTEN_AGAIN: Duration = Duration::from_millis(10);

/// The result of [`Attempt::join`].
enum Step {
    Holding(Token, Granted),
    Waiting(Moment, Place),
    /// The claim was lost, or it may have been granted and have expired unnoticed.
    Stale,
}

impl Attempt<'_> {
    fn core(&self) -> &Arc<Core> {
        &self.handle.core
    }

    fn now(&self) -> Moment {
        self.core().clock.now()
    }

    /// Acquires the lock with this claim. Returns `None` if the claim was lost. The caller then
    /// tries again with a new claim.
    ///
    /// Futures that are needed only for waiting are boxed. Most locks are free, and each move of a
    /// future copies all the space that it reserves.
    async fn run(&mut self) -> Result<Option<Hold>> {
        match self.join().await? {
            Step::Holding(token, granted) => {
                let (enough, now) = (self.claim.lease / 3, *self.last_reply);
                self.finish(token, granted, true, enough, now).await
            }
            Step::Waiting(sent, place) => Box::pin(self.wait_for_grant(sent, place)).await,
            Step::Stale => Ok(None),
        }
    }

    /// Sends the claim, and retries until the store answers or the call gives up.
    async fn join(&mut self) -> Result<Step> {
        let mode = if self.wait == Wait::Try { Mode::Try } else { Mode::Wait };
        let first_sent = self.began;
        let mut sent = first_sent;
        let mut pause = Duration::from_millis(10);
        (self.armed, self.may_join_late) = (true, true);
        let mut only = true;
        loop {
            let limit = || {
                let confirms = self.core().store.info().replication_timeout;
                let limit = request_timeout(self.claim.lease).saturating_add(confirms);
                limit.min(self.give_up.since(sent))
            };
            let join = spans::call("join", self.core().store.join(&self.claim, mode));
            let error = match self.core().background.within(limit, join).await {
                Some(Ok(joined)) => {
                    *self.last_reply = self.now();
                    self.may_join_late = !only;
                    return self.joined(sent, joined, only);
                }
                Some(Err(error)) if !error.is_transient() => {
                    self.armed = !(only && was_refused(&error));
                    return Err(error);
                }
                Some(Err(error)) => Some(error),
                None => None,
            };
            let now = self.now();
            let says_when = error.as_ref().and_then(Error::retry_after);
            if says_when.is_some() {
                // A store that announces when to retry is reachable.
                *self.last_reply = now;
            }
            if now >= self.give_up {
                let error = match error {
                    // The store has answered, and the lock may be free.
                    Some(full) if full.kind() == ErrorKind::Full => return Err(full),
                    error => error,
                };
                let late = Box::pin(self.out_of_time(*self.last_reply)).await;
                return Err(match error {
                    Some(error) => late.with_source(error.reason()),
                    None => late,
                });
            }
            let silent = now.since(*self.last_reply);
            let (patient, in_vain) = match self.wait {
                // Waiting until the announced time would be waiting for the lock.
                Wait::Try => {
                    (request_timeout(self.claim.lease), says_when.is_some_and(|time| time >= pause))
                }
                Wait::For(_) | Wait::Forever => {
                    (outage_timeout(&*self.core().store, &self.claim), false)
                }
            };
            if in_vain || silent >= patient {
                return Err(error.unwrap_or_else(|| Error::no_reply(silent)));
            }
            let certain = self.claim.waiter_lease.saturating_sub(drift(self.claim.waiter_lease));
            if now.since(first_sent) >= certain {
                return Ok(Step::Stale);
            }
            // The request may still arrive after the next one has been answered. So a rejection of
            // a later request does not prove that the store has no record of this claim.
            only = false;
            let pause_now = pause.min(self.give_up.since(now));
            Box::pin(self.core().background.sleep(pause_now)).await;
            self.core().check_open()?;
            pause = (pause * 2).min(Duration::from_millis(500));
            sent = self.now();
        }
    }

    fn joined(&mut self, sent: Moment, joined: Joined, only: bool) -> Result<Step> {
        match joined {
            Joined::Holding { token, remaining } => {
                Ok(Step::Holding(token, Granted { sent, remaining }))
            }
            Joined::Waiting(place) => Ok(Step::Waiting(sent, place)),
            // A waiting claim gets this result only if its earlier position or grant has ended, for
            // example if its expired grant is in a cooldown. A new claim can join.
            Joined::Busy { .. } if self.wait != Wait::Try => Ok(Step::Stale),
            Joined::Busy { holders } => {
                self.armed = !only;
                Err(Error::contended(&self.claim.name, holders))
            }
        }
    }

    /// Waits in the queue until the claim is granted.
    async fn wait_for_grant(&mut self, sent: Moment, place: Place) -> Result<Option<Hold>> {
        let core = self.core().clone();
        let waiting = Waiting::new(self.claim.clone(), sent, place);
        core.renewer.add_waiter(waiting.clone());
        // A close() that ran before the renewer had this claim did not stop this wait.
        core.check_open()?;
        self.tell_place(place);
        let mut deaf = Duration::ZERO;
        let mut asked = 0;
        loop {
            let changed = async {
                if !deaf.is_zero() {
                    Box::pin(core.background.sleep(deaf)).await;
                }
                core.store.changed(&self.claim).await
            };
            tokio::select! {
                biased;
                news = waiting.news() => match news {
                    WaiterEvent::Place(place) => {
                        asked = 0;
                        self.tell_place(place);
                    }
                    WaiterEvent::Outcome(Outcome::Holding { token, granted }) => {
                        core.renewer.forget(self.claim.id);
                        let enough = self.claim.lease / 3;
                        let now = self.now();
                        return self.finish(token, granted, true, enough, now).await;
                    }
                    WaiterEvent::Outcome(Outcome::Gone) => {
                        *self.last_reply = self.now();
                        return Ok(None);
                    }
                    WaiterEvent::Outcome(Outcome::Failed(error)) => return Err(error),
                },
                signal = changed => match signal {
                    // A grant of another position of this claim is not a grant of the current one,
                    // so the call polls.
                    Ok(Signal::Granted(token)) if !waiting.stands_under(token) => {
                        Box::pin(self.ask(&waiting)).await;
                        deaf = (deaf * 2).clamp(LISTEN_AGAIN, self.claim.waiter_lease);
                    }
                    Ok(Signal::Granted(token)) => {
                        let granted = self.pushed(waiting.last_answer());
                        let full = granted.remaining.is_none();
                        core.renewer.forget(self.claim.id);
                        let enough = self.claim.waiter_lease / 3;
                        let now = self.now();
                        return self.finish(token, granted, full, enough, now).await;
                    }
                    Ok(Signal::Ask) if asked < ASKED_IN_VAIN && Box::pin(self.ask(&waiting)).await => {
                        asked += 1;
                        deaf = Duration::ZERO;
                    }
                    // The heartbeats continue. The call listens again after a pause.
                    Ok(Signal::Ask) | Err(_) => {
                        asked = 0;
                        deaf = (deaf * 2).clamp(LISTEN_AGAIN, self.claim.waiter_lease);
                    }
                },
                () = sleep_until(&core, self.give_up) => {
                    if let Some(error) = waiting.refusal() {
                        return Err(error);
                    }
                    return Err(self.out_of_time(waiting.last_answer()).await);
                }
            }
        }
    }

    /// Returns the validity of a pushed grant: one waiter lease from when the last answered
    /// heartbeat was sent.
    fn pushed(&self, last_answer: Moment) -> Granted {
        let leased = self.core().store.guarantees().has_leases();
        Granted { sent: last_answer, remaining: leased.then_some(self.claim.waiter_lease) }
    }

    /// Polls immediately, outside the renewer's schedule. Returns whether the store answered. A
    /// permanent error is an answer too.
    async fn ask(&self, waiting: &Waiting) -> bool {
        let core = self.core();
        let sent = self.now();
        let limit = request_timeout(self.claim.lease).min(self.give_up.since(sent));
        let asked = renew_one(&*core.store, &self.claim, self.claim.lease);
        match core.background.within(|| limit, asked).await {
            Some(Ok(renewal)) => waiting.answered(sent, renewal),
            Some(Err(error)) if !error.may_pass() => waiting.refused(&error),
            Some(Err(error)) => {
                waiting.note(&error);
                return false;
            }
            None => return false,
        }
        true
    }

    fn tell_place(&self, place: Place) {
        if let Some(tell) = &self.handle.on_waiting {
            tell(place);
        }
    }

    /// Creates a hold from a grant, and renews the grant first if not enough of it is left.
    ///
    /// The renewer must not keep the claim during this call, because both would renew it.
    async fn finish(
        &mut self,
        token: Token,
        granted: Granted,
        full: bool,
        enough: Duration,
        now: Moment,
    ) -> Result<Option<Hold>> {
        *self.last_reply = now;
        if granted.deadline().since(now) >= enough.max(self.handle.options.min_validity) {
            return self.hold(token, granted, full, now).map(Some);
        }
        Box::pin(self.renew_and_hold(token, granted, full, enough)).await
    }

    async fn renew_and_hold(
        &mut self,
        token: Token,
        mut granted: Granted,
        mut full: bool,
        enough: Duration,
    ) -> Result<Option<Hold>> {
        let core = self.core().clone();
        let mut enough = enough.max(self.handle.options.min_validity);
        let mut tries = 0;
        let mut last = None;
        let began = self.now();
        *self.last_reply = began;
        while granted.deadline().since(self.now()) < enough {
            let sent = self.now();
            if sent >= self.give_up {
                return Err(match last {
                    Some(error) => error,
                    None => self.out_of_time(*self.last_reply).await,
                });
            }
            core.check_open()?;
            let spent = match self.wait {
                Wait::Try => tries == RENEWALS_BEFORE_HOLDING,
                Wait::For(_) | Wait::Forever => {
                    sent.since(began) >= outage_timeout(&*core.store, &self.claim)
                }
            };
            if spent {
                return Err(last.unwrap_or_else(|| self.too_slow(began, enough)));
            }
            tries += 1;
            let limit = request_timeout(self.claim.lease).min(self.give_up.since(sent));
            let renewal = renew_one(&*core.store, &self.claim, self.claim.lease);
            match core.background.within(|| limit, renewal).await {
                Some(Ok(Renewal::Holding { token: reported, remaining })) if reported == token => {
                    *self.last_reply = self.now();
                    (granted, full) = (Granted { sent, remaining }, true);
                    enough = (self.claim.lease / 3).max(self.handle.options.min_validity);
                }
                Some(Ok(_)) => {
                    *self.last_reply = self.now();
                    return Ok(None);
                }
                Some(Err(error)) if !error.may_pass() => return Err(error),
                // The request failed immediately, and the next one may succeed.
                Some(Err(error)) => {
                    last = Some(error).filter(|error| !error.is_transient());
                    core.background.sleep(limit / 4).await;
                }
                None => {}
            }
        }
        let now = self.now();
        self.hold(token, granted, full, now).map(Some)
    }

    /// Returns the error for a grant that had too little time left in spite of the renewals.
    /// Dropping this attempt releases the grant.
    fn too_slow(&self, began: Moment, enough: Duration) -> Error {
        let (lease, silent) = (self.claim.lease, self.now().since(*self.last_reply));
        if *self.last_reply == began || silent >= request_timeout(lease) {
            let what = format!(
                "the store granted the lock, but has not answered for {} since; the grant will be \
                 released or expire",
                short(silent)
            );
            return Error::new(ErrorKind::Unreachable, what).with_hint(CHECK_THE_STORE);
        }
        let what = format!(
            "the store answers too slowly to leave {} of the lease of {}; the grant was released",
            short(enough),
            short(lease)
        );
        Error::new(ErrorKind::AtRisk, what)
            .with_hint("use a longer lease or a shorter min_validity")
    }

    fn hold(&mut self, token: Token, granted: Granted, full: bool, now: Moment) -> Result<Hold> {
        let core = &self.handle.core;
        let options = &self.handle.options;
        let leased = core.store.guarantees().has_leases();
        let lease = Arc::new(Lease::new(NewLease {
            claim: self.claim.clone(),
            token,
            granted,
            full,
            // In a store without leases, a renewal only checks whether the hold was evicted.
            renew: options.renew || !leased,
            ends: options.max_hold.map_or(Moment::NEVER, |d| now.plus(d)),
            keep_until: match options.min_hold.is_zero() {
                true => Moment::from_nanos(0),
                false => now.plus(options.min_hold),
            },
            clock: core.clock.clone(),
        }));
        core.saw(token);
        core.renewer.add_hold(lease.clone(), granted.sent, now);
        self.armed = false;
        let started = self.started;
        telemetry::acquired(&self.claim, token, || now.since(started));
        let guard = Hold::new(Arc::new(OwnedClaim::new(core.clone(), lease)));
        // A close() that ran before the renewer had this hold did not release it. In that case,
        // dropping the guard here releases it.
        core.check_open()?;
        Ok(guard)
    }

    /// Returns the error for a call whose time limit has passed. It names the holders if the store
    /// returns them quickly, or reports that the store does not answer.
    ///
    /// `last` is the time of the store's last answer, or of the start of the call.
    async fn out_of_time(&self, last: Moment) -> Error {
        let silent = self.now().since(last);
        let Wait::For(limit) = self.wait else { return Error::no_reply(silent) };
        // A store that answered recently is reachable, even if it returns the holders slowly.
        let was_heard = last > self.started && silent < self.claim.waiter_lease / 2;
        self.handle.out_of_time(&self.claim.name, limit, silent, was_heard).await
    }
}

impl LockHandle {
    /// Returns the error for a call that got no answer within its time limit.
    pub(crate) async fn not_answered(&self, operation: &'static str, limit: Duration) -> Error {
        let error = async {
            match self.name.as_ref().map_or_else(Name::new, |name| Ok(name.clone())) {
                Ok(name) => self.out_of_time(&name, limit, limit, false).await.with_lock(&name),
                Err(error) => error,
            }
        };
        let error = self.core.background.with_runtime(pin!(error)).await;
        self.not_acquired(operation, error)
    }

    /// Returns the error for a call that waited for `limit`. `silent` is the time since the last
    /// answer, and `was_heard` is whether the store counts as reachable if it does not answer now.
    async fn out_of_time(
        &self,
        name: &Name,
        limit: Duration,
        silent: Duration,
        was_heard: bool,
    ) -> Error {
        let core = &self.core;
        let read = core.store.holders(name, None);
        let read = core.background.within(|| Duration::from_millis(100), read).await;
        let answered = match &read {
            Some(Ok(_)) => true,
            Some(Err(error)) => !error.is_transient(),
            None => was_heard,
        };
        let limit = short(limit);
        if !answered {
            let what = format!(
                "did not acquire {name} within {limit}: no answer from the store for the last {}",
                short(silent)
            );
            return Error::new(ErrorKind::Unreachable, what).with_hint(CHECK_THE_STORE);
        }
        let info = match read {
            Some(Ok(info)) => info,
            _ => None,
        };
        let holders = info.as_ref().map(holders_of).unwrap_or_default();
        let foreigner = info.as_ref().and_then(foreigner_of);
        let foreigner = foreigner.map(|foreigner| foreigner.escape_debug().to_string());
        let held_by = match foreigner.or_else(|| shown_holders(&holders)) {
            Some(holder) => format!(": it is held by {holder}"),
            None => String::new(),
        };
        let what = format!("did not acquire {name} within {limit}{held_by}");
        let hint = "retry, or wait longer; the queue position was given up";
        Error::new(ErrorKind::Timeout, what).with_hint(hint).held_by(holders)
    }
}

async fn sleep_until(core: &Core, moment: Moment) {
    match moment {
        Moment::NEVER => std::future::pending().await,
        moment => Box::pin(core.background.sleep(moment.since(core.clock.now()))).await,
    }
}

/// Returns whether the store certainly has no record of the claim after this error.
fn was_refused(error: &Error) -> bool {
    use ErrorKind::{Closed, Config, Contended, Denied, InvalidName, Mismatch, Unsupported};
    matches!(
        error.kind(),
        Mismatch | InvalidName | Unsupported | Config | Denied | Closed | Contended
    )
}
