//! `leasehold events`: changes are reported on every store.

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::common::{Place, Running};

fn tells_who_waits_and_holds(store: &str) {
    let place = Place::new();
    let on = |words: &[&str]| {
        let mut command = place.leasehold(words);
        command.env("LEASEHOLD_STORE", store);
        Running::start(command)
    };
    let name = "events:a";
    let hold = |label: &str| {
        on(&["run", "--label", label, name, "--", "sh", "-c", "echo ready; sleep 1000"])
    };
    let mut first = hold("first");
    first.wait_for("ready");
    let mut events = on(&["events", "--json", "--every", "20ms", "events:"]);
    let mut next = move || {
        let expected: Value = serde_json::from_str(&events.line()).unwrap();
        assert_eq!(expected["name"], name, "{expected}");
        let word = |key: &str| expected[key].as_str().unwrap().to_owned();
        (word("event"), word("label"))
    };
    let expected = |event: &str, label: &str| (event.to_owned(), label.to_owned());
    assert_eq!(next(), expected("held", "first"), "the current state must be reported first");
    let second = hold("second");
    assert_eq!(next(), expected("waiting", "second"));
    first.signal(Signal::SIGTERM);
    assert_eq!(next(), expected("ended", "first"));
    assert_eq!(next(), expected("held", "second"));
    second.signal(Signal::SIGTERM);
    assert_eq!(next(), expected("ended", "second"));
}

#[test]
fn events_report_waiters_and_holders_on_files() {
    let place = Place::new();
    tells_who_waits_and_holds(&place.store());
}

#[cfg(feature = "redis")]
#[test]
fn events_report_waiters_and_holders_on_redis() {
    tells_who_waits_and_holds(&testbed::redis().url());
}

#[cfg(feature = "postgres")]
#[test]
fn events_report_waiters_and_holders_on_postgres() {
    tells_who_waits_and_holds(&testbed::postgres().database());
}

#[cfg(feature = "etcd")]
#[test]
fn events_report_waiters_and_holders_on_etcd() {
    tells_who_waits_and_holds(&testbed::etcd().url());
}

#[test]
fn events_end_with_their_reader_and_reject_bad_intervals() {
    let place = Place::new();
    let mut held = place.hold("x", "echo ready; sleep 1000");
    let script = format!("{} events | head -1", crate::common::LEASEHOLD);
    let mut shell = std::process::Command::new("sh");
    let stdout =
        shell.args(["-c", &script]).env("LEASEHOLD_STORE", place.store()).output().unwrap();
    let stdout = String::from_utf8_lossy(&stdout.stdout).into_owned();
    assert!(stdout.contains("Z  held      x  ") && stdout.contains(" token "), "{stdout}");
    assert_eq!(place.code(&["events", "--every", "1ms"]), 2);
    held.signal(Signal::SIGTERM);
    assert_eq!(held.code(), 143);
}
