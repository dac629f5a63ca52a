//! The terminal: CMD is its foreground job, and stopping CMD stops leasehold, as under a
//! job-control shell.
//!
//! CMD has a process group of its own, so on a terminal it would be a background job. Ctrl-C would
//! not reach it, and reading would stop it. So leasehold does what a shell does, one level down:
//!
//! - *Handing over.* If leasehold is in the foreground group, and stdin and stdout are both
//!   terminals, CMD's group becomes the foreground group before CMD's first instruction. If one of
//!   them is not a terminal, this is a pipeline, whose other members may need the terminal. Then
//!   CMD gets the terminal only when TTIN or TTOU stops it. Until then Ctrl-C reaches leasehold and
//!   is forwarded.
//! - *Stopping.* When CMD stops, leasehold takes the terminal back and stops its own group, so that
//!   the parent shell sees the job stopped. When the shell continues leasehold (`fg`, `bg`),
//!   leasehold continues CMD. If leasehold is in the foreground then, it gives CMD the terminal
//!   again.
//! - *No parent shell.* If no shell could continue leasehold (its group is orphaned, in the POSIX
//!   term), the kernel would not have stopped CMD in leasehold's group. leasehold restores that
//!   behavior. It undoes a TSTP. If CMD was stopped because it needs a terminal that no process can
//!   give it, CMD gets HUP, as stopped orphans do from the kernel.
//! - *Ctrl-C of a script.* While CMD is in the foreground, a script that called leasehold does not
//!   get Ctrl-C. If INT killed CMD then, leasehold sends INT to its own group, and dies of it too.
//!
//! A process outside the foreground group that calls tcsetpgrp is stopped with TTOU unless it has
//! blocked that signal. So [`hand_over`] blocks it in the calling thread during the call.

use std::fs::File;
use std::io::{IsTerminal, stdin, stdout};
use std::os::fd::AsFd;

use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, killpg, raise};
use nix::unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp};

use crate::{proc, signals};

/// The controlling terminal.
#[derive(Debug)]
pub(crate) struct Terminal {
    tty: File,
    /// Whether CMD gets the terminal whenever leasehold has it.
    wanted: bool,
}

impl Terminal {
    /// Opens the controlling terminal, if there is one.
    pub(crate) fn open() -> Option<Self> {
        let tty = File::options().read(true).write(true).open("/dev/tty").ok()?;
        Some(Self { tty, wanted: stdin().is_terminal() && stdout().is_terminal() })
    }

    fn is_foreground(&self, group: Pid) -> bool {
        tcgetpgrp(&self.tty) == Ok(group)
    }

    /// Returns the terminal, if CMD must start in the terminal's foreground group.
    pub(crate) fn for_child(&self) -> Option<File> {
        let now = self.wanted && self.is_foreground(getpgrp());
        now.then(|| self.tty.try_clone().ok()).flatten()
    }

    /// Takes the terminal back from CMD. Returns whether CMD had it.
    pub(crate) fn take_back(&self, from: Pid) -> bool {
        let had = self.is_foreground(from);
        if had {
            hand_over(&self.tty, getpgrp());
        }
        had
    }

    /// Takes the terminal back from a child that died before it became CMD.
    pub(crate) fn take_back_from_the_dead(&self) {
        let dead = |group| !signals::is_alive(group);
        if tcgetpgrp(&self.tty).is_ok_and(dead) {
            hand_over(&self.tty, getpgrp());
        }
    }

    /// Handles a stop of CMD by `signal`, as if CMD were a child of the shell. Returns once
    /// leasehold and CMD both run again, or if CMD must stay stopped.
    pub(crate) fn relay_stop(&mut self, group: Pid, signal: i32) {
        let signal = Signal::try_from(signal).unwrap_or(Signal::SIGSTOP);
        let asks = matches!(signal, Signal::SIGTTIN | Signal::SIGTTOU);
        if asks && self.is_foreground(getpgrp()) {
            self.wanted = true;
            return self.resume(group);
        }
        let orphaned = is_orphaned(getpgrp());
        let in_front = self.is_foreground(group) || self.is_foreground(getpgrp());
        match signal {
            // Another process stopped CMD alone, on purpose, and will continue it.
            Signal::SIGSTOP if orphaned || !in_front => return,
            _ if orphaned && asks => signal_ours(group, Signal::SIGHUP),
            _ if orphaned => {}
            _ => {
                self.take_back(group);
                stop_our_group();
                self.wanted |= asks;
            }
        }
        self.resume(group);
    }

    fn resume(&self, group: Pid) {
        if self.wanted && self.is_foreground(getpgrp()) {
            hand_over(&self.tty, group);
        }
        signal_ours(group, Signal::SIGCONT);
    }
}

/// Signals CMD's group. An error is ignored, because only the other user can stop and continue a
/// CMD that runs as another user.
fn signal_ours(group: Pid, signal: Signal) {
    let _ = signals::send(group, signal as i32);
}

/// Makes `group` the terminal's foreground group. It makes only system calls, so it may be called
/// between fork and exec.
pub(crate) fn hand_over(tty: impl AsFd, group: Pid) {
    let mut ttou = SigSet::empty();
    ttou.add(Signal::SIGTTOU);
    let Ok(before) = ttou.thread_swap_mask(SigmaskHow::SIG_BLOCK) else { return };
    // The error of a terminal that has hung up is ignored, because it has no foreground group.
    let _ = tcsetpgrp(tty, group);
    let _ = before.thread_set_mask();
}

/// Stops this process's group. Returns when it is continued.
pub(crate) fn stop_our_group() {
    let tstp = Signal::SIGTSTP;
    // The other processes are stopped first, and this process ignores its own copy of the signal.
    // Then this thread stops itself with a signal that is delivered before `raise` returns. So the
    // code that resumes CMD cannot run before the stop has taken effect.
    let Ok(before) = signals::set(tstp, SigHandler::SigIgn) else { return };
    let _ = killpg(Pid::from_raw(0), tstp);
    let _ = signals::set(tstp, SigHandler::SigDfl);
    let _ = raise(tstp);
    signals::restore(tstp, &before);
}

/// Returns whether no process can continue the group, because no member's parent is in another
/// group of the same session.
fn is_orphaned(group: Pid) -> bool {
    let above = proc::all().filter(|p| p.group() == group.as_raw()).any(|member| {
        let parent = proc::Stat::of(member.parent());
        parent.is_some_and(|p| p.group() != member.group() && p.session() == member.session())
    });
    !above
}

/// Sends SIGINT to this process's group, and ends this process with it. For when Ctrl-C killed CMD
/// in the foreground.
pub(crate) fn interrupt_our_group() {
    let int = Signal::SIGINT;
    let _ = signals::set(int, SigHandler::SigIgn);
    let _ = killpg(Pid::from_raw(0), int);
    signals::die_of(int as i32);
}
