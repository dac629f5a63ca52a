//! `leasehold torture` on servers: the workers are stopped, killed and cut off, the servers killed,
//! stopped and failed over, and the resource that refuses late tokens is in the store itself.
#![cfg(all(
    feature = "sqlite",
    feature = "postgres",
    feature = "mysql",
    feature = "redis",
    feature = "redlock",
    feature = "zookeeper",
    feature = "etcd",
    feature = "memcached",
    feature = "nats",
    feature = "s3"
))]

use crate::common::*;
use leasehold_campaign::{Asked, Breakable, breakable};
use serde_json::Value;
use testbed::{Setup, ZooKeeperSetup};

/// A run with the fence in the store, in which every worker's fault comes, the unfenced resource is
/// spoilt and the fenced one is not. With `--long`, of a minute.
fn fenced(store: &str, seconds: u32, faults: &str) {
    let seconds = testbed::sized(60, seconds).to_string();
    let words = ["--store", store, "--seconds", &seconds, "--fence", "store", "--fault", faults];
    let shows = |report: &Value| {
        report["verdict"] == "fine"
            && faults.split(',').all(|fault| report["faults"][fault].as_u64() >= Some(1))
            && report["fenced_updates_kept"].as_u64() >= Some(10)
    };
    let report = enough(&words, shows, unbroken);
    println!("{store}: {}, {} grants", report["summary"], report["grants"]);
    assert_eq!(report["fence"], "store");
    assert_eq!(report["negative_control"]["required"], true, "{report}");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r35_sqlite_and_its_fence_under_pauses_and_kills() {
    let directory = tempfile::tempdir().unwrap();
    fenced(&format!("sqlite:{}", directory.path().join("db").display()), 10, "pause,kill");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r35_postgres_and_its_fence_under_pauses_kills_and_cuts() {
    fenced(&testbed::postgres().database(), 12, "pause,kill,cut");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r35_mariadb_and_its_fence_under_pauses_kills_and_cuts() {
    fenced(&testbed::mariadb().database(), 12, "pause,kill,cut");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r35_mysql_and_its_fence_under_pauses_kills_and_cuts() {
    fenced(&testbed::mysql().database(), 12, "pause,kill,cut");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r35_valkey_and_its_fence_under_pauses_kills_and_cuts() {
    fenced(&testbed::valkey().url(), 10, "pause,kill,cut");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r35_redis_and_its_fence_under_pauses_kills_and_cuts() {
    fenced(&testbed::redis().url(), 10, "pause,kill,cut");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r35_etcd_and_its_ownership_under_pauses_kills_and_cuts() {
    fenced(&testbed::etcd().url(), 15, "pause,kill,cut");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r35_zookeeper_and_its_ownership_under_pauses_kills_and_cuts() {
    // A holder must be stopped for longer than its session, or it loses nothing.
    fenced(&format!("{}?session=1s", testbed::zookeeper().url()), 20, "pause,kill,cut");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn redlock_keeps_its_promises_under_pauses_kills_and_cuts() {
    let servers = testbed::Redlock::with(5, Setup::new().fast());
    let store = servers.url() + "?restart_delay_ms=0&node_timeout_ms=500";
    let seconds = testbed::sized("60", "10");
    let report = fine(&["--store", &store, "--seconds", seconds, "--fault", "pause,kill,cut"]);
    println!("{store}: {}, {} grants", report["summary"], report["grants"]);
    for fault in ["pause", "kill", "cut"] {
        assert!(report["faults"][fault].as_u64() >= Some(1), "{report}");
    }
    assert!(report["grants_by_kind"]["mutex"].as_u64() >= Some(10), "{report}");
}

/// A run without a fence, in which every worker's fault comes, and grants do. That the unfenced resource is
/// spoilt, which is chance, is shown by those with one.
fn promises(store: &str, seconds: u32, faults: &str, grants: u64) {
    let seconds = seconds.to_string();
    let words = ["--store", store, "--seconds", &seconds, "--fault", faults];
    let shows = |report: &Value| {
        faults.split(',').all(|fault| report["faults"][fault].as_u64() >= Some(1))
            && report["grants"].as_u64() >= Some(grants)
    };
    let report = enough(&words, shows, unbroken);
    println!("{store}: {}, {} grants", report["summary"], report["grants"]);
}

// A holder must be stopped for longer than its session, or it loses nothing: so these sessions are short.

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r36_memcached_keeps_its_promises_under_pauses_kills_and_cuts() {
    let server = testbed::Memcached::start();
    let store = server.url() + "?restart_delay_ms=0&session_ms=1000";
    promises(&store, testbed::sized(90, 15), "pause,kill,cut", 30);
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r36_objects_keep_their_promises_under_pauses_kills_and_cuts() {
    let server = testbed::SeaweedFs::start();
    // The servers' stamps are of whole seconds, and two are granted for what clocks may be apart.
    let store = server.url("torture") + "&session_ms=2000&poll_ms=50";
    promises(&store, testbed::sized(120, 25), "pause,kill,cut", 20);
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r36_nats_keeps_its_promises_under_pauses_kills_and_cuts() {
    let server = testbed::Nats::start();
    let store = server.url() + "/?session_ms=1000";
    promises(&store, testbed::sized(90, 15), "pause,kill,cut", 30);
}

/// A run during which the servers are disturbed whenever torture's own command asks: as often as there are
/// kinds of that, at least. With `--long`, of a minute.
fn disturbed(mut servers: Breakable, seconds: u32, arguments: &[&str], faults: &str) -> Value {
    let asked = Asked::new();
    let (url, kinds) = (servers.url().to_owned(), servers.kinds());
    let command = asked.words();
    let seconds = testbed::sized(60, seconds).to_string();
    let mut words = vec!["--store", &url, "--seconds", &seconds, "--fault", faults];
    words.extend(arguments);
    words.extend(command.iter().map(String::as_str));
    let run = |words: &[&str]| asked.serve(&mut servers, || unbroken(words));
    // That unfenced resources are spoilt, which is chance, is shown by the runs above.
    let spoils_nothing =
        |void: &Value| void.as_str().is_some_and(|v| v.starts_with("the unfenced"));
    let shows = |report: &Value| {
        report["faults"]["servers"].as_u64() >= Some(kinds)
            && report["void"].as_array().unwrap().iter().all(spoils_nothing)
    };
    enough(&words, shows, run)
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r42_redis_is_killed_and_stopped() {
    let report = disturbed(breakable::redis(Setup::new()), 20, &[], "pause,kill");
    assert!(claimed(&report, "exclusion"), "its log is synced at once: {report}");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r42_sentinels_fail_over() {
    let report = disturbed(breakable::sentinel(Setup::new()), 25, &[], "pause,kill");
    // A replica that had not heard of a grant knows nothing of it; tokens and the fence do.
    assert!(!claimed(&report, "exclusion"), "{report}");
    assert!(claimed(&report, "token-order") && claimed(&report, "effect"), "{report}");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r42_nodes_of_a_cluster_are_killed_and_stopped() {
    disturbed(breakable::cluster(Setup::new()), 20, &[], "pause,kill");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r31_two_of_five_nodes_of_redlock_are_killed_and_stopped() {
    disturbed(breakable::redlock(Setup::new()), 20, &[], "pause,kill");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn s44_postgres_is_killed() {
    // No pauses, which last long where a row is locked as they begin. And each client has a process of its own in
    // the server: if that has to wait for a processor, nobody else sees it, and only a longer lease bears it.
    let servers = breakable::postgres(Setup::new());
    let report = disturbed(servers, 20, &["--lease", "1s"], "kill");
    assert!(claimed(&report, "token-order") && claimed(&report, "effect"), "{report}");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn s44_mariadb_is_killed() {
    // No pauses, which last long where a row is locked as they begin.
    let report = disturbed(breakable::mariadb(Setup::new()), 20, &[], "kill");
    assert!(claimed(&report, "token-order") && claimed(&report, "effect"), "{report}");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn s80_members_of_etcd_are_killed_and_stopped() {
    let servers = breakable::etcd(Setup::new());
    let report = disturbed(servers, 20, &["--lease", "2s"], "pause,kill");
    assert!(claimed(&report, "token-order"), "{report}");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r36_memcached_is_killed_and_stopped() {
    disturbed(breakable::memcached(Setup::new()), 20, &[], "pause,kill");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r36_servers_of_memcached_are_killed_and_stopped_one_by_one() {
    disturbed(breakable::memcached_three(), 20, &[], "pause,kill");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r36_members_of_nats_are_killed_and_stopped() {
    let report = disturbed(breakable::nats(), 20, &[], "pause,kill");
    assert!(claimed(&report, "token-order"), "{report}");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn s71_members_of_zookeeper_are_killed_and_stopped() {
    let servers = breakable::zookeeper(&ZooKeeperSetup::new());
    let report = disturbed(servers, 25, &[], "pause,kill");
    // A leader that stood still until it was nearly time for another may let a second one in.
    assert!(!claimed(&report, "exclusion") && claimed(&report, "token-order"), "{report}");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn r36_objects_are_killed_and_stopped() {
    disturbed(breakable::objects(), 30, &[], "pause,kill");
}
