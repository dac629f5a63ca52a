//! `leasehold run`, seen from outside: exit codes, signals, the environment of CMD, hand-over.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use crate::common::{LEASEHOLD, Place, Running, eventually, is_cause_and_hint, runs};
use nix::sys::signal::Signal;

#[test]
fn exit_code_of_the_command_is_passed_through() {
    let place = Place::new();
    for code in [0, 1, 7, 75, 255] {
        assert_eq!(place.code(&["run", "x", "--", "sh", "-c", &format!("exit {code}")]), code);
    }
    for (signal, code) in [("TERM", 143), ("KILL", 137), ("USR1", 138)] {
        let script = format!("kill -{signal} $$");
        assert_eq!(place.code(&["run", "x", "--", "sh", "-c", &script]), code);
    }
}

#[test]
fn each_leasehold_failure_has_its_exit_code_and_one_line() {
    let place = Place::new();
    let file = place.path("file");
    std::fs::write(&file, "not executable").unwrap();
    let file = file.to_str().unwrap();
    let long = "x".repeat(513);
    let not_a_directory = format!("file:{file}");
    let cases: &[(i32, &[&str])] = &[
        (127, &["run", "x", "--", "no-such-command-anywhere"]),
        (127, &["run", "x", "--", "/no/such/file"]),
        (126, &["run", "x", "--", file]),
        (126, &["run", "x", "--", "/"]),
        (2, &["run", "", "--", "true"]),
        (2, &["run", "a\nb", "--", "true"]),
        (2, &["run", &long, "--", "true"]),
        (2, &["run", "--lease", "0s", "x", "--", "true"]),
        (2, &["run", "--lease", "2d", "x", "--", "true"]),
        (2, &["run", "--max-hold", "0s", "x", "--", "true"]),
        (2, &["run", "--permits", "4", "--max", "3", "x", "--", "true"]),
        (2, &["run", "--lock-delay", "1s", "x", "--", "true"]),
        (2, &["run", "--store", "nonsense", "x", "--", "true"]),
        (2, &["run", "--store", "carrier-pigeon://coop", "x", "--", "true"]),
        (2, &["run", "--store", "file:relative/path", "x", "--", "true"]),
        (2, &["show", "--store", &not_a_directory, "x"]),
    ];
    for (code, words) in cases {
        let output = place.output(words);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(*code), "{words:?}: {stderr}");
        assert!(is_cause_and_hint(&stderr), "{words:?}: {stderr}");
        assert!(output.stdout.is_empty(), "{words:?}");
    }
    // clap prints usage errors itself, in several lines. The code is still 2.
    for words in [&["run", "x"][..], &["run", "--wait", "soon", "x", "--", "true"], &["frobnicate"]]
    {
        assert_eq!(place.code(words), 2, "{words:?}");
    }
    // No lock is held after any of these failures.
    assert_eq!(place.claims("x"), 0);
}

#[test]
fn contended_run_exits_with_75_or_the_given_code() {
    let place = Place::new();
    let mut holder = place.hold("x", "echo ready; sleep 1000");
    let output = place.output(&["run", "--try", "x", "--", "true"]);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(75), "{stderr}");
    let pid = holder.pid().to_string();
    assert!(stderr.contains(&format!("pid {pid} (sh)")) && is_cause_and_hint(&stderr), "{stderr}");

    assert_eq!(place.code(&["run", "--wait", "50ms", "x", "--", "true"]), 75);
    assert_eq!(place.code(&["run", "--wait", "0", "x", "--", "true"]), 75);
    assert_eq!(place.code(&["run", "--try", "-E", "0", "x", "--", "false"]), 0);
    assert_eq!(place.code(&["run", "--try", "-E", "9", "x", "--", "true"]), 9);
    // A lock of another kind with the same name is reported, with a hint.
    let output = place.output(&["run", "--try", "--shared", "x", "--", "true"]);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("mutex") && stderr.contains("--exclusive"), "{stderr}");

    holder.signal(Signal::SIGTERM);
    assert_eq!(holder.code(), 143);
    assert_eq!(place.code(&["run", "--try", "x", "--", "true"]), 0);
}

