//! Requests: what acquiring and releasing cost, and the effects of lost replies, late joins, and
//! statements that the server undoes or aborts.

use std::time::{Duration, Instant};

use crate::sql_common::*;
use leasehold::store::sql::SqlStore;
use leasehold::store::{Evict, Joined, Mode, Store};
use leasehold::{Client, Name};
use testbed::{Proxy, Setup};
use tokio::runtime::Handle;

on_all![
    acquire_and_release_take_few_round_trips,
    lost_replies_are_recognized,
    locks_work_if_the_default_isolation_is_serializable,
    deadlock_is_retried,
    rolled_back_join_is_retried_with_the_same_claim,
    acquiring_outlasts_a_row_lock_longer_than_the_server_waits,
];

without_mysql![
    a_statement_that_the_server_cuts_short_is_tried_again,
    eviction_is_never_executed_twice,
    late_join_is_undone_after_its_caller_gave_up,
    release_waits_for_a_join_in_progress,
    release_beside_a_hanging_join_is_not_a_loss,
    client_does_not_poll_for_waiters_that_gave_up,
];

async fn acquire_and_release_take_few_round_trips<S: Server>() {
    // Each costs one round trip, and at most two on MySQL and MariaDB.
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
        assert!(taken > before && released > taken, "no round trips were counted");
    }
}

// S41
async fn lost_replies_are_recognized<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let proxy = Proxy::before(server.port());
    let locks = connect(&proxy.in_front_of(server.port(), &url)).await;
    release(locks.mutex("warm").lock().await.unwrap()).await;
    let other = connect(&url).await;
    // Each reply is lost in turn.
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
        let info = other.inspect(&name).await.unwrap().expect("the lock has no holder");
        assert_eq!(info.claims.len(), 1, "doubled: {info:?}");
        assert_eq!(info.claims[0].token, Some(guard.grant()));

        // The release has an effect once, although its reply was lost.
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
        assert!(other.inspect(&name).await.unwrap().is_none(), "the lock was not released");
    }
    assert!(lost >= 2, "too few replies were dropped");
}

/// The answer is lost after each number of replies in turn. The eviction may grant the lock to the
/// next waiter, which must not be evicted.
async fn eviction_is_never_executed_twice<S: Server>() {
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
        // Its connection has served before, so the client may assume that the server closed it.
        person.inspect(&name).await.unwrap();
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
        let left = claim_states(direct.inspect(&name).await.unwrap());
        assert!(
            !left.is_empty(),
            "both claims are gone after {kept} replies, the result was {evicted:?}"
        );
        if let Ok(count) = evicted {
            assert_eq!((count, left.len()), (1, 1), "after {kept} replies");
        }
    }
    assert!(lost > 2, "only {lost} replies were dropped");
}

/// Sends a join that hangs until the proxy thaws. Its caller gives up.
async fn joins_and_hangs(
    proxy: &Proxy,
    store: &std::sync::Arc<SqlStore>,
    claim: &leasehold::store::Claim,
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

// P9
/// A join is delayed, and its caller gives up. The leave uses another connection and finds nothing.
/// Then the join arrives.
async fn late_join_is_undone_after_its_caller_gave_up<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let proxy = Proxy::before(server.port());
    let behind = proxy.in_front_of(server.port(), &url);
    let store = SqlStore::open(&behind, &Handle::current()).await.unwrap();
    let reader = connect(&url).await;
    let late = claim("late", LONG, LONG);
    // The name is known, so one statement acquires the lock.
    release(reader.mutex("late").lock().await.unwrap()).await;
    joins_and_hangs(&proxy, &store, &late).await;
    let left = leaves_while_thawed(&proxy, &store, &late).await;
    assert!(left, "a release while the join is in doubt must not report a loss");
    // It is unknown whether the join has any effect, but in the end nothing remains.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let left = async || reader.inspect("late").await.unwrap().is_none();
    tokio::time::timeout(Duration::from_secs(10), until("nothing is left", left))
        .await
        .expect("a lock without a holder remains locked for a lease");
}

