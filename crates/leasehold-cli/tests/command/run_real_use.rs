//! `leasehold run` and the commands that read, in real situations: nested, from cron, with other
//! users, and when the system has no resources left.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

#[cfg(feature = "sqlite")]
use crate::common::watchdogs_of;
use crate::common::{LEASEHOLD, Place, Running, is_cause_and_hint};
use nix::sys::signal::Signal;

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns a shell command with `leasehold` on its PATH.
fn sh(place: &Place, script: &str) -> Command {
    let dir = std::path::Path::new(LEASEHOLD).parent().unwrap();
    let path = format!("{}:{}", dir.display(), std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new("sh");
    command.args(["-c", script]).env("PATH", path).env("LEASEHOLD_STORE", place.store());
    command.current_dir(place.path("")).stdin(Stdio::null());
    command
}

// F19
#[test]
fn lock_is_kept_while_a_command_of_another_user_runs() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can start a command that it may not signal");
        return;
    }
    let place = Place::new();
    let script = "echo ready; exec setpriv --reuid=65534 --clear-groups sleep 8";
    let words = ["run", "-v", "--max-hold", "2s", "x", "--", "sh", "-c", script];
    let mut holder = Running::start(place.without_kill(&words));
    holder.wait_for("ready");
    let started = Instant::now();
    let mut tries = 0;
    while started.elapsed() < Duration::from_secs(4) {
        assert_eq!(place.code(&["run", "--try", "x", "--", "true"]), 75);
        tries += 1;
    }
    assert!(tries > 0);
    // The command runs to its end, and the lock is held that long.
    assert_eq!(holder.code(), 74);
    assert!(started.elapsed() > Duration::from_secs(6));
    let stderr = holder.errors();
    let once = "the command runs as another user, so leasehold cannot stop it";
    assert_eq!(stderr.matches(once).count(), 1, "{stderr}");
    assert!(!stderr.contains("sent SIG") && stderr.contains("could not send SIGKILL"), "{stderr}");
    assert!(stderr.contains("reached its --max-hold"), "{stderr}");
    assert_eq!(place.code(&["run", "--try", "x", "--", "true"]), 0);
}

// F20
/// Checks how much time both runs have, according to their environment and to the arguments of
/// their watchdogs.
#[cfg(feature = "sqlite")]
#[test]
fn inner_run_gets_part_of_the_outer_grace_period() {
    let place = Place::new();
    let outer = format!("sqlite:{}", place.path("outer.db").display());
    let script = "echo $PPID $LEASEHOLD_GRACE; echo ready; sleep 1000";
    let inner = format!("exec leasehold run --store {} b -- sh -c '{script}'", place.store());
    let inner = format!("echo $PPID $LEASEHOLD_GRACE; {inner}");
    let mut command = sh(&place, "exec leasehold run --lease 10s a -- sh -c \"$0\"");
    command.arg(inner).env("LEASEHOLD_STORE", outer);
    let mut running = Running::start(command);
    let mut pid_and_grace = || -> (i32, u64) {
        let line = running.line();
        let (pid, grace) = line.split_once(' ').unwrap();
        (pid.parse().unwrap(), grace.parse().unwrap())
    };
    let ((outer, left), (inner, below)) = (pid_and_grace(), pid_and_grace());
    let grace = |pid: i32| -> u64 {
        let dogs = watchdogs_of(pid);
        dogs[0].1[3].parse().unwrap_or_else(|_| panic!("{dogs:?}"))
    };
    // The inner run gets a part of the tenth of its lease that the outer run has left after its
    // SIGKILL.
    assert!((500..=1000).contains(&left), "{left}");
    assert_eq!(grace(outer), 2000);
    assert_eq!(grace(inner), left / 2);
    assert!(below <= left / 2, "{below}");
}

// F21
#[test]
fn nested_run_of_the_same_lock_is_refused() {
    let place = Place::new();
    let refused = |script: &str| {
        let output = sh(&place, script).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{script}: {output:?}");
        let text = stderr_of(&output);
        assert!(text.contains("enclosing leasehold run") && is_cause_and_hint(&text), "{text}");
    };
    refused("leasehold run x -- leasehold run x -- true");
    refused("leasehold run x -- leasehold run --wait 1h x -- true");
    refused("leasehold run x -- leasehold run y -- sh -c 'leasehold run x -- true'");
    refused("leasehold run --shared x -- leasehold run --exclusive x -- true");
    refused("leasehold run --max 2 x -- leasehold run --max 2 --permits 2 x -- true");
    refused("leasehold run x -- sh -c 'T=$(leasehold acquire x)'");
    for fine in [
        "leasehold run x -- leasehold run y -- true",
        "leasehold run --max 2 x -- leasehold run --max 2 x -- true",
        "leasehold run --shared x -- leasehold run --shared x -- true",
        // The lock is in another store.
        "leasehold run x -- leasehold run --store file:$PWD/other x -- true",
        // The inner run tries once and does not wait.
        "leasehold run x -- leasehold run --try -E 0 x -- false",
        // The outer hold has ended.
        "H=$(leasehold run x -- sh -c 'echo $LEASEHOLD_HELD'); LEASEHOLD_HELD=$H leasehold run x -- true",
    ] {
        let output = sh(&place, fine).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{fine}: {output:?}");
    }
}