#[test]
fn readers_share_and_a_writer_does_not() {
    let place = Place::new();
    let _reader = place.hold_with(&["--shared"], "db", "echo ready; sleep 1000");
    assert_eq!(place.code(&["run", "--try", "--shared", "db", "--", "true"]), 0);
    assert_eq!(place.code(&["run", "--try", "--exclusive", "db", "--", "true"]), 75);
    let _permits =
        place.hold_with(&["--max", "3", "--permits", "2"], "gpu", "echo ready; sleep 1000");
    assert_eq!(place.code(&["run", "--try", "--max", "3", "gpu", "--", "true"]), 0);
    let two = ["run", "--try", "--max", "3", "--permits", "2", "gpu", "--", "true"];
    assert_eq!(place.code(&two), 75);
}

#[test]
fn command_finds_its_lock_in_the_environment_and_stdio_untouched() {
    let place = Place::new();
    let mut command = place.leasehold(["run", "order 42", "--", "sh", "-c"]);
    command.arg("cat; echo \"$LEASEHOLD_NAME $LEASEHOLD_TOKEN\"; echo oops >&2");
    std::fs::write(place.path("in"), "from stdin\n").unwrap();
    command.stdin(std::fs::File::open(place.path("in")).unwrap());
    let output = command.output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    let token = stdout.strip_prefix("from stdin\norder 42 ").unwrap().trim_end();
    assert!(token.parse::<u64>().unwrap() > 0);
    assert_eq!(output.stderr, b"oops\n", "leasehold printed a message");
}

// S93
#[test]
fn arguments_are_never_read_by_a_shell() {
    let place = Place::new();
    let evil =
        OsStr::from_bytes(b"$(touch owned) ; touch owned & `touch owned` \"'\\ \xff\n--help");
    let dir = place.path("");
    let mut command = place.leasehold([OsStr::new("run"), OsStr::new("x"), OsStr::new("--")]);
    let output = command.args([OsStr::new("printf"), OsStr::new("%s"), evil]).current_dir(&dir);
    let output = output.output().unwrap();
    assert_eq!(output.stdout, evil.as_bytes());
    assert!(!crate::common::exists(&place.path("owned")));
    // The name is not read by a shell either.
    let name = "$(touch owned)/../`x`; --help";
    let output = place.leasehold(["run", name, "--", "sh", "-c", "printf %s \"$LEASEHOLD_NAME\""]);
    let output = { output }.current_dir(&dir).output().unwrap();
    assert_eq!(output.stdout, name.as_bytes());
    assert!(!crate::common::exists(&place.path("owned")));
}

#[test]
fn forty_processes_count_exactly_and_tokens_rise() {
    let place = Place::new();
    std::fs::write(place.path("n"), "0").unwrap();
    let script = "n=$(cat n); echo $((n + 1)) > n; echo $LEASEHOLD_TOKEN >> tokens";
    let start = |_| {
        let mut command = place.leasehold(["run", "counter", "--", "sh", "-c", script]);
        command.current_dir(place.path("")).spawn().unwrap()
    };
    let all: Vec<_> = (0..40).map(start).collect();
    for mut one in all {
        assert!(one.wait().unwrap().success());
    }
    assert_eq!(place.read("n").trim(), "40");
    let tokens: Vec<u64> = place.read("tokens").lines().map(|t| t.parse().unwrap()).collect();
    assert_eq!(tokens.len(), 40);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

#[test]
fn signals_reach_the_whole_group() {
    let place = Place::new();
    // The grandchild must get the signals too, without its parent's help.
    let script = "for s in HUP INT QUIT TERM USR1 USR2 ALRM WINCH PWR; do
                    trap \"echo got $s\" $s
                  done
                  sh -c 'trap \"echo below\" USR1; echo low; while :; do sleep 0.01; done' &
                  while :; do sleep 0.01; done";
    let script = script.replace("echo low", "echo ready");
    let mut running = place.hold("x", &script);
    for (signal, name) in [
        (Signal::SIGHUP, "HUP"),
        (Signal::SIGQUIT, "QUIT"),
        (Signal::SIGTERM, "TERM"),
        (Signal::SIGUSR2, "USR2"),
        (Signal::SIGALRM, "ALRM"),
        (Signal::SIGWINCH, "WINCH"),
        (Signal::SIGPWR, "PWR"),
        (Signal::SIGINT, "INT"),
    ] {
        // The grandchild has no handler for the other signals, so USR1 comes first.
        if signal == Signal::SIGHUP {
            running.signal(Signal::SIGUSR1);
            let two = [running.line(), running.line()];
            assert!(two.contains(&"below".to_owned()) && two.contains(&"got USR1".to_owned()));
        }
        running.signal(signal);
        assert_eq!(running.line(), format!("got {name}"));
    }
}

#[test]
fn ignored_signals_stay_ignored_as_under_nohup() {
    let place = Place::new();
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$@\"", "sh", crate::common::LEASEHOLD]);
    command.args(["run", "x", "--", "sh", "-c", "grep SigIgn /proc/$$/status; echo ready; read x"]);
    command.env("LEASEHOLD_STORE", place.store()).stdin(std::process::Stdio::piped());
    let mut running = Running::start(command);
    let ignored = running.line();
    let mask = u64::from_str_radix(ignored.trim_start_matches("SigIgn:").trim(), 16).unwrap();
    assert_eq!(mask & 1, 1, "{ignored}");
    running.wait_for("ready");
    running.signal(Signal::SIGHUP);
    drop(running.child.stdin.take());
    assert_eq!(running.code(), 1, "expected read's exit code at the end of its input, not 129");
}

