use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::SystemTime;

use super::*;
use leasehold_core::{Kind, Token};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn open(root: &Path) -> Arc<FileStore> {
    FileStore::open(&format!("file:{}", root.display()), &Handle::current()).unwrap()
}

fn open_in_boot(root: &Path, boot: &str, wall: fn() -> u64) -> FileStore {
    let url = format!("file:{}", root.display());
    FileStore::open_with(&url, &Handle::current(), boot.into(), wall).unwrap()
}

fn claim(name: &str) -> Claim {
    Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap()
}

async fn take(store: &FileStore, claim: &Claim) -> Token {
    match store.join(claim, Mode::Try).await.unwrap() {
        Joined::Holding { token, .. } => token,
        other => panic!("expected a hold, got {other:?}"),
    }
}

async fn news(store: &FileStore, claim: &Claim) -> Signal {
    let changed = tokio::time::timeout(Duration::from_secs(20), store.changed(claim));
    changed.await.expect("this waiter was not woken").unwrap()
}

async fn pair(store: &FileStore, name: &str) -> u64 {
    let c = claim(name);
    let token = take(store, &c).await;
    store.leave(&c, None).await.unwrap();
    token.get()
}

// S61
/// P3 for this store: whatever is lost, the next token is greater.
#[test]
fn tokens_increase_despite_crashes_deleted_files_and_reboots() {
    static WALL: AtomicU64 = AtomicU64::new(0);
    let wall: fn() -> u64 = || WALL.load(Ordering::SeqCst);
    let now = |t: u64| WALL.store(t, Ordering::SeqCst);
    let tmp = tempfile::tempdir().unwrap();
    let root = tmp.path();
    let control = root.join("locks/x.lock");
    let runtime = runtime();
    let _context = runtime.enter();
    runtime.block_on(async {
        let mut last = 0;
        let mut rises = |token: u64, after: &str| {
            assert!(token > last, "token {token} after {last}, after {after}");
            last = token;
        };
        now(1_000_000_000);
        {
            let store = open_in_boot(root, "one", wall);
            rises(pair(&store, "x").await, "the beginning");
            now(1);
            rises(pair(&store, "x").await, "the clock set back");
            now(9_000_000_000);
            rises(pair(&store, "x").await, "the clock set forward");
            now(2);
            rises(pair(&store, "x").await, "the clock set back");
        }
        assert!(!control.exists(), "an idle control file was left behind");
        {
            let store = open_in_boot(root, "one", wall);
            rises(pair(&store, "x").await, "a deleted control file");
            let held = claim("x");
            rises(take(&store, &held).await.get(), "nothing");
            let old = fs::read(&control).unwrap();
            store.leave(&held, None).await.unwrap();
            now(20_000_000_000);
            rises(pair(&store, "x").await, "a minute later");
            now(3);
            drop(store);
            // The machine goes down. Of the files that were not synced, some are older and some are
            // gone.
            fs::write(&control, old).unwrap();
        }
        {
            let store = open_in_boot(root, "two", wall);
            rises(pair(&store, "x").await, "a reboot with an old control file");
            rises(pair(&store, "x").await, "nothing");
        }
        let _ = fs::remove_file(&control);
        fs::write(root.join("tokens.boot"), "").unwrap();
        {
            let store = open_in_boot(root, "three", wall);
            rises(pair(&store, "x").await, "a reboot with everything lost but the ceiling");
            // The client is killed in the same boot, so its files were not removed.
            std::mem::forget(store);
        }
        let store = open_in_boot(root, "three", wall);
        rises(pair(&store, "x").await, "a crash");
        let durable = fs::read_to_string(root.join("tokens")).unwrap();
        let ceiling: serde_json::Value = serde_json::from_str(&durable).unwrap();
        assert!(
            ceiling["ceiling"].as_u64().unwrap() >= last,
            "a token above the ceiling was returned"
        );
    });
}

