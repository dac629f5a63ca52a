//! Nodes of other clients: the names and the data in ZooKeeper, other recipes and versions, and
//! nodes that leasehold must not delete. (`zookeeper_interop.rs` uses real other clients.)

use crate::zookeeper_common::*;
use leasehold::store::Evict;
use leasehold::{ErrorKind, Token};
use testbed::{Version, ZooKeeper, ZooKeeperSetup, zookeeper};
use zookeeper_client::{Acls, CreateMode};

// S76
#[test]
fn nodes_have_the_documented_names_and_data() {
    run(async {
        let raw = raw(zookeeper().port()).await;
        for (naming, pattern) in [("curator", "-lock-"), ("kazoo", "__lock__")] {
            let locks = connect(&url(&format!("/wire-{naming}?create=yes&naming={naming}"))).await;
            let path = format!("/wire-{naming}/a%2fb:c");
            let guard = locks.mutex("a/b:c").label("the label").lock().await.unwrap();
            let all = children(&raw, &path).await;
            assert_eq!(all.len(), 1);
            assert!(all[0].contains(pattern) && all[0].ends_with("0000000000"), "{all:?}");
            let (data, stat) = raw.get_data(&format!("{path}/{}", all[0])).await.unwrap();
            let data: serde_json::Value = serde_json::from_slice(&data).unwrap();
            assert_eq!(data["label"], "the label");
            assert_eq!(data["pid"], std::process::id());
            assert_eq!(u64::try_from(stat.czxid).unwrap(), guard.token().get());
            assert!(stat.ephemeral_owner != 0);
            release(guard).await;
            assert_eq!(children(&raw, &path).await, [""; 0]);
        }
    });
}

// S76
#[test]
fn foreign_children_are_reported_as_a_mismatch() {
    run(async {
        let raw = raw(zookeeper().port()).await;
        let (curator, kazoo) = (
            connect(&url("/mixed?create=yes")).await,
            connect(&url("/mixed?create=yes&naming=kazoo")).await,
        );
        let guard = curator.mutex("a").lock().await.unwrap();
        let error = kazoo.mutex("a").lock().await.unwrap_err();
        is_one_line(&error, ErrorKind::Mismatch, &["/mixed/a", "naming=curator"]);
        release(guard).await;
        let guard = kazoo.mutex("b").lock().await.unwrap();
        let error = curator.mutex("b").lock().await.unwrap_err();
        is_one_line(&error, ErrorKind::Mismatch, &["/mixed/b", "naming=kazoo"]);
        release(guard).await;
        make(&raw, "/mixed/c/leases").await;
        let error = curator.mutex("c").lock().await.unwrap_err();
        is_one_line(&error, ErrorKind::Mismatch, &["/mixed/c", "leases"]);
        // The rejected claim left no node, and foreign nodes do not stop a listing of all locks.
        assert_eq!(children(&raw, "/mixed/c").await, ["leases"]);
        let listed = curator.list("").await.unwrap();
        assert!(listed.is_empty(), "{listed:?}");
    });
}

#[test]
fn a_name_under_an_ephemeral_node_is_refused() {
    run(async {
        let raw = raw(zookeeper().port()).await;
        make(&raw, "/eph").await;
        let options = CreateMode::Ephemeral.with_acls(Acls::anyone_all());
        raw.create("/eph/x", &[], &options).await.unwrap();
        let locks = connect(&url("/eph")).await;
        let error = locks.mutex("x").lock().await.unwrap_err();
        is_one_line(&error, ErrorKind::Mismatch, &["/eph/x"]);
    });
}

/// A child of another client that this user may not read is waited for like any other.
#[test]
fn unreadable_child_of_another_client_is_waited_for() {
    run(async {
        let server = zookeeper();
        let url = format!("{}/closed?create=yes", server.url());
        let (locks, other) = (connect(&url).await, connect(&url).await);
        let theirs = raw(server.port()).await;
        // A lock's own node would be deleted, because the server deletes empty containers.
        make(&theirs, "/closed/x").await;
        theirs.auth("digest", b"they:secret").await.unwrap();
        let options = CreateMode::EphemeralSequential.with_acls(Acls::creator_all());
        let path = "/closed/x/_c_01234567-89ab-cdef-0123-456789abcdef-lock-";
        let (_, number) = theirs.create(path, b"secret", &options).await.unwrap();
        let error = locks.mutex("x").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        // Since 3.9, the server reports only that it exists.
        let known = usize::from(Version::of_this_run() == Version::Oldest);
        assert_eq!(error.holders().len(), known, "{error}");
        let lock = other.mutex("x");
        let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
        until_waiting(&locks, "x", 1).await;
        theirs.delete(&format!("{path}{number}"), None).await.unwrap();
        release(waiting.await.unwrap().unwrap()).await;
    });
}

