//! The state of a hold: `Held → AtRisk → Lost`, determined by this machine's clock.
//!
//! # The argument
//! The store counts a lease from when it processed the request. The client counts it from *before
//! it sent* the request, and shortens it by the drift that two clocks may have. So the client's
//! deadline is never later than the store's, whatever the network did: while [`Lease::is_held`]
//! returns `true`, the store has not granted the lock to another client. (A lease is never counted
//! from when the reply arrives, because the reply may have been delayed for longer than the lease.)
//!
//! A loss is final. The deadline is one atomic whose value 0 means lost, and every change is a
//! compare-and-swap, or a swap to 0. A renewal that is acknowledged after the deadline finds that
//! the deadline has passed, writes 0 and changes nothing else. Any reader that finds that the
//! deadline has passed marks the lease as lost. So a process that was paused for an hour sees the
//! loss immediately, even before the client's thread has run.

use std::borrow::Cow;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::Duration;

use tokio::sync::watch;

use super::spans::Holding;
use super::telemetry::{self, Gauged};
use super::weight::Weight;
use crate::types::claim::Claim;
use crate::types::error::LostReason;
use crate::types::limits::{MIN_LEASE, drift};
use crate::types::sequencer::Side;
use crate::types::token::{FencingToken, Token};
use crate::util::clock::{Clock, Moment};
use crate::util::world::process_id;

/// The state of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// The lock is held, and renewals succeed.
    Held,
    /// The lock is held, but no renewal has succeeded for two thirds of the lease (or the end of
    /// `max_hold` is near). Do not start new work. The state may become [`Held`](Self::Held) again.
    AtRisk(Deadline),
    /// The lock was lost. This state is final.
    Lost(LostReason),
    /// The owner has released the lock.
    Released,
}

/// The moment at which a hold is lost unless it is renewed, on the client's boot clock.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let locks = leasehold::connect("memory:").await?;
/// use leasehold::State;
/// let guard = locks.mutex("order:42").lock().await?;
/// if let State::AtRisk(deadline) = guard.state() {
///     println!("lost in {:?} if nothing is heard, at {:?}", deadline.remaining(), deadline.moment());
/// }
/// # Ok::<(), leasehold::Error>(()) }).unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline {
    moment: Moment,
    left: Duration,
}

impl Deadline {
    /// Returns the deadline as a moment on the boot clock.
    pub fn moment(&self) -> Moment {
        self.moment
    }

    /// Returns how much time was left when the state was read.
    pub fn remaining(&self) -> Duration {
        self.left
    }
}

const LOST: u64 = 0;

/// The last acknowledged grant or renewal: when it was sent, and how long it is valid.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Granted {
    /// The time just before the request was sent.
    pub(crate) sent: Moment,
    /// The validity that the store returned, or `None` if the store has no leases.
    pub(crate) remaining: Option<Duration>,
}

impl Granted {
    /// Returns the time until which the grant is certain.
    pub(crate) fn deadline(self) -> Moment {
        match self.remaining {
            Some(left) => self.sent.plus(left.saturating_sub(drift(left))),
            None => Moment::NEVER,
        }
    }

    fn at_risk_from(self) -> Moment {
        self.remaining.map_or(Moment::NEVER, |left| self.sent.plus(left / 3 * 2))
    }
}

/// One hold, shared by its guard and the renewer.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) claim: Claim,
    pub(crate) token: Token,
    /// The current weight. `claim.weight` is the weight with which the lock was acquired.
    pub(crate) weight: Weight,
    /// Whether the lease is renewed automatically.
    pub(crate) renew: bool,
    /// The end of `max_hold`.
    pub(crate) ends: Moment,
    /// The time until which the lock stays unavailable, even after a release (`min_hold`).
    pub(crate) keep_until: Moment,
    clock: Clock,
    pid: u32,
    deadline: AtomicU64,
    at_risk_from: AtomicU64,
    /// The time from which the end of `max_hold` counts as near.
    nears_end: Moment,
    /// Whether a lease of full length was granted. A pushed grant is shorter until it is renewed.
    full: AtomicBool,
    reason: OnceLock<LostReason>,
    released: AtomicBool,
    gauged: Gauged,
    pub(crate) holding: Holding,
    /// The channel to subscribers. The first subscription creates it, because most holds end
    /// without one.
    state_sender: OnceLock<watch::Sender<State>>,
}

