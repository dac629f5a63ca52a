//! Access and rejected requests: URLs, ACLs, passwords, TLS, guarantees that the store does not
//! give.

use std::path::Path;
use std::time::Duration;

use crate::zookeeper_common::*;
use leasehold::ErrorKind;
use leasehold::store::{Durability, Guarantee, Survival};
use testbed::{ZooKeeper, ZooKeeperSetup, ZooKeepers, zookeeper};
use zookeeper_client::{Acl, Acls, AuthId, Client, CreateMode, Permission};

#[test]
#[ignore = "runs with ./test.sh --all"]
fn unreachable_server_is_reported() {
    run(async {
        let server = ZooKeeper::start();
        let url = server.url();
        server.kill();
        let error = leasehold::connect(&url).await.unwrap_err();
        is_one_line(&error, ErrorKind::Unreachable, &["majority", &url]);
    });
}

#[test]
fn missing_chroot_is_reported_unless_create_is_set() {
    run(async {
        let error = leasehold::connect(url("/no/such/path")).await.unwrap_err();
        is_one_line(&error, ErrorKind::Config, &["/no/such/path", "create=yes"]);
        assert!(leasehold::store::kit::is_no_store(&error), "{error}");
        let locks = connect(&url("/made/here?create=yes")).await;
        release(locks.mutex("a").lock().await.unwrap()).await;
        connect(&url("/made/here")).await;
    });
}

#[test]
fn permission_error_names_the_path() {
    run(async {
        let raw = raw(zookeeper().port()).await;
        make(&raw, "/forbidden").await;
        let read = [zookeeper_client::Acl::new(Permission::READ, AuthId::anyone())];
        raw.set_acl("/forbidden", &read, None).await.unwrap();
        let locks = connect(&url("/forbidden")).await;
        let error = locks.mutex("x").lock().await.unwrap_err();
        is_one_line(&error, ErrorKind::Denied, &["/forbidden/x", "ACL"]);
    });
}

/// A client that may create but not list used to leave a child behind, which blocked all clients.
#[test]
fn a_refused_claim_leaves_no_child() {
    run(async {
        let server = zookeeper();
        let raw = raw(server.port()).await;
        make(&raw, "/unlisted/x").await;
        let rights = Permission::CREATE | Permission::DELETE | Permission::ADMIN;
        let some = [Acl::new(rights, AuthId::anyone())];
        raw.set_acl("/unlisted/x", &some, None).await.unwrap();
        let locks = connect(&format!("{}/unlisted", server.url())).await;
        for error in [
            locks.mutex("x").lock().await.unwrap_err(),
            locks.mutex("x").try_lock().await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
            assert!(format!("{error:#}").contains("/unlisted/x"), "{error}");
        }
        // The child is deleted immediately, and not only when the session ends.
        let all = [Acl::new(Permission::ALL, AuthId::anyone())];
        raw.set_acl("/unlisted/x", &all, None).await.unwrap();
        let stat = raw.check_stat("/unlisted/x").await.unwrap().unwrap();
        assert_eq!(stat.num_children, 0);
    });
}

// S94
#[test]
fn credentials_guard_the_nodes_and_are_never_shown() {
    run(async {
        let at = |credentials: &str, rest: &str| {
            format!("zookeeper://{credentials}@127.0.0.1:{}{rest}", zookeeper().port())
        };
        let right = connect(&at("me:s3cret", "/private?create=yes")).await;
        let guard = right.mutex("x").lock().await.unwrap();
        assert!(!format!("{right:?} {}", right.url()).contains("s3cret"));
        // Another client with the same password has the same access.
        let same = connect(&at("me:s3cret", "/private")).await;
        let contended = same.mutex("x").try_lock().await.unwrap_err();
        assert_eq!(contended.kind(), ErrorKind::Contended);
        assert!(contended.holders().iter().any(|h| h.token == guard.grant()), "{contended}");
        for other in [url("/private"), at("me:wr0ng", "/private")] {
            // Since 3.9 the error comes when it connects, because no other user may even check
            // whether the node exists.
            let error = match leasehold::connect(&other).await {
                Ok(locks) => locks.mutex("x").try_lock().await.unwrap_err(),
                Err(error) => error,
            };
            is_one_line(&error, ErrorKind::Denied, &["/private"]);
            assert!(!format!("{error:#}").contains("wr0ng"));
            assert!(guard.is_held());
        }
    });
}

