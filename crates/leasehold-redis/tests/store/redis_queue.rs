//! Redis's queue and its notifications: compared with the queue model, with lost messages, with
//! many waiters, and with dead waiters.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::redis_common::*;
use leasehold::store::queue::{Queue, StoreTime};
use leasehold::store::{Claim, ClaimId, Evict, Joined, Mode, Place, Renewal, Signal};
use leasehold::{Client, ErrorKind, Kind, MutexGuard, Name, Token};
use leasehold_test_support::pushes_agree;
use leasehold_test_support::*;
use testbed::SeededRng;
use testbed::{Proxy, Redis, Setup};
use tokio::task::JoinHandle;

/// State of a claim, in a form that can be compared. The clocks differ by the duration of the test,
/// while leases and steps are hundreds of seconds.
#[derive(Debug)]
enum ClaimState {
    Holds(u64, Duration),
    Waits(u64, usize, Option<Duration>),
    Busy,
    Lost,
}

impl ClaimState {
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
            // Polling a little early is harmless.
            (Self::Waits(_, at, a), Self::Waits(_, also, b)) => {
                let in_time = a.zip(*b).is_none_or(|(a, b)| a < b + SLOW);
                at == also && a.is_some() == b.is_some() && in_time
            }
            (Self::Busy, Self::Busy) | (Self::Lost, Self::Lost) => true,
            _ => false,
        }
    }
}

/// Maximum time by which the servers may be slower than the model.
const SLOW: Duration = Duration::from_secs(40);

/// Random calls run on a real server whose clock is set, and on `queue.rs`. Every reply must be
/// equal.
#[test]
fn scripts_behave_like_the_queue() {
    run(async {
        let server = Redis::with(Setup::new().fast().movable_clock());
        let locks = connect(&server.url()).await;
        let kinds =
            [(Kind::Mutex, 1), (Kind::Semaphore, 1), (Kind::Semaphore, 3), (Kind::RwLock, 9)];
        let mut shift = 0;
        for (seed, (kind, capacity)) in (1..).zip(kinds.into_iter().cycle().take(12)) {
            let name = format!("parity-{seed}");
            let mut rng = SeededRng(seed * 7_919);
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
                        Kind::RwLock => rng.one_of(&[1, capacity]),
                        Kind::Semaphore => u32::try_from(rng.below(capacity.into())).unwrap() + 1,
                    };
                    let mut new = Claim::new(Name::new(&name).unwrap(), kind, weight, capacity);
                    let new = new.as_mut().unwrap();
                    new.lease = seconds(rng.one_of(&[1_000, 1_500]));
                    new.waiter_lease = seconds(600);
                    new.lock_delay = seconds(rng.one_of(&[0, 0, 500]));
                    claims.push(new.clone());
                }
                let which = usize::try_from(rng.below(claims.len() as u64)).unwrap();
                let claim = claims[which].clone();
                let store = locks.store();
                let context =
                    |what: &str| format!("seed {seed}, step {step}, {kind} {capacity}: {what}");
                let (real, model) = match rng.below(8) {
                    0..3 => {
                        let mode = rng.one_of(&[Mode::Wait, Mode::Wait, Mode::Try]);
                        let real = ClaimState::joined(store.join(&claim, mode).await.unwrap());
                        (real, ClaimState::joined(queue.join(&claim, mode, at, "").unwrap()))
                    }
                    3..5 => {
                        let renewed = renew(&locks, &[&claim]).await.remove(0);
                        let model = queue.renew(&claim, claim.lease, now);
                        (ClaimState::renewed(renewed), ClaimState::renewed(model))
                    }
                    5 => {
                        let keep = rng.one_of(&[None, None, Some(seconds(700))]);
                        let real = store.leave(&claim, keep).await.unwrap();
                        assert_eq!(real, queue.leave(claim.id, keep, now), "{}", context("leave"));
                        claims.remove(which);
                        continue;
                    }
                    6 => {
                        let step = rng.one_of(&[100, 300, 700, 1_200]);
                        shift += step;
                        server.shift_clock(shift);
                        // A claim that expires at this moment must have expired on both sides.
                        tokio::time::sleep(Duration::from_millis(3)).await;
                        continue;
                    }
                    _ => {
                        let Some((real, model)) = tokens.get(&claim.id).copied() else { continue };
                        let by = |n| dice_evict(n, seed % 2 == 0);
                        let real = store.evict(&claim.name, by(real)).await.unwrap();
                        let model = queue.evict(by(model), now).len();
                        assert_eq!(real, model, "{}", context("evict"));
                        continue;
                    }
                };
                assert!(real.is_like(&model), "{}", context(&format!("{real:?}, not {model:?}")));
                if let Some(both) = real.token().zip(model.token()) {
                    tokens.insert(claim.id, both);
                }
            }
            // The tokens on both sides must be in the same order.
            let mut all: Vec<(u64, u64)> = tokens.into_values().collect();
            all.sort_unstable();
            assert!(all.is_sorted_by_key(|(_, model)| *model), "seed {seed}: {all:?}");
        }
    });
}

