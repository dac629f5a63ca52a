//! `leasehold acquire` and `release` in real scripts of bash and dash.

use std::process::{Command, Stdio};

use crate::common::{LEASEHOLD, Place, Running, eventually, is_cause_and_hint};
use nix::sys::signal::Signal;

const SHELLS: [&str; 2] = ["bash", "dash"];

/// Returns a command that runs `script` in this shell, with `leasehold` on its PATH.
fn shell(shell: &str, place: &Place, script: &str) -> Command {
    let dir = std::path::Path::new(LEASEHOLD).parent().unwrap();
    let path = format!("{}:{}", dir.display(), std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new(shell);
    command.args(["-c", script]).env("PATH", path).env("LEASEHOLD_STORE", place.store());
    command.current_dir(place.path("")).stdin(Stdio::null());
    command
}

#[test]
fn a_section_of_a_script_is_exclusive_and_its_token_is_printed() {
    for sh in SHELLS {
        let place = Place::new();
        std::fs::write(place.path("n"), "0").unwrap();
        let script = "T=$(leasehold acquire counter) || exit
                      n=$(cat n); echo $((n + 1)) > n; echo $T >> tokens
                      leasehold release counter --token \"$T\"";
        let start = |_| shell(sh, &place, script).spawn().unwrap();
        let all: Vec<_> = (0..12).map(start).collect();
        for mut one in all {
            assert!(one.wait().unwrap().success(), "{sh}");
        }
        assert_eq!(place.read("n").trim(), "12", "{sh}");
        let tokens: Vec<u64> = place.read("tokens").lines().map(|t| t.parse().unwrap()).collect();
        assert!(tokens.is_sorted_by(|a, b| a < b), "{sh}: {tokens:?}");
        eventually("the queue is empty", || place.claims("counter") == 0);
    }
}

#[test]
fn the_lock_lives_as_long_as_the_script_however_it_ends() {
    for sh in SHELLS {
        let place = Place::new();
        let script = "T=$(leasehold acquire x) || exit; echo ready; while :; do sleep 0.05; done";
        for signal in [Signal::SIGKILL, Signal::SIGTERM] {
            let mut running = Running::start(shell(sh, &place, script));
            running.wait_for("ready");
            assert_eq!(place.code(&["run", "--try", "x", "--", "true"]), 75, "{sh}");
            running.signal(signal);
            running.child.wait().unwrap();
            assert_eq!(place.code(&["run", "x", "--", "true"]), 0, "{sh}");
        }
        // This script ends without a release.
        let status = shell(sh, &place, "T=$(leasehold acquire x)").status().unwrap();
        assert!(status.success());
        assert_eq!(place.code(&["run", "x", "--", "true"]), 0, "{sh}");
    }
}

#[test]
fn caller_is_found_from_a_command_substitution() {
    // In each case another process is leasehold's parent, and that process is gone before the
    // section begins.
    let ways = [
        "T=$(set -e; leasehold acquire x; true)",
        "T=$( (leasehold acquire x; true); true)",
        "T=`if true; then leasehold acquire x; fi; true`",
        "take() { leasehold acquire x; return; }; T=$(take; :)",
        "T=$(leasehold acquire x --pid $$; true)",
        // Another program is between the shell and leasehold.
        "T=$(timeout 60 leasehold acquire x)",
        "T=$(bash -c 'leasehold acquire x; true')",
        "T=$(nice sh -c '(timeout 60 leasehold acquire x); true')",
    ];
    for sh in SHELLS {
        for way in ways {
            let place = Place::new();
            let script = format!("{way}; echo ready; read line < fifo");
            assert!(Command::new("mkfifo").arg(place.path("fifo")).status().unwrap().success());
            let mut running = Running::start(shell(sh, &place, &script));
            running.wait_for("ready");
            // The hold would notice the end of a wrong owner immediately. Twenty attempts give that
            // error enough time to show.
            for _ in 0..20 {
                let code = place.code(&["run", "--try", "x", "--", "true"]);
                assert_eq!(code, 75, "{sh}: {way}");
            }
            running.signal(Signal::SIGKILL);
            running.child.wait().unwrap();
            assert_eq!(place.code(&["run", "--wait", "1m", "x", "--", "true"]), 0, "{sh}: {way}");
        }
    }
}

#[test]
fn lock_acquired_in_a_subshell_is_freed_when_the_subshell_exits() {
    for sh in SHELLS {
        let place = Place::new();
        let script = "(T=$(leasehold acquire x); leasehold run --try x -- true; echo $?)
                      leasehold run --wait 1m x -- echo free";
        let output = shell(sh, &place, script).output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(stdout, "75\nfree\n", "{sh}");
    }
}

#[test]
fn release_reports_a_lost_lock() {
    let place = Place::new();
    for sh in SHELLS {
        let script = "T=$(leasehold acquire x) || exit
                      leasehold evict x
                      leasehold release x --token $T; echo $?
                      leasehold release x --token $T; echo $?
                      leasehold release x --token 1; echo $?
                      leasehold evict x; echo $?";
        let output = shell(sh, &place, script).output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(stdout, "74\n74\n74\n1\n", "{sh}: {}", String::from_utf8_lossy(&output.stderr));
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let is_said = |l: &str| l.starts_with("leasehold: ") || l.starts_with("hint: ");
        assert!(errors.lines().all(is_said), "{errors}");
    }
    for words in [&["release", "x"][..], &["release", "x", "--token", "0"]] {
        assert_eq!(place.code(words), 2, "{words:?}");
    }
}

#[test]
fn release_leaves_other_tokens_of_the_lock_alone() {
    let place = Place::new();
    let script = "A=$(leasehold acquire --max 2 x) && B=$(leasehold acquire --max 2 x) || exit
                  leasehold release x --token $A
                  leasehold show --json x";
    let output = shell("dash", &place, script).output().unwrap();
    let info: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(info["claims"].as_array().unwrap().len(), 1, "{info}");
}

#[test]
fn acquire_fails_like_run_and_leaves_no_claim() {
    let place = Place::new();
    let _holder = place.hold("x", "echo ready; sleep 1000");
    let us = std::process::id().to_string();
    let output = place.output(&["acquire", "--pid", &us, "--try", "x"]);
    assert_eq!(output.status.code(), Some(75));
    assert!(output.stdout.is_empty());
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(is_cause_and_hint(&stderr), "{stderr}");
    assert_eq!(place.code(&["acquire", "--pid", &us, "--wait", "50ms", "-E", "9", "x"]), 9);
    assert_eq!(place.code(&["acquire", "--pid", &us, "a\nb"]), 2);
    assert_eq!(place.code(&["acquire", "--pid", "999999999", "y"]), 2);
    assert_eq!(place.claims("x"), 1);
    assert_eq!(place.claims("y"), 0);

    // The waiter is killed, and its hold must leave the queue.
    let mut waiter = Running::start(place.leasehold(["acquire", "--pid", &us, "x"]));
    eventually("the waiter is in the queue", || place.claims("x") == 2);
    waiter.signal(Signal::SIGKILL);
    waiter.child.wait().unwrap();
    eventually("the killed waiter has left the queue", || place.claims("x") == 1);
}

#[test]
fn lock_is_released_if_its_token_cannot_be_written() {
    let place = Place::new();
    let us = std::process::id().to_string();
    let mut command = place.leasehold(["acquire", "--pid", &us, "x"]);
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let status = command.stdout(full).stderr(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(71));
    eventually("the lock is released", || place.claims("x") == 0);
}

#[test]
fn background_hold_inherits_no_descriptors() {
    let place = Place::new();
    // `$(…)` reads to the end of file. A hold that inherited its stdout, stderr or descriptor 9
    // would block this script forever.
    let script =
        "X=$( { T=$(leasehold acquire x --pid $$) ; } 9>&1 2>&1 ); echo done; read line < fifo";
    assert!(Command::new("mkfifo").arg(place.path("fifo")).status().unwrap().success());
    let mut running = Running::start(shell("bash", &place, script));
    running.wait_for("done");
    assert_eq!(place.claims("x"), 1);
    running.signal(Signal::SIGKILL);
    running.child.wait().unwrap();
    eventually("the hold has ended", || place.claims("x") == 0);
}

#[test]
fn min_hold_outlives_the_release() {
    let place = Place::new();
    let script = "T=$(leasehold acquire --min-hold 1h x) && leasehold release x --token $T";
    assert!(shell("dash", &place, script).status().unwrap().success());
    assert_eq!(place.code(&["run", "--try", "x", "--", "true"]), 75);
}

// F18
/// No process that stays gets the token, so the lock would have no owner.
#[test]
fn acquire_needs_a_lasting_reader_of_the_token() {
    let ways = [
        "T=$(leasehold acquire x | tail -n 1)",
        "leasehold acquire x | cat",
        "leasehold acquire x > token",
        "timeout 60 leasehold acquire x > token",
        // The process that forwards the output of another session exits together with that session.
        "T=$(setsid -w leasehold acquire x)",
        "leasehold acquire x | { read T; sleep 1; }",
    ];
    for sh in SHELLS {
        for way in ways {
            let place = Place::new();
            assert_eq!(place.code(&["run", "x", "--", "true"]), 0);
            let output = shell(sh, &place, way).output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(
                stderr.contains("--pid") && is_cause_and_hint(&stderr),
                "{sh}: {way}: {stderr}"
            );
            assert!(output.stdout.is_empty() && place.read("token").is_empty(), "{sh}: {way}");
            assert_eq!(place.claims("x"), 0, "{sh}: {way}");
        }
        // With `--pid` the lock is held, however leasehold is called.
        let place = Place::new();
        let script = "T=$(leasehold acquire x --pid $$ | tail -n 1)
                      leasehold run --try x -- true; echo $?; leasehold release x --token $T; echo $?";
        let output = shell(sh, &place, script).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "75\n0\n", "{sh}: {output:?}");
    }
}

