//! `leasehold run` on real servers: an exact count by forty processes, also while the server is
//! killed and restarted.

#![cfg(any(
    feature = "sqlite",
    feature = "postgres",
    feature = "mysql",
    feature = "redis",
    feature = "etcd",
    feature = "memcached",
    feature = "nats",
    feature = "s3"
))]

use std::process::Stdio;
use std::time::Duration;

use crate::common::Place;
use crate::common::count::Counting;

/// Lets forty processes count on this store. `meanwhile` runs at the same time.
fn count(store: &str, meanwhile: impl FnOnce(&Counting)) {
    let counting = Counting::start(store);
    meanwhile(&counting);
    counting.finish(0);
}

// R22
#[cfg(feature = "sqlite")]
#[test]
fn forty_processes_count_exactly_on_sqlite() {
    let place = Place::new();
    count(&format!("sqlite:{}", place.path("locks.db").display()), |_| {});
}

// R22
#[cfg(feature = "postgres")]
#[test]
#[ignore = "runs with ./test.sh --all"]
fn forty_processes_count_exactly_while_postgres_is_killed() {
    let server = testbed::Postgres::start();
    count(&server.database(), |counting| {
        for counted in [1, 15] {
            counting.in_the_midst(counted, || server.kill());
            server.restart();
        }
    });
}

// R22
#[cfg(feature = "mysql")]
#[test]
#[ignore = "runs with ./test.sh --all"]
fn forty_processes_count_exactly_while_mariadb_is_killed() {
    let server = testbed::MariaDb::start();
    count(&server.database(), |counting| {
        for counted in [1, 15] {
            counting.in_the_midst(counted, || server.kill());
            server.restart();
        }
    });
}

// R27
#[cfg(feature = "redis")]
#[test]
#[ignore = "runs with ./test.sh --all"]
fn forty_processes_count_exactly_while_redis_is_killed() {
    let server = testbed::Redis::start();
    count(&server.url(), |counting| {
        for counted in [1, 15] {
            counting.in_the_midst(counted, || server.kill());
            server.restart();
        }
    });
}

// R36
#[cfg(feature = "memcached")]
#[test]
#[ignore = "runs with ./test.sh --all"]
fn forty_processes_count_exactly_while_memcached_is_killed() {
    let server = testbed::Memcached::start();
    count(&(server.url() + "?session_ms=5000"), |counting| {
        counting.in_the_midst(15, || server.kill());
        // The server has lost its data. No client may acquire the lock until the old leases have
        // expired.
        server.restart();
    });
}

// R36
/// The servers share out the lock names. Each of them is killed in turn, including the one that has
/// the lock.
#[cfg(feature = "memcached")]
#[test]
#[ignore = "runs with ./test.sh --all"]
fn forty_processes_count_exactly_while_three_memcached_servers_are_killed() {
    let servers: [testbed::Memcached; 3] = std::array::from_fn(|_| testbed::Memcached::start());
    let hosts = servers.each_ref().map(|server| format!("127.0.0.1:{}", server.port()));
    count(&format!("memcached://{}/?session_ms=5000", hosts.join(",")), |counting| {
        for (server, counted) in servers.iter().zip([5, 15, 25]) {
            counting.in_the_midst(counted, || server.kill());
            server.restart();
        }
    });
}

// R36
#[cfg(feature = "nats")]
#[test]
#[ignore = "runs with ./test.sh --all"]
fn forty_processes_count_exactly_while_a_member_of_nats_is_killed() {
    let nats = testbed::NatsCluster::start();
    count(&nats.url(), |counting| {
        counting.in_the_midst(5, || nats.kill(0));
        nats.restart(0);
    });
}

// R36
#[cfg(feature = "nats")]
#[test]
#[ignore = "runs with ./test.sh --all"]
fn forty_processes_count_exactly_while_nats_is_killed() {
    let server = testbed::Nats::start();
    count(&server.url(), |counting| {
        counting.in_the_midst(15, || server.kill());
        server.restart();
    });
}

// R36
#[cfg(feature = "s3")]
#[test]
#[ignore = "runs with ./test.sh --all"]
fn forty_processes_count_exactly_while_an_object_store_is_killed() {
    let server = testbed::SeaweedFs::start();
    count(&(server.url("count") + "&poll_ms=100"), |counting| {
        counting.in_the_midst(15, || server.kill());
        server.restart();
    });
}

// R29
/// A fail-over may lose a grant. But a client that waits for a replica before it counts loses no
/// grant if the only replica is the one that is promoted.
#[cfg(feature = "redis")]
#[test]
#[ignore = "runs with ./test.sh --all"]
fn forty_processes_count_exactly_while_sentinels_fail_over() {
    let set = testbed::Sentinel::start();
    let old = set.master().port();
    count(&(set.url() + "?replicas=1&replicas_short=accept"), |counting| {
        counting.in_the_midst(5, || set.servers()[0].kill());
        set.wait_for_failover(old);
        // With a replica again, no client waits for one until the time limit.
        set.servers()[0].restart();
    });
}

