//! memcached, several servers: where names are, one that is gone, and lists that differ.

use std::time::{Duration, Instant};

use leasehold::doctor::Severity;
use leasehold::{ErrorKind, Guard, Leasehold};
use leasehold_test_support::*;
use testbed::Memcached;

/// Sessions of a second, and nobody has held anything there before.
const SHORT: &str = "?session_ms=1000";
const NEW: &str = "?restart_delay_ms=0";

fn three() -> [Memcached; 3] {
    std::array::from_fn(|_| Memcached::start())
}

fn url(servers: &[&Memcached], parameters: &str) -> String {
    let hosts: Vec<String> = servers.iter().map(|s| format!("127.0.0.1:{}", s.port())).collect();
    format!("memcached://{}/{parameters}", hosts.join(","))
}

/// Takes so many locks, and tells how many queues each server has.
async fn held(locks: &Leasehold, names: usize, servers: &[Memcached]) -> (Vec<Guard>, Vec<usize>) {
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

/// A lock that is on this server, by the word of the server itself.
async fn on(locks: &Leasehold, server: &Memcached) -> (String, Guard) {
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

#[test]
fn r36_names_are_shared_out_whatever_the_order_and_listed_together() {
    const NAMES: usize = 60;
    run(async {
        let servers = three();
        let [a, b, c] = &servers;
        let ours = connect(&url(&[a, b, c], NEW)).await;
        let (guards, queues) = held(&ours, NAMES, &servers).await;
        assert_eq!(queues.iter().sum::<usize>(), NAMES);
        assert!(queues.iter().all(|n| *n >= 8), "{queues:?}");
        // In another order, the same locks.
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

/// One of three is killed: what is on it cannot be had, and whoever held it knows; all else goes on, also for who comes
/// only now. It comes back empty, and closed until nobody believes.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn r36_one_of_three_servers_is_gone_and_others_go_on() {
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
        assert!(format!("{error:#}").contains(&b.port().to_string()), "which one: {error}");
        let error = late.mutex(&*kept).try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        // A list without what is there would be taken for all.
        let error = late.list("").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        assert!(format!("{error:#}").contains(&b.port().to_string()), "which one: {error}");
        let found = late.diagnose().await.unwrap();
        assert!(found.iter().any(|finding| finding.id == "server-gone"), "{found:?}");
        tokio::time::timeout(PATIENCE, lost.lost()).await.unwrap();
        // Nobody pays for its neighbour: for longer than any lease.
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

/// Who names other servers would look for a lock elsewhere: it is refused, whichever came first, until the servers have
/// forgotten the old list; and then nobody is let in while one may hold by it.
#[test]
#[ignore = "runs with ./test.sh --all"]
fn r36_clients_with_another_list_are_refused() {
    run(async {
        let servers = three();
        let [a, b, c] = &servers;
        let (two, all) = (url(&[a, b], SHORT), url(&[a, b, c], SHORT));
        let old = connect(&two).await;
        let (name, guard) = on(&old, a).await;
        let told = async |url: String| {
            let error = match leasehold::connect(url).await {
                Err(error) => error,
                Ok(locks) => locks.mutex(&*name).try_lock().await.unwrap_err(),
            };
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(format!("{error:#}").contains("a different list of servers"), "{error}");
            assert_eq!(format!("{error:#}").lines().count(), 1, "{error}");
        };
        told(all.clone()).await;
        // By another name, and one of them alone.
        told(url(&[a, b], SHORT).replace("127.0.0.1", "localhost")).await;
        told(url(&[a], SHORT)).await;
        // By another way, and the same name: the same lock.
        let names = format!("names=127.0.0.1:{},127.0.0.1:{}&", a.port(), b.port());
        let way = url(&[a, b], &SHORT.replace('?', &format!("?{names}")));
        let way = connect(&way.replace("//127.0.0.1", "//localhost")).await;
        let error = way.mutex(&*name).try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
        // As the page says: all have the new list, then every server forgets.
        for server in &servers {
            server.flush();
        }
        let new = connect(&all).await;
        let next = new.mutex(&*name).lock_timeout(PATIENCE).await.unwrap();
        assert!(!guard.is_held(), "two hold");
        assert!(next.token() > guard.token());
        let error = old.mutex(&*name).try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        next.release().await.unwrap();
    });
}

/// Two servers under swapped names are two places for each lock: whoever swaps them is refused.
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
        // The same names the same way, in another order, are the same locks.
        let other = connect(&url(&[b, a], &format!("{NEW}&names=b,a"))).await;
        assert_eq!(ours.identity(), other.identity());
        let error = other.mutex("job-0").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
    });
}
