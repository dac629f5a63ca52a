//! The conformance suite on cells in memory, and tests of faults.

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
use leasehold_core::{Builder, Claim, Client, ErrorKind, Kind, Name};
use tokio::runtime::Handle;

fn client(cells: &Arc<MemoryCells>, options: Options) -> Client {
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

// Tests of single faults.

/// Objects that several clients share.
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

/// Returns a client's own store in these objects.
fn in_objects(objects: &Arc<values::Objects>, options: Options) -> CellStore {
    let cells = Lasting::new(Common(objects.clone()), 250, 1 << 20, Duration::ZERO);
    let info = StoreInfo::new("objects:", promises(cells.system(), &options));
    CellStore::new(Arc::new(cells), options, info, &Handle::current())
}

fn client_of(store: CellStore) -> Client {
    Builder::default().store(Arc::new(store)).unwrap()
}

/// A proxy before an object store repeats each write and returns the answer to the repetition.
#[test]
fn release_repeated_by_a_proxy_is_not_a_loss() {
    run(async {
        let objects = Arc::<values::Objects>::default();
        objects.repeat(true);
        let [ours, other] =
            [in_objects(&objects, Options::default()), in_objects(&objects, Options::default())];
        for round in 0..6 {
            let holds = claim("a");
            held(ours.join(&holds, Mode::Try).await.unwrap());
            // The queue has one or two claims, so that the release uses a guess or a read.
            let waits = claim("a");
            if round % 2 == 1 {
                assert!(matches!(
                    other.join(&waits, Mode::Wait).await.unwrap(),
                    Joined::Waiting(_)
                ));
            }
            assert!(
                ours.leave(&holds, None).await.unwrap(),
                "round {round}: the release reports a loss"
            );
            if round % 2 == 1 {
                assert!(other.leave(&waits, None).await.unwrap());
            }
        }
        // The same with many clients that write in between.
        let clients: Vec<_> =
            (0..6).map(|_| client_of(in_objects(&objects, Options::default()))).collect();
        leasehold_test_support::hammer(&clients, "crowd", 1, 8).await;
    });
}

/// If another client has removed the claim before the release began, this is a loss, whatever was
/// written since.
#[test]
fn release_by_guess_after_an_eviction_reports_a_loss() {
    run(async {
        let objects = Arc::<values::Objects>::default();
        let [ours, other] =
            [in_objects(&objects, Options::default()), in_objects(&objects, Options::default())];
        for repeats in [false, true] {
            objects.repeat(repeats);
            let holds = claim("a");
            held(ours.join(&holds, Mode::Try).await.unwrap());
            assert_eq!(other.evict(&holds.name, Evict::Holders).await.unwrap(), 1);
            assert!(
                !ours.leave(&holds, None).await.unwrap(),
                "the release of an evicted hold reports success"
            );
        }
    });
}

#[test]
fn eviction_repeated_by_a_proxy_spares_the_next_holder() {
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
    run_on(tokio::runtime::Builder::new_multi_thread().worker_threads(2), case);
}

fn run_on(runtime: &mut tokio::runtime::Builder, case: impl Future<Output = ()>) {
    runtime.enable_all().build().unwrap().block_on(async {
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
        other => panic!("expected a hold, got {other:?}"),
    }
}

fn renewals(claims: &[Claim]) -> Vec<Renew> {
    claims.iter().map(|c| Renew { claim: c.clone(), lease: c.lease }).collect()
}

/// One object always returns an error. All other holds are renewed.
#[test]
fn failing_object_affects_only_its_own_hold() {
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
        // The same with a client, over several renewals.
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

/// A renewal of many waiting claims takes as long as one of a few, so that the client gets its
/// reply in time.
#[test]
fn renewing_many_waiters_takes_one_read_each() {
    const MANY: u64 = 100;
    const LOOK: Duration = Duration::from_millis(30);
    run(async {
        let objects = Arc::<values::Objects>::default();
        let ours = in_objects(&objects, Options::default());
        let names: Vec<String> = (0..MANY).map(|n| format!("many-{n}")).collect();
        let mut others = Vec::new();
        // Several clients hold, so that there are several sessions to read.
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
            assert!(
                answers.iter().all(|renewal| matches!(renewal, Renewal::Waiting(_))),
                "{answers:?}"
            );
            // One after the other would take more than three seconds, and the client waits for two.
            assert!(took < LOOK * 30, "{took:?}");
            tokio::time::sleep(LOOK * 10).await;
            let [looks, writes] = objects.asked("");
            // A renewal of the session may be among them.
            assert!(looks <= MANY + MANY / 10 && writes <= 2, "{looks} reads and {writes} writes");
        }
    });
}

/// Counts the requests of a client per minute. The page of the object stores contains these
/// numbers.
#[test]
fn requests_per_minute_match_the_documentation() {
    const SECONDS: u64 = 20;
    let measured = |waiters: usize, holds: bool| {
        let objects = Arc::<values::Objects>::default();
        let minute = Arc::<std::sync::Mutex<[u64; 2]>>::default();
        let counted = minute.clone();
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
            *counted.lock().unwrap() = [looks, writes].map(|n| n * 60 / SECONDS);
            drop(release);
        });
        *minute.lock().unwrap()
    };
    let threads = [(0, true), (1, true), (8, true), (0, false)]
        .map(|(waiters, holds)| std::thread::spawn(move || measured(waiters, holds)));
    let [alone, one, eight, idle] = threads.map(|thread| thread.join().unwrap());
    println!(
        "per minute: alone {alone:?}, with one waiter {one:?}, with eight {eight:?}, idle {idle:?}"
    );
    assert_eq!(idle, [0, 0], "an idle client sends requests");
    // The session is written 20 times, and the queue is read 12 times.
    assert!(alone[0] <= 18 && alone[1] <= 24, "{alone:?}");
    let each = |all: [u64; 2], n: u64| [0, 1].map(|i| (all[i] - alone[i].min(all[i])) / n);
    let (first, further) = (each(one, 1), each(eight, 8));
    assert!(first[0] <= 125 && first[1] <= 24, "the next waiter: {first:?}");
    assert!(further[0] <= 110 && further[1] <= 24, "each of eight: {further:?}");
}

