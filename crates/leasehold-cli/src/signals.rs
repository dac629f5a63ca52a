//! Signals: which are passed on, and how leasehold itself ends by one.
//!
//! *Passed on* is every signal that somebody sends on purpose: HUP, INT, QUIT, TERM, USR1, USR2,
//! ALRM, WINCH, CONT, TSTP, PWR and the real-time signals. Not passed on are those that the kernel
//! raises for what a process does itself (PIPE, TTIN, TTOU, XCPU, XFSZ, SEGV, …): they would be
//! about leasehold and not about CMD. KILL and STOP cannot be caught; the
//! [watchdog](crate::watchdog) is there for them.
//!
//! What was ignored when we were started stays ignored, here and in CMD: `nohup` works.
//!
//! Before CMD runs, the signals that end a program end our waiting: the place in the queue is given
//! up first, and then we die of that very signal, so that the caller sees what happened.

use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, raise, sigaction};
use nix::unistd::Pid;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::orphans;

/// Those that end a program that does nothing about them.
const ENDING: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];
const OTHERS: [Signal; 7] = [
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGALRM,
    Signal::SIGWINCH,
    Signal::SIGCONT,
    Signal::SIGTSTP,
    Signal::SIGPWR,
];

/// The signals that arrive, by number.
#[derive(Debug)]
pub(crate) struct Signals {
    arrived: mpsc::UnboundedReceiver<i32>,
    catcher: mpsc::UnboundedSender<i32>,
    ignored: u64,
    catches_all: bool,
    told_to_end: bool,
    children: tokio::signal::unix::Signal,
}

impl Signals {
    /// Catches what would end us while we wait.
    pub(crate) fn while_waiting() -> std::io::Result<Self> {
        let (catcher, arrived) = mpsc::unbounded_channel();
        let ignored = ignored_from_the_start();
        let children = signal(SignalKind::child())?;
        let (catches_all, told_to_end) = (false, false);
        let signals = Self { arrived, catcher, ignored, catches_all, told_to_end, children };
        ENDING.iter().try_for_each(|&s| signals.catch(s as i32))?;
        Ok(signals)
    }

    /// From now on catches everything that is passed on.
    pub(crate) fn all(&mut self) -> std::io::Result<()> {
        if std::mem::replace(&mut self.catches_all, true) {
            return Ok(());
        }
        OTHERS.iter().try_for_each(|&s| self.catch(s as i32))?;
        (libc::SIGRTMIN()..=libc::SIGRTMAX()).try_for_each(|s| self.catch(s))
    }

    /// The next one while no process of ours runs: all that end meanwhile are orphans, and are
    /// reaped. Cancel safe.
    pub(crate) async fn next_while_idle(&mut self) -> i32 {
        loop {
            orphans::reap(&[]);
            tokio::select! {
                number = self.arrived.recv() => return self.note(number).await,
                _ = self.children.recv() => {}
            }
        }
    }

    /// The next one that ends a program, while no process of ours runs. Of the others, which are
    /// caught for the sake of a CMD that does not run now, the one that stops a job stops us.
    /// Cancel safe.
    pub(crate) async fn next_ending(&mut self) -> i32 {
        loop {
            let number = self.next_while_idle().await;
            if ENDING.iter().any(|&s| s as i32 == number) {
                return number;
            }
            if number == Signal::SIGTSTP as i32 {
                let _ = raise(Signal::SIGSTOP);
            }
        }
    }

    /// From now on what ends a program ends us at once.
    #[cfg(feature = "top")]
    pub(crate) fn let_go(&self) {
        for signal in ENDING {
            if self.ignored & (1 << (signal as i32 - 1)) == 0 {
                let _ = set(signal, SigHandler::SigDfl);
            }
        }
    }

    /// Whether INT, QUIT or TERM has come.
    pub(crate) fn told_to_end(&self) -> bool {
        self.told_to_end
    }

