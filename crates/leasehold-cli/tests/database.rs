//! `leasehold run` on real databases: an exact count by forty processes, also while the server is
//! killed and comes back.

#![cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]

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
        // 69: there was no server to connect to, so nothing was done; as a cron job would, again.
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