#[test]
fn token_exceeds_the_seen_one_and_stays_below_the_ceiling() {
    let tmp = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let _context = runtime.enter();
    let store = open(tmp.path());
    let seen = wall_micros() + 3_600_000_000;
    let mut c = claim("x");
    c.seen = seen;
    let token = runtime.block_on(take(&store, &c)).get();
    assert!(token > seen && token <= store.controls.tokens.ceiling());
}

// S62
/// Every open file leaves the cache immediately, so every acquisition and release creates and
/// unlinks the file. Lists unlink it, too. So the file is often unlinked between opening and
/// locking (scenario 62).
#[test]
fn racing_clients_have_one_holder_while_the_file_is_unlinked() {
    let tmp = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let _context = runtime.enter();
    let inside: Arc<[AtomicU32; 2]> = Arc::default();
    let stop = Arc::new(AtomicBool::new(false));
    let unlinker = {
        let (store, stop) = (open_in_boot(tmp.path(), "one", wall_micros), stop.clone());
        runtime.spawn(async move {
            let mut seen = 0;
            while !stop.load(Ordering::Relaxed) {
                seen += store.list("").await.unwrap().len();
                tokio::task::yield_now().await;
            }
            seen
        })
    };
    let racers: Vec<_> = (0..8)
        .map(|_| {
            let mut store = open_in_boot(tmp.path(), "one", wall_micros);
            Arc::get_mut(&mut store.controls).unwrap().keep_open(1);
            let inside = inside.clone();
            runtime.spawn(async move {
                for i in 0..300 {
                    let which = i % 2;
                    let c = claim(["x", "y"][which]);
                    loop {
                        match store.join(&c, Mode::Wait).await.unwrap() {
                            Joined::Holding { .. } => break,
                            _ => news(&store, &c).await,
                        };
                    }
                    assert_eq!(
                        inside[which].fetch_add(1, Ordering::SeqCst),
                        0,
                        "two clients hold the lock"
                    );
                    tokio::task::yield_now().await;
                    inside[which].fetch_sub(1, Ordering::SeqCst);
                    store.leave(&c, None).await.unwrap();
                }
            })
        })
        .collect();
    runtime.block_on(async {
        for racer in racers {
            tokio::time::timeout(Duration::from_secs(60), racer).await.unwrap().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        unlinker.await.unwrap();
    });
    let left = fs::read_dir(tmp.path().join("locks")).unwrap().count();
    assert!(left <= 2, "{left}");
}

#[test]
fn names_used_once_leave_no_files_behind() {
    let tmp = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let _context = runtime.enter();
    let mut store = open_in_boot(tmp.path(), "one", wall_micros);
    Arc::get_mut(&mut store.controls).unwrap().keep_open(10);
    runtime.block_on(async {
        for i in 0..100 {
            pair(&store, &format!("{}/{i}", "long".repeat(60))).await;
        }
        let held = claim("held");
        take(&store, &held).await;
        for i in 0..20 {
            pair(&store, &i.to_string()).await;
        }
        assert!(fs::read_dir(tmp.path().join("locks")).unwrap().count() <= 11);
        assert!(
            tmp.path().join("locks/held.lock").exists(),
            "the file of a lock in use was deleted"
        );
        store.leave(&held, None).await.unwrap();
    });
    drop(store);
    assert_eq!(fs::read_dir(tmp.path().join("locks")).unwrap().count(), 0);
}

// S04
#[test]
fn a_waiter_that_gives_up_leaves_no_watch_behind() {
    let tmp = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let _context = runtime.enter();
    let (holder, store) = (open(tmp.path()), open(tmp.path()));
    runtime.block_on(async {
        let held = claim("x");
        take(&holder, &held).await;
        let waiters = [claim("x"), claim("x")];
        for c in &waiters {
            assert!(matches!(store.join(c, Mode::Wait).await.unwrap(), Joined::Waiting(_)));
        }
        // The second waiter waits for the first one, which belongs to the same client.
        assert_eq!(store.waiters.counts(), (2, 1));
        let first = &waiters[0];
        let early = tokio::time::timeout(Duration::from_millis(1), store.changed(first)).await;
        assert!(early.is_err(), "the waiter was woken without a cause");
        store.leave(first, None).await.unwrap();
        // Its successor must now watch the holder, and is notified to poll.
        assert_eq!(news(&store, &waiters[1]).await, Signal::Ask);
        assert!(matches!(store.join(&waiters[1], Mode::Wait).await.unwrap(), Joined::Waiting(_)));
        assert_eq!(store.waiters.counts(), (1, 1));
        holder.leave(&held, None).await.unwrap();
        assert!(matches!(news(&store, &waiters[1]).await, Signal::Granted(_)));
        store.leave(&waiters[1], None).await.unwrap();
        assert_eq!(store.waiters.counts(), (0, 0));
    });
}

#[test]
fn notification_before_changed_is_called_is_kept() {
    let tmp = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let _context = runtime.enter();
    let (holder, store) = (open(tmp.path()), open(tmp.path()));
    runtime.block_on(async {
        let (held, waiter) = (claim("x"), claim("x"));
        take(&holder, &held).await;
        store.join(&waiter, Mode::Wait).await.unwrap();
        holder.leave(&held, None).await.unwrap();
        // A dropped call removes no notification.
        drop(store.changed(&waiter));
        assert!(matches!(news(&store, &waiter).await, Signal::Granted(_)));
        assert!(matches!(news(&store, &waiter).await, Signal::Granted(_)));
        assert_eq!(
            news(&store, &claim("x")).await,
            Signal::Ask,
            "a claim that does not wait must be notified to poll"
        );
    });
}

#[test]
fn waiter_is_notified_despite_invalid_inbox_lines() {
    use std::io::Write;
    let tmp = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let _context = runtime.enter();
    let (holder, store) = (open(tmp.path()), open(tmp.path()));
    runtime.block_on(async {
        let (held, waiter) = (claim("x"), claim("x"));
        take(&holder, &held).await;
        store.join(&waiter, Mode::Wait).await.unwrap();
        let inbox = tmp.path().join("clients").join(store.session.id());
        let mut inbox = fs::OpenOptions::new().write(true).open(inbox).unwrap();
        for rubbish in ["\n\0\n", "ask\n", "granted 7 7\n", &"x".repeat(9_000), "\n"] {
            inbox.write_all(rubbish.as_bytes()).unwrap();
        }
        holder.leave(&held, None).await.unwrap();
        assert!(matches!(news(&store, &waiter).await, Signal::Granted(_)));
    });
}

#[test]
fn clients_agree_on_queues_longer_than_a_page() {
    let tmp = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let _context = runtime.enter();
    let (one, other) = (open(tmp.path()), open(tmp.path()));
    let control = tmp.path().join("locks/x.lock");
    runtime.block_on(async {
        let claims: Vec<Claim> = (0..100).map(|_| claim("x")).collect();
        let count = async |store: &FileStore| {
            let info = store.read(&claims[0].name).await.unwrap();
            info.map_or(0, |i| i.claims.len())
        };
        // Two clients in turn make the queue longer and shorter than a page.
        for (i, c) in claims.iter().enumerate() {
            let by = if i % 2 == 0 { &one } else { &other };
            by.join(c, Mode::Wait).await.unwrap();
            assert_eq!((count(&one).await, count(&other).await), (i + 1, i + 1));
        }
        for (i, c) in claims.iter().enumerate() {
            let by = if i % 3 == 0 { &one } else { &other };
            by.leave(c, None).await.unwrap();
            assert_eq!(count(&other).await, claims.len() - i - 1);
        }
        assert!(!control.exists() || fs::metadata(&control).unwrap().len() < 200_000);
    });
}

#[test]
fn crash_between_the_writes_of_a_long_queue_is_harmless() {
    let tmp = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let _context = runtime.enter();
    let store = open(tmp.path());
    runtime.block_on(async {
        let held = claim("x");
        take(&store, &held).await;
        let path = tmp.path().join("locks/x.lock");
        // The long text is written, but not the first page. There are zeros between them.
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"{\"leasehold\":1", 4096).unwrap();
        let info = open(tmp.path()).read(&held.name).await.unwrap().unwrap();
        assert_eq!(info.claims.len(), 1);
        store.leave(&held, None).await.unwrap();
        pair(&store, "x").await;
        // The same happens in a file that was never written before.
        fs::write(&path, [0; 5_000]).unwrap();
        pair(&store, "x").await;
    });
}

