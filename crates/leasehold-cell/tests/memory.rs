//! The suite that every store passes, on cells in memory.

#[path = "memory/values.rs"]
mod values;

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use leasehold_cell::lasting::{Lasting, Value, Values};
use leasehold_cell::memory::MemoryCells;
use leasehold_cell::{Answer, CellStore, Cells, Options, Request, Version, promises};
use leasehold_core::store::{Evict, Joined, Mode, Renew, Renewal, Store, StoreInfo, Survival};
use leasehold_core::{Builder, Claim, ErrorKind, Kind, Leasehold, Name};
use tokio::runtime::Handle;

fn client(cells: &Arc<MemoryCells>, options: Options) -> Leasehold {
    let mut promised = promises(cells.system(), &options);
    promised.on_store_crash = Survival::NotApplicable;
    let info = StoreInfo::new("cells:", promised);
    let store = CellStore::new(cells.clone(), options, info, &Handle::current());
    Builder::default().store(Arc::new(store)).unwrap()
}

fn open_at_once() -> Options {
    Options { restart_delay: Some(Duration::ZERO), ..Options::default() }
}

static CELLS: LazyLock<Arc<MemoryCells>> = LazyLock::new(Arc::default);

leasehold_conformance::conformance_suite!(cells, async { client(&CELLS, open_at_once()) });

static STREAM: LazyLock<Arc<MemoryCells>> =
    LazyLock::new(|| Arc::new(MemoryCells::like_a_stream()));

leasehold_conformance::conformance_suite!(like_a_stream, async {
    client(&STREAM, Options { poll: Duration::from_secs(2), ..Options::default() })
});

// What goes wrong, step by step.

/// These objects, for several clients.
#[derive(Clone, Debug)]
struct Common(Arc<values::Objects>);

#[async_trait::async_trait]
impl Values for Common {
    async fn get(&self, key: &str) -> leasehold_core::Result<Option<Value>> {
        self.0.get(key).await
    }

    async fn put(
        &self,
        key: &str,
        bytes: Vec<u8>,
        on: Option<&Version>,
    ) -> leasehold_core::Result<Option<Version>> {
        self.0.put(key, bytes, on).await
    }

    async fn delete(&self, key: &str) -> leasehold_core::Result<()> {
        self.0.delete(key).await
    }

    async fn keys(&self, prefix: &str) -> leasehold_core::Result<Vec<String>> {
        self.0.keys(prefix).await
    }
}

/// A store in these objects, of a client of its own.
fn in_objects(objects: &Arc<values::Objects>, options: Options) -> CellStore {
    let cells = Lasting::new(Common(objects.clone()), 250, 1 << 20, Duration::ZERO);
    let info = StoreInfo::new("objects:", promises(cells.system(), &options));
    CellStore::new(Arc::new(cells), options, info, &Handle::current())
}

fn client_of(store: CellStore) -> Leasehold {
    Builder::default().store(Arc::new(store)).unwrap()
}

/// A proxy before an object store repeats each write, and passes on the answer to the repetition.
#[test]
fn a_release_that_is_repeated_on_its_way_is_no_loss() {
    run(async {
        let objects = Arc::<values::Objects>::default();
        objects.repeat(true);
        let [ours, other] =
            [in_objects(&objects, Options::default()), in_objects(&objects, Options::default())];
        for round in 0..6 {
            let holds = claim("a");
            held(ours.join(&holds, Mode::Try).await.unwrap());
            // Alone, and with another in the queue: by guess and by look.
            let waits = claim("a");
            if round % 2 == 1 {
                assert!(matches!(
                    other.join(&waits, Mode::Wait).await.unwrap(),
                    Joined::Waiting(_)
                ));
            }
            assert!(ours.leave(&holds, None).await.unwrap(), "round {round}: told as lost");
            if round % 2 == 1 {
                assert!(other.leave(&waits, None).await.unwrap());
            }
        }
        // And with a crowd that writes in between.
        let clients: Vec<_> =
            (0..6).map(|_| client_of(in_objects(&objects, Options::default()))).collect();
        leasehold_test_support::hammer(&clients, "crowd", 1, 8).await;
    });
}