/// A client that only tries, for example from cron, and finds the lock held, leaves nothing behind.
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
        assert!(looks <= 4 && writes == 0, "{looks} reads and {writes} writes");
        held(other.join(&claim("b"), Mode::Try).await.unwrap());
    });
}

/// A hundred readers hold. Another one is granted without reading each session, and a waiting
/// writer does not read all sessions repeatedly.
#[test]
fn many_readers_cost_few_session_reads() {
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
        assert!(looks <= 101, "{looks} reads of sessions to join");
        for _ in 0..20 {
            writer.renew(&renewals(std::slice::from_ref(&wait))).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let [looks, _] = objects.asked("s:");
        assert!(looks <= 2, "{looks} reads of sessions during 20 heartbeats");
    });
}

/// Callers may use another async runtime, or one without timers, and can still wait. A runtime that
/// is shut down while its tasks wait affects no other task.
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
        let signal = waiter.changed(&waits);
        let (signal, left) = tokio::join!(signal, async {
            tokio::task::yield_now().await;
            holder.leave(&holds, None).await
        });
        assert!(left.unwrap());
        assert!(
            matches!(signal.unwrap(), leasehold_core::store::Signal::Granted(_)),
            "the waiter was not notified of its grant"
        );
    });
}

// R13
/// Acquiring takes two round trips, or one if the version is known, and releasing takes one. 300
/// other holds do not change this.
#[test]
fn acquire_and_release_take_three_round_trips_or_two_if_cached() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let [ours, others] = [store(&cells, open_at_once()), store(&cells, open_at_once())];
        // Creates the sessions, the epoch and the lock's cell.
        for store in [&ours, &others, &ours] {
            let first = claim("r13");
            held(store.join(&first, Mode::Try).await.unwrap());
            assert!(store.leave(&first, None).await.unwrap());
        }
        // A wrong guess costs a third round trip once. After it the client makes no guess until it
        // is alone again.
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
            assert!(
                trips.0 <= take && trips.1 == 1,
                "{trips:?} round trips instead of {take} and 1"
            );
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
        // Two reads of hundreds of queues, and perhaps one renewal of the session.
        assert!(cells.round_trips() - before <= 3, "{}", cells.round_trips() - before);
    });
}

