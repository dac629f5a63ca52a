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
    fine_or_void(arguments).unwrap_or_else(|| panic!("{arguments:?} showed nothing"))
}

/// The same, or `None` of a run that broke nothing and was too short to show anything.
pub(crate) fn fine_or_void(arguments: &[&str]) -> Option<serde_json::Value> {
    const VOID: i32 = 3;
    let out = torture(&[&["--json"], arguments].concat());
    let (stdout, stderr) =
        (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    match out.status.code() {
        Some(0) => serde_json::from_str(&stdout).ok(),
        Some(VOID) => {
            eprintln!("{arguments:?}\n{stdout}");
            None
        }
        code => panic!("{arguments:?}: {code:?}\n{stdout}\n{stderr}"),
    }
}

pub(crate) fn claimed(report: &serde_json::Value, property: &str) -> bool {
    let lines = report["properties"].as_array().unwrap();
    lines.iter().any(|l| l["property"] == property && l["claimed"] == true)
}