/// What was taken by another before the release began is a loss, whoever has written since.
#[test]
fn a_release_by_guess_after_an_eviction_is_a_loss() {
    run(async {
        let objects = Arc::<values::Objects>::default();
        let [ours, other] =
            [in_objects(&objects, Options::default()), in_objects(&objects, Options::default())];
        for repeats in [false, true] {
            objects.repeat(repeats);
            let holds = claim("a");
            held(ours.join(&holds, Mode::Try).await.unwrap());
            assert_eq!(other.evict(&holds.name, Evict::Holders).await.unwrap(), 1);
            assert!(!ours.leave(&holds, None).await.unwrap(), "evicted, and told as held");
        }
    });
}

#[test]
fn an_eviction_that_is_repeated_on_its_way_spares_the_next_holder() {
    run(async {
        let objects = Arc::<values::Objects>::default();
        objects.repeat(true);
        let stores: [CellStore; 3] =
            std::array::from_fn(|_| in_objects(&objects, Options::default()));
        let [first, second, operator] = &stores;
        let [holds, waits] = [claim("a"), claim("a")];
        held(first.join(&holds, Mode::Try).await.unwrap());
        assert!(matches!(second.join(&waits, Mode::Wait).await.unwrap(), Joined::Waiting(_)));
        assert_eq!(operator.evict(&holds.name, Evict::Holders).await.unwrap(), 1);
        held(second.join(&waits, Mode::Wait).await.unwrap());
        assert!(!first.leave(&holds, None).await.unwrap());
        assert!(second.leave(&waits, None).await.unwrap());
    });
}

fn run(case: impl Future<Output = ()>) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.unwrap().block_on(async {
        tokio::time::timeout(Duration::from_secs(120), case).await.expect("the case hangs");
    });
}

fn key(name: &str) -> String {
    format!("leasehold:l:{name}")
}

fn claim(name: &str) -> Claim {
    Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap()
}

fn store(cells: &Arc<MemoryCells>, options: Options) -> CellStore {
    let info = StoreInfo::new("cells:", promises(cells.system(), &options));
    CellStore::new(cells.clone(), options, info, &Handle::current())
}

fn held(joined: Joined) -> u64 {
    match joined {
        Joined::Holding { token, .. } => token.get(),
        other => panic!("not held: {other:?}"),
    }
}

fn renewals(claims: &[Claim]) -> Vec<Renew> {
    claims.iter().map(|c| Renew { claim: c.clone(), lease: c.lease }).collect()
}

/// One object answers with an error for good. Whatever is held beside it is renewed.
#[test]
fn an_ill_object_costs_only_its_own_hold() {
    run(async {
        let objects = Arc::<values::Objects>::default();
        let store = in_objects(&objects, Options::default());
        let claims: Vec<Claim> = ["good", "bad", "fine"].into_iter().map(claim).collect();
        for claim in &claims {
            held(store.join(claim, Mode::Try).await.unwrap());
        }
        objects.fail("l:bad");
        let answers = store.renew(&renewals(&claims)).await.unwrap();
        let is_held = |renewal: &Renewal| matches!(renewal, Renewal::Holding { .. });
        assert!(is_held(&answers[0]) && is_held(&answers[2]), "{answers:?}");
        let Renewal::Unknown { kind, .. } = &answers[1] else { panic!("{answers:?}") };
        assert_eq!(*kind, ErrorKind::Unreachable);
        // And in a client, over several renewals.
        let locks = client_of(store);
        let lock = |name: &str| locks.mutex(name).lease(Duration::from_secs(1));
        let (good, ill) = (lock("well"), lock("ill"));
        let (good, ill) = (good.lock().await.unwrap(), ill.lock().await.unwrap());
        objects.fail("l:ill");
        ill.lost().await;
        assert!(good.is_held());
        good.release().await.unwrap();
    });
}

