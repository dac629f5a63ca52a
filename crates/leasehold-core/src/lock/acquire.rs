//! Taking a lock: joins, waits its turn, gives up; safe to drop at every await.
//!
//! # The argument
//! - *What is atomic*: joining is one call that either grants or queues, by the claim's id. That
//!   id is random and chosen before anything is sent.
//! - *A reply is lost*: the same claim is sent again; the store answers for the claim that is
//!   already there. After the time in which a grant could have come *and* expired unseen, the id is
//!   given up for a new one, so that one claim never gets two grants (P8). While it waits, a claim
//!   only ever renews, which never joins.
//! - *The future is dropped, or we give up*: [`Attempt`] exists before the first byte is sent, and
//!   its drop owes the store a `leave`, which the background thread pays with retries for as long
//!   as the claim could live. If a delayed `join` arrives even after that `leave`, nobody renews
//!   what it made, and it is gone within a lease (scenario 5).
//! - *We die*: our place ends with the waiter's lease, our grant with the lease.
//! - *A wake-up is lost*: the keeper's heartbeat asks every third of the waiter's lease (P6).
//! - *We have just dropped a guard of this lock*: its release is on its way from another thread, and is
//!   waited for, or we would stand behind ourselves ([`leaving`](crate::client::leaving)).
//! - *A grant comes late*: its deadline counts from the last request sent before it could have
//!   been made. A grant that is already at risk is renewed before anybody gets to see it. While the
//!   store is silent or too slow for that, who waits goes on waiting: for as long as for any other
//!   answer. A renewal never joins, so the store's own word ends it: still ours, or a new claim.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use crate::base::clock::Moment;
use crate::base::duration::short;
use crate::client::ask::{outage_timeout, renew_one};
use crate::client::core::Core;
use crate::client::lease::{Granted, Lease, NewLease};
use crate::client::waiting::{Outcome, WaiterEvent, Waiting};
use crate::client::{spans, telemetry};
use crate::lock::guard::{Guard, Hold};
use crate::lock::owner::{Asked, Owner};
use crate::lock::wait::Wait;
use crate::words::answer::{
    Joined, LockInfo, Mode, Place, Renewal, Signal, foreigner_of, holders_of,
};
use crate::words::claim::{Claim, Kind};
use crate::words::error::{CHECK_THE_STORE, Error, ErrorKind, Result, shown_holders};
use crate::words::holder::Holder;
use crate::words::limits::{drift, request_timeout, waiter_lease};
use crate::words::name::Name;
use crate::words::options::LockOptions;
use crate::words::token::Token;

pub(crate) type OnWaiting = Arc<dyn Fn(Place) + Send + Sync>;

/// Everything that one lock's handle knows.
#[derive(Clone)]
pub(crate) struct LockHandle {
    pub(crate) core: Arc<Core>,
    /// Checked, or what was given instead of a name.
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

