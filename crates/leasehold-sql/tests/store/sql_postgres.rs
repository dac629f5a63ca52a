//! What only PostgreSQL has: a pooler in front of it, and notifications.

use std::time::Duration;

use crate::sql_common::*;
use leasehold::store::sql::SqlStore;
use leasehold::store::{Joined, Mode, Renew, Signal, Store};
use leasehold::{Claim, ErrorKind, Kind, Name};
use testbed::{PgBouncer, Postgres, Proxy, Setup};

#[test]
#[ignore = "runs with ./test.sh --all"]
fn s42_behind_a_pooler_in_transaction_mode() {
    run(async {
        let server = testbed::postgres();
        let direct = server.database();
        let pooler = PgBouncer::before(server);
        let url = pooler.in_front_of(server, &direct) + "?pooler=transaction";
        let clients = [connect(&url).await, connect(&url).await, connect(&direct).await];
        hammer(&clients, "pooled", 6, 10).await;
        // Each transaction may be on another of the pooler's connections: leases do not mind.
        let guard = clients[0].mutex("kept").lease(Duration::from_secs(6)).lock().await.unwrap();
        tokio::time::sleep(Duration::from_secs(9)).await;
        assert!(guard.is_held());
        let error = clients[1].mutex("kept").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        release(guard).await;
    });
}

#[test]
fn s42_round_trips_behind_a_pooler() {
    run(async {
        let server = testbed::postgres();
        let pooler = PgBouncer::before(server);
        let url = pooler.in_front_of(server, &server.database());
        let port = url.rsplit_once('/').and_then(|(base, _)| base.rsplit_once(':')).unwrap().1;
        let proxy = Proxy::before(port.parse().unwrap());
        let url = proxy.in_front_of(port.parse().unwrap(), &url) + "?pooler=transaction&pool=1";
        let locks = connect(&url).await;
        let mut trips = Vec::new();
        for n in 0..10 {
            let mutex = locks.mutex(format!("{}", n % 3));
            let before = proxy.round_trips();
            let guard = mutex.try_lock().await.unwrap();
            let taken = proxy.round_trips();
            guard.release().await.unwrap();
            trips.push((taken - before, proxy.round_trips() - taken));
        }
        // BEGIN and its limits, the statement and COMMIT. Whoever stands still for a second in between loses
        // the connection, and makes another.
        trips.sort_unstable();
        assert_eq!(trips[..8], [(1, 1); 8], "{trips:?}");
    });
}

#[test]
fn s42_a_pooler_that_nobody_told_us_of() {
    run(async {
        let server = testbed::postgres();
        let database = server.database();
        // One refuses what our sessions are started with, the other drops it.
        let ignored = "extra_float_digits,options";
        for pooler in [PgBouncer::before(server), PgBouncer::that_ignores(server, ignored)] {
            let url = pooler.in_front_of(server, &database);
            let error = leasehold::connect(&url).await.expect_err("it is found out");
            assert_told(&error, ErrorKind::Config, "lh:lh");
            assert!(format!("{error:#}").contains("pooler=transaction"), "{error}");
            let locks = connect(&(url + "?pooler=transaction")).await;
            release(locks.mutex("told").lock().await.unwrap()).await;
        }
    });
}

#[test]
fn s24_notifications_that_nobody_hears() {
    run(async {
        let server = testbed::postgres();
        let url = server.database();
        let proxy = Proxy::before(server.port());
        let waiting = connect(&proxy.in_front_of(server.port(), &url)).await;
        let holder = connect(&url).await;
        for _ in 0..3 {
            let guard = holder.mutex("deaf").lock().await.unwrap();
            let (queued, mut in_queue) = tokio::sync::mpsc::unbounded_channel();
            let mutex = waiting.mutex("deaf").on_waiting(move |_| {
                // Told again with each heartbeat; the test listens only once.
                let _ = queued.send(());
            });
            let waiter = tokio::spawn(async move { mutex.lock().await });
            in_queue.recv().await.unwrap();
            // The listener's connection goes, with whatever is sent meanwhile.
            proxy.refuse(true);
            release(guard).await;
            proxy.refuse(false);
            let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
            release(guard).await;
        }
    });
}

/// The connection that listens may have served for a call since.
const LISTENERS: &str = "SELECT pid FROM pg_stat_activity \
     WHERE datname = current_database() AND usename = 'lh' AND query LIKE 'LISTEN%'";
const SESSIONS: &str = "SELECT pid FROM pg_stat_activity \
     WHERE datname = current_database() AND usename = 'lh'";