/// A heartbeat of many waits takes no longer than one of a few, so that the client gets its answer in time.
#[test]
fn a_heartbeat_of_many_waits_is_answered_after_one_look_at_each() {
    const MANY: u64 = 100;
    const LOOK: Duration = Duration::from_millis(30);
    run(async {
        let objects = Arc::<values::Objects>::default();
        let ours = in_objects(&objects, Options::default());
        let names: Vec<String> = (0..MANY).map(|n| format!("many-{n}")).collect();
        let mut others = Vec::new();
        // Several clients hold, so that there are several sessions to look at.
        for (n, name) in names.iter().enumerate() {
            if n % 10 == 0 {
                others.push(in_objects(&objects, Options::default()));
            }
            held(others.last().unwrap().join(&claim(name), Mode::Try).await.unwrap());
        }
        let waits: Vec<Claim> = names.iter().map(|name| claim(name)).collect();
        for wait in &waits {
            assert!(matches!(ours.join(wait, Mode::Wait).await.unwrap(), Joined::Waiting(_)));
        }
        objects.take(LOOK);
        for _ in 0..3 {
            objects.asked("");
            let began = Instant::now();
            let answers = ours.renew(&renewals(&waits)).await.unwrap();
            let took = began.elapsed();
            assert!(answers.iter().all(|told| matches!(told, Renewal::Waiting(_))), "{answers:?}");
            // One after the other it would be three seconds and more: the client waits for two.
            assert!(took < LOOK * 30, "{took:?}");
            tokio::time::sleep(LOOK * 10).await;
            let [looks, writes] = objects.asked("");
            // A touch of the session may be among them.
            assert!(looks <= MANY + MANY / 10 && writes <= 2, "{looks} and {writes}");
        }
    });
}

/// What a minute of a client costs, by what it does. The page of the objects' store has these numbers.
#[test]
fn a_minute_of_holding_and_of_waiting_costs_as_many_requests_as_the_page_says() {
    const SECONDS: u64 = 20;
    let measured = |waiters: usize, holds: bool| {
        let objects = Arc::<values::Objects>::default();
        let minute = Arc::<std::sync::Mutex<[u64; 2]>>::default();
        let told = minute.clone();
        run(async move {
            let options = || Options { poll: Duration::from_secs(1), ..Options::default() };
            let holder = client_of(in_objects(&objects, options()));
            let guard = holder.mutex("a").lock().await.unwrap();
            let mut waiting = tokio::task::JoinSet::new();
            for _ in 0..waiters {
                let locks = client_of(in_objects(&objects, options()));
                waiting.spawn(async move { locks.mutex("a").lock().await.map(drop) });
            }
            let release = if holds {
                Some(guard)
            } else {
                guard.release().await.unwrap();
                None
            };
            tokio::time::sleep(Duration::from_secs(if holds { 3 } else { 25 })).await;
            objects.asked("");
            tokio::time::sleep(Duration::from_secs(SECONDS)).await;
            let [looks, writes] = objects.asked("");
            *told.lock().unwrap() = [looks, writes].map(|n| n * 60 / SECONDS);
            drop(release);
        });
        *minute.lock().unwrap()
    };
    let threads = [(0, true), (1, true), (8, true), (0, false)]
        .map(|(waiters, holds)| std::thread::spawn(move || measured(waiters, holds)));
    let [alone, one, eight, idle] = threads.map(|thread| thread.join().unwrap());
    println!(
        "a minute: alone {alone:?}, with one waiter {one:?}, with eight {eight:?}, idle {idle:?}"
    );
    assert_eq!(idle, [0, 0], "an idle client costs something");
    // The session is written 20 times, and the queue looked at 12 times.
    assert!(alone[0] <= 18 && alone[1] <= 24, "{alone:?}");
    let each = |all: [u64; 2], n: u64| [0, 1].map(|i| (all[i] - alone[i].min(all[i])) / n);
    let (first, further) = (each(one, 1), each(eight, 8));
    assert!(first[0] <= 125 && first[1] <= 24, "the next waiter: {first:?}");
    assert!(further[0] <= 110 && further[1] <= 24, "each of eight: {further:?}");
}