#[test]
fn terminated_waiter_leaves_the_queue() {
    let place = Place::new();
    let _holder = place.hold("x", "echo ready; sleep 1000");
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let mut waiter = Running::start(place.leasehold(["run", "x", "--", "true"]));
        eventually("the waiter is in the queue", || place.claims("x") == 2);
        waiter.signal(signal);
        let status = waiter.child.wait().unwrap();
        assert_eq!(status.signal(), Some(signal as i32), "the waiter must die of the same signal");
        assert_eq!(place.claims("x"), 1);
    }
}

// S64
#[test]
fn kill_9_ends_the_group_and_the_waiter_runs_at_once() {
    let place = Place::new();
    let script = "sh -c 'echo $$; while :; do sleep 1; done' & echo $$; echo ready; wait";
    let mut command = place.leasehold(["run", "--lease", "1h", "x", "--", "sh", "-c", script]);
    let mut holder = Running::start({
        command.env("IGNORED", "");
        command
    });
    let mut pids = Vec::new();
    while pids.len() < 2 {
        pids.extend(holder.line().parse::<i32>());
    }
    let mut waiter = Running::start(place.leasehold(["run", "x", "--", "echo", "mine"]));
    eventually("the waiter is in the queue", || place.claims("x") == 2);
    let killed = Instant::now();
    holder.signal(Signal::SIGKILL);
    assert_eq!(waiter.line(), "mine");
    // The limit is at most the grace period. The lease is an hour, so it has not expired.
    assert!(killed.elapsed() < Duration::from_secs(30), "{:?}", killed.elapsed());
    assert!(
        !pids.iter().any(|&pid| runs(pid)),
        "a process of the group is alive after the hand-over"
    );
}

#[test]
fn a_command_that_ignores_term_keeps_the_lock_until_it_is_killed() {
    let place = Place::new();
    let script = "trap '' TERM; echo $$; echo ready; while :; do sleep 0.02; done";
    let mut holder = Running::start(place.leasehold(["run", "x", "--", "sh", "-c", script]));
    let pid: i32 = holder.line().parse().unwrap();
    holder.wait_for("ready");
    holder.signal(Signal::SIGKILL);
    holder.child.wait().unwrap();
    // The command inherited the lock, as with flock. Whenever the lock is free, the command is
    // gone.
    eventually("the lock is free", || {
        let code = place.code(&["run", "--try", "x", "--", "true"]);
        assert!(matches!(code, 0 | 75), "{code}");
        code == 0
    });
    assert!(!runs(pid));
}