fn dice_evict(token: u64, one: bool) -> Evict {
    if one { Evict::Token(Token::new(token).unwrap()) } else { Evict::Holders }
}

// P1, P6
/// Two clients make random calls. No waiter is notified of a grant too early, and every waiter is
/// notified without polling.
#[test]
fn notifications_agree_with_the_queue() {
    run(async {
        let url = testbed::redis().url();
        pushes_agree(&[connect(&url).await, connect(&url).await]).await;
    });
}

/// Lets one client hold a lock, and a task of another client wait for it.
async fn one_behind_another(
    holder: &Client,
    waiting: &Client,
) -> (MutexGuard, JoinHandle<leasehold::Result<MutexGuard>>) {
    let guard = holder.mutex("deaf").lock().await.unwrap();
    // The waiter has its reply. The next data that the proxy reads is the message.
    let (tell, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let mutex = waiting.mutex("deaf").on_waiting(move |_| _ = tell.send(()));
    let waiter = tokio::spawn(async move { mutex.lock().await });
    receiver.recv().await.unwrap();
    (guard, waiter)
}

/// Maximum cost of a hand-over whose message is lost, which is one heartbeat.
const HEARTBEAT: Duration = Duration::from_secs(2 + 2);

// S24
#[test]
fn a_lost_message_costs_one_heartbeat() {
    run(async {
        let server = fast();
        let proxy = Proxy::before(server.port());
        let waiting = connect(&proxy.in_front_of(server.port(), &server.url())).await;
        let holder = connect(&server.url()).await;
        let mut fastest = PATIENCE;
        for round in 0..3 {
            let (guard, waiter) = one_behind_another(&holder, &waiting).await;
            // The connection stays open, and only the message is lost.
            let connections = proxy.connections();
            proxy.drop_messages(true);
            let begun = Instant::now();
            release(guard).await;
            let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
            fastest = fastest.min(begun.elapsed());
            until("the message to be dropped", async || proxy.has_dropped()).await;
            // (The first heartbeat opens its own connection.)
            assert!(round == 0 || proxy.connections() == connections, "the connection was closed");
            proxy.drop_messages(false);
            release(guard).await;
        }
        assert!(fastest < HEARTBEAT, "{fastest:?}");
    });
}

// S24
#[test]
fn broken_connection_costs_no_queue_position() {
    run(async {
        let server = fast();
        let proxy = Proxy::before(server.port());
        let waiting = connect(&proxy.in_front_of(server.port(), &server.url())).await;
        let holder = connect(&server.url()).await;
        for _ in 0..3 {
            let (guard, waiter) = one_behind_another(&holder, &waiting).await;
            // The connections break, and everything that is sent meanwhile is lost.
            proxy.refuse(true);
            release(guard).await;
            proxy.refuse(false);
            let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
            release(guard).await;
        }
    });
}

// S29
#[test]
fn grant_to_a_crashed_waiter_costs_only_its_waiter_lease() {
    run(async {
        let server = fast();
        let (locks, other) = (connect(&server.url()).await, connect(&server.url()).await);
        let guard = locks.mutex("dead").lock().await.unwrap();
        // The client joined and was killed, so no heartbeat renews its place.
        let mut dead = leased("dead", Duration::from_secs(60));
        dead.waiter_lease = Duration::from_secs(6);
        let begun = Instant::now();
        let joined = locks.store().join(&dead, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
        let waiter = tokio::spawn(async move { other.mutex("dead").lock().await });
        until_waiting(&locks, "dead", 2).await;
        release(guard).await;
        // The claim was granted the lock and notified.
        assert!(matches!(locks.store().changed(&dead).await.unwrap(), Signal::Granted(_)));
        let next = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
        let place = dead.waiter_lease - Duration::from_millis(100);
        assert!(
            begun.elapsed() >= place,
            "the next waiter was granted before the dead one expired"
        );
        assert!(
            begun.elapsed() < dead.waiter_lease + HEARTBEAT * 2,
            "the hand-over took longer than a waiter's lease"
        );
        release(next).await;
    });
}

// S92
#[test]
fn ten_thousand_waiters_on_one_lock_are_all_granted() {
    let many = testbed::sized(10_000, 1_000);
    run(async {
        let server = fast();
        let holder = connect(&server.url()).await;
        let mut clients = Vec::new();
        for _ in 0..10 {
            clients.push(connect(&server.url()).await);
        }
        let guard = holder.mutex("crowded").lock().await.unwrap();
        let witness = Arc::<Witness>::default();
        let mut waiting = tokio::task::JoinSet::new();
        for n in 0..many {
            let (mutex, witness) = (clients[n % 10].mutex("crowded"), witness.clone());
            waiting.spawn(async move {
                let guard = mutex.lock().await.unwrap_or_else(|error| panic!("{error}"));
                witness.enter(&guard);
                witness.leave();
                release(guard).await;
            });
        }
        until("all clients are in the queue", async || {
            server.command(&["ZCARD", "leasehold:w:crowded"]) == many.to_string()
        })
        .await;
        // Several heartbeats of all waiters pass, along with the holder's renewals.
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(guard.is_held());
        let used: usize = server.info("memory", "used_memory").parse().unwrap();
        assert!(used < 5_000_000 + many * 3_500, "{used} bytes for {many} waiters");
        server.command(&["CONFIG", "RESETSTAT"]);
        assert_eq!(witness.count(), 0, "another client held the lock during the hold");
        release(guard).await;
        while let Some(done) = waiting.join_next().await {
            done.expect("a task panicked");
        }
        assert_eq!(witness.count(), many as u64);
        // Each hand-over sends one message, however many clients wait.
        let calls = server.calls();
        let published = calls.iter().find(|(name, _)| name == "publish").map_or(0, |(_, n)| *n);
        assert!(published <= many as u64 + 10, "{published} messages");
    });
}

/// Creates a lock with a long queue of live or dead waiters.
fn queue(server: &Redis, name: &str, count: usize, dead: bool) {
    let code = "local t = redis.call('TIME')
        local ends = (ARGV[3] == 'dead' and 1 or 600000000 + t[1] * 1000000)
        for i = 1, ARGV[2] do
          local member = string.format('%032x 0 nobody:1 {\"host\":\"host\",\"pid\":%d,\"label\":\"\"}', i, i)
          redis.call('ZADD', KEYS[1], i, member)
          redis.call('ZADD', KEYS[2], ends, member)
        end";
    let (w, x) = (format!("leasehold:w:{name}"), format!("leasehold:x:{name}"));
    let state = if dead { "dead" } else { "alive" };
    server.command(&["EVAL", code, "2", &w, &x, name, &count.to_string(), state]);
}

// F13
#[test]
fn timed_out_wait_does_not_read_the_queue() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let held = locks.mutex("busy").lock().await.unwrap();
        queue(&server, "busy", 3_000, false);
        let sent = || server.info("stats", "total_net_output_bytes").parse::<u64>().unwrap();
        let before = sent();
        let limit = Duration::from_millis(200);
        let error = locks.mutex("busy").lock_timeout(limit).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let label = format!("pid {}", std::process::id());
        assert!(
            format!("{error:#}").contains(&label),
            "the error does not name the holder: {error}"
        );
        assert!(locks.check(&held.sequencer()).await.is_ok());
        let sent = sent() - before;
        assert!(sent < 50_000, "the replies had {sent} bytes");
    });
}