/// A client that only tries, from cron, and finds the lock held, leaves nothing behind.
#[test]
fn a_failed_try_of_a_new_client_writes_nothing() {
    run(async {
        let objects = Arc::<values::Objects>::default();
        let [holder, other] = std::array::from_fn(|_| in_objects(&objects, Options::default()));
        held(holder.join(&claim("a"), Mode::Try).await.unwrap());
        objects.asked("");
        for _ in 0..2 {
            let tried = other.join(&claim("a"), Mode::Try).await.unwrap();
            assert!(matches!(tried, Joined::Busy { .. }), "{tried:?}");
        }
        other.disconnect().await;
        let [looks, writes] = objects.asked("");
        assert!(looks <= 4 && writes == 0, "{looks} looks and {writes} writes");
        held(other.join(&claim("b"), Mode::Try).await.unwrap());
    });
}

/// A hundred readers hold: another is let in without a look at each of them, and a writer that waits does not look at
/// all of them again and again.
#[test]
fn a_crowd_of_readers_costs_few_looks() {
    run(async {
        let objects = Arc::<values::Objects>::default();
        let reader = |n: usize| {
            let mut claim =
                Claim::new(Name::new("r").unwrap(), Kind::RwLock, 1, 1_000_000).unwrap();
            claim.weight = if n == 0 { 1_000_000 } else { 1 };
            claim
        };
        let mut stores = Vec::new();
        for n in 1..=100 {
            let store = in_objects(&objects, Options::default());
            held(store.join(&reader(n), Mode::Try).await.unwrap());
            stores.push(store);
        }
        objects.asked("");
        let (writer, wait) = (in_objects(&objects, Options::default()), reader(0));
        assert!(matches!(writer.join(&wait, Mode::Wait).await.unwrap(), Joined::Waiting(_)));
        let [looks, _] = objects.asked("s:");
        assert!(looks <= 101, "{looks} looks at sessions to join");
        for _ in 0..20 {
            writer.renew(&renewals(std::slice::from_ref(&wait))).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let [looks, _] = objects.asked("s:");
        assert!(looks <= 2, "{looks} looks at sessions by 20 heartbeats");
    });
}

/// Programs that are asynchronous in another way, or whose runtime has no timers, wait all the same; and a runtime that
/// is shut down while its tasks wait takes nothing with it.
#[test]
fn the_callers_runtime_needs_no_timers() {
    let ours = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let ours = ours.unwrap();
    let cells = Arc::<MemoryCells>::default();
    let store = |cells: &Arc<MemoryCells>| {
        let info = StoreInfo::new("cells:", promises(cells.system(), &open_at_once()));
        CellStore::new(cells.clone(), open_at_once(), info, ours.handle())
    };
    let [holder, waiter] = [store(&cells), store(&cells)];
    let caller = tokio::runtime::Builder::new_current_thread().build().unwrap();
    caller.block_on(async {
        let [holds, waits] = [claim("a"), claim("a")];
        held(holder.join(&holds, Mode::Try).await.unwrap());
        assert!(matches!(waiter.join(&waits, Mode::Wait).await.unwrap(), Joined::Waiting(_)));
        let told = waiter.changed(&waits);
        let (told, left) = tokio::join!(told, async {
            tokio::task::yield_now().await;
            holder.leave(&holds, None).await
        });
        assert!(left.unwrap());
        assert!(
            matches!(told.unwrap(), leasehold_core::store::Signal::Granted(_)),
            "it never slept"
        );
    });
}

/// Two to take, one where the version is known, one to release; and none of it more because 300 are held.
#[test]
fn r13_a_pair_is_three_round_trips_and_two_where_the_version_is_known() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let [ours, others] = [store(&cells, open_at_once()), store(&cells, open_at_once())];
        // Sessions, the epoch and the lock's cell are made.
        for store in [&ours, &others, &ours] {
            let first = claim("r13");
            held(store.join(&first, Mode::Try).await.unwrap());
            assert!(store.leave(&first, None).await.unwrap());
        }
        // A guess that is wrong costs a third, once: then there is none until somebody is alone again.
        let turns = [
            (&others, 3),
            (&ours, 3),
            (&others, 2),
            (&ours, 2),
            (&ours, 2),
            (&ours, 1),
            (&ours, 1),
        ];
        for (store, take) in turns {
            let (one, before) = (claim("r13"), cells.round_trips());
            held(store.join(&one, Mode::Wait).await.unwrap());
            let taken = cells.round_trips();
            assert!(store.leave(&one, None).await.unwrap());
            let trips = (taken - before, cells.round_trips() - taken);
            assert!(trips.0 <= take && trips.1 == 1, "{trips:?}, and not {take} and 1");
        }
        let many: Vec<Claim> = (0..300).map(|n| claim(&format!("many-{n}"))).collect();
        for one in &many {
            held(ours.join(one, Mode::Try).await.unwrap());
        }
        let renewals: Vec<Renew> =
            many.iter().map(|c| Renew { claim: c.clone(), lease: c.lease }).collect();
        let before = cells.round_trips();
        let renewed = ours.renew(&renewals).await.unwrap();
        assert!(renewed.iter().all(|r| matches!(r, Renewal::Holding { .. })));
        // Two looks at hundreds of queues; perhaps one touch of the session.
        assert!(cells.round_trips() - before <= 3, "{}", cells.round_trips() - before);
    });
}

