//! `leasehold run` on real servers: an exact count by forty processes, also while the server is
//! killed and comes back.

#![cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql", feature = "etcd"))]

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
    std::fs::write(place.path("counter"), "0\n").unwrap();
    count_in(&place, store, meanwhile);
    assert_eq!(place.read("counter").trim(), (PROCESSES * ROUNDS).to_string());
}

/// Starts and checks them, for a counter that others may count in as well.
fn count_in(place: &Place, store: &str, meanwhile: impl FnOnce()) {
    let counter = place.path("counter");
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

#[cfg(feature = "etcd")]
#[test]
fn r33_forty_processes_and_etcdctl_count_exactly_while_members_are_killed() {
    let cluster = testbed::Etcd::cluster();
    let place = Place::new();
    std::fs::write(place.path("counter"), "0\n").unwrap();
    // What etcdctl says in the end does not matter, only what was done under its lock: it may
    // itself fail with a member. So each of its turns is written down where it is taken.
    let turn = r#"n=$(cat "$0"); sleep 0.01; echo $((n + 1)) > "$0"; echo x >> "$0.theirs""#;
    let stop = place.path("stop");
    let theirs = |_| {
        let mut lock = cluster.etcdctl_command();
        lock.args(["lock", "counter", "--", "sh", "-c", turn]).arg(place.path("counter"));
        let mut words = vec![lock.get_program().to_owned()];
        words.extend(lock.get_args().map(ToOwned::to_owned));
        let mut again = std::process::Command::new("sh");
        again.args(["-c", "stop=$1; shift; until [ -e \"$stop\" ]; do \"$@\"; done", "sh"]);
        again.arg(&stop).args(words).env("ETCDCTL_API", "3");
        again.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        again.spawn().unwrap()
    };
    let others: Vec<Child> = (0..2).map(theirs).collect();
    count_in(&place, &cluster.url(), || {
        for member in 0..cluster.len() {
            std::thread::sleep(Duration::from_millis(700));
            cluster.kill(member);
            std::thread::sleep(Duration::from_millis(300));
            cluster.restart(member);
        }
    });
    std::fs::write(&stop, "").unwrap();
    for mut other in others {
        other.wait().unwrap();
    }
    let theirs = place.read("counter.theirs").lines().count();
    assert!(theirs > 0, "etcdctl never had a turn");
    assert_eq!(place.read("counter").trim(), (PROCESSES * ROUNDS + theirs).to_string());
}
