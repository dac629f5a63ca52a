//! `leasehold run` and those who look, as they are really used: under each other, from cron, by
//! other users, where the system has no more.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

#[cfg(feature = "sqlite")]
use crate::common::watchdogs_of;
use crate::common::{LEASEHOLD, Place, Running, is_cause_and_hint};
use nix::sys::signal::Signal;

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A shell with `leasehold` on its PATH.
fn sh(place: &Place, script: &str) -> Command {
    let dir = std::path::Path::new(LEASEHOLD).parent().unwrap();
    let path = format!("{}:{}", dir.display(), std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new("sh");
    command.args(["-c", script]).env("PATH", path).env("LEASEHOLD_STORE", place.store());
    command.current_dir(place.path("")).stdin(Stdio::null());
    command
}

#[test]
fn f19_a_lock_is_not_given_away_under_a_command_of_another_user() {
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
    // It lives for as long as it likes, and the lock with it.
    assert_eq!(holder.code(), 74);
    assert!(started.elapsed() > Duration::from_secs(6));
    let said = holder.errors();
    let once = "the command runs as another user, so leasehold cannot stop it";
    assert_eq!(said.matches(once).count(), 1, "{said}");
    assert!(!said.contains("sent SIG") && said.contains("could not send SIGKILL"), "{said}");
    assert!(said.contains("reached its --max-hold"), "{said}");
    assert_eq!(place.code(&["run", "--try", "x", "--", "true"]), 0);
}

/// How long each of two has, by what they say and by how their watchdogs were started.
#[cfg(feature = "sqlite")]
#[test]
fn f20_the_outer_lock_leaves_the_inner_command_little_time() {
    let place = Place::new();
    let outer = format!("sqlite:{}", place.path("outer.db").display());
    let script = "echo $PPID $LEASEHOLD_GRACE; echo ready; sleep 1000";
    let inner = format!("exec leasehold run --store {} b -- sh -c '{script}'", place.store());
    let inner = format!("echo $PPID $LEASEHOLD_GRACE; {inner}");
    let mut command = sh(&place, "exec leasehold run --lease 10s a -- sh -c \"$0\"");
    command.arg(inner).env("LEASEHOLD_STORE", outer);
    let mut running = Running::start(command);
    let mut told = || -> (i32, u64) {
        let line = running.line();
        let (pid, grace) = line.split_once(' ').unwrap();
        (pid.parse().unwrap(), grace.parse().unwrap())
    };
    let ((outer, left), (inner, below)) = (told(), told());
    let grace = |pid: i32| -> u64 {
        let dogs = watchdogs_of(pid);
        dogs[0].1[3].parse().unwrap_or_else(|_| panic!("{dogs:?}"))
    };
    // Of the tenth of its lease that the outer one has left after its kill.
    assert!((500..=1000).contains(&left), "{left}");
    assert_eq!(grace(outer), 2000);
    assert_eq!(grace(inner), left / 2);
    assert!(below <= left / 2, "{below}");
}

#[test]
fn f21_a_run_under_a_run_of_the_same_lock_is_refused() {
    let place = Place::new();
    let refused = |script: &str| {
        let output = sh(&place, script).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{script}: {output:?}");
        let said = said(&output);
        assert!(said.contains("enclosing leasehold run") && is_cause_and_hint(&said), "{said}");
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
        // On another store.
        "leasehold run x -- leasehold run --store file:$PWD/other x -- true",
        // Asked, and not waited for.
        "leasehold run x -- leasehold run --try -E 0 x -- false",
        // The outer one is over.
        "H=$(leasehold run x -- sh -c 'echo $LEASEHOLD_HELD'); LEASEHOLD_HELD=$H leasehold run x -- true",
    ] {
        let output = sh(&place, fine).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{fine}: {output:?}");
    }
}

#[test]
fn f22_once_per_period_is_once_however_many_are_started() {
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
        assert_eq!(said(&output), "", "cron would mail it");
    }
    assert_eq!(place.read("done"), "ran\n");
    // Long after: the period counts, and not the work.
    let again = |options: &[&str]| {
        let words = [&["run", "--once-per", "1h"], options, &["hourly", "--", "false"]].concat();
        place.output(&words)
    };
    assert_eq!(again(&[]).status.code(), Some(0));
    assert_eq!(again(&["-E", "9"]).status.code(), Some(9));
    let told = again(&["-v"]);
    assert!(said(&told).contains("in cooldown for 59m"), "{told:?}");
    // The command's own code comes through where it ran.
    assert_eq!(place.code(&["run", "--once-per", "1h", "other", "--", "sh", "-c", "exit 5"]), 5);
}

#[test]
#[ignore = "runs with ./test.sh --all"]
fn f53_where_there_are_no_more_files_it_is_said() {
    let place = Place::new();
    assert_eq!(place.code(&["run", "x", "--", "true"]), 0);
    for files in 4..48 {
        for words in ["run --try x -- true", "show x", "ls"] {
            let script = format!("ulimit -n {files}; exec leasehold {words}");
            let output = sh(&place, &script).output().unwrap();
            let said = said(&output);
            let loaded = !said.contains("shared librar");
            let fine =
                matches!(output.status.code(), Some(0 | 1 | 71)) && !said.contains("panicked");
            assert!(fine || !loaded, "{files}: {words}: {:?}: {said}", output.status);
        }
    }
    assert_eq!(place.claims("x"), 0);
}

