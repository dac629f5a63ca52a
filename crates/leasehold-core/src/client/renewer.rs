//! Keeps every claim of one client alive, in batches: renews holds, and sends heartbeats for
//! waiters.
//!
//! One task on the background thread does this. Every claim has a time at which it is next due: a
//! third of its lease after its last request was sent. Each round takes all claims that are due,
//! and sends them in batches of at most [`BATCH`] ([`renew`](crate::store::Store::renew)). A batch
//! contains only holds or only waiters, with the same lease, on the same member of the store. Due
//! times are rounded up to a grid of a thirtieth of the lease, so locks acquired one by one drift
//! into common batches. So the rate of requests grows with the number of held locks divided by the
//! batch size.
//!
//! A failed request is retried after a thirtieth of the lease, but at most 500 ms. The retries for
//! a hold end at the lease's own deadline. Those for a waiter end when the store has not answered
//! for [a limit](outage_timeout), or with an error that retrying cannot fix. Each batch is sent
//! separately, so a request that hangs delays no other batch. If retrying cannot fix the error, the
//! batch is split, so a single damaged lock fails alone. A store that could renew only some claims
//! of a batch reports the others as [`Renewal::Unknown`]. An error means that the state is
//! *unknown*, and changes no deadline. Only the clock and a result from the store end a hold.
//!
//! A store that learns of an eviction notifies the renewer ([`EvictionListener`]), and the claim is
//! due immediately. The notification only starts a poll, and only the result of that poll has an
//! effect. For a hold without automatic renewal, the poll does not extend the lease.
//!
//! Only a claim that is due before the next planned round wakes this task. A new hold is due later,
//! and a release removes an entry. So an uncontended lock costs two entries in
//! [maps](super::schedule), and no thread switch.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::Notify;

use super::ask::outage_timeout;
use super::lease::{Granted, Lease, State};
use super::leave::leave_with_retry;
use super::schedule::{Entry, Schedule, Tracked};
use super::waiting::{Waiting, aligned};
use super::{spans, telemetry};
use crate::store::{EvictionListener, Store};
use crate::types::answer::{Renew, Renewal};
use crate::types::claim::ClaimId;
use crate::types::error::{CHECK_THE_STORE, Error, ErrorKind, LostReason, Result};
use crate::types::name::Name;
use crate::util::clock::{Clock, Moment};
use crate::util::duration::short;
use crate::util::locked::locked;
use crate::util::world;

/// The maximum number of claims in one renewal request.
const BATCH: usize = 1_000;
/// The longest interval between two checks of the clock while any claim is kept. After a suspend,
/// timers are late, but the clock is correct.
const CLOCK_POLL: Duration = Duration::from_secs(1);

/// Returns when to renew a pushed grant, which lasts only as long as a waiter's lease.
///
/// The renewal is due soon, but late enough that most holds have ended. So most hand-overs cost no
/// renewal, however frequent they are. If the grant would be at risk by then, it is renewed
/// immediately.
fn first_renewal(lease: &Lease, now: Moment) -> Moment {
    let period = lease.claim.waiter_lease;
    let soon = aligned(now.plus(period / 30), period);
    if soon.plus(period / 30) < lease.next_change(now) { soon } else { now }
}

/// Keeps the claims of one client alive.
#[derive(Debug)]
pub(crate) struct Renewer {
    store: Arc<dyn Store>,
    clock: Clock,
    kept: Mutex<Schedule>,
    wake: Notify,
}

impl Renewer {
    pub(crate) fn new(store: Arc<dyn Store>, clock: Clock) -> Arc<Self> {
        Arc::new(Self { store, clock, kept: Mutex::default(), wake: Notify::new() })
    }

