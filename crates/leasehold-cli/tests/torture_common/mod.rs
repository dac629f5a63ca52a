//! What the tests of `leasehold torture` share.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::process::{Command, Output};

pub(crate) fn torture(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_leasehold"))
        .arg("torture")
        .args(arguments)
        .env_remove("LEASEHOLD_STORE")
        .output()
        .unwrap()
}

/// The report, of a run that kept every promise.
pub(crate) fn fine(arguments: &[&str]) -> serde_json::Value {
    let report = unbroken(arguments);
    assert_eq!(report["verdict"], "fine", "{arguments:?}\n{report}");
    report
}

/// The report, of a run that broke no promise; it may be void, which is to say that it was too short to
/// show all that it is to show.
pub(crate) fn unbroken(arguments: &[&str]) -> serde_json::Value {
    let out = torture(&[&["--json"], arguments].concat());
    let (stdout, stderr) =
        (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    let code = out.status.code();
    assert!(matches!(code, Some(0 | 3)), "{arguments:?}: {code:?}\n{stdout}\n{stderr}");
    serde_json::from_str(&stdout).unwrap()
}

pub(crate) fn claimed(report: &serde_json::Value, property: &str) -> bool {
    let lines = report["properties"].as_array().unwrap();
    lines.iter().any(|l| l["property"] == property && l["claimed"] == true)
}
