//! `leasehold hold`: what it prints, what ends it, and that no crash leaves a lock held.

use std::io::Write;
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::common::{LEASEHOLD, Place, Running, eventually};
#[cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]
use crate::common::{PATIENCE, signals_end};

fn command(store: &str, words: &[&str]) -> Command {
    let mut command = Command::new(LEASEHOLD);
    command.arg("hold").args(words).env("LEASEHOLD_STORE", store).stdin(Stdio::piped());
    command
}

fn hold(place: &Place, words: &[&str]) -> Running {
    Running::start(command(&place.store(), words))
}

/// Returns the next line of a hold with `--json`.
#[track_caller]
fn next_event(running: &mut Running) -> Value {
    let line = running.line();
    serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line:?}: {e}: {}", running.errors()))
}

#[test]
fn hold_reports_its_lock_and_releases_on_request() {
    let place = Place::new();
    let mut first = hold(&place, &["--json", "--label", "first", "x"]);
    let held = next_event(&mut first);
    assert_eq!((&held["event"], &held["name"]), (&"held".into(), &"x".into()), "{held}");
    let token = held["token"].as_u64().unwrap();
    assert!(held["remaining_seconds"].is_null(), "a file's lock has no lease: {held}");
    assert!(held["deadline"].is_null(), "{held}");
    let sequencer = held["sequencer"].as_str().unwrap().to_owned();
    assert_eq!(place.code(&["verify", &sequencer]), 0);

    let mut second = hold(&place, &["x"]);
    let line = second.line();
    let by = format!(" pid {} (first) for ", first.child.id());
    assert!(line.starts_with("waiting 1 held by ") && line.contains(&by), "{line}");
    let mut third = hold(&place, &["--json", "x"]);
    let waits = next_event(&mut third);
    assert_eq!((&waits["event"], &waits["ahead"]), (&"waiting".into(), &2.into()), "{waits}");
    assert_eq!((&waits["place"], &waits["holders"][0]["state"]), (&2.into(), &"held".into()));
    assert_eq!(waits["holders"][0]["pid"], first.child.id(), "{waits}");
    assert_eq!(waits["holders"][0]["label"], "first", "{waits}");
    assert!(waits["held_by"].as_str().unwrap().contains(&by), "{waits}");
    drop(third.child.stdin.take());
    assert_eq!((third.line(), third.code()), (String::new(), 0));
    let mut stdin = first.child.stdin.take().unwrap();
    writeln!(stdin, "not a word of ours").unwrap();
    writeln!(stdin, "release").unwrap();
    let released = next_event(&mut first);
    assert_eq!(released["event"], "released", "{released}");
    assert_eq!((released["token"].as_u64(), first.code()), (Some(token), 0));
    assert_eq!(place.code(&["verify", &sequencer]), 1);

    let line = second.line();
    let ["held", later, sequencer] = line.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{line}")
    };
    assert!(later.parse::<u64>().unwrap() > token, "{line}");
    assert_eq!(place.code(&["verify", sequencer]), 0);
    drop(second.child.stdin.take());
    assert_eq!((second.line(), second.code()), (format!("released {later}"), 0));
    assert_eq!(place.claims("x"), 0);
}

/// The hold must end when its reader ends in any way, because the pipes end with the reader.
#[test]
fn hold_ends_with_its_reader() {
    let place = Place::new();
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        let mut shell = Command::new("sh");
        shell.args(["-c", "read -r line; echo \"$line\"; exec sleep 1000"]);
        let mut holder = command(&place.store(), &["x"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut reader = Running::start({
            shell.stdin(Stdio::from(holder.stdout.take().unwrap()));
            shell
        });
        assert!(reader.line().starts_with("held "));
        assert_eq!(place.claims("x"), 1);
        reader.signal(signal);
        let _ = reader.child.wait();
        assert_eq!(holder.wait().unwrap().code(), Some(0));
        assert_eq!(place.claims("x"), 0);
    }
}

#[test]
fn waiting_hold_ends_with_its_caller() {
    let place = Place::new();
    let mut holder = hold(&place, &["x"]);
    assert!(holder.line().starts_with("held "));
    let mut waiter = hold(&place, &["x"]);
    assert!(waiter.line().starts_with("waiting 1"));
    drop(waiter.child.stdin.take());
    assert_eq!((waiter.line(), waiter.code()), (String::new(), 0));
    assert_eq!(place.claims("x"), 1);
    let mut waiter = hold(&place, &["x"]);
    assert!(waiter.line().starts_with("waiting 1"));
    waiter.signal(Signal::SIGTERM);
    // `wait` would close stdin, so it is taken out first.
    let _stdin = waiter.child.stdin.take();
    let status = waiter.child.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(15));
    assert_eq!(place.claims("x"), 1);
}

