//! The hidden `leasehold watchdog`, run directly: what it does when leasehold dies or is paused.

use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{LEASEHOLD, eventually, runs};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{Signal, kill, killpg};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

struct Watchdog {
    process: Child,
    pipe: ChildStdin,
}

impl Watchdog {
    fn start(grace: &str) -> Self {
        let mut command = Command::new(LEASEHOLD);
        command.args(["watchdog", "--grace", grace]).stdin(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn().unwrap();
        let pipe = process.stdin.take().unwrap();
        Self { process, pipe }
    }

    fn send(&mut self, line: &str) {
        writeln!(self.pipe, "{line}").unwrap();
    }

    /// Waits until the watchdog is ready, which is when it has blocked all signals that can be
    /// blocked.
    fn wait_until_up(&self) {
        let pid = self.process.id();
        eventually("the watchdog blocks its signals", || {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let mask = status.lines().find_map(|l| l.strip_prefix("SigBlk:")).unwrap();
            u64::from_str_radix(mask.trim(), 16).unwrap() & (1 << 14) != 0
        });
    }

    /// Simulates the death of leasehold, and returns the signal that killed CMD.
    fn hang_up(self, child: Child) -> Option<i32> {
        let Self { mut process, pipe } = self;
        drop(pipe);
        // CMD is reaped first, because the watchdog counts a zombie as a member of the group.
        let signal = signal_of(child);
        assert_eq!(process.wait().unwrap().code(), ACTED);
        signal
    }
}

/// Starts a script in a process group of its own.
fn victim(script: &str) -> Child {
    let mut command = Command::new("sh");
    command
        .args(["-c", script])
        .process_group(0)
        .stderr(Stdio::null())
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command.spawn().unwrap()
}

fn group(child: &Child) -> String {
    format!("group {}", child.id())
}

/// Returns the moment that is this far away, on the boot clock.
fn moment(from_now: Duration) -> u128 {
    let now = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).unwrap());
    (now + from_now).as_nanos()
}

fn signal_of(mut child: Child) -> Option<i32> {
    child.wait().unwrap().signal()
}

/// Ends a group that the watchdog spared.
fn end(child: Child) {
    killpg(Pid::from_raw(child.id() as i32), Signal::SIGKILL).unwrap();
    assert_eq!(signal_of(child), KILL);
}

/// The exit code of a watchdog that signaled its group.
const ACTED: Option<i32> = Some(10);
const TERM: Option<i32> = Some(Signal::SIGTERM as i32);
const KILL: Option<i32> = Some(Signal::SIGKILL as i32);
const DEAF: &str = "trap '' TERM; while :; do sleep 0.02; done";

/// Starts a shell that ignores TERM. Waits until it has set its trap.
fn deaf() -> Child {
    let child = victim(DEAF);
    eventually("the shell ignores TERM", || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap() & (1 << 14) != 0
    });
    child
}

#[test]
fn command_gets_sigterm_when_leasehold_dies() {
    let child = victim("sleep 1000");
    let mut dog = Watchdog::start("60000");
    dog.send(&group(&child));
    assert_eq!(dog.hang_up(child), TERM);
}

#[test]
fn command_that_ignores_term_is_killed_after_the_grace_period() {
    let child = deaf();
    let mut dog = Watchdog::start("200");
    dog.send(&group(&child));
    let started = Instant::now();
    assert_eq!(dog.hang_up(child), KILL);
    assert!(started.elapsed() >= Duration::from_millis(200));
}

#[test]
fn zero_grace_period_kills_without_sigterm() {
    let child = victim("sleep 1000");
    let mut dog = Watchdog::start("0");
    dog.send(&group(&child));
    assert_eq!(dog.hang_up(child), KILL);
}

#[test]
fn the_deadline_cuts_the_grace_short() {
    let child = deaf();
    let mut dog = Watchdog::start("3600000");
    dog.send(&group(&child));
    dog.send(&format!("deadline - {}", moment(Duration::from_millis(300))));
    assert_eq!(dog.hang_up(child), KILL);
}

#[test]
fn command_of_a_paused_leasehold_is_killed_at_the_deadline() {
    // The pipe stays open, as if leasehold were paused by SIGSTOP.
    let child = victim("sleep 1000");
    let mut dog = Watchdog::start("60000");
    dog.send(&group(&child));
    let kill = moment(Duration::from_millis(400));
    dog.send(&format!("deadline - {kill}"));
    assert_eq!(signal_of(child), KILL);
    assert!(moment(Duration::ZERO) >= kill);
    assert_eq!(dog.process.wait().unwrap().code(), ACTED);
}

#[test]
fn term_comes_before_kill() {
    let child = victim("sleep 1000");
    let mut dog = Watchdog::start("60000");
    dog.send(&group(&child));
    let (term, kill) = (Duration::from_millis(200), Duration::from_secs(3600));
    dog.send(&format!("deadline {} {}", moment(term), moment(kill)));
    assert_eq!(signal_of(child), TERM);
    dog.send("done");
    assert_eq!(dog.process.wait().unwrap().code(), ACTED);
}

