//! The behavior of the command on every store. Other tests check it in detail on files. These tests
//! repeat the main points on stores with leases.

use std::process::{Command, Output};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::signal::Signal;

use crate::common::{LEASEHOLD, Place, Running, eventually};

on_stores!(
    once_per_runs_once_however_many_are_started,
    command_gets_the_requested_grace_period,
    on_lost_program_runs_when_the_lock_is_lost,
    wait_returns_on_free_or_held,
    reenter_reuses_the_lock_of_the_enclosing_run,
    a_command_finds_its_store,
);

#[cfg(feature = "top")]
on_stores!(top_shows_holder_and_waiter);

/// Returns the `leasehold` command with these arguments on this store.
fn command(place: &Place, store: &str, words: &[&str]) -> Command {
    let mut command = place.leasehold(words);
    command.env("LEASEHOLD_STORE", store).current_dir(place.path(""));
    command
}

fn output(place: &Place, store: &str, words: &[&str]) -> Output {
    command(place, store, words).output().unwrap()
}

fn code(place: &Place, store: &str, words: &[&str]) -> Option<i32> {
    output(place, store, words).status.code()
}

fn once_per_runs_once_however_many_are_started(store: &str) {
    let place = Place::new();
    let words =
        ["run", "--once-per", "1h", "every:hourly", "--", "sh", "-c", "echo ran >> done; sleep 1"];
    let start = |_| Running::start(command(&place, store, &words));
    for mut one in (0..3).map(start).collect::<Vec<_>>() {
        assert_eq!((one.code(), one.line(), one.errors()), (0, String::new(), String::new()));
    }
    assert_eq!(place.read("done"), "ran\n");
    let again = ["run", "--once-per", "1h", "-E", "9", "every:hourly", "--", "false"];
    assert_eq!(code(&place, store, &again), Some(9), "expected 9 (done) later in the same period");
}

fn command_gets_the_requested_grace_period(store: &str) {
    let place = Place::new();
    let script = "trap 'date +%s.%N > term' TERM; echo ready; while :; do sleep 0.01; done";
    let words =
        ["run", "--max-hold", "6s", "--kill-after", "1500ms", "every:grace", "--", "bash", "-c"];
    let mut run = Running::start(command(&place, store, &[&words[..], &[script]].concat()));
    assert_eq!(run.code(), 74, "{}", run.errors());
    let ended = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    let term: f64 = place.read("term").trim().parse().unwrap();
    assert!((1.4..5.0).contains(&(ended - term)), "{}", ended - term);
}

fn on_lost_program_runs_when_the_lock_is_lost(store: &str) {
    let place = Place::new();
    let record = place.path("losses");
    let text = format!("echo \"$LEASEHOLD_NAME $LEASEHOLD_TOKEN\" >> '{}'", record.display());
    let program = &place.script("tell", &text);
    let script = "echo $LEASEHOLD_TOKEN; exec sleep 1000";
    let words =
        ["run", "--on-lost", program, "--max-hold", "2s", "every:lost", "--", "sh", "-c", script];
    let mut run = Running::start(command(&place, store, &words));
    let token = run.line();
    assert_eq!(run.code(), 74, "{}", run.errors());
    eventually("the --on-lost program has run", || place.read("losses").ends_with('\n'));
    assert_eq!(place.read("losses"), format!("every:lost {token}\n"));
    let fine = ["run", "--on-lost", program, "every:lost", "--", "false"];
    assert_eq!(code(&place, store, &fine), Some(1));
    assert_eq!(place.read("losses").lines().count(), 1, "--on-lost was called without a loss");
}

fn wait_returns_on_free_or_held(store: &str) {
    let place = Place::new();
    let name = "every:wait";
    assert_eq!(code(&place, store, &["run", name, "--", "true"]), Some(0));
    assert_eq!(code(&place, store, &["wait", name]), Some(0));
    assert_eq!(code(&place, store, &["wait", "--held", "--timeout", "100ms", name]), Some(75));
    let mut until_held = Running::start(command(&place, store, &["wait", "--held", name]));
    let hold = ["run", name, "--", "sh", "-c", "echo ready; exec sleep 1000"];
    let mut holder = Running::start(command(&place, store, &hold));
    holder.wait_for("ready");
    assert_eq!(until_held.code(), 0);
    let late = output(&place, store, &["wait", "--timeout", "100ms", name]);
    let why = String::from_utf8_lossy(&late.stderr).into_owned();
    assert!(
        late.status.code() == Some(75) && why.contains("\"every:wait\" is held by"),
        "{late:?}"
    );
    let mut until_free = Running::start(command(&place, store, &["wait", name]));
    std::thread::sleep(Duration::from_millis(300));
    assert!(until_free.child.try_wait().unwrap().is_none(), "`wait` ended while the lock is held");
    holder.signal(Signal::SIGTERM);
    assert_eq!((holder.code(), until_free.code()), (143, 0));
}

fn reenter_reuses_the_lock_of_the_enclosing_run(store: &str) {
    let place = Place::new();
    let script = format!(
        "echo $LEASEHOLD_TOKEN; '{LEASEHOLD}' run --reenter every:x -- sh -c 'echo $LEASEHOLD_TOKEN; exit 7'; \
         echo $?; '{LEASEHOLD}' run every:x -- true; echo $?"
    );
    let done = output(&place, store, &["run", "every:x", "--", "sh", "-c", &script]);
    let stdout = String::from_utf8_lossy(&done.stdout).into_owned();
    let [token, below, code_below, refused] = stdout.lines().collect::<Vec<_>>()[..] else {
        panic!("{done:?}")
    };
    assert_eq!((token, code_below, refused), (below, "7", "2"), "{done:?}");
    assert!(token.parse::<u64>().is_ok(), "{stdout}");
    // Without an enclosing hold, the lock is acquired.
    let alone = ["run", "--reenter", "every:x", "--", "sh", "-c", "exit 3"];
    assert_eq!(code(&place, store, &alone), Some(3));
}

/// The store is given only on the command line.
fn a_command_finds_its_store(store: &str) {
    let place = Place::new();
    let check = format!("echo $LEASEHOLD_STORE; exec '{LEASEHOLD}' verify $LEASEHOLD_SEQUENCER");
    let words = ["run", "--store", store, "every:store", "--", "sh", "-c", &check];
    let done = place.leasehold(words).env_remove("LEASEHOLD_STORE").output().unwrap();
    assert_eq!(done.status.code(), Some(0), "{done:?}");
    assert_eq!(String::from_utf8_lossy(&done.stdout), format!("{store}\n"));
}

#[cfg(feature = "top")]
fn top_shows_holder_and_waiter(store: &str) {
    let place = Place::new();
    let run = |label| {
        let words =
            ["run", "--label", label, "every:top", "--", "sh", "-c", "echo ready; exec sleep 1000"];
        Running::start(command(&place, store, &words))
    };
    let mut holder = run("job");
    holder.wait_for("ready");
    let waiter = run("later");
    let mut top = crate::top::Top::start(&place, &["--store", store, "every:top"]);
    // A long host name would push the label out of 80 columns.
    top.resize(24, 200);
    top.sees(&["> every:top", "mutex", "1/1   1 ", &format!("pid {}", holder.child.id()), "(job)"]);
    top.press("\r");
    top.sees(&["> held", &holder.child.id().to_string(), "job"]);
    top.sees(&["  waiting", &waiter.child.id().to_string(), "later"]);
    top.press("\x1b");
    top.sees(&["> every:top"]);
    top.press("q");
    assert!(top.ends().success());
    for running in [holder, waiter] {
        running.signal(Signal::SIGTERM);
    }
}
