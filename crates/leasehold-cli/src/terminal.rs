//! The terminal: CMD is its foreground job, and stopping CMD stops us, as under a job-control shell.
//!
//! CMD has a process group of its own, so on a terminal it would be a background job: Ctrl-C would
//! miss it, and reading would stop it. So we do what a shell does, one level down:
//!
//! - *Handing over.* If we are in the foreground group, and stdin and stdout are both terminals,
//!   CMD's group becomes the foreground group before CMD's first instruction. If one of them is not
//!   (a pipeline, whose other members may need the terminal), only once CMD asks for it by being
//!   stopped with TTIN or TTOU; until then Ctrl-C reaches us and is passed on.
//! - *Stopping.* When CMD stops, we take the terminal back and stop our own group, so that the
//!   shell above sees the job stopped. When it continues us (`fg`, `bg`), we hand the terminal over
//!   again if it is ours, and continue CMD.
//! - *Nobody above.* If no shell could continue us (our group is orphaned, in POSIX's word), the
//!   kernel would not have stopped CMD in our group. We restore that: a TSTP is taken back, and who
//!   asks for a terminal that nobody can give gets HUP, as the kernel does to stopped orphans.
//! - *Ctrl-C of a script.* While CMD has the foreground, a script that called us misses Ctrl-C.
//!   If CMD died of INT then, we pass INT to our own group, and die of it too.
//!
//! A process outside the foreground group that calls tcsetpgrp is stopped with TTOU unless it has
//! blocked it, so each call here blocks it for its own thread.

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
    /// Whether CMD is to have it whenever we do.
    wanted: bool,
}

impl Terminal {
    /// Ours, if we have one.
    pub(crate) fn open() -> Option<Self> {
        let tty = File::options().read(true).write(true).open("/dev/tty").ok()?;
        Some(Self { tty, wanted: stdin().is_terminal() && stdout().is_terminal() })
    }

    fn is_foreground(&self, group: Pid) -> bool {
        tcgetpgrp(&self.tty) == Ok(group)
    }

    /// The terminal, if CMD is to start with it.
    pub(crate) fn for_child(&self) -> Option<File> {
        let now = self.wanted && self.is_foreground(getpgrp());
        now.then(|| self.tty.try_clone().ok()).flatten()
    }

    /// Takes the terminal back from CMD; tells whether CMD had it.
    pub(crate) fn take_back(&self, from: Pid) -> bool {
        let had = self.is_foreground(from);
        if had {
            hand_over(&self.tty, getpgrp());
        }
        had
    }

    /// The same from a child that did not get as far as being CMD.
    pub(crate) fn take_back_from_the_dead(&self) {
        let dead = |group| !signals::is_alive(group);
        if tcgetpgrp(&self.tty).is_ok_and(dead) {
            hand_over(&self.tty, getpgrp());
        }
    }

    /// CMD was stopped by `signal`: does what a shell's child would do. Returns once both run, or
    /// CMD is to stay stopped.
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
            // Somebody stopped CMD alone, on purpose, and will continue it.
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

/// What became another user's is that user's to stop and to continue.
fn signal_ours(group: Pid, signal: Signal) {
    let _ = signals::send(group, signal as i32);
}

/// Makes `group` the terminal's foreground group. Only system calls: also called between fork and
/// exec.
pub(crate) fn hand_over(tty: impl AsFd, group: Pid) {
    let mut ttou = SigSet::empty();
    ttou.add(Signal::SIGTTOU);
    let Ok(before) = ttou.thread_swap_mask(SigmaskHow::SIG_BLOCK) else { return };
    // A terminal that has hung up has no foreground any more.
    let _ = tcsetpgrp(tty, group);
    let _ = before.thread_set_mask();
}

/// Stops our process group and returns when we are continued.
pub(crate) fn stop_our_group() {
    let tstp = Signal::SIGTSTP;
    // The others first, and our own copy of that signal is thrown away; then ourselves, by a signal
    // to this very thread, which is delivered before `raise` returns. So we cannot run on into the
    // resuming half before the stop has taken effect.
    let Ok(before) = signals::set(tstp, SigHandler::SigIgn) else { return };
    let _ = killpg(Pid::from_raw(0), tstp);
    let _ = signals::set(tstp, SigHandler::SigDfl);
    let _ = raise(tstp);
    signals::restore(tstp, &before);
}

/// Whether no member's parent is in another group of the same session: nobody to continue it.
fn is_orphaned(group: Pid) -> bool {
    let above = proc::all().filter(|p| p.group() == group.as_raw()).any(|member| {
        let parent = proc::Stat::of(member.parent());
        parent.is_some_and(|p| p.group() != member.group() && p.session() == member.session())
    });
    !above
}

/// CMD, in the foreground, died of Ctrl-C: so does the job that we are part of.
pub(crate) fn interrupt_our_group() {
    let int = Signal::SIGINT;
    let _ = signals::set(int, SigHandler::SigIgn);
    let _ = killpg(Pid::from_raw(0), int);
    signals::die_of(int as i32);
}