#[test]
fn with_no_inherit_the_command_does_not_keep_the_lock() {
    let place = Place::new();
    let holds = |options: &[&str]| {
        let words =
            [&["run"], options, &["x", "--", "sh", "-c", "exec ls -l /proc/self/fd"]].concat();
        String::from_utf8(place.output(&words).stdout)
            .unwrap()
            .contains(&*place.path("").to_string_lossy())
    };
    assert!(holds(&[]), "the command must inherit the lifeline");
    assert!(!holds(&["--no-inherit"]));
    // The group is also killed immediately.
    let script = "trap '' TERM; echo $$; echo ready; while :; do sleep 0.02; done";
    let mut holder =
        Running::start(place.leasehold(["run", "--no-inherit", "x", "--", "sh", "-c", script]));
    let pid: i32 = holder.line().parse().unwrap();
    holder.wait_for("ready");
    holder.signal(Signal::SIGKILL);
    eventually("the command is killed", || !runs(pid));
}

#[test]
fn command_inherits_no_descriptor_except_the_lifeline() {
    let place = Place::new();
    let count = |words: &[&str]| {
        let script = "exec ls /proc/self/fd";
        let words = [words, &["sh", "-c", script]].concat();
        let out = if words[0] == "sh" {
            std::process::Command::new("sh").args(&words[1..]).output().unwrap()
        } else {
            place.output(&words)
        };
        String::from_utf8(out.stdout).unwrap().lines().count()
    };
    let bare = count(&[]);
    assert_eq!(count(&["run", "x", "--"]), bare + 1);
    assert_eq!(count(&["run", "--no-inherit", "x", "--"]), bare);
}

#[test]
fn max_hold_ends_the_command_with_74() {
    let place = Place::new();
    let output = place.output(&["run", "--max-hold", "3s", "x", "--", "sleep", "1000"]);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(74), "{stderr}");
    assert!(stderr.contains("max-hold") && is_cause_and_hint(&stderr), "{stderr}");
    // A command that ignores TERM is killed, and so are its descendants.
    let script =
        "trap '' TERM; (while :; do sleep 0.02; done) & echo $!; while :; do sleep 0.02; done";
    let output = place.output(&["run", "--max-hold", "3s", "x", "--", "sh", "-c", script]);
    assert_eq!(output.status.code(), Some(74));
    let below: i32 = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
    eventually("the grandchild is gone", || !runs(below));
    assert_eq!(place.code(&["run", "--max-hold", "1h", "x", "--", "true"]), 0);
}

#[test]
fn evicted_lock_ends_the_command_with_74() {
    let place = Place::new();
    let mut holder = place.hold_with(&["--lease", "300ms"], "x", "echo ready; sleep 1000");
    let evicted = place.output(&["evict", "x"]);
    assert!(evicted.status.success());
    assert_eq!(
        String::from_utf8_lossy(&evicted.stderr),
        "leasehold: evicted the holder of \"x\"\n"
    );
    assert_eq!(holder.code(), 74);
    assert!(holder.errors().contains("\"x\""));
}

#[test]
fn min_hold_keeps_the_lock_and_returns_at_once() {
    let place = Place::new();
    let started = Instant::now();
    assert_eq!(place.code(&["run", "--min-hold", "1h", "hourly", "--", "true"]), 0);
    assert!(started.elapsed() < Duration::from_secs(60));
    assert_eq!(place.code(&["run", "--try", "hourly", "--", "true"]), 75);
    assert_eq!(place.show("hourly")["claims"][0]["state"], "cooldown");
    let ended = place.output(&["evict", "hourly"]);
    assert!(ended.status.success());
    assert_eq!(
        String::from_utf8_lossy(&ended.stderr),
        "leasehold: ended the cooldown of \"hourly\"\n"
    );
    assert_eq!(place.code(&["run", "--try", "hourly", "--", "true"]), 0);
}

