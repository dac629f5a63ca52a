//! Tokens with an offset, and the marks of fences when a lock moves or its resource has several nodes.

use std::sync::Arc;

use crate::common::*;
use leasehold::store::{Evict, MemoryStore};
use leasehold::{Builder, ErrorKind};

/// Tokens of a store with an offset are as good as any: raised everywhere, and known again.
#[tokio::test]
async fn f24_a_token_offset_raises_every_token() {
    const OFFSET: u64 = 4_000_000_000_000_000_000;
    let memory = Arc::new(MemoryStore::new());
    let plain = client(memory.clone());
    let raised = Builder::default().token_offset(OFFSET).store(memory.clone()).unwrap();
    let low = plain.mutex("a").lock().await.unwrap();
    let lock = raised.mutex("a");
    let waiting = tokio::spawn(async move { lock.lock().await });
    while waiters(&plain, "a").await == 0 {
        tokio::task::yield_now().await;
    }
    let busy = raised.mutex("a").try_lock().await.unwrap_err();
    assert_eq!(busy.holders()[0].token.get(), low.token().get() + OFFSET);
    let below = low.token().get();
    low.release().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    assert!(guard.token().get() > below + OFFSET);
    raised.check(&guard.sequencer()).await.unwrap();
    let error = plain.check(&guard.sequencer()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
    let shown = raised.read("a").await.unwrap().unwrap();
    assert_eq!(shown.claims[0].token, Some(guard.token()));
    assert_eq!(raised.list("").await.unwrap()[0].claims[0].token, Some(guard.token()));
    // What the store draws next is above what this client has seen, without the offset.
    assert!(plain.read("a").await.unwrap().unwrap().claims[0].token.unwrap().get() < OFFSET);
    assert_eq!(plain.evict("a", Evict::Token(guard.token())).await.unwrap(), 0);
    assert_eq!(raised.evict("a", Evict::Token(guard.token())).await.unwrap(), 1);
    let error = Builder::default().token_offset(u64::MAX).store(memory).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}

/// A lock that moves to a store with small tokens: the fence has seen greater ones.
#[cfg(all(feature = "etcd", feature = "sqlite"))]
#[tokio::test]
async fn f24_a_fence_outlives_the_move_of_its_lock() {
    use leasehold::database::sqlx;
    use leasehold::fence::sql::check_guard;
    let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    let pool = options.connect("sqlite::memory:").await.unwrap();
    leasehold::database::install(&pool).await.unwrap();
    let show = async |guard: &leasehold::Guard| {
        let mut tx = pool.begin().await.unwrap();
        let checked = check_guard(&mut tx, guard).await;
        tx.commit().await.unwrap();
        checked
    };
    let before = leasehold::connect("memory:f24-before").await.unwrap();
    let old = before.mutex("order").lock().await.unwrap();
    show(&old).await.unwrap();

    let url = testbed::etcd().url();
    let moved = leasehold::connect(&url).await.unwrap();
    let guard = moved.mutex("order").lock().await.unwrap();
    let refused = show(&guard).await.unwrap_err();
    let seen = refused.stale_token().unwrap().seen;
    guard.release().await.unwrap();

    // The step: what the fence has seen is where the new tokens begin.
    let url = format!("{url}?token_offset={seen}");
    let told = leasehold::connect(&url).await.unwrap();
    let guard = told.mutex("order").lock().await.unwrap();
    show(&guard).await.unwrap();
    // And a holder from before the move stays out, which it would not with a lowered mark.
    assert_eq!(show(&old).await.unwrap_err().kind(), ErrorKind::StaleToken);
    let next = told.mutex("order");
    let waiting = tokio::spawn(async move { next.lock().await });
    while waiters(&told, "order").await == 0 {
        tokio::task::yield_now().await;
    }
    let earlier = guard.token();
    guard.release().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    assert!(guard.token() > earlier);
    show(&guard).await.unwrap();
}

/// A resource of two nodes has a mark on each: a holder shows its token to both before it reads.
#[cfg(feature = "sqlite")]
#[tokio::test]
async fn f82_r51_a_resource_of_several_nodes_has_a_mark_on_each() {
    use leasehold::database::sqlx;
    use leasehold::fence::sql::check;
    let node = async || {
        let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
        let pool = options.connect("sqlite::memory:").await.unwrap();
        leasehold::database::install(&pool).await.unwrap();
        pool
    };
    let nodes = [node().await, node().await];
    let show = async |node: &sqlx::SqlitePool, token: leasehold::Token| {
        let mut tx = node.begin().await.unwrap();
        let checked = check(&mut tx, "order", token).await.map_err(|e| e.kind());
        tx.commit().await.unwrap();
        checked
    };
    let locks = client(Arc::new(MemoryStore::new()));
    let late = locks.mutex("order").lock().await.unwrap().token();
    let next = locks.mutex("order").lock().await.unwrap().token();
    // The next holder has been to one node only: the other lets the late one in.
    show(&nodes[0], next).await.unwrap();
    assert_eq!(show(&nodes[0], late).await, Err(ErrorKind::StaleToken));
    assert_eq!(show(&nodes[1], late).await, Ok(()));
    // So it shows its token to all, first thing.
    show(&nodes[1], next).await.unwrap();
    assert_eq!(show(&nodes[1], late).await, Err(ErrorKind::StaleToken));
}
