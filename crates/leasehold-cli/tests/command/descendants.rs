//! What happens to the descendants of a command, in particular if a program puts them into another
//! process group or session.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::common::{LEASEHOLD, Place, Running, eventually, runs};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The work of a command. It prints its pid, and does not end.
const WORK: &str = "echo $$; exec sleep 1000";
/// Scripts that run the work in another process group or session, as another user, or without a
/// parent or an environment. The work replaces `WORK`.
const ESCAPES: [&str; 8] = [
    "timeout 600 sh -c 'WORK'; true",
    "setsid -w sh -c 'WORK'; true",
    "bash -c 'set -m; sh -c \"$0\" & wait' 'WORK'; true",
    "(setsid sh -c 'WORK' &) & wait; sleep 1000",
    "setsid -w env -i PATH=$PATH sh -c 'WORK'; true",
    "timeout 600 sh -c 'trap \"\" TERM; echo $$; while :; do sleep 0.05; done'; true",
    "su nobody -s /bin/sh -c 'WORK'; true",
    "parallel -u -j1 sh -c ::: 'WORK'; true",
];

fn escapes() -> Vec<String> {
    let is_root = rustix::process::geteuid().is_root();
    let has_parallel = Command::new("parallel").arg("--version").output().is_ok();
    let possible = ESCAPES.iter().filter(|script| match script.split(' ').next() {
        Some("su") => is_root,
        Some("parallel") => has_parallel,
        _ => true,
    });
    possible.map(|script| script.replace("WORK", WORK)).collect()
}

/// Returns the pid that the work printed.
fn work_of(running: &mut Running) -> i32 {
    running
        .line()
        .parse()
        .unwrap_or_else(|_| panic!("the first line is not a PID: {}", running.errors()))
}

/// A process that the test must end.
struct Stray(i32);

impl Drop for Stray {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.0), Signal::SIGKILL);
    }
}

#[test]
fn no_descendant_outlives_an_evicted_lock() {
    let place = Place::new();
    for script in escapes() {
        let mut running = Running::start(place.leasehold(["run", "x", "--", "sh", "-c", &script]));
        let work = Stray(work_of(&mut running));
        assert_eq!(place.code(&["evict", "x"]), 0);
        assert_eq!(running.code(), 74, "{script}");
        assert!(!runs(work.0), "{script}");
        assert!(running.errors().contains("the command was stopped"), "{script}");
    }
}

#[test]
fn no_descendant_outlives_a_killed_leasehold() {
    let place = Place::new();
    // A process with neither parent nor environment is not found without its leasehold.
    for script in escapes().iter().filter(|script| !script.contains("env -i")) {
        let words = ["run", "--kill-after", "100ms", "x", "--", "sh", "-c", script];
        let mut running = Running::start(place.leasehold(words));
        let work = Stray(work_of(&mut running));
        running.signal(Signal::SIGKILL);
        eventually(script, || !runs(work.0));
        // The lock is free again, because no process of the command has the lifeline.
        assert_eq!(place.code(&["run", "x", "--", "true"]), 0);
    }
}

#[test]
fn no_descendant_outlives_the_deadline_of_a_paused_leasehold() {
    let place = Place::new();
    let outlives = |script: &str| {
        let words = ["run", "--max-hold", "10s", script, "--", "sh", "-c", script];
        let mut running = Running::start(place.leasehold(words));
        let work = Stray(work_of(&mut running));
        running.signal(Signal::SIGSTOP);
        eventually(script, || !runs(work.0));
        running.signal(Signal::SIGCONT);
        assert_eq!(running.code(), 74, "{script}");
    };
    std::thread::scope(|scope| {
        for script in escapes() {
            let outlives = &outlives;
            scope.spawn(move || outlives(&script));
        }
    });
}

/// The signal is forwarded to the command's group only.
#[test]
fn no_descendant_outlives_a_signal_to_leasehold() {
    let place = Place::new();
    for script in escapes() {
        let mut running = Running::start(place.leasehold(["run", "x", "--", "sh", "-c", &script]));
        let work = Stray(work_of(&mut running));
        running.signal(Signal::SIGTERM);
        running.code();
        assert!(!runs(work.0), "{script}");
        assert_eq!(place.code(&["run", "--try", "x", "--", "true"]), 0, "{script}");
    }
}

#[test]
fn descendants_outside_the_group_get_sigterm_first() {
    let place = Place::new();
    let work = "trap 'echo asked; exit' TERM; echo $$; while :; do sleep 0.02; done";
    // The command ends later than its work, which is outside its group.
    let script = format!("trap 'wait $!; exit' TERM; setsid sh -c \"{work}\" & wait $!; wait $!");
    let script = script.replace("$$", "\\$\\$");
    let words = ["run", "--max-hold", "2s", "x", "--", "sh", "-c", &script];
    let mut running = Running::start(place.leasehold(words));
    running.line();
    assert_eq!(running.line(), "asked");
    assert_eq!(running.code(), 74);
}