// F22
#[test]
fn once_per_runs_once_however_many_are_started() {
    let place = Place::new();
    let work = "echo ran >> done; sleep 1";
    let start = |_| {
        let mut command =
            place.leasehold(["run", "--once-per", "1h", "hourly", "--", "sh", "-c", work]);
        command.current_dir(place.path("")).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let all: Vec<_> = (0..3).map(start).collect();
    for one in all {
        let output = one.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert_eq!(stderr_of(&output), "", "cron would mail it");
    }
    assert_eq!(place.read("done"), "ran\n");
    // The period counts from the acquisition, not from the end of the work.
    let again = |options: &[&str]| {
        let words = [&["run", "--once-per", "1h"], options, &["hourly", "--", "false"]].concat();
        place.output(&words)
    };
    assert_eq!(again(&[]).status.code(), Some(0));
    assert_eq!(again(&["-E", "9"]).status.code(), Some(9));
    let second = again(&["-v"]);
    assert!(stderr_of(&second).contains("in cooldown for 59m"), "{second:?}");
    // If the command runs, its own exit code is returned.
    assert_eq!(place.code(&["run", "--once-per", "1h", "other", "--", "sh", "-c", "exit 5"]), 5);
}

// F53
#[test]
#[ignore = "runs with ./test.sh --all"]
fn exhausted_file_descriptors_are_reported() {
    let place = Place::new();
    assert_eq!(place.code(&["run", "x", "--", "true"]), 0);
    for files in 4..48 {
        for words in ["run --try x -- true", "show x", "ls"] {
            let script = format!("ulimit -n {files}; exec leasehold {words}");
            let output = sh(&place, &script).output().unwrap();
            let text = stderr_of(&output);
            let loaded = !text.contains("shared librar");
            let fine =
                matches!(output.status.code(), Some(0 | 1 | 71)) && !text.contains("panicked");
            assert!(fine || !loaded, "{files}: {words}: {:?}: {text}", output.status);
        }
    }
    assert_eq!(place.claims("x"), 0);
}

// F60
#[test]
fn a_command_finds_its_store_in_the_environment() {
    let place = Place::new();
    let store = place.store();
    let check = "leasehold verify \"$LEASEHOLD_SEQUENCER\"";
    let mut command = sh(&place, "exec leasehold run --store \"$0\" x -- sh -c \"$1\"");
    let output = command.args([&store, check]).env_remove("LEASEHOLD_STORE").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

// F61
#[test]
fn reading_does_not_create_a_store() {
    let place = Place::new();
    let typo = place.path("typo");
    let stores = [format!("file:{}", typo.display()), format!("file://{}", typo.display())];
    for store in &stores {
        for words in [&["ls"][..], &["show", "x"], &["evict", "x"], &["verify", "lh1:mutex:1:s:x"]]
        {
            let output = place.output(&[words, &["--store", store]].concat());
            assert_eq!(output.status.code(), Some(69), "{words:?}: {output:?}");
            assert!(stderr_of(&output).contains("no store found"), "{output:?}");
            assert!(!crate::common::exists(&typo));
        }
    }
    if cfg!(feature = "sqlite") {
        let database = place.path("typo.db");
        let output = place.output(&["ls", "--store", &format!("sqlite:{}", database.display())]);
        assert_eq!(output.status.code(), Some(69), "{output:?}");
        assert!(!crate::common::exists(&database));
    }
    // A directory and a database of other programs.
    let foreign = place.path("foreign");
    std::fs::create_dir(&foreign).unwrap();
    std::fs::write(foreign.join("notes.txt"), "text").unwrap();
    let output = place.output(&["show", "x", "--store", &format!("file:{}", foreign.display())]);
    assert_eq!(output.status.code(), Some(69), "{output:?}");
    assert!(stderr_of(&output).contains("no store found"), "{output:?}");
    assert_eq!(std::fs::read_dir(&foreign).unwrap().count(), 1);
    if cfg!(feature = "sqlite") {
        let database = place.path("foreign.db");
        std::fs::write(&database, "").unwrap();
        let output = place.output(&["ls", "--store", &format!("sqlite:{}", database.display())]);
        assert_eq!(output.status.code(), Some(69), "{output:?}");
        assert!(stderr_of(&output).contains("no store found"), "{output:?}");
        assert_eq!(std::fs::metadata(&database).unwrap().len(), 0);
    }
    // The first client that acquires a lock creates the store.
    assert_eq!(place.code(&["run", "--store", &stores[0], "x", "--", "true"]), 0);
    assert_eq!(place.code(&["ls", "--store", &stores[0]]), 0);
}

// F62
#[test]
fn command_inherits_the_sigpipe_disposition() {
    let place = Place::new();
    let ignored = |before: &str| {
        let script = format!("{before} exec leasehold run x -- grep SigIgn /proc/self/status");
        let output = sh(&place, &script).output().unwrap();
        let mask = stdout_of(&output);
        let mask = mask.trim_start_matches("SigIgn:").trim();
        u64::from_str_radix(mask, 16).unwrap() & 1 << (Signal::SIGPIPE as i32 - 1) != 0
    };
    assert!(ignored("trap '' PIPE;"));
    // Rust's runtime ignores SIGPIPE in this test, and restores it for the programs that the test
    // starts.
    assert!(!ignored(""));
}

// F63
#[cfg(feature = "redis")]
#[test]
fn holder_from_another_library_is_reported_as_such() {
    let server = testbed::Redis::start();
    let (place, url) = (Place::new(), server.url());
    let try_it = |name| place.output(&["run", "--try", "--store", &url, name, "--", "true"]);
    // The key of a plain lock by SET NX PX is the lock's name.
    server.command(&["SET", "x", "somebody", "PX", "600000"]);
    let output = try_it("x");
    assert_eq!(output.status.code(), Some(75), "{output:?}");
    assert!(stderr_of(&output).contains("held by a client of another library"), "{output:?}");
    server.command(&["SET", "for ever", "somebody"]);
    let output = try_it("for ever");
    let text = stderr_of(&output);
    assert!(text.contains("\"for ever\"") && text.contains("never expires"), "{text}");
    // The lock may be held, so the message must not suggest an eviction.
    assert!(!text.contains("evict"), "{text}");
}

// F72
#[test]
fn lock_in_cooldown_is_not_reported_as_held() {
    let place = Place::new();
    assert_eq!(place.code(&["run", "--min-hold", "1h", "x", "--", "true"]), 0);
    let output = place.output(&["run", "--try", "x", "--", "true"]);
    let text = stderr_of(&output);
    assert_eq!(output.status.code(), Some(75), "{text}");
    assert!(text.contains("in cooldown for 59m") && !text.contains("is held by"), "{text}");
    assert!(text.ends_with("\nhint: to end the cooldown: leasehold evict x\n"), "{text}");
    // The state has the same word for people and for programs.
    assert!(stdout_of(&place.output(&["show", "x"])).contains("cooldown"));
    assert_eq!(place.show("x")["claims"][0]["state"], "cooldown");
}

// F73
#[test]
fn quiet_suppresses_only_contention_and_usage_omits_set_options() {
    let place = Place::new();
    let _holder = place.hold("x", "echo ready; sleep 1000");
    let us = std::process::id().to_string();
    for words in [
        &["run", "--try", "-q", "-E", "3", "x", "--", "true"][..],
        &["run", "--wait", "50ms", "-q", "-E", "3", "x", "--", "true"],
        &["acquire", "--try", "-q", "-E", "3", "--pid", &us, "x"],
    ] {
        let output = place.output(words);
        assert_eq!(output.status.code(), Some(3), "{words:?}: {output:?}");
        assert!(output.stderr.is_empty(), "{words:?}: {output:?}");
    }
    // `run` refuses both options; elsewhere, --verbose prints the reason nevertheless.
    let words = ["acquire", "-v", "--try", "-q", "--pid", &us, "x"];
    let output = place.output(&words);
    assert_eq!(output.status.code(), Some(75), "{output:?}");
    assert!(stderr_of(&output).contains("held by"), "{output:?}");
    // --quiet does not suppress other errors.
    let output = place.output(&["run", "-q", "y", "--", "no-such-command"]);
    assert_eq!(stderr_of(&output).lines().count(), 1, "{output:?}");
    // A store that no other process sees cannot protect a command.
    for words in [&["run", "x", "--", "true"][..], &["acquire", "--pid", &us, "x"], &["ls"]] {
        for store in ["memory:", "memory:shared"] {
            let output = place.leasehold(words).env("LEASEHOLD_STORE", store).output().unwrap();
            assert_eq!(output.status.code(), Some(2), "{words:?}: {output:?}");
            assert!(
                stderr_of(&output).contains("memory: locks exist only inside one process"),
                "{output:?}"
            );
        }
    }
    // LEASEHOLD_STORE is set, so the option is not required.
    let usage = stderr_of(&place.output(&["run"]));
    assert!(usage.contains("Usage:") && !usage.contains("--store"), "{usage}");
    let help = stdout_of(&place.output(&["acquire", "--help"]));
    assert!(!help.contains("the command is ended"), "{help}");
}

// F77
#[cfg(feature = "sqlite")]
#[test]
fn running_leasehold_is_not_reported_as_paused() {
    let place = Place::new();
    let store = format!("sqlite:{}", place.path("locks.db").display());
    for _ in 0..3 {
        let words = ["run", "--store", &store, "--lease", "3s", "x", "--", "sh", "-c"];
        let mut command = place.leasehold(words);
        command.arg("echo ready; exec sleep 1000");
        let mut holder = Running::start(command);
        holder.wait_for("ready");
        assert_eq!(place.code(&["evict", "--store", &store, "x"]), 0);
        assert_eq!(holder.code(), 74);
        let stderr = holder.errors();
        assert!(is_cause_and_hint(&stderr), "{stderr}");
    }
}