/// A firewall that forgets a connection tells nobody: the listener would listen for ever.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn s24_a_listener_that_fell_silent_is_replaced() {
    run(async {
        let server = testbed::postgres();
        let url = server.database();
        let proxy = Proxy::before(server.port());
        let here = tokio::runtime::Handle::current();
        let open = async |url: &str| SqlStore::open(url, &here).await.unwrap();
        let waiting = open(&proxy.in_front_of(server.port(), &url)).await;
        let holder = open(&url).await;
        // Heartbeats are the caller's: nobody here learns of a grant but by being told.
        let claim = |lease| {
            let mut claim = Claim::new(Name::new("deaf").unwrap(), Kind::Mutex, 1, 1).unwrap();
            (claim.lease, claim.waiter_lease) = (lease, lease);
            claim
        };
        let lease = Duration::from_secs(600);
        for silent in [false, true] {
            let (held, waits) = (claim(lease), claim(lease));
            let what = if silent { "after it fell silent" } else { "the first time" };
            assert!(matches!(holder.join(&held, Mode::Try).await, Ok(Joined::Holding { .. })));
            assert!(matches!(waiting.join(&waits, Mode::Wait).await, Ok(Joined::Waiting(_))));
            if silent {
                proxy.silence();
            }
            // It listens; or listens anew, beside what the server knows of the silent one.
            let pids = |sql| -> Vec<String> {
                Server::admin(server, &url, sql).lines().map(str::to_owned).collect()
            };
            let before = if silent { pids(SESSIONS) } else { Vec::new() };
            let end = std::time::Instant::now() + PATIENCE;
            while pids(LISTENERS).iter().all(|pid| before.contains(pid)) {
                assert!(std::time::Instant::now() < end, "nobody listens {what}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            assert!(holder.leave(&held, None).await.unwrap());
            let granted = async {
                while !matches!(waiting.changed(&waits).await.unwrap(), Signal::Granted(_)) {}
            };
            tokio::time::timeout(PATIENCE, granted).await.expect(what);
            // The connection for calls may be as silent; what is left then ends with the test.
            assert!(silent || waiting.leave(&waits, None).await.unwrap());
        }
    });
}

/// A notification wakes every session that listens, so a client that does not wait must not listen.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn client_listens_only_while_it_waits() {
    run(async {
        let mut setup = Setup::new().fast();
        for setting in ["log_statement=all", "log_disconnections=on", "log_line_prefix=%p "] {
            setup = setup.arg("-c").arg(setting);
        }
        let server = Postgres::with(setup);
        let url = server.database();
        let runtime = tokio::runtime::Handle::current();
        let [holder, waiting] = [SqlStore::open(&url, &runtime), SqlStore::open(&url, &runtime)];
        let (holder, waiting) = (holder.await.unwrap(), waiting.await.unwrap());
        let claim = || Claim::new(Name::new("quiet").unwrap(), Kind::Mutex, 1, 1).unwrap();
        // The log keeps every statement, so a poll cannot come too late to see one.
        let sessions = |said: &str| -> Vec<String> {
            let log = server.log();
            let lines = log.lines().filter(|line| line.contains(said));
            lines.filter_map(|line| line.split(' ').next().map(str::to_owned)).collect()
        };
        // It renews meanwhile, for which it borrows the connection that listens.
        let other = Claim::new(Name::new("renewed").unwrap(), Kind::Mutex, 1, 1).unwrap();
        assert!(matches!(waiting.join(&other, Mode::Try).await, Ok(Joined::Holding { .. })));
        let (renewing, lease) = (waiting.clone(), other.lease);
        let _renewing = tokio::spawn(async move {
            loop {
                renewing.renew(&[Renew { claim: other.clone(), lease }]).await.unwrap();
                tokio::time::sleep(Duration::from_secs(3)).await;
            }
        });
        for _ in 0..2 {
            let (held, waits) = (claim(), claim());
            let (before, ended) = (sessions(": LISTEN").len(), sessions(": UNLISTEN").len());
            assert!(matches!(holder.join(&held, Mode::Try).await, Ok(Joined::Holding { .. })));
            assert!(matches!(waiting.join(&waits, Mode::Wait).await, Ok(Joined::Waiting(_))));
            until("the waiter listens", async || sessions(": LISTEN").len() > before).await;
            let listener = sessions(": LISTEN").pop().unwrap();
            assert!(holder.leave(&held, None).await.unwrap());
            let granted = async {
                while !matches!(waiting.changed(&waits).await.unwrap(), Signal::Granted(_)) {}
            };
            tokio::time::timeout(PATIENCE, granted).await.expect("the waiter is notified");
            assert!(waiting.leave(&waits, None).await.unwrap());
            until("the waiter has stopped listening", async || {
                // Or, where it had no answer in time, it has closed the connection.
                sessions(": UNLISTEN").iter().skip(ended).any(|pid| *pid == listener)
                    || sessions("LOG:  disconnection").contains(&listener)
            })
            .await;
        }
    });
}