    fn catch(&self, number: i32) -> std::io::Result<()> {
        if self.ignored & (1 << (number - 1)) != 0 {
            return Ok(());
        }
        let mut stream = signal(SignalKind::from_raw(number))?;
        let catcher = self.catcher.clone();
        tokio::spawn(async move {
            while stream.recv().await.is_some() && catcher.send(number).is_ok() {}
        });
        Ok(())
    }

    /// The next one. Cancel safe.
    pub(crate) async fn next(&mut self) -> i32 {
        let number = self.arrived.recv().await;
        self.note(number).await
    }

    async fn note(&mut self, number: Option<i32>) -> i32 {
        match number {
            Some(number) => {
                // A program that is hung up on may read its settings again.
                self.told_to_end |= ENDING[1..].iter().any(|&s| s as i32 == number);
                number
            }
            // We keep a sender ourselves.
            None => std::future::pending().await,
        }
    }
}

/// The signals that this process was started with as ignored, as a bit mask.
fn ignored_from_the_start() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|m| u64::from_str_radix(m.trim(), 16).ok()).unwrap_or(0)
}

/// Sends `number` to every process of the group that we may signal. One that is empty already is no
/// error; one of which every process is another user's is (EPERM).
pub(crate) fn send(group: Pid, number: i32) -> nix::Result<()> {
    // SAFETY: killpg takes two numbers and touches no memory of ours. (nix's own has no name for
    // the real-time signals.)
    match Errno::result(unsafe { libc::killpg(group.as_raw(), number) }) {
        Ok(_) | Err(Errno::ESRCH) => Ok(()),
        Err(refused) => Err(refused),
    }
}

/// Whether any process of the group is left, be it another user's.
pub(crate) fn is_alive(group: Pid) -> bool {
    !matches!(nix::sys::signal::killpg(group, None), Err(Errno::ESRCH))
}

/// Whether the group has become another user's: we may signal none of it.
pub(crate) fn is_anothers(group: Pid) -> bool {
    nix::sys::signal::killpg(group, None) == Err(Errno::EPERM)
}

/// Does with `signal` what the system does by default, or ignores it. Gives what was set before.
pub(crate) fn set(signal: Signal, to: SigHandler) -> nix::Result<SigAction> {
    debug_assert!(matches!(to, SigHandler::SigDfl | SigHandler::SigIgn));
    let action = SigAction::new(to, SaFlags::empty(), SigSet::empty());
    // SAFETY: neither the default nor ignoring runs code of ours.
    unsafe { sigaction(signal, &action) }
}

/// Puts back what [`set`] gave.
pub(crate) fn restore(signal: Signal, before: &SigAction) {
    // SAFETY: that handler was installed until now by whoever wrote it.
    let _ = unsafe { sigaction(signal, before) };
}

/// Lets the signals that end a program end this one as the first process of a PID namespace, too.
/// There, as in a container, the kernel ignores them by default. A handler that is installed later
/// replaces this one.
pub(crate) fn end_even_as_first_process() {
    if std::process::id() != 1 {
        return;
    }
    let ignored = ignored_from_the_start();
    for signal in ENDING.into_iter().filter(|&s| ignored & (1 << (s as i32 - 1)) == 0) {
        let action = SigAction::new(SigHandler::Handler(end), SaFlags::empty(), SigSet::empty());
        // SAFETY: `end` makes one system call.
        let _ = unsafe { sigaction(signal, &action) };
    }
}

extern "C" fn end(number: i32) {
    // SAFETY: ends the process, without running any code of it.
    unsafe { libc::_exit(128 + number) }
}

/// The signal's name, such as SIGTERM. Real-time signals have only a number.
pub(crate) fn name(number: i32) -> String {
    Signal::try_from(number)
        .map_or_else(|_| format!("signal {number}"), |signal| signal.to_string())
}

/// Ends this process by the signal, as it would have ended had we not caught it.
pub(crate) fn die_of(number: i32) -> u8 {
    if let Ok(signal) = Signal::try_from(number) {
        let _ = set(signal, SigHandler::SigDfl);
        let _ = raise(signal);
    }
    // Only for a signal that does not end a program after all.
    u8::try_from(128 + number).unwrap_or(u8::MAX)
}