#[test]
fn s06_a_lost_reply_is_recognised_and_a_late_write_is_refused() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let store = store(&cells, open_at_once());
        let first = claim("lost");
        let token = held(store.join(&first, Mode::Try).await.unwrap());
        // Known to be ours alone: one write, whose answer is lost.
        cells.lose_answers(1);
        assert!(store.leave(&first, None).await.is_err());
        assert!(store.leave(&first, None).await.unwrap(), "it was there");
        let second = claim("lost");
        cells.lose_answers(1);
        assert!(store.join(&second, Mode::Try).await.is_err());
        let again = held(store.join(&second, Mode::Try).await.unwrap());
        assert!(again > token);
        assert!(store.leave(&second, None).await.unwrap());
        // In doubt, and not there: the cell is written anew, so that what is under way is refused.
        let third = claim("lost");
        cells.set_away(true);
        assert!(store.join(&third, Mode::Try).await.is_err());
        cells.set_away(false);
        let get = || vec![Request::Get { key: key("lost") }];
        let read = async || match cells.run(get()).await.unwrap().remove(0) {
            Answer::Found(found) => found.version,
            other => panic!("{other:?}"),
        };
        let before = read().await;
        assert!(!store.leave(&third, None).await.unwrap());
        assert_ne!(read().await, before, "a write that is under way would still be done");
    });
}

/// Programs are upgraded one after the other. Whoever was told to use another prefix would hold beside the newer.
#[test]
fn f44_what_a_later_version_wrote_says_to_upgrade_and_stays() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let locks = client(&cells, open_at_once());
        let newer = b"leasehold queue 2 newer\nwhatever";
        cells.put(&key("newer"), newer);
        let error = locks.mutex("newer").try_lock().await.unwrap_err();
        assert!(format!("{error:#}").contains("upgrade this leasehold"), "{error}");
        assert!(!format!("{error:#}").contains("prefix"), "{error}");
        locks.evict("newer", Evict::Holders).await.unwrap_err();
        assert_eq!(cells.value(&key("newer")).as_deref(), Some(&newer[..]));
        let listed = locks.list("").await.unwrap();
        assert!(listed[0].unreadable.as_ref().unwrap().contains("upgrade"), "{listed:?}");
        // One epoch is everybody's: nobody is let in by who cannot read it.
        let cells = Arc::new(MemoryCells::default());
        let locks = client(&cells, open_at_once());
        cells.put("leasehold:e", b"leasehold epoch 2 whatever");
        let error = locks.mutex("newer").try_lock().await.unwrap_err();
        assert!(format!("{error:#}").contains("upgrade this leasehold"), "{error}");
    });
}

#[test]
fn s90_what_is_not_ours_is_never_written_over() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let locks = client(&cells, open_at_once());
        for foreign in [&b"42"[..], b"", b"leasehold queue x a\n{}", &[0xff; 100]] {
            cells.put(&key("foreign"), foreign);
            let error = locks.mutex("foreign").try_lock().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert!(format!("{error:#}").contains("prefix"), "{error}");
            assert!(locks.evict("foreign", Evict::Holders).await.is_err());
            assert_eq!(cells.value(&key("foreign")).as_deref(), Some(foreign));
        }
        // Others are listed all the same.
        let guard = locks.mutex("ours").lock().await.unwrap();
        let listed = locks.list("").await.unwrap();
        let shown: Vec<_> =
            listed.iter().map(|l| (l.name.as_str(), l.unreadable.is_some())).collect();
        assert_eq!(shown, [("foreign", true), ("ours", false)]);
        guard.release().await.unwrap();
        let long = "n".repeat(400);
        let guard = locks.mutex(&long).lock().await.unwrap();
        assert_eq!(locks.list("nn").await.unwrap()[0].name.as_str(), long);
        drop(guard);
    });
}

