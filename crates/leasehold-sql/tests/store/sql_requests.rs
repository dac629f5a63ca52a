//! What a pair costs, and what becomes of requests: replies that are lost, joins that come late, statements
//! that the server undoes or cuts short and that are tried again.

use std::time::{Duration, Instant};

use crate::sql_common::*;
use leasehold::Leasehold;
use leasehold::store::sql::SqlStore;
use leasehold::store::{Evict, Joined, Mode, Store};
use testbed::{Proxy, Setup};
use tokio::runtime::Handle;

on_all![
    uncontended_round_trips,
    s41_lost_replies_are_recognised,
    s46_serializable_by_default,
    s46_a_deadlock_is_retried,
    s46_what_was_undone_is_retried_with_the_same_claim,
    s46_a_row_that_is_locked_for_longer_than_the_server_waits,
];

without_mysql![
    s46_a_statement_that_the_server_cuts_short_is_tried_again,
    an_eviction_is_never_done_twice,
    p9_a_join_that_is_late_is_taken_back,
    p9_a_release_beside_a_join_that_hangs_is_no_loss,
    nobody_asks_for_waiters_that_are_gone,
];

async fn uncontended_round_trips<S: Server>() {
    // Told by issue and README: one each, and at most two on MySQL and MariaDB.
    let most = if std::any::type_name::<S>().contains("Postgres") { 1 } else { 2 };
    let server = S::shared();
    let url = server.database();
    let proxy = Proxy::before(server.port());
    // One connection, so that all statements are prepared after the first pair.
    let url = format!("{}?pool=1", proxy.in_front_of(server.port(), &url));
    let locks = connect(&url).await;
    let mutex = locks.mutex("counted").lease(Duration::from_secs(600));
    for _ in 0..3 {
        mutex.try_lock().await.unwrap().release().await.unwrap();
    }
    let fresh: Vec<_> = (0..20).map(|n| locks.mutex(format!("fresh {n}"))).collect();
    let again = std::iter::repeat_n(mutex, 20);
    for (pair, mutex) in again.chain(fresh).enumerate() {
        let before = proxy.round_trips();
        let guard = mutex.try_lock().await.unwrap();
        let taken = proxy.round_trips();
        guard.release().await.unwrap();
        let released = proxy.round_trips();
        assert!(taken - before <= most, "{} round trips to take {pair}", taken - before);
        assert!(released - taken <= most, "{} round trips to release {pair}", released - taken);
        assert!(taken > before && released > taken, "counted nothing");
    }
}

async fn s41_lost_replies_are_recognised<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let proxy = Proxy::before(server.port());
    let locks = connect(&proxy.in_front_of(server.port(), &url)).await;
    release(locks.mutex("warm").lock().await.unwrap()).await;
    let other = connect(&url).await;
    // Whichever reply is lost, of however many there are.
    let mut lost = 0;
    for kept in 0..8 {
        let name = format!("lost {kept}");
        proxy.drop_replies_after(kept);
        let mutex = locks.mutex(&name);
        let mut taking = tokio::spawn(async move { mutex.lock().await });
        let taken = tokio::select! {
            taken = &mut taking => Some(taken),
            () = until("a dropped reply", async || proxy.has_dropped()) => None,
        };
        lost += usize::from(taken.is_none());
        proxy.cut();
        proxy.pass_replies();
        let taken = match taken {
            Some(taken) => taken,
            None => tokio::time::timeout(PATIENCE, taking).await.unwrap(),
        };
        let guard = taken.unwrap().unwrap();
        let info = other.read(&name).await.unwrap().expect("it is held");
        assert_eq!(info.claims.len(), 1, "doubled: {info:?}");
        assert_eq!(info.claims[0].token, Some(guard.token()));

        // The same for the release: it is one, though nobody heard of it.
        proxy.drop_replies_after(kept);
        let mut releasing = tokio::spawn(guard.release());
        let released = tokio::select! {
            released = &mut releasing => Some(released),
            () = until("a dropped reply", async || proxy.has_dropped()) => None,
        };
        lost += usize::from(released.is_none());
        proxy.cut();
        proxy.pass_replies();
        let released = match released {
            Some(released) => released,
            None => tokio::time::timeout(PATIENCE, releasing).await.unwrap(),
        };
        released.unwrap().unwrap();
        assert!(other.read(&name).await.unwrap().is_none(), "leaked");
    }
    assert!(lost >= 2, "every reply came");
}

