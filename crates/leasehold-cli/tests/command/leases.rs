//! `leasehold run` with leases from seconds to an hour, alone and after a hand-over.
#![cfg(any(feature = "sqlite", feature = "redis", feature = "zookeeper"))]

use std::process::{Command, Output, Stdio};

use crate::common::{LEASEHOLD, Place, Running, eventually};
use nix::sys::signal::Signal;

/// Returns the `leasehold` command on this store.
fn leasehold(store: &str, words: &[&str]) -> Command {
    let mut command = Command::new(LEASEHOLD);
    command.args(words).env("LEASEHOLD_STORE", store).stdin(Stdio::null());
    command
}

fn claims(store: &str, name: &str) -> usize {
    let output = leasehold(store, &["show", "--json", name]).output().unwrap();
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    shown["claims"].as_array().map_or(0, Vec::len)
}

fn check(what: &str, output: &Output) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{what}: {stderr}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "done\n", "{what}: {stderr}");
}

/// The command runs longer than leasehold needs to check the granted lease.
const WORK: &str = "sleep 1; echo done";

/// Checks that both a client that takes a free lock and a client that waited for it can run their
/// command.
fn both_get_to_work(store: &str, leases: &[&str]) {
    let start = |lease: &&str| {
        let name = format!("lease-{lease}");
        let run = |script| ["run", "--lease", lease, &name, "--", "sh", "-c", script];
        let mut holder = Running::start(leasehold(store, &run("echo ready; sleep 1000")));
        holder.wait_for("ready");
        let mut waiter = leasehold(store, &run(WORK));
        let waiter = waiter.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        eventually("the waiter is in the queue", || claims(store, &name) == 2);
        holder.signal(Signal::SIGTERM);
        assert_eq!(holder.code(), 143, "{store} {lease}: {}", holder.errors());
        waiter
    };
    let waiters: Vec<_> = leases.iter().map(start).collect();
    for (lease, waiter) in leases.iter().zip(waiters) {
        check(&format!("{store} {lease}"), &waiter.wait_with_output().unwrap());
    }
}

const LEASES: [&str; 5] = ["5s", "15s", "45s", "90s", "1h"];

// F26
#[cfg(feature = "sqlite")]
#[test]
fn lease_of_any_length_works_on_sqlite() {
    let place = Place::new();
    both_get_to_work(&format!("sqlite:{}", place.path("locks.db").display()), &LEASES);
}

// F26
#[cfg(feature = "redis")]
#[test]
fn lease_of_any_length_works_on_redis() {
    let server = testbed::Redis::start();
    both_get_to_work(&server.url(), &LEASES);
}

// F26
/// The session limits the lease. The fractions apply to what is left of it.
#[cfg(feature = "zookeeper")]
#[test]
fn lease_longer_than_the_session_works_on_zookeeper() {
    let server = testbed::ZooKeeper::start();
    both_get_to_work(&format!("{}/long?create=yes", server.url()), &LEASES);
    let short = format!("{}/short?create=yes&session=4s", server.url());
    both_get_to_work(&short, &["15s", "1h"]);
}
