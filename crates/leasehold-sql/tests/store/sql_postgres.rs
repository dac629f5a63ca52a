//! PostgreSQL only: a pooler in front of the server, and notifications.

use std::time::Duration;

use crate::sql_common::*;
use leasehold::store::sql::SqlStore;
use leasehold::store::{Claim, Joined, Mode, Renew, Signal, Store};
use leasehold::{ErrorKind, Kind, Name};
use testbed::{PgBouncer, Postgres, Proxy, Setup};

// S42
#[test]
#[ignore = "runs with ./test.sh --all"]
fn everything_works_behind_a_pooler_in_transaction_mode() {
    run(async {
        let server = testbed::postgres();
        let direct = server.database();
        let pooler = PgBouncer::before(server);
        let url = pooler.in_front_of(server, &direct) + "?pooler=transaction";
        let clients = [connect(&url).await, connect(&url).await, connect(&direct).await];
        hammer(&clients, "pooled", 6, 10).await;
        // Each transaction may use another of the pooler's connections, which does not affect
        // leases.
        let guard = clients[0].mutex("kept").lease(Duration::from_secs(6)).lock().await.unwrap();
        tokio::time::sleep(Duration::from_secs(9)).await;
        assert!(guard.is_held());
        let error = clients[1].mutex("kept").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        release(guard).await;
    });
}

// S42
#[test]
fn acquire_and_release_take_one_round_trip_each_behind_a_pooler() {
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
        // One trip has BEGIN with its limits, the statement and COMMIT. A client that is paused for
        // a second in between loses the connection and opens another.
        trips.sort_unstable();
        assert_eq!(trips[..8], [(1, 1); 8], "{trips:?}");
    });
}

// S42
#[test]
fn undeclared_pooler_is_detected() {
    run(async {
        let server = testbed::postgres();
        let database = server.database();
        // One pooler refuses the startup parameters of our sessions, and the other ignores them.
        let ignored = "extra_float_digits,options";
        for pooler in [PgBouncer::before(server), PgBouncer::that_ignores(server, ignored)] {
            let url = pooler.in_front_of(server, &database);
            let error = leasehold::connect(&url)
                .await
                .expect_err("connected through a pooler that was not detected");
            assert_told(&error, ErrorKind::Config, "lh:lh");
            assert!(format!("{error:#}").contains("pooler=transaction"), "{error}");
            let locks = connect(&(url + "?pooler=transaction")).await;
            release(locks.mutex("notified").lock().await.unwrap()).await;
        }
    });
}

// S24
#[test]
fn grant_is_found_although_its_notification_is_lost() {
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
                // Notified again with each heartbeat, but the test receives only once.
                let _ = queued.send(());
            });
            let waiter = tokio::spawn(async move { mutex.lock().await });
            in_queue.recv().await.unwrap();
            // The listener's connection is lost, with everything that is sent in that time.
            proxy.refuse(true);
            release(guard).await;
            proxy.refuse(false);
            let guard = tokio::time::timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap();
            release(guard).await;
        }
    });
}

// S24
/// If a firewall drops a connection's state, no error is reported. Without a check the listener
/// would wait forever.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn silent_listener_is_replaced() {
    run(async {
        let server = Postgres::with(Setup::new().fast().arg("-c").arg("log_statement=all"));
        let url = server.database();
        let proxy = Proxy::before(server.port());
        let here = tokio::runtime::Handle::current();
        let open = async |url: &str| SqlStore::open(url, &here).await.unwrap();
        let waiting = open(&proxy.in_front_of(server.port(), &url)).await;
        let holder = open(&url).await;
        // The test sends no heartbeats, so a grant can only be found by a notification.
        let claim = |lease| {
            let mut claim = Claim::new(Name::new("deaf").unwrap(), Kind::Mutex, 1, 1).unwrap();
            (claim.lease, claim.waiter_lease) = (lease, lease);
            claim
        };
        let lease = Duration::from_secs(600);
        for silent in [false, true] {
            let (held, waits) = (claim(lease), claim(lease));
            let what = if silent {
                "a notification of a subscription on a new connection"
            } else {
                "a notification of the first subscription"
            };
            assert!(matches!(holder.join(&held, Mode::Try).await, Ok(Joined::Holding { .. })));
            assert!(matches!(waiting.join(&waits, Mode::Wait).await, Ok(Joined::Waiting(_))));
            if silent {
                proxy.silence();
            }
            // It listens, or listens again on a new connection. The log has every statement, so
            // this is seen even if a call has used the connection since.
            let listened = || server.log().matches(": LISTEN").count();
            let before = if silent { listened() } else { 0 };
            until(what, async || listened() > before).await;
            assert!(holder.leave(&held, None).await.unwrap());
            let granted = async {
                while !matches!(waiting.changed(&waits).await.unwrap(), Signal::Granted(_)) {}
            };
            tokio::time::timeout(PATIENCE, granted).await.expect(what);
            // The connection for calls may not answer either. Claims that remain then end with the
            // test.
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
        let sessions = |reason: &str| -> Vec<String> {
            let log = server.log();
            let lines = log.lines().filter(|line| line.contains(reason));
            lines.filter_map(|line| line.split(' ').next().map(str::to_owned)).collect()
        };
        // It also renews, for which it borrows the listening connection.
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
                // Or it has closed the connection, because it got no answer in time.
                sessions(": UNLISTEN").iter().skip(ended).any(|pid| *pid == listener)
                    || sessions("LOG:  disconnection").contains(&listener)
            })
            .await;
        }
    });
}

