//! What a reviewer tried on the Redis store: keys that others change at a bad moment, companions that
//! are gone, a slot that is half moved.

#![cfg(feature = "redis")]

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::common::*;
use leasehold::queue::{Queue, StoreTime};
use leasehold::store::{Evict, Joined, Mode, Place, Renew, Renewal};
use leasehold::{Claim, ClaimId, ErrorKind, Kind, Leasehold, Name, Token};
use testbed::{Proxy, Redis, Setup};

const LEASE: Duration = Duration::from_secs(30);

fn claim(name: &str, kind: Kind, capacity: u32) -> Claim {
    let mut claim = Claim::new(Name::new(name).unwrap(), kind, 1, capacity).unwrap();
    (claim.lease, claim.waiter_lease) = (LEASE, LEASE);
    claim
}

fn mutex(name: &str) -> Claim {
    claim(name, Kind::Mutex, 1)
}

async fn join(locks: &Leasehold, claim: &Claim) -> Joined {
    locks.store().join(claim, Mode::Wait).await.unwrap_or_else(|error| panic!("{error}"))
}

async fn renew(locks: &Leasehold, claims: &[&Claim]) -> Vec<Renewal> {
    let renewals: Vec<Renew> =
        claims.iter().map(|c| Renew { claim: Claim::clone(c), lease: c.lease }).collect();
    locks.store().renew(&renewals).await.unwrap_or_else(|error| panic!("{error}"))
}

async fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !so() {
        assert!(Instant::now() < end, "never came: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The companions of a lock without a main key were kept for a minute after the last lease, whatever
/// the lock-delay.
#[test]
fn s15_a_long_lock_delay_of_a_semaphore_outlives_its_dead_holder() {
    run(async {
        let server = Redis::with(Setup::new().fast().movable_clock());
        let locks = connect(&server.url()).await;
        let mut dead = claim("s15", Kind::Semaphore, 1);
        dead.lock_delay = Duration::from_secs(600);
        assert!(matches!(join(&locks, &dead).await, Joined::Holding { .. }));
        // The lease is long over, and the delay is not.
        server.shift_clock(300);
        let next = claim("s15", Kind::Semaphore, 1);
        let busy = locks.store().join(&next, Mode::Try).await.unwrap();
        assert!(matches!(busy, Joined::Busy { .. }), "open too early: {busy:?}");
        server.shift_clock(700);
        assert!(matches!(join(&locks, &next).await, Joined::Holding { .. }));
    });
}

/// A fail-over between grant and confirmation: the master that confirms has somebody else's hold.
#[test]
fn r30_s23_the_hold_of_somebody_else_confirms_nothing() {
    run(async {
        let master = Redis::with(Setup::new().fast());
        let _replica = Redis::replica_of(master.port(), Setup::new().fast());
        master.wait_for_replicas(1);
        let proxy = Proxy::before(master.port());
        let url = proxy.in_front_of(master.port(), &master.url());
        let locks = connect(&format!("{url}?replicas=1&replicas_ms=20000")).await;
        release(locks.mutex("warm").lease(PATIENCE).lock().await.unwrap()).await;
        proxy.hold_replies();
        let taking = tokio::spawn({
            let mutex = locks.mutex("taken").lease(PATIENCE);
            async move { mutex.try_lock().await }
        });
        until("the grant", || master.command(&["EXISTS", "taken"]) == "1").await;
        master.command(&["SET", "taken", "another", "PX", "60000"]);
        proxy.thaw();
        let error = taken(taking.await.unwrap());
        assert_eq!(error.kind(), ErrorKind::Unconfirmed, "{error}");
        assert_eq!(master.command(&["GET", "taken"]), "another");
    });
}

fn taken(got: leasehold::Result<leasehold::Guard>) -> leasehold::Error {
    match got {
        Ok(guard) => panic!("held, though somebody else holds: token {}", guard.token()),
        Err(error) => error,
    }
}

/// One script renews all locks of a slot, and had to wait while some of their keys were moved and
/// others not: for as long as the slot takes, which may be longer than a lease.
#[test]
fn s26_two_locks_of_one_slot_are_renewed_while_only_one_has_moved() {
    run(async {
        let cluster = testbed::cluster();
        let locks = connect(&cluster.url()).await;
        let (a, b) = (mutex("{review}a"), mutex("{review}b"));
        for claim in [&a, &b] {
            assert!(matches!(join(&locks, claim).await, Joined::Holding { .. }));
        }
        let nodes = cluster.nodes();
        let slot = nodes[0].command(&["CLUSTER", "KEYSLOT", "{review}a"]);
        let keys = |node: &Redis| node.command(&["CLUSTER", "COUNTKEYSINSLOT", &slot]);
        let from = nodes.iter().take(3).position(|node| keys(node) != "0").expect("an owner");
        let (to, slot) = ((from + 1) % 3, slot.parse().unwrap());
        cluster.begin_move(slot, from, to);
        let port = nodes[to].port().to_string();
        nodes[from].command(&["MIGRATE", "127.0.0.1", &port, "{review}a", "0", "5000"]);
        let renewed = locks.store();
        let all: Vec<Renew> =
            [&a, &b].map(|c| Renew { claim: c.clone(), lease: c.lease }).into_iter().collect();
        let renewed = renewed.renew(&all).await;
        // Whatever came of it, the cluster is left in order for the other cases.
        while cluster.move_keys(slot, from, to, 100) > 0 {}
        cluster.end_move(slot, to);
        let renewed = renewed.unwrap_or_else(|error| panic!("{error}"));
        assert!(renewed.iter().all(|r| matches!(r, Renewal::Holding { .. })), "{renewed:?}");
    });
}

/// Whoever deletes a companion takes places away, and must not break the lock for those who come.
#[test]
fn s28_companions_that_somebody_deleted_cost_places_and_no_more() {
    run(async {
        let server = testbed::redis();
        let locks = connect(&server.url()).await;
        for (n, letters) in ["m", "w", "h", "x", "mw", "wx", "hx", "mh"].into_iter().enumerate() {
            let name = format!("s28-{n}");
            let (holder, waiter) =
                (claim(&name, Kind::Semaphore, 1), claim(&name, Kind::Semaphore, 1));
            assert!(matches!(join(&locks, &holder).await, Joined::Holding { .. }));
            assert!(matches!(join(&locks, &waiter).await, Joined::Waiting(_)));
            for letter in letters.chars() {
                assert_eq!(server.command(&["DEL", &format!("leasehold:{letter}:{name}")]), "1");
            }
            // Nobody is told an error: what is gone is lost, and whoever is left stands.
            renew(&locks, &[&holder, &waiter]).await;
            let next = claim(&name, Kind::Semaphore, 1);
            locks.store().join(&next, Mode::Try).await.unwrap_or_else(|e| panic!("{letters}: {e}"));
            for claim in [&holder, &waiter, &next] {
                locks.store().leave(claim, None).await.unwrap_or_else(|e| panic!("{letters}: {e}"));
            }
            for kind in [Kind::Semaphore, Kind::Mutex] {
                let after = claim(&name, kind, 1);
                let joined = join(&locks, &after).await;
                assert!(matches!(joined, Joined::Holding { .. }), "{letters} {kind}: {joined:?}");
                assert!(locks.store().leave(&after, None).await.unwrap());
            }
        }
    });
}

/// The semaphore's hash alone is gone, and the name is then used as a mutex.
#[test]
fn s28_a_mutex_stands_where_a_semaphore_lost_its_hash() {
    run(async {
        let server = testbed::redis();
        let locks = connect(&server.url()).await;
        let claims = [0, 1, 2].map(|_| claim("s28-hash", Kind::Semaphore, 1));
        for claim in &claims {
            join(&locks, claim).await;
        }
        assert_eq!(server.command(&["DEL", "leasehold:m:s28-hash"]), "1");
        let (first, second) = (mutex("s28-hash"), mutex("s28-hash"));
        assert!(matches!(join(&locks, &first).await, Joined::Holding { .. }));
        assert!(matches!(join(&locks, &second).await, Joined::Waiting(_)));
        assert!(locks.store().leave(&first, None).await.unwrap());
        let held = &renew(&locks, &[&second]).await[0];
        assert!(matches!(held, Renewal::Holding { .. }), "{held:?}");
    });
}

/// One call asks for what a name was and for what it is now.
#[test]
fn s16_a_lost_semaphore_takes_no_place_in_a_mutex_along() {
    run(async {
        let server = testbed::redis();
        let locks = connect(&server.url()).await;
        let permits = [0, 1].map(|_| claim("s16", Kind::Semaphore, 1));
        for permit in &permits {
            join(&locks, permit).await;
        }
        server.command(&[
            "DEL",
            "leasehold:m:s16",
            "leasehold:w:s16",
            "leasehold:h:s16",
            "leasehold:x:s16",
        ]);
        let (first, second) = (mutex("s16"), mutex("s16"));
        assert!(matches!(join(&locks, &first).await, Joined::Holding { .. }));
        assert!(matches!(join(&locks, &second).await, Joined::Waiting(_)));
        let [lost, waits] = &renew(&locks, &[&permits[1], &second]).await[..] else { panic!() };
        assert!(matches!(lost, Renewal::Lost), "{lost:?}");
        assert!(matches!(waits, Renewal::Waiting(_)), "{waits:?}");
    });
}

/// Small numbers that come again in the same order (xorshift64*).
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % n
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::try_from(self.below(all.len() as u64)).unwrap()]
    }
}

