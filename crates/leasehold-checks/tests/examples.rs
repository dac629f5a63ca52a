//! Runs each example to its end. Each example asserts its own results.
use std::process::Command;
use std::sync::OnceLock;

/// Returns the directory of cargo's examples, next to the tests' own directory. The examples are
/// built first, because `cargo test --test examples` alone does not build them.
fn directory() -> &'static std::path::Path {
    static BUILT: OnceLock<std::path::PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let mut cargo = testbed::cargo();
        cargo.args(["build", "--workspace", "--all-features", "--examples", "--locked", "-q"]);
        let built = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap();
        assert!(built.success());
        let tests = std::env::current_exe().unwrap();
        tests.parent().unwrap().parent().unwrap().join("examples")
    })
}

fn runs(name: &str, last: &str) {
    let output = Command::new(directory().join(name)).output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {stdout}{complained}");
    assert!(stdout.trim_end().ends_with(last), "{name}: {stdout}");
}

#[test]
fn the_nightly_job_runs_once_a_night() {
    runs("run_once", "one night, three machines, 1 run");
}

// R40
#[test]
fn the_fenced_ledger_refuses_the_paused_teller() {
    runs("fenced_ledger", "the fence refused the late one");
}

// R35
#[test]
fn http_resource_rejects_the_stale_writer() {
    runs("http_resource", "the document: final");
}

// R26
#[test]
fn a_payment_is_made_once() {
    runs("once_payment", "16 requests, paid 1 time");
}

#[test]
fn transactions_example_sells_four_items() {
    runs("transactions", "6 items left");
}

#[test]
fn leadership_passes_to_the_next_candidate() {
    runs("leader_election", "[\"alice\", \"nobody\", \"bob\", \"carol\"]");
}

#[test]
fn permits_are_never_exceeded() {
    runs("permits", "of 3 in use");
}

// R26
#[test]
fn four_statements_example_runs_to_its_end() {
    runs("four_statements", "and takes no unique index of the caller's.");
}

// F23
/// A leader whose store is unreachable for longer than `lock()` retries becomes leader again when
/// the store is back.
#[test]
fn leadership_comes_back_after_a_long_outage() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    let redis = testbed::Redis::start();
    let mut leader = Command::new(directory().join("leader_election"))
        .arg(redis.url())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut printed = Vec::new();
    let mut lines = BufReader::new(leader.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut until = |what: &str| {
        let line = lines.by_ref().find(|line| {
            printed.push(line.clone());
            line.contains(what)
        });
        line.unwrap_or_else(|| panic!("it ended without {what:?}: {printed:?}"))
    };
    until("leads, term");
    redis.stop();
    until("leads no more");
    // The time limit of `lock()` is over.
    until("again in");
    redis.cont();
    until("leads, term");
    leader.kill().unwrap();
    leader.wait().unwrap();
}
