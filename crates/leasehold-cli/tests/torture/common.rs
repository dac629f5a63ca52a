//! Helpers that the tests of `leasehold stress` share.

use std::process::{Command, Output};
use std::sync::{Condvar, Mutex, PoisonError};

/// Maximum number of concurrent runs. A run takes between a fifth and half of a processor. With too
/// many runs, their processes delay each other, and holders get no processor time for longer than
/// their leases.
const TURNS: usize = 3;

static TAKEN: Mutex<usize> = Mutex::new(0);
static FREE: Condvar = Condvar::new();

/// A permit for one run, until it is dropped.
pub(crate) struct Turn(());

/// Waits for a permit for one run.
pub(crate) fn turn() -> Turn {
    let taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    let full = FREE.wait_while(taken, |taken| *taken == TURNS);
    *full.unwrap_or_else(PoisonError::into_inner) += 1;
    Turn(())
}

impl Drop for Turn {
    fn drop(&mut self) {
        *TAKEN.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        FREE.notify_one();
    }
}

pub(crate) fn torture(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_leasehold"))
        .arg("torture")
        .args(arguments)
        .env_remove("LEASEHOLD_STORE")
        .output()
        .unwrap()
}

/// Returns the report of a run that kept every guarantee and proved it.
pub(crate) fn fine(arguments: &[&str]) -> serde_json::Value {
    enough(arguments, |report| report["verdict"] == "fine", unbroken)
}

/// Factors by which a run is lengthened if the previous one was too short.
const LONGER: [u64; 3] = [1, 2, 4];

/// Returns the first report for which `enough` is true. It depends on chance whether another
/// process writes while a holder is paused, and on a busy machine how much is done in the given
/// time. A run that was too short is followed by a longer one. A run that broke a guarantee fails
/// the test.
pub(crate) fn enough(
    arguments: &[&str],
    enough: impl Fn(&serde_json::Value) -> bool,
    mut run: impl FnMut(&[&str]) -> serde_json::Value,
) -> serde_json::Value {
    let at = arguments.iter().position(|word| *word == "--seconds").unwrap() + 1;
    let seconds: u64 = arguments[at].parse().unwrap();
    let mut last = serde_json::Value::Null;
    for longer in LONGER {
        let seconds = (seconds * longer).to_string();
        let mut words = arguments.to_vec();
        words[at] = &seconds;
        last = run(&words);
        if enough(&last) {
            return last;
        }
    }
    panic!("the runs of {arguments:?} proved too little\n{last:#}");
}

/// Returns the report of a run that broke no guarantee. The run may be void, which means that it
/// was too short to prove everything.
pub(crate) fn unbroken(arguments: &[&str]) -> serde_json::Value {
    let _turn = turn();
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