#[test]
fn f60_a_command_finds_its_store_in_the_environment() {
    let place = Place::new();
    let store = place.store();
    let check = "leasehold verify \"$LEASEHOLD_SEQUENCER\"";
    let mut command = sh(&place, "exec leasehold run --store \"$0\" x -- sh -c \"$1\"");
    let output = command.args([&store, check]).env_remove("LEASEHOLD_STORE").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

#[test]
fn f61_looking_makes_no_store() {
    let place = Place::new();
    let typo = place.path("typo");
    let stores = [format!("file:{}", typo.display()), format!("file://{}", typo.display())];
    for store in &stores {
        for words in [&["ls"][..], &["show", "x"], &["evict", "x"], &["verify", "lh1:mutex:1:s:x"]]
        {
            let output = place.output(&[words, &["--store", store]].concat());
            assert_eq!(output.status.code(), Some(69), "{words:?}: {output:?}");
            assert!(said(&output).contains("there is no store"), "{output:?}");
            assert!(!crate::common::exists(&typo));
        }
    }
    if cfg!(feature = "sqlite") {
        let database = place.path("typo.db");
        let output = place.output(&["ls", "--store", &format!("sqlite:{}", database.display())]);
        assert_eq!(output.status.code(), Some(69), "{output:?}");
        assert!(!crate::common::exists(&database));
    }
    // Whoever takes a lock makes it.
    assert_eq!(place.code(&["run", "--store", &stores[0], "x", "--", "true"]), 0);
    assert_eq!(place.code(&["ls", "--store", &stores[0]]), 0);
}

#[test]
fn f62_a_command_has_the_sigpipe_that_we_were_given() {
    let place = Place::new();
    let ignored = |before: &str| {
        let script = format!("{before} exec leasehold run x -- grep SigIgn /proc/self/status");
        let output = sh(&place, &script).output().unwrap();
        let mask = printed(&output);
        let mask = mask.trim_start_matches("SigIgn:").trim();
        u64::from_str_radix(mask, 16).unwrap() & 1 << (Signal::SIGPIPE as i32 - 1) != 0
    };
    assert!(ignored("trap '' PIPE;"));
    // Rust's runtime ignores it for this test, and restores it for what the test starts.
    assert!(!ignored(""));
}

#[cfg(feature = "redis")]
#[test]
fn f63_a_client_of_another_library_is_said_to_be_one() {
    let server = testbed::Redis::start();
    let (place, url) = (Place::new(), server.url());
    let try_it = |name| place.output(&["run", "--try", "--store", &url, name, "--", "true"]);
    // The keys of plain locks by SET NX PX are their names.
    server.command(&["SET", "x", "somebody", "PX", "600000"]);
    let output = try_it("x");
    assert_eq!(output.status.code(), Some(75), "{output:?}");
    assert!(said(&output).contains("held by a client of another library"), "{output:?}");
    server.command(&["SET", "for ever", "somebody"]);
    let output = try_it("for ever");
    let told = said(&output);
    assert!(told.contains("\"for ever\"") && told.contains("never expires"), "{told}");
    // It may be held: nobody is told to take it away.
    assert!(!told.contains("evict"), "{told}");
}

#[test]
fn f72_what_is_kept_closed_is_not_said_to_be_held() {
    let place = Place::new();
    assert_eq!(place.code(&["run", "--min-hold", "1h", "x", "--", "true"]), 0);
    let output = place.output(&["run", "--try", "x", "--", "true"]);
    let told = said(&output);
    assert_eq!(output.status.code(), Some(75), "{told}");
    assert!(told.contains("in cooldown for 59m") && !told.contains("is held by"), "{told}");
    assert!(told.ends_with("\nhint: to end the cooldown: leasehold evict x\n"), "{told}");
    // The same word for people and for programs.
    assert!(printed(&place.output(&["show", "x"])).contains("departed"));
    assert_eq!(place.show("x")["claims"][0]["state"], "departed");
}

#[test]
fn f73_quiet_is_quiet_and_usage_lines_show_what_is_required() {
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
    // But not about what is wrong.
    let output = place.output(&["run", "-q", "y", "--", "no-such-command"]);
    assert_eq!(said(&output).lines().count(), 1, "{output:?}");
    // A store that nobody else sees excludes nobody.
    for words in [&["run", "x", "--", "true"][..], &["acquire", "--pid", &us, "x"], &["ls"]] {
        for store in ["memory:", "memory:shared"] {
            let output = place.leasehold(words).env("LEASEHOLD_STORE", store).output().unwrap();
            assert_eq!(output.status.code(), Some(2), "{words:?}: {output:?}");
            assert!(
                said(&output).contains("memory: locks exist only inside one process"),
                "{output:?}"
            );
        }
    }
    // The variable is set, and no option has to be given for it.
    let usage = said(&place.output(&["run"]));
    assert!(usage.contains("Usage:") && !usage.contains("--store"), "{usage}");
    let help = printed(&place.output(&["acquire", "--help"]));
    assert!(!help.contains("the command is ended"), "{help}");
}

#[cfg(feature = "sqlite")]
#[test]
fn f77_a_leasehold_that_is_not_stopped_is_not_said_to_be() {
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
        let said = holder.errors();
        assert!(is_cause_and_hint(&said), "{said}");
    }
}