#[test]
fn hold_reports_a_failed_acquisition() {
    let place = Place::new();
    let mut holder = hold(&place, &["x"]);
    assert!(holder.line().starts_with("held "));
    let mut refused = hold(&place, &["--json", "--try", "x"]);
    let failed = next_event(&mut refused);
    assert_eq!((&failed["event"], &failed["code"]), (&"failed".into(), &75.into()), "{failed}");
    assert!(failed["message"].as_str().unwrap().contains("\"x\" is held by "), "{failed}");
    assert_eq!((refused.code(), refused.errors()), (75, String::new()));
    // 74 is also the code of a lost lock, which is reported by another line.
    let mut refused = hold(&place, &["--json", "--try", "-E", "74", "x"]);
    let failed = next_event(&mut refused);
    assert_eq!((&failed["event"], &failed["code"]), (&"failed".into(), &74.into()), "{failed}");
    assert_eq!(refused.code(), 74);
    let us = std::process::id().to_string();
    assert_eq!(place.code(&["acquire", "--try", "-E", "74", "--pid", &us, "x"]), 74);
    let mut refused = hold(&place, &["--wait", "10ms", "x"]);
    assert!(refused.line().starts_with("waiting 1"));
    assert!(refused.line().starts_with("failed 75 timed out after 10ms: \"x\" is held by "));
    assert_eq!(refused.code(), 75);
    assert!(refused.errors().starts_with("leasehold: timed out after 10ms: \"x\" is held by "));
}

/// Runs the example of the help in bash.
#[test]
fn hold_example_from_the_help_works_in_bash() {
    let place = Place::new();
    let script = r#"
        exec {lock}< <("$1" hold deploy < /dev/null)
        while read -r word token rest <&$lock && [ "$word" = waiting ]; do :; done
        [ "$word" = held ] || exit 9
        echo "$token"
        read -r go
        exec {lock}<&-
        echo closed
        read -r go
    "#;
    let mut bash = Command::new("bash");
    bash.args(["-c", script, "bash", LEASEHOLD]).env("LEASEHOLD_STORE", place.store());
    let mut bash = Running::start({
        bash.stdin(Stdio::piped());
        bash
    });
    assert!(bash.line().parse::<u64>().is_ok());
    assert_eq!(place.claims("deploy"), 1);
    let mut stdin = bash.child.stdin.take().unwrap();
    writeln!(stdin).unwrap();
    assert_eq!(bash.line(), "closed");
    eventually("the lock is released", || place.claims("deploy") == 0);
    writeln!(stdin).unwrap();
    assert_eq!(bash.code(), 0);
}

/// The hold belongs to the process of `--pid`, whatever other processes do.
#[test]
fn hold_for_a_process_ends_with_it_and_not_with_its_reader() {
    let place = Place::new();
    let sleeper = || Command::new("sleep").arg("1000").spawn().unwrap();
    let started = |owner: &std::process::Child| {
        let pid = owner.id().to_string();
        let mut holder = hold(&place, &["--json", "--pid", &pid, "x"]);
        assert_eq!(next_event(&mut holder)["event"], "held");
        holder
    };
    // Without `stay`, the end of stdin means that the caller died before it had handed the lock on.
    let mut owner = sleeper();
    let mut holder = started(&owner);
    drop(holder.child.stdin.take());
    assert_eq!((next_event(&mut holder)["event"].clone(), holder.code()), ("released".into(), 0));

    let mut holder = started(&owner);
    let mut stdin = holder.child.stdin.take().unwrap();
    writeln!(stdin, "stay").unwrap();
    drop(stdin);
    for _ in 0..20 {
        assert_eq!(place.claims("x"), 1);
    }
    owner.kill().unwrap();
    owner.wait().unwrap();
    assert_eq!((next_event(&mut holder)["event"].clone(), holder.code()), ("released".into(), 0));
    assert_eq!(place.claims("x"), 0);

    // No process reads stdout, but the lock stays held.
    let mut owner = sleeper();
    let pid = owner.id().to_string();
    let mut script = Command::new("sh");
    let words = "\"$1\" hold --pid $2 y < /dev/null | { read -r word; echo $word; }";
    script.args(["-c", words, "sh", LEASEHOLD, &pid]).env("LEASEHOLD_STORE", place.store());
    let mut script = Running::start(script);
    assert!(script.line().starts_with("held "));
    for _ in 0..20 {
        assert_eq!(place.claims("y"), 1);
    }
    owner.kill().unwrap();
    owner.wait().unwrap();
    eventually("the lock is released", || place.claims("y") == 0);

    let mut refused = hold(&place, &["--json", "--pid", "999999999", "x"]);
    let failed = next_event(&mut refused);
    assert_eq!((&failed["event"], &failed["code"]), (&"failed".into(), &2.into()), "{failed}");
    assert_eq!(refused.code(), 2);
}