// S06
#[test]
fn lost_reply_is_recognized_and_late_write_is_refused() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let store = store(&cells, open_at_once());
        let first = claim("lost");
        let token = held(store.join(&first, Mode::Try).await.unwrap());
        // The client is known to be alone, so this is one write, whose reply is lost.
        cells.lose_answers(1);
        assert!(store.leave(&first, None).await.is_err());
        assert!(store.leave(&first, None).await.unwrap(), "the claim was not in the queue");
        let second = claim("lost");
        cells.lose_answers(1);
        assert!(store.join(&second, Mode::Try).await.is_err());
        let again = held(store.join(&second, Mode::Try).await.unwrap());
        assert!(again > token);
        assert!(store.leave(&second, None).await.unwrap());
        // The join may still arrive as far as the client knows. So the release writes the cell
        // unchanged, and the late write would be refused.
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
        assert_ne!(read().await, before, "the release must write, so that a write in flight fails");
    });
}

// F44
/// Programs are upgraded one after the other. If the error suggested another prefix, two clients
/// would hold the lock, one of each version.
#[test]
fn value_of_a_newer_version_suggests_an_upgrade_and_is_kept() {
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
        // All locks depend on one epoch, so a client that cannot decode it grants none.
        let cells = Arc::new(MemoryCells::default());
        let locks = client(&cells, open_at_once());
        cells.put("leasehold:e", b"leasehold epoch 2 whatever");
        let error = locks.mutex("newer").try_lock().await.unwrap_err();
        assert!(format!("{error:#}").contains("upgrade this leasehold"), "{error}");
    });
}

// S90
#[test]
fn foreign_values_are_never_overwritten() {
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
        // Other locks are listed nevertheless.
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

// R36
#[test]
fn store_that_lost_all_data_grants_nothing_until_old_leases_expire() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let session = Duration::from_secs(1);
        let options = Options { session, ..Options::default() };
        let delay = options.closed_for(Duration::ZERO);
        assert!(delay >= session);
        let [ours, other] = [client(&cells, options.clone()), client(&cells, options)];
        // The system is new.
        let error = ours.mutex("a").try_lock().await.unwrap_err();
        assert!(format!("{error:#}").contains("it grants no lock for another"), "{error}");
        let guard = ours.mutex("a").lock().await.unwrap();
        for _ in 0..2 {
            let token = guard.token();
            let began = Instant::now();
            cells.flush();
            let next = other.mutex("a").lock().await.unwrap();
            assert!(began.elapsed() >= delay, "{:?}", began.elapsed());
            assert!(!guard.is_held(), "two clients hold the lock");
            assert!(next.token() > token, "token {} after {token}", next.token());
            next.release().await.unwrap();
        }
    });
}

/// Two clients read that a new system has no epoch, and both create one.
#[test]
fn two_clients_that_begin_at_the_same_time_both_succeed() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let [ours, other] = [store(&cells, open_at_once()), store(&cells, open_at_once())];
        let (a, b) = (claim("a"), claim("b"));
        let (a, b) = tokio::join!(ours.join(&a, Mode::Try), other.join(&b, Mode::Try));
        a.unwrap();
        b.unwrap();
    });
}