#[test]
fn damaged_control_file_is_reported_except_after_a_power_failure() {
    let tmp = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let _context = runtime.enter();
    let store = open(tmp.path());
    let path = tmp.path().join("locks/x.lock");
    runtime.block_on(async {
        for damage in [
            "rubbish",
            "{\"leasehold\":1}",
            "{\"leasehold\":1,\"long\":{\"at\":18446744073709551615,\"len\":18446744073709551615,\
             \"change\":\"00000000000000000000000000000000\"}}",
        ] {
            fs::write(&path, damage).unwrap();
            let error = store.join(&claim("x"), Mode::Try).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{damage}");
            let shown = error.to_string();
            let hint = if damage == "rubbish" { "move it away" } else { "leasehold evict \"x\"" };
            assert!(shown.contains("x.lock") && shown.contains(hint), "{shown}");
        }
        // A power failure left a partially written file, so all claims in it are dead.
        fs::write(&path, "{\"leasehold\":1,\"queue\":{\"ki").unwrap();
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1)).unwrap();
        pair(&store, "x").await;
        fs::write(&path, "").unwrap();
        pair(&store, "x").await;
    });
}

#[test]
fn control_file_locked_by_another_program_is_reported() {
    let tmp = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let _context = runtime.enter();
    let store = open(tmp.path());
    runtime.block_on(async {
        let held = claim("x");
        take(&store, &held).await;
        let foreign = Arc::new(fs::File::open(tmp.path().join("locks/x.lock")).unwrap());
        let lock = held::Held::try_take(&foreign).unwrap().unwrap();
        let started = Instant::now();
        let error = store.join(&claim("x"), Mode::Try).await.unwrap_err();
        assert!(started.elapsed() >= PATIENCE);
        assert!(error.kind() == ErrorKind::Unreachable && error.is_retryable(), "{error}");
        assert!(error.to_string().contains("x.lock"), "{error}");
        drop(lock);
        store.leave(&held, None).await.unwrap();
        pair(&store, "x").await;
    });
}

