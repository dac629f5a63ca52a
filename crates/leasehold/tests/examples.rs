//! Each example runs to its end; what it shows, it asserts itself.
#![cfg(all(
    feature = "file",
    feature = "sqlite",
    feature = "postgres",
    feature = "mysql",
    feature = "http"
))]

use std::process::Command;
use std::sync::OnceLock;

/// Where cargo puts examples: beside the tests' own directory. They are built first, since
/// `cargo test --test examples` alone does not.
fn directory() -> &'static std::path::Path {
    static BUILT: OnceLock<std::path::PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--workspace", "--all-features", "--examples", "--locked", "-q"]);
        let built = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap();
        assert!(built.success());
        let tests = std::env::current_exe().unwrap();
        tests.parent().unwrap().parent().unwrap().join("examples")
    })
}

fn runs(name: &str, last: &str) {
    let output = Command::new(directory().join(name)).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {said}{complained}");
    assert!(said.trim_end().ends_with(last), "{name}: {said}");
}

#[test]
fn the_nightly_job_runs_once_a_night() {
    runs("run_once", "one night, three machines, 1 run");
}

#[test]
fn r40_the_fenced_ledger_refuses_the_paused_teller() {
    runs("fenced_ledger", "the fence refused the late one");
}

#[test]
fn r35_the_http_resource_refuses_the_late_writer() {
    runs("http_resource", "the document: final");
}

#[test]
fn r26_a_payment_is_made_once() {
    runs("once_payment", "16 requests, paid 1 time");
}

#[test]
fn leaders_follow_one_another() {
    runs("leader_election", "[\"alice\", \"nobody\", \"bob\", \"carol\"]");
}

#[test]
fn permits_are_never_exceeded() {
    runs("permits", "of 3 in use");
}

#[test]
fn r26_the_four_statements_and_once() {
    runs("four_statements", "and takes no unique index of the caller's.");
}
