//! The hidden `leasehold watchdog`, spoken to directly: what it does when leasehold dies or stops.

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

    fn tell(&mut self, line: &str) {
        writeln!(self.pipe, "{line}").unwrap();
    }

    /// Waits until it is at work: it has blocked all the signals that it can.
    fn wait_until_up(&self) {
        let pid = self.process.id();
        eventually("it blocks all it can", || {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let mask = status.lines().find_map(|l| l.strip_prefix("SigBlk:")).unwrap();
            u64::from_str_radix(mask.trim(), 16).unwrap() & (1 << 14) != 0
        });
    }

    /// Says that leasehold died, and tells what CMD died of.
    fn hang_up(self, child: Child) -> Option<i32> {
        let Self { mut process, pipe } = self;
        drop(pipe);
        // In this order: the watchdog takes a zombie for a member of the group.
        let signal = signal_of(child);
        assert_eq!(process.wait().unwrap().code(), ACTED);
        signal
    }
}

/// A process group of its own.
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

/// This far from now on the boot clock.
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

/// How a watchdog ends that signalled its group.
const ACTED: Option<i32> = Some(10);
const TERM: Option<i32> = Some(Signal::SIGTERM as i32);
const KILL: Option<i32> = Some(Signal::SIGKILL as i32);
const DEAF: &str = "trap '' TERM; while :; do sleep 0.02; done";

/// Waits until the shell has set its trap: only then is it deaf.
fn deaf() -> Child {
    let child = victim(DEAF);
    eventually("it is deaf", || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap() & (1 << 14) != 0
    });
    child
}

#[test]
fn a_dead_leasehold_takes_its_command_along_with_term() {
    let child = victim("sleep 1000");
    let mut dog = Watchdog::start("60000");
    dog.tell(&group(&child));
    assert_eq!(dog.hang_up(child), TERM);
}

#[test]
fn who_is_deaf_to_term_is_killed_after_the_grace() {
    let child = deaf();
    let mut dog = Watchdog::start("200");
    dog.tell(&group(&child));
    let started = Instant::now();
    assert_eq!(dog.hang_up(child), KILL);
    assert!(started.elapsed() >= Duration::from_millis(200));
}

#[test]
fn without_grace_nobody_is_asked() {
    let child = victim("sleep 1000");
    let mut dog = Watchdog::start("0");
    dog.tell(&group(&child));
    assert_eq!(dog.hang_up(child), KILL);
}

#[test]
fn the_deadline_cuts_the_grace_short() {
    let child = deaf();
    let mut dog = Watchdog::start("3600000");
    dog.tell(&group(&child));
    dog.tell(&format!("deadline - {}", moment(Duration::from_millis(300))));
    assert_eq!(dog.hang_up(child), KILL);
}

#[test]
fn a_silent_leasehold_costs_the_command_its_life_at_the_deadline() {
    // The pipe stays open, as under SIGSTOP.
    let child = victim("sleep 1000");
    let mut dog = Watchdog::start("60000");
    dog.tell(&group(&child));
    let kill = moment(Duration::from_millis(400));
    dog.tell(&format!("deadline - {kill}"));
    assert_eq!(signal_of(child), KILL);
    assert!(moment(Duration::ZERO) >= kill);
    assert_eq!(dog.process.wait().unwrap().code(), ACTED);
}

#[test]
fn term_comes_before_kill() {
    let child = victim("sleep 1000");
    let mut dog = Watchdog::start("60000");
    dog.tell(&group(&child));
    let (term, kill) = (Duration::from_millis(200), Duration::from_secs(3600));
    dog.tell(&format!("deadline {} {}", moment(term), moment(kill)));
    assert_eq!(signal_of(child), TERM);
    dog.tell("done");
    assert_eq!(dog.process.wait().unwrap().code(), ACTED);
}

