//! Ownership as a condition of the caller's own transaction in ZooKeeper.

use crate::zookeeper_common::*;
use leasehold::store::Evict;
use leasehold::{ErrorKind, ZooKeeperGuardExt};
use testbed::zookeeper;
use zookeeper_client::Client;

/// Writes under the condition that the node of a holder exists.
async fn write(client: &Client, hold: &str, data: &str) -> bool {
    let mut writer = client.new_check_writer(hold, None).unwrap();
    writer.add_set_data("/ledger", data.as_bytes(), None).unwrap();
    writer.commit().await.is_ok()
}

// R35
#[test]
fn stale_holders_transaction_changes_nothing() {
    run(async {
        let raw = raw(zookeeper().port()).await;
        make(&raw, "/ledger").await;
        for naming in ["curator", "kazoo"] {
            let url = format!("{}/fence-{naming}?create=yes&naming={naming}", zookeeper().url());
            let (locks, other) = (connect(&url).await, connect(&url).await);
            let late = locks.mutex("ledger").lock().await.unwrap();
            let node = late.zookeeper_node().unwrap();
            assert!(write(&raw, &node, "first").await);
            // The holder is evicted before its guard finds out, as if its process were paused.
            locks.evict("ledger", Evict::Holders).await.unwrap();
            let next = other.mutex("ledger").lock().await.unwrap();
            assert!(write(&raw, &next.zookeeper_node().unwrap(), "second").await);
            assert!(!write(&raw, &node, "late").await);
            assert_eq!(raw.get_data("/ledger").await.unwrap().0, b"second");
            release(next).await;
            drop(late);
        }
        let memory = leasehold::connect("memory:").await.unwrap();
        let guard = memory.mutex("x").lock().await.unwrap();
        assert_eq!(guard.zookeeper_node().unwrap_err().kind(), ErrorKind::Unsupported);
    });
}

// R35
#[test]
fn permits_and_readers_cannot_be_used_as_fences() {
    run(async {
        let locks = connect(&zookeeper().url()).await;
        let permit = locks.semaphore("no-fence-s", 2).acquire().await.unwrap();
        let reader = locks.rwlock("no-fence-r").read().await.unwrap();
        for shared in [&*permit, &*reader] {
            let error = shared.zookeeper_node().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(format!("{error:#}").contains("exclusive"), "{error}");
        }
        let writer = locks.rwlock("no-fence-w").write().await.unwrap();
        writer.zookeeper_node().unwrap();
    });
}
