//! Every store as people meet it first: the command, the Python and Node clients, and a short stress test.

use std::path::Path;
use std::process::{Command, Output};

use nix::sys::signal::Signal;

use crate::common::{LEASEHOLD, Place, Running};

/// Two tests for each store, `…::on_STORE` and, with `torture`, `…::stress_on_STORE`.
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
        format!("{}?session=1s", testbed::zookeeper().url());
    on_etcd, "etcd", testbed::etcd().url(), testbed::etcd().url();
    on_memcached, "memcached", testbed::memcached().url() + "?restart_delay_ms=0",
        testbed::memcached().url() + "?restart_delay_ms=0&session_ms=1000";
    on_nats, "nats", testbed::nats().url(), testbed::nats().url() + "/?session_ms=1000";
    on_s3, "s3", testbed::seaweed().url("smoke"),
        testbed::seaweed().url("stress") + "&session_ms=2000&poll_ms=50";
    #[ignore = "runs with ./test.sh --all"]
    on_gs, "gs", testbed::google().url("smoke") + "&poll_ms=200",
        testbed::google().url("stress") + "&session_ms=2000&poll_ms=200";
    #[ignore = "runs with ./test.sh --all"]
    on_az, "az", testbed::azurite().url("smoke") + "&poll_ms=200",
        testbed::azurite().url("stress") + "&session_ms=2000&poll_ms=200";
}

#[cfg(feature = "sqlite")]
fn sqlite() -> String {
    // One directory for this run; the database file is made by the first client.
    static PLACE: std::sync::LazyLock<Place> = std::sync::LazyLock::new(Place::new);
    format!("sqlite:{}", PLACE.path("locks.db").display())
}

#[cfg(feature = "redlock")]
fn redlock() -> String {
    testbed::redlock().url() + "?restart_delay_ms=0&node_timeout_ms=5000"
}

#[allow(dead_code, reason = "used where a store is built in")]
#[track_caller]
fn succeeds(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[allow(dead_code, reason = "used where a store is built in")]
/// The lock is held by a command, and what a second command, `show`, `ls` and the clients see of it.
fn command_and_clients(store: &str) {
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

/// Workers that are paused and killed for a few seconds break none of the store's promises.
#[cfg(feature = "torture")]
#[allow(dead_code, reason = "used where a store is built in")]
fn stress(store: &str) {
    let words = ["torture", "--store", store, "--seconds", "4", "--fault", "pause,kill", "--json"];
    let output = Place::new().leasehold(words).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    // A short run may be too gentle to show that the unfenced resource is spoilt: that is not judged here.
    assert_ne!(report["verdict"], "violated", "{report}");
    assert!(report["grants"].as_u64() >= Some(1), "{report}");
}