// R29
#[cfg(feature = "redis")]
#[test]
#[ignore = "runs with ./test.sh --all"]
fn forty_processes_count_exactly_on_a_cluster_whose_slots_move() {
    let cluster = testbed::Cluster::unbroken();
    let slot = cluster.nodes()[0].command(&["CLUSTER", "KEYSLOT", "counter"]);
    let slot: u16 = slot.parse().unwrap();
    let home = usize::from(slot) * 3 / 16_384;
    count(&cluster.url(), |counting| {
        for round in 0..3 {
            let (from, to) = ((home + round) % 3, (home + round + 1) % 3);
            counting.in_the_midst(1 + 10 * round, || cluster.begin_move(slot, from, to));
            while cluster.move_keys(slot, from, to, 100) > 0 {}
            cluster.end_move(slot, to);
        }
    });
}

#[cfg(feature = "postgres")]
#[test]
fn run_waits_for_a_server_that_is_unreachable_at_start() {
    let place = Place::new();
    let server = testbed::Postgres::start();
    let url = server.database();
    let run = |options: &[&str]| {
        let words = [&["run", "--store", &url], options, &["away", "--", "echo", "ran"]].concat();
        place.leasehold(words)
    };
    server.kill();
    // With `--try` there is no wait for the server, and with `--wait` the wait for it is as long as
    // for the lock. Both errors must name the real cause.
    for (options, least) in [(&["--try"][..], 0), (&["--wait", "1s"], 1)] {
        let started = std::time::Instant::now();
        let output = run(options).output().unwrap();
        assert_eq!(output.status.code(), Some(69), "{output:?}");
        assert!(started.elapsed() >= Duration::from_secs(least), "{options:?}");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(crate::common::is_cause_and_hint(&stderr), "{stderr}");
        assert!(
            stderr.contains("cannot reach the database") && !stderr.contains("lh:lh"),
            "{stderr}"
        );
        assert!(output.stdout.is_empty());
    }
    for options in [&["--once-per", "1h"][..], &[]] {
        server.kill();
        let mut patient = run(options);
        let patient = patient.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_secs(1));
        server.restart();
        let output = patient.wait_with_output().unwrap();
        let ended = (output.status.code(), &output.stdout[..]);
        assert_eq!(ended, (Some(0), &b"ran\n"[..]), "{options:?}: {output:?}");
        // This ends the period of `--once-per`.
        place.leasehold(["evict", "--store", &url, "away"]).output().unwrap();
    }
}

/// MariaDB logs a warning for each client that closes its connection without a goodbye.
#[cfg(feature = "mysql")]
#[test]
fn commands_close_their_mariadb_connections_cleanly() {
    let place = Place::new();
    let server = testbed::MariaDb::with(testbed::Setup::new().fast());
    let url = server.database();
    for words in [
        &["run", "--store", &url, "x", "--", "true"][..],
        &["run", "--try", "--store", &url, "x", "--", "false"],
        &["ls", "--store", &url],
        &["show", "--store", &url, "x"],
        &["evict", "--store", &url, "x"],
        &["doctor", "--store", &url],
    ] {
        let output = place.output(words);
        let stderr = String::from_utf8(output.stderr).unwrap();
        let expected = ["has no holder", "no lock is in use"];
        assert!(
            stderr.is_empty() || expected.iter().any(|part| stderr.contains(part)),
            "{words:?}: {stderr}"
        );
    }
    let sessions = "SELECT count(*) FROM information_schema.processlist WHERE user = 'lh'";
    crate::common::eventually("the sessions end", || server.admin(sessions) == "0");
    let aborted = server.admin("SHOW GLOBAL STATUS LIKE 'Aborted_clients'");
    assert_eq!(aborted, "Aborted_clients\t0", "{}", server.log());
}

