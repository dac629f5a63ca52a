//! Keeps every claim of one client alive: renews what is held, beats for what waits, in batches.
//!
//! One task on the background thread. Every claim has a time at which it is next due; each round
//! takes all that are due and sends them as one [`renew`](crate::store::Store::renew) of at most
//! [`BATCH`]. Due times are rounded up to a grid of a thirtieth of the lease, so that locks taken
//! one by one drift into common batches: commands per second grow with held locks ÷ batch.
//!
//! A renewal that fails is tried again until the lease's own deadline, each batch on its own, so
//! that an answer which hangs delays nobody else, and one that no repetition can help is split, so
//! that one damaged lock fails alone. A store that could ask for some claims of a batch only says so
//! for each ([`Renewal::Unknown`]). An error means *unknown* and moves no deadline; only the clock and
//! the store's own word end a hold.
//!
//! A store that hears of an eviction says so ([`Ear`]), and then the claim is due at once. It only says when
//! to ask: what is believed is the answer. A hold that nobody renews is asked about without being made longer.
//!
//! Taking or releasing a lock wakes this task only if something is due earlier than it would have
//! looked anyway, so the uncontended path pays for two entries in
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
use crate::base::clock::{Clock, Moment};
use crate::base::duration::short;
use crate::base::locked::locked;
use crate::base::world;
use crate::store::{Ear, Store};
use crate::words::answer::{Renew, Renewal};
use crate::words::claim::ClaimId;
use crate::words::error::{CHECK_THE_STORE, Error, ErrorKind, LostReason, Result};
use crate::words::name::Name;

/// The most claims that one request renews.
const BATCH: usize = 1_000;
/// How often the keeper looks at its clock while it keeps anything: after a suspend the timers
/// are late, the clock is not.
const CLOCK_POLL: Duration = Duration::from_secs(1);

/// When to renew a pushed grant, which is only as long as a waiter's lease. Soon, but no sooner
/// than most holds end: a hand-over costs no renewal then, however many there are a second.
fn first_renewal(lease: &Lease, now: Moment) -> Moment {
    let period = lease.claim.waiter_lease;
    let soon = aligned(now.plus(period / 30), period);
    if soon.plus(period / 30) < lease.next_change(now) { soon } else { now }
}

/// Keeps the claims of one client alive.
#[derive(Debug)]
pub(crate) struct Keeper {
    store: Arc<dyn Store>,
    clock: Clock,
    kept: Mutex<Schedule>,
    wake: Notify,
}

impl Keeper {
    pub(crate) fn new(store: Arc<dyn Store>, clock: Clock) -> Arc<Self> {
        Arc::new(Self { store, clock, kept: Mutex::default(), wake: Notify::new() })
    }