#[test]
fn client_whose_files_were_deleted_stops_acquiring() {
    let tmp = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let _context = runtime.enter();
    let store = open(tmp.path());
    runtime.block_on(async {
        let held = claim("x");
        take(&store, &held).await;
        fs::remove_dir_all(tmp.path()).unwrap();
        let renew = [Renew { claim: held.clone(), lease: held.lease }];
        assert!(matches!(store.renew(&renew).await.unwrap()[..], [Renewal::Lost]));
        store.leave(&held, None).await.unwrap();
        let error = store.join(&claim("y"), Mode::Try).await.unwrap_err();
        assert!(error.to_string().contains("connect again"), "{error}");
        // A new connection starts a new session.
        pair(&open(tmp.path()), "y").await;
    });
}

#[test]
fn many_renewals_are_answered_in_order() {
    let tmp = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let _context = runtime.enter();
    let (store, other) = (open(tmp.path()), open(tmp.path()));
    runtime.block_on(async {
        let (held, waits, gone, elsewhere) = (claim("x"), claim("x"), claim("x"), claim("y"));
        let token = take(&store, &held).await;
        store.join(&waits, Mode::Wait).await.unwrap();
        take(&other, &elsewhere).await;
        let ask = |c: &Claim| Renew { claim: c.clone(), lease: c.lease };
        let asked = [ask(&gone), ask(&waits), ask(&elsewhere), ask(&held)];
        let answers = store.renew(&asked).await.unwrap();
        let [Renewal::Lost, Renewal::Waiting(place), Renewal::Holding { .. }, last] = &answers[..]
        else {
            panic!("{answers:?}")
        };
        assert_eq!(place.ahead, 1);
        assert!(matches!(last, Renewal::Holding { token: t, remaining: None } if *t == token));
        // A heartbeat finds dead claims even if no watch reported them.
        store.leave(&held, None).await.unwrap();
        drop(other);
        let late = claim("y");
        take(&store, &late).await;
    });
}

