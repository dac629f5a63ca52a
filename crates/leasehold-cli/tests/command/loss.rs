//! A command that is ended because of its lock: how much time it has, and which program is
//! notified. Also an unreachable store.

#[cfg(feature = "redis")]
use std::time::{Duration, Instant};

#[cfg(feature = "redis")]
use nix::sys::signal::Signal;

#[cfg(feature = "redis")]
use crate::common::exists;
use crate::common::{Place, Running, eventually, is_cause_and_hint};

/// The command gets SIGTERM first, then the requested time, and then SIGKILL.
#[test]
fn command_gets_the_requested_grace_period() {
    let place = Place::new();
    let ended = |grace: &str| {
        let script = "trap 'date +%s.%N > term' TERM; echo ready; while :; do sleep 0.01; done";
        let words = ["run", "--max-hold", "8s", "--kill-after", grace, "x", "--", "bash", "-c"];
        let mut command = place.leasehold([&words[..], &[script]].concat());
        command.current_dir(place.path("."));
        let mut run = Running::start(command);
        assert_eq!(run.code(), 74, "{}", run.errors());
        let ended = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let term: f64 = place.read("term").trim().parse().unwrap();
        ended.as_secs_f64() - term
    };
    let (short, long) = (ended("300ms"), ended("3s"));
    // After SIGKILL, leasehold waits for a tenth of the lease before it releases the lock.
    assert!((0.2..2.9).contains(&short), "{short}");
    assert!((2.9..8.0).contains(&long), "{long}");

    let refused =
        place.output(&["run", "--max-hold", "2s", "--kill-after", "1s", "x", "--", "true"]);
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("at least 2.666") && is_cause_and_hint(&stderr), "{stderr}");
    // If nothing expires, any grace period fits.
    assert_eq!(place.code(&["run", "--kill-after", "1h", "x", "--", "true"]), 0);
}

#[test]
fn on_lost_program_runs_when_the_lock_is_lost() {
    let place = Place::new();
    let record = place.path("losses");
    let text = format!(
        "echo \"$LEASEHOLD_NAME $LEASEHOLD_TOKEN $LEASEHOLD_REASON\" >> '{}'",
        record.display()
    );
    let program = &place.script("tell", &text);

    let script = "echo $LEASEHOLD_TOKEN; exec sleep 1000";
    let words = ["run", "--on-lost", program, "--max-hold", "500ms", "x", "--", "sh", "-c", script];
    let mut run = Running::start(place.leasehold(words));
    let token = run.line().trim().to_owned();
    assert_eq!(run.code(), 74, "{}", run.errors());
    eventually("the --on-lost program has run", || place.read("losses").ends_with('\n'));
    assert_eq!(place.read("losses"), format!("x {token} --max-hold was reached\n"));

    // `--on-lost` is not started if the command ended on its own. If the program cannot be started,
    // a warning is printed.
    assert_eq!(place.code(&["run", "--on-lost", program, "x", "--", "false"]), 1);
    assert_eq!(place.read("losses").lines().count(), 1);
    let words = ["run", "--on-lost", "/no/such", "--max-hold", "500ms", "x", "--", "sleep", "1000"];
    let output = place.output(&words);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(74), "{stderr}");
    assert!(stderr.contains("cannot start \"/no/such\" (--on-lost): No such file"), "{stderr}");
}

/// leasehold keeps trying for the given time, however short, and continues when the store is back.
#[cfg(feature = "redis")]
#[test]
fn run_retries_an_unreachable_store_for_the_given_time() {
    let place = Place::new();
    let server = testbed::Redis::start();
    let store = server.url();
    let run = |limit: &str| {
        let mut command =
            place.leasehold(["run", "--connect-timeout", limit, "x", "--", "echo", "ran"]);
        command.env("LEASEHOLD_STORE", &store);
        command
    };
    server.kill();
    let started = Instant::now();
    let output = run("300ms").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(69), "{stderr}");
    assert!(started.elapsed() < Duration::from_secs(10), "{stderr}");
    let mut patient = Running::start(run("10m"));
    // This is longer than the default time limit.
    std::thread::sleep(Duration::from_secs(17));
    server.restart();
    patient.wait_for("ran");
    assert_eq!(patient.code(), 0);
}

/// A Redis server with a user whose permission to lock can be taken away.
#[cfg(feature = "redis")]
struct Permitted {
    place: Place,
    server: testbed::Redis,
    url: String,
}

#[cfg(feature = "redis")]
impl Permitted {
    fn new() -> Self {
        let (place, server) = (Place::new(), testbed::Redis::start());
        let url = server.url().replacen("://", "://app:app@", 1);
        let new = Self { place, server, url };
        new.rules(&["on", ">app", "~*", "&*", "+@all"]);
        new
    }

    fn rules(&self, rules: &[&str]) {
        self.server.command(&[&["ACL", "SETUSER", "app"], rules].concat());
    }

    fn deny(&self) {
        self.rules(&["-eval", "-evalsha", "-script", "-fcall", "-subscribe"]);
    }

    fn start(&self, words: &[&str]) -> Running {
        let mut command = self.place.leasehold(words);
        command.env("LEASEHOLD_STORE", &self.url);
        Running::start(command)
    }

    /// Waits until this many claims hold the lock or wait.
    fn queued(&self, claims: usize) {
        eventually("all clients are in the queue", || {
            let mut show = self.place.leasehold(["show", "--json", "x"]);
            let output = show.env("LEASEHOLD_STORE", &self.url).output().unwrap();
            let lock: serde_json::Value =
                serde_json::from_slice(&output.stdout).unwrap_or_default();
            lock["claims"].as_array().map_or(0, Vec::len) == claims
        });
    }
}

/// A holder survives a missing permission for a while, so clients that wait must survive it too.
#[cfg(feature = "redis")]
#[test]
fn clients_that_wait_survive_a_missing_permission() {
    let store = Permitted::new();
    let mut holder = store.start(&["run", "x", "--", "sh", "-c", "echo ready; sleep 1000"]);
    holder.wait_for("ready");
    let mut wait = store.start(&["wait", "x"]);
    let led = store.place.path("led").display().to_string();
    let mut run = store.start(&["run", "x", "--", "true"]);
    let _elect = store.start(&["elect", "x", "--", "touch", &led]);
    store.queued(3);
    // `wait` has polled once by now.
    std::thread::sleep(Duration::from_secs(2));
    // Longer than several heartbeats and polls, and shorter than the lease.
    store.deny();
    std::thread::sleep(Duration::from_secs(5));
    store.rules(&["+@all"]);
    holder.signal(Signal::SIGTERM);
    holder.code();
    assert_eq!(run.code(), 0, "{}", run.errors());
    eventually("the candidate leads", || exists(std::path::Path::new(&led)));
    assert_eq!(wait.code(), 0, "{}", wait.errors());
}

/// A client whose time is over while it lacks a permission reports that, and not a busy lock.
#[cfg(feature = "redis")]
#[test]
fn wait_that_ends_without_a_permission_reports_the_denial() {
    let store = Permitted::new();
    let _holder = store.start(&["run", "x", "--", "sleep", "1000"]);
    store.queued(1);
    // Shorter than the time for which a client retries.
    let mut waiter = store.start(&["run", "--wait", "12s", "x", "--", "true"]);
    store.queued(2);
    store.deny();
    assert_eq!(waiter.code(), 69);
    let errors = waiter.errors();
    assert!(errors.contains("[denied"), "{errors}");
}