// F13
#[test]
fn a_long_queue_is_read_in_pages() {
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let held = locks.mutex("long").lock().await.unwrap();
        queue(&server, "long", 1_700, false);
        server.command(&["CONFIG", "RESETSTAT"]);
        let info = locks.inspect("long").await.unwrap().expect("held");
        let scripts = |name: &str| server.calls().iter().find(|c| c.0 == name).map_or(0, |c| c.1);
        assert!(scripts("evalsha") + scripts("eval") > 3, "{:?}", server.calls());
        assert_eq!((info.claims.len(), info.holders().count()), (1_701, 1));
        let pids: Vec<u32> = info.waiters().map(|c| c.holder.pid).collect();
        assert!(
            pids.iter().copied().eq(1..=1_700),
            "the waiters are not in the order of the queue"
        );
        assert_eq!(locks.list("").await.unwrap()[0].claims.len(), 1_701);
        release(held).await;
        // A semaphore can have as many holders.
        let mut held = Vec::new();
        for _ in 0..1_200 {
            let permit = claim("permits", Kind::Semaphore, 1_200);
            hold(&locks, &permit).await;
            held.push(permit);
        }
        wait(&locks, &claim("permits", Kind::Semaphore, 1_200)).await;
        let info = locks.inspect("permits").await.unwrap().expect("held");
        assert_eq!((info.holders().count(), info.waiters().count()), (1_200, 1));
        let tokens: Vec<_> = info.claims.iter().map(|c| c.token.unwrap()).collect();
        assert!(tokens.is_sorted(), "tokens are not in ascending order");
    });
}

