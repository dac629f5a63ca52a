//! Behavior of the ZooKeeper driver that the store must not rely on, and behavior that it relies
//! on. If a test fails after an update of the driver, a comment in `store/zookeeper` is out of
//! date.

use std::pin::pin;
use std::time::{Duration, Instant};

use crate::zookeeper_common::*;
use testbed::{Proxy, ZooKeeper, zookeeper};
use zookeeper_client::{
    Acls, Client, CreateMode, Error, EventType, LockPrefix, SessionState, WatchedEvent,
};

async fn through(proxy: &Proxy, session: Duration) -> Client {
    let connector = Client::connector().with_session_timeout(session);
    connector.connect(&format!("127.0.0.1:{}", proxy.port())).await.unwrap()
}

const SESSION: Duration = Duration::from_secs(20);

/// Shows why the store creates its children itself, in tasks that are never dropped.
#[test]
fn dropped_driver_lock_leaves_its_child_behind() {
    run(async {
        let proxy = Proxy::before(zookeeper().port());
        let (client, raw) = (through(&proxy, SESSION).await, raw(zookeeper().port()).await);
        make(&raw, "/driver/lock").await;
        let prefix = LockPrefix::new_curator("/driver/lock", "lock-").unwrap();
        proxy.hold_replies();
        {
            let mut locking = pin!(client.lock(prefix, b"", Acls::anyone_all()));
            until("the child exists", async || {
                assert!(
                    is_pending(&mut locking).await,
                    "the call ended, although replies are held"
                );
                children(&raw, "/driver/lock").await.len() == 1
            })
            .await;
        }
        proxy.thaw();
        // The driver's cleanup would be sent before these requests, and be done before the last of
        // them.
        for _ in 0..20 {
            client.list_children("/driver/lock").await.unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let left = children(&raw, "/driver/lock").await.len();
        assert_eq!(left, 1, "the driver now cleans up: update the store's documentation");
    });
}

// S72
/// Shows why the store calculates deadlines itself, and does not rely on the driver.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn driver_reports_session_expiry_too_late() {
    run(async {
        let server = ZooKeeper::start();
        let proxy = Proxy::before(server.port());
        let session = Duration::from_secs(12);
        let (client, raw) = (through(&proxy, session).await, raw(server.port()).await);
        let options = CreateMode::Ephemeral.with_acls(Acls::anyone_all());
        client.create("/mine", b"", &options).await.unwrap();
        let mut watcher = client.state_watcher();
        proxy.refuse(true);
        until("the node is deleted", async || raw.check_stat("/mine").await.unwrap().is_none())
            .await;
        assert!(!client.state().is_terminated(), "the driver now reports the expiry in time");
        let end = Instant::now() + PATIENCE;
        while watcher.changed().await != SessionState::Expired {
            assert!(Instant::now() < end, "the driver never reported the expiry");
        }
        let late = client.check_stat("/").await.unwrap_err();
        assert_eq!(late, Error::SessionExpired);
    });
}

/// Checks what the store relies on. A request under way when the connection breaks fails and is not
/// sent twice. The session continues with its watches, and only its state reports the break.
#[test]
fn broken_connection_fails_only_requests_in_flight() {
    run(async {
        let proxy = Proxy::before(zookeeper().port());
        let (client, raw) = (through(&proxy, SESSION).await, raw(zookeeper().port()).await);
        make(&raw, "/driver/broken").await;
        make(&raw, "/driver/watched").await;
        let (_, _, watcher) = client.get_and_watch_data("/driver/watched").await.unwrap();
        let session = client.session_id();
        proxy.hold_replies();
        let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
        {
            let mut create = pin!(client.create("/driver/broken/x-", b"", &options));
            until("the child exists", async || {
                assert!(is_pending(&mut create).await, "the call ended, although replies are held");
                children(&raw, "/driver/broken").await.len() == 1
            })
            .await;
            proxy.cut();
            proxy.thaw();
            create.await.unwrap_err();
        }
        // The watched node is deleted while the connection is broken.
        raw.delete("/driver/watched", None).await.unwrap();
        let event: WatchedEvent = tokio::time::timeout(PATIENCE, watcher.changed()).await.unwrap();
        assert_eq!(event.event_type, EventType::NodeDeleted);
        assert_eq!(children(&raw, "/driver/broken").await.len(), 1);
        let child = format!("/driver/broken/{}", children(&raw, "/driver/broken").await[0]);
        let stat = client.check_stat(&child).await.unwrap().unwrap();
        assert_eq!(stat.ephemeral_owner, session.0, "the node belongs to another session");
    });
}

/// Checks that a waiter that stops waiting leaves no watch at the server, which the store relies
/// on.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn abandoned_watches_are_removed() {
    run(async {
        let server = ZooKeeper::start();
        let client = raw(server.port()).await;
        make(&client, "/watched").await;
        for _ in 0..100 {
            let (_, _, watcher) = client.get_and_watch_data("/watched").await.unwrap();
            drop(watcher);
        }
        until("no watch is left", async || server.metric("zk_watch_count") == 0).await;
        // A read of a missing node leaves no watch either.
        client.get_and_watch_data("/nothing").await.unwrap_err();
        assert_eq!(server.metric("zk_watch_count"), 0);
        // The same holds for the store's own watches, when a caller gives up waiting.
        let locks = connect(&server.url()).await;
        let guard = locks.mutex("a").lock().await.unwrap();
        for _ in 0..20 {
            locks.mutex("a").lock_timeout(Duration::from_millis(20)).await.unwrap_err();
        }
        // Only the watch for evictions is left.
        until("one watch is left", async || server.metric("zk_watch_count") == 1).await;
        release(guard).await;
    });
}
