//! memcached with several servers: the server of a name, one server that is unreachable, and lists
//! that differ.

use std::time::{Duration, Instant};

use leasehold::doctor::Severity;
use leasehold::{Client, ErrorKind, MutexGuard};
use leasehold_test_support::*;
use testbed::Memcached;

/// `SHORT` has sessions of one second. `NEW` is for new servers, on which no client can have lost a
/// hold.
const SHORT: &str = "?session_ms=1000";
const NEW: &str = "?restart_delay_ms=0";

fn three() -> [Memcached; 3] {
    std::array::from_fn(|_| Memcached::start())
}

fn url(servers: &[&Memcached], parameters: &str) -> String {
    let hosts: Vec<String> = servers.iter().map(|s| format!("127.0.0.1:{}", s.port())).collect();
    format!("memcached://{}/{parameters}", hosts.join(","))
}

/// Acquires this many locks, and returns the number of queues on each server.
async fn held(
    locks: &Client,
    names: usize,
    servers: &[Memcached],
) -> (Vec<MutexGuard>, Vec<usize>) {
    let mut guards = Vec::new();
    for n in 0..names {
        guards.push(locks.mutex(format!("job-{n}")).try_lock().await.unwrap());
    }
    let queues = |server: &Memcached| {
        let is_there = |n: &usize| server.say(&format!("mg leasehold:l:job-{n} s")) != ["EN"];
        (0..names).filter(is_there).count()
    };
    (guards, servers.iter().map(queues).collect())
}

/// Returns a lock that is on this server, as the server itself shows.
async fn on(locks: &Client, server: &Memcached) -> (String, MutexGuard) {
    for n in 0.. {
        let name = format!("on-{}-{n}", server.port());
        let guard = locks.mutex(&*name).lock_timeout(PATIENCE).await.unwrap();
        if server.say(&format!("mg leasehold:l:{name} s")) != ["EN"] {
            return (name, guard);
        }
        guard.release().await.unwrap();
    }
    unreachable!()
}

// R36
#[test]
fn names_are_spread_in_any_server_order_and_listed_together() {
    const NAMES: usize = 60;
    run(async {
        let servers = three();
        let [a, b, c] = &servers;
        let ours = connect(&url(&[a, b, c], NEW)).await;
        let (guards, queues) = held(&ours, NAMES, &servers).await;
        assert_eq!(queues.iter().sum::<usize>(), NAMES);
        assert!(queues.iter().all(|n| *n >= 8), "{queues:?}");
        // The order of servers does not matter.
        let other = connect(&url(&[c, a, b], NEW)).await;
        assert_eq!(ours.identity(), other.identity());
        for n in 0..NAMES {
            let error = other.mutex(format!("job-{n}")).try_lock().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        }
        let listed = other.list("job-").await.unwrap();
        assert_eq!(listed.len(), NAMES);
        assert!(listed.is_sorted_by(|one, next| one.name < next.name));
        let found = other.diagnose().await.unwrap();
        for server in &servers {
            let host = format!("127.0.0.1:{}: ", server.port());
            let of_it = found.iter().filter(|finding| finding.what.starts_with(&host));
            let ids: Vec<_> = of_it.map(|finding| (finding.id, finding.severity)).collect();
            assert!(ids.contains(&("eviction-possible", Severity::Weak)), "{found:?}");
        }
        for guard in guards {
            guard.release().await.unwrap();
        }
    });
}