#[test]
fn read_only_standby() {
    run(async {
        // It is killed, and must have kept the tables.
        let server = Postgres::start();
        let url = server.database();
        let before = connect(&url).await;
        release(before.mutex("first").lock().await.unwrap()).await;
        server.become_standby();
        let error = leasehold::connect(&url).await.expect_err("it cannot be written to");
        assert_told(&error, ErrorKind::Denied, "lh:lh");
        assert!(format!("{error:#}").contains("connect to the primary"), "{error}");
        // Who was connected before learns it by the next lock.
        let error = before.mutex("next").try_lock().await.unwrap_err();
        assert_told(&error, ErrorKind::Unreachable, "lh:lh");
        assert!(format!("{error:#}").contains("read-only"), "{error}");
    });
}

#[test]
fn who_cannot_listen_still_notifies() {
    run(async {
        let server = testbed::postgres();
        let direct = server.database();
        let pooler = PgBouncer::before(server);
        let holder = connect(&(pooler.in_front_of(server, &direct) + "?pooler=transaction")).await;
        let waiting = connect(&direct).await;
        let store = waiting.store();
        for _ in 0..5 {
            let guard = holder.mutex("mixed").lock().await.unwrap();
            // The store alone: no heartbeat makes up for what is not heard.
            let mut waiter = Claim::new(Name::new("mixed").unwrap(), Kind::Mutex, 1, 1).unwrap();
            (waiter.lease, waiter.waiter_lease) = (PATIENCE * 5, PATIENCE * 5);
            let joined = store.join(&waiter, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
            release(guard).await;
            let told = async {
                while store.changed(&waiter).await.unwrap() == Signal::Ask {
                    let joined = store.join(&waiter, Mode::Wait).await.unwrap();
                    if matches!(joined, Joined::Holding { .. }) {
                        break;
                    }
                }
            };
            tokio::time::timeout(PATIENCE, told).await.expect("nobody was told");
            assert!(store.leave(&waiter, None).await.unwrap());
        }
    });
}

/// Fails the first insert of a claim as another transaction in the way would.
const FAIL_ONCE: &str = "CREATE SEQUENCE public.inserts; GRANT USAGE ON public.inserts TO lh; \
     CREATE FUNCTION fail_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
     IF nextval('public.inserts') = 1 THEN RAISE EXCEPTION 'on purpose' USING ERRCODE = '40001'; END IF; \
     RETURN NEW; END $$; CREATE TRIGGER fail_once BEFORE INSERT ON leasehold_claims \
     FOR EACH ROW EXECUTE FUNCTION fail_once()";

/// Behind a pooler every statement stands in a transaction, also after one was rolled back: outside
/// of one it would be prepared on one of the server's sessions and run on another.
#[test]
fn s42_s46_after_a_conflict_behind_a_pooler_all_is_still_in_transactions() {
    run(async {
        let setup = Setup::new().fast().arg("-c").arg("log_statement=all");
        let server = Postgres::with(setup.arg("-c").arg("log_line_prefix=%p "));
        let direct = Server::database(&server);
        release(connect(&direct).await.mutex("first").lock().await.unwrap()).await;
        Server::admin(&server, &direct, FAIL_ONCE);
        let pooler = PgBouncer::before(&server);
        let url = pooler.in_front_of(&server, &direct) + "?pooler=transaction&pool=1";
        let locks = connect(&url).await;
        let before = server.log().len();
        let semaphore = locks.semaphore("permits", 2);
        let permits = [semaphore.acquire().await.unwrap(), semaphore.acquire().await.unwrap()];
        for n in 0..3 {
            locks.mutex(format!("{n}")).lock().await.unwrap().release().await.unwrap();
        }
        permits.into_iter().for_each(drop);
        let log = server.log().split_off(before);
        assert!(log.contains("on purpose"), "nothing was in the way");
        let mut open = std::collections::HashSet::new();
        let mut executed = 0;
        for line in log.lines() {
            let (session, what) = line.split_once(' ').unwrap_or_default();
            let Some((_, what)) = what.split_once("LOG:  ") else { continue };
            let message = what.strip_prefix("statement: ").unwrap_or(what);
            if message.starts_with("BEGIN") {
                // A client that is stopped here keeps a lock's row for so long.
                for limit in ["idle_in_transaction_session_timeout", "lock_timeout"] {
                    assert!(what.contains(&format!("SET LOCAL {limit}")), "no limit: {what}");
                }
            }
            // A message may be several statements; what is executed alone is one.
            for statement in message.split("; ") {
                match statement.split(' ').next().unwrap_or_default() {
                    "BEGIN" => drop(open.insert(session)),
                    "COMMIT" | "ROLLBACK" => drop(open.remove(session)),
                    "execute" | "SELECT" | "INSERT" | "WITH" => {
                        executed += 1;
                        assert!(open.contains(session), "outside of a transaction: {what}");
                    }
                    _ => {}
                }
            }
        }
        assert!(executed > 10, "looked at nothing: {log}");
    });
}
