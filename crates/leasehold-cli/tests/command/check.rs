//! `leasehold verify`, called by a shell script that protects a resource.

use crate::common::{Place, eventually, is_cause_and_hint};

// R34
#[test]
fn a_sequencer_is_checked_from_a_shell() {
    let place = Place::new();
    let script = "echo \"$LEASEHOLD_SEQUENCER\" > seq; leasehold verify \"$LEASEHOLD_SEQUENCER\"";
    let mut command = place.leasehold(["run", "x %'y", "--", "sh", "-c", script]);
    let dir = std::path::Path::new(crate::common::LEASEHOLD).parent().unwrap();
    let path = format!("{}:{}", dir.display(), std::env::var("PATH").unwrap_or_default());
    let status = command.env("PATH", path).current_dir(place.path("")).status().unwrap();
    assert!(status.success(), "the sequencer is invalid during its hold: {status}");

    let sequencer = place.read("seq");
    let sequencer = sequencer.trim();
    assert!(sequencer.starts_with("lh1:mutex:"), "{sequencer}");
    eventually("the sequencer is stale after the hold", || place.code(&["verify", sequencer]) == 1);
    // Another client now holds a lock with the same name, but that is not the same hold.
    let next = place.hold("x %'y", "echo ready; sleep 60");
    let output = place.output(&["verify", sequencer]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(is_cause_and_hint(&stderr), "{stderr}");
    drop(next);
}

// R34
#[test]
fn invalid_or_foreign_sequencer_is_a_usage_error() {
    let place = Place::new();
    assert_eq!(place.code(&["run", "x", "--", "true"]), 0, "cannot create the store");
    let other = format!("file:{}", place.path("other").display());
    let script = "echo \"$LEASEHOLD_SEQUENCER\"";
    let output = place.output(&["run", "--store", &other, "x", "--", "sh", "-c", script]);
    let foreign = String::from_utf8(output.stdout).unwrap();
    for bad in [foreign.trim(), "nonsense", "", "lh1:mutex:0:a:b", "lh1:mutex:1:a:b\nforged"] {
        let output = place.output(&["verify", bad]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{bad:?}: {stderr}");
        assert!(is_cause_and_hint(&stderr), "{stderr}");
    }
    // If the answer is unknown, the check must not succeed.
    let no_answer = ["verify", "--store", "postgres://u:p@127.0.0.1:1/d", "lh1:mutex:1:a:b"];
    let code = place.code(&no_answer);
    assert!(code == 69 || code == 2, "expected 69, or 2 in a build without PostgreSQL: {code}");
}
