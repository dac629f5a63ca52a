//! Signals: which ones are forwarded to CMD, and how leasehold itself ends by a signal.
//!
//! *Forwarded* are all signals that are sent on purpose: HUP, INT, QUIT, TERM, USR1, USR2, ALRM,
//! WINCH, CONT, TSTP, PWR and the real-time signals. *Not forwarded* are signals that the kernel
//! raises for an action of the process itself (PIPE, TTIN, TTOU, XCPU, XFSZ, SEGV, …). They would
//! concern leasehold and not CMD. KILL and STOP cannot be caught. The [watchdog](crate::watchdog)
//! acts if they kill or stop leasehold.
//!
//! Signals that were ignored when leasehold was started stay ignored, here and in CMD. So `nohup`
//! works.
//!
//! Before CMD runs, the signals that end a program end the wait. leasehold leaves the queue first,
//! and then dies of the same signal, so that the caller sees what happened.

use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, raise, sigaction};
use nix::unistd::Pid;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::orphans;

/// The signals that end a program by default.
const ENDING: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];
/// The other signals that are passed on to the command.
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
    /// Starts to catch the signals that would end this process while it waits.
    pub(crate) fn while_waiting() -> std::io::Result<Self> {
        let (catcher, arrived) = mpsc::unbounded_channel();
        let ignored = ignored_from_the_start();
        let children = signal(SignalKind::child())?;
        let (catches_all, told_to_end) = (false, false);
        let signals = Self { arrived, catcher, ignored, catches_all, told_to_end, children };
        ENDING.iter().try_for_each(|&s| signals.catch(s as i32))?;
        Ok(signals)
    }

    /// Starts to catch all signals that are forwarded.
    pub(crate) fn all(&mut self) -> std::io::Result<()> {
        if std::mem::replace(&mut self.catches_all, true) {
            return Ok(());
        }
        OTHERS.iter().try_for_each(|&s| self.catch(s as i32))?;
        (libc::SIGRTMIN()..=libc::SIGRTMAX()).try_for_each(|s| self.catch(s))
    }

    /// Waits for the next signal. Call this only while no child that this process started is
    /// running, because all children that end in the meantime are reaped as orphans.
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub(crate) async fn next_while_idle(&mut self) -> i32 {
        loop {
            orphans::reap(&[]);
            tokio::select! {
                number = self.arrived.recv() => return self.note(number).await,
                _ = self.children.recv() => {}
            }
        }
    }

    /// Waits for the next signal that ends a program. Call this only while CMD does not run,
    /// because all children that end meanwhile are reaped as orphans. Of the other signals, only
    /// TSTP has an effect: it stops this process.
    ///
    /// Cancel safe: dropping the future changes nothing.
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

    /// Restores the default action of the signals that end a program.
    #[cfg(feature = "top")]
    pub(crate) fn let_go(&self) {
        for signal in ENDING {
            if self.ignored & (1 << (signal as i32 - 1)) == 0 {
                let _ = set(signal, SigHandler::SigDfl);
            }
        }
    }

    /// Returns whether INT, QUIT or TERM has arrived.
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

    /// Waits for the next signal.
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub(crate) async fn next(&mut self) -> i32 {
        let number = self.arrived.recv().await;
        self.note(number).await
    }

    /// Returns the next signal, if one has arrived.
    pub(crate) async fn arrived(&mut self) -> Option<i32> {
        // Lets the tasks that catch signals run.
        tokio::task::yield_now().await;
        match self.arrived.try_recv() {
            Ok(number) => Some(self.note(Some(number)).await),
            Err(_) => None,
        }
    }

    async fn note(&mut self, number: Option<i32>) -> i32 {
        match number {
            Some(number) => {
                // HUP is excluded, because a program may reload its settings on it.
                self.told_to_end |= ENDING[1..].iter().any(|&s| s as i32 == number);
                number
            }
            // `self` keeps a sender, so the channel never closes.
            None => std::future::pending().await,
        }
    }
}

/// Returns the signals that were ignored when this process was started, as a bit mask.
fn ignored_from_the_start() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|m| u64::from_str_radix(m.trim(), 16).ok()).unwrap_or(0)
}

/// Sends `number` to every process of the group that this process may signal. An empty group is not
/// an error. If all its processes run as another user, this fails with EPERM.
pub(crate) fn send(group: Pid, number: i32) -> nix::Result<()> {
    // SAFETY: `killpg` takes two numbers and does not access this process's memory. (nix's own
    // wrapper does not support real-time signals.)
    match Errno::result(unsafe { libc::killpg(group.as_raw(), number) }) {
        Ok(_) | Err(Errno::ESRCH) => Ok(()),
        Err(refused) => Err(refused),
    }
}

/// Returns whether the group has processes, including those of other users.
pub(crate) fn is_alive(group: Pid) -> bool {
    !matches!(nix::sys::signal::killpg(group, None), Err(Errno::ESRCH))
}

/// Returns whether the group now runs as another user, so that this process may not signal any of
/// its processes.
pub(crate) fn is_anothers(group: Pid) -> bool {
    nix::sys::signal::killpg(group, None) == Err(Errno::EPERM)
}

/// Sets the default action for `signal`, or ignores it. Returns the previous action.
pub(crate) fn set(signal: Signal, to: SigHandler) -> nix::Result<SigAction> {
    debug_assert!(matches!(to, SigHandler::SigDfl | SigHandler::SigIgn));
    let action = SigAction::new(to, SaFlags::empty(), SigSet::empty());
    // SAFETY: Neither the default action nor ignoring runs code of this program.
    unsafe { sigaction(signal, &action) }
}

/// Restores what [`set`] returned.
pub(crate) fn restore(signal: Signal, before: &SigAction) {
    // SAFETY: That handler was installed before, so it is valid.
    let _ = unsafe { sigaction(signal, before) };
}

/// Makes the signals that end a program end this one even as the first process of a PID namespace.
/// There, as in a container, the kernel ignores them by default. A handler that is installed later
/// replaces the one that this function installs.
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
    // SAFETY: The call ends the process without running any of its code.
    unsafe { libc::_exit(128 + number) }
}

/// Returns the signal's name, such as SIGTERM. Real-time signals have only a number.
pub(crate) fn name(number: i32) -> String {
    Signal::try_from(number)
        .map_or_else(|_| format!("signal {number}"), |signal| signal.to_string())
}

/// Ends this process by the signal, as if the signal had not been caught.
pub(crate) fn die_of(number: i32) -> u8 {
    if let Ok(signal) = Signal::try_from(number) {
        let _ = set(signal, SigHandler::SigDfl);
        let _ = raise(signal);
    }
    // This is reached only for a signal that does not end a program.
    u8::try_from(128 + number).unwrap_or(u8::MAX)
}
