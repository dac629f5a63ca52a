//! What the tests of `leasehold torture` share.

use std::process::{Command, Output};
use std::sync::{Condvar, Mutex, PoisonError};

/// How many runs there are at a time. A run takes a fifth of a processor and up to a half; with too many,
/// their processes are in each other's way, and the machine keeps holders waiting for longer than their
/// leases last.
const TURNS: usize = 3;

static TAKEN: Mutex<usize> = Mutex::new(0);
static FREE: Condvar = Condvar::new();

/// A place among the runs, until it is dropped.
pub(crate) struct Turn(());

/// Waits for a place among the runs.
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

/// The report, of a run that kept every promise and showed it.
pub(crate) fn fine(arguments: &[&str]) -> serde_json::Value {
    enough(arguments, |report| report["verdict"] == "fine", unbroken)
}

/// How much longer than asked for a run is, when the one before was too short.
const LONGER: [u64; 3] = [1, 2, 4];

/// What a run comes to, which must be `enough`. Whether somebody else writes while a holder is stopped
/// is chance, and on a busy machine so is how much is done in the seconds given: a run that was too short
/// to show what it is to show is followed by a longer one; one that broke a promise is not.
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
    panic!("{arguments:?} showed too little\n{last:#}");
}

/// The report, of a run that broke no promise; it may be void, which is to say that it was too short to
/// show all that it is to show.
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