    /// Takes the lock: the one way in, whatever the kind and the patience.
    pub(crate) async fn acquire(
        &self,
        operation: &'static str,
        weight: u32,
        wait: Wait,
    ) -> Result<Guard> {
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

    /// The same, as one of several, if it is free. That it is not is no event: it is waited for then, or
    /// tried once more.
    pub(crate) async fn take_if_free(&self, operation: &'static str, weight: u32) -> Result<Guard> {
        let taken = pin!(spans::wait(operation, &self.name, self.take(weight, Wait::Try)));
        let taken = self.core.background.with_runtime(taken).await;
        taken
            .inspect(|guard| guard.lease().begins())
            .map_err(|e| e.during(operation).at(self.core.store.url()))
    }

    /// Who holds and who waits.
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
            read.map_err(|e| e.on(&name))
        };
        let read = self.core.background.with_runtime(pin!(read)).await;
        read.map_err(|e| e.during("show").at(self.core.store.url()))
    }

    #[cold]
    fn not_acquired(&self, operation: &'static str, error: Error) -> Error {
        let core = &self.core;
        let mut error = error.during(operation).at(core.store.url());
        let busy = matches!(error.kind(), ErrorKind::Contended | ErrorKind::Timeout);
        if busy && error.name().is_some_and(|name| core.keeper.holds(name)) {
            error = error.by_this_client();
        }
        telemetry::not_acquired(self.kind, &error);
        error
    }

    async fn take(&self, weight: u32, wait: Wait) -> Result<Guard> {
        // A local store answers at once: without this, a task that takes lock after lock would never let
        // the others of its runtime have their turn.
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
        taken.map_err(|e| e.on(name))
    }

    async fn take_for(&self, owner: &Owner, name: &Name, weight: u32, wait: Wait) -> Result<Guard> {
        // A forked child must not wait for a mutex of the owner's.
        self.core.check_ours()?;
        let take = |wait| acquire_once(self, name, weight, wait);
        owner.acquire(&self.asked(name, weight), wait, take).await
    }

    /// Refuses what could never work, before anything is sent.
    fn check(&self, name: &Name, weight: u32) -> Result<()> {
        self.core.check_open()?;
        self.options.check(self.lease())?;
        let unsupported = |what: String, hint: &str| {
            Err(Error::new(ErrorKind::Unsupported, what).with_hint(hint).on(name))
        };
        let refused = |what: String| Err(Error::new(ErrorKind::Config, what).on(name));
        let promises = self.core.store.guarantees();
        if !promises.keeps(self.kind) {
            let what = format!("this store does not support locks of the kind {}", self.kind);
            return unsupported(what, "use another store");
        }
        if !self.options.lock_delay.is_zero() && !promises.lock_delay {
            let what =
                "this store does not support lock_delay: it keeps no record of a crashed holder";
            return unsupported(what.into(), "remove lock_delay, or use another store");
        }
        if !self.options.at_least.is_zero() && !promises.at_least {
            let what =
                "this store does not support at_least: it cannot keep a released lock unavailable";
            return unsupported(what.into(), "remove at_least, or use another store");
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

    /// What was asked for, or as much of it as the store can vouch for.
    fn lease(&self) -> Duration {
        self.options.lease.min(self.core.store.longest_lease())
    }

    fn asked<'a>(&'a self, name: &'a Name, weight: u32) -> Asked<'a> {
        Asked {
            core: &self.core,
            name,
            kind: self.kind,
            capacity: self.capacity,
            weight,
            min_validity: self.options.min_validity,
        }
    }

    /// A new claim, for which nothing was sent yet. Only in the process that connected.
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

/// How often a grant that came late is renewed by one who would not wait, before it is given up.
const RENEWALS_BEFORE_HOLDING: u32 = 3;

/// The most permits that a semaphore has.
const MAX_PERMITS: u32 = i32::MAX as u32;

/// Takes the lock with as many claims as it needs: a new one each time that a place was lost.
pub(crate) async fn acquire_once(
    handle: &LockHandle,
    name: &Name,
    weight: u32,
    wait: Wait,
) -> Result<Guard> {
    let core = &handle.core;
    let started = core.clock.now();
    let give_up = match wait {
        Wait::For(d) => started.plus(d),
        Wait::Try | Wait::Forever => Moment::NEVER,
    };
    let (mut began, mut heard) = (started, started);
    if core.is_leaving() {
        Box::pin(core.nothing_leaves(name, give_up)).await?;
        (began, heard) = (core.clock.now(), core.clock.now());
    }
    loop {
        let claim = handle.claim(name, weight, began)?;
        let taken = {
            let heard = &mut heard;
            let armed = false;
            let mut attempt =
                Attempt { handle, claim, wait, started, began, give_up, heard, armed };
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
        // Places that are lost as soon as they are taken must not keep a processor busy.
        let pause = LISTEN_AGAIN.min(give_up.since(core.clock.now()));
        Box::pin(core.background.sleep(pause)).await;
        began = core.clock.now();
    }
}

/// One claim on its way. Dropped while armed, it is taken back.
struct Attempt<'a> {
    handle: &'a LockHandle,
    claim: Claim,
    wait: Wait,
    /// When the caller asked for the lock.
    started: Moment,
    /// When this claim was made, before anything was sent for it.
    began: Moment,
    give_up: Moment,
    /// When the store last answered one of our claims: patience counts from here.
    heard: &'a mut Moment,
    armed: bool,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        // A forked child must not even wait for a mutex that its parent's threads may hold.
        if self.armed && self.core().holder_is_us() {
            self.core().keeper.forget(self.claim.id);
            self.core().leave_in_background(&self.claim, Moment::from_nanos(0));
        }
    }
}

/// How often in a row a store may call us to ask without anything having changed, before we
/// pause: a store that calls all the time must not keep a processor busy.
const ASKED_IN_VAIN: u32 = 8;
/// How long after listening failed it begins anew, at first.
const LISTEN_AGAIN: Duration = Duration::from_millis(10);

/// What [`Attempt::join`] came to.
enum Step {
    Holding(Token, Granted),
    Waiting(Moment, Place),
    /// The claim may have been granted and have expired unseen.
    Stale,
}

impl Attempt<'_> {
    fn core(&self) -> &Arc<Core> {
        &self.handle.core
    }

    fn now(&self) -> Moment {
        self.core().clock.now()
    }

    /// `None`: this claim came to nothing, and another one may try. What only those need who wait is
    /// in boxes: most locks are free, and every future that is made is moved, with all its room.
    async fn run(&mut self) -> Result<Option<Guard>> {
        match self.join().await? {
            Step::Holding(token, granted) => {
                let (enough, now) = (self.claim.lease / 3, *self.heard);
                self.finish(token, granted, true, enough, now).await
            }
            Step::Waiting(sent, place) => Box::pin(self.wait_for_grant(sent, place)).await,
            Step::Stale => Ok(None),
        }
    }

    /// Sends the claim until it is answered.
    async fn join(&mut self) -> Result<Step> {
        let mode = if self.wait == Wait::Try { Mode::Try } else { Mode::Wait };
        let first_sent = self.began;
        let mut sent = first_sent;
        let mut pause = Duration::from_millis(10);
        self.armed = true;
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
                    *self.heard = self.now();
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
            let says_when = error.as_ref().and_then(Error::succeeds_not_before);
            if says_when.is_some() {
                // Who says when is not silent.
                *self.heard = now;
            }
            if now >= self.give_up {
                let late = Box::pin(self.out_of_time(*self.heard)).await;
                return Err(match error {
                    Some(error) => late.because(error.reason()),
                    None => late,
                });
            }
            let silent = now.since(*self.heard);
            let (patient, in_vain) = match self.wait {
                // Waiting for what it says would be waiting for the lock.
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
            // What was sent may still arrive after whatever the next answer is.
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
            // Only a place of ours that outlived its holder is busy to one who would wait.
            Joined::Busy { .. } if self.wait != Wait::Try => Ok(Step::Stale),
            Joined::Busy { holders } => {
                self.armed = !only;
                Err(Error::contended(&self.claim.name, holders))
            }
        }
    }

    /// Stands in the queue until granted.
    async fn wait_for_grant(&mut self, sent: Moment, place: Place) -> Result<Option<Guard>> {
        let core = self.core().clone();
        let waiting = Waiting::new(self.claim.clone(), sent, place);
        core.keeper.wait(waiting.clone());
        // A close() between the first check and here has found nothing of ours to give up.
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
                        core.keeper.forget(self.claim.id);
                        let enough = self.claim.lease / 3;
                        let now = self.now();
                        return self.finish(token, granted, true, enough, now).await;
                    }
                    WaiterEvent::Outcome(Outcome::Gone) => {
                        *self.heard = self.now();
                        return Ok(None);
                    }
                    WaiterEvent::Outcome(Outcome::Failed(error)) => return Err(error),
                },
                signal = changed => match signal {
                    // A push for another place of this claim says nothing of ours.
                    Ok(Signal::Granted(token)) if !waiting.stands_under(token) => {
                        Box::pin(self.ask(&waiting)).await;
                        deaf = (deaf * 2).clamp(LISTEN_AGAIN, self.claim.waiter_lease);
                    }
                    Ok(Signal::Granted(token)) => {
                        let granted = self.pushed(waiting.last_answer());
                        let full = granted.remaining.is_none();
                        core.keeper.forget(self.claim.id);
                        let enough = self.claim.waiter_lease / 3;
                        let now = self.now();
                        return self.finish(token, granted, full, enough, now).await;
                    }
                    Ok(Signal::Ask) if asked < ASKED_IN_VAIN && Box::pin(self.ask(&waiting)).await => {
                        asked += 1;
                        deaf = Duration::ZERO;
                    }
                    // The heartbeat goes on; listening begins anew after a pause.
                    Ok(Signal::Ask) | Err(_) => {
                        asked = 0;
                        deaf = (deaf * 2).clamp(LISTEN_AGAIN, self.claim.waiter_lease);
                    }
                },
                () = sleep_until(&core, self.give_up) => {
                    return Err(self.out_of_time(waiting.last_answer()).await);
                }
            }
        }
    }

    /// What a pushed grant is worth: a waiter's lease from the last heartbeat before it.
    fn pushed(&self, last_answer: Moment) -> Granted {
        let leased = self.core().store.guarantees().has_leases();
        Granted { sent: last_answer, remaining: leased.then_some(self.claim.waiter_lease) }
    }

    /// Asks out of turn; tells whether the store answered. A refusal is an answer.
    async fn ask(&self, waiting: &Waiting) -> bool {
        let core = self.core();
        let sent = self.now();
        let limit = request_timeout(self.claim.lease).min(self.give_up.since(sent));
        let asked = renew_one(&*core.store, &self.claim, self.claim.lease);
        match core.background.within(|| limit, asked).await {
            Some(Ok(renewal)) => waiting.answered(sent, renewal),
            Some(Err(error)) if !error.is_transient() => waiting.refused(&error),
            Some(Err(_)) | None => return false,
        }
        true
    }

    fn tell_place(&self, place: Place) {
        if let Some(tell) = &self.handle.on_waiting {
            tell(place);
        }
    }

    /// Makes a guard of a grant, if enough is left of it; else renews it first. The keeper does not
    /// know of it by now: two would renew it.
    async fn finish(
        &mut self,
        token: Token,
        granted: Granted,
        full: bool,
        enough: Duration,
        now: Moment,
    ) -> Result<Option<Guard>> {
        *self.heard = now;
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
    ) -> Result<Option<Guard>> {
        let core = self.core().clone();
        let mut enough = enough.max(self.handle.options.min_validity);
        let mut tries = 0;
        let began = self.now();
        *self.heard = began;
        while granted.deadline().since(self.now()) < enough {
            let sent = self.now();
            if sent >= self.give_up {
                return Err(self.out_of_time(*self.heard).await);
            }
            core.check_open()?;
            let spent = match self.wait {
                Wait::Try => tries == RENEWALS_BEFORE_HOLDING,
                Wait::For(_) | Wait::Forever => {
                    sent.since(began) >= outage_timeout(&*core.store, &self.claim)
                }
            };
            if spent {
                return Err(self.too_slow(began, enough));
            }
            tries += 1;
            let limit = request_timeout(self.claim.lease).min(self.give_up.since(sent));
            let renewal = renew_one(&*core.store, &self.claim, self.claim.lease);
            match core.background.within(|| limit, renewal).await {
                Some(Ok(Renewal::Holding { token: told, remaining })) if told == token => {
                    *self.heard = self.now();
                    (granted, full) = (Granted { sent, remaining }, true);
                    enough = (self.claim.lease / 3).max(self.handle.options.min_validity);
                }
                Some(Ok(_)) => {
                    *self.heard = self.now();
                    return Ok(None);
                }
                Some(Err(error)) if !error.is_transient() => return Err(error),
                // Refused at once: the store may be back in a moment.
                Some(Err(_)) => core.background.sleep(limit / 4).await,
                None => {}
            }
        }
        let now = self.now();
        self.hold(token, granted, full, now).map(Some)
    }

    /// A grant of which not enough was left, however often it was renewed. Our drop gives it back.
    fn too_slow(&self, began: Moment, enough: Duration) -> Error {
        let (lease, silent) = (self.claim.lease, self.now().since(*self.heard));
        if *self.heard == began || silent >= request_timeout(lease) {
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

    fn hold(&mut self, token: Token, granted: Granted, full: bool, now: Moment) -> Result<Guard> {
        let core = &self.handle.core;
        let options = &self.handle.options;
        let leased = core.store.guarantees().has_leases();
        let lease = Arc::new(Lease::new(NewLease {
            claim: self.claim.clone(),
            token,
            granted,
            full,
            // Where nothing expires, renewing is only asking whether somebody evicted us.
            renew: options.renew || !leased,
            ends: options.max_hold.map_or(Moment::NEVER, |d| now.plus(d)),
            keep_until: match options.at_least.is_zero() {
                true => Moment::from_nanos(0),
                false => now.plus(options.at_least),
            },
            clock: core.clock.clone(),
        }));
        core.saw(token);
        core.keeper.hold(lease.clone(), granted.sent, now);
        self.armed = false;
        let started = self.started;
        telemetry::acquired(&self.claim, token, || now.since(started));
        let guard = Guard::new(Hold::new(core.clone(), lease));
        // A close() that came before the keeper knew of us did not release us: then we do.
        core.check_open()?;
        Ok(guard)
    }

    /// The caller's time is over; says who holds the lock if the store tells quickly, or that the
    /// store is silent. `last`: when it answered last, or the beginning.
    async fn out_of_time(&self, last: Moment) -> Error {
        let silent = self.now().since(last);
        let Wait::For(limit) = self.wait else { return Error::no_reply(silent) };
        // Slow to tell is not silent.
        let was_heard = last > self.started && silent < self.claim.waiter_lease / 2;
        self.handle.out_of_time(&self.claim.name, limit, silent, was_heard).await
    }
}

impl LockHandle {
    /// The error of one who was not answered at all in the time that it had.
    pub(crate) async fn not_answered(&self, operation: &'static str, limit: Duration) -> Error {
        let error = async {
            match self.name.as_ref().map_or_else(Name::new, |name| Ok(name.clone())) {
                Ok(name) => self.out_of_time(&name, limit, limit, false).await.on(&name),
                Err(error) => error,
            }
        };
        let error = self.core.background.with_runtime(pin!(error)).await;
        self.not_acquired(operation, error)
    }

    /// The error of one who waited for so long, and had the last answer this time ago.
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
            return Error::new(ErrorKind::Timeout, what).with_hint(CHECK_THE_STORE).in_silence();
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

/// Errors after which the store certainly keeps nothing of the claim.
fn was_refused(error: &Error) -> bool {
    use ErrorKind::{Closed, Config, Contended, Denied, InvalidName, Mismatch, Unsupported};
    matches!(
        error.kind(),
        Mismatch | InvalidName | Unsupported | Config | Denied | Closed | Contended
    )
}