    fn lock(&self) -> MutexGuard<'_, Schedule> {
        locked(&self.kept)
    }

    /// Keeps a hold, whose last acknowledged request was sent at `sent`.
    pub(crate) fn hold(&self, lease: Arc<Lease>, sent: Moment, now: Moment) {
        let send = match lease.wants_renewal() {
            true if lease.is_full() => aligned(sent.plus(lease.claim.lease / 3), lease.claim.lease),
            true => first_renewal(&lease, now),
            false => Moment::NEVER,
        };
        let due = send.min(lease.next_change(now));
        self.put(Entry::new(Tracked::Lease(lease), due, send));
    }

    /// Keeps a place in the queue.
    pub(crate) fn wait(&self, waiting: Arc<Waiting>) {
        let due = waiting.next_beat(self.clock.now());
        self.put(Entry::new(Tracked::Waiting(waiting), due, due));
    }

    /// Whether this client holds a lock of this name.
    pub(crate) fn holds(&self, name: &Name) -> bool {
        let held = |entry: &Entry| match &entry.kept {
            Tracked::Lease(lease) => lease.claim.name == *name,
            Tracked::Waiting(_) => false,
        };
        self.lock().entries().any(held)
    }

    /// Keeps this claim no longer.
    pub(crate) fn forget(&self, id: ClaimId) {
        self.lock().take(id);
    }

    /// Gives up all claims because the client is being closed: the holds and the waits.
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

    /// The task: never ends by itself.
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

    /// Decides when to look next.
    fn plan(&self) -> Duration {
        let now = self.clock.now();
        let mut kept = self.lock();
        let glance = if kept.is_empty() { Duration::from_secs(3600) } else { CLOCK_POLL };
        let next = kept.first_due().unwrap_or(Moment::NEVER);
        let next = next.min(now.plus(glance));
        kept.planned = Some(next);
        next.since(now)
    }

    /// Moves states on by the clock, and collects what is to be sent now: holds before waits.
    fn due_now(&self) -> Vec<Vec<Tracked>> {
        let (mut holds, mut waits, mut looked_at) = (Vec::new(), Vec::new(), Vec::new());
        let now = self.clock.now();
        let mut kept = self.lock();
        kept.planned = Some(now);
        let mut look = |entry: &mut Entry| {
            if let Tracked::Lease(lease) = &entry.kept {
                looked_at.push(lease.clone());
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
            Some(entry.kept.next_look(entry.send, now))
        };
        while kept.look(now, &mut look) {}
        drop(kept);
        // After the lock: telling runs the wakers and the log of the program.
        for lease in looked_at {
            // Nobody has forked this thread, so nobody is asked which process this is.
            if lease.publish_at(now) == State::Lost(LostReason::MaxHold) {
                self.clean_up(&lease);
            }
        }
        let shard = |kept: &Tracked| self.store.shard(&kept.claim().name);
        batches(holds, shard).chain(batches(waits, shard)).collect()
    }

    /// A hold that ended by `max_hold` while its holder goes on is given back for it. The lock stays
    /// closed for what is left of `at_least`, and, since the holder may still be at work, for the
    /// lock-delay.
    fn clean_up(&self, lease: &Arc<Lease>) {
        let (store, claim) = (self.store.clone(), lease.claim_now().into_owned());
        let keep_until = match store.guarantees().at_least {
            true => lease.keep_until.max(self.clock.now().plus(claim.lock_delay)),
            false => Moment::from_nanos(0),
        };
        world::spawn(leave_with_retry(store, self.clock.clone(), claim, keep_until));
    }

    /// Sends on a task of its own, so that an answer which hangs delays nobody else.
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
            // One lock that cannot be renewed must not take the others with it: the halves are
            // sent apart, until it is alone.
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

    /// Takes in the answers to one batch, of which some may be unknown.
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
                // Another token is another grant: ours was lost (evicted), and a late duplicate of
                // our join has made that one. Loss is final.
                Renewal::Holding { .. } | Renewal::Waiting(_) | Renewal::Lost => {
                    lease.lose(LostReason::Gone);
                    self.drop_kept(&Tracked::Lease(lease));
                }
                // It was taken out before, and moves nothing.
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
            if !error.is_transient() {
                self.drop_kept(&kept);
                return waiting.refused(error);
            }
            if silent > outage_timeout(&*self.store, &waiting.claim) {
                self.drop_kept(&kept);
                let what = format!("no usable answer from the store for {}", short(silent));
                let failed = Error::new(error.kind(), what).with_hint(CHECK_THE_STORE);
                return waiting.fail(failed.hinted_by(error).because(error.reason()));
            }
        }
        let pause =
            (kept.period() / 30).clamp(Duration::from_millis(5), Duration::from_millis(500));
        self.schedule(&kept, now.plus(pause), now);
    }

    /// Keeps this wait or this hold no longer, but what its claim became meanwhile.
    fn drop_kept(&self, kept: &Tracked) {
        self.lock().take_same(kept);
    }

    /// Sends for this claim at `send`, unless it was forgotten meanwhile.
    fn schedule(&self, kept: &Tracked, send: Moment, now: Moment) {
        let send = match kept {
            Tracked::Lease(lease) if !lease.wants_renewal() => Moment::NEVER,
            _ => send,
        };
        let due = kept.next_look(send, now);
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

impl Ear for Keeper {
    /// The next request for this claim is due, as if its time had come: the store's answer to it tells the truth.
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

/// Batches of one period and one member of the store each: the time that an answer may take
/// follows the lease, and a member that does not answer delays nobody else's.
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

/// A store that panics has failed; it must not take everybody's renewals with it.
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
