//! `leasehold elect`: one candidate leads, and another takes over, however the first term ended.

use nix::sys::signal::Signal;

use crate::common::{Place, Running, eventually};

/// Starts a candidate that writes one line for each of its terms.
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

/// Ends terms by a crash, an eviction and a signal. Each time another candidate leads, with a
/// greater token.
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
    eventually("the third candidate is in the queue", || {
        let mut show = place.leasehold(["show", "--json", "leader"]);
        let shown = show.env("LEASEHOLD_STORE", store).output().unwrap().stdout;
        let shown: serde_json::Value = serde_json::from_slice(&shown).unwrap();
        shown["claims"].as_array().unwrap().len() == 2
    });
    assert!(force.env("LEASEHOLD_STORE", store).status().unwrap().success());
    led(3);
    // The second candidate has rejoined the queue.
    third.signal(Signal::SIGTERM);
    assert_eq!(third.code(), 143, "the exit code is not that of the command: {}", third.errors());
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
fn another_candidate_takes_over_on_files() {
    let place = Place::new();
    another_takes_over(&place.store());
}

#[cfg(feature = "redis")]
#[test]
fn another_candidate_takes_over_on_redis() {
    another_takes_over(&testbed::redis().url());
}

#[cfg(feature = "postgres")]
#[test]
fn another_candidate_takes_over_on_postgres() {
    another_takes_over(&testbed::postgres().database());
}

#[cfg(feature = "etcd")]
#[test]
fn another_candidate_takes_over_on_etcd() {
    another_takes_over(&testbed::etcd().url());
}

#[test]
fn leader_rejoins_the_queue_when_its_command_exits() {
    let place = Place::new();
    let script = format!("echo x >> '{}'; exit 3", place.path("terms").display());
    let mut leader =
        Running::start(place.leasehold(["elect", "leader", "--", "sh", "-c", &script]));
    eventually("there were two terms", || place.read("terms").lines().count() >= 2);
    // The signal must arrive between two terms. A running command would get it instead.
    eventually("the term is over", || place.claims("leader") == 0);
    leader.signal(Signal::SIGINT);
    let status = leader.child.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(2), "{status}");
    let stderr = leader.errors();
    assert!(stderr.contains("the command exited with 3; rejoining the queue in 1s"), "{stderr}");
    assert_eq!(place.claims("leader"), 0);
}

#[test]
fn max_hold_ends_a_term() {
    let place = Place::new();
    let script = format!("echo x >> '{}'; exec sleep 1000", place.path("terms").display());
    let text = format!("echo \"$LEASEHOLD_REASON\" >> '{}'", place.path("lost").display());
    let program = &place.script("on-lost", &text);
    let words = ["elect", "--max-hold", "1s", "--kill-after", "100ms", "--on-lost", program];
    let words = [&words[..], &["leader", "--", "sh", "-c", &script]].concat();
    let mut leader = Running::start(place.leasehold(words));
    eventually("there were three terms", || place.read("terms").lines().count() >= 3);
    eventually("the program was started", || place.read("lost").contains("max-hold"));
    leader.signal(Signal::SIGTERM);
    assert_eq!(leader.code(), 143);
    // The pauses do not grow.
    let stderr = leader.errors();
    assert!(stderr.contains("queue in 1s") && !stderr.contains("queue in 2s"), "{stderr}");
}

/// In its first term the candidate has begun to catch the signals in order to forward them to its
/// command.
#[test]
fn waiting_candidate_survives_nonfatal_signals() {
    let place = Place::new();
    let script = format!("echo x >> '{}'; exit 3", place.path("terms").display());
    let mut candidate =
        Running::start(place.leasehold(["elect", "leader", "--", "sh", "-c", &script]));
    eventually("a term", || place.read("terms").lines().count() == 1);
    let mut other = place.hold("leader", "echo ready; sleep 1000");
    eventually("the waiter is in the queue", || place.claims("leader") == 2);
    for signal in [Signal::SIGWINCH, Signal::SIGCONT, Signal::SIGUSR1] {
        candidate.signal(signal);
    }
    other.signal(Signal::SIGTERM);
    assert_eq!(other.code(), 143);
    eventually("there was another term", || place.read("terms").lines().count() >= 2);
    candidate.signal(Signal::SIGTERM);
    let _ = candidate.child.wait();
}

/// An exit code of the command that equals one of leasehold's has no special meaning.
#[test]
fn command_that_exits_with_127_is_run_again() {
    let place = Place::new();
    let script = format!("echo x >> '{}'; exit 127", place.path("terms").display());
    let mut candidate =
        Running::start(place.leasehold(["elect", "leader", "--", "sh", "-c", &script]));
    eventually("there was another term", || place.read("terms").lines().count() >= 2);
    candidate.signal(Signal::SIGTERM);
    let _ = candidate.child.wait();
}

#[test]
fn permanent_error_ends_the_candidate() {
    let place = Place::new();
    assert_eq!(place.code(&["elect", "leader", "--", "/nowhere/at/all"]), 127);
    assert_eq!(place.code(&["elect", "leader", "--", "/etc/passwd"]), 126);
    assert_eq!(place.code(&["elect", "a\nb", "--", "true"]), 2);
}