#[test]
fn r36_a_system_that_forgot_all_is_closed_until_nobody_believes() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let session = Duration::from_secs(1);
        let options = Options { session, ..Options::default() };
        let delay = options.closed_for(Duration::ZERO);
        assert!(delay >= session);
        let [ours, other] = [client(&cells, options.clone()), client(&cells, options)];
        // It is new.
        let error = ours.mutex("a").try_lock().await.unwrap_err();
        assert!(format!("{error:#}").contains("it grants no lock for another"), "{error}");
        let guard = ours.mutex("a").lock().await.unwrap();
        for _ in 0..2 {
            let token = guard.token();
            let began = Instant::now();
            cells.flush();
            let next = other.mutex("a").lock().await.unwrap();
            assert!(began.elapsed() >= delay, "{:?}", began.elapsed());
            assert!(!guard.is_held(), "two hold");
            assert!(next.token() > token, "{} after {token}", next.token());
            next.release().await.unwrap();
        }
    });
}

/// Whoever has left a queue behind, after all was forgotten, and guesses at it.
#[test]
fn r36_a_guess_lets_nobody_in_who_would_have_to_wait() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let session = Duration::from_secs(1);
        let options = Options { session, ..Options::default() };
        let [ours, other] = [store(&cells, options.clone()), store(&cells, options.clone())];
        tokio::time::sleep(options.closed_for(Duration::ZERO)).await;
        let holds = claim("a");
        while other.join(&holds, Mode::Try).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // It may still come, so that to leave writes the queue.
        let gives_up = claim("a");
        cells.lose_answers(1);
        assert!(ours.join(&gives_up, Mode::Wait).await.is_err());
        cells.flush();
        let _ = ours.leave(&gives_up, None).await;
        let next = claim("a");
        let joined = ours.join(&next, Mode::Wait).await;
        assert!(joined.is_err(), "two hold: {joined:?}");
        ours.leave(&next, None).await.unwrap();
    });
}

/// A write is refused for want of room, its value is lost, and its caller is gone before it knows.
#[test]
fn r36_who_is_refused_for_room_closes_the_locks_though_its_caller_is_gone() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let store = store(&cells, open_at_once());
        let holds = claim("a");
        held(store.join(&holds, Mode::Try).await.unwrap());
        let waits = claim("a");
        cells.fill(1);
        {
            let mut joins = std::pin::pin!(store.join(&waits, Mode::Wait));
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            while cells.value(&key("a")).is_some() {
                assert!(joins.as_mut().poll(&mut context).is_pending());
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        while cells.value("leasehold:e").is_some() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
}

/// After an outage that ended the session nothing is to be cleaned up: all clients see that its claims are dead.
#[test]
fn an_outage_leaves_no_crowd_of_departures_behind() {
    const MANY: u64 = 60;
    run(async {
        let cells = Arc::new(MemoryCells::like_a_stream());
        let session = Duration::from_secs(1);
        let store = store(&cells, Options { session, ..open_at_once() });
        for n in 0..MANY {
            let mut one = claim(&format!("many-{n}"));
            one.lease = session;
            held(store.join(&one, Mode::Try).await.unwrap());
        }
        cells.set_away(true);
        tokio::time::sleep(session * 3).await;
        let before = cells.round_trips();
        cells.set_away(false);
        tokio::time::sleep(session * 3).await;
        let after = cells.round_trips() - before;
        assert!(after < MANY / 2, "{after} round trips for {MANY} claims that are dead");
    });
}

/// A queue in which only the dead stand ends, where queues end.
#[test]
fn the_queue_of_a_dead_client_is_not_kept_for_good() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let dead = store(&cells, open_at_once());
        held(dead.join(&claim("once"), Mode::Try).await.unwrap());
        drop(dead);
        let get = vec![Request::Get { key: key("once") }];
        let Answer::Found(found) = cells.run(get).await.unwrap().remove(0) else { panic!("gone") };
        let left = found.remaining.expect("it is kept for good");
        let day = Duration::from_secs(86_400);
        assert!(left > day * 2 && left <= day * 7, "{left:?}");
    });
}

