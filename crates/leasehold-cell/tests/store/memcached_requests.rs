//! memcached: the costs of calls, and faults during calls.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::store::Evict;
use leasehold::store::cell::{CellStore, memcached};
use leasehold::{Builder, Client, ErrorKind};
use leasehold_test_support::*;
use testbed::{Memcached, Proxy, Setup};
use tokio::runtime::Handle;

/// The server is new, so no client can have lost a hold there.
const NEW: &str = "?restart_delay_ms=0";

async fn with_store(server: &Memcached) -> (Client, Arc<CellStore>) {
    let url = format!("{}{NEW}&{LONG_SESSION}", server.url());
    let store = Arc::new(memcached::connect(&url, &Handle::current()).await.unwrap());
    (Builder::default().store(store.clone()).unwrap(), store)
}

// R36
#[test]
fn pairs_and_failed_tries_take_two_round_trips_each() {
    const PAIRS: u64 = 200;
    run(async {
        // A separate server, so that only our own writes are counted.
        let server = &Memcached::start();
        let (locks, store) = with_store(server).await;
        let (others, theirs) = with_store(server).await;
        locks.mutex("r36").lock().await.unwrap().release().await.unwrap();
        let before = store.round_trips();
        for _ in 0..PAIRS {
            locks.mutex("r36").lock().await.unwrap().release().await.unwrap();
        }
        assert_eq!(store.round_trips() - before, 2 * PAIRS);
        let guard = locks.mutex("r36").lock().await.unwrap();
        others.mutex("r36").try_lock().await.unwrap_err();
        let (before, written) = (theirs.round_trips(), server.figure("cmd_set"));
        others.mutex("r36").try_lock().await.unwrap_err();
        assert!(theirs.round_trips() - before <= 3, "{}", theirs.round_trips() - before);
        assert_eq!(server.figure("cmd_set"), written, "a failed try_lock wrote to the store");
        guard.release().await.unwrap();
    });
}

// S06
#[test]
fn each_lost_reply_is_recognized() {
    run(async {
        let server = testbed::memcached();
        let proxy = Proxy::before(server.port());
        let url = proxy.in_front_of(server.port(), &(server.url() + NEW));
        let (ours, witness) = (connect(&url).await, connect(&(server.url() + NEW)).await);
        lost_replies_are_recognized(&proxy, &ours, &witness, 12).await;
    });
}

// S90
#[test]
fn foreign_values_are_reported_and_kept() {
    run(async {
        let server = testbed::memcached();
        let locks = connect(&(server.url() + NEW)).await;
        let key = "leasehold:l:s90-foreign";
        assert_eq!(server.say(&format!("set {key} 0 0 2\r\n42")), ["STORED"]);
        let error = locks.mutex("s90-foreign").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(format!("{error:#}").contains("set another prefix or folder"), "{error}");
        locks.evict("s90-foreign", Evict::Holders).await.unwrap_err();
        assert_eq!(server.say(&format!("get {key}"))[1], "42");
        // The value is larger than any of ours, so it is not even read.
        let big = "x".repeat(1_040_000);
        server.say(&format!("set {key} 0 0 {}\r\n{big}", big.len()));
        locks.mutex("s90-foreign").try_lock().await.unwrap_err();
        assert!(locks.mutex("s90-another").try_lock().await.unwrap().is_held());
    });
}

// S94
#[test]
fn connection_mistakes_name_the_fix() {
    run(async {
        let message = async |url: String| {
            let error = leasehold::connect(url).await.unwrap_err();
            assert!(!format!("{error:#}").contains("sekret"), "{error}");
            (error.kind(), format!("{error:#}"))
        };
        let closed = Memcached::start();
        closed.kill();
        let (kind, text) = message(closed.url()).await;
        assert!(
            kind == ErrorKind::Unreachable && text.contains("check that it is running"),
            "{text}"
        );
        let (kind, text) =
            message(format!("memcached://127.0.0.1:{}", testbed::redis().port())).await;
        assert!(
            kind == ErrorKind::Config && text.contains("does not speak memcached's protocol"),
            "{text}"
        );
        let no_cas = Memcached::with(Setup::new().arg("-C"));
        let (kind, text) = message(no_cas.url()).await;
        assert!(kind == ErrorKind::Config && text.contains("-C"), "{text}");
        // A server with users in a file.
        let users = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(users.path(), "lh:sekret\n").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        std::fs::set_permissions(users.path(), mode).unwrap();
        let path = users.path().to_str().unwrap();
        let closed = Memcached::with(Setup::new().arg("-Y").arg(path));
        let (kind, text) = message(closed.url()).await;
        assert!(kind == ErrorKind::Denied && text.contains("user:password@"), "{text}");
        let with = |user: &str| closed.url().replace("//", &format!("//{user}@")) + NEW;
        let (kind, text) = message(with("lh:sekret2")).await;
        assert!(kind == ErrorKind::Denied && text.contains("check the URL"), "{text}");
        let locks = connect(&with("lh:sekret")).await;
        assert!(locks.mutex("a").lock().await.unwrap().is_held());
        assert!(!format!("{locks:?}").contains("sekret"));
    });
}

