//! Objects: the store is killed, or does not answer; and what is in a lock's place that is not ours.

#![cfg(feature = "s3")]

use std::time::Duration;

use crate::common::*;
use leasehold::ErrorKind;
use leasehold::store::Evict;
use testbed::{Proxy, SeaweedFs};

#[test]
fn s44_an_object_store_that_is_killed_keeps_locks_and_tokens() {
    run(async {
        let server = SeaweedFs::start();
        let locks = connect(&(server.url("s44") + "&session_ms=60000")).await;
        let guard = locks.mutex("s44").lease(Duration::from_secs(60)).lock().await.unwrap();
        let others = connect(&(server.url("s44") + "&session_ms=60000&poll_ms=50")).await;
        server.kill();
        let error = others.mutex("s44").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        server.restart();
        let error = others.mutex("s44").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        assert!(guard.is_held());
        let token = guard.token();
        guard.release().await.unwrap();
        let next = others.mutex("s44").lock_timeout(PATIENCE).await.unwrap();
        assert!(next.token() > token);
        next.release().await.unwrap();
    });
}

/// Its client must know that it is over before anybody else is let in.
#[test]
fn s13_who_is_cut_off_from_the_objects_knows_that_it_lost() {
    run(async {
        let server = testbed::seaweed();
        let proxy = Proxy::before(server.port());
        let url = server.url("s13") + "&session_ms=2000&poll_ms=50";
        let through =
            url.replace(&server.endpoint(), &format!("http://127.0.0.1:{}", proxy.port()));
        let ours = connect(&through).await;
        let other = connect(&url).await;
        let guard = ours.mutex("s13").lock().await.unwrap();
        let waiting = {
            let lock = other.mutex("s13");
            tokio::spawn(async move { lock.lock_timeout(PATIENCE).await })
        };
        tokio::time::sleep(Duration::from_millis(300)).await;
        proxy.freeze();
        let next = waiting.await.unwrap().unwrap();
        assert!(!guard.is_held(), "two believe that they hold");
        assert!(next.token() > guard.token());
        proxy.thaw();
        next.release().await.unwrap();
    });
}

#[test]
fn s90_foreign_objects_are_told_of_and_stay() {
    run(async {
        let server = testbed::seaweed();
        let locks = connect(&server.url("s90")).await;
        server.ask("PUT", "s90/l:s90-foreign", "42");
        let error = locks.mutex("s90-foreign").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(format!("{error:#}").contains("another prefix or folder"), "{error}");
        locks.evict("s90-foreign", Evict::Holders).await.unwrap_err();
        assert_eq!(server.ask("GET", "s90/l:s90-foreign", "").1, "42");
        // A later version's is not to be gone around.
        server.ask("PUT", "s90/l:s90-later", "leasehold object 2 whatever\n");
        let error = locks.mutex("s90-later").try_lock().await.unwrap_err();
        assert!(format!("{error:#}").contains("upgrade this one"), "{error}");
        // Others are listed all the same, whatever their names are.
        let names = ["a b/é.*>", "a.b", "a%2Eb", "..", &"n".repeat(200), &"ü".repeat(250)];
        let _held = names_are_listed_beside(&locks, &names, &["s90-foreign", "s90-later"]).await;
        assert_eq!(locks.list("a.").await.unwrap().len(), 1);
    });
}