#[test]
fn news_move_the_deadline_out() {
    let mut child = victim("sleep 1000");
    let mut dog = Watchdog::start("60000");
    dog.tell(&group(&child));
    // Starting may take long.
    dog.wait_until_up();
    let soon = moment(Duration::from_secs(6));
    dog.tell(&format!("deadline - {soon}"));
    dog.tell(&format!("deadline - {}", moment(Duration::from_secs(3600))));
    // Past the first deadline by the clock that counts.
    eventually("the first deadline is over", || moment(Duration::ZERO) > soon + 200_000_000);
    assert!(child.try_wait().unwrap().is_none());
    dog.tell("done");
    assert!(dog.process.wait().unwrap().success());
    end(child);
}

#[test]
fn a_deadline_that_passed_before_the_command_began_counts() {
    let child = victim("sleep 1000");
    let mut dog = Watchdog::start("60000");
    dog.tell(&format!("deadline - {}", moment(Duration::ZERO)));
    dog.tell(&group(&child));
    assert_eq!(signal_of(child), KILL);
}

#[test]
fn done_spares_the_command_and_no_command_is_no_matter() {
    let mut child = victim("sleep 1000");
    let mut dog = Watchdog::start("0");
    dog.tell(&group(&child));
    dog.tell("done");
    assert!(dog.process.wait().unwrap().success());
    assert!(child.try_wait().unwrap().is_none());
    end(child);

    let Watchdog { mut process, pipe } = Watchdog::start("0");
    drop(pipe);
    process.wait().unwrap();
}

#[test]
fn a_stopped_group_is_ended_too() {
    let child = victim("sleep 1000");
    let pid = Pid::from_raw(child.id() as i32);
    kill(pid, Signal::SIGSTOP).unwrap();
    let mut dog = Watchdog::start("60000");
    dog.tell(&group(&child));
    assert_eq!(dog.hang_up(child), TERM);
}

#[test]
fn it_is_deaf_itself_and_of_another_session() {
    let child = victim("sleep 1000");
    let mut dog = Watchdog::start("60000");
    dog.tell(&group(&child));
    dog.wait_until_up();
    let pid = dog.process.id();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGTSTP] {
        kill(Pid::from_raw(pid as i32), signal).unwrap();
    }
    // Still at work.
    assert_eq!(dog.hang_up(child), TERM);

    // As leasehold starts it: in a session of its own, without the lock's lifeline.
    let place = crate::common::Place::new();
    let script = "for p in /proc/[0-9]*; do
                    if tr '\\0' ' ' < $p/cmdline 2>/dev/null | grep -q '^leasehold watchdog' &&
                       grep -q \"^PPid:.$PPID$\" $p/status; then
                      echo ${p#/proc/}; cut -d' ' -f6 $p/stat; ls -l $p/fd
                    fi
                  done";
    let output = place.output(&["run", "x", "--", "sh", "-c", script]);
    let said = String::from_utf8(output.stdout).unwrap();
    let mut lines = said.lines();
    let (pid, session) = (lines.next().unwrap(), lines.next().unwrap());
    assert_eq!(pid, session, "{said}");
    assert!(!said.contains(&*place.path("").to_string_lossy()), "no lifeline: {said}");
}

/// `leasehold run` on a store with leases.
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

#[cfg(feature = "sqlite")]
#[test]
fn s09_a_stopped_leasehold_loses_its_command_before_its_lease() {
    // So long that two seconds of it are left when the command is killed.
    let lease = Duration::from_secs(20);
    let place = crate::common::Place::new();
    let (mut running, pid) = leased(&place, "20s", "trap '' TERM; while :; do sleep 0.02; done");
    // While it is renewed, nothing happens for longer than a lease.
    std::thread::sleep(lease + lease / 8);
    assert!(runs(pid));
    running.signal(Signal::SIGSTOP);
    let stopped = Instant::now();
    eventually("it is killed", || !runs(pid));
    // The last renewal was sent before the stop, so a lease from the stop is over later than it.
    assert!(stopped.elapsed() < lease, "{:?}", stopped.elapsed());
    running.signal(Signal::SIGCONT);
    assert_eq!(running.code(), 74);
}