/// The answer is lost after each number of replies in turn. Whoever was granted the lock by the eviction
/// has done nothing to be evicted for.
async fn an_eviction_is_never_done_twice<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let direct = connect(&url).await;
    let proxy = Proxy::before(server.port());
    let person = connect(&proxy.in_front_of(server.port(), &url)).await;
    let mut lost = 0;
    for kept in 0..12 {
        let name = format!("evicted {kept}");
        for joins in [claim(&name, LONG, LONG), claim(&name, LONG, LONG)] {
            direct.store().join(&joins, Mode::Wait).await.unwrap();
        }
        // Its connection has served before, and may be taken for one that was closed meanwhile.
        person.read(&name).await.unwrap();
        proxy.drop_replies_after(kept);
        let mut evicting = tokio::spawn({
            let (person, name) = (person.clone(), name.clone());
            async move { person.evict(&name, Evict::Holders).await }
        });
        let evicted = tokio::select! {
            evicted = &mut evicting => Some(evicted),
            () = until("a dropped reply", async || proxy.has_dropped()) => None,
        };
        lost += usize::from(evicted.is_none());
        proxy.cut();
        proxy.pass_replies();
        let evicted = match evicted {
            Some(evicted) => evicted.unwrap(),
            None => tokio::time::timeout(LONG, evicting).await.unwrap().unwrap(),
        };
        let left = standings(direct.read(&name).await.unwrap());
        assert!(!left.is_empty(), "both are gone after {kept} replies, and told was {evicted:?}");
        if let Ok(count) = evicted {
            assert_eq!((count, left.len()), (1, 1), "after {kept} replies");
        }
    }
    assert!(lost > 2, "only {lost} answers were lost");
}

/// A join is sent, and hangs on its way until the proxy thaws; its caller gives up.
async fn joins_and_hangs(
    proxy: &Proxy,
    store: &std::sync::Arc<SqlStore>,
    claim: &leasehold::Claim,
) {
    proxy.hold_requests_so_far();
    let sent = proxy.requests();
    let joining = tokio::spawn({
        let (store, claim) = (store.clone(), claim.clone());
        async move { store.join(&claim, Mode::Wait).await.map(|_| ()) }
    });
    until("the join is sent", async || proxy.requests() > sent).await;
    joining.abort();
    assert!(joining.await.unwrap_err().is_cancelled());
}

/// A join is on its way, and takes its time. Then its caller gives up; the leave that is owed goes out
/// on another connection and finds nothing. Then the join gets through.
async fn p9_a_join_that_is_late_is_taken_back<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let proxy = Proxy::before(server.port());
    let behind = proxy.in_front_of(server.port(), &url);
    let store = SqlStore::open(&behind, &Handle::current()).await.unwrap();
    let reader = connect(&url).await;
    let late = claim("late", LONG, LONG);
    // The name is known, so that one statement takes it.
    release(reader.mutex("late").lock().await.unwrap()).await;
    joins_and_hangs(&proxy, &store, &late).await;
    let left = store.leave(&late, None).await.unwrap();
    assert!(left, "there was nothing to leave yet, but who knows what becomes of the join");
    proxy.thaw();
    // Whether the join gets through at all is not for us to say; in the end nothing is left.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let left = async || reader.read("late").await.unwrap().is_none();
    tokio::time::timeout(Duration::from_secs(10), until("nothing is left", left))
        .await
        .expect("a lock that nobody holds stays taken for a lease");
}

