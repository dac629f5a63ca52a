//! SQLite: other writers in the way, other people's files, and files that were restored.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold::store::{Durability, Wakeup};
use leasehold::{ErrorKind, Leasehold};
use sqlx::Connection;

const PATIENCE: Duration = Duration::from_secs(60);

fn url(file: &Path) -> String {
    format!("sqlite:{}", file.display())
}

async fn connect(file: &Path) -> Leasehold {
    leasehold::connect(url(file)).await.unwrap_or_else(|error| panic!("{error}"))
}

fn run(case: impl Future<Output = ()>) {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(3).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        tokio::time::timeout(PATIENCE * 2, case).await.expect("the case hangs");
    });
}

#[test]
fn s60_other_writers_are_waited_for() {
    run(async {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("locks.db");
        let clients = [connect(&file).await, connect(&file).await, connect(&file).await];
        // Somebody else of the same database, who writes for as long as it takes.
        let other = tokio::spawn({
            let path = file.display().to_string();
            async move {
                let mut theirs = sqlx::SqliteConnection::connect(&path).await.unwrap();
                let sql = "PRAGMA busy_timeout = 60000; CREATE TABLE theirs (n INT)";
                sqlx::raw_sql(sql).execute(&mut theirs).await.unwrap();
                // The last for longer than what is tried again could take, and for less than
                // SQLite waits.
                for millis in [200, 200, 200, 3_000] {
                    let sql = "BEGIN IMMEDIATE; INSERT INTO theirs VALUES (1)";
                    sqlx::raw_sql(sql).execute(&mut theirs).await.unwrap();
                    tokio::time::sleep(Duration::from_millis(millis)).await;
                    sqlx::raw_sql("COMMIT").execute(&mut theirs).await.unwrap();
                }
            }
        });
        let last = Arc::new(AtomicU64::new(0));
        let mut running = tokio::task::JoinSet::new();
        for client in &clients {
            for _ in 0..4 {
                let (mutex, last) = (client.mutex("busy"), last.clone());
                running.spawn(async move {
                    for _ in 0..10 {
                        let guard = mutex.lock().await.unwrap_or_else(|e| panic!("{e}"));
                        let token = guard.token().get();
                        assert!(last.swap(token, Ordering::SeqCst) < token);
                        guard.release().await.unwrap_or_else(|e| panic!("{e}"));
                    }
                });
            }
        }
        while let Some(done) = running.join_next().await {
            done.unwrap();
        }
        other.await.unwrap();
    });
}

#[test]
fn s61_tokens_rise_after_an_old_copy_is_restored() {
    run(async {
        let directory = tempfile::tempdir().unwrap();
        let (file, copy) = (directory.path().join("locks.db"), directory.path().join("copy.db"));
        let locks = connect(&file).await;
        locks.mutex("backed up").lock().await.unwrap().release().await.unwrap();
        locks.close().await.unwrap();
        std::fs::copy(&file, &copy).unwrap();
        let locks = connect(&file).await;
        let guards = [locks.mutex("backed up"), locks.mutex("new")].map(|m| async move {
            let guard = m.lock().await.unwrap();
            let token = guard.token();
            guard.release().await.unwrap();
            token
        });
        let [first, second] = guards;
        let lost = first.await.max(second.await);
        locks.close().await.unwrap();
        std::fs::rename(&copy, &file).unwrap();
        let locks = connect(&file).await;
        assert!(locks.mutex("backed up").lock().await.unwrap().token() > lost);
        assert!(locks.mutex("new").lock().await.unwrap().token() > lost);
    });
}