/// A fork has the pipes of its parent. In this test, the test itself keeps the pipes open.
#[test]
fn hold_ends_with_its_caller_even_if_the_pipes_stay_open() {
    let place = Place::new();
    let mut caller = Command::new("sleep").arg("1000").spawn().unwrap();
    let pid = caller.id().to_string();
    let mut holder = hold(&place, &["--json", "--caller", &pid, "x"]);
    assert_eq!(next_event(&mut holder)["event"], "held");
    let mut waiter = hold(&place, &["--json", "--caller", &pid, "x"]);
    let waiting = next_event(&mut waiter);
    assert_eq!(waiting["event"], "waiting");
    let label = waiting["holders"][0]["label"].as_str().unwrap();
    assert_eq!(label, format!("for sleep {pid}"));
    caller.kill().unwrap();
    caller.wait().unwrap();
    assert_eq!((next_event(&mut holder)["event"].clone(), holder.code()), ("released".into(), 0));
    while !waiter.line().is_empty() {}
    assert_eq!((waiter.code(), place.claims("x")), (0, 0));
}

#[test]
fn hold_for_an_exited_caller_acquires_no_lock() {
    let place = Place::new();
    let refused = |mut running: Running| {
        let failed = next_event(&mut running);
        assert_eq!((&failed["event"], &failed["code"]), (&"failed".into(), &71.into()), "{failed}");
        assert!(failed["message"].as_str().unwrap().starts_with("--caller "), "{failed}");
        assert_eq!(running.code(), 71);
    };
    refused(hold(&place, &["--json", "--caller", "999999999", "x"]));
    // The caller is gone, and a process that started after `hold` has its pid.
    let mut script = Command::new("sh");
    script.args(["-c", "read -r pid; exec \"$1\" hold --json --caller $pid x", "sh", LEASEHOLD]);
    script.env("LEASEHOLD_STORE", place.store()).stdin(Stdio::piped());
    let mut early = Running::start(script);
    // Start times have a resolution of 10 ms.
    std::thread::sleep(std::time::Duration::from_millis(50));
    let mut late = Command::new("sleep").arg("1000").spawn().unwrap();
    writeln!(early.child.stdin.as_mut().unwrap(), "{}", late.id()).unwrap();
    refused(early);
    late.kill().unwrap();
    late.wait().unwrap();
}

/// The exit code does not reach a caller whose children are reaped by another process.
#[test]
fn hold_reports_usage_errors_on_stdout_too() {
    let place = Place::new();
    let mut refused = hold(&place, &["--json", "--shared", "--exclusive", "x"]);
    let failed = next_event(&mut refused);
    assert_eq!((&failed["event"], &failed["code"]), (&"failed".into(), &2.into()), "{failed}");
    let message = "the argument '--shared' cannot be used with '--exclusive'";
    assert_eq!((failed["message"].as_str(), refused.code()), (Some(message), 2));
    assert!(refused.errors().starts_with(&format!("error: {message}\n")));
    let mut refused = hold(&place, &["--shared", "--exclusive", "x"]);
    assert_eq!((refused.line(), refused.code()), (String::new(), 2));
    assert!(place.output(&["hold", "--json", "--help"]).stdout.starts_with(b"Hold"));
}

/// Loses a lock on a store with leases while no process reads. A later `release` must report that.
#[cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]
fn says_later_that_it_was_lost(store: &str) {
    let ask = |words: &[&str]| {
        let mut command = Command::new(LEASEHOLD);
        // SAFETY: Between fork and exec the closure makes only system calls, which is allowed
        // there.
        unsafe { std::os::unix::process::CommandExt::pre_exec(&mut command, signals_end) };
        command.args(words).env("LEASEHOLD_STORE", store).output().unwrap()
    };
    let pid = std::process::id().to_string();
    let taken = ask(&["acquire", "--lease", "2s", "--pid", &pid, "z"]);
    let token = String::from_utf8(taken.stdout.clone()).unwrap();
    assert!(taken.status.success(), "{taken:?}");
    // Renewals keep the lock, although no process reads.
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(ask(&["run", "--try", "z", "--", "true"]).status.code(), Some(75));
    assert_eq!(ask(&["evict", "z"]).status.code(), Some(0));
    // The hold needs time to notice the eviction.
    std::thread::sleep(std::time::Duration::from_secs(2));
    let released = ask(&["release", "--token", token.trim(), "z"]);
    let stderr = String::from_utf8_lossy(&released.stderr).into_owned();
    assert_eq!(released.status.code(), Some(74), "{released:?}");
    assert!(
        stderr.starts_with("leasehold: lost \"z\": "),
        "the hold did not find out on its own: {stderr}"
    );
}