/// A join hangs, its caller asks again and is answered. When the hold is released, the first join gets
/// through, sees that its claim was given up, and leaves before the release does: that one finds
/// nothing, and nothing was lost.
async fn p9_a_release_beside_a_join_that_hangs_is_no_loss<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let proxy = Proxy::before(server.port());
    let behind = proxy.in_front_of(server.port(), &url);
    let store = SqlStore::open(&behind, &Handle::current()).await.unwrap();
    let reader = connect(&url).await;
    let twice = claim("twice", LONG, LONG);
    release(reader.mutex("twice").lock().await.unwrap()).await;
    joins_and_hangs(&proxy, &store, &twice).await;
    let joined = store.join(&twice, Mode::Wait).await.unwrap();
    assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
    // What the first join will do, once it is answered; here it is the faster one.
    let taken = reader.evict("twice", Evict::Holders).await.unwrap();
    assert_eq!(taken, 1);
    assert!(store.leave(&twice, None).await.unwrap(), "the release says that the hold was lost");
    proxy.thaw();
    let left = async || reader.read("twice").await.unwrap().is_none();
    until("nothing is left", left).await;
}

/// A waiter gives up while the server is away for longer than its claim can live. Nobody is left to
/// be asked for.
async fn nobody_asks_for_waiters_that_are_gone<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let proxy = Proxy::before(server.port());
    let locks = connect(&proxy.in_front_of(server.port(), &url)).await;
    let holder = connect(&url).await;
    let guard = holder.mutex("x").lock().await.unwrap();
    let lease = Duration::from_millis(500);
    let (queued, mut in_queue) = tokio::sync::mpsc::unbounded_channel();
    let mutex = locks.mutex("x").lease(lease).on_waiting(move |_| {
        // Told again with each heartbeat; the test listens only once.
        let _ = queued.send(());
    });
    let waiter = tokio::spawn(async move { mutex.lock().await });
    in_queue.recv().await.unwrap();
    proxy.refuse(true);
    waiter.abort();
    assert!(waiter.await.unwrap_err().is_cancelled());
    tokio::time::sleep(lease * 6).await;
    proxy.refuse(false);
    // Whatever was under way is over.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let end = Instant::now() + PATIENCE;
    loop {
        let before = proxy.requests();
        tokio::time::sleep(Duration::from_secs(2)).await;
        let asked = proxy.requests() - before;
        if asked <= 4 {
            break;
        }
        // It may have been a connection that is made again.
        assert!(Instant::now() < end, "{asked} requests for nobody");
    }
    release(guard).await;
}

async fn s46_serializable_by_default<S: Server>() {
    let server = S::with(Setup::new().fast());
    let url = server.database();
    server.serializable(&url);
    let clients = [connect(&url).await, connect(&url).await, connect(&url).await];
    hammer(&clients, "serial", 6, 10).await;
}

/// A waiter that died, and was not removed yet.
const DEAD_WAITER: &str = "INSERT INTO leasehold_claims (name, token, claim, weight, standing, since, expires, \
     lock_delay, host, pid, label, session) SELECT name, last_token + 1, \
     '00000000000000000000000000000001', 1, 0, 1, 1, 0, 'h', 1, '', '' FROM leasehold_locks \
     WHERE name = 'blocked'; UPDATE leasehold_locks SET claims = 1, last_token = last_token + 1 \
     WHERE name = 'blocked'; CREATE TABLE heavy (n BIGINT)";

/// PostgreSQL, MariaDB and MySQL: returns when somebody waits for a row.
const WAITED_FOR: [&str; 3] = [
    "DO $$ BEGIN WHILE NOT EXISTS (SELECT FROM pg_locks WHERE NOT granted) LOOP \
     PERFORM pg_sleep(0.01); END LOOP; END $$",
    "BEGIN NOT ATOMIC WHILE (SELECT variable_value FROM information_schema.global_status \
     WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS') = 0 DO DO SLEEP(0.01); END WHILE; END",
    "CALL until_somebody_waits()",
];

/// MySQL has blocks in procedures only.
const UNTIL_SOMEBODY_WAITS: &str = "CREATE PROCEDURE until_somebody_waits() BEGIN \
     WHILE (SELECT variable_value FROM performance_schema.global_status \
     WHERE variable_name = 'Innodb_row_lock_current_waits') = 0 DO DO SLEEP(0.01); END WHILE; END";

