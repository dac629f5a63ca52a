//! SQLite: other writers, files of other programs, and restored files.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold::store::{Durability, Wakeup};
use leasehold::{Client, ErrorKind};
use sqlx::Connection;

const PATIENCE: Duration = Duration::from_secs(60);

fn url(file: &Path) -> String {
    format!("sqlite:{}", file.display())
}

async fn connect(file: &Path) -> Client {
    leasehold::connect(url(file)).await.unwrap_or_else(|error| panic!("{error}"))
}

fn run(case: impl Future<Output = ()>) {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(3).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        tokio::time::timeout(PATIENCE * 2, case).await.expect("the case hangs");
    });
}

// S60
#[test]
fn client_waits_for_other_writers_of_the_file() {
    run(async {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("locks.db");
        let clients = [connect(&file).await, connect(&file).await, connect(&file).await];
        // Another program with the same database, whose writes take long.
        let other = tokio::spawn({
            let path = file.display().to_string();
            async move {
                let mut theirs = sqlx::SqliteConnection::connect(&path).await.unwrap();
                let sql = "PRAGMA busy_timeout = 60000; CREATE TABLE theirs (n INT)";
                sqlx::raw_sql(sql).execute(&mut theirs).await.unwrap();
                // The last one takes longer than all retries, and less than SQLite waits.
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

// S61
#[test]
fn tokens_rise_after_an_old_copy_is_restored() {
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

/// After closing, the file is complete and no client uses it, so it can be copied or moved.
#[test]
fn closed_client_has_closed_the_file() {
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
        assert!(there().len() > 1, "the log next to the database is missing: {:?}", there());
        let begun = Instant::now();
        locks.close().await.unwrap();
        // Closing waits at most this long for the disconnect, so the cleanup may still be running
        // then.
        while begun.elapsed() >= Duration::from_secs(2) && there().len() > 1 {
            assert!(begun.elapsed() < PATIENCE, "the log was not deleted: {:?}", there());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(there(), [file]);
        // The database can still be inspected.
        assert!(again.inspect("1").await.unwrap().is_none());
    });
}

// S61
#[test]
fn durability_follows_the_synchronous_setting() {
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

/// Returns the error of connecting or, at the latest, of the first lock. It must be one line.
async fn refused(file: &Path, kind: ErrorKind) -> String {
    let error = match leasehold::connect(url(file)).await {
        Err(error) => error,
        Ok(locks) => match locks.mutex("x").try_lock().await {
            Err(error) => error,
            Ok(_) => panic!("the lock was granted on {}", file.display()),
        },
    };
    assert_eq!(error.kind(), kind, "{error}");
    assert_eq!(format!("{error:#}").lines().count(), 1, "{error}");
    format!("{error:#}")
}

#[test]
fn foreign_tables_are_refused_and_unchanged() {
    run(async {
        for table in ["leasehold_locks", "leasehold_claims", "leasehold_schema"] {
            let directory = tempfile::tempdir().unwrap();
            let file = directory.path().join("theirs.db");
            let open = format!("sqlite:{}?mode=rwc", file.display());
            let mut theirs = sqlx::SqliteConnection::connect(&open).await.unwrap();
            let create =
                format!("CREATE TABLE {table} (theirs INT); INSERT INTO {table} VALUES (7)");
            sqlx::raw_sql(sqlx::AssertSqlSafe(create)).execute(&mut theirs).await.unwrap();
            let message = refused(&file, ErrorKind::Corrupt).await;
            assert!(message.contains("leasehold schema"), "{message}");
            let sql = sqlx::AssertSqlSafe(format!("SELECT sum(theirs) FROM {table}"));
            let left: i64 = sqlx::query_scalar(sql).fetch_one(&mut theirs).await.unwrap();
            assert_eq!(left, 7, "the foreign data was changed");
            // Our own tables can be created next to them.
            let locks = leasehold::connect(format!("{}?prefix=ours_", url(&file))).await.unwrap();
            locks.mutex("x").lock().await.unwrap().release().await.unwrap();
        }
    });
}

/// Runs as a user that may not write there. Tests may run as root, which may write everywhere. So
/// this thread and the threads that it starts access files as another user.
#[test]
fn read_only_files_are_refused() {
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
        assert!(
            std::fs::OpenOptions::new().append(true).open(&file).is_err(),
            "the test user may write to the file"
        );
    };
    let message = |kind| {
        std::thread::scope(|scope| {
            let refused = || {
                reader();
                let mut message = String::new();
                run(async { message = refused(&file, kind).await });
                message
            };
            scope.spawn(refused).join().unwrap()
        })
    };
    // First we may create files next to it, then not even that. Finally we may not even read it.
    mode(&file, 0o444);
    for directory_mode in [0o777, 0o555] {
        mode(directory.path(), directory_mode);
        let message = message(ErrorKind::Denied);
        assert!(message.contains("read-only"), "{message}");
    }
    mode(&file, 0o000);
    let closed = message(ErrorKind::Config);
    assert!(closed.contains("this user may write to it"), "{closed}");
    mode(directory.path(), 0o700);
}

#[test]
fn foreign_or_missing_files_are_refused() {
    run(async {
        let directory = tempfile::tempdir().unwrap();
        let text = directory.path().join("text.db");
        let words = "This is no database, and long enough to be seen as such. ".repeat(20);
        std::fs::write(&text, &words).unwrap();
        let nowhere = directory.path().join("no/such/directory/locks.db");
        refused(&text, ErrorKind::Corrupt).await;
        refused(&nowhere, ErrorKind::Config).await;
        assert_eq!(std::fs::read_to_string(&text).unwrap(), words, "the foreign data was changed");
    });
}

/// A client that may not create files next to the database cannot be notified, but still gets the
/// lock. (Only root can act as another user.)
#[test]
fn client_that_may_not_create_files_polls_and_is_granted() {
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
        // While a client has the file open, its log exists too.
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
        let waiters = async || ours.inspect("x").await.unwrap().map_or(0, |lock| lock.claims.len());
        while waiters().await < 2 && !other.is_finished() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        guard.release().await.unwrap();
        other.await.unwrap();
        ours.mutex("x").lock().await.unwrap().release().await.unwrap();
    });
}

/// A change of a database file while clients use it.
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

/// If the path no longer leads to a client's file, the client soon loses its locks. After that it
/// uses the same file as all others.
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
            assert!(Instant::now() < end, "{mishap:?}: the holder never finds out");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(others.is_held(), "{mishap:?}: the new file's holder lost its lock");
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
fn holder_loses_its_lock_when_a_link_to_the_sqlite_file_changes() {
    is_followed(Mishap::LinkTurned);
}

/// A client that waits in the old file gets the lock in the new one.
#[test]
fn waiter_continues_in_the_new_sqlite_file() {
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
        assert!(!waiter.is_finished(), "the waiter got the lock that the new file's holder has");
        others.release().await.unwrap();
        let turn = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
        assert!(!guard.is_held());
        turn.release().await.unwrap();
    });
}
