//! `leasehold elect`: one leads, and another takes over, whatever became of the first.

use nix::sys::signal::Signal;

use crate::common::{Place, Running, eventually};

/// A candidate that writes its terms down, a line each.
fn candidate(place: &Place, store: &str, who: &str) -> Running {
    let script = format!(
        "echo {who} $LEASEHOLD_TOKEN >> '{}'; exec sleep 1000",
        place.path("terms").display()
    );
    let words = ["elect", "--lease", "2s", "leader", "--", "sh", "-c", &script];
    let mut command = place.leasehold(words);
    command.env("LEASEHOLD_STORE", store);
    Running::start(command)
}

fn terms(place: &Place) -> Vec<(String, u64)> {
    let term = |line: &str| {
        let (who, token) = line.split_once(' ').unwrap();
        (who.to_owned(), token.parse().unwrap())
    };
    place.read("terms").lines().map(term).collect()
}

/// Killed, told to end, deposed: each time the other leads, with a greater token.
fn another_takes_over(store: &str) {
    let place = Place::new();
    let led = |n| eventually("a term begins", || terms(&place).len() >= n);
    let first = candidate(&place, store, "first");
    led(1);
    let mut second = candidate(&place, store, "second");
    first.signal(Signal::SIGKILL);
    led(2);
    let mut third = candidate(&place, store, "third");
    let mut force = place.leasehold(["evict", "leader"]);
    eventually("the third waits", || {
        let mut show = place.leasehold(["show", "--json", "leader"]);
        let shown = show.env("LEASEHOLD_STORE", store).output().unwrap().stdout;
        let shown: serde_json::Value = serde_json::from_slice(&shown).unwrap();
        shown["claims"].as_array().unwrap().len() == 2
    });
    assert!(force.env("LEASEHOLD_STORE", store).status().unwrap().success());
    led(3);
    // The second one stands again.
    third.signal(Signal::SIGTERM);
    assert_eq!(third.code(), 143, "its command's own end: {}", third.errors());
    led(4);
    second.signal(Signal::SIGTERM);
    assert_eq!(second.code(), 143);
    assert!(second.errors().contains("rejoining the queue in 1s"), "{}", second.errors());
    let terms = terms(&place);
    let who: Vec<&str> = terms.iter().map(|(who, _)| who.as_str()).collect();
    assert_eq!(who, ["first", "second", "third", "second"]);
    assert!(terms.is_sorted_by(|a, b| a.1 < b.1), "{terms:?}");
}

#[test]
fn another_leads_on_files() {
    let place = Place::new();
    another_takes_over(&place.store());
}

#[cfg(feature = "redis")]
#[test]
fn another_leads_on_redis() {
    another_takes_over(&testbed::redis().url());
}

#[cfg(feature = "postgres")]
#[test]
fn another_leads_on_postgres() {
    another_takes_over(&testbed::postgres().database());
}

#[cfg(feature = "etcd")]
#[test]
fn another_leads_on_etcd() {
    another_takes_over(&testbed::etcd().url());
}

#[test]
fn a_leader_whose_command_ends_stands_again_until_it_is_told_to_end() {
    let place = Place::new();
    let script = format!("echo x >> '{}'; exit 3", place.path("terms").display());
    let mut leader =
        Running::start(place.leasehold(["elect", "leader", "--", "sh", "-c", &script]));
    eventually("two terms", || place.read("terms").lines().count() >= 2);
    // A command that still runs would get the signal, and end as it does anyway.
    eventually("the term is over", || place.claims("leader") == 0);
    leader.signal(Signal::SIGINT);
    let status = leader.child.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(2), "{status}");
    let said = leader.errors();
    assert!(said.contains("the command exited with 3; rejoining the queue in 1s"), "{said}");
    assert_eq!(place.claims("leader"), 0);
}

/// In its first term it has caught them for its command's sake.
#[test]
fn a_candidate_that_waits_again_is_not_ended_by_signals_that_end_nothing() {
    let place = Place::new();
    let script = format!("echo x >> '{}'; exit 3", place.path("terms").display());
    let mut candidate =
        Running::start(place.leasehold(["elect", "leader", "--", "sh", "-c", &script]));
    eventually("a term", || place.read("terms").lines().count() == 1);
    let mut other = place.hold("leader", "echo ready; sleep 1000");
    eventually("it waits", || place.claims("leader") == 2);
    for signal in [Signal::SIGWINCH, Signal::SIGCONT, Signal::SIGUSR1] {
        candidate.signal(signal);
    }
    other.signal(Signal::SIGTERM);
    assert_eq!(other.code(), 143);
    eventually("another term", || place.read("terms").lines().count() >= 2);
    candidate.signal(Signal::SIGTERM);
    let _ = candidate.child.wait();
}

/// What a command exits with is its own.
#[test]
fn a_command_that_does_not_find_another_is_run_again() {
    let place = Place::new();
    let script = format!("echo x >> '{}'; exit 127", place.path("terms").display());
    let mut candidate =
        Running::start(place.leasehold(["elect", "leader", "--", "sh", "-c", &script]));
    eventually("another term", || place.read("terms").lines().count() >= 2);
    candidate.signal(Signal::SIGTERM);
    let _ = candidate.child.wait();
}

#[test]
fn what_no_term_would_mend_ends_it() {
    let place = Place::new();
    assert_eq!(place.code(&["elect", "leader", "--", "/nowhere/at/all"]), 127);
    assert_eq!(place.code(&["elect", "leader", "--", "/etc/passwd"]), 126);
    assert_eq!(place.code(&["elect", "a\nb", "--", "true"]), 2);
}