#[test]
fn read_only_standby_is_refused() {
    run(async {
        // It is killed, so it must store the tables durably.
        let server = Postgres::start();
        let url = server.database();
        let before = connect(&url).await;
        release(before.mutex("first").lock().await.unwrap()).await;
        server.become_standby();
        let error = leasehold::connect(&url).await.expect_err("connected to a standby");
        assert_told(&error, ErrorKind::Denied, "lh:lh");
        assert!(format!("{error:#}").contains("connect to the primary"), "{error}");
        // A client that was connected before finds out at its next lock.
        let error = before.mutex("next").try_lock().await.unwrap_err();
        assert_told(&error, ErrorKind::Unreachable, "lh:lh");
        assert!(format!("{error:#}").contains("read-only"), "{error}");
    });
}

#[test]
fn client_that_cannot_listen_still_notifies() {
    run(async {
        let server = testbed::postgres();
        let direct = server.database();
        let pooler = PgBouncer::before(server);
        let holder = connect(&(pooler.in_front_of(server, &direct) + "?pooler=transaction")).await;
        let waiting = connect(&direct).await;
        let store = waiting.store();
        for _ in 0..5 {
            let guard = holder.mutex("mixed").lock().await.unwrap();
            // Only the store is used, so no heartbeat replaces a lost notification.
            let mut waiter = Claim::new(Name::new("mixed").unwrap(), Kind::Mutex, 1, 1).unwrap();
            (waiter.lease, waiter.waiter_lease) = (PATIENCE * 5, PATIENCE * 5);
            let joined = store.join(&waiter, Mode::Wait).await.unwrap();
            assert!(matches!(joined, Joined::Waiting(_)), "{joined:?}");
            release(guard).await;
            let granted = async {
                while store.changed(&waiter).await.unwrap() == Signal::Ask {
                    let joined = store.join(&waiter, Mode::Wait).await.unwrap();
                    if matches!(joined, Joined::Holding { .. }) {
                        break;
                    }
                }
            };
            tokio::time::timeout(PATIENCE, granted).await.expect("no notification arrived");
            assert!(store.leave(&waiter, None).await.unwrap());
        }
    });
}

/// Makes the first insert of a claim fail, as a conflicting transaction would.
const FAIL_ONCE: &str = "CREATE SEQUENCE public.inserts; GRANT USAGE ON public.inserts TO lh; \
     CREATE FUNCTION fail_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
     IF nextval('public.inserts') = 1 THEN RAISE EXCEPTION 'on purpose' USING ERRCODE = '40001'; END IF; \
     RETURN NEW; END $$; CREATE TRIGGER fail_once BEFORE INSERT ON leasehold_claims \
     FOR EACH ROW EXECUTE FUNCTION fail_once()";

// S42, S46
/// Behind a pooler every statement runs in a transaction, even after one was rolled back. Outside
/// of a transaction it could be prepared on one of the server's sessions and executed on another.
#[test]
fn statements_stay_in_transactions_after_a_conflict_behind_a_pooler() {
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
        assert!(log.contains("on purpose"), "the planned fault did not occur");
        let mut open = std::collections::HashSet::new();
        let mut executed = 0;
        for line in log.lines() {
            let (session, what) = line.split_once(' ').unwrap_or_default();
            let Some((_, what)) = what.split_once("LOG:  ") else { continue };
            let message = what.strip_prefix("statement: ").unwrap_or(what);
            if message.starts_with("BEGIN") {
                // A client that is paused here keeps a lock's row locked for this long.
                for limit in ["idle_in_transaction_session_timeout", "lock_timeout"] {
                    assert!(
                        what.contains(&format!("SET LOCAL {limit}")),
                        "the transaction has no limit: {what}"
                    );
                }
            }
            // A message may contain several statements. What is executed separately is one
            // statement.
            for statement in message.split("; ") {
                match statement.split(' ').next().unwrap_or_default() {
                    "BEGIN" => drop(open.insert(session)),
                    "COMMIT" | "ROLLBACK" => drop(open.remove(session)),
                    "execute" | "SELECT" | "INSERT" | "WITH" => {
                        executed += 1;
                        assert!(
                            open.contains(session),
                            "a statement outside of a transaction: {what}"
                        );
                    }
                    _ => {}
                }
            }
        }
        assert!(executed > 10, "too few statements in the log: {log}");
    });
}
