//! Random histories of one queue, judged in two ways.
//!
//! - *Against a reference*: [`Reference`] keeps a plain list, stores nothing that it can derive,
//!   and recomputes the grant rule from its definition at every step. It shares no code with
//!   `queue.rs`. Every answer and the whole queue must be equal after every step.
//! - *Against the promises*: [`Watch`] knows no rule at all. It only sees which claims were in the
//!   queue before and after each step. From that it judges exclusion, order, tokens and wake-ups.
//!   It would detect a mistake that both implementations share.
//!
//! Time moves forward, does not move, or moves backward, and stamps jump arbitrarily. Half of the
//! histories are those of a store without leases. A claim that has left may come back with its old
//! ID, as when a duplicate of its join was delayed. It gets a new position with a new token.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use leasehold::store::queue::{Entry, Mismatch, Queue, StoreTime, granted};
use leasehold::store::{
    Claim, ClaimId, ClaimState, Converted, Evict, Joined, Mode, Place, Renewal,
};
use leasehold::{Kind, Name, Token};
use proptest::prelude::*;

const CLAIMS: usize = 6;

/// Returns a configuration that prints a failing history, but does not keep it in a file, which
/// would only clutter the working tree.
fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

fn us(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

/// What a client requests, before it is a [`Claim`].
#[derive(Clone, Debug)]
struct Wish {
    weight: u32,
    lease: u64,
    waiter_lease: u64,
    lock_delay: u64,
    seen: u64,
}

#[derive(Clone, Debug)]
enum Step {
    Join {
        who: usize,
        mode: Mode,
        stamp: u64,
    },
    /// A join with another kind or capacity, or with a weight that can never fit.
    JoinWrongly {
        who: usize,
        wrong: Wrong,
    },
    Renew {
        who: usize,
        lease: u64,
    },
    Leave {
        who: usize,
        keep: Option<u64>,
    },
    Convert {
        who: usize,
        weight: u32,
    },
    Settle,
    Pass {
        time: u64,
    },
    SetBack {
        time: u64,
    },
    Resize {
        capacity: u32,
    },
    EvictOne {
        who: usize,
    },
    EvictHolders,
    /// The claims of this set are dead.
    Retain {
        dead: u8,
    },
    /// The store serializes the queue and reads it back.
    #[cfg(feature = "serde")]
    Persist,
}

#[derive(Clone, Copy, Debug)]
enum Wrong {
    Kind,
    Capacity,
    NoWeight,
    TooHeavy,
}

#[derive(Clone, Debug)]
struct History {
    kind: Kind,
    capacity: u32,
    leases: bool,
    wishes: Vec<Wish>,
    steps: Vec<Step>,
}

fn claim_id(who: usize) -> ClaimId {
    ClaimId::from_u128(1 + who as u128)
}

impl History {
    fn claim(&self, who: usize) -> Claim {
        let wish = &self.wishes[who];
        let name = Name::new("q").unwrap();
        let mut claim = Claim::new(name, self.kind, wish.weight, self.capacity).unwrap();
        claim.id = claim_id(who);
        claim.lease = us(wish.lease);
        claim.waiter_lease = us(wish.waiter_lease);
        claim.lock_delay = us(wish.lock_delay);
        claim.seen = wish.seen;
        claim
    }
}

fn wishes(kind: Kind, capacity: u32) -> impl Strategy<Value = Vec<Wish>> {
    let weight = match kind {
        Kind::Mutex => Just(1).boxed(),
        Kind::RwLock => prop_oneof![2 => Just(1), 1 => Just(capacity)].boxed(),
        Kind::Semaphore => (1..=capacity).boxed(),
    };
    let seen = prop_oneof![4 => Just(0), 1 => 0..500_u64];
    let lock_delay = prop_oneof![2 => Just(0), 1 => 1..40_u64];
    let wish = (weight, 1..40_u64, 1..20_u64, lock_delay, seen).prop_map(
        |(weight, lease, waiter_lease, lock_delay, seen)| Wish {
            weight,
            lease,
            waiter_lease,
            lock_delay,
            seen,
        },
    );
    prop::collection::vec(wish, CLAIMS)
}

fn step(resizes: bool) -> impl Strategy<Value = Step> {
    let who = 0..CLAIMS;
    let mode = || prop_oneof![1 => Just(Mode::Try), 4 => Just(Mode::Wait)];
    // Stamps increase, stay equal and decrease. Occasionally, one is far off.
    let stamp = prop_oneof![9 => 0..300_u64, 1 => Just(0), 1 => 1_000..2_000_u64];
    let wrong =
        prop::sample::select(vec![Wrong::Kind, Wrong::Capacity, Wrong::NoWeight, Wrong::TooHeavy]);
    let keep = prop_oneof![3 => Just(None), 1 => (0..30_u64).prop_map(Some)];
    let mut steps = vec![
        (
            12,
            (who.clone(), mode(), stamp)
                .prop_map(|(who, mode, stamp)| Step::Join { who, mode, stamp })
                .boxed(),
        ),
        (1, (who.clone(), wrong).prop_map(|(who, wrong)| Step::JoinWrongly { who, wrong }).boxed()),
        (6, (who.clone(), 1..40_u64).prop_map(|(who, lease)| Step::Renew { who, lease }).boxed()),
        (6, (who.clone(), keep).prop_map(|(who, keep)| Step::Leave { who, keep }).boxed()),
        (
            4,
            (who.clone(), prop_oneof![2 => Just(1), 3 => 0..8_u32])
                .prop_map(|(who, weight)| Step::Convert { who, weight })
                .boxed(),
        ),
        (1, Just(Step::Settle).boxed()),
        (8, (0..15_u64).prop_map(|time| Step::Pass { time }).boxed()),
        (1, (1..5_u64).prop_map(|time| Step::SetBack { time }).boxed()),
        (1, who.prop_map(|who| Step::EvictOne { who }).boxed()),
        (1, Just(Step::EvictHolders).boxed()),
        (1, any::<u8>().prop_map(|dead| Step::Retain { dead }).boxed()),
    ];
    #[cfg(feature = "serde")]
    steps.push((1, Just(Step::Persist).boxed()));
    if resizes {
        steps.push((3, (1..7_u32).prop_map(|capacity| Step::Resize { capacity }).boxed()));
    }
    prop::strategy::Union::new_weighted(steps)
}

fn history(resizes: bool) -> impl Strategy<Value = History> {
    let lock = prop_oneof![
        Just((Kind::Mutex, 1)),
        (2..7_u32).prop_map(|n| (Kind::RwLock, n)),
        (1..7_u32).prop_map(|n| (Kind::Semaphore, n)),
    ];
    (lock, any::<bool>())
        .prop_flat_map(move |((kind, capacity), leases)| {
            let steps = prop::collection::vec(step(resizes), 1..80);
            (Just(kind), Just(capacity), Just(leases), wishes(kind, capacity), steps)
        })
        .prop_map(|(kind, capacity, leases, wishes, steps)| History {
            kind,
            capacity,
            leases,
            wishes,
            steps,
        })
}

// ---------------------------------------------------------------------------------------------
// The reference: the rule exactly as it is defined, on a plain list.

#[derive(Clone, Debug)]
struct Item {
    id: ClaimId,
    token: u64,
    weight: u32,
    ends: Option<u64>,
    delay: u64,
    /// Its holder is gone, but the position is in a cooldown.
    departed: bool,
    /// It was granted. This follows from the rule, unless the capacity was lowered since.
    granted: bool,
}

#[derive(Debug)]
struct Reference {
    kind: Kind,
    capacity: u32,
    leases: bool,
    last: u64,
    list: Vec<Item>,
}

/// The answer of either side, in one form.
#[derive(Debug, PartialEq)]
enum Answer {
    Holding(u64, Option<Duration>),
    Waiting(Place),
    Busy(Vec<u64>),
    Lost,
    Mismatch(Mismatch),
    Left(bool),
    Converted(Converted),
    Evicted(usize),
    Nothing,
}

impl Reference {
    /// Returns whether "the weights up to and including its own add up to at most the capacity".
    fn fits(&self, i: usize) -> bool {
        self.list[..=i].iter().map(|item| item.weight).sum::<u32>() <= self.capacity
    }

    fn grant(&mut self) {
        for i in 0..self.list.len() {
            self.list[i].granted |= self.fits(i);
        }
    }

    fn settle(&mut self, now: u64) {
        let mut left = Vec::new();
        for mut item in self.list.drain(..) {
            let expired = item.ends.is_some_and(|end| end <= now);
            if expired && item.granted && !item.departed {
                // It ended uncleanly, so its position stays in a cooldown of the lock delay from
                // that moment.
                item.departed = true;
                item.ends = item.ends.map(|end| end + item.delay);
            }
            if item.ends.is_none_or(|end| end > now) {
                left.push(item);
            }
        }
        self.list = left;
        self.grant();
    }

    fn find(&self, id: ClaimId) -> Option<usize> {
        self.list.iter().position(|item| item.id == id)
    }

    fn place(&self, i: usize, now: u64) -> Place {
        let head = self.list.iter().position(|item| !item.granted) == Some(i);
        let next_end = self.list[..i].iter().filter_map(|item| item.ends).min().filter(|_| head);
        let head_remaining = next_end.map(|end| us(end.saturating_sub(now)));
        Place { ahead: i, head_remaining, token: Token::new(self.list[i].token) }
    }

    fn busy(&self) -> Answer {
        Answer::Busy(self.list.iter().filter(|i| i.granted).map(|i| i.token).collect())
    }

    fn beat(&mut self, i: usize, lease: u64, waiter_lease: u64, now: u64) -> Answer {
        let item = &mut self.list[i];
        let until = now + if item.granted { lease } else { waiter_lease };
        if self.leases && item.ends.is_some_and(|end| end < until) {
            item.ends = Some(until);
        }
        if item.granted {
            Answer::Holding(item.token, item.ends.map(|end| us(end.saturating_sub(now))))
        } else {
            Answer::Waiting(self.place(i, now))
        }
    }

    fn join(&mut self, claim: &Claim, wish: &Wish, mode: Mode, at: StoreTime) -> Answer {
        self.settle(at.now);
        if let Some(i) = self.find(claim.id) {
            if self.list[i].departed {
                return self.busy();
            }
            return self.beat(i, wish.lease, wish.waiter_lease, at.now);
        }
        if self.list.is_empty() {
            self.kind = claim.kind;
            self.capacity = claim.capacity;
        }
        let same = (self.kind, self.capacity) == (claim.kind, claim.capacity);
        if !same || claim.weight == 0 || claim.weight > self.capacity {
            return Answer::Mismatch(Mismatch { kind: self.kind, capacity: self.capacity });
        }
        let mut item = Item {
            id: claim.id,
            token: [self.last + 1, at.stamp, wish.seen + 1].into_iter().max().unwrap(),
            weight: claim.weight,
            ends: None,
            delay: wish.lock_delay,
            departed: false,
            granted: false,
        };
        self.list.push(item.clone());
        let last = self.list.len() - 1;
        item.granted = self.fits(last);
        if self.leases {
            item.ends = Some(at.now + if item.granted { wish.lease } else { wish.waiter_lease });
        }
        if mode == Mode::Try && !item.granted {
            self.list.pop();
            return self.busy();
        }
        self.last = item.token;
        self.list[last] = item.clone();
        if item.granted {
            Answer::Holding(item.token, item.ends.map(|_| us(wish.lease)))
        } else {
            Answer::Waiting(self.place(last, at.now))
        }
    }

    fn renew(&mut self, id: ClaimId, lease: u64, waiter_lease: u64, now: u64) -> Answer {
        self.settle(now);
        match self.find(id) {
            Some(i) if !self.list[i].departed => self.beat(i, lease, waiter_lease, now),
            _ => Answer::Lost,
        }
    }

    fn leave(&mut self, id: ClaimId, keep: Option<u64>, now: u64) -> Answer {
        self.settle(now);
        let Some(i) = self.find(id) else { return Answer::Left(false) };
        if self.list[i].departed {
            return Answer::Left(true);
        }
        if keep.is_some_and(|k| k > 0) && self.list[i].granted {
            self.list[i].departed = true;
            self.list[i].ends = keep.map(|k| now + k);
        } else {
            self.list.remove(i);
        }
        self.grant();
        Answer::Left(true)
    }

    /// Decreases the weight of any holder. Increases it only for the only holder, and up to the
    /// capacity.
    fn convert(&mut self, id: ClaimId, weight: u32, now: u64) -> Answer {
        self.settle(now);
        let holds = |item: &Item| item.granted && !item.departed;
        let Some(i) = self.find(id).filter(|&i| holds(&self.list[i])) else {
            return Answer::Converted(Converted::Lost);
        };
        let alone = self.list.iter().filter(|item| item.granted).count() == 1;
        let grows = weight > self.list[i].weight;
        if weight == 0 || grows && (!alone || weight > self.capacity) {
            return Answer::Converted(Converted::Busy);
        }
        self.list[i].weight = weight;
        self.grant();
        let token = Token::new(self.list[i].token).unwrap();
        Answer::Converted(Converted::Done { token })
    }

    fn evict(&mut self, which: Evict, now: u64) -> Answer {
        self.settle(now);
        let before = self.list.len();
        match which {
            Evict::Token(token) => self.list.retain(|item| item.token != token.get()),
            Evict::Holders => self.list.retain(|item| !item.granted),
        }
        let evicted = before - self.list.len();
        self.grant();
        Answer::Evicted(evicted)
    }

    fn resize(&mut self, capacity: u32, now: u64) {
        self.settle(now);
        self.capacity = capacity;
        self.list.retain(|item| item.granted || item.weight <= capacity);
        self.grant();
    }
}

// ---------------------------------------------------------------------------------------------
// The promises, judged by what is visible from outside.

/// The effects on existing grants that one step may have.
#[derive(Default)]
struct Excuse {
    /// The claims that were released or evicted.
    gone: BTreeSet<ClaimId>,
    /// The claim whose weight was to be changed.
    converted: Option<ClaimId>,
    now: u64,
}

#[derive(Default)]
struct Watch {
    before: Vec<Entry>,
    /// The token of the newest grant so far.
    last_granted: u64,
    /// The largest token of any claim that has joined.
    last_joined: u64,
    /// Whether the capacity was changed. Holders may exceed the capacity then.
    resized: bool,
    capacity: u32,
}

fn holding(e: &Entry) -> bool {
    e.state == ClaimState::Holding
}

impl Watch {
    /// Checks the promises after a step that has settled the queue, so that no claim that fits
    /// still waits.
    fn judge(&mut self, q: &mut Queue, excuse: &Excuse) -> Result<(), TestCaseError> {
        let after: Vec<Entry> = q.entries().cloned().collect();
        let was: BTreeMap<_, _> = self.before.iter().map(|e| (e.id, e.clone())).collect();
        let is: BTreeMap<_, _> = after.iter().map(|e| (e.id, e.clone())).collect();
        prop_assert_eq!(is.len(), after.len(), "a claim is twice in the queue");

        // The order in the queue is the order of tokens. Earlier claims keep their token and their
        // order.
        prop_assert!(after.is_sorted_by(|a, b| a.token < b.token));
        for e in &after {
            match was.get(&e.id).filter(|old| old.token == e.token) {
                Some(_) if excuse.converted == Some(e.id) => prop_assert!(holding(e)),
                Some(old) => prop_assert_eq!(old.weight, e.weight),
                None => {
                    prop_assert!(e.token.get() > self.last_joined, "a token was assigned twice");
                    if let Some(old) = was.get(&e.id) {
                        let expired = old.expires.is_some_and(|t| t <= excuse.now);
                        prop_assert!(expired, "a second token for a claim in the queue");
                    }
                    self.last_joined = e.token.get();
                }
            }
        }

        // Checks exclusion at the moment of each grant, and permanently if the capacity was not
        // changed. A change of the capacity settles the queue before it changes anything.
        let most = q.capacity().max(std::mem::replace(&mut self.capacity, q.capacity()));
        let mut sum = 0_u64;
        let mut fit = 0;
        for (i, e) in after.iter().enumerate() {
            sum += u64::from(e.weight);
            let fits = sum <= u64::from(q.capacity());
            fit += usize::from(fits);
            let stood = was.get(&e.id).is_some_and(|o| o.state != ClaimState::Waiting);
            if e.state != ClaimState::Waiting && !stood {
                prop_assert!(sum <= u64::from(most), "granted beyond the capacity");
            }
            prop_assert!(
                !fits || e.state != ClaimState::Waiting,
                "a claim that fits still waits at {}",
                i
            );
        }
        if !self.resized {
            let granted_now = after.iter().take_while(|e| e.state != ClaimState::Waiting).count();
            prop_assert_eq!(granted_now, fit, "not the longest prefix that fits");
            prop_assert!(after[fit..].iter().all(|e| e.state == ClaimState::Waiting));
            prop_assert_eq!(granted(after.iter().map(|e| e.weight), q.capacity()), fit);
        }

        // A grant ends only by its own end.
        for old in self.before.iter().filter(|e| holding(e)) {
            let still = is.get(&old.id).is_some_and(|e| e.token == old.token && holding(e));
            let expired = old.expires.is_some_and(|t| t <= excuse.now);
            prop_assert!(
                still || expired || excuse.gone.contains(&old.id),
                "a grant ended without a cause"
            );
        }

        // Grants are made in the order of tokens, first come, first served. Each waiter is notified
        // once of its grant. A claim that is granted immediately learns it from the answer.
        let mut woken = Vec::new();
        for e in after.iter().filter(|e| holding(e)) {
            let old = was.get(&e.id).filter(|old| old.token == e.token);
            if old.is_some_and(holding) {
                continue;
            }
            prop_assert!(e.token.get() > self.last_granted, "a claim overtook another one");
            self.last_granted = e.token.get();
            if old.is_some() {
                woken.push(e.id);
            }
        }
        prop_assert_eq!(q.take_fresh_grants(), woken);
        prop_assert_eq!(q.take_fresh_grants(), Vec::<ClaimId>::new());
        self.before = after;
        Ok(())
    }
}

// ---------------------------------------------------------------------------------------------

fn heard_join(joined: Result<Joined, Mismatch>) -> Answer {
    match joined {
        Ok(Joined::Holding { token, remaining }) => Answer::Holding(token.get(), remaining),
        Ok(Joined::Waiting(place)) => Answer::Waiting(place),
        Ok(Joined::Busy { holders }) => {
            Answer::Busy(holders.iter().map(|h| h.token.get()).collect())
        }
        Err(mismatch) => Answer::Mismatch(mismatch),
    }
}

fn heard_renewal(renewal: Renewal) -> Answer {
    match renewal {
        Renewal::Holding { token, remaining } => Answer::Holding(token.get(), remaining),
        Renewal::Waiting(place) => Answer::Waiting(place),
        Renewal::Lost => Answer::Lost,
        Renewal::Unknown { .. } => unreachable!("a queue knows all its claims"),
    }
}

#[cfg(feature = "serde")]
fn persist(q: &Queue) -> Queue {
    let text = serde_json::to_string(q).unwrap();
    let back: Queue = serde_json::from_str(&text).unwrap();
    assert_eq!(serde_json::to_string(&back).unwrap(), text);
    back
}

fn play(h: &History) -> Result<(), TestCaseError> {
    let mut q = Queue::new(h.kind, h.capacity, h.leases);
    let mut r = Reference {
        kind: h.kind,
        capacity: h.capacity,
        leases: h.leases,
        last: 0,
        list: Vec::new(),
    };
    let mut watch = Watch { capacity: h.capacity, ..Watch::default() };
    let mut now = 100;
    for step in &h.steps {
        let mut excuse = Excuse { now, ..Excuse::default() };
        let (actual, expected) = match *step {
            Step::Join { who, mode, stamp } => {
                let (claim, at) = (h.claim(who), StoreTime { now, stamp });
                let joined = q.join(&claim, mode, at, "");
                if let Ok(Joined::Holding { token, .. }) = &joined
                    && !watch.before.iter().any(|e| e.token == *token)
                {
                    prop_assert!(token.get() >= stamp && token.get() > claim.seen);
                }
                (heard_join(joined), r.join(&claim, &h.wishes[who], mode, at))
            }
            Step::JoinWrongly { who, wrong } => {
                let (mut claim, at) = (h.claim(who), StoreTime { now, stamp: 0 });
                match wrong {
                    Wrong::Kind if h.kind == Kind::Mutex => claim.kind = Kind::Semaphore,
                    Wrong::Kind => claim.kind = Kind::Mutex,
                    Wrong::Capacity => claim.capacity += 1,
                    Wrong::NoWeight => claim.weight = 0,
                    Wrong::TooHeavy => claim.weight = claim.capacity + 1,
                }
                // On an empty queue, another kind is not a mistake. It would change the kind of
                // queue for the rest of the history.
                q.settle(now);
                r.settle(now);
                if q.is_empty() {
                    (Answer::Nothing, Answer::Nothing)
                } else {
                    let joined = heard_join(q.join(&claim, Mode::Wait, at, ""));
                    (joined, r.join(&claim, &h.wishes[who], Mode::Wait, at))
                }
            }
            Step::Renew { who, lease } => {
                let claim = h.claim(who);
                let waiter_lease = h.wishes[who].waiter_lease;
                (
                    heard_renewal(q.renew(&claim, us(lease), now)),
                    r.renew(claim.id, lease, waiter_lease, now),
                )
            }
            Step::Leave { who, keep } => {
                let id = claim_id(who);
                excuse.gone.insert(id);
                (Answer::Left(q.leave(id, keep.map(us), now)), r.leave(id, keep, now))
            }
            Step::Convert { who, weight } => {
                let mut claim = h.claim(who);
                claim.weight = weight;
                let converted = q.convert(&claim, now);
                if matches!(converted, Converted::Done { .. }) {
                    excuse.converted = Some(claim.id);
                }
                (Answer::Converted(converted), r.convert(claim.id, weight, now))
            }
            Step::Settle => {
                q.settle(now);
                r.settle(now);
                (Answer::Nothing, Answer::Nothing)
            }
            Step::Pass { time } => {
                now += time;
                continue;
            }
            Step::SetBack { time } => {
                now -= time.min(now);
                continue;
            }
            Step::Resize { capacity } => {
                watch.resized = true;
                q.resize(capacity, now);
                r.resize(capacity, now);
                prop_assert_eq!(q.capacity(), capacity);
                (Answer::Nothing, Answer::Nothing)
            }
            Step::EvictOne { who } => {
                let Some(e) = q.entries().find(|e| e.id == claim_id(who)) else { continue };
                let which = Evict::Token(e.token);
                excuse.gone.insert(e.id);
                (Answer::Evicted(q.evict(which, now).len()), r.evict(which, now))
            }
            Step::EvictHolders => {
                excuse.gone.extend(q.entries().filter(|e| holding(e)).map(|e| e.id));
                (Answer::Evicted(q.evict(Evict::Holders, now).len()), r.evict(Evict::Holders, now))
            }
            Step::Retain { dead } => {
                let alive = |id: ClaimId| dead >> (id.as_u128() - 1) & 1 == 0;
                excuse.gone.extend(q.entries().map(|e| e.id).filter(|&id| !alive(id)));
                q.retain(now, |e| alive(e.id));
                r.list.retain(|item| alive(item.id));
                r.grant();
                (Answer::Nothing, Answer::Nothing)
            }
            #[cfg(feature = "serde")]
            Step::Persist => {
                q = persist(&q);
                continue;
            }
        };
        prop_assert_eq!(actual, expected, "in step {:?}", step);
        let shown: Vec<_> =
            q.entries().map(|e| (e.id, e.token.get(), e.weight, e.state, e.expires)).collect();
        let expected: Vec<_> = r
            .list
            .iter()
            .map(|i| {
                let claim_state = match (i.granted, i.departed) {
                    (true, false) => ClaimState::Holding,
                    (true, true) => ClaimState::Cooldown,
                    (false, _) => ClaimState::Waiting,
                };
                (i.id, i.token, i.weight, claim_state, i.ends)
            })
            .collect();
        prop_assert_eq!(shown, expected, "after step {:?}", step);
        prop_assert_eq!(q.last_token(), r.last);
        watch.judge(&mut q, &excuse)?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(config(1_500))]

    // P1, P3, P4, P6, P8
    #[test]
    fn any_history_keeps_the_guarantees_and_matches_the_reference(h in history(false)) {
        play(&h)?;
    }

    // S16
    #[test]
    fn resizing_revokes_no_grant_and_grants_only_what_fits(h in history(true)) {
        play(&h)?;
    }
}

proptest! {
    #![proptest_config(config(500))]

    // S15
    /// The cooldown lasts exactly as long as requested, whichever clients poll in the meantime, and
    /// however often.
    #[test]
    fn the_lock_delay_is_exact(
        lease in 1..1_000_u64,
        delay in 1..1_000_u64,
        asks in prop::collection::vec(0..2_000_u64, 0..8),
        leases_again in any::<bool>(),
    ) {
        let mut q = Queue::new(Kind::Mutex, 1, true);
        let (mut a, b) = (mutex(0), mutex(1));
        (a.lease, a.lock_delay) = (us(lease), us(delay));
        q.join(&a, Mode::Wait, StoreTime { now: 0, stamp: 0 }, "").unwrap();
        closed_until(&mut q, &a, &b, lease + delay, lease, asks, leases_again)?;
    }

    /// The same for the cooldown that a holder requests when it leaves, with and without leases.
    #[test]
    fn cooldown_lasts_exactly_as_long_as_requested(
        lease in 1..1_000_u64,
        left in 0..1_000_u64,
        keep in 1..1_000_u64,
        asks in prop::collection::vec(0..2_000_u64, 0..8),
        leases in any::<bool>(),
        again in any::<bool>(),
    ) {
        let left = left % lease;
        let mut q = Queue::new(Kind::Mutex, 1, leases);
        let (mut a, b) = (mutex(0), mutex(1));
        (a.lease, a.lock_delay) = (us(lease), us(7));
        q.join(&a, Mode::Wait, StoreTime { now: 0, stamp: 0 }, "").unwrap();
        prop_assert!(q.leave(a.id, Some(us(keep)), left));
        closed_until(&mut q, &a, &b, left + keep, left, asks, again)?;
    }

    // S18
    /// However many waiters died in the queue, a waiter after them holds the lock at most one
    /// waiter lease after the last heartbeat of any of them. Lock delays add at most one delay in
    /// total.
    #[test]
    fn crashed_waiters_cost_one_waiter_lease_in_total(
        capacity in 1..5_u32,
        dead in prop::collection::vec((0..5_u32, 0..20_u64), 1..8),
        waiter_lease in 20..60_u64,
        delay in prop_oneof![Just(0), 1..40_u64],
        period in 1..10_u64,
        left in 0..30_u64,
    ) {
        let mut q = Queue::new(Kind::Semaphore, capacity, true);
        let permit = |who, weight| {
            let mut c = claim(who, Kind::Semaphore, weight, capacity);
            (c.lease, c.waiter_lease) = (us(1_000_000), us(waiter_lease));
            c
        };
        let holder = permit(0, capacity);
        q.join(&holder, Mode::Wait, StoreTime { now: 0, stamp: 0 }, "").unwrap();
        let mut deaths: Vec<_> = dead.iter().map(|d| d.1).collect();
        deaths.sort_unstable();
        for (i, died) in deaths.iter().enumerate() {
            let mut c = permit(1 + i, 1 + dead[i].0 % capacity);
            c.lock_delay = us(delay);
            let joined = q.join(&c, Mode::Wait, StoreTime { now: *died, stamp: 0 }, "").unwrap();
            prop_assert!(matches!(joined, Joined::Waiting(_)));
        }
        let last_sign = *deaths.last().unwrap();
        let live = permit(100, capacity);
        q.join(&live, Mode::Wait, StoreTime { now: last_sign, stamp: 0 }, "").unwrap();
        let free = last_sign + left.max(waiter_lease + delay);
        // The live waiter sends heartbeats as usual, and the last one when the bound is reached.
        for now in last_sign..free {
            if now == last_sign + left {
                q.leave(holder.id, None, now);
            }
            if (now - last_sign) % period == 0 {
                q.renew(&live, live.lease, now);
            }
        }
        q.leave(holder.id, None, free);
        let answer = q.renew(&live, live.lease, free);
        prop_assert!(matches!(answer, Renewal::Holding { .. }), "at {}: {:?}", free, answer);
    }

    // P3
    /// Tokens always increase, even if a clock or a client's `seen` is absurd.
    #[test]
    fn tokens_increase_despite_absurd_stamps_and_seen_tokens(
        draws in prop::collection::vec((extreme(), extreme()), 1..40),
    ) {
        let mut q = Queue::new(Kind::Mutex, 1, true);
        let mut last = 0;
        for (i, (stamp, seen)) in draws.into_iter().enumerate() {
            let mut c = mutex(i);
            c.seen = seen;
            let joined = q.join(&c, Mode::Try, StoreTime { now: 0, stamp }, "").unwrap();
            let Joined::Holding { token, .. } = joined else { panic!("{joined:?}") };
            prop_assert!(token.get() > last, "{} is not above {}", token, last);
            prop_assert!(token.get() <= Token::MAX);
            last = token.get();
            q.leave(c.id, None, 0);
        }
    }
}

fn extreme() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..10_u64,
        Just(1_800_000_000_000_000),
        Token::MAX - 2..=Token::MAX,
        u64::MAX - 2..=u64::MAX,
        any::<u64>(),
    ]
}