/// ZooKeeper accepts every password. The nodes' ACLs determine which one counts.
#[test]
fn changed_password_is_reread() {
    run(async {
        let connector = || Client::connector().with_session_timeout(Duration::from_secs(60));
        let at = format!("127.0.0.1:{}", zookeeper().port());
        let old = connector().with_auth("digest", b"app:old").connect(&at).await.unwrap();
        let options = CreateMode::Persistent.with_acls(Acls::creator_all());
        old.create("/changed", &[], &options).await.unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "old").unwrap();
        let url = format!("zookeeper://app@{at}/changed?password_file={}", file.path().display());
        let locks = connect(&url).await;
        let held = locks.mutex("held").lock().await.unwrap();
        old.auth("digest", b"app:new").await.unwrap();
        old.set_acl("/changed", &Acls::creator_all(), None).await.unwrap();
        std::fs::write(file.path(), "new").unwrap();
        let new = connector().with_auth("digest", b"app:new").connect(&at).await.unwrap();
        new.set_acl("/changed", &Acls::creator_all(), None).await.unwrap();
        let both = [locks.mutex("a"), locks.mutex("b")];
        let taken = tokio::join!(both[0].lock(), both[1].lock());
        release(taken.0.unwrap()).await;
        release(taken.1.unwrap()).await;
        // Its node belongs to the old identity, which the session keeps.
        release(held).await;
        std::fs::write(file.path(), "wrong").unwrap();
        let error = leasehold::connect(&url).await.unwrap_err();
        is_one_line(&error, ErrorKind::Denied, &["/changed", "ACL"]);
    });
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn tls_is_verified() {
    run(async {
        let server = ZooKeeper::with(&ZooKeeperSetup::new().tls());
        let (port, certificates) = (server.tls_port(), server.certificates());
        let ca = certificates.authority().display();
        let url = format!("zookeepers://127.0.0.1:{port}/tls?create=yes");
        let locks = connect(&format!("{url}&ca={ca}")).await;
        let plain = connect(&format!("{}/tls", server.url())).await;
        // TLS and plain connections share one queue.
        let guard = locks.mutex("x").lock().await.unwrap();
        let error = plain.mutex("x").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        let lock = plain.mutex("x");
        let waiting = tokio::spawn(async move { lock.lock_timeout(PATIENCE).await });
        until_waiting(&locks, "x", 1).await;
        release(guard).await;
        release(waiting.await.unwrap().unwrap()).await;

        let directory = tempfile::tempdir().unwrap();
        let other = testbed::Certificates::make(directory.path());
        let refused = [
            (url.clone(), "certificate"),
            (format!("{url}&ca={}", other.authority().display()), "certificate"),
            // TLS to the plain port, and a plain connection to the TLS port.
            (format!("zookeepers://localhost:{}/tls?ca={ca}", server.port()), "localhost"),
            (format!("zookeeper://127.0.0.1:{port}"), "majority"),
        ];
        // Each attempt takes a while to fail.
        let mut trying = tokio::task::JoinSet::new();
        for (url, says) in refused {
            trying.spawn(async move { (leasehold::connect(&url).await.unwrap_err(), says) });
        }
        for (error, says) in trying.join_all().await {
            is_one_line(&error, ErrorKind::Unreachable, &[says]);
        }
        for bad in ["/no/such/file", "/etc/hostname"] {
            let error = leasehold::connect(format!("{url}&ca={bad}")).await.unwrap_err();
            is_one_line(&error, ErrorKind::Config, &["ca=", bad]);
        }
    });
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn client_certificate_is_presented_if_the_server_requires_it() {
    run(async {
        let server = ZooKeeper::with(&ZooKeeperSetup::new().client_certificates());
        let (port, certificates) = (server.tls_port(), server.certificates());
        let ca = certificates.authority().display();
        let url = format!("zookeepers://127.0.0.1:{port}/tls?create=yes&ca={ca}");
        let (cert, key) = certificates.client();
        let shows = |cert: &Path, key: &Path| {
            format!("{url}&cert={}&key={}", cert.display(), key.display())
        };
        let locks = connect(&shows(cert, key)).await;
        release(locks.mutex("x").lock().await.unwrap()).await;

        let directory = tempfile::tempdir().unwrap();
        let other = testbed::Certificates::make(directory.path());
        let strange = shows(other.client().0, other.client().1);
        // Each attempt takes a while to fail.
        let (none, strange) = tokio::join!(leasehold::connect(&url), leasehold::connect(&strange));
        for error in [none.unwrap_err(), strange.unwrap_err()] {
            is_one_line(&error, ErrorKind::Unreachable, &["ertificate"]);
        }
        let error = leasehold::connect(shows(cert, other.client().1)).await.unwrap_err();
        is_one_line(&error, ErrorKind::Config, &["does not match cert="]);
    });
}

// F46
#[test]
fn require_refuses_guarantees_that_are_not_given() {
    run(async {
        let (one, all) = (zookeeper(), ZooKeepers::start());
        let promises = connect(&one.url()).await.guarantees().clone();
        assert_eq!((promises.grant, promises.token), (Durability::Disk, Durability::Disk));
        let promises = connect(&all.url()).await.guarantees().clone();
        assert_eq!((promises.grant, promises.token), (Durability::Majority, Durability::Majority));
        assert_eq!(promises.on_failover, Survival::Fenced);
        let majority = Guarantee::GrantDurability(Durability::Majority);
        for (url, wanted) in [(one.url(), majority), (all.url(), Guarantee::ExclusiveOnFailover)] {
            let refused = leasehold::builder().require(wanted).connect(&url).await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
        }
    });
}
