//! `leasehold verify`: a shell script as the resource that asks.

use crate::common::{Place, eventually, is_cause_and_hint};

#[test]
fn r34_a_sequencer_is_checked_from_a_shell() {
    let place = Place::new();
    let script = "echo \"$LEASEHOLD_SEQUENCER\" > seq; leasehold verify \"$LEASEHOLD_SEQUENCER\"";
    let mut command = place.leasehold(["run", "x %'y", "--", "sh", "-c", script]);
    let dir = std::path::Path::new(crate::common::LEASEHOLD).parent().unwrap();
    let path = format!("{}:{}", dir.display(), std::env::var("PATH").unwrap_or_default());
    let status = command.env("PATH", path).current_dir(place.path("")).status().unwrap();
    assert!(status.success(), "inside its own hold: {status}");

    let sequencer = place.read("seq");
    let sequencer = sequencer.trim();
    assert!(sequencer.starts_with("lh1:mutex:"), "{sequencer}");
    eventually("over with the hold", || place.code(&["verify", sequencer]) == 1);
    // The same name, held by somebody else: still not that hold.
    let next = place.hold("x %'y", "echo ready; sleep 60");
    let output = place.output(&["verify", sequencer]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(is_cause_and_hint(&said), "{said}");
    drop(next);
}

#[test]
fn r34_what_is_no_sequencer_of_this_store_is_usage() {
    let place = Place::new();
    assert_eq!(place.code(&["run", "x", "--", "true"]), 0, "a store to ask");
    let other = format!("file:{}", place.path("other").display());
    let script = "echo \"$LEASEHOLD_SEQUENCER\"";
    let output = place.output(&["run", "--store", &other, "x", "--", "sh", "-c", script]);
    let foreign = String::from_utf8(output.stdout).unwrap();
    for bad in [foreign.trim(), "nonsense", "", "lh1:mutex:0:a:b", "lh1:mutex:1:a:b\nforged"] {
        let output = place.output(&["verify", bad]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{bad:?}: {said}");
        assert!(is_cause_and_hint(&said), "{said}");
    }
    // Unknown is not a yes.
    let no_answer = ["verify", "--store", "postgres://u:p@127.0.0.1:1/d", "lh1:mutex:1:a:b"];
    let code = place.code(&no_answer);
    assert!(code == 69 || code == 2, "a build without PostgreSQL says 2: {code}");
}
