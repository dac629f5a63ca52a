//! Access and refusals: passwords, permissions, TLS, unusable servers and invalid requests.

use std::time::Duration;

use crate::redlock_common::*;
use leasehold::ErrorKind;
use leasehold::store::{Evict, Mode, Renew};
use testbed::{Redis, Redlock, Setup, redlock_url};

#[tokio::test]
async fn bad_setup_is_refused_at_connect() {
    let servers = servers(3);
    let ports: Vec<u16> = servers.nodes().iter().map(Redis::port).collect();
    for ports in [&ports[..2], &[&ports[..], &[1, 2, 3, 4, 5, 6, 7]].concat()] {
        let error = refused(&(redlock_url(ports.iter().copied()) + SOON)).await;
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    }
    // One server has a password. The error must not contain any secret.
    let locked = Redis::with(Setup::new().fast().arg("--requirepass").arg("right"));
    let hosts = redlock_url([ports[0], ports[1], locked.port()]);
    let error = refused(&(hosts.replace("redlock://", "redlock://:wrong@") + SOON)).await;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(!format!("{error:#}").contains("wrong@"), "{error}");
    // One server is a replica of another.
    let replica = Redis::replica_of(ports[0], Setup::new().fast());
    let error = refused(&(redlock_url([ports[0], ports[1], replica.port()]) + SOON)).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(format!("{error:#}").contains("replica"), "{error}");
    // The servers are down.
    servers.nodes()[1..].iter().for_each(Redis::kill);
    let error = refused(&(servers.url() + SOON)).await;
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
}

#[tokio::test]
async fn unsupported_requests_are_refused() {
    let servers = servers(3);
    let locks = connect(&(servers.url() + SOON)).await;
    let long = locks.mutex("a").lease(Duration::from_secs(31)).try_lock().await.unwrap_err();
    assert_eq!(long.kind(), ErrorKind::Config, "{long}");
    let ours = locks.mutex("leasehold:redlock").try_lock().await.unwrap_err();
    assert_eq!(ours.kind(), ErrorKind::InvalidName, "{ours}");
    let shared = locks.rwlock("a").try_read().await.unwrap_err();
    assert_eq!(shared.kind(), ErrorKind::Unsupported, "{shared}");
    // On most nodes the lock's key has another type.
    for node in &servers.nodes()[..2] {
        node.command(&["LPUSH", "list", "x"]);
    }
    let list = locks.mutex("list").lock_timeout(PATIENCE).await.unwrap_err();
    assert_eq!(list.kind(), ErrorKind::Corrupt, "{list}");
}

#[tokio::test]
async fn client_connects_with_tls_and_a_password() {
    let setup = Setup::new().fast().tls().arg("--requirepass").arg("p:w");
    let servers = Redlock::with(3, setup);
    let url: Vec<String> = servers.nodes().iter().map(Redis::url).collect();
    let hosts: Vec<&str> =
        url.iter().map(|u| u.rsplit_once('@').unwrap().1.trim_end_matches('/')).collect();
    let hosts = hosts.join(",");
    // Each server has its own authority. One file contains all of them.
    let directory = tempfile::tempdir().unwrap();
    let bundle = directory.path().join("authorities.pem");
    let all = servers.nodes().iter().map(|n| std::fs::read(n.certificates().authority()).unwrap());
    std::fs::write(&bundle, all.collect::<Vec<_>>().concat()).unwrap();
    let bundle = bundle.display();
    let url = format!(
        "redlocks://:p%3Aw@{hosts}?restart_delay_ms=0&node_timeout_ms=1000&tls_ca={bundle}"
    );
    let locks = connect(&url).await;
    locks.mutex("secret").try_lock().await.unwrap().release().await.unwrap();
    // Without the authorities no server is trusted.
    let error = refused(&format!("redlocks://:p%3Aw@{hosts}{SOON}")).await;
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
}

// R31
/// The documented permissions are sufficient for everything, and all of them are needed.
#[tokio::test]
async fn documented_permissions_are_sufficient_and_necessary() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/stores/redlock.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, rule) = page.split_once("```\nACL SETUSER ").unwrap();
    let (rule, _) = rule.split_once("```").unwrap();
    let words: Vec<&str> = rule.split_whitespace().collect();
    let servers = servers(3);
    for node in servers.nodes() {
        node.command(&[&["ACL", "SETUSER"], &words[..]].concat());
        node.command(&["CONFIG", "RESETSTAT"]);
    }
    let url = servers.url().replace("redlock://", "redlock://app:secret@") + "/1" + SOON;
    let locks = connect(&url).await;
    let second = connect(&url).await;
    let name = "app:rights";
    let guard = locks.mutex(name).lock().await.unwrap();
    let waiter = {
        let lock = second.mutex(name);
        tokio::spawn(async move { lock.lock_timeout(PATIENCE).await })
    };
    until("waiting", async || {
        locks.inspect(name).await.unwrap().is_some_and(|info| info.waiters().count() == 1)
    })
    .await;
    assert_eq!(locks.list("app:").await.unwrap().len(), 1);
    guard.release().await.unwrap();
    waiter.await.unwrap().unwrap().release().await.unwrap();
    let mut used = std::collections::BTreeSet::new();
    for node in servers.nodes() {
        used.extend(node.calls().into_iter().map(|(name, _)| name));
    }
    // The token needs a second round trip, the lease is extended, and keys are restored.
    let mut far = claim(name, Duration::from_secs(20));
    far.seen = 1 << 52;
    holding(&patiently(async || locks.store().join(&far, Mode::Try).await).await);
    assert!(second.mutex(name).try_lock().await.is_err());
    servers.nodes()[0].command(&[
        "EVAL",
        "redis.call('SELECT', 1) redis.call('DEL', KEYS[1])",
        "1",
        name,
    ]);
    let renew = [Renew { claim: far.clone(), lease: far.lease }];
    patiently(async || locks.store().renew(&renew).await).await;
    assert_eq!(locks.evict(name, Evict::Holders).await.unwrap(), 1);
    locks.mutex(name).lock_timeout(PATIENCE).await.unwrap().release().await.unwrap();
    let found = locks.diagnose().await.unwrap();
    assert!(found.iter().all(|f| f.id != "node"), "{found:?}");

    let unused = |right: &&&str| {
        right
            .strip_prefix('+')
            .is_some_and(|command| !used.iter().any(|call| call.split('|').next() == Some(command)))
    };
    let unused: Vec<_> = words.iter().filter(unused).collect();
    assert!(unused.is_empty(), "the permissions {unused:?} are not needed: {used:?}");

    // The error names a missing permission and the existing ones.
    for node in servers.nodes() {
        node.command(&["ACL", "SETUSER", "app", "-hmget"]);
    }
    let error = locks.mutex(name).try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert_eq!(format!("{error:#}").lines().count(), 1, "{error}");
    let rights = words.iter().filter(|word| word.starts_with('+'));
    let connecting = ["+hello", "+select"];
    for right in rights.filter(|right| !connecting.contains(right)) {
        assert!(format!("{error:#}").contains(right), "{right} is not in: {error}");
    }
}
