//! `leasehold stress` as a user runs it.

use std::process::Command;

use crate::common::*;

#[test]
fn memory_keeps_its_guarantees_under_pauses_kills_and_cuts() {
    let report = fine(&["--store", "memory:", "--seconds", "10", "--fault", "pause,kill,cut"]);
    assert_eq!(report["verdict"], "fine");
    for fault in ["pause", "kill", "cut"] {
        assert!(report["faults"][fault].as_u64() >= Some(1), "{report}");
    }
    for kind in ["mutex", "rwlock", "semaphore"] {
        assert!(report["grants_by_kind"][kind].as_u64() >= Some(10), "{report}");
    }
    // This is the negative control. The unfenced resource was corrupted in the same run.
    assert_eq!(report["negative_control"]["required"], true);
    let spoilt = ["acknowledged_updates_lost", "late_writes_taken"]
        .map(|what| report["negative_control"][what].as_u64().unwrap());
    assert!(spoilt.iter().sum::<u64>() > 0, "{report}");
}

#[test]
fn file_store_keeps_its_guarantees_under_pauses_and_kills() {
    let directory = tempfile::tempdir().unwrap();
    let store = format!("file:{}", directory.path().display());
    let report = fine(&["--store", &store, "--seconds", "8", "--fault", "pause,kill"]);
    for fault in ["pause", "kill"] {
        assert!(report["faults"][fault].as_u64() >= Some(1), "{report}");
    }
    // Without leases a pause corrupts nothing, fenced or not. This is one of the guarantees.
    assert_eq!(report["negative_control"]["required"], false);
    assert!(claimed(&report, "unfenced"));
    assert_eq!(report["negative_control"]["acknowledged_updates_lost"], 0);
}

// S64
#[test]
fn file_store_hands_over_immediately_after_a_kill() {
    let directory = tempfile::tempdir().unwrap();
    let store = format!("file:{}", directory.path().display());
    // If the waiter had to wait for a lease to expire, that would take longer than the allowed
    // recovery.
    let arguments = ["--store", &store, "--seconds", "6", "--fault", "kill", "--lease", "5s"];
    // It depends on chance whether a holder is killed while another client waits.
    let recovers = |report: &serde_json::Value| {
        report["verdict"] == "fine" && report["recoveries"].as_u64() >= Some(1)
    };
    let report = enough(&arguments, recovers, unbroken);
    assert!(report["allowed_recovery_ms"].as_u64() < Some(5_000), "{report}");
}

#[test]
fn run_without_evidence_is_inconclusive() {
    // The lease is longer than the run, so no pause outlasts it, and nothing is lost.
    let words = "--store memory: --seconds 1 --lease 60s --fault pause";
    let out = torture(&words.split(' ').collect::<Vec<_>>());
    assert_eq!(out.status.code(), Some(3), "{out:?}");
    assert!(String::from_utf8_lossy(&out.stdout).contains("INCONCLUSIVE"), "{out:?}");
}

#[test]
fn locks_are_in_the_namespace() {
    let directory = tempfile::tempdir().unwrap();
    let store = format!("file:{}", directory.path().join("locks").display());
    let history = directory.path().join("history").display().to_string();
    let words = ["--store", &store, "--namespace", "acme/", "--seconds", "1", "--fault", "none"];
    let out = torture(&[&words[..], &["--history", &history]].concat());
    assert!(matches!(out.status.code(), Some(0 | 3)), "{out:?}");
    let history = std::fs::read_to_string(history).unwrap();
    assert!(history.contains("\"acme/leasehold-torture-"), "{history}");
    assert!(!history.contains("\"leasehold-torture-"), "{history}");
}

#[test]
fn usage_error_has_a_cause_and_a_hint() {
    let cases: [&[&str]; 3] = [
        &["--store", "file:", "--fault", "cut"],
        &["--store", "memory:?x"],
        &["--store", "carrier-pigeon:"],
    ];
    for case in cases {
        let out = torture(case);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{case:?}: {stderr}");
        let message = stderr.trim_end();
        let (cause, hint) = message.split_once('\n').unwrap_or((message, "hint: "));
        assert!(!cause.contains('\n') && hint.starts_with("hint: "), "{stderr}");
        assert_eq!(hint.lines().count(), 1, "{stderr}");
    }
}

#[test]
fn worker_without_a_parent_exits() {
    let out = Command::new(env!("CARGO_BIN_EXE_leasehold"))
        .arg("torture-worker")
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    assert!(!out.status.success());
}

#[test]
fn run_has_the_requested_number_of_locks_and_faults() {
    let directory = tempfile::tempdir().unwrap();
    let history = directory.path().join("run.jsonl");
    let always = ["--store", "memory:", "--seconds", "6", "--clients", "8", "--locks", "20"];
    let rare = ["--fault", "kill", "--fault-every", "3s", "--history", history.to_str().unwrap()];
    let rare = unbroken(&[&always[..], &rare].concat());
    let header = std::fs::read_to_string(&history).unwrap();
    let header: serde_json::Value = serde_json::from_str(header.lines().next().unwrap()).unwrap();
    assert_eq!(header["locks"].as_array().unwrap().len(), 3 * 20, "expected 20 locks of each kind");
    // The first kill comes soon. The next kills, of which four may be in progress at once, come
    // after twelve seconds on average.
    let kills = |report: &serde_json::Value| report["faults"]["kill"].as_u64().unwrap();
    assert!(kills(&rare) <= 4, "{rare}");
    let often = ["--fault", "kill", "--fault-every", "10ms"];
    let often = enough(&[&always[..], &often].concat(), |r| kills(r) > 4 + kills(&rare), unbroken);
    assert!(often["operations"].as_u64() > Some(0), "{often}");
}