/// Renews a lock on a store with leases, and then evicts it.
#[cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]
fn is_told_of_its_loss(store: &str) {
    let mut holder = Running::start(command(store, &["--json", "--lease", "3s", "x"]));
    let held = next_event(&mut holder);
    assert_eq!(held["event"], "held", "{held}");
    let left = held["remaining_seconds"].as_f64().unwrap();
    assert!(left > 1.0 && left <= 3.0, "{held}");
    let until = held["deadline"].as_f64().unwrap() - held["time"].as_f64().unwrap();
    assert!((until - left).abs() < 0.1, "{held}");
    let ask = |words: &[&str]| {
        let mut command = Command::new(LEASEHOLD);
        // SAFETY: Between fork and exec the closure makes only system calls, which is allowed
        // there.
        unsafe { std::os::unix::process::CommandExt::pre_exec(&mut command, signals_end) };
        command.args(words).env("LEASEHOLD_STORE", store).output().unwrap()
    };
    std::thread::sleep(std::time::Duration::from_secs(4));
    let checked = ask(&["verify", held["sequencer"].as_str().unwrap()]);
    assert_eq!(checked.status.code(), Some(0), "the lock was not renewed: {checked:?}");
    assert_eq!(ask(&["evict", "x"]).status.code(), Some(0));
    let lost = next_event(&mut holder);
    assert_eq!((&lost["event"], &lost["name"]), (&"lost".into(), &"x".into()), "{lost}");
    assert_eq!((holder.line(), holder.code()), (String::new(), 74));
}

/// Kills a holder. The waiter must acquire the lock once the lease has expired.
#[cfg(any(feature = "redis", feature = "postgres", feature = "etcd"))]
fn is_free_when_all_are_killed(store: &str) {
    let mut holder = Running::start(command(store, &["--lease", "2s", "y"]));
    assert!(holder.line().starts_with("held "));
    let mut waiter = Running::start(command(store, &["y"]));
    assert!(waiter.line().starts_with("waiting 1"));
    holder.signal(Signal::SIGKILL);
    let killed = std::time::Instant::now();
    while !waiter.line().starts_with("held ") {
        assert!(killed.elapsed() < PATIENCE);
    }
}

/// The server is paused for most of a lease, and then for longer than a lease.
#[cfg(feature = "redis")]
#[test]
fn hold_reports_risk_recovery_and_loss_of_its_lock() {
    let server = testbed::Redis::with(testbed::Setup::new().fast());
    let mut holder = Running::start(command(&server.url(), &["--json", "--lease", "12s", "x"]));
    let held = next_event(&mut holder);
    assert_eq!(held["event"], "held", "{held}");
    server.stop();
    let at_risk = next_event(&mut holder);
    assert_eq!(
        (&at_risk["event"], &at_risk["name"]),
        (&"at_risk".into(), &"x".into()),
        "{at_risk}"
    );
    let left = at_risk["remaining_seconds"].as_f64().unwrap();
    assert!(left > 0.0 && left < 6.0, "{at_risk}");
    server.cont();
    let recovered = next_event(&mut holder);
    assert_eq!(recovered["event"], "recovered", "{recovered}");
    assert!(recovered["remaining_seconds"].as_f64().unwrap() > left, "{recovered}");
    server.stop();
    assert_eq!(next_event(&mut holder)["event"], "at_risk");
    let lost = next_event(&mut holder);
    assert_eq!((&lost["event"], &lost["reason"]), (&"lost".into(), &"expired".into()), "{lost}");
    assert_eq!((holder.line(), holder.code()), (String::new(), 74));
}

#[cfg(feature = "redis")]
#[test]
fn hold_reports_its_loss_and_frees_the_lock_on_redis() {
    let store = testbed::redis().url();
    is_told_of_its_loss(&store);
    says_later_that_it_was_lost(&store);
    is_free_when_all_are_killed(&store);
}

#[cfg(feature = "postgres")]
#[test]
fn hold_reports_its_loss_and_frees_the_lock_on_postgres() {
    let store = testbed::postgres().database();
    is_told_of_its_loss(&store);
    says_later_that_it_was_lost(&store);
    is_free_when_all_are_killed(&store);
}

#[cfg(feature = "etcd")]
#[test]
fn hold_reports_its_loss_and_frees_the_lock_on_etcd() {
    let store = testbed::etcd().url();
    is_told_of_its_loss(&store);
    says_later_that_it_was_lost(&store);
    is_free_when_all_are_killed(&store);
}
