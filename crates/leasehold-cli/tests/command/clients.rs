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

/// The table in the documentation is the list of their tests.
#[test]
fn both_clients_have_a_test_for_each_documented_behavior() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let page = read("docs/guide/other-languages.md");
    let (_, table) = page.split_once("| Behavior | Details |\n").unwrap();
    let rows = table.lines().skip(1).take_while(|line| line.starts_with('|'));
    let mut documented: Vec<_> =
        rows.filter_map(|row| row.split('|').nth(1)).map(|row| row.trim().to_lowercase()).collect();
    let names = |text: &str, before: &str, after: &str| {
        let lines = text.lines().filter_map(|line| line.strip_prefix(before)?.split_once(after));
        let mut names: Vec<_> = lines.map(|(name, _)| name.replace('_', " ")).collect();
        names.sort();
        names
    };
    documented.sort();
    let python = read("clients/python/tests.py");
    let behavior = python.split("\nclass ").find(|class| class.starts_with("Behavior")).unwrap();
    assert_eq!(names(behavior, "    def test_", "("), documented);
    assert_eq!(names(&read("clients/node/test.js"), "test('", "'"), documented);
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