#[test]
fn json_events_are_complete_and_in_order() {
    let place = Place::new();
    let holder = place.hold("x", "echo ready; sleep 1000");
    let waiter = place.leasehold(["run", "--json", "x", "--", "sh", "-c", "exit 3"]);
    let mut waiter = Running::start(waiter);
    eventually("the waiter is in the queue", || place.claims("x") == 2);
    drop(holder);
    assert_eq!(waiter.code(), 3);
    let json_lines: Vec<serde_json::Value> =
        waiter.errors().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let events: Vec<&str> = json_lines.iter().map(|e| e["event"].as_str().unwrap()).collect();
    assert_eq!(events, ["store", "waiting", "held", "started", "exited", "released"]);
    assert_eq!(json_lines[0]["store"], place.store());
    assert_eq!(json_lines[1]["ahead"], 1);
    assert_eq!(json_lines[2]["token"], json_lines[5]["token"]);
    assert_eq!(json_lines[4]["code"], 3);
    // A failure is an event as well, and nothing else is printed.
    let output = place.output(&["run", "--json", "x", "--", "no-such-command"]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    let last: serde_json::Value = serde_json::from_str(stderr.lines().last().unwrap()).unwrap();
    assert_eq!((&last["event"], &last["code"]), (&"failed".into(), &127.into()), "{stderr}");
}

#[test]
fn verbose_names_the_store_and_a_pipe_sees_no_waiting_line() {
    let place = Place::new();
    let output = place.output(&["run", "-v", "x", "--", "true"]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.lines().all(|line| line.starts_with("leasehold: ")), "{stderr}");
    assert!(stderr.contains(&place.store()), "{stderr}");

    let holder = place.hold("x", "echo ready; sleep 1000");
    let mut waiter = Running::start(place.leasehold(["run", "x", "--", "true"]));
    // This is longer than the delay before the line on a terminal.
    eventually("the waiter is in the queue", || place.claims("x") == 2);
    std::thread::sleep(Duration::from_millis(600));
    drop(holder);
    assert_eq!(waiter.code(), 0);
    assert_eq!(waiter.errors(), "");
}

#[test]
fn why_reports_the_holder() {
    let place = Place::new();
    let holder = place.hold_with(&["--label", "evil\x1b[2J"], "x y", "echo ready; sleep 1000");
    let text = String::from_utf8(place.output(&["why", "x y"]).stdout).unwrap();
    let pid = format!("pid {}", holder.child.id());
    assert!(text.contains("x y") && text.contains(&pid) && !text.contains('\x1b'), "{text:?}");
    let free = place.output(&["why", "free"]);
    assert!(free.status.success() && free.stdout.is_empty(), "{free:?}");
    assert!(String::from_utf8_lossy(&free.stderr).contains("\"free\" is not in use"), "{free:?}");
    let json = place.output(&["why", "--json", "x y"]).stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["chain"][0]["claims"][0]["pid"], holder.child.id());
    assert_eq!(json["deadlock"], serde_json::json!([]));
}

#[test]
fn show_and_ls_report_holders_and_waiters() {
    let place = Place::new();
    let holder = place.hold_with(&["--label", "evil\x1b[2J"], "x y", "echo ready; sleep 1000");
    let _waiter = Running::start(place.leasehold(["run", "--label", "next", "x y", "--", "true"]));
    eventually("the waiter is in the queue", || place.claims("x y") == 2);
    let _other = place.hold("other", "echo ready; sleep 1000");

    let info = place.show("x y");
    assert_eq!(info["store"], place.store());
    assert_eq!(info["claims"][0]["pid"], holder.child.id());
    assert_eq!(info["claims"][0]["state"], "held");
    assert_eq!(info["claims"][1]["state"], "waiting");
    assert_eq!(info["claims"][1]["label"], "next");
    assert!(info["claims"][0]["token"].as_u64() < info["claims"][1]["token"].as_u64());

    let text = String::from_utf8(place.output(&["show", "x y"]).stdout).unwrap();
    assert!(text.contains(&place.store()) && text.contains("held") && text.contains("waiting"));
    assert!(!text.contains('\x1b'), "{text:?}");
    let text = String::from_utf8(place.output(&["ls"]).stdout).unwrap();
    assert_eq!(text.lines().count(), 3, "{text}");
    assert!(!text.contains('\x1b'), "{text:?}");
    let text = String::from_utf8(place.output(&["ls", "x"]).stdout).unwrap();
    assert_eq!(text.lines().count(), 2, "{text}");
    let none = place.output(&["ls", "z"]);
    assert!(none.status.success() && none.stdout.is_empty(), "{none:?}");
    let stderr = String::from_utf8(none.stderr).unwrap();
    assert!(stderr.contains("no lock whose name begins with \"z\" is in use in file:"), "{stderr}");
    let listed: serde_json::Value =
        serde_json::from_slice(&place.output(&["ls", "--json", "o"]).stdout).unwrap();
    assert_eq!(listed.as_array().unwrap().len(), 1);
    assert_eq!(listed[0]["name"], "other");
    // A free lock is reported in the text and in the exit code.
    let free = place.output(&["show", "free"]);
    assert_eq!(free.status.code(), Some(1), "{free:?}");
    assert!(String::from_utf8_lossy(&free.stdout).contains("(free)"), "{free:?}");
}

