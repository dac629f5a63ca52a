//! `leasehold run` on real databases: an exact count by forty processes, also while the server is
//! killed and comes back.

#![cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql", feature = "redlock"))]

mod common;

use std::process::{Child, Stdio};
use std::time::Duration;

use common::{Place, eventually};

const PROCESSES: usize = 40;
/// How often each of them counts.
const ROUNDS: usize = 2;

/// What each process does: reads, thinks, writes, and says under which token.
const COUNT: &str = r#"
n=$(cat "$1"); sleep 0.01; echo $((n + 1)) > "$1"; echo "$LEASEHOLD_TOKEN" >> "$1.tokens"
"#;

/// Starts one process for each of `processes`, runs `meanwhile`, and checks what was counted.
fn count(store: &str, meanwhile: impl FnOnce()) {
    let place = Place::new();
    let counter = place.path("counter");
    std::fs::write(&counter, "0\n").unwrap();
    let start = |_| -> Child {
        // 69: on a busy machine the server may be away for longer than is waited for; nothing was
        // done then. As a cron job would, again.
        let rounds = "i=0; while [ $i -lt \"$3\" ]; do \
                      \"$0\" run --store \"$1\" counter -- sh -c \"$4\" sh \"$2\"; \
                      code=$?; case $code in 0) i=$((i + 1)) ;; 69) sleep 0.1 ;; \
                      *) exit $code ;; esac; done";
        let mut command = std::process::Command::new("sh");
        command.args(["-c", rounds, common::LEASEHOLD, store]).arg(&counter);
        command.args([&ROUNDS.to_string(), COUNT]).stdin(Stdio::null()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let mut running: Vec<Child> = (0..PROCESSES).map(start).collect();
    meanwhile();
    eventually("all have counted", || {
        running.iter_mut().all(|child| child.try_wait().unwrap().is_some())
    });
    for child in running {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}", output.status);
    }
    let counted = place.read("counter");
    assert_eq!(counted.trim(), (PROCESSES * ROUNDS).to_string());
    let tokens = place.read("counter.tokens");
    let tokens: Vec<u64> = tokens.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(tokens.len(), PROCESSES * ROUNDS);
    assert!(tokens.is_sorted_by(|a, b| a < b), "tokens do not rise: {tokens:?}");
}

#[cfg(feature = "sqlite")]
#[test]
fn r22_forty_processes_count_exactly_on_sqlite() {
    let place = Place::new();
    count(&format!("sqlite:{}", place.path("locks.db").display()), || {});
}

#[cfg(feature = "postgres")]
#[test]
fn r22_forty_processes_count_exactly_while_postgres_is_killed() {
    let server = testbed::Postgres::start();
    count(&server.database(), || {
        for _ in 0..2 {
            std::thread::sleep(Duration::from_millis(700));
            server.kill();
            server.restart();
        }
    });
}

#[cfg(feature = "mysql")]
#[test]
fn r22_forty_processes_count_exactly_while_mariadb_is_killed() {
    let server = testbed::MariaDb::start();
    count(&server.database(), || {
        for _ in 0..2 {
            std::thread::sleep(Duration::from_millis(700));
            server.kill();
            server.restart();
        }
    });
}

#[cfg(feature = "postgres")]
#[test]
fn a_server_that_is_away_at_the_start_is_waited_for() {
    let place = Place::new();
    let server = testbed::Postgres::start();
    let url = server.database();
    let run = |options: &[&str]| {
        let words = [&["run", "--store", &url], options, &["away", "--", "echo", "ran"]].concat();
        place.leasehold(words)
    };
    server.kill();
    // Not waited for at all; for as long as the lock would be; and told truly.
    for (options, least) in [(&["--try"][..], 0), (&["--wait", "1s"], 1)] {
        let started = std::time::Instant::now();
        let output = run(options).output().unwrap();
        assert_eq!(output.status.code(), Some(69), "{output:?}");
        assert!(started.elapsed() >= Duration::from_secs(least), "{options:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("cannot be reached") && !said.contains("lh:lh"), "{said}");
        assert!(output.stdout.is_empty());
    }
    let mut patient = run(&[]);
    let patient = patient.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    server.restart();
    let output = patient.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"ran\n"[..]), "{output:?}");
}

/// Nothing is connected to.
#[cfg(all(feature = "sqlite", feature = "postgres", feature = "mysql"))]
#[test]
fn schema_prints_the_tables_that_are_asked_for() {
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
        let mysql = url.starts_with('m');
        assert_eq!((locks.contains("InnoDB"), transactions.contains("InnoDB")), (mysql, mysql));
    }
    assert_eq!(place.code(&["schema", "--store", "file:"]), 2);
}

#[cfg(feature = "redlock")]
#[test]
fn r31_forty_processes_count_exactly_while_two_of_five_redis_servers_are_killed() {
    let servers = testbed::Redlock::with(5, testbed::Setup::new().fast());
    // Just started, and two of them killed for good.
    let url = servers.url() + "?restart_delay_ms=0&node_timeout_ms=500";
    count(&url, || {
        for node in &servers.nodes()[1..3] {
            std::thread::sleep(Duration::from_millis(500));
            node.kill();
        }
    });
}