    fn lock(&self) -> MutexGuard<'_, Schedule> {
        locked(&self.kept)
    }

    /// Keeps a hold alive. Its last acknowledged request was sent at `sent`.
    pub(crate) fn add_hold(&self, lease: Arc<Lease>, sent: Moment, now: Moment) {
        let send = match lease.wants_renewal() {
            true if lease.is_full() => aligned(sent.plus(lease.claim.lease / 3), lease.claim.lease),
            true => first_renewal(&lease, now),
            false => Moment::NEVER,
        };
        let due = send.min(lease.next_change(now));
        self.put(Entry::new(Tracked::Lease(lease), due, send));
    }

    /// Keeps a queue position alive.
    pub(crate) fn add_waiter(&self, waiting: Arc<Waiting>) {
        let due = waiting.next_beat(self.clock.now());
        self.put(Entry::new(Tracked::Waiting(waiting), due, due));
    }

    /// Returns whether this client holds a lock of this name.
    pub(crate) fn holds(&self, name: &Name) -> bool {
        let held = |entry: &Entry| match &entry.kept {
            Tracked::Lease(lease) => lease.claim.name == *name,
            Tracked::Waiting(_) => false,
        };
        self.lock().entries().any(held)
    }

    /// Stops keeping this claim.
    pub(crate) fn forget(&self, id: ClaimId) {
        self.lock().take(id);
    }

    /// Stops keeping all claims because the client is being closed. Returns the holds and the
    /// waits.
    pub(crate) fn close(&self) -> (Vec<Arc<Lease>>, Vec<Arc<Waiting>>) {
        let entries = self.lock().take_all();
        let (mut held, mut waited) = (Vec::new(), Vec::new());
        for entry in entries {
            match entry.kept {
                Tracked::Lease(lease) => held.push(lease),
                Tracked::Waiting(waiting) => waited.push(waiting),
            }
        }
        (held, waited)
    }

    fn put(&self, entry: Entry) {
        let due = entry.due;
        let mut kept = self.lock();
        kept.put(entry);
        let early = kept.planned.is_some_and(|planned| due < planned);
        drop(kept);
        if early {
            self.wake.notify_one();
        }
    }

    /// Runs the renewer. It never returns.
    pub(crate) async fn run(self: Arc<Self>) {
        loop {
            for batch in self.due_now() {
                self.spawn_send(batch);
            }
            let pause = self.plan();
            tokio::select! {
                biased;
                () = self.wake.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Plans the next round, and returns the time until then.
    fn plan(&self) -> Duration {
        let now = self.clock.now();
        let mut kept = self.lock();
        let pause = if kept.is_empty() { Duration::from_secs(3600) } else { CLOCK_POLL };
        let next = kept.first_due().unwrap_or(Moment::NEVER);
        let next = next.min(now.plus(pause));
        kept.planned = Some(next);
        next.since(now)
    }

    /// Publishes state changes that are due by the clock, and returns the batches to send now,
    /// holds first.
    fn due_now(&self) -> Vec<Vec<Tracked>> {
        let (mut holds, mut waits, mut checked) = (Vec::new(), Vec::new(), Vec::new());
        let now = self.clock.now();
        let mut kept = self.lock();
        kept.planned = Some(now);
        let mut check = |entry: &mut Entry| {
            if let Tracked::Lease(lease) = &entry.kept {
                checked.push(lease.clone());
                if lease.has_ended(now) {
                    return None;
                }
            }
            if entry.send <= now {
                match &entry.kept {
                    Tracked::Lease(_) => holds.push(entry.kept.clone()),
                    Tracked::Waiting(_) => waits.push(entry.kept.clone()),
                }
                entry.send = Moment::NEVER;
                entry.hurried = false;
            }
            Some(entry.kept.next_due(entry.send, now))
        };
        while kept.check_next(now, &mut check) {}
        drop(kept);
        // Publishing runs the program's wakers and logging, so it happens after the mutex is
        // unlocked.
        for lease in checked {
            // This thread exists only in the process that created it, so the process is not
            // checked.
            if lease.publish_at(now) == State::Lost(LostReason::MaxHold) {
                self.clean_up(&lease);
            }
        }
        let shard = |kept: &Tracked| self.store.shard(&kept.claim().name);
        batches(holds, shard).chain(batches(waits, shard)).collect()
    }

    /// Releases a hold that `max_hold` ended.
    ///
    /// If the store supports it, the lock stays unavailable for what is left of `min_hold`, and at
    /// least for the lock-delay, because the holder may still be working.
    fn clean_up(&self, lease: &Arc<Lease>) {
        let (store, claim) = (self.store.clone(), lease.claim_now().into_owned());
        let keep_until = match store.guarantees().min_hold {
            true => lease.keep_until.max(self.clock.now().plus(claim.lock_delay)),
            false => Moment::from_nanos(0),
        };
        world::spawn(leave_with_retry(store, self.clock.clone(), claim, keep_until));
    }

    /// Sends a batch on a separate task, so a request that hangs delays no other batch.
    fn spawn_send(self: &Arc<Self>, batch: Vec<Tracked>) {
        let sending: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(self.clone().send(batch));
        world::spawn(sending);
    }

    async fn send(self: Arc<Self>, batch: Vec<Tracked>) {
        let sent = self.clock.now();
        let renewal = |kept: &Tracked| Renew {
            claim: kept.claim_now(),
            lease: match kept {
                Tracked::Lease(lease) if lease.wants_renewal() => lease.next_lease(sent),
                Tracked::Lease(lease) => lease.as_it_is(sent),
                Tracked::Waiting(waiting) => waiting.claim.lease,
            },
        };
        let renewals: Vec<Renew> = batch.iter().map(renewal).collect();
        let limit = batch.iter().map(Tracked::period).min().unwrap_or_default() / 3;
        match self.renew(&renewals, limit).await {
            Ok(answers) => self.all_answered(batch, sent, answers),
            // One lock that cannot be renewed must not stop the others. The halves are sent
            // separately, until that lock is alone in its batch.
            Err(error) if batch.len() > 1 && !error.is_transient() => {
                let mut batch = batch;
                let half = batch.split_off(batch.len() / 2);
                self.spawn_send(batch);
                self.spawn_send(half);
            }
            Err(error) => {
                telemetry::renewal_failed(batch.len(), &error);
                for kept in batch {
                    self.failed(kept, &error);
                }
            }
        }
    }

    async fn renew(&self, renewals: &[Renew], limit: Duration) -> Result<Vec<Renewal>> {
        let renewing = caught(spans::call("renew", self.store.renew(renewals)));
        match tokio::time::timeout(limit, renewing).await {
            Ok(Ok(answers)) if answers.len() == renewals.len() => Ok(answers),
            Ok(Ok(_)) => Err(Error::new(
                ErrorKind::Corrupt,
                "the store returned a wrong number of renewal results",
            )),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                let what = format!("no answer to a renewal within {}", short(limit));
                Err(Error::new(ErrorKind::Unreachable, what).with_hint(CHECK_THE_STORE))
            }
        }
    }

    /// Applies the results of one batch. Some of them may be unknown.
    fn all_answered(&self, batch: Vec<Tracked>, sent: Moment, answers: Vec<Renewal>) {
        let (mut known, mut unknown, mut first) = (0, 0, None);
        let now = self.clock.now();
        for (kept, renewal) in batch.into_iter().zip(answers) {
            match renewal.known() {
                Ok(renewal) => {
                    known += 1;
                    self.answered(kept, sent, renewal, now);
                }
                Err(error) => {
                    unknown += 1;
                    self.failed(kept, &error);
                    first.get_or_insert(error);
                }
            }
        }
        telemetry::renewed(known);
        if let Some(error) = first {
            telemetry::renewal_failed(unknown, &error);
        }
    }

    fn answered(&self, kept: Tracked, sent: Moment, renewal: Renewal, now: Moment) {
        match kept {
            Tracked::Lease(lease) => match renewal {
                Renewal::Holding { token, remaining } if token == lease.token => {
                    if lease.acknowledge(Granted { sent, remaining }) {
                        let period = lease.claim.lease;
                        let next = aligned(sent.plus(period / 3), period);
                        self.schedule(&Tracked::Lease(lease), next, now);
                    }
                }
                // Another token belongs to another grant. Our grant was lost (evicted), and a late
                // duplicate of our join has created the other one. A loss is final.
                Renewal::Holding { .. } | Renewal::Waiting(_) | Renewal::Lost => {
                    lease.lose(LostReason::Gone);
                    self.drop_kept(&Tracked::Lease(lease));
                }
                // The caller has already handled unknown results.
                Renewal::Unknown { .. } => {}
            },
            Tracked::Waiting(waiting) => {
                waiting.answered(sent, renewal);
                if waiting.is_decided() {
                    self.drop_kept(&Tracked::Waiting(waiting));
                } else {
                    if waiting.is_long(now) && self.holds(&waiting.claim.name) {
                        telemetry::waits_behind_itself(&waiting.claim);
                    }
                    let next = waiting.next_beat(now);
                    self.schedule(&Tracked::Waiting(waiting), next, now);
                }
            }
        }
    }

    fn failed(&self, kept: Tracked, error: &Error) {
        let now = self.clock.now();
        if let Tracked::Waiting(waiting) = &kept {
            let silent = now.since(waiting.last_answer());
            if !error.may_pass() {
                self.drop_kept(&kept);
                return waiting.refused(error);
            }
            if silent > outage_timeout(&*self.store, &waiting.claim) {
                self.drop_kept(&kept);
                let what = format!("no usable answer from the store for {}", short(silent));
                let failed = Error::new(error.kind(), what).with_hint(CHECK_THE_STORE);
                return waiting.fail(failed.hinted_by(error).with_source(error.reason()));
            }
            waiting.note(error);
        }
        let pause = match &kept {
            // The store answers, so the cause is not a short outage, and there may be thousands of
            // waiters.
            Tracked::Waiting(_) if !error.is_transient() => kept.period() / 2,
            _ => (kept.period() / 30).clamp(Duration::from_millis(5), Duration::from_millis(500)),
        };
        self.schedule(&kept, now.plus(pause), now);
    }

    /// Stops renewing this wait or hold. If the claim's wait has become a hold in the meantime, the
    /// hold is still renewed.
    fn drop_kept(&self, kept: &Tracked) {
        self.lock().take_same(kept);
    }

    /// Schedules the next request for this claim at `send`, unless the claim was forgotten in the
    /// meantime.
    fn schedule(&self, kept: &Tracked, send: Moment, now: Moment) {
        let send = match kept {
            Tracked::Lease(lease) if !lease.wants_renewal() => Moment::NEVER,
            _ => send,
        };
        let due = kept.next_due(send, now);
        let mut all = self.lock();
        all.plan(kept, send, due, now);
        let first = all.first_due().unwrap_or(Moment::NEVER);
        let early = all.planned.is_some_and(|planned| first < planned);
        drop(all);
        if early {
            self.wake.notify_one();
        }
    }
}

impl EvictionListener for Renewer {
    /// Makes the next request for this claim due immediately. The notification is only a hint: the
    /// reply to that request decides.
    fn ask(&self, id: ClaimId) {
        let now = self.clock.now();
        let mut kept = self.lock();
        let early = kept.hurry(id, now) && kept.planned.is_some_and(|planned| now < planned);
        drop(kept);
        if early {
            self.wake.notify_one();
        }
    }
}

/// Splits claims into batches with the same period and the same member of the store.
///
/// The time limit of a request depends on the lease, and an unreachable member must not delay
/// requests to the others.
fn batches(
    mut kept: Vec<Tracked>,
    shard: impl Fn(&Tracked) -> u64,
) -> impl Iterator<Item = Vec<Tracked>> {
    let sort = |kept: &Tracked| (kept.period(), shard(kept));
    kept.sort_by_cached_key(sort);
    let same = kept.chunk_by(|a, b| sort(a) == sort(b));
    let all: Vec<_> = same.flat_map(|s| s.chunks(BATCH)).map(<[Tracked]>::to_vec).collect();
    all.into_iter()
}

/// Turns a panic of the store into an error, so it does not stop all renewals.
async fn caught<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let mut work = pin!(work);
    let panicked = |_| {
        let hint = "report this to the authors of the store";
        Poll::Ready(Err(Error::new(ErrorKind::Corrupt, "the store panicked").with_hint(hint)))
    };
    let poll = |cx: &mut Context<'_>| {
        catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(cx))).unwrap_or_else(panicked)
    };
    poll_fn(poll).await
}
