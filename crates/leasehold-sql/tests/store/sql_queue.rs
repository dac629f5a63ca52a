//! Queues: hand-overs that no other claim may take, the order of tokens, claims that join again,
//! and many concurrent claims.

use std::sync::Arc;

use crate::sql_common::*;
use leasehold::store::sql::SqlStore;
use leasehold::store::{Claim, ClaimState, Joined, Mode, Renewal, Store};
use leasehold::{ErrorKind, Kind, Name, Token};
use testbed::Setup;
use tokio::task::JoinSet;

/// Cases that also run on SQLite. Each gets two clients' stores of the same database.
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
    late_claim_does_not_overtake_a_waiter,
    try_does_not_take_a_lock_that_is_being_handed_over,
    concurrent_first_acquisitions_of_new_names_are_exclusive,
    concurrent_first_joins_of_a_new_name_have_distinct_places,
];

without_mysql![token_order_matches_commit_order];

sqlite_too![
    a_head_that_joins_again_after_its_end_goes_to_the_back,
    a_waiter_that_joins_again_after_its_end_has_one_place,
    one_claim_that_joins_many_times_at_once_has_one_grant,
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

// P1
/// First `h` acquires the free lock, and its reply is lost. Then `w` waits, the lease of `h` ends,
/// and `w` is granted. Then a duplicate of `h`'s join arrives, which must get a new place after
/// `w`. A previous version wrote it back as the first in the queue, because the lock's row once
/// held a claim with that ID. Then both held the lock.
async fn a_head_that_joins_again_after_its_end_goes_to_the_back([store, other]: Two) {
    let mut short = SHORT;
    let (h, w, first, second) = loop {
        let name = format!("again {short:?}");
        let (h, w) = (claim(&name, short, LONG), claim(&name, LONG, LONG));
        let first = holding(&store.join(&h, Mode::Wait).await.unwrap());
        let second = other.join(&w, Mode::Wait).await.unwrap();
        if matches!(second, Joined::Waiting(_)) {
            break (h, w, first, waiting(&second));
        }
        // On a busy machine the second join may arrive after the lease has ended.
        short *= 2;
    };
    tokio::time::sleep(short).await;
    let third = waiting(&store.join(&h, Mode::Wait).await.unwrap());
    assert!(first < second && second < third);
    let queue = [(ClaimState::Holding, Some(second)), (ClaimState::Waiting, Some(third))];
    assert_eq!(claim_states(store.read(&w.name).await.unwrap()), queue);
    assert!(matches!(renewed(&other, &w).await, Renewal::Holding { token, .. } if token == second));
    assert!(matches!(renewed(&store, &h).await, Renewal::Waiting(p) if p.token == Some(third)));
    assert!(other.leave(&w, None).await.unwrap());
    assert!(matches!(renewed(&store, &h).await, Renewal::Holding { token, .. } if token == third));
    assert!(store.leave(&h, None).await.unwrap());
    assert_eq!(claim_states(store.read(&w.name).await.unwrap()), []);
}

// P8
/// The same in the middle of the queue. The old place is gone, and the new one is at the end.
async fn a_waiter_that_joins_again_after_its_end_has_one_place([store, other]: Two) {
    let (a, mut b, c) =
        (claim("again", LONG, LONG), claim("again", LONG, SHORT), claim("again", LONG, LONG));
    let first = holding(&store.join(&a, Mode::Wait).await.unwrap());
    let gone = waiting(&store.join(&b, Mode::Wait).await.unwrap());
    let second = waiting(&other.join(&c, Mode::Wait).await.unwrap());
    tokio::time::sleep(SHORT).await;
    // This place lasts until the queue was read.
    b.waiter_lease = LONG;
    let third = waiting(&store.join(&b, Mode::Wait).await.unwrap());
    assert!(gone < second && second < third);
    let queue = [
        (ClaimState::Holding, Some(first)),
        (ClaimState::Waiting, Some(second)),
        (ClaimState::Waiting, Some(third)),
    ];
    assert_eq!(claim_states(store.read(&a.name).await.unwrap()), queue);
}

// P8
async fn one_claim_that_joins_many_times_at_once_has_one_grant(stores: Two) {
    let h = claim("crowd", LONG, LONG);
    let w = claim("crowd", LONG, LONG);
    for (claim, holds) in [(h, true), (w, false)] {
        let mut joining = tokio::task::JoinSet::new();
        for n in 0..12 {
            let (store, claim) = (stores[n % 2].clone(), claim.clone());
            joining.spawn(async move { store.join(&claim, Mode::Wait).await.unwrap() });
        }
        let grant_of = if holds { holding } else { waiting };
        let all: Vec<Token> = joining.join_all().await.iter().map(grant_of).collect();
        assert!(all.iter().all(|token| *token == all[0]), "{all:?}");
        let queue = claim_states(stores[0].read(&claim.name).await.unwrap());
        assert_eq!(queue.len(), if holds { 1 } else { 2 }, "{queue:?}");
    }
}

/// A waiter has just been granted what the holder in the lock's row released.
const HANDED_OVER: &str = "INSERT INTO leasehold_claims (name, token, claim, weight, standing, since, \
     expires, lock_delay, host, pid, label, session) SELECT name, last_token + 1, \
     '00000000000000000000000000000001', 1, 1, 1, 4000000000000000, 0, 'h', 1, '', '' \
     FROM leasehold_locks WHERE name = 'blocked'; \
     UPDATE leasehold_locks SET claim = '', claims = 1, last_token = last_token + 1 \
     WHERE name = 'blocked'";

// S45a
/// A late claim has begun its statement and waits for the row while the waiter is granted. The
/// claims that it saw before it waited are out of date.
async fn late_claim_does_not_overtake_a_waiter<S: Server>() {
    let server = S::with(Setup::new().fast());
    let url = server.database();
    let (first, late) = (connect(&url).await, connect(&url).await);
    release(first.mutex("blocked").lock().await.unwrap()).await;
    let (begun, is_begun) = tokio::sync::oneshot::channel();
    let (go_on, receiver) = tokio::sync::oneshot::channel();
    let theirs = tokio::spawn(server.in_two_steps(&url, [BLOCK, HANDED_OVER], begun, receiver));
    is_begun.await.unwrap();
    // The store itself is used, because a client would try again after five seconds.
    let claim = Claim::new(Name::new("blocked").unwrap(), Kind::Mutex, 1, 1).unwrap();
    let store = late.store().clone();
    let trying = tokio::spawn(async move { store.join(&claim, Mode::Try).await });
    until("a statement waits for the row", async || server.blocked() >= 1).await;
    go_on.send(()).unwrap();
    theirs.await.unwrap().unwrap();
    let joined = trying.await.unwrap().unwrap();
    assert!(matches!(joined, Joined::Busy { .. }), "a claim overtook a waiter: {joined:?}");
    let info = first.inspect("blocked").await.unwrap().expect("the lock has no holder");
    assert_eq!(info.claims.len(), 1, "{info:?}");
}

// S45
async fn try_does_not_take_a_lock_that_is_being_handed_over<S: Server>() {
    // A separate server, so that no other test's statements wait for rows here.
    let server = S::with(Setup::new().fast());
    let url = server.database();
    let clients = [connect(&url).await, connect(&url).await, connect(&url).await];
    for _ in 0..5 {
        let held = clients[0].mutex("blocked").lock().await.unwrap();
        let (queued, mut in_queue) = tokio::sync::mpsc::unbounded_channel();
        let waiter = clients[1].mutex("blocked").on_waiting(move |_| {
            // Notified again with each heartbeat, but the test receives only once.
            let _ = queued.send(());
        });
        let waiting = tokio::spawn(async move { waiter.lock().await });
        in_queue.recv().await.unwrap();
        let blocker = server.hold(&url, BLOCK).await;
        // Now both wait for the row, each with the state that it read before.
        let releasing = tokio::spawn(held.release());
        let late = clients[2].mutex("blocked");
        let late = tokio::spawn(async move { late.try_lock().await });
        // If the try was answered from the state that it read before, it did not barge.
        let both = async || server.blocked() >= if late.is_finished() { 1 } else { 2 };
        until("both wait for the row", both).await;
        drop(blocker);
        releasing.await.unwrap().unwrap();
        let error = late.await.unwrap().expect_err("a claim overtook a waiter");
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        let granted = tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap().unwrap();
        granted.release().await.unwrap();
    }
}

// S50
async fn concurrent_first_acquisitions_of_new_names_are_exclusive<S: Server>() {
    let url = S::shared().database();
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(connect(&url).await);
    }
    for new in 0..5 {
        hammer(&clients, &format!("new {new}"), 8, 1).await;
    }
}