async fn s46_a_deadlock_is_retried<S: Server>() {
    let is_postgres = std::any::type_name::<S>().contains("Postgres");
    // Who looks first for a deadlock is ended: ours, in this time, by which theirs must have begun to wait.
    let setup = if is_postgres {
        Setup::new().fast().arg("-c").arg("deadlock_timeout=4s")
    } else {
        Setup::new().fast()
    };
    let server = S::with(setup);
    let url = server.database();
    let (holder, waiter) = (connect(&url).await, connect(&url).await);
    let lease = Duration::from_secs(120);
    let held = holder.mutex("blocked").lease(lease).lock().await.unwrap();
    server.script(&url, DEAD_WAITER).await;
    if is_postgres {
        let and = "ALTER TABLE heavy OWNER TO lh; GRANT SET ON PARAMETER deadlock_timeout TO lh";
        server.script(&url, and).await;
    }
    // Another transaction has the dead waiter's row, and then wants the lock's; a claim that joins
    // has the lock's, and wants to remove the dead waiter. (MariaDB ends who has written less.)
    let first = "INSERT INTO heavy VALUES (1), (2), (3), (4), (5), (6), (7), (8), (9), (10), (11), \
                 (12), (13), (14), (15), (16), (17), (18), (19), (20); \
                 SELECT name FROM leasehold_claims WHERE name = 'blocked' FOR UPDATE";
    let patient = if is_postgres { "SET LOCAL deadlock_timeout = '60s'; " } else { "" };
    let first: &'static str = format!("{patient}{first}").leak();
    // The server itself looks who waits: nobody waits long for a row, and looking from here may take
    // longer.
    let [postgres, mariadb, mysql] = WAITED_FOR;
    let is_mysql = std::any::type_name::<S>().contains("MySql");
    if is_mysql {
        server.script(&url, UNTIL_SOMEBODY_WAITS).await;
    }
    let wait = match is_postgres {
        true => postgres,
        false if is_mysql => mysql,
        false => mariadb,
    };
    let then: &'static str = format!("{wait}; {BLOCK}").leak();
    let (begun, is_begun) = tokio::sync::oneshot::channel();
    let (go_on, told) = tokio::sync::oneshot::channel();
    let theirs = tokio::spawn(server.in_two_steps(&url, [first, then], begun, told));
    is_begun.await.unwrap();
    let mutex = waiter.mutex("blocked").lease(lease);
    assert_eq!(server.blocked(), 0);
    go_on.send(()).unwrap();
    let joining = tokio::spawn(async move { mutex.lock().await });
    theirs.await.unwrap().expect("it was ours that was ended");
    // Once, and again if we had the row first again.
    assert!(server.deadlocks() >= 1);
    held.release().await.unwrap();
    let guard = tokio::time::timeout(PATIENCE, joining).await.unwrap().unwrap().unwrap();
    let info = holder.read("blocked").await.unwrap().expect("it is held");
    assert_eq!(info.claims.len(), 1, "doubled: {info:?}");
    assert_eq!(info.claims[0].token, Some(guard.token()));
    guard.release().await.unwrap();
    assert!(holder.read("blocked").await.unwrap().is_none());
}