#[test]
fn wait_returns_on_free_or_held_without_acquiring() {
    let place = Place::new();
    let code = |words: &[&str]| {
        let output = place.output(words);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    // Reading does not create a store.
    assert_eq!(code(&["wait", "job"]).0, Some(69));
    assert_eq!(code(&["run", "job", "--", "true"]).0, Some(0));
    assert_eq!(code(&["wait", "job"]), (Some(0), String::new()));
    let (late, why) = code(&["wait", "--held", "--timeout", "100ms", "job"]);
    assert_eq!(
        (late, why.lines().next().unwrap()),
        (Some(75), "leasehold: timed out after 100ms: \"job\" has no holder")
    );
    let mut until_held = Running::start(place.leasehold(["wait", "--held", "job"]));
    let holder = place.hold("job", "echo ready; sleep 1000");
    assert!(until_held.child.wait().unwrap().success());
    let (late, why) = code(&["wait", "--timeout", "100ms", "job"]);
    assert!(late == Some(75) && why.contains("\"job\" is held by"), "{late:?} {why}");
    let mut until_free = Running::start(place.leasehold(["wait", "job"]));
    std::thread::sleep(Duration::from_millis(300));
    assert!(until_free.child.try_wait().unwrap().is_none(), "`wait` ended while the lock is held");
    assert_eq!(place.claims("job"), 1, "`wait` is in the queue");
    drop(holder);
    assert!(until_free.child.wait().unwrap().success());
}

#[test]
fn help_names_what_is_not_covered() {
    let place = Place::new();
    let help = String::from_utf8(place.output(&["run", "--help"]).stdout).unwrap();
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for word in ["suspended", "descendants", "other machines", "LEASEHOLD_TOKEN", "75", "74"] {
        assert!(help.contains(word), "{word}: {help}");
    }
    let help = String::from_utf8(place.output(&["--help"]).stdout).unwrap();
    assert!(help.contains("leasehold run nightly-report ./report.sh"));
    assert!(!help.contains("watchdog") && !help.contains("\n  keep"), "hidden: {help}");
}

#[test]
fn namespace_prefixes_all_names_and_is_inherited() {
    let place = Place::new();
    let script = format!(
        "echo $LEASEHOLD_NAMESPACE; {LEASEHOLD} show x >/dev/null && {LEASEHOLD} verify $LEASEHOLD_SEQUENCER && \
         {LEASEHOLD} ls --namespace '' --json"
    );
    let output = place.output(&["run", "--namespace", "acme/", "x", "--", "sh", "-c", &script]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(stdout.starts_with("acme/\n") && stdout.contains("\"acme/x\""), "{stdout}");
    // The hold of a script's lock is contacted in the same way.
    let word = |word: &str| {
        let mut command = place.leasehold(["sh"; 0]);
        command.arg(word).env("LEASEHOLD_NAMESPACE", "acme/");
        command
    };
    let pid = std::process::id().to_string();
    let token = word("acquire").args(["--pid", &pid, "x"]).output().unwrap();
    assert!(token.status.success(), "{token:?}");
    let token = String::from_utf8(token.stdout).unwrap();
    assert_eq!(place.code(&["show", "x"]), 1);
    assert_eq!(place.code(&["run", "--try", "acme/x", "--", "true"]), 75);
    let released = word("release").args(["--token", token.trim(), "x"]).output().unwrap();
    assert!(released.status.success(), "{released:?}");
    assert_eq!(place.code(&["run", "--namespace", "a\nb", "x", "--", "true"]), 2);
}

/// As with flock, `--` is optional, and -n does not wait.
#[test]
fn command_after_the_name_keeps_its_own_options() {
    let place = Place::new();
    assert_eq!(place.code(&["run", "x", "sh", "-c", "exit 7"]), 7);
    assert_eq!(place.code(&["run", "x", "--", "sh", "-c", "exit 7"]), 7);
    let output =
        place.output(&["run", "--name", "a", "--name", "b", "sh", "-c", "echo x$0 $1", "-n", "-v"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "x-n -v\n", "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
    let _holder = place.hold("x", "echo ready; sleep 1000");
    for not_waiting in ["-n", "--nonblock", "--try"] {
        assert_eq!(place.code(&["run", not_waiting, "x", "true"]), 75, "{not_waiting}");
        assert_eq!(place.code(&["run", "x", not_waiting, "true"]), 75, "{not_waiting}");
    }
    let output = place.output(&["run", "-n", "x", "true"]);
    let errors_shown = String::from_utf8_lossy(&output.stderr).into_owned();
    let (cause, hint) = errors_shown.split_once('\n').unwrap();
    assert!(
        cause.starts_with("leasehold: \"x\" is held by ") && cause.contains("(sh) for "),
        "{errors_shown}"
    );
    assert_eq!(hint, "hint: drop --try to wait, or see the queue: leasehold show x\n");
}

#[test]
fn ls_does_not_list_the_slots_of_a_semaphore() {
    let place = Place::new();
    let _holder = place.hold_with(&["--max", "2"], "gpu", "echo ready; sleep 1000");
    let _other = place.hold("gpu/slot/9", "echo ready; sleep 1000");
    let names = |words: &[&str]| {
        let listed: serde_json::Value =
            serde_json::from_slice(&place.output(words).stdout).unwrap();
        let names = listed.as_array().unwrap().iter();
        names.map(|lock| lock["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(&["ls", "--json"]), ["gpu", "gpu/slot/9"]);
    let text = String::from_utf8(place.output(&["ls"]).stdout).unwrap();
    assert_eq!(text.lines().count(), 3, "{text}");
    // The slots are ordinary locks.
    assert_eq!(names(&["ls", "--json", "gpu/slot/"]).len(), 2);
}

/// Global options may come before the subcommand, and -v adds a line.
#[test]
fn global_options_may_precede_the_subcommand() {
    let place = Place::new();
    let store = format!("file:{}", place.path("elsewhere").display());
    assert_eq!(place.code(&["--store", &store, "run", "x", "true"]), 0);
    let output = place.output(&["--json", "--store", &store, "-v", "ls"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "[]\n", "{output:?}");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(stderr, format!("leasehold: using store {store}\n"));
}

/// The old names of commands and options still work.
#[test]
fn old_command_and_option_names_still_work() {
    let place = Place::new();
    assert_eq!(place.code(&["close", "x", "--for", "1h", "--reason", "moved"]), 0);
    assert_eq!(place.code(&["run", "--try", "x", "--", "true"]), 75);
    assert_eq!(place.code(&["open", "x"]), 0);
    let check = format!("'{LEASEHOLD}' check \"$LEASEHOLD_SEQUENCER\"");
    assert_eq!(place.code(&["run", "--at-least", "1h", "x", "--", "sh", "-c", &check]), 0);
    assert_eq!(place.code(&["release", "--force", "x"]), 0);
    assert_eq!(place.code(&["release", "--force", "x"]), 1);
    assert_eq!(place.code(&["run", "--of", "2", "--term-grace", "1s", "y", "--", "true"]), 0);
    // With a token, `evict` removes only that claim.
    let _holder = place.hold("x", "echo ready; sleep 1000");
    let token = place.show("x")["claims"][0]["token"].to_string();
    assert_eq!(place.code(&["evict", "x", "--token", "1"]), 1);
    assert_eq!(place.code(&["evict", "x", "--token", &token]), 0);
}

#[test]
fn a_semaphore_with_the_longest_name_has_slots() {
    let place = Place::new();
    let name = "n".repeat(512);
    let words = [
        "run",
        "--max",
        "4",
        &name,
        "--",
        "sh",
        "-c",
        "echo $LEASEHOLD_SLOT; echo ready; sleep 1000",
    ];
    let mut running = Running::start(place.leasehold(words));
    let slot: u32 = running.line().parse().unwrap();
    assert!((1..=4).contains(&slot));
    running.wait_for("ready");
    let output = place.output(&["ls", "--json"]);
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(stdout.contains(&name) && !stdout.contains("/slot/"), "{stdout}");
    let namespaced = ["run", "--namespace", "space/", "--max", "4", &name[6..], "--", "true"];
    assert_eq!(place.code(&namespaced), 0);
}
