//! The clients for other languages, by their own tests, on this command.
#![cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]

use std::path::Path;
use std::process::Command;

use crate::common::LEASEHOLD;

/// Their tests, with a store that has leases.
fn passes(client: &str, command: &str, words: &[&str], store: &str) {
    let clients = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../clients");
    let mut tests = Command::new(command);
    tests.args(words).current_dir(clients.join(client));
    // So that nothing is left in the sources.
    tests.env("PYTHONDONTWRITEBYTECODE", "1");
    tests.env("LEASEHOLD_COMMAND", LEASEHOLD).env("LEASEHOLD_STORE", store);
    let done = tests.output().unwrap_or_else(|e| panic!("{command}: {e}"));
    let (said, errors) =
        (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{client} on {store}:\n{said}\n{errors}");
    assert!(!format!("{said}{errors}").contains("no store with leases"), "{said}\n{errors}");
}

fn python(store: &str) {
    passes("python", "python3", &["tests.py"], store);
}

fn node(store: &str) {
    passes("node", "node", &["--test", "test.js"], store);
}

#[cfg(feature = "redis")]
#[test]
fn python_on_files_and_redis() {
    python(&testbed::redis().url());
}

#[cfg(feature = "postgres")]
#[test]
fn python_on_files_and_postgres() {
    python(&testbed::postgres().database());
}

#[cfg(feature = "etcd")]
#[test]
fn python_on_files_and_etcd() {
    python(&testbed::etcd().url());
}

#[cfg(feature = "redis")]
#[test]
fn node_on_files_and_redis() {
    node(&testbed::redis().url());
}

#[cfg(feature = "postgres")]
#[test]
fn node_on_files_and_postgres() {
    node(&testbed::postgres().database());
}

#[cfg(feature = "etcd")]
#[test]
fn node_on_files_and_etcd() {
    node(&testbed::etcd().url());
}