#[test]
fn daemons_outlive_a_command_that_ends() {
    let place = Place::new();
    let script = "setsid sleep 1000 > /dev/null 2>&1 & echo $!";
    let output = place.output(&["run", "--no-inherit", "x", "--", "sh", "-c", script]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let daemon = Stray(String::from_utf8_lossy(&output.stdout).trim().parse().unwrap());
    assert!(runs(daemon.0));
    assert_eq!(place.code(&["run", "--try", "x", "--", "true"]), 0);
}

#[test]
fn detached_processes_and_the_on_lost_program_outlive_the_lock() {
    let place = Place::new();
    let lost = place.path("lost");
    let text = format!("setsid sleep 1000 &\necho $! > {0}.new\nmv {0}.new {0}", lost.display());
    let on_lost = &place.script("on-lost", &text);
    let script = "LEASEHOLD_RUN=detached setsid sleep 1000 & echo $!; sleep 1000";
    let words = ["run", "--no-inherit", "--on-lost", on_lost, "x", "--", "sh", "-c", script];
    let mut running = Running::start(place.leasehold(words));
    let detached = Stray(work_of(&mut running));
    assert_eq!(place.code(&["evict", "x"]), 0);
    eventually("the --on-lost program has run", || !place.read("lost").is_empty());
    let daemon = Stray(place.read("lost").trim().parse().unwrap());
    assert_eq!(running.code(), 74);
    assert!(runs(detached.0) && runs(daemon.0));
}

#[test]
fn children_from_before_the_run_are_spared() {
    let place = Place::new();
    // The second process becomes an orphan below leasehold.
    let script = format!(
        "sleep 1000 & echo $!; sh -c 'sleep 1000 & echo $!; echo; read x' < f & \
         exec {LEASEHOLD} run x -- sh -c 'echo ready; sleep 1000'"
    );
    let mut command = Command::new("sh");
    command.args(["-c", &script]).current_dir(place.path("")).stdin(Stdio::null());
    command.env("LEASEHOLD_STORE", place.store());
    nix::unistd::mkfifo(&place.path("f"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut running = Running::start(command);
    let mut before = Vec::new();
    // The shell waits until its input is opened.
    let mut input = std::fs::File::options().write(true).open(place.path("f")).unwrap();
    loop {
        match running.line().parse() {
            Ok(pid) => before.push(Stray(pid)),
            Err(_) if before.len() == 2 => break,
            Err(_) => {}
        }
    }
    std::io::Write::write_all(&mut input, b"\n").unwrap();
    eventually("the lock is held", || place.claims("x") == 1);
    assert_eq!(place.code(&["evict", "x"]), 0);
    assert_eq!(running.code(), 74);
    assert!(before.iter().all(|stray| runs(stray.0)));
}

#[test]
fn a_survivor_is_named_and_keeps_the_lock_while_it_runs() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can start a process that it may not signal");
        return;
    }
    let place = Place::new();
    let script = "setpriv --reuid=65534 --clear-groups setsid -w sh -c 'echo $$; exec sleep 1000'";
    let script = format!("{script} & wait");
    let words = ["run", "--no-inherit", "--max-hold", "1s", "x", "--", "sh", "-c", &script];
    let mut running = Running::start(place.without_kill(&words));
    let survivor = Stray(work_of(&mut running));
    // The wait exceeds the second of --max-hold.
    assert_eq!(place.code(&["run", "--wait", "3s", "x", "--", "true"]), 75);
    assert!(runs(survivor.0));
    drop(survivor);
    assert_eq!(running.code(), 74);
    let stderr = running.errors();
    assert!(stderr.contains("could not be stopped: lock \"x\" is kept"), "{stderr}");
    assert_eq!(place.code(&["run", "--try", "x", "--", "true"]), 0);
}

#[test]
fn leasehold_has_priority_over_its_command() {
    let place = Place::new();
    let niceness = "nice; ps -o ni= -p $PPID; ps -o ni= --ppid $PPID | sort -n | head -1";
    let script = format!("nice; exec nice -n 3 {LEASEHOLD} run x -- sh -c '{niceness}'");
    let mut command = Command::new("sh");
    command.args(["-c", &script]).env("LEASEHOLD_STORE", place.store());
    let output = command.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let all: Vec<i32> = printed.split_whitespace().map(|n| n.parse().unwrap()).collect();
    let [ours, of_command, of_leasehold, of_watchdog] = all[..] else { panic!("{output:?}") };
    assert_eq!(of_command, (ours + 3).min(19));
    // The priority is not raised if that is not permitted.
    let raised = Command::new("nice").args(["-n", "-20", "nice"]).output().unwrap();
    if raised.stdout == b"-20\n" {
        assert_eq!([of_leasehold, of_watchdog], [-15; 2]);
    }
}

/// Returns a command that runs this script as the first process of a new PID namespace, with
/// `leasehold` as `$0`.
fn first_process(place: &Place, script: &str) -> Option<Command> {
    let unshare = ["-p", "-f", "--mount-proc"];
    let possible = Command::new("unshare").args(unshare).arg("true").output();
    if !possible.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: cannot create a PID namespace");
        return None;
    }
    let mut command = Command::new("unshare");
    command.args(unshare).args(["--kill-child", "sh", "-c", script, LEASEHOLD]);
    command.env("LEASEHOLD_STORE", place.store()).stdin(Stdio::null()).process_group(0);
    Some(command)
}

