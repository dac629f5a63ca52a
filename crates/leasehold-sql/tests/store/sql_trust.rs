//! Other roles of the database as attackers, and URLs that lead to another place than before.

use std::time::Duration;

use crate::sql_common::*;
use leasehold::store::sql::{PoolExt, SqlStore};
use leasehold::store::{Joined, Mode, Renewal, Signal, Store};
use leasehold::{Client, ErrorKind};
use sqlx::Connection;
use sqlx::postgres::PgPoolOptions;
use testbed::{MariaDb, Postgres, Setup};

/// Operators and functions that match leasehold's statements better than the server's own. Each of
/// them fails, so running one is noticed.
const HOSTILE: &str = "
    CREATE FUNCTION evil(float8, int4) RETURNS float8 LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile %', current_user; END $$;
    CREATE FUNCTION evil(numeric, int4) RETURNS numeric LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile %', current_user; END $$;
    CREATE FUNCTION evil(float8, int8) RETURNS float8 LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile %', current_user; END $$;
    CREATE FUNCTION evil(text, int8) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile %', current_user; END $$;
    CREATE FUNCTION evil(text, int4) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile %', current_user; END $$;
    CREATE FUNCTION evil(text, name) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile %', current_user; END $$;
    CREATE FUNCTION evil(int8, int8) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile %', current_user; END $$;
    CREATE FUNCTION evil(name, text) RETURNS bool LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile %', current_user; END $$;
    CREATE OPERATOR * (LEFTARG = float8, RIGHTARG = int4, FUNCTION = evil);
    CREATE OPERATOR * (LEFTARG = float8, RIGHTARG = int8, FUNCTION = evil);
    CREATE OPERATOR * (LEFTARG = numeric, RIGHTARG = int4, FUNCTION = evil);
    CREATE OPERATOR || (LEFTARG = text, RIGHTARG = int8, FUNCTION = evil);
    CREATE OPERATOR || (LEFTARG = text, RIGHTARG = int4, FUNCTION = evil);
    CREATE OPERATOR || (LEFTARG = text, RIGHTARG = name, FUNCTION = evil);
    CREATE OPERATOR || (LEFTARG = int8, RIGHTARG = int8, FUNCTION = evil);
    CREATE FUNCTION array_to_string(text[], text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
    CREATE FUNCTION array_to_string(\"char\"[], text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
    CREATE FUNCTION has_schema_privilege(oid, name) RETURNS bool LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
    CREATE FUNCTION evil_step(json, int8) RETURNS json LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
    CREATE AGGREGATE json_agg(int8) (SFUNC = evil_step, STYPE = json);
    CREATE FUNCTION to_regclass(name) RETURNS regclass LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
    CREATE FUNCTION pg_notify(name, text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
    CREATE FUNCTION pg_notify(text, name) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$";

/// Acquires, waits, hands over, renews and lists, so that most statements of a store are run.
async fn exercised(clients: [&Client; 2], name: &str) {
    let [one, other] = clients;
    let lease = Duration::from_secs(3);
    let held = one.mutex(name).lease(lease).lock().await.unwrap_or_else(|e| panic!("{e}"));
    let (queued, mut in_queue) = tokio::sync::mpsc::unbounded_channel();
    let waiter = |locks: &Client| {
        let queued = queued.clone();
        let mutex = locks.mutex(name).lease(lease).on_waiting(move |_| {
            let _ = queued.send(());
        });
        tokio::spawn(async move { mutex.lock().await })
    };
    let mut waiters = Vec::new();
    for locks in [other, one, other] {
        waiters.push(waiter(locks));
        in_queue.recv().await.unwrap();
    }
    tokio::time::sleep(lease / 2).await;
    assert!(held.is_held());
    assert_eq!(one.list(name).await.unwrap().len(), 1);
    release(held).await;
    for waiter in waiters {
        let turn = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap();
        release(turn.unwrap_or_else(|e| panic!("{e}"))).await;
    }
    let readers = [
        one.semaphore(format!("{name} permits"), 2),
        other.semaphore(format!("{name} permits"), 2),
    ];
    for permits in readers {
        drop(permits.acquire().await.unwrap_or_else(|e| panic!("{e}")));
    }
}

#[test]
fn operator_of_another_role_is_never_run() {
    run(async {
        let server = testbed::postgres();
        let url = server.database();
        let before = [connect(&url).await, connect(&url).await];
        server.admin(database_of(&url), HOSTILE);
        exercised([&before[0], &before[1]], "before").await;
        let after = [connect(&url).await, connect(&url).await];
        exercised([&after[0], &after[1]], "after").await;
        let pooled = connect(&(url.clone() + "?pooler=transaction")).await;
        exercised([&pooled, &after[0]], "pooled").await;
        let pool = PgPoolOptions::new().max_connections(3).connect(&url).await.unwrap();
        let beside = leasehold::builder().postgres(&pool, "").await.unwrap();
        exercised([&beside, &beside], "beside").await;
        SqlStore::open(&url, &tokio::runtime::Handle::current())
            .await
            .unwrap()
            .diagnose()
            .await
            .unwrap();
        // Statements in the caller's transactions do not run them either.
        leasehold::database::install(&pool).await.unwrap();
        let ran = leasehold::once("done")
            .run(&pool, |_| async { Ok::<_, leasehold::Error>("1".to_owned()) })
            .await;
        assert!(ran.is_ok(), "{ran:?}");
    });
}

/// A pool whose sessions are set to another schema locks in the same tables.
#[test]
fn pool_with_another_search_path_locks_in_the_same_tables() {
    run(async {
        let server = testbed::postgres();
        let url = server.database();
        let database = database_of(&url);
        server.admin(database, "CREATE SCHEMA shop AUTHORIZATION lh");
        let plain = connect(&url).await;
        let pool = PgPoolOptions::new().max_connections(8).after_connect(|connection, _| {
            Box::pin(async move {
                sqlx::Executor::execute(connection, "SET search_path = shop").await.map(drop)
            })
        });
        let pool = pool.connect(&url).await.unwrap();
        let beside = leasehold::builder().postgres(&pool, "").await.unwrap();
        let mut held = tokio::task::JoinSet::new();
        for n in 0..30 {
            let mutex = beside.mutex(format!("x{n}"));
            held.spawn(async move { mutex.lock().await.unwrap() });
        }
        let held = held.join_all().await;
        for n in 0..30 {
            let tried = plain.mutex(format!("x{n}")).try_lock().await.unwrap_err();
            assert_eq!(tried.kind(), ErrorKind::Contended, "{tried}");
        }
        let made =
            server.admin(database, "SELECT count(*) FROM pg_tables WHERE schemaname = 'shop'");
        assert_eq!(made, "0");
        for guard in held {
            release(guard).await;
        }
    });
}

/// A user with a schema of its own does not silently get separate locks.
#[test]
fn schema_of_a_user_does_not_shadow_the_tables() {
    run(async {
        let server = Postgres::with(Setup::new());
        let url = Server::database(&server);
        let database = database_of(&url).to_owned();
        let first = connect(&url).await;
        let guard = first.mutex("job").lock().await.unwrap();
        server.admin(
            &database,
            "CREATE ROLE app2 LOGIN PASSWORD 'app2'; CREATE SCHEMA AUTHORIZATION app2",
        );
        let theirs = url.replace("lh:lh@", "app2:app2@");
        // The tables exist, but a permission is missing.
        let error = leasehold::connect(&theirs).await.expect_err("connected without a permission");
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        server.admin(
            &database,
            "REVOKE USAGE ON SCHEMA public FROM PUBLIC; GRANT USAGE ON SCHEMA public TO lh",
        );
        let error =
            leasehold::connect(&theirs).await.expect_err("connected without another permission");
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        let made =
            server.admin(&database, "SELECT count(*) FROM pg_tables WHERE schemaname = 'app2'");
        assert_eq!(made, "0");
        // The user's search path does not even include the schema.
        server.admin(&database, "ALTER ROLE app2 SET search_path = app2");
        let error = leasehold::connect(&theirs)
            .await
            .expect_err("connected, although the tables are in another schema");
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("schema=public"), "{error}");
        // A user that wants separate tables names the schema. After that, both schemas have tables.
        let own = connect(&format!("{theirs}?schema=app2")).await;
        release(own.mutex("job").lock().await.unwrap()).await;
        server.admin(&database, "ALTER ROLE app2 SET search_path = app2, public");
        let error = leasehold::connect(&theirs)
            .await
            .expect_err("connected, although two schemas have the tables");
        assert!(error.to_string().contains("schema=app2 or schema=public"), "{error}");
        release(guard).await;
    });
}

/// Sends what a role that may only read can send.
async fn forge(reader: &mut sqlx::PgConnection, times: usize) {
    let sql = "SELECT count(pg_notify(session, claim || ' ' || token::text)) FROM leasehold_claims, \
               generate_series(1, $1) WHERE standing = 0";
    sqlx::query(sqlx::AssertSqlSafe(sql))
        .bind(i32::try_from(times).unwrap())
        .execute(reader)
        .await
        .unwrap();
}

#[test]
fn forged_notification_grants_nothing_and_costs_no_position() {
    run(async {
        let server = testbed::postgres();
        let url = server.database();
        let [one, other] = two(&url).await;
        let [holder, waiter] = [claim("job", LONG, LONG), claim("job", LONG, LONG)];
        holding(&one.join(&holder, Mode::Wait).await.unwrap());
        let place = waiting(&other.join(&waiter, Mode::Wait).await.unwrap());
        // A client that starts to listen is asked to poll.
        while let Ok(Ok(Signal::Ask)) =
            tokio::time::timeout(Duration::from_secs(2), other.changed(&waiter)).await
        {
            assert!(matches!(renewed(&other, &waiter).await, Renewal::Waiting(_)));
        }
        server.admin(
            database_of(&url),
            "CREATE ROLE reader LOGIN PASSWORD 'reader'; GRANT pg_read_all_data TO reader",
        );
        let mut reader =
            sqlx::PgConnection::connect(&url.replace("lh:lh@", "reader:reader@")).await.unwrap();
        for _ in 0..20 {
            forge(&mut reader, 50).await;
            let granted =
                tokio::time::timeout(Duration::from_millis(50), other.changed(&waiter)).await;
            assert!(
                !matches!(granted, Ok(Ok(Signal::Granted(_)))),
                "a grant was forged: {granted:?}"
            );
        }
        let still = renewed(&other, &waiter).await;
        assert!(matches!(&still, Renewal::Waiting(at) if at.token == Some(place)), "{still:?}");
        // A real grant is still notified, soon.
        forge(&mut reader, 50).await;
        assert!(one.leave(&holder, None).await.unwrap());
        let granted = async {
            loop {
                if let Signal::Granted(token) = other.changed(&waiter).await.unwrap() {
                    return token;
                }
            }
        };
        let token = tokio::time::timeout(Duration::from_secs(5), granted)
            .await
            .expect("the waiter was not notified");
        assert_eq!(token, place);
        assert!(matches!(other.join(&waiter, Mode::Wait).await.unwrap(), Joined::Holding { .. }));
        assert!(other.leave(&waiter, None).await.unwrap());
    });
}

/// From some moment on, the name leads to another database.
#[test]
fn replaced_postgres_database_is_refused() {
    run(async {
        let server = Postgres::with(Setup::new());
        let url = Server::database(&server);
        let database = database_of(&url).to_owned();
        let before = connect(&url).await;
        let guard = before.mutex("job").lease(Duration::from_secs(4)).lock().await.unwrap();
        let end = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = '{database}'"
        );
        server.admin("postgres", &format!("ALTER DATABASE {database} ALLOW_CONNECTIONS false"));
        server.admin("postgres", &end);
        until("all sessions have ended", async || server.admin("postgres", &end) == "0").await;
        server.admin("postgres", &format!("ALTER DATABASE {database} RENAME TO old"));
        server.admin("postgres", &format!("CREATE DATABASE {database} OWNER lh"));
        let after = connect(&url).await;
        let theirs = after.mutex("job").lock().await.unwrap();
        let error = before.mutex("other").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert!(error.to_string().contains("another database server or database"), "{error}");
        assert_eq!(error.to_string().lines().count(), 1);
        until("the holder has lost its lock", async || !guard.is_held()).await;
        assert!(theirs.is_held());
        release(theirs).await;
    });
}

#[test]
fn replaced_mysql_tables_are_refused() {
    run(async {
        let server = MariaDb::with(Setup::new());
        let url = Server::database(&server);
        let before = connect(&url).await;
        let guard = before.mutex("job").lease(Duration::from_secs(4)).lock().await.unwrap();
        let renamed =
            ["locks", "claims", "schema"].map(|table| format!("leasehold_{table} TO old_{table}"));
        Server::admin(&server, &url, &format!("RENAME TABLE {}", renamed.join(", ")));
        server.end_sessions();
        let after = connect(&url).await;
        server.end_sessions();
        let theirs = after.mutex("job").lock().await.unwrap();
        let error = before.mutex("other").try_lock().await.unwrap_err();
        assert!(error.to_string().contains("other tables"), "{error}");
        until("the holder has lost its lock", async || !guard.is_held()).await;
        assert!(theirs.is_held());
        release(theirs).await;
    });
}

/// A waiter survives the transient errors that a holder survives.
async fn survive<S: Server>(url: &str, server: &S, fail: &str, mend: &str) {
    let (holder, waits) = (connect(url).await, connect(url).await);
    let guard = holder.mutex("job").lock().await.unwrap();
    let (queued, mut in_queue) = tokio::sync::mpsc::unbounded_channel();
    let mutex = waits.mutex("job").on_waiting(move |_| {
        let _ = queued.send(());
    });
    let waiter = tokio::spawn(async move { mutex.lock().await });
    in_queue.recv().await.unwrap();
    server.script(url, fail).await;
    // Longer than the pause between two heartbeats of a waiter.
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(!waiter.is_finished(), "the waiter gave up: {:?}", waiter.await);
    server.script(url, mend).await;
    until("the waiter holds the lock", async || guard.is_held()).await;
    release(guard).await;
    let turn = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap();
    release(turn.unwrap_or_else(|e| panic!("{e}"))).await;
}

/// Runs the futures concurrently, on one thread.
async fn side_by_side(all: Vec<impl Future<Output = ()> + 'static>) {
    let tasks = tokio::task::LocalSet::new();
    let running: Vec<_> = all.into_iter().map(|one| tasks.spawn_local(one)).collect();
    tasks
        .run_until(async {
            for one in running {
                one.await.unwrap();
            }
        })
        .await;
}

#[test]
fn waiter_survives_temporary_errors_of_postgres() {
    run(async {
        let server = testbed::postgres();
        let mut running = Vec::new();
        for code in ["53200", "53400", "58030", "57000", "XX000", "25P02", "ZZ123"] {
            running.push(async move {
                let url = server.database();
                // Creates the tables first.
                drop(connect(&url).await);
                let fail = format!(
                    "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                     RAISE 'on purpose' USING ERRCODE = '{code}'; END $$; \
                     CREATE TRIGGER fail BEFORE UPDATE OR INSERT OR DELETE ON leasehold_claims \
                     FOR EACH STATEMENT EXECUTE FUNCTION fail(); \
                     CREATE TRIGGER fail BEFORE UPDATE OR INSERT OR DELETE ON leasehold_locks \
                     FOR EACH STATEMENT EXECUTE FUNCTION fail()"
                );
                let mend =
                    "DROP TRIGGER fail ON leasehold_claims; DROP TRIGGER fail ON leasehold_locks";
                survive(&url, server, &fail, mend).await;
            });
        }
        side_by_side(running).await;
    });
}

#[test]
fn waiter_survives_temporary_errors_of_mysql_and_its_clusters() {
    run(async {
        let server = testbed::mariadb();
        let mut running = Vec::new();
        for (number, state) in [
            (1047, "08S01"),
            (3100, "HY000"),
            (3032, "08S01"),
            (9001, "HY000"),
            (1129, "HY000"),
            (7777, "HY000"),
        ] {
            running.push(async move {
                let url = server.database();
                drop(connect(&url).await);
                let signal = format!("SIGNAL SQLSTATE '{state}' SET MYSQL_ERRNO = {number}");
                let fail = ["claims", "locks"].map(|table| {
                    format!(
                        "CREATE TRIGGER fail_{table} BEFORE UPDATE ON leasehold_{table} FOR EACH ROW {signal}"
                    )
                });
                let mend = "DROP TRIGGER fail_claims; DROP TRIGGER fail_locks";
                survive(&url, server, &fail.join("; "), mend).await;
            });
        }
        side_by_side(running).await;
    });
}

/// A message that exceeds the server's limit is divided. No claim is lost because of other claims.
#[test]
fn renewals_are_split_to_fit_the_servers_packet_limit() {
    run(async {
        let server = MariaDb::with(Setup::new().fast().arg("--max-allowed-packet=65536"));
        let url = Server::database(&server);
        let [store, _] = two(&url).await;
        let long = "x".repeat(200);
        let mut renewals = Vec::new();
        for n in 0..300 {
            let claim = claim(&format!("{long} {n}"), LONG, LONG);
            holding(&store.join(&claim, Mode::Try).await.unwrap());
            renewals.push(leasehold::store::Renew { lease: LONG, claim });
        }
        let renewed = store.renew(&renewals).await.unwrap();
        let held = renewed.iter().filter(|r| matches!(r, Renewal::Holding { .. })).count();
        assert_eq!(held, renewals.len());
    });
}

/// A backup's read lock blocks writes. Attempts must not leave threads behind at the server.
#[test]
fn read_lock_of_a_backup_does_not_multiply_sessions() {
    run(async {
        let server = MariaDb::with(Setup::new().fast());
        let url = Server::database(&server);
        let locks = connect(&url).await;
        let guard = locks.mutex("job").lease(Duration::from_secs(60)).lock().await.unwrap();
        let before = server.sessions(&url).0;
        let admin = url.replace("lh:lh@", "admin:admin@");
        let mut backup = sqlx::MySqlConnection::connect(&admin).await.unwrap();
        sqlx::raw_sql("LOCK TABLES leasehold_locks READ, leasehold_claims READ")
            .execute(&mut backup)
            .await
            .unwrap();
        let mut trying = tokio::task::JoinSet::new();
        for _ in 0..12 {
            let mutex = locks.mutex("another");
            trying.spawn(async move {
                let tried = tokio::time::timeout(Duration::from_secs(1), mutex.try_lock()).await;
                drop(tried);
            });
            tokio::time::sleep(Duration::from_millis(1_100)).await;
        }
        trying.join_all().await;
        // One session is the backup's. A client has four for calls, two for renewals, and two to be
        // woken on.
        let during = server.sessions(&url).0;
        assert!(during <= before.max(8) + 3, "{during} sessions, {before} before");
        drop(backup);
        assert!(guard.is_held());
        until("another lock can be acquired", async || {
            locks.mutex("another").try_lock().await.is_ok()
        })
        .await;
        release(guard).await;
    });
}

/// Otherwise work would be done twice, because the key is rolled back with the connection.
#[test]
fn once_refuses_mysql_sessions_without_autocommit() {
    run(async {
        let server = testbed::mariadb();
        let url = server.database();
        let pool = sqlx::mysql::MySqlPoolOptions::new().max_connections(2);
        let plain = pool.clone().connect(&url).await.unwrap();
        leasehold::database::install(&plain).await.unwrap();
        let pool = pool.after_connect(|connection, _| {
            Box::pin(async move {
                sqlx::Executor::execute(connection, "SET autocommit = 0").await.map(drop)
            })
        });
        let pool = pool.connect(&url).await.unwrap();
        let ran = leasehold::once("k")
            .run(&pool, |_| async { Ok::<_, leasehold::Error>("1".to_owned()) })
            .await;
        let error = ran.expect_err("`once` ran without autocommit");
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("autocommit=1"), "{error}");
        let ran = leasehold::once("k")
            .run(&plain, |_| async { Ok::<_, leasehold::Error>("1".to_owned()) })
            .await;
        assert!(ran.unwrap().is_first());
    });
}

/// The driver does not support this login method. The error must report that, and not an
/// unreachable server.
#[test]
fn unsupported_login_method_is_named() {
    run(async {
        // The newest server is installed without its plugins.
        let server = MariaDb::with(Setup::oldest());
        let url = Server::database(&server);
        let admin = "INSTALL SONAME 'auth_ed25519'; CREATE USER 'ed'@'127.0.0.1' IDENTIFIED VIA ed25519 USING \
                     PASSWORD('ed')";
        Server::admin(&server, &url, admin);
        let error = leasehold::connect(url.replace("lh:lh@", "ed:ed@")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("client_ed25519"), "{error}");
    });
}