fn claim(who: usize, kind: Kind, weight: u32, capacity: u32) -> Claim {
    let mut claim = Claim::new(Name::new("q").unwrap(), kind, weight, capacity).unwrap();
    claim.id = claim_id(who);
    claim
}

fn mutex(who: usize) -> Claim {
    claim(who, Kind::Mutex, 1, 1)
}

/// Checks that after `a` has ended at `ended`, `b` is granted at `open` and not a microsecond
/// earlier. Meanwhile `a` leaves and renews (if `again` is set), and `b` tries at any time.
fn closed_until(
    q: &mut Queue,
    a: &Claim,
    b: &Claim,
    open: u64,
    ended: u64,
    mut asks: Vec<u64>,
    again: bool,
) -> Result<(), TestCaseError> {
    let tries = |q: &mut Queue, now| {
        let joined = q.join(b, Mode::Try, StoreTime { now, stamp: 0 }, "").unwrap();
        matches!(joined, Joined::Holding { .. })
    };
    asks.push(open - 1);
    asks.sort_unstable();
    for now in asks.into_iter().filter(|&now| ended <= now && now < open) {
        if again {
            q.leave(a.id, None, now);
            let renewed = q.renew(a, Duration::from_secs(60), now);
            prop_assert!(matches!(renewed, Renewal::Lost), "a departed claim was renewed");
        }
        prop_assert!(!tries(q, now), "free at {} instead of {}", now, open);
    }
    prop_assert!(tries(q, open), "not free at {}", open);
    Ok(())
}