/// The arguments of [`Lease::new`].
pub(crate) struct NewLease {
    pub(crate) claim: Claim,
    pub(crate) token: Token,
    pub(crate) granted: Granted,
    pub(crate) full: bool,
    pub(crate) renew: bool,
    pub(crate) ends: Moment,
    pub(crate) keep_until: Moment,
    pub(crate) clock: Clock,
}

impl Lease {
    pub(crate) fn new(new: NewLease) -> Self {
        let nears_end = match new.ends {
            Moment::NEVER => Moment::NEVER,
            // The last third of a lease, or of the whole hold if that is shorter.
            ends => ends.minus(new.claim.lease.min(ends.since(new.clock.now())) / 3),
        };
        let pid = new.claim.holder.pid;
        let gauged = Gauged::held(&new.claim);
        let lease = Self {
            weight: Weight::new(new.claim.weight),
            claim: new.claim,
            token: new.token,
            renew: new.renew,
            ends: new.ends,
            keep_until: new.keep_until,
            clock: new.clock,
            pid,
            deadline: AtomicU64::new(new.granted.deadline().min(new.ends).as_nanos().max(1)),
            at_risk_from: AtomicU64::new(0),
            nears_end,
            full: AtomicBool::new(new.full),
            reason: OnceLock::new(),
            released: AtomicBool::new(false),
            gauged,
            holding: Holding::default(),
            state_sender: OnceLock::new(),
        };
        lease.set_at_risk(new.granted);
        lease
    }

    fn set_at_risk(&self, granted: Granted) {
        let from = granted.at_risk_from().min(self.nears_end);
        self.at_risk_from.store(from.as_nanos(), Ordering::SeqCst);
    }

    /// Opens the span of the hold, in the task of the caller.
    pub(crate) fn begins(&self) {
        self.holding.begins(&self.claim, self.token);
    }

    /// Ends the gauge and the span of the hold.
    pub(crate) fn over(&self) {
        self.gauged.over();
        self.holding.ends();
    }

    /// Returns whether this process acquired the lock. A fork of that process did not.
    pub(crate) fn is_ours(&self) -> bool {
        self.pid == process_id()
    }

    /// Returns the token, if no other client can hold the lock at the same time.
    pub(crate) fn fencing_token(&self) -> Option<FencingToken> {
        matches!(self.side(), Side::Mutex | Side::Write).then(|| FencingToken::of(self.token))
    }

    /// Returns the kind of the hold.
    pub(crate) fn side(&self) -> Side {
        Side::of(self.claim.kind, self.weight.now())
    }