// S50
/// No join loses its place because another one has created the lock's row, or because of a
/// deadlock.
async fn concurrent_first_joins_of_a_new_name_have_distinct_places<S: Server>() {
    let url = S::shared().database();
    let stores = [two(&url).await, two(&url).await].concat();
    let joining = join_all(&stores, "new", 32);
    have_distinct_places(joining, &stores, "new").await;
}

/// Joins this queue with as many claims at the same time.
fn join_all(stores: &[Arc<SqlStore>], name: &'static str, count: usize) -> JoinSet<(Token, usize)> {
    let mut joining = JoinSet::new();
    for n in 0..count {
        let (store, claim) = (stores[n % stores.len()].clone(), claim(name, LONG, LONG));
        joining.spawn(async move { place(store.join(&claim, Mode::Wait).await.unwrap()) });
    }
    joining
}

/// Checks that each claim got its own place, and that one holds. Returns the tokens by place, and
/// those of the queue.
async fn have_distinct_places(
    joining: JoinSet<(Token, usize)>,
    stores: &[Arc<SqlStore>],
    name: &str,
) -> [Vec<Token>; 2] {
    let count = joining.len();
    let mut places = joining.join_all().await;
    places.sort_unstable();
    let ahead: Vec<usize> = places.iter().map(|(_, ahead)| *ahead).collect();
    assert_eq!(ahead, (0..count).collect::<Vec<_>>(), "{places:?}");
    let queue = claim_states(stores[0].read(&Name::new(name).unwrap()).await.unwrap());
    let holds = queue.iter().filter(|(state, _)| *state == ClaimState::Holding).count();
    assert_eq!((queue.len(), holds), (count, 1), "{queue:?}");
    let queued = queue.iter().map(|(_, token)| token.unwrap()).collect();
    [places.iter().map(|(token, _)| *token).collect(), queued]
}

/// Returns the token, and how many claims are ahead.
fn place(joined: Joined) -> (Token, usize) {
    match joined {
        Joined::Holding { token, .. } => (token, 0),
        Joined::Waiting(place) => (place.token.unwrap(), place.ahead),
        busy => panic!("a waiter got {busy:?}"),
    }
}

// S45
/// Many joins wait for the lock's row at the same time. Each returns how many had committed before
/// it. A greater token must mean a later commit.
async fn token_order_matches_commit_order<S: Server>() {
    const JOINS: usize = 8;
    let server = S::with(Setup::new().fast());
    let url = server.database();
    let stores = [two(&url).await, two(&url).await].concat();
    let first = claim("blocked", LONG, LONG);
    holding(&stores[0].join(&first, Mode::Try).await.unwrap());
    assert!(stores[0].leave(&first, None).await.unwrap());
    let blocker = server.hold(&url, BLOCK).await;
    let joining = join_all(&stores, "blocked", JOINS);
    until("all joins wait for the row", async || server.blocked() >= JOINS).await;
    drop(blocker);
    let [by_place, queued] = have_distinct_places(joining, &stores, "blocked").await;
    assert_eq!(queued, by_place);
}
