//! Locks of other projects, checked by leasehold's checker through the programs of
//! `examples/judge`. They run on real servers, with the fault that each of them does not survive.
#![cfg(all(feature = "redis", feature = "etcd"))]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::common::torture;
use serde_json::Value;
use testbed::python;

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/judge");

/// Returns the command for one of the programs, which writes this history.
fn program(name: &str, history: &Path) -> Command {
    let mut command = Command::new(python());
    command.arg(Path::new(EXAMPLES).join(name)).arg(history);
    command.env("PYTHONDONTWRITEBYTECODE", "1").env("ETCDCTL_API", "3");
    command
}

/// Runs the program and checks its history. Returns the exit code and the report.
fn judged(history: &Path, mut program: Command) -> (Option<i32>, Value) {
    let output = program.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let page = history.with_extension("html");
    let files = [history, &page].map(|file| file.to_str().unwrap());
    let out = torture(&["--json", "--check", files[0], "--html", files[1]]);
    let errors = String::from_utf8_lossy(&out.stderr);
    let report = serde_json::from_slice(&out.stdout);
    (out.status.code(), report.unwrap_or_else(|e| panic!("{e}: {errors}")))
}

/// Returns how often this guarantee was broken.
fn broken(report: &Value, property: &str) -> u64 {
    let lines = report["properties"].as_array().unwrap();
    let line = lines.iter().find(|line| line["property"] == property).unwrap();
    assert_eq!(line["claimed"], true, "{report:#}");
    line["violations"].as_u64().unwrap()
}

fn in_directory() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let history = directory.path().join("history.jsonl");
    (directory, history)
}

#[test]
fn a_paused_holder_of_redis_pys_lock_loses_updates() {
    let (_directory, history) = in_directory();
    let mut program = program("redis_py.py", &history);
    let server = testbed::Redis::with(testbed::Setup::new().fast());
    program.arg(server.url());
    let (code, report) = judged(&history, program);
    assert_eq!(code, Some(1), "{report:#}");
    assert_eq!(report["faults"]["pause"], 1, "{report:#}");
    assert!(broken(&report, "unfenced") > 0, "{report:#}");
    // The paused hold had expired by then, and a check of the hold would have reported that. So
    // this is not a violation of mutual exclusion.
    assert_eq!(broken(&report, "exclusion"), 0, "{report:#}");
}

#[test]
fn redis_pys_lock_without_faults_has_no_violations() {
    let (_directory, history) = in_directory();
    let mut program = program("redis_py.py", &history);
    let server = testbed::Redis::with(testbed::Setup::new().fast());
    program.arg(server.url()).arg("true");
    let (code, report) = judged(&history, program);
    // The run is too short to prove anything.
    assert!(matches!(code, Some(0 | 3)), "{report:#}");
    assert!(report["grants"].as_u64() >= Some(4), "{report:#}");
    assert_eq!(broken(&report, "exclusion") + broken(&report, "unfenced"), 0, "{report:#}");
}

#[test]
fn redis_pys_lock_has_two_holders_after_a_fail_over() {
    let (directory, history) = in_directory();
    let servers = testbed::Sentinel::start();
    let sentinels: Vec<String> =
        servers.sentinel_ports().iter().map(|port| format!("127.0.0.1:{port}")).collect();
    let url = format!("sentinel://{}/mymaster", sentinels.join(","));
    let asked = directory.path().join("asked");
    let script = ": >\"$0\" && while [ -e \"$0\" ]; do sleep 0.02; done";
    let mut program = program("redis_py.py", &history);
    program.args([&url, "sh", "-c", script, asked.to_str().unwrap()]);
    let master = servers.master();
    // The replica is behind and stays behind. This makes certain what happens by chance on a slow
    // connection.
    master.command(&["ACL", "SETUSER", "default", "-psync", "-sync"]);
    master.command(&["CLIENT", "KILL", "TYPE", "replica"]);
    let (code, report) = std::thread::scope(|scope| {
        let judging = scope.spawn(|| judged(&history, program));
        while !judging.is_finished() {
            if asked.exists() {
                let old = master.port();
                master.kill();
                servers.wait_for_failover(old);
                std::fs::remove_file(&asked).unwrap();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        judging.join().unwrap()
    });
    assert_eq!(code, Some(1), "{report:#}");
    assert_eq!(report["faults"]["servers"], 1, "{report:#}");
    assert!(broken(&report, "exclusion") > 0, "{report:#}");
    assert!(broken(&report, "unfenced") > 0, "{report:#}");
}

#[test]
fn paused_etcdctl_lock_has_two_holders_with_distinct_tokens() {
    let (_directory, history) = in_directory();
    let etcdctl = testbed::etcd().etcdctl_command();
    let mut program = program("etcdctl.py", &history);
    program.arg(etcdctl.get_program()).args(etcdctl.get_args());
    let (code, report) = judged(&history, program);
    assert_eq!(code, Some(1), "{report:#}");
    assert!(broken(&report, "exclusion") > 0, "{report:#}");
    assert!(broken(&report, "unfenced") > 0, "{report:#}");
    for kept in ["token-order", "token-unique", "effect", "updates"] {
        assert_eq!(broken(&report, kept), 0, "{report:#}");
    }
    assert!(report["fenced_writes_refused"].as_u64() >= Some(1), "{report:#}");
}