// F18
/// There is no shell here. The owner is the process that reads the token.
#[test]
fn any_program_that_reads_the_token_owns_the_lock() {
    let place = Place::new();
    let output = place.output(&["acquire", "x"]);
    let token = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(output.status.success() && token.trim().parse::<u64>().is_ok(), "{output:?}");
    let label = place.show("x")["claims"][0]["label"].as_str().unwrap().to_owned();
    assert!(label.ends_with(&format!(" {}", std::process::id())), "{label}");
    assert_eq!(place.code(&["run", "--try", "x", "--", "true"]), 75);
    assert_eq!(place.code(&["release", "x", "--token", token.trim()]), 0);
    assert_eq!(place.claims("x"), 0);
}

// F62
#[test]
fn acquire_with_closed_stdout_acquires_nothing() {
    for sh in SHELLS {
        let place = Place::new();
        assert_eq!(place.code(&["run", "x", "--", "true"]), 0);
        let output =
            shell(sh, &place, "leasehold acquire x --pid $$ >&-; echo $?").output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "71\n", "{sh}: {output:?}");
        assert_eq!(place.claims("x"), 0);
    }
}

#[test]
fn node_process_that_reads_the_token_owns_the_lock() {
    if Command::new("node").arg("--version").output().is_err() {
        eprintln!("skipped: node is not installed");
        return;
    }
    let place = Place::new();
    let script = "const run = require('child_process').execFileSync;
                  const token = run(process.env.LEASEHOLD, ['acquire', 'x']).toString().trim();
                  console.log(token > 0 ? 'ready' : token);
                  setInterval(() => {}, 1000);";
    let mut command = Command::new("node");
    command.args(["-e", script]).env("LEASEHOLD", LEASEHOLD);
    command.env("LEASEHOLD_STORE", place.store()).stdin(Stdio::null());
    let mut running = Running::start(command);
    running.wait_for("ready");
    assert_eq!(place.code(&["run", "--try", "x", "--", "true"]), 75);
    running.signal(Signal::SIGKILL);
    running.child.wait().unwrap();
    assert_eq!(place.code(&["run", "x", "--", "true"]), 0);
}

#[test]
fn a_token_in_a_file_needs_the_pid_of_its_owner() {
    let place = Place::new();
    let output = shell("dash", &place, "leasehold acquire x > token").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("pass --pid PID") && is_cause_and_hint(&stderr), "{stderr}");
    let script = "leasehold acquire x --pid $$ > token; leasehold release x --token $(cat token)";
    assert!(shell("dash", &place, script).status().unwrap().success());
}
