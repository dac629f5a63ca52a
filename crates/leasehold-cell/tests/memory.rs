//! The suite that every store passes, on cells in memory.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use leasehold_cell::memory::MemoryCells;
use leasehold_cell::{Answer, CellStore, Cells, Options, Request, promises};
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
        assert!(format!("{error:#}").contains("upgrade this one"), "{error}");
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
        assert!(format!("{error:#}").contains("upgrade this one"), "{error}");
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
        assert!(format!("{error:#}").contains("Nobody is let in"), "{error}");
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