/// Compares `must_watch_anew` with its definition, on every small queue that one departure can
/// produce.
#[test]
fn waiters_whose_blockers_changed_are_notified() {
    use leasehold_core::queue::StoreTime;
    let at = StoreTime { now: 1, stamp: 1 };
    let weights = [1_u32, 2, 3];
    for code in 0..3_usize.pow(5) {
        let kind = Kind::Semaphore;
        let mut queue = Queue::new(kind, 3, false);
        let claims: Vec<Claim> = (0..5_u32)
            .map(|i| {
                let weight = weights[code / 3_usize.pow(i) % 3];
                Claim::new(Name::new("x").unwrap(), kind, weight, 3).unwrap()
            })
            .collect();
        for (i, c) in claims.iter().enumerate() {
            queue.join(c, Mode::Wait, at, &format!("session {i}")).unwrap();
        }
        for gone in &claims {
            let mut queue = queue.clone();
            let had = watched(&queue);
            let before: Vec<_> = claim_states(&queue).collect();
            queue.leave(gone.id, None, 1);
            let granted = !queue.take_fresh_grants().is_empty();
            let asked: HashSet<ClaimId> =
                must_watch_anew(&before, &queue, granted).map(|e| e.id).collect();
            for (id, now) in watched(&queue) {
                let had = &had[&id];
                assert!(
                    asked.contains(&id) || now.is_subset(had),
                    "code {code}: a waiter was not notified"
                );
                assert!(
                    !asked.contains(&id) || now != *had,
                    "code {code}: a waiter was notified without a cause"
                );
            }
        }
    }
}

/// Returns the watched sessions by definition. The first claim that does not fit watches all
/// holders, and each other waiter its predecessor.
fn watched(queue: &Queue) -> HashMap<ClaimId, HashSet<String>> {
    let entries: Vec<&Entry> = queue.entries().collect();
    let first = entries.iter().position(|e| e.state == ClaimState::Waiting);
    let waiting = entries.iter().enumerate().filter(|(_, e)| e.state == ClaimState::Waiting);
    let sessions = |e: &[&Entry]| e.iter().map(|e| e.session.clone()).collect();
    waiting
        .map(|(i, e)| {
            let from = if first == Some(i) { 0 } else { i - 1 };
            (e.id, sessions(&entries[from..i]))
        })
        .collect()
}

// F01
/// An operator may use any directory as a store, such as that of a project.
#[test]
fn foreign_files_are_never_touched() {
    let tmp = tempfile::tempdir().unwrap();
    let root = tmp.path();
    let random = ClaimId::random().unwrap().to_hex();
    let theirs = [
        "notes.txt~".to_owned(),
        "tokens~".to_owned(),
        format!("report.{random}~"),
        format!("clients/{random}~"),
        // The files are empty like those of flock(1), and one has other content.
        "locks/backup.lock".to_owned(),
        "locks/other.lock".to_owned(),
        "locks/notes~".to_owned(),
    ];
    let socket = root.join("clients").join(ClaimId::random().unwrap().to_hex());
    let ours = [
        format!("tokens.{random}~"),
        format!("clients/{random}.new~"),
        format!("locks/x.lock.{random}~"),
    ];
    for dir in ["locks", "clients"] {
        fs::create_dir(root.join(dir)).unwrap();
    }
    for path in theirs.iter().chain(&ours) {
        fs::write(root.join(path), "").unwrap();
    }
    fs::write(root.join("locks/other.lock"), "another program's").unwrap();
    // A socket without a listener gives the same error as a FIFO without a reader.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let runtime = runtime();
    let _context = runtime.enter();
    // The files are old according to the clock of a later client.
    let store = open_in_boot(root, "one", || wall_micros() + 3_600_000_000);
    runtime.block_on(async {
        store.list("").await.unwrap();
        let name = Name::new("backup").unwrap();
        assert!(store.read(&name).await.unwrap().is_none());
        let other = Name::new("other").unwrap();
        assert!(store.evict(&other, Evict::Holders).await.is_err());
        assert!(store.join(&claim("other"), Mode::Try).await.is_err());
    });
    drop(store);
    for path in &ours {
        assert!(!root.join(path).exists(), "{path} was not deleted");
    }
    for path in &theirs {
        assert!(root.join(path).exists(), "{path} was deleted");
    }
    assert_eq!(fs::read_to_string(root.join("locks/other.lock")).unwrap(), "another program's");
    assert!(fs::symlink_metadata(&socket).is_ok(), "a socket was deleted");
}

