//! Who waits, and who is granted: hand-overs that nobody may take, the order of tokens, claims that join
//! again, and crowds.

use crate::sql_common::*;
use leasehold::store::{Joined, Mode, Renewal, Standing, Store};
use leasehold::{Claim, ErrorKind, Kind, Name, Token};
use testbed::Setup;

/// Cases for SQLite too; they get a store, and another client's of the same database.
macro_rules! sqlite_too {
    ($($case:ident),+ $(,)?) => {
        mod sqlite_too {
            mod postgres { $(#[test] fn $case() { super::super::on_server::<testbed::Postgres>(super::super::$case); })+ }
            mod mariadb { $(#[test] fn $case() { super::super::on_server::<testbed::MariaDb>(super::super::$case); })+ }
            mod sqlite { $(#[test] fn $case() { super::super::on_sqlite(super::super::$case); })+ }
        }
    };
}

on_all![
    s45a_who_comes_late_does_not_barge,
    s45_nobody_takes_what_is_being_handed_over,
    s50_first_acquisitions_of_new_names,
];

without_mysql![s45_order_of_tokens_is_order_of_commits];

sqlite_too![
    p1_a_head_that_joins_again_after_its_end_goes_to_the_back,
    p8_a_waiter_that_joins_again_after_its_end_has_one_place,
    p8_one_claim_that_joins_many_times_at_once_has_one_grant,
];

fn on_server<S: Server>(case: impl AsyncFnOnce(Two)) {
    run(async { case(two(&S::shared().database()).await).await });
}

fn on_sqlite(case: impl AsyncFnOnce(Two)) {
    run(async {
        let directory = tempfile::tempdir().unwrap();
        case(two(&format!("sqlite:{}/locks.db", directory.path().display())).await).await;
    });
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

/// A waiter is there, and has just been granted what the row's holder gave back.
const HANDED_OVER: &str = "INSERT INTO leasehold_claims (name, token, claim, weight, standing, since, \
     expires, lock_delay, host, pid, label, session) SELECT name, last_token + 1, \
     '00000000000000000000000000000001', 1, 1, 1, 4000000000000000, 0, 'h', 1, '', '' \
     FROM leasehold_locks WHERE name = 'blocked'; \
     UPDATE leasehold_locks SET claim = '', claims = 1, last_token = last_token + 1 \
     WHERE name = 'blocked'";

/// The late one has begun its statement, and waits for the row, while the waiter is granted the lock:
/// what it had seen of the claims before it waited is not true any more.
async fn s45a_who_comes_late_does_not_barge<S: Server>() {
    let server = S::with(Setup::new().fast());
    let url = server.database();
    let (first, late) = (connect(&url).await, connect(&url).await);
    release(first.mutex("blocked").lock().await.unwrap()).await;
    let (begun, is_begun) = tokio::sync::oneshot::channel();
    let (go_on, told) = tokio::sync::oneshot::channel();
    let theirs = tokio::spawn(server.in_two_steps(&url, [BLOCK, HANDED_OVER], begun, told));
    is_begun.await.unwrap();
    // The store itself: a caller would ask again after five seconds.
    let claim = Claim::new(Name::new("blocked").unwrap(), Kind::Mutex, 1, 1).unwrap();
    let store = late.store().clone();
    let trying = tokio::spawn(async move { store.join(&claim, Mode::Try).await });
    until("it waits for the row", async || server.blocked() >= 1).await;
    go_on.send(()).unwrap();
    theirs.await.unwrap().unwrap();
    let joined = trying.await.unwrap().unwrap();
    assert!(matches!(joined, Joined::Busy { .. }), "it barged past a waiter: {joined:?}");
    let info = first.read("blocked").await.unwrap().expect("it is held");
    assert_eq!(info.claims.len(), 1, "{info:?}");
}

async fn s45_nobody_takes_what_is_being_handed_over<S: Server>() {
    // Its own: nobody else's statements wait for rows here.
    let server = S::with(Setup::new().fast());
    let url = server.database();
    let clients = [connect(&url).await, connect(&url).await, connect(&url).await];
    for _ in 0..5 {
        let held = clients[0].mutex("blocked").lock().await.unwrap();
        let (queued, mut in_queue) = tokio::sync::mpsc::unbounded_channel();
        let waiter = clients[1].mutex("blocked").on_waiting(move |_| {
            // Told again with each heartbeat; the test listens only once.
            let _ = queued.send(());
        });
        let waiting = tokio::spawn(async move { waiter.lock().await });
        in_queue.recv().await.unwrap();
        let blocker = server.hold(&url, BLOCK).await;
        // Both wait for the row then, each with whatever it has seen before that.
        let releasing = tokio::spawn(held.release());
        let late = clients[2].mutex("blocked");
        let late = tokio::spawn(async move { late.try_lock().await });
        // Unless who tries was answered by what it saw before: then it has not barged.
        let both = async || server.blocked() >= if late.is_finished() { 1 } else { 2 };
        until("both wait for the row", both).await;
        drop(blocker);
        releasing.await.unwrap().unwrap();
        let error = late.await.unwrap().expect_err("it barged past a waiter");
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        let granted = tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap().unwrap();
        granted.release().await.unwrap();
    }
}

async fn s50_first_acquisitions_of_new_names<S: Server>() {
    let url = S::shared().database();
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(connect(&url).await);
    }
    for new in 0..5 {
        hammer(&clients, &format!("new {new}"), 8, 1).await;
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
