//! `leasehold stress` on servers. The workers are paused, killed and cut off, and the servers are
//! killed, paused and failed over. The resource that refuses late tokens is in the store itself.
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
    feature = "s3",
    feature = "http-store",
    feature = "serve"
))]

use crate::common::*;
use leasehold_campaign::{Asked, Breakable, breakable};
use serde_json::Value;
use testbed::{Disk, Setup, ZooKeeperSetup, where_disks_are_possible};

/// Runs with the fence in the store. Each kind of worker fault occurs, the unfenced resource is
/// corrupted, and the fenced one is not. With `--long` it takes a minute.
fn fenced(store: &str, seconds: u32, faults: &str) {
    let seconds = testbed::sized(60, seconds).to_string();
    // Each client has a thread or a process of its own in a server. If that gets no processor time
    // for half a second, the test cannot see that, so it needs a longer lease.
    let words = ["--store", store, "--seconds", &seconds, "--fence", "store", "--fault", faults];
    let words = [&words[..], &["--lease", "1s"]].concat();
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

// R35
#[test]
#[ignore = "runs with ./test.sh --all"]
fn sqlite_fence_holds_under_pauses_and_kills() {
    let directory = tempfile::tempdir().unwrap();
    fenced(&format!("sqlite:{}", directory.path().join("db").display()), 10, "pause,kill");
}

// R35
#[test]
#[ignore = "runs with ./test.sh --all"]
fn postgres_fence_holds_under_pauses_kills_and_cuts() {
    fenced(&testbed::postgres().database(), 12, "pause,kill,cut");
}

// R35
#[test]
#[ignore = "runs with ./test.sh --all"]
fn mariadb_fence_holds_under_pauses_kills_and_cuts() {
    fenced(&testbed::mariadb().database(), 12, "pause,kill,cut");
}

// R35
#[test]
#[ignore = "runs with ./test.sh --all"]
fn mysql_fence_holds_under_pauses_kills_and_cuts() {
    fenced(&testbed::mysql().database(), 12, "pause,kill,cut");
}

// R35
#[test]
#[ignore = "runs with ./test.sh --all"]
fn valkey_fence_holds_under_pauses_kills_and_cuts() {
    fenced(&testbed::valkey().url(), 10, "pause,kill,cut");
}

// R35
#[test]
#[ignore = "runs with ./test.sh --all"]
fn redis_fence_holds_under_pauses_kills_and_cuts() {
    fenced(&testbed::redis().url(), 10, "pause,kill,cut");
}

// R35
#[test]
#[ignore = "runs with ./test.sh --all"]
fn etcd_ownership_check_holds_under_pauses_kills_and_cuts() {
    fenced(&testbed::etcd().url(), 15, "pause,kill,cut");
}

// R35
#[test]
#[ignore = "runs with ./test.sh --all"]
fn zookeeper_ownership_check_holds_under_pauses_kills_and_cuts() {
    // A holder must be paused for longer than its session, or it loses nothing.
    fenced(&format!("{}?session=1s", testbed::zookeeper().url()), 20, "pause,kill,cut");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn redlock_keeps_its_guarantees_under_pauses_kills_and_cuts() {
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

/// Runs without a fence. Each kind of worker fault occurs, and locks are granted. The runs with a
/// fence show that the unfenced resource is corrupted, because that depends on chance.
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

// A holder must be paused for longer than its session, or it loses nothing. So these sessions are
// short.

// R36
#[test]
#[ignore = "runs with ./test.sh --all"]
fn memcached_keeps_its_guarantees_under_pauses_kills_and_cuts() {
    let server = testbed::Memcached::start();
    let store = server.url() + "?restart_delay_ms=0&session_ms=1000";
    promises(&store, testbed::sized(90, 15), "pause,kill,cut", 30);
}

// R36
#[test]
#[ignore = "runs with ./test.sh --all"]
fn object_store_keeps_its_guarantees_under_pauses_kills_and_cuts() {
    let server = testbed::SeaweedFs::start();
    // The server's time stamps have a resolution of one second, and two seconds are allowed for
    // clock differences.
    let store = server.url("torture") + "&session_ms=2000&poll_ms=50";
    promises(&store, testbed::sized(120, 25), "pause,kill,cut", 20);
}

// R36
#[test]
#[ignore = "runs with ./test.sh --all"]
fn nats_keeps_its_guarantees_under_pauses_kills_and_cuts() {
    let server = testbed::Nats::start();
    let store = server.url() + "/?session_ms=1000";
    promises(&store, testbed::sized(90, 15), "pause,kill,cut", 30);
}

/// Runs with wall clocks that are up to an hour wrong. The workers check that theirs are.
fn with_wrong_clocks(store: &str, seconds: u32) {
    let seconds = testbed::sized(60, seconds).to_string();
    let words = ["--store", store, "--seconds", &seconds, "--clock-skew", "1h"];
    let shows = |report: &Value| report["grants"].as_u64() >= Some(20);
    let report = enough(&words, shows, unbroken);
    println!("{store}: {}, {} grants", report["summary"], report["grants"]);
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn wrong_clocks_of_clients_of_redis_break_no_guarantee() {
    with_wrong_clocks(&testbed::redis().url(), 10);
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn wrong_clocks_of_clients_of_postgres_break_no_guarantee() {
    with_wrong_clocks(&testbed::postgres().database(), 12);
}

#[test]
fn wrong_clocks_are_refused_for_sqlite() {
    let output = torture(&["--store", "sqlite:/tmp/x", "--clock-skew", "1h"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("--clock-skew is not supported"), "{message}");
}

/// Runs while the servers are disturbed whenever the command given to the run requests it, at least
/// once for each kind of disturbance. With `--long` it takes a minute.
fn disturbed(mut servers: Breakable, seconds: u32, arguments: &[&str], faults: &str) -> Value {
    let asked = Asked::new();
    let (url, kinds) = (servers.url().to_owned(), servers.kinds());
    let command = asked.words();
    let seconds = testbed::sized(60, seconds).to_string();
    let mut words = vec!["--store", &url, "--seconds", &seconds, "--fault", faults];
    words.extend(arguments);
    words.extend(command.iter().map(String::as_str));
    let run = |words: &[&str]| asked.serve(&mut servers, || unbroken(words));
    // The runs above show that unfenced resources are corrupted, because that depends on chance.
    let spoils_nothing =
        |void: &Value| void.as_str().is_some_and(|v| v.starts_with("the unfenced"));
    let shows = |report: &Value| {
        report["faults"]["servers"].as_u64() >= Some(kinds)
            && report["void"].as_array().unwrap().iter().all(spoils_nothing)
    };
    enough(&words, shows, run)
}

// R42
#[test]
#[ignore = "runs with ./test.sh --all"]
fn redis_keeps_its_guarantees_when_killed_and_paused() {
    let report = disturbed(breakable::redis(Setup::new(), None), 20, &[], "pause,kill");
    assert!(
        claimed(&report, "exclusion"),
        "exclusion must be claimed, because the log is synced immediately: {report}"
    );
}

// R42
#[test]
#[ignore = "runs with ./test.sh --all"]
fn sentinels_fail_over() {
    let report = disturbed(breakable::sentinel(Setup::new()), 25, &[], "pause,kill");
    // A replica that did not receive a grant before the fail-over does not know it. The tokens and
    // the fence still protect the resource.
    assert!(!claimed(&report, "exclusion"), "{report}");
    assert!(claimed(&report, "token-order") && claimed(&report, "effect"), "{report}");
}

// R42
#[test]
#[ignore = "runs with ./test.sh --all"]
fn cluster_keeps_its_guarantees_when_nodes_are_killed_and_paused() {
    disturbed(breakable::cluster(Setup::new()), 20, &[], "pause,kill");
}

// R31
#[test]
#[ignore = "runs with ./test.sh --all"]
fn redlock_keeps_its_guarantees_when_two_of_five_nodes_fail() {
    disturbed(breakable::redlock(Setup::new()), 20, &[], "pause,kill");
}

// S44
#[test]
#[ignore = "runs with ./test.sh --all"]
fn postgres_keeps_its_guarantees_when_killed() {
    // The test does not pause the server, because a pause lasts long if a row is locked when it
    // begins. Each client has a process of its own in the server. If that process gets no processor
    // time, the test cannot see that, so it needs a longer lease.
    let servers = breakable::postgres(Setup::new(), None);
    let report = disturbed(servers, 20, &["--lease", "1s"], "kill");
    assert!(claimed(&report, "token-order") && claimed(&report, "effect"), "{report}");
}

// S44
#[test]
#[ignore = "runs with ./test.sh --all"]
fn mariadb_keeps_its_guarantees_when_killed() {
    // The test does not pause the server, for the same reason. Each client has a thread of its own
    // in the server, so the lease is longer, too.
    let servers = breakable::mariadb(Setup::new(), None);
    let report = disturbed(servers, 20, &["--lease", "1s"], "kill");
    assert!(claimed(&report, "token-order") && claimed(&report, "effect"), "{report}");
}

// S80
#[test]
#[ignore = "runs with ./test.sh --all"]
fn etcd_keeps_its_guarantees_when_members_are_killed_and_paused() {
    let servers = breakable::etcd(Setup::new(), None);
    let report = disturbed(servers, 20, &["--lease", "2s"], "pause,kill");
    assert!(claimed(&report, "token-order"), "{report}");
}

// R36
#[test]
#[ignore = "runs with ./test.sh --all"]
fn memcached_keeps_its_guarantees_when_killed_and_paused() {
    disturbed(breakable::memcached(Setup::new()), 20, &[], "pause,kill");
}

// R36
#[test]
#[ignore = "runs with ./test.sh --all"]
fn three_memcached_servers_keep_guarantees_when_killed_and_paused() {
    disturbed(breakable::memcached_three(), 20, &[], "pause,kill");
}

// R36
#[test]
#[ignore = "runs with ./test.sh --all"]
fn nats_keeps_its_guarantees_when_members_are_killed_and_paused() {
    let report = disturbed(breakable::nats(None), 20, &[], "pause,kill");
    assert!(claimed(&report, "token-order"), "{report}");
}

// S71
#[test]
#[ignore = "runs with ./test.sh --all"]
fn zookeeper_keeps_its_guarantees_when_members_are_killed_and_paused() {
    let servers = breakable::zookeeper(&ZooKeeperSetup::new(), None);
    let report = disturbed(servers, 25, &[], "pause,kill");
    // A leader that was paused almost until the next election may grant the lock to a second
    // holder.
    assert!(!claimed(&report, "exclusion") && claimed(&report, "token-order"), "{report}");
}

// R36
#[test]
#[ignore = "runs with ./test.sh --all"]
fn object_store_keeps_its_guarantees_when_killed_and_paused() {
    disturbed(breakable::objects(), 30, &[], "pause,kill");
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn lock_service_keeps_its_guarantees_while_its_servers_are_killed_and_paused() {
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_leasehold"));
    let report = disturbed(breakable::lock_service(program), 20, &[], "pause,kill");
    assert!(claimed(&report, "exclusion") && claimed(&report, "token-order"), "{report}");
}

/// Runs while members are partitioned from each other, and the power of all servers is cut.
fn outages(test: &str, servers: fn(Option<Disk>) -> Breakable, arguments: &[&str]) {
    // Each takes one to two minutes. `power.rs` of each store tests a power cut in seconds.
    if testbed::sized(false, true) {
        return;
    }
    where_disks_are_possible(test, || {
        let report = disturbed(servers(Some(Disk::new())), 30, arguments, "pause,kill");
        assert!(claimed(&report, "token-order"), "{report}");
    });
}

#[test]
#[ignore = "runs with ./test.sh --long"]
fn etcd_keeps_its_guarantees_through_partitions_and_power_cuts() {
    let name = "servers::etcd_keeps_its_guarantees_through_partitions_and_power_cuts";
    outages(name, |disk| breakable::etcd(Setup::new(), disk), &["--lease", "2s"]);
}

#[test]
#[ignore = "runs with ./test.sh --long"]
fn zookeeper_keeps_its_guarantees_through_partitions_and_power_cuts() {
    let name = "servers::zookeeper_keeps_its_guarantees_through_partitions_and_power_cuts";
    outages(name, |disk| breakable::zookeeper(&ZooKeeperSetup::new(), disk), &[]);
}

#[test]
#[ignore = "runs with ./test.sh --long"]
fn nats_keeps_its_guarantees_through_partitions_and_power_cuts() {
    let name = "servers::nats_keeps_its_guarantees_through_partitions_and_power_cuts";
    outages(name, breakable::nats, &[]);
}

#[test]
#[ignore = "runs with ./test.sh --long"]
fn redis_keeps_its_guarantees_through_power_cuts() {
    let name = "servers::redis_keeps_its_guarantees_through_power_cuts";
    outages(name, |disk| breakable::redis(Setup::new(), disk), &[]);
}