/// What a claim was told, in a form that can be compared. The clocks are apart by as long as the test
/// has run; leases and steps are hundreds of seconds.
#[derive(Debug)]
enum Told {
    Holds(u64, Duration),
    Waits(u64, usize, Option<Duration>),
    Busy,
    Lost,
}

impl Told {
    fn joined(joined: Joined) -> Self {
        match joined {
            Joined::Holding { token, remaining } => Self::Holds(token.get(), remaining.unwrap()),
            Joined::Waiting(place) => Self::waits(place),
            Joined::Busy { .. } => Self::Busy,
        }
    }

    fn renewed(renewal: Renewal) -> Self {
        match renewal {
            Renewal::Holding { token, remaining } => Self::Holds(token.get(), remaining.unwrap()),
            Renewal::Waiting(place) => Self::waits(place),
            Renewal::Lost => Self::Lost,
            Renewal::Unknown { why, .. } => panic!("{why}"),
        }
    }

    fn waits(place: Place) -> Self {
        Self::Waits(place.token.unwrap().get(), place.ahead, place.head_remaining)
    }

    fn token(&self) -> Option<u64> {
        match self {
            Self::Holds(token, _) | Self::Waits(token, ..) => Some(*token),
            Self::Busy | Self::Lost => None,
        }
    }

    fn is_like(&self, other: &Self) -> bool {
        let near = |a: Duration, b: Duration| a.abs_diff(b) < SLOW;
        match (self, other) {
            (Self::Holds(_, a), Self::Holds(_, b)) => near(*a, *b),
            // To ask a little early is no harm.
            (Self::Waits(_, at, a), Self::Waits(_, also, b)) => {
                let in_time = a.zip(*b).is_none_or(|(a, b)| a < b + SLOW);
                at == also && a.is_some() == b.is_some() && in_time
            }
            (Self::Busy, Self::Busy) | (Self::Lost, Self::Lost) => true,
            _ => false,
        }
    }
}

/// How much slower than the model the servers may be.
const SLOW: Duration = Duration::from_secs(40);