    /// Returns the claim with its current weight, as the store has it or should have it.
    pub(crate) fn claim_now(&self) -> Cow<'_, Claim> {
        match self.weight.now() {
            same if same == self.claim.weight => Cow::Borrowed(&self.claim),
            weight => Cow::Owned(Claim { weight, ..self.claim.clone() }),
        }
    }

    /// Returns whether the lock is certainly held now.
    pub(crate) fn is_held(&self) -> bool {
        self.left().is_some()
    }

    /// Returns how much longer the lock is certainly held, or zero.
    pub(crate) fn remaining(&self) -> Duration {
        self.left().unwrap_or_default()
    }

    fn left(&self) -> Option<Duration> {
        if self.is_ours() { self.left_at(self.clock.now()) } else { None }
    }

    /// Returns how much longer the lock is certainly held. For use in the process that acquired the
    /// lock, because checking the process costs a system call.
    fn left_at(&self, now: Moment) -> Option<Duration> {
        let deadline = self.deadline.load(Ordering::SeqCst);
        if deadline == LOST || self.released.load(Ordering::SeqCst) {
            return None;
        }
        if Moment::from_nanos(deadline) == Moment::NEVER {
            return Some(Duration::MAX);
        }
        if now.as_nanos() < deadline {
            return Some(Moment::from_nanos(deadline).since(now));
        }
        self.expire(now, deadline);
        // A renewal may have been acknowledged in the meantime. In that case, the new deadline
        // applies.
        let deadline = Moment::from_nanos(self.deadline.load(Ordering::SeqCst));
        (deadline > now).then(|| deadline.since(now))
    }

    /// Returns whether the lease was lost, or has expired by `now`. Does not notify subscribers.
    pub(crate) fn has_ended(&self, now: Moment) -> bool {
        now.as_nanos() >= self.deadline.load(Ordering::SeqCst)
    }

    /// Marks the lease as lost because `deadline` has passed, unless a renewal has moved the
    /// deadline.
    fn expire(&self, now: Moment, deadline: u64) {
        let reason = self.reason_at(now);
        let swap =
            self.deadline.compare_exchange(deadline, LOST, Ordering::SeqCst, Ordering::SeqCst);
        if swap.is_ok() && !self.released.load(Ordering::SeqCst) {
            self.lost_because(reason);
        }
    }

    fn reason_at(&self, now: Moment) -> LostReason {
        if now >= self.ends { LostReason::MaxHold } else { LostReason::Expired }
    }

    /// Marks the lease as lost, for a reason from the store or the client. Returns whether it was
    /// held.
    ///
    /// A lock that its owner released is not lost, even if a renewal after the release did not find
    /// it.
    pub(crate) fn lose(&self, reason: LostReason) -> bool {
        if self.released.load(Ordering::SeqCst) {
            return false;
        }
        // The reason is set before the swap, so no thread sees the loss without its reason.
        self.reason.get_or_init(|| reason);
        let was_held = self.deadline.swap(LOST, Ordering::SeqCst) != LOST;
        if was_held {
            self.lost_because(reason);
        }
        was_held
    }

    fn lost_because(&self, reason: LostReason) {
        let reason = *self.reason.get_or_init(|| reason);
        self.over();
        self.publish_change(|state| {
            *state = State::Lost(reason);
            true
        });
        telemetry::lost(&self.claim, self.token, reason);
    }

    /// Marks the lock as released by its owner. From now on it does not count as held.
    pub(crate) fn mark_released(&self) {
        self.released.store(true, Ordering::SeqCst);
        self.gauged.over();
        self.publish_change(|state| {
            let end = !matches!(state, State::Lost(_));
            if end {
                *state = State::Released;
            }
            end
        });
    }

    /// Applies an acknowledged renewal, and returns whether the lock is held. Never revives a lost
    /// lease.
    pub(crate) fn acknowledge(&self, granted: Granted) -> bool {
        let new = granted.deadline().min(self.ends).as_nanos();
        let now = loop {
            let old = self.deadline.load(Ordering::SeqCst);
            let now = self.clock.now();
            if old == LOST {
                return false;
            }
            if now.as_nanos() >= old {
                self.expire(now, old);
                continue;
            }
            let later = new.max(old);
            let swap =
                self.deadline.compare_exchange(old, later, Ordering::SeqCst, Ordering::SeqCst);
            if swap.is_ok() {
                break now;
            }
        };
        if self.is_of_full_length(granted) {
            self.full.store(true, Ordering::SeqCst);
        }
        self.set_at_risk(granted);
        self.publish_at(now);
        true
    }

    /// Returns whether the lease should be renewed.
    pub(crate) fn wants_renewal(&self) -> bool {
        self.renew || !self.is_full()
    }

    /// Returns whether a lease of full length was ever acknowledged.
    pub(crate) fn is_full(&self) -> bool {
        self.full.load(Ordering::SeqCst)
    }

    /// Returns whether the grant lasts longer than a pushed one. A store that could not extend the
    /// lease just now may return only the time that is left.
    fn is_of_full_length(&self, granted: Granted) -> bool {
        let pushed = self.claim.waiter_lease;
        granted.remaining.is_none_or(|left| left > pushed || self.claim.lease <= pushed)
    }

    /// Returns the lease to request with the next renewal. It is the full lease, or less if
    /// `max_hold` ends earlier.
    pub(crate) fn next_lease(&self, now: Moment) -> Duration {
        match self.ends {
            Moment::NEVER => self.claim.lease,
            // The store's lease must cover our deadline, which is shortened by the drift.
            ends => {
                // The store must have the claim until `min_hold` is over. Only then can a release
                // keep the lock unavailable.
                let left = ends.max(self.keep_until).since(now);
                self.claim.lease.min(left + drift(left) * 2)
            }
        }
    }

    /// Returns the lease to request if the renewal is only a poll. It covers the time that is left
    /// of the lease.
    pub(crate) fn as_it_is(&self, now: Moment) -> Duration {
        match self.left_at(now) {
            // The store has no leases, so it ignores the number.
            Some(Duration::MAX) => self.claim.lease,
            // The store's lease must cover our deadline, which is shortened by the drift.
            Some(left) => left + drift(left) * 2,
            None => MIN_LEASE,
        }
    }

    /// Returns the current state according to the clock.
    pub(crate) fn state(&self) -> State {
        if self.is_ours() {
            self.state_at(self.clock.now())
        } else {
            State::Lost(LostReason::Forked)
        }
    }

    /// Returns the state. For use in the process that acquired the lock.
    pub(crate) fn state_at(&self, now: Moment) -> State {
        let left = self.left_at(now);
        if let Some(reason) = self.lost_reason() {
            return State::Lost(reason);
        }
        match left {
            None if self.released.load(Ordering::SeqCst) => State::Released,
            // Another thread is just finding that the deadline has passed, and reports the same
            // reason.
            None => State::Lost(self.reason_at(now)),
            Some(left) => match now.as_nanos() >= self.at_risk_from.load(Ordering::SeqCst) {
                true => State::AtRisk(Deadline { moment: now.plus(left), left }),
                false => State::Held,
            },
        }
    }

    /// Returns why the lease was lost, if any thread has noticed it.
    pub(crate) fn lost_reason(&self) -> Option<LostReason> {
        self.reason.get().copied()
    }

    /// Publishes the current state to the subscribers.
    pub(crate) fn publish(&self) {
        self.show(self.state());
    }

    /// Publishes like [`publish`](Self::publish), and returns the state. For use in the process
    /// that acquired the lock.
    pub(crate) fn publish_at(&self, now: Moment) -> State {
        let state = self.state_at(now);
        self.show(state);
        state
    }

    fn show(&self, now: State) {
        let kind = std::mem::discriminant::<State>;
        self.publish_change(|shown| {
            // `now` may be outdated. A final state is never replaced.
            let ended = matches!(shown, State::Lost(_) | State::Released);
            let news = kind(shown) != kind(&now) && !ended;
            if news {
                *shown = now;
            }
            news
        });
    }

    /// Returns when [`publish`](Self::publish) will have a new state if nothing else happens.
    pub(crate) fn next_change(&self, now: Moment) -> Moment {
        let at_risk = Moment::from_nanos(self.at_risk_from.load(Ordering::SeqCst));
        let deadline = Moment::from_nanos(self.deadline.load(Ordering::SeqCst));
        if now < at_risk { at_risk.min(deadline) } else { deadline }
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<State> {
        let receiver =
            self.state_sender.get_or_init(|| watch::Sender::new(self.state())).subscribe();
        // Publishes a change that happened before the channel existed.
        fence(Ordering::SeqCst);
        self.publish();
        receiver
    }

    /// Changes the published state, if there has ever been a subscriber.
    ///
    /// The caller must store the state that `change` depends on before this call. If a change and
    /// the first subscription happen at the same time, the two fences ensure that at least one sees
    /// the other.
    fn publish_change(&self, change: impl FnOnce(&mut State) -> bool) {
        fence(Ordering::SeqCst);
        if let Some(sender) = self.state_sender.get() {
            sender.send_if_modified(change);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::claim::Kind;
    use crate::types::name::Name;

    const LEASE: Duration = Duration::from_secs(15);

    fn lease(clock: &Clock, ends: Moment) -> Lease {
        let claim = Claim::new(Name::new("x").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let granted = Granted { sent: clock.now(), remaining: Some(LEASE) };
        Lease::new(NewLease {
            claim,
            token: Token::new(1).unwrap(),
            granted,
            full: true,
            renew: true,
            ends,
            keep_until: Moment::from_nanos(0),
            clock: clock.clone(),
        })
    }

    // S01
    #[test]
    fn the_deadline_counts_from_before_sending() {
        let clock = Clock::stepped();
        let sent = clock.now();
        clock.advance(LEASE * 9 / 10);
        let granted = Granted { sent, remaining: Some(LEASE) };
        assert!(granted.deadline().since(clock.now()) <= LEASE / 10 - drift(LEASE));
    }

    // S01
    #[test]
    fn deadline_is_shortened_by_the_clock_drift() {
        let granted =
            Granted { sent: Moment::from_nanos(7), remaining: Some(Duration::from_secs(100)) };
        // The margin is one percent and two milliseconds.
        let certain = Duration::from_millis(100_000 - 1_000 - 2);
        assert_eq!(granted.deadline(), Moment::from_nanos(7).plus(certain));
        // A validity that is not longer than the margin gives no certainty.
        let short = Granted { remaining: Some(Duration::from_millis(2)), ..granted };
        assert_eq!(short.deadline(), granted.sent);
        let endless = Granted { remaining: None, ..granted };
        assert_eq!(endless.deadline(), Moment::NEVER);
    }

    // S02
    #[test]
    fn reply_after_the_deadline_does_not_revive_the_lease() {
        let clock = Clock::stepped();
        let lease = lease(&clock, Moment::NEVER);
        let sent = clock.now();
        clock.advance(LEASE);
        assert!(!lease.acknowledge(Granted { sent, remaining: Some(LEASE * 10) }));
        assert!(!lease.is_held());
        assert_eq!(lease.state(), State::Lost(LostReason::Expired));
        assert!(!lease.acknowledge(Granted { sent: clock.now(), remaining: Some(LEASE) }));
        assert!(!lease.is_held());
    }

    // S10
    #[test]
    fn lease_expires_while_the_machine_is_suspended() {
        let clock = Clock::stepped();
        let lease = lease(&clock, Moment::NEVER);
        assert!(lease.is_held());
        clock.advance(LEASE * 3);
        assert!(!lease.is_held());
        assert_eq!(lease.remaining(), Duration::ZERO);
    }

    #[test]
    fn lease_is_at_risk_after_two_thirds_until_renewed() {
        let clock = Clock::stepped();
        let lease = lease(&clock, Moment::NEVER);
        let watch = lease.subscribe();
        clock.advance(LEASE * 2 / 3);
        lease.publish();
        assert!(matches!(*watch.borrow(), State::AtRisk(d) if d.remaining() <= LEASE / 3));
        assert!(lease.acknowledge(Granted { sent: clock.now(), remaining: Some(LEASE) }));
        assert_eq!(*watch.borrow(), State::Held);
    }

    #[test]
    fn late_watcher_sees_the_current_state() {
        let clock = Clock::stepped();
        let (lost, risky) = (lease(&clock, Moment::NEVER), lease(&clock, Moment::NEVER));
        let released = lease(&clock, Moment::NEVER);
        assert!(lost.lose(LostReason::Gone));
        released.mark_released();
        clock.advance(LEASE * 2 / 3);
        assert_eq!(*lost.subscribe().borrow(), State::Lost(LostReason::Gone));
        assert_eq!(*released.subscribe().borrow(), State::Released);
        let mut watch = risky.subscribe();
        assert!(matches!(*watch.borrow_and_update(), State::AtRisk(_)));
        risky.mark_released();
        assert!(watch.has_changed().unwrap());
        assert_eq!(*watch.borrow(), State::Released);
    }

    #[test]
    fn max_hold_ends_a_renewed_lease() {
        let clock = Clock::stepped();
        let lease = lease(&clock, clock.now().plus(LEASE * 2));
        clock.advance(LEASE / 2);
        assert!(lease.acknowledge(Granted { sent: clock.now(), remaining: Some(LEASE * 9) }));
        assert!(lease.remaining() <= LEASE * 3 / 2);
        clock.advance(LEASE * 3 / 2);
        assert_eq!(lease.state(), State::Lost(LostReason::MaxHold));
    }

    #[test]
    fn shorter_reply_never_shortens_the_lease() {
        let clock = Clock::stepped();
        let lease = lease(&clock, Moment::NEVER);
        let before = lease.remaining();
        assert!(lease.acknowledge(Granted { sent: clock.now(), remaining: Some(LEASE / 5) }));
        assert!(lease.remaining() + Duration::from_secs(1) > before);
    }
}
