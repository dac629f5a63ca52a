//! Every store in its basic use: the command, the Python and Node clients, and a short stress test.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::signal::Signal;

use crate::common::{LEASEHOLD, Place, Running};

/// Defines two tests for each store, `…::on_STORE` and, with `torture`, `…::stress_on_STORE`.
macro_rules! each_store {
    ($($(#[$attribute:meta])* $store:ident, $feature:literal, $url:expr, $stress:expr;)+) => {$(
        mod $store {
            #[test]
            $(#[$attribute])*
            #[cfg(feature = $feature)]
            fn command_and_clients() {
                super::command_and_clients(&$url);
            }

            #[test]
            $(#[$attribute])*
            #[cfg(all(feature = $feature, feature = "torture"))]
            fn stress() {
                super::stress(&$stress);
            }
        }
    )+};
}

each_store! {
    on_sqlite, "sqlite", crate::each_store::sqlite(), crate::each_store::sqlite();
    on_postgres, "postgres", testbed::postgres().database(), testbed::postgres().database();
    on_mysql, "mysql", testbed::mariadb().database(), testbed::mariadb().database();
    on_redis, "redis", testbed::redis().url(), testbed::redis().url();
    on_redlock, "redlock", crate::each_store::redlock(), crate::each_store::redlock();
    on_zookeeper, "zookeeper", format!("{}/smoke?create=yes", testbed::zookeeper().url()),
        format!("{}?session={{session_ms}}ms", testbed::zookeeper().url());
    on_etcd, "etcd", testbed::etcd().url(), testbed::etcd().url();
    on_memcached, "memcached", testbed::memcached().url() + "?restart_delay_ms=0",
        testbed::memcached().url() + "?restart_delay_ms=0&session_ms={session_ms}";
    on_nats, "nats", testbed::nats().url(), testbed::nats().url() + "/?session_ms={session_ms}";
    #[cfg(feature = "serve")]
    on_http, "http-store", crate::each_store::http(), crate::each_store::http();
    on_s3, "s3", testbed::seaweed().url("smoke"),
        testbed::seaweed().url("stress") + "&session_ms={session_ms}&poll_ms=200";
    #[ignore = "runs with ./test.sh --all"]
    on_gs, "gs", testbed::google().url("smoke") + "&poll_ms=200",
        testbed::google().url("stress") + "&session_ms={session_ms}&poll_ms=200";
    #[ignore = "runs with ./test.sh --all"]
    on_az, "az", testbed::azurite().url("smoke") + "&poll_ms=200",
        testbed::azurite().url("stress") + "&session_ms={session_ms}&poll_ms=200";
}

#[cfg(feature = "sqlite")]
fn sqlite() -> String {
    // All clients of this run share one directory. The first client creates the database file.
    static PLACE: std::sync::LazyLock<Place> = std::sync::LazyLock::new(Place::new);
    format!("sqlite:{}", PLACE.path("locks.db").display())
}

#[cfg(all(feature = "http-store", feature = "serve"))]
fn http() -> String {
    use testbed::LockService;
    static SERVER: std::sync::LazyLock<LockService> =
        std::sync::LazyLock::new(|| LockService::start(Path::new(LEASEHOLD), "memory:"));
    format!("http://127.0.0.1:{}/", SERVER.port())
}

#[cfg(feature = "redlock")]
fn redlock() -> String {
    testbed::redlock().url() + "?restart_delay_ms=0&node_timeout_ms=5000"
}

/// Waits until no other test uses an object store. Their emulators need much processor time for
/// each request, so these tests run one at a time. Returns `None` for other stores.
#[allow(dead_code, reason = "used if a store is built in")]
fn turn(store: &str) -> Option<MutexGuard<'static, ()>> {
    static OBJECTS: Mutex<()> = Mutex::new(());
    let is_objects = ["s3:", "gs:", "az:"].iter().any(|scheme| store.starts_with(scheme));
    is_objects.then(|| OBJECTS.lock().unwrap_or_else(PoisonError::into_inner))
}

#[allow(dead_code, reason = "used if a store is built in")]
#[track_caller]
fn succeeds(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[allow(dead_code, reason = "used if a store is built in")]
/// Holds the lock with a command, and checks what a second command, `show`, `ls` and the clients
/// see of it.
fn command_and_clients(store: &str) {
    let _turn = turn(store);
    let place = Place::new();
    let leasehold = |words: &[&str]| {
        let mut command = place.leasehold(words);
        command.env("LEASEHOLD_STORE", store);
        command
    };
    let hold =
        ["run", "--label", "outer", "smoke", "--", "sh", "-c", "echo ready; exec sleep 1000"];
    let mut holder = Running::start(leasehold(&hold));
    holder.wait_for("ready");
    let tried = leasehold(&["run", "--try", "smoke", "--", "true"]).output().unwrap();
    assert_eq!(tried.status.code(), Some(75), "{tried:?}");
    let shown = succeeds(&leasehold(&["show", "smoke"]).output().unwrap());
    assert!(shown.contains("outer"), "{shown}");
    let listed = succeeds(&leasehold(&["ls", "smoke"]).output().unwrap());
    assert!(listed.contains("smoke"), "{listed}");
    holder.signal(Signal::SIGTERM);
    assert_eq!(holder.code(), 143, "{}", holder.errors());
    succeeds(&leasehold(&["run", "--try", "smoke", "--", "true"]).output().unwrap());

    let python =
        "import leasehold\nwith leasehold.lock('smoke', wait=10) as held:\n    print(held.token)";
    let node = "require('./index.js').withLock('smoke', { wait: 10000 }, async (held) => console.log(String(held.token)))";
    let client = |name: &str, words: &[&str]| {
        let clients = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../clients");
        let mut client = Command::new(words[0]);
        client.args(&words[1..]).current_dir(clients.join(name));
        client.env("PYTHONDONTWRITEBYTECODE", "1").env("LEASEHOLD_COMMAND", LEASEHOLD);
        let printed = succeeds(&client.env("LEASEHOLD_STORE", store).output().unwrap());
        printed.trim().parse::<u64>().unwrap_or_else(|_| panic!("no token: {printed:?}"))
    };
    let first = client("python", &["python3", "-c", python]);
    let second = client("node", &["node", "-e", node]);
    assert!(first < second, "tokens {first} and {second}");
}

/// Pauses and kills workers for a few seconds, which must not break any of the store's guarantees.
/// `store` may contain `{session_ms}`.
#[cfg(feature = "torture")]
#[allow(dead_code, reason = "used if a store is built in")]
fn stress(store: &str) {
    let _turn = turn(store);
    // How fast the workers start, and how fast a server answers them, depends on the machine. A busy
    // one gets more time for the first grant. Its sessions are longer, because a short session ends
    // between two requests that take a second each.
    let mut reports = Vec::new();
    for (seconds, session_ms) in [("4", "2000"), ("20", "5000"), ("60", "20000")] {
        let store = &store.replace("{session_ms}", session_ms);
        let words =
            ["torture", "--store", store, "--seconds", seconds, "--fault", "pause,kill", "--json"];
        let output = Place::new().leasehold(words).output().unwrap();
        // A session that ends before the workers start looks like an unreachable store.
        if output.status.code() == Some(69) {
            reports.push(String::from_utf8_lossy(&output.stderr).into_owned());
            continue;
        }
        let report: serde_json::Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {output:?}"));
        // A short run may not corrupt the unfenced resource, so this is not checked here.
        assert_ne!(report["verdict"], "violated", "{report}");
        if report["grants"].as_u64() >= Some(1) {
            return;
        }
        reports.push(report.to_string());
    }
    panic!("no lock was granted within 60 s:\n{}", reports.join("\n"));
}
