//! `leasehold doctor`, seen from outside.

use crate::common::{LEASEHOLD, Place};
use serde_json::Value;

#[test]
fn well_configured_store_passes_doctor() {
    let place = Place::new();
    let output = place.output(&["doctor"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(stdout.starts_with("Store: file:") && stdout.contains("FIFO order"), "{stdout}");
    let output = place.output(&["doctor", "--json"]);
    let stdout: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&stdout["ok"], &stdout["guarantees"]["fifo"]),
        (&true.into(), &true.into()),
        "{stdout}"
    );
    assert!(stdout["findings"].is_array());
}

/// A mistyped URL must not pass for a well-configured store.
#[test]
fn new_store_is_reported() {
    let place = Place::new();
    let mut urls = vec![format!("file:{}", place.path("locks").display())];
    if cfg!(feature = "sqlite") {
        urls.push(format!("sqlite:{}", place.path("db").display()));
    }
    for url in urls {
        let ids = || {
            let output = place.output(&["doctor", "--json", "--store", &url]);
            assert_eq!(output.status.code(), Some(0), "{output:?}");
            let stdout: Value = serde_json::from_slice(&output.stdout).unwrap();
            let findings = stdout["findings"].as_array().unwrap().clone();
            findings.into_iter().filter(|finding| finding["id"] == "created").count()
        };
        assert_eq!((ids(), ids()), (1, 0), "{url}");
    }
}

#[cfg(feature = "sqlite")]
#[test]
fn broken_guarantee_exits_with_1_and_names_the_fix() {
    let place = Place::new();
    let url = format!("sqlite:{}?synchronous=off", place.path("db").display());
    let output = place.output(&["doctor", "--store", &url]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{stdout}");
    assert!(stdout.contains("BROKEN: the URL has synchronous=off"), "{stdout}");
    assert!(stdout.contains("fix: remove synchronous from the URL"), "{stdout}");
    let output = place.output(&["doctor", "--json", "--store", &url]);
    assert_eq!(output.status.code(), Some(1));
    let stdout: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(stdout["ok"], false);
    let broken = stdout["findings"][0].clone();
    assert_eq!((&broken["id"], &broken["severity"]), (&"synchronous".into(), &"broken".into()));
}

#[test]
fn refusing_store_is_a_finding_and_unreachable_store_is_not() {
    let place = Place::new();
    let file = place.path("file");
    std::fs::write(&file, "").unwrap();
    let url = format!("file:{}", file.display());
    let output = place.output(&["doctor", "--json", "--store", &url]);
    let stdout: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stdout}");
    assert_eq!(stdout["findings"][0]["id"], "refused");
    for (code, store) in [(2, "nonsense"), (2, "carrier-pigeon://coop")] {
        assert_eq!(place.code(&["doctor", "--store", store]), code, "{store}");
    }
    if cfg!(feature = "postgres") {
        let away = "postgres://u:secret@127.0.0.1:1/d";
        let output = place.output(&["doctor", "--store", away]);
        assert_eq!(output.status.code(), Some(69), "{output:?}");
        assert!(!String::from_utf8_lossy(&output.stderr).contains("secret"));
    }
}

#[cfg(feature = "postgres")]
#[test]
fn doctor_reports_unsafe_settings_of_the_test_server() {
    let place = Place::new();
    let url = testbed::postgres().database();
    let output = place.output(&["doctor", "--store", &url]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{stdout}");
    for broken in ["fsync is off", "full_page_writes is off", "synchronous_commit is off"] {
        assert!(stdout.contains(&format!("BROKEN: {broken}")), "{stdout}");
    }
    assert!(!stdout.contains("lh:lh"), "a password: {stdout}");
}

/// Simulates a systemd unit with `PrivateTmp=`.
#[test]
fn directory_in_a_private_mount_is_reported() {
    let place = Place::new();
    let (seen, private) = (place.path("seen"), place.path("private"));
    std::fs::create_dir(&seen).unwrap();
    std::fs::create_dir(&private).unwrap();
    let script = "mount --bind \"$1\" \"$2\" && exec \"$0\" doctor --json --store \"file:$2\"";
    // The namespace of the first process must be readable from inside.
    let first = "unshare -m sh -c \"$3\" \"$0\" \"$1\" \"$2\"; true";
    let mut command = std::process::Command::new("unshare");
    command.args(["-p", "-f", "--mount-proc", "sh", "-c", first, LEASEHOLD]);
    command.args([&private, &seen]).arg(script);
    let output = command.output().unwrap();
    let Ok(stdout) = serde_json::from_slice::<Value>(&output.stdout) else {
        eprintln!("skipped: cannot create a mount namespace: {output:?}");
        return;
    };
    let is_private = |stdout: &Value| {
        let findings = stdout["findings"].as_array().unwrap();
        findings.iter().any(|finding| finding["id"] == "private-mount")
    };
    assert!(is_private(&stdout), "{stdout}");
    let url = format!("file:{}", seen.display());
    let output = place.output(&["doctor", "--json", "--store", &url]);
    let stdout: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(!is_private(&stdout), "{stdout}");
}