// F06
#[test]
fn damaged_control_file_affects_one_lock_and_can_be_fixed() {
    let tmp = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let _context = runtime.enter();
    let (store, other) = (open(tmp.path()), open(tmp.path()));
    let path = tmp.path().join("locks/x.lock");
    runtime.block_on(async {
        let (held, fine) = (claim("x"), claim("y"));
        let token = take(&store, &held).await;
        take(&store, &fine).await;
        // This is the state after a write that could be neither finished nor undone.
        let mut text = fs::read(&path).unwrap();
        let half = text.len() / 2;
        text[half..].fill(b'\n');
        fs::write(&path, &text).unwrap();

        let listed = other.list("").await.unwrap();
        let listed_claims: Vec<_> =
            listed.iter().map(|l| (l.name.as_str(), l.claims.len())).collect();
        assert_eq!(listed_claims, [("x", 0), ("y", 1)]);
        assert!(listed[0].unreadable.as_ref().unwrap().contains("x.lock"), "{listed:?}");
        assert_eq!(listed[1].unreadable, None);
        let error = other.join(&claim("x"), Mode::Try).await.unwrap_err();
        assert!(error.to_string().contains("leasehold evict \"x\""), "{error}");
        // A single hold cannot be found in a damaged file.
        let one = other.evict(&held.name, Evict::Token(token)).await.unwrap_err();
        assert_eq!(one.kind(), ErrorKind::Corrupt, "{one}");

        assert_eq!(other.evict(&held.name, Evict::Holders).await.unwrap(), 1);
        let next = claim("x");
        assert!(take(&other, &next).await > token, "the next token is not higher");
        let renew = [Renew { claim: held.clone(), lease: held.lease }];
        assert!(matches!(store.renew(&renew).await.unwrap()[..], [Renewal::Lost]));
        assert_eq!(store.list("").await.unwrap().len(), 2);
        assert_eq!(store.list("").await.unwrap()[0].unreadable, None);
    });
}

/// A control file in the format of version 0.1, which every later version must read.
const FORMAT_1: &str = r#"{"leasehold":1,"queue":{"kind":"semaphore","capacity":2,"leases":false,"last":1800000000000003,"entries":[{"id":"00000000000000000000000000000001","token":1800000000000001,"weight":1,"standing":"holding","since":1800000000000001,"holder":{"host":"h","pid":7,"label":"nightly"},"session":"0123456789abcdef0123456789abcdef"},{"id":"00000000000000000000000000000002","token":1800000000000002,"weight":1,"standing":"departed","since":1800000000000001,"expires":99000000000000000,"holder":{"host":"h","pid":8},"session":"0123456789abcdef0123456789abcdef"},{"id":"00000000000000000000000000000003","token":1800000000000003,"weight":2,"standing":"waiting","since":1800000000000002,"lock_delay":5,"holder":{"host":"h","pid":9},"session":"0123456789abcdef0123456789abcdef"}]}}"#;

