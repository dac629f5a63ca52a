//! Tokens with an offset, and the tokens that fences store, when a lock moves or its resource has
//! several nodes.

use std::sync::Arc;

use crate::common::*;
use leasehold::store::{Evict, MemoryStore};
use leasehold::{Builder, ErrorKind};

// F24
/// Tokens with an offset work like any others. They are raised everywhere, and recognized when they
/// are passed back.
#[tokio::test]
async fn a_token_offset_raises_every_token() {
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
    let shown = raised.inspect("a").await.unwrap().unwrap();
    assert_eq!(shown.claims[0].token, Some(guard.grant()));
    assert_eq!(raised.list("").await.unwrap()[0].claims[0].token, Some(guard.grant()));
    // The store's next token is larger than what this client has seen, without the offset.
    assert!(plain.inspect("a").await.unwrap().unwrap().claims[0].token.unwrap().get() < OFFSET);
    assert_eq!(plain.evict("a", Evict::Token(guard.grant())).await.unwrap(), 0);
    assert_eq!(raised.evict("a", Evict::Token(guard.grant())).await.unwrap(), 1);
    let error = Builder::default().token_offset(u64::MAX).store(memory).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}

// F24
/// A lock moves to a store with small tokens, and its fence has seen larger ones.
#[cfg(all(feature = "etcd", feature = "sqlite"))]
#[tokio::test]
async fn token_offset_keeps_a_fence_usable_after_its_lock_moves() {
    use leasehold::database::sqlx;
    use leasehold::fence::sql::check_guard;
    let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
    let pool = options.connect("sqlite::memory:").await.unwrap();
    leasehold::database::install(&pool).await.unwrap();
    let show = async |guard: &leasehold::MutexGuard| {
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

    // The fix is an offset: the new tokens begin above the highest token that the fence has seen.
    let url = format!("{url}?token_offset={seen}");
    let client = leasehold::connect(&url).await.unwrap();
    let guard = client.mutex("order").lock().await.unwrap();
    show(&guard).await.unwrap();
    // A holder from before the move is still rejected. If the fence's stored token had been
    // lowered, the holder would be accepted.
    assert_eq!(show(&old).await.unwrap_err().kind(), ErrorKind::StaleToken);
    let next = client.mutex("order");
    let waiting = tokio::spawn(async move { next.lock().await });
    while waiters(&client, "order").await == 0 {
        tokio::task::yield_now().await;
    }
    let earlier = guard.token();
    guard.release().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    assert!(guard.token() > earlier);
    show(&guard).await.unwrap();
}

// F82, R51
/// A resource of two nodes stores a token on each. A holder shows its token to both before it
/// reads.
#[cfg(feature = "sqlite")]
#[tokio::test]
async fn resource_of_several_nodes_stores_a_token_on_each() {
    use leasehold::database::sqlx;
    use leasehold::fence::sql::check;
    let node = async || {
        let options = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1);
        let pool = options.connect("sqlite::memory:").await.unwrap();
        leasehold::database::install(&pool).await.unwrap();
        pool
    };
    let nodes = [node().await, node().await];
    let show = async |node: &sqlx::SqlitePool, token: leasehold::FencingToken| {
        let mut tx = node.begin().await.unwrap();
        let checked = check(&mut tx, "order", token).await.map_err(|e| e.kind());
        tx.commit().await.unwrap();
        checked
    };
    let locks = client(Arc::new(MemoryStore::new()));
    let late = locks.mutex("order").lock().await.unwrap().token();
    let next = locks.mutex("order").lock().await.unwrap().token();
    // The next holder has shown its token to one node only, so the other node accepts the late
    // holder.
    show(&nodes[0], next).await.unwrap();
    assert_eq!(show(&nodes[0], late).await, Err(ErrorKind::StaleToken));
    assert_eq!(show(&nodes[1], late).await, Ok(()));
    // So the next holder shows its token to all nodes first.
    show(&nodes[1], next).await.unwrap();
    assert_eq!(show(&nodes[1], late).await, Err(ErrorKind::StaleToken));
}