#[test]
fn the_first_process_of_a_container_reaps_orphans() {
    let place = Place::new();
    let count = "ps -eo stat,ppid | awk '$1 ~ /^Z/ && $2 == 1' | wc -l";
    let orphans = "for i in $(seq 20); do (sleep 0.05 &); done; sleep 0.5";
    let wait = format!(
        "{orphans}; for i in $(seq 600); do n=$({count}); [ $n = 0 ] && break; sleep 0.1; done; echo $n"
    );
    let Some(mut command) = first_process(&place, "exec \"$0\" run x -- sh -c \"$1\"") else {
        return;
    };
    let output = command.arg(&wait).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "0", "{output:?}");
}

#[test]
fn waiting_leasehold_with_pid_1_ends_on_sigterm() {
    let place = Place::new();
    let _holder = place.hold("x", "echo ready; exec sleep 1000");
    for waits in ["wait x", "run x -- true", "events x"] {
        let script = format!("exec \"$0\" {waits}");
        let Some(command) = first_process(&place, &script) else { return };
        let mut running = Running::start(command);
        let child = || {
            let path = format!("/proc/{0}/task/{0}/children", running.pid());
            let child = std::fs::read_to_string(path).ok()?.trim().parse::<i32>().ok()?;
            let words = std::fs::read_to_string(format!("/proc/{child}/cmdline")).ok()?;
            words.starts_with(LEASEHOLD).then_some(child)
        };
        eventually("the child process is started", || child().is_some());
        let child = Pid::from_raw(child().unwrap());
        // The signal is repeated, because the process may not catch it yet.
        eventually("the child process ends", || {
            let _ = kill(child, Signal::SIGTERM);
            !runs(child.as_raw())
        });
        assert_eq!(running.code(), 143, "{waits}");
    }
}

#[test]
fn run_in_a_nested_pid_namespace_detects_its_own_deadlock() {
    let place = Place::new();
    for mount in ["", "--mount-proc"] {
        let inner = format!("unshare -p -f {mount} {LEASEHOLD} run x -- echo in");
        let words = ["run", "x", "--", "sh", "-c", &inner];
        if first_process(&place, "").is_none() {
            return;
        }
        let output = place.output(&words);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains("deadlock"), "{stderr}");
    }
}

#[test]
fn an_orphan_of_the_command_may_wait_for_its_lock() {
    let place = Place::new();
    // The second run starts only when it is an orphan, with leasehold as its parent.
    let orphan = format!(
        "while [ \"$(ps -o ppid= -p $$ | tr -d ' ')\" != $LH ]; do sleep 0.02; done; \
         echo waits; exec {LEASEHOLD} run --no-inherit x -- echo in"
    );
    let script =
        format!("export LH=$PPID; (sh -c '{}' &); read x < f", orphan.replace('\'', "'\\''"));
    nix::unistd::mkfifo(&place.path("f"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut command = place.leasehold(["run", "--no-inherit", "x", "--", "sh", "-c", &script]);
    command.current_dir(place.path(""));
    let mut running = Running::start(command);
    running.wait_for("waits");
    eventually("the waiter is in the queue", || place.claims("x") == 2);
    std::fs::write(place.path("f"), "\n").unwrap();
    assert_eq!(running.line(), "in");
    assert_eq!(running.code(), 0);
}

#[test]
fn systemd_sockets_are_passed_to_the_command() {
    let place = Place::new();
    let script = format!(
        "exec 3< /dev/null; LISTEN_FDS=1 LISTEN_PID=$$ LISTEN_PIDFDID=7 \
         exec {LEASEHOLD} run x -- sh -c 'echo $LISTEN_PID $$ $LISTEN_FDS $LEASEHOLD_NAME $LISTEN_PIDFDID'"
    );
    let mut command = Command::new("sh");
    command.args(["-c", &script]).env("LEASEHOLD_STORE", place.store());
    let output = command.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let words: Vec<&str> = printed.split_whitespace().collect();
    assert!(words.len() == 4 && words[0] == words[1], "{output:?}");
    assert_eq!(words[2..], ["1", "x"]);
    // Sockets for another process are not changed.
    let mut command = place.leasehold(["run", "x", "--", "sh", "-c", "echo $LISTEN_PID"]);
    assert_eq!(command.env("LISTEN_PID", "1").output().unwrap().stdout, b"1\n");
    // A missing command is still reported as missing.
    let missing = script.replace("sh -c 'echo", "no-such-program 'echo");
    let mut command = Command::new("sh");
    command.args(["-c", &missing]).env("LEASEHOLD_STORE", place.store());
    assert_eq!(command.output().unwrap().status.code(), Some(127));
}