/// Two clients of one store: that one of them is closed does not end what the other holds.
#[test]
fn who_disconnects_ends_nothing_of_those_who_share_the_store() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let [shared, other] = [store(&cells, open_at_once()), store(&cells, open_at_once())];
        let holds = claim("a");
        held(shared.join(&holds, Mode::Try).await.unwrap());
        shared.disconnect().await;
        let tried = other.join(&claim("a"), Mode::Try).await.unwrap();
        assert!(matches!(tried, Joined::Busy { .. }), "{tried:?}");
        assert!(shared.leave(&holds, None).await.unwrap());
        // Nobody holds: then it says goodbye.
        shared.disconnect().await;
        let next = claim("a");
        held(other.join(&next, Mode::Try).await.unwrap());
    });
}

/// An eviction of one lock cannot be noticed: what is promised then is that the first finds out, and that
/// tokens rise.
#[test]
fn r36_a_lock_that_was_thrown_away_is_found_lost_and_tokens_rise() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let [ours, other] = [client(&cells, open_at_once()), client(&cells, open_at_once())];
        let guard = ours.mutex("a").lease(Duration::from_secs(1)).lock().await.unwrap();
        cells.evict(&key("a"));
        let next = other.mutex("a").try_lock().await.unwrap();
        assert!(next.token() > guard.token());
        tokio::time::timeout(Duration::from_secs(5), guard.lost()).await.expect("it finds out");
        assert!(next.is_held());
        // Of the session: all that is held under it is lost, and the next hold is another session's.
        let sessions = cells.keys("leasehold:s:").await.unwrap();
        sessions.iter().for_each(|key| cells.evict(key));
        tokio::time::timeout(Duration::from_secs(20), next.lost()).await.expect("it finds out");
        let third = ours.mutex("a").lock_timeout(Duration::from_secs(20)).await.unwrap();
        assert!(third.token() > next.token());
    });
}

/// A client that is gone, and nobody looks until its session is over: one look is enough to know.
#[test]
fn a_try_that_looks_once_finds_the_dead_gone() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let session = Duration::from_secs(1);
        let options = || Options { session, ..open_at_once() };
        let dead = store(&cells, options());
        held(dead.join(&claim("a"), Mode::Try).await.unwrap());
        assert!(matches!(dead.join(&claim("a"), Mode::Wait).await.unwrap(), Joined::Waiting(_)));
        drop(dead);
        let locks = client(&cells, options());
        let error = locks.mutex("a").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended);
        tokio::time::sleep(session * 2).await;
        assert!(locks.mutex("a").try_lock().await.unwrap().is_held());
    });
}

/// Whoever looks at a server that is behind finds no session, and lets nobody in by that.
#[test]
fn who_only_a_look_says_is_gone_keeps_the_lock() {
    run(async {
        let cells = Arc::new(MemoryCells::like_a_stream());
        let [ours, other] = [client(&cells, open_at_once()), client(&cells, open_at_once())];
        let guard = ours.mutex("a").lock().await.unwrap();
        let session = cells.keys("leasehold:s:").await.unwrap().remove(0);
        cells.hide(&session, true);
        for _ in 0..3 {
            let error = other.mutex("a").try_lock().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        }
        assert!(guard.is_held());
        cells.hide(&session, false);
        // Who is gone for certain is not touched any more, however late the touch is.
        cells.evict(&session);
        let next = other.mutex("a").try_lock().await.unwrap();
        assert!(cells.value(&session).is_some_and(|value| value.ends_with(b"gone")));
        tokio::time::timeout(Duration::from_secs(20), guard.lost()).await.expect("it finds out");
        assert!(next.is_held());
    });
}

