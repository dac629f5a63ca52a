//! memcached: what calls cost, and what becomes of them when something goes wrong on the way.

use std::sync::Arc;
use std::time::Duration;

use leasehold::store::Evict;
use leasehold::store::cell::{CellStore, memcached};
use leasehold::{Builder, ErrorKind, Leasehold};
use leasehold_test_support::*;
use testbed::{Memcached, Proxy, Setup};
use tokio::runtime::Handle;

/// Nobody has held anything there before.
const NEW: &str = "?restart_delay_ms=0";

async fn with_store(server: &Memcached) -> (Leasehold, Arc<CellStore>) {
    let url = server.url() + NEW;
    let store = Arc::new(memcached::connect(&url, &Handle::current()).await.unwrap());
    (Builder::default().store(store.clone()).unwrap(), store)
}

#[test]
fn r36_a_pair_is_two_round_trips_and_a_failed_try_two() {
    const PAIRS: u64 = 200;
    run(async {
        // Of its own: what others write there is not counted.
        let server = &Memcached::start();
        let (locks, store) = with_store(server).await;
        let (others, theirs) = with_store(server).await;
        locks.mutex("r36").lock().await.unwrap().release().await.unwrap();
        let before = store.round_trips();
        for _ in 0..PAIRS {
            locks.mutex("r36").lock().await.unwrap().release().await.unwrap();
        }
        let pairs = store.round_trips() - before;
        // A touch of the session may come between.
        assert!((2 * PAIRS..2 * PAIRS + 4).contains(&pairs), "{pairs} for {PAIRS} pairs");
        let guard = locks.mutex("r36").lock().await.unwrap();
        others.mutex("r36").try_lock().await.unwrap_err();
        let (before, written) = (theirs.round_trips(), server.figure("cmd_set"));
        others.mutex("r36").try_lock().await.unwrap_err();
        assert!(theirs.round_trips() - before <= 3, "{}", theirs.round_trips() - before);
        assert_eq!(server.figure("cmd_set"), written, "a failed try wrote something");
        guard.release().await.unwrap();
    });
}

#[test]
fn s06_lost_replies_are_recognised() {
    run(async {
        let server = testbed::memcached();
        let proxy = Proxy::before(server.port());
        let url = proxy.in_front_of(server.port(), &(server.url() + NEW));
        let (ours, witness) = (connect(&url).await, connect(&(server.url() + NEW)).await);
        lost_replies_are_recognised(&proxy, &ours, &witness, 12).await;
    });
}

#[test]
fn s90_foreign_values_are_told_of_and_stay() {
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
        // Larger than anything of ours: not even read.
        let big = "x".repeat(1_040_000);
        server.say(&format!("set {key} 0 0 {}\r\n{big}", big.len()));
        locks.mutex("s90-foreign").try_lock().await.unwrap_err();
        assert!(locks.mutex("s90-another").try_lock().await.unwrap().is_held());
    });
}

#[test]
fn s94_connection_mistakes_name_the_fix() {
    run(async {
        let told = async |url: String| {
            let error = leasehold::connect(url).await.unwrap_err();
            assert!(!format!("{error:#}").contains("sekret"), "{error}");
            (error.kind(), format!("{error:#}"))
        };
        let closed = Memcached::start();
        closed.kill();
        let (kind, text) = told(closed.url()).await;
        assert!(
            kind == ErrorKind::Unreachable && text.contains("check that it is running"),
            "{text}"
        );
        let (kind, text) = told(format!("memcached://127.0.0.1:{}", testbed::redis().port())).await;
        assert!(
            kind == ErrorKind::Config && text.contains("does not speak memcached's protocol"),
            "{text}"
        );
        let no_cas = Memcached::with(Setup::new().arg("-C"));
        let (kind, text) = told(no_cas.url()).await;
        assert!(kind == ErrorKind::Config && text.contains("-C"), "{text}");
        // With users, in a file.
        let users = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(users.path(), "lh:sekret\n").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        std::fs::set_permissions(users.path(), mode).unwrap();
        let path = users.path().to_str().unwrap();
        let closed = Memcached::with(Setup::new().arg("-Y").arg(path));
        let (kind, text) = told(closed.url()).await;
        assert!(kind == ErrorKind::Denied && text.contains("user:password@"), "{text}");
        let with = |who: &str| closed.url().replace("//", &format!("//{who}@")) + NEW;
        let (kind, text) = told(with("lh:sekret2")).await;
        assert!(kind == ErrorKind::Denied && text.contains("check the URL"), "{text}");
        let locks = connect(&with("lh:sekret")).await;
        assert!(locks.mutex("a").lock().await.unwrap().is_held());
        assert!(!format!("{locks:?}").contains("sekret"));
    });
}

/// Each of 32 clients takes the lock again and again: nobody is kept out, and all get about as much.
#[test]
fn r10_thirty_two_clients_of_memcached_get_on() {
    run(async {
        thirty_two_get_on(
            &(testbed::memcached().url() + NEW),
            Duration::from_secs(1),
            Duration::from_secs(6),
        )
        .await;
    });
}

/// A crowd that one connection cannot carry is refused, and nobody's hold is lost by it.
#[test]
fn a_crowd_beyond_the_limit_is_refused_and_the_others_stay() {
    use leasehold::store::{Joined, Mode, Renew, Renewal, Store};
    use leasehold::{Claim, Kind, Name};
    const MOST: usize = 500;
    run(async {
        let server = &Memcached::start();
        let (_, store) = with_store(server).await;
        let claim = || Claim::new(Name::new("crowd").unwrap(), Kind::Mutex, 1, 1).unwrap();
        let first = claim();
        let joined = store.join(&first, Mode::Wait).await.unwrap();
        assert!(matches!(joined, Joined::Holding { .. }), "{joined:?}");
        let mut all = vec![first];
        while all.len() < MOST {
            let one = claim();
            store.join(&one, Mode::Wait).await.unwrap();
            all.push(one);
            // They are heartbeats too.
            if all.len() % 100 == 0 {
                let renewals: Vec<Renew> =
                    all.iter().map(|c| Renew { claim: c.clone(), lease: c.lease }).collect();
                let told = store.renew(&renewals).await.unwrap();
                assert!(told.iter().all(|told| !matches!(told, Renewal::Lost)), "{}", all.len());
            }
        }
        let error = store.join(&claim(), Mode::Wait).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        assert!(error.to_string().contains("takes 500"), "{error}");
        let renewals: Vec<Renew> =
            all.iter().map(|c| Renew { claim: c.clone(), lease: c.lease }).collect();
        let told = store.renew(&renewals).await.unwrap();
        assert!(matches!(told[0], Renewal::Holding { .. }), "{:?}", told[0]);
    });
}