// F13
#[test]
fn call_removes_dead_claims_in_batches_and_skips_none() {
    const DEAD: usize = 5_500;
    run(async {
        let server = fast();
        let locks = connect(&server.url()).await;
        let left = |name: &str| {
            server.command(&["ZCARD", &format!("leasehold:x:{name}")]).parse::<usize>().unwrap()
        };
        let holder = mutex("dead");
        hold(&locks, &holder).await;
        queue(&server, "dead", DEAD, true);
        assert!(locks.store().join(&mutex("dead"), Mode::Try).await.is_ok());
        assert!(
            (1..DEAD).contains(&left("dead")),
            "{} of {DEAD} dead claims are left",
            left("dead")
        );
        let next = mutex("dead");
        wait(&locks, &next).await;
        // The releasing client repeats its call until a waiter holds the lock.
        assert!(locks.store().leave(&holder, None).await.unwrap());
        tokio::time::timeout(PATIENCE, wait_for_grant(&locks, &next))
            .await
            .expect("the lock was not handed over");
        assert_eq!(left("dead"), 0);
        // A free lock with many dead waiters is not granted past waiters that may be alive. Soon
        // all dead ones are removed.
        queue(&server, "free", DEAD, true);
        let guard = tokio::time::timeout(PATIENCE, locks.mutex("free").lock()).await;
        release(guard.expect("granted").unwrap()).await;
    });
}

#[test]
fn a_waiter_evicted_while_the_connection_is_broken_is_never_granted() {
    run(async {
        let server = testbed::redis();
        let proxy = Proxy::before(server.port());
        let ours = connect(&proxy.in_front_of(server.port(), &server.url())).await;
        evicted_waiter_is_never_granted(&proxy, &ours, &connect(&server.url()).await).await;
    });
}

/// The reply is lost after each number of replies in turn. The eviction may grant the lock to the
/// next waiter, which must not be evicted.
#[test]
fn evicting_all_holders_is_sent_once() {
    run(async {
        let server = testbed::redis();
        let proxy = Proxy::before(server.port());
        let direct = connect(&server.url()).await;
        let person = connect(&proxy.in_front_of(server.port(), &server.url())).await;
        let mut in_doubt = 0;
        for round in 0..40 {
            // Replies to the connection for notifications, which is opened again after each cut, may be the ones
            // that are dropped. Then the eviction succeeds, and a later round loses its reply.
            if round >= 4 && in_doubt > 0 {
                break;
            }
            let kept = round % 4;
            let name = Name::new(format!("evicted-once-{round}")).unwrap();
            for _ in 0..2 {
                let mut claim = Claim::new(name.clone(), Kind::Mutex, 1, 1).unwrap();
                (claim.lease, claim.waiter_lease) = (PATIENCE * 2, PATIENCE * 2);
                direct.store().join(&claim, Mode::Wait).await.unwrap();
            }
            // Opens the connection.
            person.inspect(name.as_str()).await.unwrap();
            proxy.drop_replies_after(kept);
            let mut evicting = tokio::spawn({
                let (person, name) = (person.clone(), name.clone());
                async move { person.evict(name.as_str(), Evict::Holders).await }
            });
            let dropped = async {
                while !proxy.has_dropped() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            let evicted = tokio::select! {
                evicted = &mut evicting => Some(evicted),
                () = dropped => None,
            };
            proxy.cut();
            proxy.pass_replies();
            let evicted = match evicted {
                Some(evicted) => evicted.unwrap(),
                None => tokio::time::timeout(PATIENCE, evicting).await.unwrap().unwrap(),
            };
            let left = direct.inspect(name.as_str()).await.unwrap();
            let left = left.map_or(0, |lock| lock.claims.len());
            match evicted {
                Ok(count) => assert_eq!((count, left), (1, 1), "after {kept} replies"),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
                    assert_eq!(left, 1, "the next holder was evicted too, after {kept} replies");
                    in_doubt += 1;
                }
            }
        }
        assert!(in_doubt >= 1, "no reply of an eviction was lost");
    });
}