async fn s46_what_was_undone_is_retried_with_the_same_claim<S: Server>() {
    let server = S::with(Setup::new().fast());
    let url = server.database();
    let is_postgres = std::any::type_name::<S>().contains("Postgres");
    let (holder, waiter) = (connect(&url).await, connect(&url).await);
    let held = holder.mutex("undone").lock().await.unwrap();
    // The database undoes the first tries, and remembers whose they were.
    server
        .script(
            &url,
            match is_postgres {
                true => {
                    "CREATE SEQUENCE public.tries; \
                     CREATE FUNCTION undoing() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ \
                     DECLARE n bigint := nextval('public.tries'); BEGIN \
                     RAISE LOG 'tried by %', NEW.claim; \
                     IF n = 1 THEN RAISE EXCEPTION 'undone' USING ERRCODE = '40001'; END IF; \
                     IF n = 2 THEN RAISE EXCEPTION 'undone' USING ERRCODE = '40P01'; END IF; \
                     RETURN NEW; END $$; \
                     CREATE TRIGGER undoing BEFORE INSERT ON leasehold_claims \
                     FOR EACH ROW EXECUTE FUNCTION undoing()"
                }
                // A table without transactions keeps what was undone.
                false => {
                    "CREATE TABLE tries (claim VARCHAR(40)) ENGINE = MyISAM; \
                     CREATE TRIGGER undoing BEFORE INSERT ON leasehold_claims FOR EACH ROW BEGIN \
                     INSERT INTO tries VALUES (NEW.claim); \
                     IF (SELECT COUNT(*) FROM tries) = 1 THEN \
                     SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213; END IF; \
                     IF (SELECT COUNT(*) FROM tries) = 2 THEN \
                     SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1205; END IF; END"
                }
            },
        )
        .await;
    let mutex = waiter.mutex("undone");
    let waiting = tokio::spawn(async move { mutex.lock().await });
    let queued = || async { holder.read("undone").await.unwrap().unwrap().claims.len() };
    while queued().await < 2 {
        assert!(!waiting.is_finished(), "{:?}", waiting.await);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let tried: Vec<String> = match is_postgres {
        true => {
            let log = server.log();
            let lines = log.lines().filter_map(|line| line.split_once("tried by "));
            lines.map(|(_, claim)| claim.trim().to_owned()).collect()
        }
        false => server.admin(&url, "SELECT claim FROM tries").lines().map(Into::into).collect(),
    };
    assert_eq!(tried.len(), 3, "{tried:?}");
    assert!(tried.iter().all(|claim| *claim == tried[0]), "{tried:?}");
    held.release().await.unwrap();
    let guard = tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap().unwrap();
    guard.release().await.unwrap();
}

/// Waits until so many hold or wait: a join that nobody waits for any more may come late, and is taken
/// back.
async fn until_claims(locks: &Leasehold, name: &str, count: usize) {
    let end = Instant::now() + PATIENCE;
    loop {
        let claims = locks.read(name).await.unwrap().map_or(0, |info| info.claims.len());
        if claims == count {
            return;
        }
        assert!(Instant::now() < end, "{claims} claims, and not {count}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn s46_a_row_that_is_locked_for_longer_than_the_server_waits<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let locks = connect(&url).await;
    let mutex = locks.mutex("blocked").lease(Duration::from_secs(60));
    release(mutex.lock().await.unwrap()).await;
    let blocker = server.hold(&url, BLOCK).await;
    let taking = tokio::spawn(async move { mutex.lock().await });
    // 1205 or 55P03 comes after five seconds.
    tokio::time::sleep(Duration::from_secs(7)).await;
    assert!(!taking.is_finished(), "the row is locked");
    drop(blocker);
    let guard = tokio::time::timeout(PATIENCE, taking).await.unwrap().unwrap().unwrap();
    until_claims(&locks, "blocked", 1).await;
    guard.release().await.unwrap();
    until_claims(&locks, "blocked", 0).await;
}

async fn s46_a_statement_that_the_server_cuts_short_is_tried_again<S: Server + Hasty>() {
    let server = S::with(Setup::new().fast());
    let url = server.database();
    release(connect(&url).await.mutex("blocked").lock().await.unwrap()).await;
    server.user(&url, "hasty", "SELECT, INSERT, UPDATE, DELETE");
    server.hasty(&url);
    let locks = connect(&url.replace("lh:lh@", "hasty:hasty@")).await;
    let blocker = server.hold(&url, BLOCK).await;
    let mutex = locks.mutex("blocked");
    let taking = tokio::spawn(async move { mutex.lock().await });
    // It was, and so was what was tried after it.
    until("two were cut short", async || server.cut_short() >= 2).await;
    assert!(!taking.is_finished(), "{:?}", taking.await);
    drop(blocker);
    release(taking.await.unwrap().unwrap()).await;
}
