//! The command on a file store with a problem.

use crate::common::{LEASEHOLD, Place};

// F06
#[test]
fn ls_reports_a_damaged_lock_and_evict_repairs_it() {
    let place = Place::new();
    let _held = place.hold("fine", "echo ready; sleep 600");
    let _torn = place.hold("torn", "echo ready; sleep 600");
    let file = place.path("store/locks/torn.lock");
    let text = std::fs::read(&file).unwrap();
    std::fs::write(&file, &text[..text.len() / 2]).unwrap();

    let output = place.output(&["ls"]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(stdout.contains("torn") && stdout.contains("UNREADABLE"), "{stdout}");
    assert!(stdout.contains("fine") && stdout.contains("mutex"), "{stdout}");
    assert_ne!(place.code(&["run", "--try", "torn", "--", "true"]), 0);
    assert_eq!(place.code(&["evict", "torn"]), 0);
    assert_eq!(place.code(&["run", "--try", "torn", "--", "true"]), 0);
    assert_eq!(place.code(&["run", "--try", "fine", "--", "true"]), 75);
}

// F54
#[test]
fn run_does_not_wait_for_an_impossible_store_path() {
    let place = Place::new();
    let output = place.output(&["run", "--store", "file:///proc/nope", "x", "--", "true"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("/proc/nope") && !stderr.contains("tried for"), "{stderr}");
}

/// Simulates a rootless container, in which the host's users have no number.
#[test]
fn the_owner_outside_a_user_namespace_is_explained() {
    let place = Place::new();
    let root = place.path("");
    let store = place.path("store");
    std::fs::create_dir(&store).unwrap();
    let script = "chown 54402:54400 \"$1\" && chmod 2770 \"$1\" && chmod 711 \"$2\" && \
                  cp \"$0\" \"$2/leasehold\" && chmod 755 \"$2/leasehold\" && \
                  setpriv --reuid=54401 --regid=54400 --clear-groups unshare -U -r \
                  \"$2/leasehold\" run --store \"file:$1\" x -- true";
    let mut command = std::process::Command::new("sh");
    let output = command.args(["-c", script, LEASEHOLD]).args([&store, &root]).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.code() != Some(69) {
        eprintln!("skipped: cannot create a user namespace: {stderr}");
        return;
    }
    assert!(stderr.contains("outside this user namespace"), "{stderr}");
    assert!(
        stderr.contains("chown the directory") && !stderr.contains("as user 65534"),
        "{stderr}"
    );
}
