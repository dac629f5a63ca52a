//! What the ZooKeeper driver does that the store must not rely on, and what it relies on. A test that
//! fails here after an update of the driver says that a note in `store/zookeeper` is out of date.

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

/// Why the store makes its children itself, in tasks that are never dropped.
#[test]
fn a_dropped_lock_of_the_drivers_leaves_its_child_behind() {
    run(async {
        let proxy = Proxy::before(zookeeper().port());
        let (client, raw) = (through(&proxy, SESSION).await, raw(zookeeper().port()).await);
        make(&raw, "/driver/lock").await;
        let prefix = LockPrefix::new_curator("/driver/lock", "lock-").unwrap();
        proxy.hold_replies();
        {
            let mut locking = pin!(client.lock(prefix, b"", Acls::anyone_all()));
            until("the child", async || {
                assert!(is_pending(&mut locking).await, "answered though replies are held");
                children(&raw, "/driver/lock").await.len() == 1
            })
            .await;
        }
        proxy.thaw();
        // What the driver sends to clean up goes out before these, and is done before the last.
        for _ in 0..20 {
            client.list_children("/driver/lock").await.unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let left = children(&raw, "/driver/lock").await.len();
        assert_eq!(left, 1, "the driver cleans up by now: say so in the store's documentation");
    });
}

/// Why deadlines are reckoned by the store, and not left to the driver.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn s72_the_drivers_word_that_a_session_expired_comes_too_late() {
    run(async {
        let server = ZooKeeper::start();
        let proxy = Proxy::before(server.port());
        let session = Duration::from_secs(12);
        let (client, raw) = (through(&proxy, session).await, raw(server.port()).await);
        let options = CreateMode::Ephemeral.with_acls(Acls::anyone_all());
        client.create("/mine", b"", &options).await.unwrap();
        let mut watcher = client.state_watcher();
        proxy.refuse(true);
        until("gone", async || raw.check_stat("/mine").await.unwrap().is_none()).await;
        assert!(!client.state().is_terminated(), "the driver tells in time by now");
        let end = Instant::now() + PATIENCE;
        while watcher.changed().await != SessionState::Expired {
            assert!(Instant::now() < end, "never told");
        }
        let late = client.check_stat("/").await.unwrap_err();
        assert_eq!(late, Error::SessionExpired);
    });
}

/// What the store counts on: a request under way when the connection breaks fails, and is not sent
/// twice; the session goes on, watches included, with nothing but a state that says so.
#[test]
fn a_broken_connection_fails_what_is_under_way_and_nothing_else() {
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
            until("the child", async || {
                assert!(is_pending(&mut create).await, "answered though replies are held");
                children(&raw, "/driver/broken").await.len() == 1
            })
            .await;
            proxy.cut();
            proxy.thaw();
            create.await.unwrap_err();
        }
        // While it was away, what it watched was deleted.
        raw.delete("/driver/watched", None).await.unwrap();
        let event: WatchedEvent = tokio::time::timeout(PATIENCE, watcher.changed()).await.unwrap();
        assert_eq!(event.event_type, EventType::NodeDeleted);
        assert_eq!(children(&raw, "/driver/broken").await.len(), 1);
        let child = format!("/driver/broken/{}", children(&raw, "/driver/broken").await[0]);
        let stat = client.check_stat(&child).await.unwrap().unwrap();
        assert_eq!(stat.ephemeral_owner, session.0, "another session");
    });
}

/// What the store counts on: who stops waiting leaves no watch at the server.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn watches_are_taken_back() {
    run(async {
        let server = ZooKeeper::start();
        let client = raw(server.port()).await;
        make(&client, "/watched").await;
        for _ in 0..100 {
            let (_, _, watcher) = client.get_and_watch_data("/watched").await.unwrap();
            drop(watcher);
        }
        until("no watch is left", async || server.metric("zk_watch_count") == 0).await;
        // Nor does asking for what is not there leave one.
        client.get_and_watch_data("/nothing").await.unwrap_err();
        assert_eq!(server.metric("zk_watch_count"), 0);
        // The store's own, when a caller gives up waiting.
        let locks = connect(&server.url()).await;
        let guard = locks.mutex("a").lock().await.unwrap();
        for _ in 0..20 {
            locks.mutex("a").lock_timeout(Duration::from_millis(20)).await.unwrap_err();
        }
        // But for the one by which it hears of evictions.
        until("one watch is left", async || server.metric("zk_watch_count") == 1).await;
        release(guard).await;
    });
}
