//! `leasehold acquire` and `release` in real scripts of bash and dash.

use std::process::{Command, Stdio};

use crate::common::{LEASEHOLD, Place, Running, eventually, is_cause_and_hint};
use nix::sys::signal::Signal;

const SHELLS: [&str; 2] = ["bash", "dash"];

/// `script` in this shell, with `leasehold` on its PATH.
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
        eventually("nothing is left", || place.claims("counter") == 0);
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
        // It just ends, having forgotten to release.
        let status = shell(sh, &place, "T=$(leasehold acquire x)").status().unwrap();
        assert!(status.success());
        assert_eq!(place.code(&["run", "x", "--", "true"]), 0, "{sh}");
    }
}

#[test]
fn the_caller_is_found_from_inside_a_substitution() {
    // In each the process that calls us is another one, which is gone before the section begins.
    let ways = [
        "T=$(set -e; leasehold acquire x; true)",
        "T=$( (leasehold acquire x; true); true)",
        "T=`if true; then leasehold acquire x; fi; true`",
        "take() { leasehold acquire x; return; }; T=$(take; :)",
        "T=$(leasehold acquire x --pid $$; true)",
        // F18: another program in between.
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
            // The hold learns of an end at once; give a wrong one every chance to show.
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
fn an_explicit_subshell_is_the_caller() {
    for sh in SHELLS {
        let place = Place::new();
        let script = "(T=$(leasehold acquire x); leasehold run --try x -- true; echo $?)
                      leasehold run --wait 1m x -- echo free";
        let output = shell(sh, &place, script).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(said, "75\nfree\n", "{sh}");
    }
}

#[test]
fn release_says_when_the_lock_was_lost() {
    let place = Place::new();
    for sh in SHELLS {
        let script = "T=$(leasehold acquire x) || exit
                      leasehold evict x
                      leasehold release x --token $T; echo $?
                      leasehold release x --token $T; echo $?
                      leasehold release x --token 1; echo $?
                      leasehold evict x; echo $?";
        let output = shell(sh, &place, script).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(said, "74\n74\n74\n1\n", "{sh}: {}", String::from_utf8_lossy(&output.stderr));
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let is_said = |l: &str| l.starts_with("leasehold: ") || l.starts_with("hint: ");
        assert!(errors.lines().all(is_said), "{errors}");
    }
    for words in [&["release", "x"][..], &["release", "x", "--token", "0"]] {
        assert_eq!(place.code(words), 2, "{words:?}");
    }
}

#[test]
fn another_token_of_the_same_name_is_untouched() {
    let place = Place::new();
    let script = "A=$(leasehold acquire --max 2 x) && B=$(leasehold acquire --max 2 x) || exit
                  leasehold release x --token $A
                  leasehold show --json x";
    let output = shell("dash", &place, script).output().unwrap();
    let info: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(info["claims"].as_array().unwrap().len(), 1, "{info}");
}

#[test]
fn acquire_fails_as_run_does_and_leaves_nothing() {
    let place = Place::new();
    let _holder = place.hold("x", "echo ready; sleep 1000");
    let us = std::process::id().to_string();
    let output = place.output(&["acquire", "--pid", &us, "--try", "x"]);
    assert_eq!(output.status.code(), Some(75));
    assert!(output.stdout.is_empty());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(is_cause_and_hint(&said), "{said}");
    assert_eq!(place.code(&["acquire", "--pid", &us, "--wait", "50ms", "-E", "9", "x"]), 9);
    assert_eq!(place.code(&["acquire", "--pid", &us, "a\nb"]), 2);
    assert_eq!(place.code(&["acquire", "--pid", "999999999", "y"]), 2);
    assert_eq!(place.claims("x"), 1);
    assert_eq!(place.claims("y"), 0);

    // Killed while it waits: its hold leaves the queue.
    let mut waiter = Running::start(place.leasehold(["acquire", "--pid", &us, "x"]));
    eventually("it waits", || place.claims("x") == 2);
    waiter.signal(Signal::SIGKILL);
    waiter.child.wait().unwrap();
    eventually("it left", || place.claims("x") == 1);
}

#[test]
fn a_token_that_nobody_got_is_no_lock() {
    let place = Place::new();
    let us = std::process::id().to_string();
    let mut command = place.leasehold(["acquire", "--pid", &us, "x"]);
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let status = command.stdout(full).stderr(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(71));
    eventually("it was given back", || place.claims("x") == 0);
}

#[test]
fn what_holds_has_nothing_of_the_callers_open() {
    let place = Place::new();
    // `$(…)` reads to the end of file: a hold with its stdout, stderr or descriptor 9 would hang
    // this script for ever.
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
fn at_least_outlives_the_release() {
    let place = Place::new();
    let script = "T=$(leasehold acquire --min-hold 1h x) && leasehold release x --token $T";
    assert!(shell("dash", &place, script).status().unwrap().success());
    assert_eq!(place.code(&["run", "--try", "x", "--", "true"]), 75);
}

/// Nobody who stays gets the token, so nobody would hold the lock.
#[test]
fn f18_without_a_shell_that_gets_the_token_nothing_is_taken() {
    let ways = [
        "T=$(leasehold acquire x | tail -n 1)",
        "leasehold acquire x | cat",
        "leasehold acquire x > token",
        "timeout 60 leasehold acquire x > token",
        // Whoever passes on what another session says is gone when that one is.
        "T=$(setsid -w leasehold acquire x)",
        "leasehold acquire x | { read T; sleep 1; }",
    ];
    for sh in SHELLS {
        for way in ways {
            let place = Place::new();
            assert_eq!(place.code(&["run", "x", "--", "true"]), 0);
            let output = shell(sh, &place, way).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(said.contains("--pid") && is_cause_and_hint(&said), "{sh}: {way}: {said}");
            assert!(output.stdout.is_empty() && place.read("token").is_empty(), "{sh}: {way}");
            assert_eq!(place.claims("x"), 0, "{sh}: {way}");
        }
        // Named, it is held, whatever the shape.
        let place = Place::new();
        let script = "T=$(leasehold acquire x --pid $$ | tail -n 1)
                      leasehold run --try x -- true; echo $?; leasehold release x --token $T; echo $?";
        let output = shell(sh, &place, script).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "75\n0\n", "{sh}: {output:?}");
    }
}

/// No shell, and no guess: whatever reads the token is whom the lock is for.
#[test]
fn f18_any_program_that_reads_the_token_is_the_caller() {
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

#[test]
fn f62_a_token_that_cannot_be_printed_is_no_lock() {
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
fn a_token_that_node_reads_is_held_by_node() {
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
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("pass --pid PID") && is_cause_and_hint(&said), "{said}");
    let script = "leasehold acquire x --pid $$ > token; leasehold release x --token $(cat token)";
    assert!(shell("dash", &place, script).status().unwrap().success());
}
