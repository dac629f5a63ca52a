//! What a reviewer suspected of the SQL stores, each suspicion as the interleaving that shows it.
//! Each case runs on every database that it can happen on.

#![cfg(all(feature = "sqlite", feature = "postgres", feature = "mysql"))]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sql_common::*;
use leasehold::store::sql::SqlStore;
use leasehold::store::{Evict, Joined, LockInfo, Mode, Renew, Renewal, Standing, Store};
use leasehold::{Claim, ErrorKind, Kind, Name, Token};
use testbed::{MariaDb, PgBouncer, Postgres, Proxy, Setup};
use tokio::runtime::Handle;

/// Cases for SQLite too; they get a store, and another client's of the same database.
macro_rules! on_all {
    ($($case:ident),+ $(,)?) => {
        mod all {
            mod postgres { $(#[test] fn $case() { super::super::on_server::<testbed::Postgres>(super::super::$case); })+ }
            mod mariadb { $(#[test] fn $case() { super::super::on_server::<testbed::MariaDb>(super::super::$case); })+ }
            mod sqlite { $(#[test] fn $case() { super::super::on_sqlite(super::super::$case); })+ }
        }
    };
}

/// Cases for servers.
macro_rules! on_servers {
    ($($case:ident),+ $(,)?) => {
        mod postgres { $(#[test] fn $case() { super::run(super::$case::<testbed::Postgres>()); })+ }
        mod mariadb { $(#[test] fn $case() { super::run(super::$case::<testbed::MariaDb>()); })+ }
    };
}

on_all![
    p1_a_head_that_joins_again_after_its_end_goes_to_the_back,
    p8_a_waiter_that_joins_again_after_its_end_has_one_place,
    p8_one_claim_that_joins_many_times_at_once_has_one_grant,
];

on_servers![
    s92_a_row_that_is_locked_holds_up_no_other_lock,
    s14_connections_that_fell_silent_cost_no_lease,
    connections_that_never_come_about_are_given_up,
    p9_a_join_that_is_late_is_taken_back,
    p9_a_release_beside_a_join_that_hangs_is_no_loss,
    nobody_asks_for_waiters_that_are_gone,
    s46_a_statement_that_the_server_cuts_short_is_tried_again,
    no_room_for_a_connection_is_passing,
    s21_a_clock_set_back_promises_no_more_than_the_lease,
    s45_order_of_tokens_is_order_of_commits,
    p6_a_heartbeat_that_lengthened_nothing_says_so,
    an_eviction_is_never_done_twice,
];

type Two = [Arc<SqlStore>; 2];

async fn two(url: &str) -> Two {
    let open = async || SqlStore::open(url, &Handle::current()).await.unwrap();
    [open().await, open().await]
}

fn on_server<S: Server>(case: impl AsyncFnOnce(Two)) {
    run(async { case(two(&S::shared().database()).await).await });
}

fn on_sqlite(case: impl AsyncFnOnce(Two)) {
    run(async {
        let directory = tempfile::tempdir().unwrap();
        case(two(&format!("sqlite:{}/locks.db", directory.path().display())).await).await;
    });
}

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

fn claim(name: &str, lease: Duration, waiter_lease: Duration) -> Claim {
    let mut claim = Claim::new(Name::new(name).unwrap(), Kind::Mutex, 1, 1).unwrap();
    (claim.lease, claim.waiter_lease) = (lease, waiter_lease);
    claim
}

#[track_caller]
fn holding(joined: &Joined) -> Token {
    match joined {
        Joined::Holding { token, .. } => *token,
        other => panic!("it does not hold: {other:?}"),
    }
}

#[track_caller]
fn waiting(joined: &Joined) -> Token {
    match joined {
        Joined::Waiting(place) => place.token.expect("drawn as it joined"),
        other => panic!("it does not wait: {other:?}"),
    }
}

async fn renewed(store: &SqlStore, claim: &Claim) -> Renewal {
    let renewal = Renew { claim: claim.clone(), lease: claim.lease };
    store.renew(&[renewal]).await.unwrap().remove(0)
}

fn standings(info: Option<LockInfo>) -> Vec<(Standing, Option<Token>)> {
    let claims = info.map(|info| info.claims).unwrap_or_default();
    claims.into_iter().map(|c| (c.standing, c.token)).collect()
}

/// First h takes the free lock; its reply is lost. Then w waits, h's lease ends, and w is granted.
/// Then a duplicate of h's join arrives: a new place, behind w. (It was written back as the first in the
/// queue, since the lock's row once held a claim of that id: then both held.)
async fn p1_a_head_that_joins_again_after_its_end_goes_to_the_back([store, other]: Two) {
    let mut short = SHORT;
    let (h, w, first, second) = loop {
        let name = format!("again {short:?}");
        let (h, w) = (claim(&name, short, LONG), claim(&name, LONG, LONG));
        let first = holding(&store.join(&h, Mode::Wait).await.unwrap());
        let second = other.join(&w, Mode::Wait).await.unwrap();
        if matches!(second, Joined::Waiting(_)) {
            break (h, w, first, waiting(&second));
        }
        // On a machine that does much else it may come after the end.
        short *= 2;
    };
    tokio::time::sleep(short).await;
    let third = waiting(&store.join(&h, Mode::Wait).await.unwrap());
    assert!(first < second && second < third);
    let queue = [(Standing::Holding, Some(second)), (Standing::Waiting, Some(third))];
    assert_eq!(standings(store.read(&w.name).await.unwrap()), queue);
    assert!(matches!(renewed(&other, &w).await, Renewal::Holding { token, .. } if token == second));
    assert!(matches!(renewed(&store, &h).await, Renewal::Waiting(p) if p.token == Some(third)));
    assert!(other.leave(&w, None).await.unwrap());
    assert!(matches!(renewed(&store, &h).await, Renewal::Holding { token, .. } if token == third));
    assert!(store.leave(&h, None).await.unwrap());
    assert_eq!(standings(store.read(&w.name).await.unwrap()), []);
}

/// The same in the middle of the queue: the old place is gone, the new one is at the end.
async fn p8_a_waiter_that_joins_again_after_its_end_has_one_place([store, other]: Two) {
    let (a, mut b, c) =
        (claim("again", LONG, LONG), claim("again", LONG, SHORT), claim("again", LONG, LONG));
    let first = holding(&store.join(&a, Mode::Wait).await.unwrap());
    let gone = waiting(&store.join(&b, Mode::Wait).await.unwrap());
    let second = waiting(&other.join(&c, Mode::Wait).await.unwrap());
    tokio::time::sleep(SHORT).await;
    // This place lasts until we have looked.
    b.waiter_lease = LONG;
    let third = waiting(&store.join(&b, Mode::Wait).await.unwrap());
    assert!(gone < second && second < third);
    let queue = [
        (Standing::Holding, Some(first)),
        (Standing::Waiting, Some(second)),
        (Standing::Waiting, Some(third)),
    ];
    assert_eq!(standings(store.read(&a.name).await.unwrap()), queue);
}

async fn p8_one_claim_that_joins_many_times_at_once_has_one_grant(stores: Two) {
    let h = claim("crowd", LONG, LONG);
    let w = claim("crowd", LONG, LONG);
    for (claim, holds) in [(h, true), (w, false)] {
        let mut joining = tokio::task::JoinSet::new();
        for n in 0..12 {
            let (store, claim) = (stores[n % 2].clone(), claim.clone());
            joining.spawn(async move { store.join(&claim, Mode::Wait).await.unwrap() });
        }
        let told = if holds { holding } else { waiting };
        let all: Vec<Token> = joining.join_all().await.iter().map(told).collect();
        assert!(all.iter().all(|token| *token == all[0]), "{all:?}");
        let queue = standings(stores[0].read(&claim.name).await.unwrap());
        assert_eq!(queue.len(), if holds { 1 } else { 2 }, "{queue:?}");
    }
}

/// Locks one lock's row, as a client that was stopped in its section does, or a person with a
/// `SELECT … FOR UPDATE`.
const BLOCK: &str = "SELECT name FROM leasehold_locks WHERE name = 'blocked' FOR UPDATE";

/// Waits until it is so.
async fn until(what: &str, mut so: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !so().await {
        assert!(Instant::now() < end, "never came: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// One batch renews many locks, and one of their rows is locked for longer than a lease. That lock
/// may be lost; the others of the client must neither be lost with it, nor their calls be held up.
async fn s92_a_row_that_is_locked_holds_up_no_other_lock<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let locks = connect(&url).await;
    let lease = Duration::from_secs(9);
    let mut held = Vec::new();
    for name in ["a", "blocked", "z"] {
        held.push(locks.mutex(name).lease(lease).lock().await.unwrap());
    }
    // And one that stands in the other table.
    let semaphore = locks.semaphore("permits", 3).lease(lease);
    held.push(semaphore.acquire().await.unwrap());
    held.push(semaphore.acquire().await.unwrap());
    let blocker = server.hold(&url, BLOCK).await;
    let end = Instant::now() + lease * 2;
    let mut slow = Vec::new();
    while Instant::now() < end {
        let began = Instant::now();
        release(locks.mutex("elsewhere").lock().await.unwrap()).await;
        let took = began.elapsed();
        if took >= Duration::from_secs(2) {
            slow.push(took);
        }
        for guard in held.iter().filter(|guard| guard.name().as_str() != "blocked") {
            assert!(guard.is_held(), "{} was lost: {:?}", guard.name(), guard.state());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // Once may be the machine; if the row is waited for, it is at every renewal.
    assert!(slow.len() <= 1, "another lock was held up: {slow:?}");
    drop(blocker);
}

/// A firewall forgets the connections: nothing is answered, nobody is told. Whoever sends on one of
/// them must not wait for longer than the lease lasts, and not try them one after the other.
async fn s14_connections_that_fell_silent_cost_no_lease<S: Server>() {
    let server = S::shared();
    let proxy = Proxy::before(server.port());
    let locks = connect(&proxy.in_front_of(server.port(), &server.database())).await;
    let mut held = Vec::new();
    // Leases of different lengths are renewed apart, so that all connections are in use.
    for n in 0..6 {
        let lease = Duration::from_millis(12_000 + n * 20);
        held.push(locks.mutex(format!("held {n}")).lease(lease).lock().await.unwrap());
    }
    proxy.delay(Duration::from_millis(10));
    // Until all were renewed once.
    tokio::time::sleep(Duration::from_secs(6)).await;
    proxy.delay(Duration::ZERO);
    proxy.silence();
    let began = Instant::now();
    let fresh = locks.mutex("fresh").lease(Duration::from_secs(12)).lock().await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    while began.elapsed() < Duration::from_secs(24) {
        for guard in &held {
            assert!(guard.is_held(), "{} was lost: {:?}", guard.name(), guard.state());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    release(fresh).await;
}

/// Somebody accepts, and never says a word: a balancer whose server is gone. When the server is
/// back, so is the client.
async fn connections_that_never_come_about_are_given_up<S: Server>() {
    let server = S::shared();
    let proxy = Proxy::before(server.port());
    let locks = connect(&proxy.in_front_of(server.port(), &server.database())).await;
    proxy.freeze_new();
    proxy.cut();
    // More than there are connections.
    let mut trying = tokio::task::JoinSet::new();
    for n in 0..8 {
        let mutex = locks.mutex(format!("lost {n}")).lease(Duration::from_millis(500));
        trying.spawn(async move { mutex.try_lock().await.map(drop) });
    }
    while let Some(tried) = trying.join_next().await {
        tried.unwrap().unwrap_err();
    }
    // Those that were accepted meanwhile stay silent.
    proxy.silence();
    proxy.thaw();
    let mutex = locks.mutex("back");
    let back = tokio::time::timeout(Duration::from_secs(25), mutex.lock()).await;
    release(back.expect("the client is deaf for ever").unwrap()).await;
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
    proxy.hold_requests_so_far();
    let sent = proxy.requests();
    let joining = tokio::spawn({
        let (store, late) = (store.clone(), late.clone());
        async move { store.join(&late, Mode::Wait).await.map(|_| ()) }
    });
    until("the join is sent", async || proxy.requests() > sent).await;
    joining.abort();
    assert!(joining.await.unwrap_err().is_cancelled());
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
    proxy.hold_requests_so_far();
    let sent = proxy.requests();
    let hanging = tokio::spawn({
        let (store, twice) = (store.clone(), twice.clone());
        async move { store.join(&twice, Mode::Wait).await.map(|_| ()) }
    });
    until("the join is sent", async || proxy.requests() > sent).await;
    hanging.abort();
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

/// The administrator lets no statement of this user run for longer than this.
trait Hasty {
    fn hasty(&self, url: &str);
    fn few_connections(&self, url: &str);
    /// How many statements the server has cut short.
    fn cut_short(&self) -> usize;
}

impl Hasty for Postgres {
    fn hasty(&self, url: &str) {
        Server::admin(self, url, "ALTER ROLE hasty SET statement_timeout = '300ms'");
    }
    fn few_connections(&self, url: &str) {
        Server::admin(self, url, "ALTER ROLE few CONNECTION LIMIT 1");
    }
    fn cut_short(&self) -> usize {
        Server::log(self).matches("canceling statement due to statement timeout").count()
    }
}

impl Hasty for MariaDb {
    fn hasty(&self, url: &str) {
        Server::admin(self, url, "ALTER USER 'hasty'@'127.0.0.1' WITH MAX_STATEMENT_TIME 0.3");
    }
    fn few_connections(&self, url: &str) {
        Server::admin(self, url, "ALTER USER 'few'@'127.0.0.1' WITH MAX_USER_CONNECTIONS 1");
    }
    fn cut_short(&self) -> usize {
        let told = MariaDb::admin(self, "SHOW GLOBAL STATUS LIKE 'Max_statement_time_exceeded'");
        told.rsplit('\t').next().and_then(|n| n.parse().ok()).expect("a number")
    }
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

async fn no_room_for_a_connection_is_passing<S: Server + Hasty>() {
    let server = S::with(Setup::new().fast());
    let url = server.database();
    release(connect(&url).await.mutex("first").lock().await.unwrap()).await;
    server.user(&url, "few", "SELECT, INSERT, UPDATE, DELETE");
    server.few_connections(&url);
    let url = url.replace("lh:lh@", "few:few@");
    let first = connect(&url).await;
    let error = leasehold::connect(&url).await.unwrap_err();
    assert_told(&error, leasehold::ErrorKind::Unreachable, "few:few");
    assert!(error.is_retryable(), "{error}");
    assert!(error.to_string().contains("connection"), "{error}");
    first.close().await.unwrap();
}

/// A grant is written; the clock is set back by an hour. What remains by the clock is an hour more
/// than anybody asked for, and not to be relied on: the clock will be set right.
async fn s21_a_clock_set_back_promises_no_more_than_the_lease<S: Server>() {
    let server = S::with(Setup::new().fast().movable_clock());
    let store = SqlStore::open(&server.database(), &Handle::current()).await.unwrap();
    let mut permits = Vec::new();
    for _ in 0..2 {
        let mut permit = Claim::new(Name::new("p").unwrap(), Kind::Semaphore, 1, 3).unwrap();
        (permit.lease, permit.waiter_lease) = (LONG, SHORT);
        holding(&store.join(&permit, Mode::Wait).await.unwrap());
        permits.push(permit);
    }
    server.shift_clock(-3_600);
    for permit in &permits {
        let Joined::Holding { remaining, .. } = store.join(permit, Mode::Wait).await.unwrap()
        else {
            panic!("it was lost");
        };
        assert!(remaining.unwrap() <= LONG, "{remaining:?}");
        let Renewal::Holding { remaining, .. } = renewed(&store, permit).await else {
            panic!("it was lost");
        };
        assert!(remaining.unwrap() <= LONG, "{remaining:?}");
    }
}

/// Many joins wait for the lock's row at once. Each tells how many had committed before it: whoever
/// drew a greater token came after them all.
async fn s45_order_of_tokens_is_order_of_commits<S: Server>() {
    const JOINS: usize = 8;
    let server = S::with(Setup::new().fast());
    let url = server.database();
    let stores = [two(&url).await, two(&url).await].concat();
    let first = claim("blocked", LONG, LONG);
    holding(&stores[0].join(&first, Mode::Try).await.unwrap());
    assert!(stores[0].leave(&first, None).await.unwrap());
    let sql = "SELECT name FROM leasehold_locks WHERE name = 'blocked' FOR UPDATE";
    let blocker = server.hold(&url, sql).await;
    let mut joining = tokio::task::JoinSet::new();
    for n in 0..JOINS {
        let (store, claim) = (stores[n % stores.len()].clone(), claim("blocked", LONG, LONG));
        joining.spawn(async move {
            match store.join(&claim, Mode::Wait).await.unwrap() {
                Joined::Holding { token, .. } => (token, 0),
                Joined::Waiting(place) => (place.token.unwrap(), place.ahead),
                busy => panic!("it waits: {busy:?}"),
            }
        });
    }
    until("all wait for the row", async || server.blocked() >= JOINS).await;
    drop(blocker);
    let mut places = joining.join_all().await;
    places.sort_unstable();
    let ahead: Vec<usize> = places.iter().map(|(_, ahead)| *ahead).collect();
    assert_eq!(ahead, (0..JOINS).collect::<Vec<_>>(), "{places:?}");
    let queue = standings(stores[0].read(&Name::new("blocked").unwrap()).await.unwrap());
    let holds = queue.iter().filter(|(standing, _)| *standing == Standing::Holding).count();
    assert_eq!((queue.len(), holds), (JOINS, 1), "{queue:?}");
    let tokens: Vec<_> = queue.iter().map(|(_, token)| token.unwrap()).collect();
    assert_eq!(tokens, places.iter().map(|(token, _)| *token).collect::<Vec<_>>());
}

/// Fails the first insert of a claim as another transaction in the way would.
const FAIL_ONCE: &str = "CREATE SEQUENCE inserts; GRANT USAGE ON inserts TO lh; \
     CREATE FUNCTION fail_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
     IF nextval('inserts') = 1 THEN RAISE EXCEPTION 'on purpose' USING ERRCODE = '40001'; END IF; \
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

/// `lock_in`, `versioned`, `once` and `fence::sql` at every level of isolation.
macro_rules! transactions {
    ($module:ident, $db:ty, $options:ty, $url:expr, $level:expr) => {
        mod $module {
            use std::time::Duration;

            use leasehold::fence::sql::{TokenColumn, check};
            use leasehold::once::{Attempt, clean_up};
            use leasehold::versioned::{Retry, Versioned, retry};
            use leasehold::{Error, ErrorKind, Token, database, once};
            use sqlx::{Acquire, AssertSqlSafe};

            type Db = $db;

            async fn pool() -> sqlx::Pool<Db> {
                let pool = <$options>::new().max_connections(12).connect(&$url).await.unwrap();
                database::install(&pool).await.unwrap();
                for sql in [
                    "CREATE TABLE t (id BIGINT NOT NULL PRIMARY KEY, n BIGINT NOT NULL, \
                     version BIGINT NOT NULL, token BIGINT)",
                    "CREATE TABLE journal (id BIGINT NOT NULL PRIMARY KEY)",
                    "INSERT INTO t VALUES (1, 0, 0, NULL)",
                ] {
                    sqlx::query(sql).execute(&pool).await.unwrap();
                }
                pool
            }

            async fn at_level(c: &mut <Db as sqlx::Database>::Connection, level: &str) {
                sqlx::query(AssertSqlSafe(format!("{} {level}", $level))).execute(c).await.unwrap();
            }

            include!("sql_review/transactions.rs");
        }
    };
}

transactions!(
    in_postgres,
    sqlx::Postgres,
    sqlx::postgres::PgPoolOptions,
    testbed::postgres().database(),
    "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL"
);
transactions!(
    in_mariadb,
    sqlx::MySql,
    sqlx::mysql::MySqlPoolOptions,
    testbed::mariadb().database(),
    "SET SESSION TRANSACTION ISOLATION LEVEL"
);

/// A transaction that grants it, say, has locked a waiter's row. Told that it waits, it would believe of a
/// grant that is pushed later that it lasts from now, and not from the last heartbeat that counted.
async fn p6_a_heartbeat_that_lengthened_nothing_says_so<S: Server>() {
    let server = S::shared();
    let url = server.database();
    let [store, _] = two(&url).await;
    let (held, waits) = (claim("row", LONG, LONG), claim("row", LONG, LONG));
    holding(&store.join(&held, Mode::Wait).await.unwrap());
    waiting(&store.join(&waits, Mode::Wait).await.unwrap());
    let row = "SELECT * FROM leasehold_claims WHERE name = 'row' FOR UPDATE";
    let blocker = server.hold(&url, row).await;
    let blind = renewed(&store, &waits).await;
    assert_eq!(blind.known().unwrap_err().kind(), ErrorKind::Unreachable);
    drop(blocker);
    until("it is lengthened", async || {
        matches!(renewed(&store, &waits).await, Renewal::Waiting(_))
    })
    .await;
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
