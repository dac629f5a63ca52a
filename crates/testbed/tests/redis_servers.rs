//! Redis alone, with sentinels and as a cluster starts, breaks and recovers.

use testbed::{Cluster, Redis, Sentinel, Setup};

#[test]
fn redis_keeps_what_it_acknowledged_when_killed() {
    let server = Redis::start();
    server.command(&["SET", "kept", "7"]);
    server.kill();
    assert!(std::net::TcpStream::connect(("127.0.0.1", server.port())).is_err());
    server.restart();
    assert_eq!(server.command(&["GET", "kept"]), "7");
    server.restart_empty();
    assert_eq!(server.command(&["GET", "kept"]), "");
}

#[test]
fn redis_supports_a_password_tls_and_a_movable_clock() {
    let setup = Setup::new().fast().tls().movable_clock();
    let server = Redis::with(setup.arg("--requirepass").arg("secret"));
    assert!(server.url().starts_with("rediss://:secret@"), "{}", server.url());
    assert!(server.certificates().authority().exists() && server.socket().exists());
    let seconds = || {
        let time = server.command(&["TIME"]);
        time.lines().next().and_then(|s| s.parse::<i64>().ok()).expect("seconds")
    };
    let before = seconds();
    server.shift_clock(-3600);
    let shifted = before - seconds();
    assert!((3500..3700).contains(&shifted), "{shifted}");
}

#[test]
fn sentinels_fail_over() {
    let set = Sentinel::start();
    // After a stall of the machine, this may be another one than the first.
    let old = set.master().port();
    set.master().kill();
    set.wait_for_failover(old);
    assert_ne!(set.master().port(), old);
}

#[test]
fn a_cluster_moves_a_slot_and_fails_over() {
    let cluster = Cluster::with(3, 1, Setup::new().fast());
    // The slot of this key belongs to the first third.
    let slot: u16 = cluster.nodes()[0].command(&["CLUSTER", "KEYSLOT", "b"]).parse().expect("one");
    assert!(slot < 5461);
    cluster.nodes()[0].command(&["SET", "b", "7"]);
    cluster.begin_move(slot, 0, 1);
    assert_eq!(cluster.move_keys(slot, 0, 1, 10), 1);
    cluster.end_move(slot, 1);
    assert_eq!(cluster.nodes()[1].command(&["GET", "b"]), "7");
    cluster.nodes()[2].kill();
    cluster.wait_for_failover(2);
}