#[test]
fn later_deadline_replaces_an_earlier_one() {
    let mut child = victim("sleep 1000");
    let mut dog = Watchdog::start("60000");
    dog.send(&group(&child));
    // The watchdog may need long to start.
    dog.wait_until_up();
    let soon = moment(Duration::from_secs(6));
    dog.send(&format!("deadline - {soon}"));
    dog.send(&format!("deadline - {}", moment(Duration::from_secs(3600))));
    // This waits until the boot clock has passed the first deadline.
    eventually("the first deadline has passed", || moment(Duration::ZERO) > soon + 200_000_000);
    assert!(child.try_wait().unwrap().is_none());
    dog.send("done");
    assert!(dog.process.wait().unwrap().success());
    end(child);
}

#[test]
fn deadline_before_the_command_started_is_enforced() {
    let child = victim("sleep 1000");
    let mut dog = Watchdog::start("60000");
    dog.send(&format!("deadline - {}", moment(Duration::ZERO)));
    dog.send(&group(&child));
    assert_eq!(signal_of(child), KILL);
}

#[test]
fn done_spares_the_command_and_missing_command_is_harmless() {
    let mut child = victim("sleep 1000");
    let mut dog = Watchdog::start("0");
    dog.send(&group(&child));
    dog.send("done");
    assert!(dog.process.wait().unwrap().success());
    assert!(child.try_wait().unwrap().is_none());
    end(child);

    let Watchdog { mut process, pipe } = Watchdog::start("0");
    drop(pipe);
    process.wait().unwrap();
}

#[test]
fn stopped_process_group_is_terminated_too() {
    let child = victim("sleep 1000");
    let pid = Pid::from_raw(child.id() as i32);
    kill(pid, Signal::SIGSTOP).unwrap();
    let mut dog = Watchdog::start("60000");
    dog.send(&group(&child));
    assert_eq!(dog.hang_up(child), TERM);
}

#[test]
fn watchdog_ignores_signals_and_has_its_own_session() {
    let child = victim("sleep 1000");
    let mut dog = Watchdog::start("60000");
    dog.send(&group(&child));
    dog.wait_until_up();
    let pid = dog.process.id();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGTSTP] {
        kill(Pid::from_raw(pid as i32), signal).unwrap();
    }
    // The watchdog still works.
    assert_eq!(dog.hang_up(child), TERM);

    // leasehold starts the watchdog in a session of its own, without the lock's lifeline.
    let place = crate::common::Place::new();
    let script = "for p in /proc/[0-9]*; do
                    if tr '\\0' ' ' < $p/cmdline 2>/dev/null | grep -q '^leasehold watchdog' &&
                       grep -q \"^PPid:.$PPID$\" $p/status; then
                      echo ${p#/proc/}; cut -d' ' -f6 $p/stat; ls -l $p/fd
                    fi
                  done";
    let output = place.output(&["run", "x", "--", "sh", "-c", script]);
    let stdout = String::from_utf8(output.stdout).unwrap();
    let mut lines = stdout.lines();
    let (pid, session) = (lines.next().unwrap(), lines.next().unwrap());
    assert_eq!(pid, session, "{stdout}");
    assert!(
        !stdout.contains(&*place.path("").to_string_lossy()),
        "the lifeline is inherited: {stdout}"
    );
}

/// Starts `leasehold run` on a store with leases. Returns it with the pid of its command.
#[cfg(feature = "sqlite")]
fn leased(
    place: &crate::common::Place,
    lease: &str,
    script: &str,
) -> (crate::common::Running, i32) {
    let store = format!("sqlite:{}", place.path("locks.db").display());
    let mut command = Command::new(LEASEHOLD);
    command.args(["run", "--store", &store, "--lease", lease, "x", "--", "sh", "-c"]);
    command.arg(format!("echo $$; {script}")).stdin(Stdio::null());
    let mut running = crate::common::Running::start(command);
    let pid = running.line().parse().unwrap();
    (running, pid)
}

// S09
#[cfg(feature = "sqlite")]
#[test]
fn command_of_a_paused_leasehold_ends_before_its_lease() {
    // The lease is long enough that two seconds are left when the command is killed.
    let lease = Duration::from_secs(20);
    let place = crate::common::Place::new();
    let (mut running, pid) = leased(&place, "20s", "trap '' TERM; while :; do sleep 0.02; done");
    // The lease is renewed, so nothing happens for longer than a lease.
    std::thread::sleep(lease + lease / 8);
    assert!(runs(pid));
    running.signal(Signal::SIGSTOP);
    let stopped = Instant::now();
    eventually("the command is killed", || !runs(pid));
    // The last renewal was sent before the pause. So its lease expires earlier than a lease that
    // begins with the pause.
    assert!(stopped.elapsed() < lease, "{:?}", stopped.elapsed());
    running.signal(Signal::SIGCONT);
    assert_eq!(running.code(), 74);
}