/// Removes a claim whose join hangs. The join continues a moment after the request to remove it.
async fn leaves_while_thawed(
    proxy: &Proxy,
    store: &std::sync::Arc<SqlStore>,
    claim: &leasehold::store::Claim,
) -> bool {
    let leaving = tokio::spawn({
        let (store, claim) = (store.clone(), claim.clone());
        async move { store.leave(&claim, None).await }
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    proxy.thaw();
    leaving.await.unwrap().unwrap()
}

// P9
/// A join hangs, and its caller joins again and gets an answer. When the claim is released, the
/// first join arrives, sees that its claim was given up, and leaves before the release does. The
/// release finds nothing, and nothing is lost.
async fn release_beside_a_hanging_join_is_not_a_loss<S: Server>() {
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
    // The first join will do this after its answer. Here it is the faster one.
    let taken = reader.evict("twice", Evict::Holders).await.unwrap();
    assert_eq!(taken, 1);
    assert!(leaves_while_thawed(&proxy, &store, &twice).await, "the release reports a loss");
    let left = async || reader.inspect("twice").await.unwrap().is_none();
    until("nothing is left", left).await;
}

/// A waiter gives up while the server is unreachable for longer than its claim can live. After that
/// no waiter remains to poll for.
async fn client_does_not_poll_for_waiters_that_gave_up<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let proxy = Proxy::before(server.port());
    let locks = connect(&proxy.in_front_of(server.port(), &url)).await;
    let holder = connect(&url).await;
    let guard = holder.mutex("x").lock().await.unwrap();
    let lease = Duration::from_millis(500);
    let (queued, mut in_queue) = tokio::sync::mpsc::unbounded_channel();
    let mutex = locks.mutex("x").lease(lease).on_waiting(move |_| {
        // Notified again with each heartbeat, but the test receives only once.
        let _ = queued.send(());
    });
    let waiter = tokio::spawn(async move { mutex.lock().await });
    in_queue.recv().await.unwrap();
    proxy.refuse(true);
    waiter.abort();
    assert!(waiter.await.unwrap_err().is_cancelled());
    tokio::time::sleep(lease * 6).await;
    proxy.refuse(false);
    // Waits until all requests in progress have ended.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let end = Instant::now() + PATIENCE;
    loop {
        let before = proxy.requests();
        tokio::time::sleep(Duration::from_secs(2)).await;
        let asked = proxy.requests() - before;
        if asked <= 4 {
            break;
        }
        // The request may belong to a new connection.
        assert!(Instant::now() < end, "{asked} requests without a waiter");
    }
    release(guard).await;
}

// S46
async fn locks_work_if_the_default_isolation_is_serializable<S: Server>() {
    let server = S::with(Setup::new().fast());
    let url = server.database();
    server.serializable(&url);
    let clients = [connect(&url).await, connect(&url).await, connect(&url).await];
    hammer(&clients, "serial", 6, 10).await;
}

/// An expired waiter that was not removed yet.
const DEAD_WAITER: &str = "INSERT INTO leasehold_claims (name, token, claim, weight, standing, since, expires, \
     lock_delay, host, pid, label, session) SELECT name, last_token + 1, \
     '00000000000000000000000000000001', 1, 0, 1, 1, 0, 'h', 1, '', '' FROM leasehold_locks \
     WHERE name = 'blocked'; UPDATE leasehold_locks SET claims = 1, last_token = last_token + 1 \
     WHERE name = 'blocked'; CREATE TABLE heavy (n BIGINT)";

/// Statements for PostgreSQL, MariaDB and MySQL that return when a transaction waits for a row.
const WAITED_FOR: [&str; 3] = [
    "DO $$ BEGIN WHILE NOT EXISTS (SELECT FROM pg_locks WHERE NOT granted) LOOP \
     PERFORM pg_sleep(0.01); END LOOP; END $$",
    "BEGIN NOT ATOMIC WHILE (SELECT variable_value FROM information_schema.global_status \
     WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS') = 0 DO DO SLEEP(0.01); END WHILE; END",
    "CALL until_somebody_waits()",
];

/// MySQL supports blocks only in procedures.
const UNTIL_SOMEBODY_WAITS: &str = "CREATE PROCEDURE until_somebody_waits() BEGIN \
     WHILE (SELECT variable_value FROM performance_schema.global_status \
     WHERE variable_name = 'Innodb_row_lock_current_waits') = 0 DO DO SLEEP(0.01); END WHILE; END";

// S46
async fn deadlock_is_retried<S: Server>() {
    let is_postgres = std::any::type_name::<S>().contains("Postgres");
    // PostgreSQL aborts the transaction that checks for a deadlock first. Ours checks after this
    // time, and the other one must have begun to wait by then.
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
    // Another transaction locks the expired waiter's row and then wants the lock's row. A joining
    // claim locks the lock's row and wants to remove the expired waiter. (MariaDB aborts the
    // transaction that has written less.)
    let first = "INSERT INTO heavy VALUES (1), (2), (3), (4), (5), (6), (7), (8), (9), (10), (11), \
                 (12), (13), (14), (15), (16), (17), (18), (19), (20); \
                 SELECT name FROM leasehold_claims WHERE name = 'blocked' FOR UPDATE";
    let patient = if is_postgres { "SET LOCAL deadlock_timeout = '60s'; " } else { "" };
    let first: &'static str = format!("{patient}{first}").leak();
    // The server itself checks for waiting transactions. They wait only briefly for a row, and
    // checking from here may take longer.
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
    let (go_on, receiver) = tokio::sync::oneshot::channel();
    let theirs = tokio::spawn(server.in_two_steps(&url, [first, then], begun, receiver));
    is_begun.await.unwrap();
    let mutex = waiter.mutex("blocked").lease(lease);
    assert_eq!(server.blocked(), 0);
    go_on.send(()).unwrap();
    let joining = tokio::spawn(async move { mutex.lock().await });
    theirs.await.unwrap().expect("the foreign transaction was aborted instead of leasehold's");
    // There is one deadlock, and another one if we locked the row first again.
    assert!(server.deadlocks() >= 1);
    held.release().await.unwrap();
    let guard = tokio::time::timeout(PATIENCE, joining).await.unwrap().unwrap().unwrap();
    let info = holder.inspect("blocked").await.unwrap().expect("the lock has no holder");
    assert_eq!(info.claims.len(), 1, "doubled: {info:?}");
    assert_eq!(info.claims[0].token, Some(guard.grant()));
    guard.release().await.unwrap();
    assert!(holder.inspect("blocked").await.unwrap().is_none());
}

// S46
async fn rolled_back_join_is_retried_with_the_same_claim<S: Server>() {
    let server = S::with(Setup::new().fast());
    let url = server.database();
    let is_postgres = std::any::type_name::<S>().contains("Postgres");
    let (holder, waiter) = (connect(&url).await, connect(&url).await);
    let held = holder.mutex("undone").lock().await.unwrap();
    // The database undoes the first attempts, and records their claims.
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
    let queued = || async { holder.inspect("undone").await.unwrap().unwrap().claims.len() };
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

/// Waits until this many claims hold or wait. A join whose caller has given up may arrive late, and
/// is then taken back.
async fn until_claims(locks: &Client, name: &str, count: usize) {
    let end = Instant::now() + PATIENCE;
    loop {
        let claims = locks.inspect(name).await.unwrap().map_or(0, |info| info.claims.len());
        if claims == count {
            return;
        }
        assert!(Instant::now() < end, "{claims} claims instead of {count}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

// S04
/// A dropped acquisition is still being executed when its release finds nothing. The release
/// returns only after the claim was removed, so that a client that ends afterwards leaves nothing.
async fn release_waits_for_a_join_in_progress<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let [store, other] = two(&url).await;
    let first = claim("blocked", LONG, LONG);
    holding(&store.join(&first, Mode::Try).await.unwrap());
    assert!(store.leave(&first, None).await.unwrap());
    let blocker = server.hold(&url, BLOCK).await;
    let dropped = claim("blocked", LONG, LONG);
    let joining = tokio::spawn({
        let (store, dropped) = (store.clone(), dropped.clone());
        async move { store.join(&dropped, Mode::Wait).await }
    });
    until("the join waits for the row", async || server.blocked() >= 1).await;
    joining.abort();
    assert!(joining.await.unwrap_err().is_cancelled());
    let leaving = tokio::spawn({
        let (store, dropped) = (store.clone(), dropped.clone());
        async move { store.leave(&dropped, None).await }
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!leaving.is_finished(), "the join may still be executed");
    drop(blocker);
    leaving.await.unwrap().unwrap();
    let left = other.read(&Name::new("blocked").unwrap()).await.unwrap();
    assert!(left.is_none(), "{left:?}");
}

// S46
async fn acquiring_outlasts_a_row_lock_longer_than_the_server_waits<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let locks = connect(&url).await;
    let mutex = locks.mutex("blocked").lease(Duration::from_secs(60));
    release(mutex.lock().await.unwrap()).await;
    let blocker = server.hold(&url, BLOCK).await;
    let taking = tokio::spawn(async move { mutex.lock().await });
    // Error 1205 or 55P03 comes after five seconds.
    tokio::time::sleep(Duration::from_secs(7)).await;
    assert!(!taking.is_finished(), "the row is locked");
    drop(blocker);
    let guard = tokio::time::timeout(PATIENCE, taking).await.unwrap().unwrap().unwrap();
    until_claims(&locks, "blocked", 1).await;
    guard.release().await.unwrap();
    until_claims(&locks, "blocked", 0).await;
}

// S46
async fn a_statement_that_the_server_cuts_short_is_tried_again<S: Server + Hasty>() {
    let server = S::with(Setup::new().fast());
    let url = server.database();
    release(connect(&url).await.mutex("blocked").lock().await.unwrap()).await;
    server.user(&url, "hasty", "SELECT, INSERT, UPDATE, DELETE");
    server.hasty(&url);
    let locks = connect(&url.replace("lh:lh@", "hasty:hasty@")).await;
    let blocker = server.hold(&url, BLOCK).await;
    let mutex = locks.mutex("blocked");
    let taking = tokio::spawn(async move { mutex.lock().await });
    // The first attempt was aborted, and so was a later one.
    until("two statements were aborted", async || server.cut_short() >= 2).await;
    assert!(!taking.is_finished(), "{:?}", taking.await);
    drop(blocker);
    release(taking.await.unwrap().unwrap()).await;
}