// R36
/// After all data was lost, a client makes a guess about a queue that it has left behind.
#[test]
fn guess_after_data_loss_never_grants_a_held_lock() {
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
        // The join may still arrive, so the release writes the queue.
        let gives_up = claim("a");
        cells.lose_answers(1);
        assert!(ours.join(&gives_up, Mode::Wait).await.is_err());
        cells.flush();
        let _ = ours.leave(&gives_up, None).await;
        let next = claim("a");
        let joined = ours.join(&next, Mode::Wait).await;
        assert!(joined.is_err(), "two clients hold the lock: {joined:?}");
        ours.leave(&next, None).await.unwrap();
    });
}

// R36
/// A write is refused because memory is full, its old value is lost, and its caller is dropped
/// before it knows.
#[test]
fn refused_write_invalidates_the_epoch_even_if_its_caller_is_dropped() {
    // With one thread, the write is not done before the caller's poll returns.
    run_on(&mut tokio::runtime::Builder::new_current_thread(), async {
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

/// After an outage that ended the session, no cleanup is needed, because all clients see that its
/// claims are dead.
#[test]
fn session_lost_in_an_outage_needs_no_cleanup() {
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
        assert!(after < MANY / 2, "{after} round trips for {MANY} dead claims");
    });
}

/// If queues expire, so does a queue with only dead claims.
#[test]
fn queue_of_a_dead_client_expires() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let dead = store(&cells, open_at_once());
        held(dead.join(&claim("once"), Mode::Try).await.unwrap());
        drop(dead);
        let get = vec![Request::Get { key: key("once") }];
        let Answer::Found(found) = cells.run(get).await.unwrap().remove(0) else { panic!("gone") };
        let left = found.remaining.expect("the queue never expires");
        let day = Duration::from_secs(86_400);
        assert!(left > day * 2 && left <= day * 7, "{left:?}");
    });
}

/// Two clients share one store. Closing one of them does not end the other's holds.
#[test]
fn disconnect_does_not_affect_other_clients_of_the_store() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let [shared, other] = [store(&cells, open_at_once()), store(&cells, open_at_once())];
        let holds = claim("a");
        held(shared.join(&holds, Mode::Try).await.unwrap());
        shared.disconnect().await;
        let tried = other.join(&claim("a"), Mode::Try).await.unwrap();
        assert!(matches!(tried, Joined::Busy { .. }), "{tried:?}");
        assert!(shared.leave(&holds, None).await.unwrap());
        // The last hold was released, so this ends the session.
        shared.disconnect().await;
        let next = claim("a");
        held(other.join(&next, Mode::Try).await.unwrap());
    });
}

// R36
/// The eviction of one lock by the server cannot be detected. The guarantees are that the first
/// holder finds out, and that tokens rise.
#[test]
fn lock_deleted_by_the_server_is_reported_lost_and_tokens_rise() {
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let [ours, other] = [client(&cells, open_at_once()), client(&cells, open_at_once())];
        let guard = ours.mutex("a").lease(Duration::from_secs(1)).lock().await.unwrap();
        cells.evict(&key("a"));
        let next = other.mutex("a").try_lock().await.unwrap();
        assert!(next.token() > guard.token());
        tokio::time::timeout(Duration::from_secs(5), guard.lost())
            .await
            .expect("the holder does not find out that its lock is lost");
        assert!(next.is_held());
        // Now the session is evicted. All its holds are lost, and the next hold belongs to another
        // session.
        let sessions = cells.keys("leasehold:s:").await.unwrap();
        sessions.iter().for_each(|key| cells.evict(key));
        tokio::time::timeout(Duration::from_secs(20), next.lost())
            .await
            .expect("the holder does not find out that its lock is lost");
        let third = ours.mutex("a").lock_timeout(Duration::from_secs(20)).await.unwrap();
        assert!(third.token() > next.token());
    });
}

/// A crashed client is not observed until its session has expired. One read is enough to find out.
#[test]
fn single_try_detects_an_expired_session() {
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

/// A client that reads from a server that lags behind does not find the session, and grants nothing
/// because of that.
#[test]
fn session_missing_from_a_stale_read_keeps_its_lock() {
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
        // A dead session with a marker is not renewed any more, however late a renewal arrives.
        cells.evict(&session);
        let next = other.mutex("a").try_lock().await.unwrap();
        assert!(cells.value(&session).is_some_and(|value| value.ends_with(b"gone")));
        tokio::time::timeout(Duration::from_secs(20), guard.lost())
            .await
            .expect("the holder does not find out that its lock is lost");
        assert!(next.is_held());
    });
}