/// Whoever copies or moves the file after that has all of it, and nobody is still at it.
#[test]
fn a_client_that_is_closed_has_left_the_file() {
    run(async {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("locks.db");
        let there = || {
            let files = std::fs::read_dir(directory.path()).unwrap();
            files.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
        };
        let locks = connect(&file).await;
        let again = locks.clone();
        let mut running = tokio::task::JoinSet::new();
        for n in 0..20 {
            let mutex = locks.mutex(format!("{}", n % 3));
            running.spawn(async move { mutex.lock().await?.release().await });
        }
        while let Some(done) = running.join_next().await {
            done.unwrap().unwrap();
        }
        assert!(there().len() > 1, "a log beside it: {:?}", there());
        let begun = Instant::now();
        locks.close().await.unwrap();
        // So long a goodbye is waited for, and no longer.
        while begun.elapsed() >= Duration::from_secs(2) && there().len() > 1 {
            assert!(begun.elapsed() < PATIENCE, "it is still there: {:?}", there());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(there(), [file]);
        // People can still look.
        assert!(again.read("1").await.unwrap().is_none());
    });
}

#[test]
fn s61_what_survives_a_power_cut_is_told() {
    run(async {
        let directory = tempfile::tempdir().unwrap();
        let url = url(&directory.path().join("locks.db"));
        for (setting, durability) in
            [("", Durability::Disk), ("?synchronous=full", Durability::Disk)]
        {
            let locks = leasehold::connect(format!("{url}{setting}")).await.unwrap();
            assert_eq!(locks.guarantees().grant, durability, "{setting}");
        }
        let locks = leasehold::connect(format!("{url}?synchronous=off")).await.unwrap();
        assert!(locks.guarantees().grant < Durability::Disk);
    });
}

/// By connecting, or at the latest by its first lock, and in one line.
async fn refused(file: &Path, kind: ErrorKind) -> String {
    let error = match leasehold::connect(url(file)).await {
        Err(error) => error,
        Ok(locks) => match locks.mutex("x").try_lock().await {
            Err(error) => error,
            Ok(_) => panic!("the lock was given on {}", file.display()),
        },
    };
    assert_eq!(error.kind(), kind, "{error}");
    assert_eq!(format!("{error:#}").lines().count(), 1, "{error}");
    format!("{error:#}")
}

#[test]
fn foreign_tables() {
    run(async {
        for table in ["leasehold_locks", "leasehold_claims", "leasehold_schema"] {
            let directory = tempfile::tempdir().unwrap();
            let file = directory.path().join("theirs.db");
            let open = format!("sqlite:{}?mode=rwc", file.display());
            let mut theirs = sqlx::SqliteConnection::connect(&open).await.unwrap();
            let create =
                format!("CREATE TABLE {table} (theirs INT); INSERT INTO {table} VALUES (7)");
            sqlx::raw_sql(sqlx::AssertSqlSafe(create)).execute(&mut theirs).await.unwrap();
            let told = refused(&file, ErrorKind::Corrupt).await;
            assert!(told.contains("leasehold schema"), "{told}");
            let sql = sqlx::AssertSqlSafe(format!("SELECT sum(theirs) FROM {table}"));
            let left: i64 = sqlx::query_scalar(sql).fetch_one(&mut theirs).await.unwrap();
            assert_eq!(left, 7, "left as it was");
            // Beside them is room for our own.
            let locks = leasehold::connect(format!("{}?prefix=ours_", url(&file))).await.unwrap();
            locks.mutex("x").lock().await.unwrap().release().await.unwrap();
        }
    });
}

/// As a user who may not write there: root, as whom tests may run, may write everywhere, so this
/// thread, and those that it starts, reach for files as somebody else.
#[test]
fn files_that_we_may_only_read() {
    use std::os::unix::fs::PermissionsExt;
    let mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("locks.db");
    run(async {
        let locks = connect(&file).await;
        locks.mutex("x").lock().await.unwrap().release().await.unwrap();
        locks.close().await.unwrap();
    });
    let reader = || {
        if nix::unistd::geteuid().is_root() {
            nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65_534));
        }
        assert!(std::fs::OpenOptions::new().append(true).open(&file).is_err(), "it may write");
    };
    let told = |kind| {
        std::thread::scope(|scope| {
            let refused = || {
                reader();
                let mut told = String::new();
                run(async { told = refused(&file, kind).await });
                told
            };
            scope.spawn(refused).join().unwrap()
        })
    };
    // Beside it we may make files, or not even that; and what may not even be read.
    mode(&file, 0o444);
    for directory_mode in [0o777, 0o555] {
        mode(directory.path(), directory_mode);
        let told = told(ErrorKind::Denied);
        assert!(told.contains("read-only"), "{told}");
    }
    mode(&file, 0o000);
    let closed = told(ErrorKind::Config);
    assert!(closed.contains("this user may write to it"), "{closed}");
    mode(directory.path(), 0o700);
}

#[test]
fn files_that_are_not_ours() {
    run(async {
        let directory = tempfile::tempdir().unwrap();
        let text = directory.path().join("text.db");
        let words = "This is no database, and long enough to be seen as such. ".repeat(20);
        std::fs::write(&text, &words).unwrap();
        let nowhere = directory.path().join("no/such/directory/locks.db");
        refused(&text, ErrorKind::Corrupt).await;
        refused(&nowhere, ErrorKind::Config).await;
        assert_eq!(std::fs::read_to_string(&text).unwrap(), words, "left as it was");
    });
}

/// Whoever may make no files beside the database cannot be told of his turn, and has it all the same. (Only
/// root can be somebody else.)
#[test]
fn a_directory_in_which_we_may_make_no_files() {
    use std::os::unix::fs::PermissionsExt;
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let open = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("locks.db");
    run(async {
        // As long as somebody has the file open, its log is there as well.
        let ours = connect(&file).await;
        assert_eq!(ours.guarantees().wakeup, Wakeup::Push);
        let guard = ours.mutex("x").lock().await.unwrap();
        for beside in std::fs::read_dir(directory.path()).unwrap() {
            open(&beside.unwrap().path(), 0o666);
        }
        open(directory.path(), 0o755);
        let theirs = file.clone();
        let other = tokio::task::spawn_blocking(move || {
            let as_nobody = || {
                nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65_534));
                run(async {
                    let locks = connect(&theirs).await;
                    assert_eq!(locks.guarantees().wakeup, Wakeup::Poll);
                    let found = locks.diagnose().await.unwrap();
                    assert!(found.iter().any(|found| found.id == "doorbell"), "{found:?}");
                    let guard = locks.mutex("x").lock().await.unwrap();
                    guard.release().await.unwrap();
                });
            };
            std::thread::scope(|scope| scope.spawn(as_nobody).join().unwrap());
        });
        let waiters = async || ours.read("x").await.unwrap().map_or(0, |lock| lock.claims.len());
        while waiters().await < 2 && !other.is_finished() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        guard.release().await.unwrap();
        other.await.unwrap();
        ours.mutex("x").lock().await.unwrap().release().await.unwrap();
    });
}