#[cfg(feature = "sqlite")]
#[test]
fn command_dies_with_leasehold_on_a_store_with_leases() {
    let place = crate::common::Place::new();
    let (mut running, pid) = leased(&place, "1h", "exec sleep 1000");
    running.signal(Signal::SIGKILL);
    running.child.wait().unwrap();
    eventually("the command is terminated", || !runs(pid));
}

#[test]
fn killed_watchdog_is_replaced() {
    let place = crate::common::Place::new();
    let mut holder =
        place.hold("x", "trap 'echo usr1' USR1; echo ready; while :; do sleep 0.02; done");
    let dogs = || -> Vec<i32> {
        crate::common::watchdogs_of(holder.pid().as_raw()).into_iter().map(|(pid, _)| pid).collect()
    };
    let first = dogs();
    assert_eq!(first.len(), 1);
    kill(Pid::from_raw(first[0]), Signal::SIGKILL).unwrap();
    eventually("another watchdog has started", || {
        dogs().first().is_some_and(|&pid| pid != first[0])
    });
    // The new watchdog knows the group, so the command dies with leasehold.
    holder.signal(Signal::SIGKILL);
    holder.child.wait().unwrap();
    eventually("the lock is free", || place.code(&["run", "--try", "x", "--", "true"]) == 0);
    assert!(holder.line().is_empty(), "a process of the command still writes");
}

/// Makes a full pipe that is never read.
fn full_pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    let (reader, writer) = std::io::pipe().unwrap();
    let set = |flags| fcntl(&writer, FcntlArg::F_SETFL(flags)).map(drop).unwrap();
    set(OFlag::O_NONBLOCK);
    while (&writer).write(&[0; 4096]).is_ok_and(|n| n > 0) {}
    while (&writer).write(&[0]).is_ok_and(|n| n > 0) {}
    set(OFlag::empty());
    (reader, writer)
}

// F27
#[test]
fn full_stderr_pipe_does_not_block_the_watchdog() {
    for killed in [true, false] {
        let child = deaf();
        let pid = child.id() as i32;
        let (_unread, stderr) = full_pipe();
        let mut command = Command::new(LEASEHOLD);
        command.args(["watchdog", "--grace", "50"]).stdin(Stdio::piped()).stderr(stderr);
        let mut process = command.spawn().unwrap();
        let pipe = process.stdin.take().unwrap();
        let mut dog = Watchdog { process, pipe };
        dog.send(&group(&child));
        // If leasehold is killed, the pipe closes. If it is paused, the deadline passes.
        if killed {
            assert_eq!(dog.hang_up(child), KILL);
        } else {
            dog.send(&format!("deadline - {}", moment(Duration::ZERO)));
            assert_eq!(signal_of(child), KILL);
            assert_eq!(dog.process.wait().unwrap().code(), ACTED);
        }
        assert!(!runs(pid));
    }
}

// F27
/// The message is what the watchdog cannot print in the previous test.
#[test]
fn watchdog_reports_why_it_ended_the_command() {
    for (killed, reason) in [(true, "leasehold was killed"), (false, "leasehold was paused")] {
        let child = deaf();
        let (mut stderr, theirs) = std::io::pipe().unwrap();
        let mut command = Command::new(LEASEHOLD);
        command.args(["watchdog", "--grace", "50"]).stdin(Stdio::piped()).stderr(theirs);
        let mut process = command.spawn().unwrap();
        drop(command);
        let pipe = process.stdin.take().unwrap();
        let mut dog = Watchdog { process, pipe };
        dog.send(&group(&child));
        if killed {
            assert_eq!(dog.hang_up(child), KILL);
        } else {
            dog.send(&format!("deadline - {}", moment(Duration::ZERO)));
            assert_eq!(signal_of(child), KILL);
            assert_eq!(dog.process.wait().unwrap().code(), ACTED);
        }
        let mut errors = String::new();
        stderr.read_to_string(&mut errors).unwrap();
        assert!(errors.starts_with(&format!("leasehold: {reason}")), "{errors:?}");
    }
}

// F31
#[test]
fn paused_watchdog_does_not_keep_the_lock() {
    let place = crate::common::Place::new();
    let mut holder =
        place.hold("x", "trap 'exit 7' USR1; echo ready; while :; do sleep 0.02; done");
    let dogs = crate::common::watchdogs_of(holder.pid().as_raw());
    let [(dog, _)] = &dogs[..] else { panic!("{dogs:?}") };
    kill(Pid::from_raw(*dog), Signal::SIGSTOP).unwrap();
    holder.signal(Signal::SIGUSR1);
    assert_eq!(holder.code(), 7);
    assert!(!runs(*dog));
    assert_eq!(place.code(&["run", "--try", "x", "--", "true"]), 0);
}