// S14
/// If a renewal is a write, the one after a lost reply is refused, and the session continues.
#[test]
fn session_survives_lost_renewal_replies() {
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

/// A session ends for its client before its cell expires, and is not renewed any more.
#[test]
fn session_expired_for_its_client_is_never_renewed() {
    run(async {
        let cells = Arc::new(MemoryCells::like_a_stream());
        let session = Duration::from_secs(1);
        let locks = client(&cells, Options { session, ..open_at_once() });
        let guard = locks.mutex("a").lock().await.unwrap();
        cells.set_away(true);
        tokio::time::timeout(Duration::from_secs(20), guard.lost())
            .await
            .expect("the holder's lease does not expire");
        // The session is guaranteed for 1.2 s, and its cell exists for 1.7 s.
        tokio::time::sleep(Duration::from_millis(300)).await;
        cells.set_away(false);
        let before = cells.keys("leasehold:s:").await.unwrap();
        let next = locks.mutex("b").lock().await.unwrap();
        let after = cells.keys("leasehold:s:").await.unwrap();
        assert!(after.iter().any(|session| !before.contains(session)), "{before:?}, {after:?}");
        assert!(next.is_held());
    });
}

// R10
/// Waiters poll once per minute here, so the test fails if they are not notified.
#[test]
fn granted_waiter_is_notified_immediately() {
    run(async {
        let cells = Arc::new(MemoryCells::like_a_stream());
        let options = || Options { poll: Duration::from_secs(60), ..open_at_once() };
        let [ours, other] = [client(&cells, options()), client(&cells, options())];
        let mut guard = ours.mutex("a").lock().await.unwrap();
        for locks in [&other, &ours] {
            let lock = locks.mutex("a");
            let waiting = tokio::spawn(async move { lock.lock().await });
            // The first polls are over, and the next one is far away.
            tokio::time::sleep(Duration::from_secs(4)).await;
            let began = Instant::now();
            guard.release().await.unwrap();
            guard = waiting.await.unwrap().unwrap();
            assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
        }
    });
}

// R10
/// Each of 32 clients acquires the lock repeatedly. All of them make progress, about equally often. The number of
/// acquisitions is fixed, because a slow machine would finish too few of them in a fixed time to compare clients.
#[test]
fn many_clients_all_make_progress() {
    const FIRST_RUSH: u64 = 64;
    const MEASURED: u64 = 32 * 20;
    run(async {
        let cells = Arc::new(MemoryCells::default());
        let (inside, total) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let ready = Arc::new(tokio::sync::Barrier::new(32));
        let tasks: Vec<_> = (0..32)
            .map(|_| {
                let (locks, inside, total) =
                    (client(&cells, open_at_once()), inside.clone(), total.clone());
                let ready = ready.clone();
                tokio::spawn(async move {
                    let mut turns = 0_u32;
                    ready.wait().await;
                    while total.load(SeqCst) < FIRST_RUSH + MEASURED {
                        let guard = locks.mutex("crowd").lock().await.unwrap();
                        assert_eq!(inside.fetch_add(1, SeqCst), 0, "two clients hold the lock");
                        let turn = total.fetch_add(1, SeqCst);
                        turns += u32::from((FIRST_RUSH..FIRST_RUSH + MEASURED).contains(&turn));
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
        println!("Jain {jain:.3}: {turns:?}");
        // On an idle machine, the index is above 0.97. On a busy one, a client that gets no processor
        // time makes fewer acquisitions.
        let least = turns.iter().copied().fold(f64::INFINITY, f64::min);
        assert!(jain >= 0.8 && least >= sum / 32.0 / 5.0, "Jain {jain:.3}: {turns:?}");
    });
}
