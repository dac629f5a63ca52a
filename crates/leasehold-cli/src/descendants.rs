//! Finds, terminates and kills the processes of a command, whichever process group they are in.
//!
//! CMD's process group does not contain all of them. `timeout`, `setsid`, `su -c`, GNU parallel and
//! a shell's `set -m` put what they start into another group or session. Parents may also end
//! before their children do.
//!
//! # Which processes are found
//! leasehold is a child subreaper, so an orphan among CMD's descendants becomes leasehold's child.
//! While leasehold lives, even if it is paused, all of them are its descendants. The following
//! processes belong to the command, with all their descendants:
//! - the members of CMD's group;
//! - the children of leasehold, if it had no children when it started CMD and is not the first
//!   process of its PID namespace. Otherwise orphans of other programs may be among its children,
//!   and only children with its [mark](crate::mark) in their environment belong to the command;
//! - after leasehold's death, every process with its mark;
//! - every process that was found to belong to the command before, identified by pid and start
//!   time.
//!
//! Processes that leasehold itself started (the watchdog, `--on-lost`) do not belong to the
//! command, nor do processes started with `LEASEHOLD_RUN=detached`. A `leasehold hold` does not
//! belong to it either, because it does no work and releases its lock when its program ends.
//!
//! # Why no process is missed, and no other process is signaled
//! - *Forks.* A process may fork while /proc is read. Its parent is killed then, and a dead process
//!   cannot fork. Therefore the scan is repeated until it finds no live process. Each orphan is a
//!   child of leasehold or has the mark.
//! - *Reused pids.* A signal is sent through a pidfd that was opened before the start time was
//!   compared. So it reaches the process that was found, or none.
//! - *A dead group.* Once a scan found no member of CMD's group, its number may be reused, so it is
//!   not used again.
//!
//! If /proc belongs to another PID namespace, its numbers denote other processes. Then only the
//! group is signaled.
//!
//! After leasehold's own death, an orphan that cleared its environment is not found. Two kinds of
//! processes cannot be ended and are named in the message. They run as another user, or the kernel
//! cannot end them, for example because they wait for a file server.

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::fmt;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::unistd::Pid;
use rustix::io::Errno;
use rustix::process::{PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use crate::mark::{DETACHED, Mark, RUN};
use crate::proc::{self, Stat};
use crate::signals;

/// The name of a watchdog process.
pub(crate) const WATCHDOG: &CStr = c"lh-watchdog";
/// The first and the longest pause between two scans.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(50)];

/// The processes of one command.
#[derive(Debug)]
pub(crate) struct Descendants {
    /// The mark of the run. Without a mark, only the group and its descendants are found.
    mark: Option<Mark>,
    /// CMD's group, until a scan found it empty.
    group: Option<i32>,
    /// Start times by pid of the processes that the last scan found.
    known: HashMap<i32, u64>,
    /// Whether leasehold is dead or about to exit.
    is_orphaned: bool,
    /// Children of leasehold that do not belong to CMD, by pid and start time.
    spared: Vec<(i32, u64)>,
}

/// The processes that could not be ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Survivors(Vec<(i32, String)>);

impl Descendants {
    pub(crate) fn new(mark: Option<Mark>, group: Pid) -> Self {
        let group = Some(group.as_raw());
        Self { mark, group, known: HashMap::new(), is_orphaned: false, spared: Vec::new() }
    }

    /// Creates the set for a leasehold that has closed its files, and therefore no longer runs. It
    /// may still be visible in /proc until its parent waits for it, or its children may not have
    /// been given another parent yet.
    pub(crate) fn orphaned(mark: Option<Mark>, group: Pid) -> Self {
        Self { is_orphaned: true, ..Self::new(mark, group) }
    }

    /// Excludes a child of leasehold that was just started and does not belong to CMD.
    pub(crate) fn spare(&mut self, pid: i32) {
        self.spared.extend(Stat::of(pid).map(|stat| (pid, stat.started())));
    }

    /// Returns whether a process of the command is alive.
    pub(crate) fn is_any_left(&mut self) -> bool {
        match proc::is_ours() {
            true => !self.look().is_empty(),
            false => self.group.is_some_and(|group| signals::is_alive(Pid::from_raw(group))),
        }
    }

    /// Scans /proc and returns the live processes of the command.
    fn look(&mut self) -> Vec<Stat> {
        if !proc::is_ours() {
            return Vec::new();
        }
        let all: HashMap<i32, Stat> = proc::all().map(|stat| (stat.pid(), stat)).collect();
        if !all.values().any(|stat| Some(stat.group()) == self.group) {
            self.group = None;
        }
        let mut below: HashMap<i32, Vec<i32>> = HashMap::new();
        for stat in all.values() {
            below.entry(stat.parent()).or_default().push(stat.pid());
        }
        let is_led = self.mark.is_some_and(|m| {
            all.get(&m.pid).is_some_and(|leasehold| leasehold.started() == m.started)
        });
        let mut open: Vec<i32> =
            all.values().filter(|s| self.is_root(s, is_led)).map(Stat::pid).collect();
        let (mut seen, mut members) = (HashSet::new(), Vec::new());
        while let Some(pid) = open.pop() {
            let Some(stat) = all.get(&pid) else { continue };
            let is_spared = self.spared.contains(&(pid, stat.started()));
            if !seen.insert(pid) || is_spared || is_detached(stat) {
                continue;
            }
            open.extend(below.get(&pid).into_iter().flatten());
            members.push(stat.clone());
        }
        members.retain(Stat::is_alive);
        self.known = members.iter().map(|stat| (stat.pid(), stat.started())).collect();
        members
    }

    /// Returns whether a process belongs to the command regardless of its ancestors. `is_led` is
    /// whether leasehold exists, so that it may have children.
    fn is_root(&self, stat: &Stat, is_led: bool) -> bool {
        let is_marked = |m: Mark| {
            stat.started() >= m.started
                && proc::variable(stat.pid(), RUN).is_some_and(|value| m.is_in(&value))
        };
        // leasehold has forked this process for its watchdog or --on-lost, and this process has not
        // called exec yet.
        let is_fork = |m: Mark| proc::words(stat.pid()) == proc::words(m.pid);
        Some(stat.group()) == self.group
            || self.known.get(&stat.pid()) == Some(&stat.started())
            || self.mark.is_some_and(|m| {
                is_led && stat.parent() == m.pid && (m.is_alone || is_marked(m)) && !is_fork(m)
                    || self.is_orphaned && is_marked(m)
            })
    }

    /// Returns whether all processes that the last scan found are gone.
    pub(crate) fn is_over(&self) -> bool {
        let is_there = |(pid, started): (&i32, &u64)| {
            Stat::of(*pid).is_some_and(|s| s.started() == *started && s.is_alive())
        };
        !self.known.iter().any(is_there)
    }

    /// Sends SIGTERM to the processes outside CMD's group, and SIGCONT so that stopped processes
    /// handle it. Processes started by a nested leasehold are skipped, because that leasehold
    /// forwards the signal.
    pub(crate) fn terminate(&mut self) {
        for stat in self.look() {
            let value = proc::variable(stat.pid(), RUN).unwrap_or_default();
            let is_nested = !value.is_empty() && self.mark.is_some_and(|m| !m.is_last_in(&value));
            if Some(stat.group()) != self.group && !is_nested {
                let _ = send(&stat, Signal::TERM);
                let _ = send(&stat, Signal::CONT);
            }
        }
    }

    /// Sends SIGKILL to all processes that a scan finds. Returns how many received it, and the
    /// processes that could not be signaled.
    pub(crate) fn kill(&mut self) -> (usize, Survivors) {
        if let Some(group) = self.group.filter(|_| !proc::is_ours()) {
            let _ = signals::send(Pid::from_raw(group), nix::libc::SIGKILL);
        }
        let mut survivors = Survivors::default();
        let mut killed = 0;
        for stat in self.look() {
            match send(&stat, Signal::KILL) {
                Sent::Yes => killed += 1,
                Sent::Gone => {}
                Sent::Refused => survivors.add(&stat),
            }
        }
        (killed, survivors)
    }

    /// Kills the command's processes until none remains, only processes that cannot be signaled
    /// remain, or `limit` has passed. Returns the remaining processes.
    pub(crate) fn kill_all(&mut self, limit: Duration) -> Survivors {
        let end = Instant::now() + limit;
        let [mut pause, longest] = PAUSES;
        loop {
            let (killed, survivors) = self.kill();
            if killed == 0 {
                return survivors;
            }
            if Instant::now() >= end {
                let mut left = Survivors::default();
                self.look().iter().for_each(|stat| left.add(stat));
                return left;
            }
            sleep(pause);
            pause = (pause * 2).min(longest);
        }
    }
}

impl Survivors {
    fn add(&mut self, stat: &Stat) {
        self.0.push((stat.pid(), stat.name().to_owned()));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Survivors {
    /// Writes one line that names only the first processes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMED: usize = 5;
        let named = self.0.iter().take(NAMED);
        let named: Vec<String> =
            named.map(|(pid, name)| format!("pid {pid} ({})", name.escape_debug())).collect();
        f.write_str(&named.join(", "))?;
        match self.0.len() - named.len() {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// Returns whether a process was started so that it outlives the command, or belongs to leasehold
/// itself.
fn is_detached(stat: &Stat) -> bool {
    let pid = stat.pid();
    let is_hold = || {
        let words = proc::words(pid);
        let program = words.first().map(|word| word.rsplit('/').next().unwrap_or_default());
        program == Some("leasehold") && words.get(1).is_some_and(|word| word == "hold")
    };
    // The name is needed because the environment of a process is unreadable if its binary is not
    // readable.
    WATCHDOG.to_str() == Ok(stat.name())
        || proc::variable(pid, RUN).is_some_and(|value| value == DETACHED)
        || is_hold()
}

enum Sent {
    Yes,
    Gone,
    Refused,
}

/// Sends the signal to exactly this process, never to one that reused its pid.
fn send(stat: &Stat, signal: Signal) -> Sent {
    match signal_through_pidfd(stat, signal) {
        Ok(()) => Sent::Yes,
        Err(Errno::SRCH) => Sent::Gone,
        Err(_) => Sent::Refused,
    }
}

fn signal_through_pidfd(stat: &Stat, signal: Signal) -> rustix::io::Result<()> {
    let pid = rustix::process::Pid::from_raw(stat.pid()).ok_or(Errno::SRCH)?;
    let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(Errno::SRCH) => return Err(Errno::SRCH),
        // In a sandbox or on an old kernel there may be no pidfd.
        pidfd => pidfd.ok(),
    };
    // The pidfd refers to the process that has the pid now. That is the process in `stat` if the
    // start times are equal.
    if Stat::of(stat.pid()).is_none_or(|now| now.started() != stat.started()) {
        return Err(Errno::SRCH);
    }
    match pidfd {
        Some(pidfd) => pidfd_send_signal(pidfd, signal),
        None => kill_process(pid, signal),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Starts `sh -c script` in a process group of its own, with this mark.
    fn command(script: &str, mark: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", script]).env(RUN, mark).process_group(0).stdout(Stdio::piped());
        command.spawn().unwrap()
    }

    fn group(child: &Child) -> Pid {
        Pid::from_raw(child.id() as i32)
    }

    /// Reads the line that the script prints once everything is started.
    fn read_line(child: &mut Child) -> String {
        let mut line = String::new();
        let out = child.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
        line.trim_end().to_owned()
    }

    #[test]
    fn orphan_outside_the_group_is_found_by_its_mark() {
        // This simulates the state after leasehold's death, because no process has this pid and
        // start time.
        let mark: Mark = format!("{}-0-{}-0-1", i32::MAX, crate::boottime::now()).parse().unwrap();
        let script = "(setsid sh -c 'echo $$; exec sleep 1000' &)";
        let mut child = command(script, &mark.to_string());
        let orphan: i32 = read_line(&mut child).parse().unwrap();
        child.wait().unwrap();
        let mut descendants = Descendants::orphaned(Some(mark), group(&child));
        assert!(descendants.look().iter().any(|stat| stat.pid() == orphan));
        assert_eq!(descendants.kill_all(Duration::from_secs(60)), Survivors::default());
        assert!(Stat::of(orphan).is_none_or(|stat| !stat.is_alive()));
    }

    #[test]
    fn detached_and_differently_marked_processes_are_spared() {
        let mark: Mark = format!("{}-0-{}-0-1", i32::MAX, crate::boottime::now()).parse().unwrap();
        let script = format!("LEASEHOLD_RUN={DETACHED} setsid sleep 1000 & echo $!; wait");
        let mut child = command(&script, &mark.to_string());
        let spared: i32 = read_line(&mut child).parse().unwrap();
        let mut others = command("echo ready; exec sleep 1000", "1-2-3-4-1");
        read_line(&mut others);
        let mut descendants = Descendants::orphaned(Some(mark), group(&child));
        while !proc::words(spared).contains(&"1000".to_owned()) {
            sleep(Duration::from_millis(5));
        }
        assert_eq!(descendants.kill_all(Duration::from_secs(60)), Survivors::default());
        child.wait().unwrap();
        for pid in [spared, others.id() as i32] {
            let stat = Stat::of(pid).unwrap();
            assert!(stat.is_alive(), "{stat:?}");
            assert!(matches!(send(&stat, Signal::KILL), Sent::Yes));
        }
        others.wait().unwrap();
    }

    #[test]
    fn survivors_are_named_in_one_line() {
        let survivors = Survivors((1..8).map(|pid| (pid, "a\nb".to_owned())).collect());
        let message = survivors.to_string();
        assert!(
            message.starts_with("pid 1 (a\\nb), pid 2") && message.ends_with(" and 2 more"),
            "{message}"
        );
    }
}