// R36
/// One of three servers is killed. Its locks are not available, and their holders find out. Other
/// locks are not affected, even for a client that connects now. The server comes back empty, and
/// grants nothing until all old holds have ended.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn locks_on_other_servers_survive_the_loss_of_one() {
    run(async {
        let servers = three();
        let [a, b, c] = &servers;
        let at = url(&[a, b, c], SHORT);
        let ours = connect(&at).await;
        let (gone, lost) = on(&ours, b).await;
        let (kept, guard) = on(&ours, c).await;
        b.kill();
        let began = Instant::now();
        let late = connect(&at).await;
        let error = late.mutex(&*gone).try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert!(
            format!("{error:#}").contains(&b.port().to_string()),
            "the error does not name the server: {error}"
        );
        let error = late.mutex(&*kept).try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        // A list without that server's locks would look complete.
        let error = late.list("").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert!(
            format!("{error:#}").contains(&b.port().to_string()),
            "the error does not name the server: {error}"
        );
        let found = late.diagnose().await.unwrap();
        assert!(found.iter().any(|finding| finding.id == "server-gone"), "{found:?}");
        tokio::time::timeout(PATIENCE, lost.lost()).await.unwrap();
        // The other servers' locks are not lost, even after a time longer than any lease.
        tokio::time::sleep(Duration::from_secs(3).saturating_sub(began.elapsed())).await;
        assert!(guard.is_held(), "{guard:?}");
        guard.release().await.unwrap();
        late.mutex(&*kept).lock_timeout(PATIENCE).await.unwrap().release().await.unwrap();
        b.restart();
        let back = Instant::now();
        let next = late.mutex(&*gone).lock_timeout(PATIENCE).await.unwrap();
        assert!(back.elapsed() >= Duration::from_secs(3), "{:?}", back.elapsed());
        assert!(next.token() > lost.token());
        next.release().await.unwrap();
        for server in &servers {
            server.kill();
        }
        let error = leasehold::connect(&at).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    });
}

// R36
/// A client with another list of servers would look for a lock elsewhere, so it gets an error
/// whichever client came first. This ends when the servers have lost the old list. Then no lock is
/// granted while an old hold may exist.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn clients_with_a_different_server_list_are_refused() {
    run(async {
        let servers = three();
        let [a, b, c] = &servers;
        let (two, all) = (url(&[a, b], SHORT), url(&[a, b, c], SHORT));
        let old = connect(&two).await;
        let (name, guard) = on(&old, a).await;
        let message = async |url: String| {
            let error = match leasehold::connect(url).await {
                Err(error) => error,
                Ok(locks) => locks.mutex(&*name).try_lock().await.unwrap_err(),
            };
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(format!("{error:#}").contains("a different list of servers"), "{error}");
            assert_eq!(format!("{error:#}").lines().count(), 1, "{error}");
        };
        message(all.clone()).await;
        // Other names, and one server alone.
        message(url(&[a, b], SHORT).replace("127.0.0.1", "localhost")).await;
        message(url(&[a], SHORT)).await;
        // Other addresses with the same names are the same locks.
        let names = format!("names=127.0.0.1:{},127.0.0.1:{}&", a.port(), b.port());
        let way = url(&[a, b], &SHORT.replace('?', &format!("?{names}")));
        let way = connect(&way.replace("//127.0.0.1", "//localhost")).await;
        let error = way.mutex(&*name).try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        // As the documentation says, all clients get the new list, and then all servers lose their
        // data.
        for server in &servers {
            server.flush();
        }
        let new = connect(&all).await;
        let next = new.mutex(&*name).lock_timeout(PATIENCE).await.unwrap();
        assert!(!guard.is_held(), "two clients hold the lock");
        assert!(next.token() > guard.token());
        let error = old.mutex(&*name).try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        next.release().await.unwrap();
    });
}

/// If two clients swap the names of two servers, each lock is in two places, so the second client
/// gets an error.
#[test]
fn clients_that_swap_two_servers_are_refused() {
    run(async {
        let servers: [Memcached; 2] = std::array::from_fn(|_| Memcached::start());
        let [a, b] = &servers;
        let names = |first: &Memcached, second: &Memcached| {
            url(&[first, second], &format!("{NEW}&names=a,b"))
        };
        let (right, swapped) = (names(a, b), names(b, a));
        let ours = connect(&right).await;
        let mut guards = Vec::new();
        for n in 0..20 {
            guards.push(ours.mutex(format!("job-{n}")).try_lock().await.unwrap());
        }
        let error = leasehold::connect(&*swapped).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        let text = format!("{error:#}");
        assert!(text.contains("swapped") && text.lines().count() == 1, "{text}");
        // The same names for the same servers in another order are the same locks.
        let other = connect(&url(&[b, a], &format!("{NEW}&names=b,a"))).await;
        assert_eq!(ours.identity(), other.identity());
        let error = other.mutex("job-0").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
    });
}
