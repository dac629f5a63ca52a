//! Each example runs to its end; what it shows, it asserts itself.
use std::process::Command;
use std::sync::OnceLock;

/// Where cargo puts examples: beside the tests' own directory. They are built first, since
/// `cargo test --test examples` alone does not.
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

/// A leader whose store is away for longer than `lock()` asks for leads again when it is back.
#[test]
fn f23_leadership_comes_back_after_a_long_outage() {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    let redis = testbed::Redis::start();
    let mut leader = Command::new(directory().join("leader_election"))
        .arg(redis.url())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = Vec::new();
    let mut lines = BufReader::new(leader.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut until = |what: &str| {
        let line = lines.by_ref().find(|line| {
            said.push(line.clone());
            line.contains(what)
        });
        line.unwrap_or_else(|| panic!("it ended without {what:?}: {said:?}"))
    };
    until("leads, term");
    redis.stop();
    until("leads no more");
    // The patience of `lock()` is over.
    until("again in");
    redis.cont();
    until("leads, term");
    leader.kill().unwrap();
    leader.wait().unwrap();
}