// F44
#[test]
fn file_formats_are_unchanged() {
    let tmp = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let _context = runtime.enter();
    let store = open(tmp.path());
    let (name, path) = (Name::new("x").unwrap(), tmp.path().join("locks/x.lock"));
    fs::write(&path, format!("{FORMAT_1}\n")).unwrap();
    // The waiters and the holder in the file are dead and are removed. The entry in cooldown stays.
    let whole = store.controls.enter(&name, false, |queue| {
        queue.raise_last_token(1_800_000_000_000_004);
        Some(queue.entries().len())
    });
    assert!(matches!(whole, Ok(AttemptResult::Done(Some(3)))), "{whole:?}");
    let written = fs::read_to_string(&path).unwrap();
    let expected = FORMAT_1.replace(r#""last":1800000000000003"#, r#""last":1800000000000004"#);
    assert_eq!(written.trim_end(), expected);
    let info = runtime.block_on(store.read(&name)).unwrap().unwrap();
    assert_eq!((info.kind, info.capacity, info.claims.len()), (Kind::Semaphore, 2, 1));
    // These are the other two files, with fields that a later version may add.
    let root = tmp.path().join("old");
    fs::create_dir(&root).unwrap();
    let ceiling = wall_micros() + 86_400_000_000;
    fs::write(root.join("tokens"), format!("{{\"ceiling\":{ceiling},\"new\":[1]}}\n")).unwrap();
    let of_boot = r#"{"boot":"one","base":5,"high":6,"ceiling":7,"new":{"a":1}}"#;
    fs::write(root.join("tokens.boot"), of_boot).unwrap();
    let mut c = claim("x");
    c.seen = ceiling + 86_400_000_000;
    let old = open_in_boot(&root, "one", wall_micros);
    assert!(runtime.block_on(take(&old, &c)).get() > c.seen);
    let read = |file: &str| -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(root.join(file)).unwrap()).unwrap()
    };
    assert_eq!(read("tokens")["new"][0], 1);
    assert_eq!(
        (read("tokens.boot")["base"].as_u64(), &read("tokens.boot")["new"]["a"]),
        (Some(5), &serde_json::json!(1))
    );
}

// F44
/// Programs are upgraded one after the other. Older versions must not break files of newer ones,
/// and must not advise the user to work around them.
#[test]
fn files_of_a_newer_version_are_left_alone() {
    let tmp = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let _context = runtime.enter();
    let store = open(tmp.path());
    let (name, path) = (Name::new("x").unwrap(), tmp.path().join("locks/x.lock"));
    let harmless = |error: &Error| {
        let line = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{line}");
        assert!(line.contains("upgrade this leasehold"), "{line}");
        for harm in ["delete", "remove", "another", "--force"] {
            assert!(!line.contains(harm), "{line}");
        }
    };
    let later = [
        "{\"leasehold\":2,\"queue\":null}".to_owned(),
        "{\"leasehold\":10,\"places\":[1,2]}".to_owned(),
        FORMAT_1.replace("\"leases\":false", "\"leases\":false,\"paused\":true"),
        FORMAT_1.replace("\"weight\":2", "\"weight\":2,\"rank\":9"),
        FORMAT_1.replace("\"waiting\"", "\"resting\""),
    ];
    runtime.block_on(async {
        for text in &later {
            fs::write(&path, text).unwrap();
            harmless(&store.join(&claim("x"), Mode::Try).await.unwrap_err());
            harmless(&store.read(&name).await.unwrap_err());
            harmless(&store.evict(&name, Evict::Holders).await.unwrap_err());
            let listed = store.list("").await.unwrap();
            assert!(listed[0].unreadable.as_ref().unwrap().contains("upgrade"), "{listed:?}");
            assert_eq!(fs::read_to_string(&path).unwrap(), *text);
            // It is not taken for a file that a power failure damaged, either.
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1)).unwrap();
            harmless(&store.join(&claim("x"), Mode::Try).await.unwrap_err());
        }
        // The whole store has a later format.
        let root = tmp.path().join("later");
        fs::create_dir(&root).unwrap();
        let text = "{\"leasehold\":2,\"ceiling\":5}";
        fs::write(root.join("tokens"), text).unwrap();
        let url = format!("file:{}", root.display());
        harmless(&FileStore::open(&url, &Handle::current()).unwrap_err());
        assert_eq!(fs::read_to_string(root.join("tokens")).unwrap(), text);
        assert_eq!(fs::read_dir(&root).unwrap().count(), 1);
    });
}