// F01
/// Claims wait for a child whose name ends like that of a lock, but leasehold does not delete it,
/// because its purpose is unknown.
#[test]
fn nodes_that_only_look_like_claims_are_not_deleted() {
    run(async {
        let raw = raw(zookeeper().port()).await;
        let locks = connect(&format!("{}/theirs?create=yes", zookeeper().url())).await;
        let stays = CreateMode::PersistentSequential.with_acls(Acls::anyone_all());
        for (name, child) in [("blocks", "block-"), ("locks", "lock-")] {
            let lock = format!("/theirs/{name}");
            make(&raw, &lock).await;
            let path = format!("{lock}/{child}");
            let (stat, number) = raw.create(&path, b"precious", &stays).await.unwrap();
            let token = Token::new(u64::try_from(stat.czxid).unwrap()).unwrap();
            for which in [Evict::Holders, Evict::Token(token)] {
                let error = locks.evict(name, which).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
                assert!(format!("{error:#}").contains(&format!("{child}{number}")), "{error}");
            }
            let kept = raw.get_data(&format!("{path}{number}")).await.unwrap();
            assert_eq!(kept.0, b"precious");
        }
        // A claim of another client, with a name as lock clients create it, is evicted on an
        // operator's request.
        make(&raw, "/theirs/x").await;
        make_child(&raw, "/theirs/x/_c_01234567-89ab-cdef-0123-456789abcdef-lock-").await;
        assert_eq!(locks.evict("x", Evict::Holders).await.unwrap(), 1);
        assert!(children(&raw, "/theirs/x").await.is_empty());
    });
}

// F01
/// A lock whose numbers run out deletes its node. If another program stores data in the node, it
/// stays.
#[test]
fn node_with_foreign_data_is_never_deleted() {
    run(async {
        let server = ZooKeeper::with(&ZooKeeperSetup::new().sequences_at("/late", 1 << 30));
        let raw = raw(server.port()).await;
        raw.set_data("/late", b"precious", None).await.unwrap();
        let locks = connect(&format!("{}/?session=60s", server.url())).await;
        release(locks.mutex("late").lock().await.unwrap()).await;
        assert_eq!(raw.get_data("/late").await.unwrap().0, b"precious");
    });
}

// F44
/// With a newer version in use, no error suggests to delete that version's claims, or to use
/// another name or path.
#[test]
fn claims_of_newer_versions_are_never_deleted() {
    run(async {
        let raw = raw(zookeeper().port()).await;
        for naming in ["curator", "kazoo"] {
            let url = format!("{}/newer-{naming}?create=yes&naming={naming}", zookeeper().url());
            let locks = connect(&url).await;
            let lock = format!("/newer-{naming}/x");
            make(&raw, &lock).await;
            let guid = match naming {
                "curator" => "_c_01234567-89ab-cdef-0123-456789abcdef",
                _ => "0123456789abcdef0123456789abcdef",
            };
            let newer = make_child(&raw, &format!("{lock}/{guid}-claim-v2-s1of3-")).await;
            for error in [
                locks.mutex("x").try_lock().await.unwrap_err(),
                locks.mutex("x").lock_timeout(PATIENCE).await.unwrap_err(),
                locks.evict("x", Evict::Holders).await.unwrap_err(),
            ] {
                assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
                let shown = format!("{error:#}");
                assert!(shown.contains("newer leasehold"), "{shown}");
                assert!(!shown.contains("delete"), "{shown}");
            }
            let there = newer.strip_prefix(&format!("{lock}/")).unwrap();
            assert_eq!(children(&raw, &lock).await, [there]);
            raw.delete(&newer, None).await.unwrap();
            // Unknown fields that a newer version writes into a child, for display, are ignored.
            let data = br#"{"host":"h","pid":7,"label":"l","since":"later"}"#;
            let child = format!(
                "{lock}/{}",
                match naming {
                    "curator" => format!("{guid}-lock-"),
                    _ => format!("{guid}-m__lock__"),
                }
            );
            let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
            let (_, number) = raw.create(&child, data, &options).await.unwrap();
            let error = locks.mutex("x").try_lock().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
            assert_eq!(error.holders()[0].holder.host, "h");
            raw.delete(&format!("{child}{number}"), None).await.unwrap();
        }
    });
}

// F65
/// One path is one kind of lock, for Curator too. Its mutex ignores its read-write lock.
#[test]
fn naming_error_states_only_the_fix() {
    run(async {
        let raw = raw(zookeeper().port()).await;
        let locks = connect(&format!("{}/kinds?create=yes", zookeeper().url())).await;
        make(&raw, "/kinds/x").await;
        let guid = "_c_01234567-89ab-cdef-0123-456789abcdef";
        for (marker, kind) in [("__WRIT__", "read-write"), ("__READ__", "read-write")] {
            let child = make_child(&raw, &format!("/kinds/x/{guid}-{marker}")).await;
            let error = locks.mutex("x").try_lock().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            assert!(format!("{error:#}").contains(kind), "{error}");
            raw.delete(&child, None).await.unwrap();
        }
        let child = make_child(&raw, &format!("/kinds/x/{guid}-lock-")).await;
        let error = locks.rwlock("x").try_write().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        assert!(format!("{error:#}").contains("mutex"), "{error}");
        raw.delete(&child, None).await.unwrap();
        // The other naming is all that the error reports.
        make_child(&raw, "/kinds/x/0123456789abcdef0123456789abcdef__lock__").await;
        let error = locks.mutex("x").try_lock().await.unwrap_err().to_string();
        assert!(error.contains("naming=kazoo") && !error.contains("semaphore"), "{error}");
    });
}