#[test]
fn tls_is_verified() {
    run(async {
        let server = Memcached::with(Setup::new().client_certificates());
        let certificates = server.certificates();
        let url = format!("{}{NEW}&ca={}", server.url(), certificates.authority().display());
        let shows = |(cert, key): (&Path, &Path)| {
            format!("{url}&cert={}&key={}", cert.display(), key.display())
        };
        let locks = connect(&shows(certificates.client())).await;
        release(locks.mutex("tls").lock().await.unwrap()).await;
        // Listing the keys uses a separate connection.
        assert!(locks.list("").await.unwrap().is_empty());
        let directory = tempfile::tempdir().unwrap();
        let other = testbed::Certificates::make(directory.path());
        let authority = |one: &testbed::Certificates| one.authority().display().to_string();
        let unknown = shows(certificates.client());
        let unknown = unknown.replace(&authority(certificates), &authority(&other));
        for (bad, says) in [
            (url.clone(), "cert= and key="),
            (shows(other.client()), "cert= and key="),
            (unknown, "invalid peer certificate"),
            (shows(certificates.client()).replace("memcacheds:", "memcached:"), "needs TLS"),
            (shows((certificates.client().0, other.client().1)), "does not match"),
        ] {
            let error = leasehold::connect(&bad).await.unwrap_err();
            assert!(format!("{error:#}").contains(says), "{error:#}");
        }
    });
}

#[test]
fn changed_password_is_reread_for_the_next_connection() {
    run(async {
        let (users, file) =
            (tempfile::NamedTempFile::new().unwrap(), tempfile::NamedTempFile::new().unwrap());
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        std::fs::set_permissions(users.path(), mode).unwrap();
        std::fs::write(users.path(), "lh:old\n").unwrap();
        std::fs::write(file.path(), "old").unwrap();
        let server = Memcached::with(Setup::new().arg("-Y").arg(users.path().to_str().unwrap()));
        let url = server.url().replace("//", "//lh@") + NEW;
        let locks = connect(&format!("{url}&password_file={}", file.path().display())).await;
        std::fs::write(users.path(), "lh:new\n").unwrap();
        server.restart();
        until("the old password is refused", async || match locks.inspect("changed").await {
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
                error.to_string().contains("accepted before")
            }
            Ok(_) => false,
        })
        .await;
        std::fs::write(file.path(), "new").unwrap();
        until("the new password is used", async || locks.inspect("changed").await.is_ok()).await;
    });
}

// R10
/// Each of 32 clients acquires the lock repeatedly. None is starved, and all get about equally many
/// turns.
#[test]
fn thirty_two_clients_of_memcached_all_make_progress() {
    run(async {
        thirty_two_get_on(
            &(testbed::memcached().url() + NEW),
            Duration::from_secs(1),
            Duration::from_secs(6),
        )
        .await;
    });
}

/// Joins are refused if one connection cannot carry that many claims, and no hold is lost.
#[test]
fn joins_beyond_the_claim_limit_are_refused_without_losing_holds() {
    use leasehold::store::{Claim, Joined, Mode, Renew, Renewal, Store};
    use leasehold::{Kind, Name};
    const MOST: usize = 500;
    run(async {
        let server = &Memcached::start();
        let (_, store) = with_store(server).await;
        let claim = || Claim::new(Name::new("crowd").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let first = claim();
        let joined = store.join(&first, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
        let mut all = vec![first];
        let mut renewed = Instant::now();
        while all.len() < MOST {
            let one = claim();
            store.join(&one, Mode::Wait).await.unwrap();
            all.push(one);
            // On a busy machine, the joins take longer than a lease.
            if renewed.elapsed() > Duration::from_secs(1) {
                renewed = Instant::now();
                let renewals: Vec<Renew> =
                    all.iter().map(|c| Renew { claim: c.clone(), lease: c.lease }).collect();
                let renewed_all = store.renew(&renewals).await.unwrap();
                assert!(
                    renewed_all.iter().all(|renewed_all| !matches!(renewed_all, Renewal::Lost)),
                    "{}",
                    all.len()
                );
            }
        }
        let error = store.join(&claim(), Mode::Wait).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        assert!(error.to_string().contains("takes 500"), "{error}");
        let renewals: Vec<Renew> =
            all.iter().map(|c| Renew { claim: c.clone(), lease: c.lease }).collect();
        let renewed_all = store.renew(&renewals).await.unwrap();
        assert!(matches!(renewed_all[0], Renewal::Holding { .. }), "{:?}", renewed_all[0]);
    });
}
