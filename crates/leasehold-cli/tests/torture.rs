//! `leasehold torture` as a user runs it.

use std::process::{Command, Output};

fn torture(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_leasehold"))
        .arg("torture")
        .args(arguments)
        .env_remove("LEASEHOLD_STORE")
        .output()
        .unwrap()
}

/// The report, of a run that kept every promise.
fn fine(arguments: &[&str]) -> serde_json::Value {
    let out = torture(&[arguments, &["--json"]].concat());
    let (stdout, stderr) =
        (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert_eq!(out.status.code(), Some(0), "{arguments:?}\n{stdout}\n{stderr}");
    serde_json::from_str(&stdout).unwrap()
}

#[test]
fn memory_keeps_its_promises_under_pauses_kills_and_cuts() {
    let report = fine(&["--store", "memory:", "--seconds", "10", "--fault", "pause,kill,cut"]);
    assert_eq!(report["verdict"], "fine");
    for fault in ["pause", "kill", "cut"] {
        assert!(report["faults"][fault].as_u64() >= Some(1), "{report}");
    }
    for kind in ["mutex", "rwlock", "semaphore"] {
        assert!(report["grants_by_kind"][kind].as_u64() >= Some(10), "{report}");
    }
    // The negative control: what is not fenced was spoilt in the same run.
    assert_eq!(report["negative_control"]["required"], true);
    let spoilt = ["acknowledged_updates_lost", "late_writes_taken"]
        .map(|what| report["negative_control"][what].as_u64().unwrap());
    assert!(spoilt.iter().sum::<u64>() > 0, "{report}");
}

#[test]
fn a_run_that_shows_nothing_is_void() {
    // A lease that is longer than the run: no pause outlasts it, and nothing is lost.
    let words = "--store memory: --seconds 1 --lease 60s --fault pause";
    let out = torture(&words.split(' ').collect::<Vec<_>>());
    assert_eq!(out.status.code(), Some(3), "{out:?}");
    assert!(String::from_utf8_lossy(&out.stdout).contains("VOID"), "{out:?}");
}

#[test]
fn bad_usage_is_told_in_one_line() {
    let cases: [&[&str]; 3] = [
        &["--store", "file:", "--fault", "cut"],
        &["--store", "memory:?x"],
        &["--store", "carrier-pigeon:"],
    ];
    for case in cases {
        let out = torture(case);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{case:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}

#[test]
fn a_worker_without_a_parent_ends() {
    let out = Command::new(env!("CARGO_BIN_EXE_leasehold"))
        .arg("torture-worker")
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    assert!(!out.status.success());
}