#[cfg(feature = "sqlite")]
#[test]
fn with_leases_too_the_command_dies_with_leasehold() {
    let place = crate::common::Place::new();
    let (mut running, pid) = leased(&place, "1h", "exec sleep 1000");
    running.signal(Signal::SIGKILL);
    running.child.wait().unwrap();
    eventually("it is ended", || !runs(pid));
}

#[test]
fn a_watchdog_that_was_killed_is_replaced() {
    let place = crate::common::Place::new();
    let mut holder =
        place.hold("x", "trap 'echo usr1' USR1; echo ready; while :; do sleep 0.02; done");
    let dogs = || -> Vec<i32> {
        crate::common::watchdogs_of(holder.pid().as_raw()).into_iter().map(|(pid, _)| pid).collect()
    };
    let first = dogs();
    assert_eq!(first.len(), 1);
    kill(Pid::from_raw(first[0]), Signal::SIGKILL).unwrap();
    eventually("another stands by", || dogs().first().is_some_and(|&pid| pid != first[0]));
    // It knows the group: leasehold dies, and the command with it.
    holder.signal(Signal::SIGKILL);
    holder.child.wait().unwrap();
    eventually("the lock is free", || place.code(&["run", "--try", "x", "--", "true"]) == 0);
    assert!(holder.line().is_empty(), "nobody writes any more");
}

/// A pipe that nobody reads and that is full.
fn full_pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    let (reader, writer) = std::io::pipe().unwrap();
    let set = |flags| fcntl(&writer, FcntlArg::F_SETFL(flags)).map(drop).unwrap();
    set(OFlag::O_NONBLOCK);
    while (&writer).write(&[0; 4096]).is_ok_and(|n| n > 0) {}
    while (&writer).write(&[0]).is_ok_and(|n| n > 0) {}
    set(OFlag::empty());
    (reader, writer)
}

#[test]
fn f27_a_stderr_that_nobody_reads_stops_no_watchdog() {
    for killed in [true, false] {
        let child = deaf();
        let pid = child.id() as i32;
        let (_unread, stderr) = full_pipe();
        let mut command = Command::new(LEASEHOLD);
        command.args(["watchdog", "--grace", "50"]).stdin(Stdio::piped()).stderr(stderr);
        let mut process = command.spawn().unwrap();
        let pipe = process.stdin.take().unwrap();
        let mut dog = Watchdog { process, pipe };
        dog.tell(&group(&child));
        // Killed, leasehold hangs up; stopped, it lets the deadline come.
        if killed {
            assert_eq!(dog.hang_up(child), KILL);
        } else {
            dog.tell(&format!("deadline - {}", moment(Duration::ZERO)));
            assert_eq!(signal_of(child), KILL);
            assert_eq!(dog.process.wait().unwrap().code(), ACTED);
        }
        assert!(!runs(pid));
    }
}

/// What a stderr that nobody reads would have kept it from.
#[test]
fn f27_it_says_what_it_did_to_the_command() {
    for (killed, said) in [(true, "leasehold was killed"), (false, "leasehold was paused")] {
        let child = deaf();
        let (mut stderr, theirs) = std::io::pipe().unwrap();
        let mut command = Command::new(LEASEHOLD);
        command.args(["watchdog", "--grace", "50"]).stdin(Stdio::piped()).stderr(theirs);
        let mut process = command.spawn().unwrap();
        drop(command);
        let pipe = process.stdin.take().unwrap();
        let mut dog = Watchdog { process, pipe };
        dog.tell(&group(&child));
        if killed {
            assert_eq!(dog.hang_up(child), KILL);
        } else {
            dog.tell(&format!("deadline - {}", moment(Duration::ZERO)));
            assert_eq!(signal_of(child), KILL);
            assert_eq!(dog.process.wait().unwrap().code(), ACTED);
        }
        let mut told = String::new();
        stderr.read_to_string(&mut told).unwrap();
        assert!(told.starts_with(&format!("leasehold: {said}")), "{told:?}");
    }
}

#[test]
fn f31_a_stopped_watchdog_does_not_keep_the_lock() {
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
