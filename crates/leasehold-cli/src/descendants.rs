//! The processes of a command, wherever they have gone: found, asked to end, and killed.
//!
//! CMD's process group is not all of it: `timeout`, `setsid`, `su -c`, GNU parallel and a shell's
//! `set -m` give what they start another group or session, and parents end before their children
//! do.
//!
//! # Which processes are found
//! leasehold is a child subreaper: an orphan among CMD's descendants becomes leasehold's child. So
//! as long as leasehold lives, be it paused, all of them are below it. These belong to the command,
//! with all that is below them:
//! - the members of CMD's group;
//! - the children of leasehold, if it had none when it started CMD and is not the first process of
//!   its PID namespace. If it had, or is, orphans of other programs may be among them: then those
//!   with our [mark](crate::mark) in their environment;
//! - after leasehold's death: every process with our mark;
//! - whatever was seen to belong before, by pid and start time.
//!
//! What leasehold itself started (the watchdog, `--on-lost`) and whatever was started with
//! `LEASEHOLD_RUN=detached` does not belong, nor does a `leasehold hold`: it does no work, and
//! releases when its program ends.
//!
//! # Why none is missed, and no other process is hit
//! - *Forks.* A process may fork while we read /proc. Its parent is killed then, and a
//!   dead process cannot fork. So we look again until a look finds no live process. Each orphan is a child
//!   of leasehold or has the mark.
//! - *Reused pids.* A signal is sent through a pidfd that was opened before the start time was
//!   compared. So it reaches the process that was seen, or none.
//! - *A dead group.* Once a look found no member of CMD's group, its number may be given to another
//!   one, and is not used again.
//!
//! Where /proc is of another PID namespace, its numbers are of other processes: then only the group
//! is signalled. Not found after leasehold's own death: an orphan that cleared its environment. Not
//! ended: another user's process, and one that the kernel cannot end, such as one that waits for a
//! file server. Both are named.

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

/// The name of a watchdog's process.
pub(crate) const WATCHDOG: &CStr = c"lh-watchdog";
/// The first and the longest pause between two looks.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(50)];

/// The processes of one command.
#[derive(Debug)]
pub(crate) struct Descendants {
    /// Without one, only the group and what is below it is found.
    mark: Option<Mark>,
    /// CMD's, until it was seen empty.
    group: Option<i32>,
    /// Start times by pid.
    known: HashMap<i32, u64>,
    /// Whether leasehold is dead or dying.
    is_orphaned: bool,
    /// Children of leasehold that are not CMD's, by pid and start time.
    spared: Vec<(i32, u64)>,
}

/// Processes that could not be ended, in words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Survivors(Vec<(i32, String)>);

impl Descendants {
    pub(crate) fn new(mark: Option<Mark>, group: Pid) -> Self {
        let group = Some(group.as_raw());
        Self { mark, group, known: HashMap::new(), is_orphaned: false, spared: Vec::new() }
    }

    /// Those of a leasehold that has closed its files, and so runs no more. It may still be seen: as
    /// long as its parent does not wait for it, or before its children have another parent.
    pub(crate) fn orphaned(mark: Option<Mark>, group: Pid) -> Self {
        Self { is_orphaned: true, ..Self::new(mark, group) }
    }

    /// This child of leasehold, which has just been started, is not CMD's.
    pub(crate) fn spare(&mut self, pid: i32) {
        self.spared.extend(Stat::of(pid).map(|stat| (pid, stat.started())));
    }

    /// Whether any is alive.
    pub(crate) fn is_any_left(&mut self) -> bool {
        match proc::is_ours() {
            true => !self.look().is_empty(),
            false => self.group.is_some_and(|group| signals::is_alive(Pid::from_raw(group))),
        }
    }

    /// Those that are alive now.
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

    /// Whether it belongs to the command without an ancestor that does. `is_led`: leasehold may have
    /// children.
    fn is_root(&self, stat: &Stat, is_led: bool) -> bool {
        let is_marked = |m: Mark| {
            stat.started() >= m.started
                && proc::variable(stat.pid(), RUN).is_some_and(|value| m.is_in(&value))
        };
        // What leasehold has forked to be its watchdog or --on-lost, and not executed yet.
        let is_fork = |m: Mark| proc::words(stat.pid()) == proc::words(m.pid);
        Some(stat.group()) == self.group
            || self.known.get(&stat.pid()) == Some(&stat.started())
            || self.mark.is_some_and(|m| {
                is_led && stat.parent() == m.pid && (m.is_alone || is_marked(m)) && !is_fork(m)
                    || self.is_orphaned && is_marked(m)
            })
    }

    /// Whether those that the last look found are all gone.
    pub(crate) fn is_over(&self) -> bool {
        let is_there = |(pid, started): (&i32, &u64)| {
            Stat::of(*pid).is_some_and(|s| s.started() == *started && s.is_alive())
        };
        !self.known.iter().any(is_there)
    }

    /// Sends SIGTERM to those outside CMD's group, and SIGCONT so that stopped ones get to it.
    /// Those below another leasehold are left to it: it forwards the signal.
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

    /// Sends SIGKILL to all that a look finds. Returns how many got it, and those that did not.
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

    /// Kills until none is left, or only those that may not be killed, for at most this time.
    /// Returns what is left.
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
    /// In one line, and not a long one.
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

/// Whether it was started so that it outlives the command, or belongs to a leasehold.
fn is_detached(stat: &Stat) -> bool {
    let pid = stat.pid();
    let is_hold = || {
        let words = proc::words(pid);
        let program = words.first().map(|word| word.rsplit('/').next().unwrap_or_default());
        program == Some("leasehold") && words.get(1).is_some_and(|word| word == "hold")
    };
    // Its environment cannot be read where the binary is not readable.
    WATCHDOG.to_str() == Ok(stat.name())
        || proc::variable(pid, RUN).is_some_and(|value| value == DETACHED)
        || is_hold()
}

enum Sent {
    Yes,
    Gone,
    Refused,
}

/// Sends it to this very process.
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
        // A sandbox or an old kernel has no pidfd.
        pidfd => pidfd.ok(),
    };
    // The pidfd is of the process that has the pid now: the same one, if it has the same start.
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

    /// `sh -c script` in a group of its own, with this mark.
    fn command(script: &str, mark: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", script]).env(RUN, mark).process_group(0).stdout(Stdio::piped());
        command.spawn().unwrap()
    }

    fn group(child: &Child) -> Pid {
        Pid::from_raw(child.id() as i32)
    }

    /// What is printed before all is started.
    fn read_line(child: &mut Child) -> String {
        let mut line = String::new();
        let out = child.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
        line.trim_end().to_owned()
    }

    #[test]
    fn what_left_the_group_and_is_an_orphan_is_killed_by_its_mark() {
        // As after the death of leasehold: no process has this pid and start.
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
    fn what_is_detached_and_what_has_another_mark_is_spared() {
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
        let said = survivors.to_string();
        assert!(
            said.starts_with("pid 1 (a\\nb), pid 2") && said.ends_with(" and 2 more"),
            "{said}"
        );
    }
}