/// What may happen to a database file under its clients.
#[derive(Clone, Copy, Debug)]
enum Mishap {
    Moved,
    Removed,
    Restored,
    DirectoryMoved,
    LinkTurned,
}

impl Mishap {
    /// `file` is `there/locks.db`, and `there` is a link to `store` below `root`.
    fn happen(self, root: &Path, file: &Path) {
        let (store, old) = (root.join("store"), root.join("old"));
        let parts = ["", "-wal", "-shm"].map(|end| format!("{}{end}", file.display()));
        match self {
            Self::Moved => {
                std::fs::create_dir(&old).unwrap();
                for part in &parts {
                    std::fs::rename(part, old.join(Path::new(part).file_name().unwrap())).unwrap();
                }
            }
            Self::Removed => parts.iter().for_each(|part| std::fs::remove_file(part).unwrap()),
            Self::Restored => {
                std::fs::rename(root.join("backup.db"), file).unwrap();
                parts[1..].iter().for_each(|part| std::fs::remove_file(part).unwrap());
            }
            Self::DirectoryMoved => {
                std::fs::rename(&store, &old).unwrap();
                std::fs::create_dir(&store).unwrap();
            }
            Self::LinkTurned => {
                std::fs::create_dir(&old).unwrap();
                std::fs::remove_file(root.join("there")).unwrap();
                std::os::unix::fs::symlink(&old, root.join("there")).unwrap();
            }
        }
    }
}

/// A client whose file is not what the path leads to any more loses its locks soon, and locks from then on where
/// all others do.
fn is_followed(mishap: Mishap) {
    run(async {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("store")).unwrap();
        std::os::unix::fs::symlink(root.path().join("store"), root.path().join("there")).unwrap();
        let file = root.path().join("there").join("locks.db");
        let before = connect(&file).await;
        before.close().await.unwrap();
        std::fs::copy(&file, root.path().join("backup.db")).unwrap();
        let before = connect(&file).await;
        let lease = Duration::from_secs(3);
        let guard = before.mutex("job").lease(lease).lock().await.unwrap();
        mishap.happen(root.path(), &file);
        let after = connect(&file).await;
        let others = after.mutex("job").lease(lease).lock().await.unwrap();
        let end = Instant::now() + 3 * lease;
        while guard.is_held() {
            assert!(Instant::now() < end, "{mishap:?}: it is never told");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(others.is_held(), "{mishap:?}: the new file's holder keeps its lock");
        let tried = before.mutex("job").try_lock().await.unwrap_err();
        assert_eq!(tried.kind(), ErrorKind::Contended, "{mishap:?}: {tried}");
        others.release().await.unwrap();
        let again = before.mutex("job").lock().await.unwrap();
        let tried = after.mutex("job").try_lock().await.unwrap_err();
        assert_eq!(tried.kind(), ErrorKind::Contended, "{mishap:?}: {tried}");
        again.release().await.unwrap();
    });
}

#[test]
fn holder_loses_its_lock_when_the_sqlite_file_is_moved() {
    is_followed(Mishap::Moved);
}

#[test]
fn holder_loses_its_lock_when_the_sqlite_file_is_removed() {
    is_followed(Mishap::Removed);
}

#[test]
fn holder_loses_its_lock_when_a_sqlite_backup_is_restored() {
    is_followed(Mishap::Restored);
}

#[test]
fn holder_loses_its_lock_when_the_sqlite_directory_is_moved() {
    is_followed(Mishap::DirectoryMoved);
}

#[test]
fn holder_loses_its_lock_when_a_link_to_the_sqlite_file_is_turned() {
    is_followed(Mishap::LinkTurned);
}

/// Of those that wait in the old file, each gets its turn in the new one.
#[test]
fn waiter_waits_on_in_the_new_sqlite_file() {
    run(async {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("locks.db");
        let [holds, waits] = [connect(&file).await, connect(&file).await];
        let guard = holds.mutex("job").lease(Duration::from_secs(3)).lock().await.unwrap();
        let (queued, mut in_queue) = tokio::sync::mpsc::unbounded_channel();
        let mutex = waits.mutex("job").lease(Duration::from_secs(3)).on_waiting(move |_| {
            let _ = queued.send(());
        });
        let waiter = tokio::spawn(async move { mutex.lock().await });
        in_queue.recv().await.unwrap();
        for end in ["", "-wal", "-shm"] {
            std::fs::remove_file(format!("{}{end}", file.display())).unwrap();
        }
        let after = connect(&file).await;
        let others = after.mutex("job").lock().await.unwrap();
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(!waiter.is_finished(), "it waits behind the new file's holder");
        others.release().await.unwrap();
        let turn = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
        assert!(!guard.is_held());
        turn.release().await.unwrap();
    });
}