/// Random calls on a real server whose clock is moved, and on `queue.rs`, answer by answer.
#[test]
fn the_scripts_do_what_the_queue_does() {
    run(async {
        let server = Redis::with(Setup::new().fast().movable_clock());
        let locks = connect(&server.url()).await;
        let kinds =
            [(Kind::Mutex, 1), (Kind::Semaphore, 1), (Kind::Semaphore, 3), (Kind::RwLock, 9)];
        let mut shift = 0;
        for (seed, (kind, capacity)) in (1..).zip(kinds.into_iter().cycle().take(12)) {
            let name = format!("parity-{seed}");
            let mut dice = Dice(seed * 7_919);
            let mut queue = Queue::new(kind, capacity, true);
            let mut claims: Vec<Claim> = Vec::new();
            let mut tokens: HashMap<ClaimId, (u64, u64)> = HashMap::new();
            for step in 0..150 {
                let seconds = |n: u64| Duration::from_secs(n);
                let now = u64::try_from(shift).unwrap() * 1_000_000;
                let at = StoreTime { now, stamp: now };
                if claims.len() < 5 {
                    let weight = match kind {
                        Kind::Mutex => 1,
                        Kind::RwLock => dice.one_of(&[1, capacity]),
                        Kind::Semaphore => u32::try_from(dice.below(capacity.into())).unwrap() + 1,
                    };
                    let mut new = Claim::new(Name::new(&name).unwrap(), kind, weight, capacity);
                    let new = new.as_mut().unwrap();
                    new.lease = seconds(dice.one_of(&[1_000, 1_500]));
                    new.waiter_lease = seconds(600);
                    new.lock_delay = seconds(dice.one_of(&[0, 0, 500]));
                    claims.push(new.clone());
                }
                let which = usize::try_from(dice.below(claims.len() as u64)).unwrap();
                let claim = claims[which].clone();
                let store = locks.store();
                let said =
                    |what: &str| format!("seed {seed}, step {step}, {kind} {capacity}: {what}");
                let (real, model) = match dice.below(8) {
                    0..3 => {
                        let mode = dice.one_of(&[Mode::Wait, Mode::Wait, Mode::Try]);
                        let real = Told::joined(store.join(&claim, mode).await.unwrap());
                        (real, Told::joined(queue.join(&claim, mode, at, "").unwrap()))
                    }
                    3..5 => {
                        let renewed = renew(&locks, &[&claim]).await.remove(0);
                        let model = queue.renew(&claim, claim.lease, now);
                        (Told::renewed(renewed), Told::renewed(model))
                    }
                    5 => {
                        let keep = dice.one_of(&[None, None, Some(seconds(700))]);
                        let real = store.leave(&claim, keep).await.unwrap();
                        assert_eq!(real, queue.leave(claim.id, keep, now), "{}", said("leave"));
                        claims.remove(which);
                        continue;
                    }
                    6 => {
                        let step = dice.one_of(&[100, 300, 700, 1_200]);
                        shift += step;
                        server.shift_clock(shift);
                        // Whoever's time is over just now is over on both sides.
                        tokio::time::sleep(Duration::from_millis(3)).await;
                        continue;
                    }
                    _ => {
                        let Some((real, model)) = tokens.get(&claim.id).copied() else { continue };
                        let by = |n| dice_evict(n, seed % 2 == 0);
                        let real = store.evict(&claim.name, by(real)).await.unwrap();
                        let model = queue.evict(by(model), now);
                        assert_eq!(real, model, "{}", said("evict"));
                        continue;
                    }
                };
                assert!(real.is_like(&model), "{}", said(&format!("{real:?}, not {model:?}")));
                if let Some(both) = real.token().zip(model.token()) {
                    tokens.insert(claim.id, both);
                }
            }
            // Both rise alike.
            let mut all: Vec<(u64, u64)> = tokens.into_values().collect();
            all.sort_unstable();
            assert!(all.is_sorted_by_key(|(_, model)| *model), "seed {seed}: {all:?}");
        }
    });
}

fn dice_evict(token: u64, one: bool) -> Evict {
    if one { Evict::Token(Token::new(token).unwrap()) } else { Evict::Holders }
}

/// Random calls of two clients: nobody is told of a grant too early, and everybody unasked.
#[test]
fn p1_p6_what_waiters_are_told_agrees_with_the_queue() {
    run(async {
        let url = testbed::redis().url();
        let clients = [connect(&url).await, connect(&url).await];
        let stores = [0, 1].map(|i| clients[i].store().clone());
        let kinds = [(Kind::Mutex, 1), (Kind::Semaphore, 3), (Kind::RwLock, 1 << 20)];
        let all = (1..).zip(kinds.into_iter().cycle().take(12));
        let mut running = tokio::task::JoinSet::new();
        for (seed, lock) in all {
            let stores = stores.clone();
            running.spawn(async move {
                crate::review_common::pushes_agree(&stores, lock, seed, 60).await;
            });
        }
        while let Some(done) = running.join_next().await {
            done.unwrap();
        }
    });
}