/// Where a touch is a write, the one after a lost answer is refused, and the session goes on.
#[test]
fn s14_a_session_goes_on_after_touches_whose_answers_are_lost() {
    run(async {
        let cells = Arc::new(MemoryCells::like_a_stream());
        let session = Duration::from_secs(1);
        let locks = client(&cells, Options { session, ..open_at_once() });
        let guard = locks.mutex("a").lock().await.unwrap();
        for _ in 0..8 {
            cells.lose_answers(1);
            tokio::time::sleep(Duration::from_millis(400)).await;
            assert!(guard.is_held());
        }
        assert_eq!(cells.keys("leasehold:s:").await.unwrap().len(), 1);
    });
}

/// A session is over for its client before its cell is, and not touched any more.
#[test]
fn a_session_that_is_not_certain_any_more_is_over() {
    run(async {
        let cells = Arc::new(MemoryCells::like_a_stream());
        let session = Duration::from_secs(1);
        let locks = client(&cells, Options { session, ..open_at_once() });
        let guard = locks.mutex("a").lock().await.unwrap();
        cells.set_away(true);
        tokio::time::timeout(Duration::from_secs(20), guard.lost()).await.expect("its lease ends");
        // Certain for 1.2 s, there for 1.7 s.
        tokio::time::sleep(Duration::from_millis(300)).await;
        cells.set_away(false);
        let before = cells.keys("leasehold:s:").await.unwrap();
        let next = locks.mutex("b").lock().await.unwrap();
        let after = cells.keys("leasehold:s:").await.unwrap();
        assert!(after.iter().any(|session| !before.contains(session)), "{before:?}, {after:?}");
        assert!(next.is_held());
    });
}

/// Who waits looks once a minute here: it is told, or this takes for ever.
#[test]
fn r10_who_is_let_in_is_told_at_once() {
    run(async {
        let cells = Arc::new(MemoryCells::like_a_stream());
        let options = || Options { poll: Duration::from_secs(60), ..open_at_once() };
        let [ours, other] = [client(&cells, options()), client(&cells, options())];
        let mut guard = ours.mutex("a").lock().await.unwrap();
        for locks in [&other, &ours] {
            let lock = locks.mutex("a");
            let waiting = tokio::spawn(async move { lock.lock().await });
            // Its first looks are over, the next is far away.
            tokio::time::sleep(Duration::from_secs(4)).await;
            let began = Instant::now();
            guard.release().await.unwrap();
            guard = waiting.await.unwrap().unwrap();
            assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
        }
    });
}

/// Each of 32 clients takes the lock again and again: everybody gets on, and about equally often.
#[test]
fn r10_a_crowd_does_not_starve_anybody() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let inside = Arc::new(AtomicU64::new(0));
        let ready = Arc::new(tokio::sync::Barrier::new(32));
        let tasks: Vec<_> = (0..32)
            .map(|_| {
                let (locks, inside) = (client(&cells, open_at_once()), inside.clone());
                let ready = ready.clone();
                tokio::spawn(async move {
                    let mut turns = 0_u32;
                    ready.wait().await;
                    // What happens while they all come at once is over by then.
                    let begin = Instant::now() + Duration::from_millis(500);
                    let end = begin + Duration::from_secs(4);
                    while Instant::now() < end {
                        let guard = locks.mutex("crowd").lock().await.unwrap();
                        assert_eq!(inside.fetch_add(1, SeqCst), 0, "two hold");
                        turns += u32::from(Instant::now() > begin);
                        inside.fetch_sub(1, SeqCst);
                        guard.release().await.unwrap();
                    }
                    f64::from(turns)
                })
            })
            .collect();
        let mut turns = Vec::new();
        for task in tasks {
            turns.push(task.await.unwrap());
        }
        let (sum, squares) = (turns.iter().sum::<f64>(), turns.iter().map(|n| n * n).sum::<f64>());
        let jain = sum * sum / (32.0 * squares);
        println!("{sum} turns in 4 s among 32, Jain {jain:.3}");
        assert!(sum > 64.0 && jain >= 0.95, "{sum} turns, Jain {jain:.3}: {turns:?}");
    });
}