/// `schema` must not connect to the store.
#[cfg(all(feature = "sqlite", feature = "postgres", feature = "mysql"))]
#[test]
fn schema_prints_the_requested_tables() {
    let place = Place::new();
    let printed = |words: &[&str]| {
        let output = place.output(&[&["schema", "--store"], words].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    for url in ["sqlite:/x/y.db", "postgres://h/d", "mysql://h/d", "mariadb://h/d"] {
        let locks = printed(&[url, "--tables", "locks"]);
        let transactions = printed(&[url, "--tables", "transactions"]);
        assert!(locks.contains("leasehold_claims") && !locks.contains("leasehold_once"));
        assert!(!transactions.contains("leasehold_claims"));
        for table in ["leasehold_row_lock", "leasehold_once", "leasehold_fence"] {
            assert!(transactions.contains(&format!("CREATE TABLE IF NOT EXISTS {table} (")));
        }
        let all = printed(&[url]);
        assert!(all.contains(&locks) && all.contains(&transactions));
        let statements = printed(&[url, "--statements"]);
        for of in ["leasehold_row_lock", "leasehold_once", "version", "leasehold_fence"] {
            assert!(statements.contains(of), "{of}: {statements}");
        }
        let mysql = url.starts_with('m');
        assert!(!statements.contains("CREATE TABLE") && statements.contains("1213") == mysql);
        assert_eq!((locks.contains("InnoDB"), transactions.contains("InnoDB")), (mysql, mysql));
    }
    assert_eq!(place.code(&["schema", "--store", "file:"]), 2);
}

// R31
#[cfg(feature = "redlock")]
#[test]
#[ignore = "runs with ./test.sh --all"]
fn forty_processes_count_exactly_while_two_of_five_redis_servers_are_killed() {
    let servers = testbed::Redlock::with(5, testbed::Setup::new().fast());
    // The servers have just been started. Two of them are killed permanently.
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=500";
    count(&url, |counting| {
        for (node, counted) in servers.nodes()[1..3].iter().zip([1, 15]) {
            counting.in_the_midst(counted, || node.kill());
        }
    });
}

// R33
#[cfg(feature = "etcd")]
#[test]
#[ignore = "runs with ./test.sh --all"]
fn forty_processes_and_etcdctl_count_exactly_while_members_are_killed() {
    let cluster = testbed::Etcd::cluster();
    let counting = Counting::start(&cluster.url());
    let counter = counting.counter();
    let beside = |what: &str| counter.with_extension(what);
    // The result of etcdctl does not matter, because it may fail together with a member. Only what
    // it did under its lock matters. So each of its counts is recorded in a file at that moment.
    let turn = r#"n=$(cat "$0"); sleep 0.01; echo $((n + 1)) > "$0"; echo x >> "$0.theirs""#;
    let stop = beside("stop");
    let theirs = |_| {
        let mut lock = cluster.etcdctl_command();
        lock.args(["lock", "counter", "--", "sh", "-c", turn]).arg(&counter);
        let mut words = vec![lock.get_program().to_owned()];
        words.extend(lock.get_args().map(ToOwned::to_owned));
        let mut again = std::process::Command::new("sh");
        again.args(["-c", "stop=$1; shift; until [ -e \"$stop\" ]; do \"$@\"; done", "sh"]);
        again.arg(&stop).args(words).env("ETCDCTL_API", "3");
        again.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        again.spawn().unwrap()
    };
    let others: Vec<std::process::Child> = (0..2).map(theirs).collect();
    for member in 0..cluster.len() {
        counting.in_the_midst(1 + 10 * member, || cluster.kill(member));
        std::thread::sleep(Duration::from_millis(300));
        cluster.restart(member);
    }
    let counted = counting.wait();
    std::fs::write(&stop, "").unwrap();
    for mut other in others {
        other.wait().unwrap();
    }
    let theirs = std::fs::read_to_string(beside("theirs")).unwrap().lines().count();
    assert!(theirs > 0, "etcdctl never held the lock");
    counted.check(theirs);
}

// F70
/// Simulates a firewall that drops the connections in the middle of a job. The release is retried
/// on a new connection, so there is no warning.
#[cfg(any(feature = "postgres", feature = "mysql", feature = "redis", feature = "etcd"))]
fn ends_well_on_connections_that_fell_silent(port: u16, url: &str) {
    let place = Place::new();
    let proxy = testbed::Proxy::before(port);
    let url = if url.contains(&format!(":{port}/")) { url.to_owned() } else { format!("{url}/") };
    let store = proxy.in_front_of(port, &url);
    let go = place.path("go");
    let script = format!("echo ready; while ! [ -e {} ]; do sleep 0.05; done", go.display());
    let mut job = place.hold_with(&["--store", &store], "x", &script);
    proxy.silence();
    std::fs::write(go, "").unwrap();
    assert_eq!(job.code(), 0);
    assert_eq!(job.errors(), "", "a warning about a slow release");
}

// F70
#[cfg(feature = "postgres")]
#[test]
fn release_survives_a_half_open_connection_on_postgres() {
    let server = testbed::postgres();
    ends_well_on_connections_that_fell_silent(server.port(), &server.database());
}

// F70
#[cfg(feature = "mysql")]
#[test]
fn release_survives_a_half_open_connection_on_mariadb() {
    let server = testbed::mariadb();
    ends_well_on_connections_that_fell_silent(server.port(), &server.database());
}

// F70
#[cfg(feature = "redis")]
#[test]
fn release_survives_a_half_open_connection_on_redis() {
    let server = testbed::redis();
    ends_well_on_connections_that_fell_silent(server.port(), &server.url());
}

// F70
#[cfg(feature = "etcd")]
#[test]
fn release_survives_a_half_open_connection_on_etcd() {
    let server = testbed::etcd();
    ends_well_on_connections_that_fell_silent(server.port(0), &server.url());
}
