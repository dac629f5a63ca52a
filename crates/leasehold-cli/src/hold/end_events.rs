//! The events that end a hold.
//!
//! The owner of the hold decides what is watched. Without `--pid` the owner is the caller, and the
//! hold lives as long as stdin and stdout. With `--pid` the owner is the process that this option
//! names. Then no process has to read stdout, and the end of stdin has no effect once `stay` was
//! written there. Before `stay`, the end of stdin ends the hold. So if a caller dies before it has
//! handed the lock on, the lock does not stay held.
//!
//! With `--caller` the end of that process also ends the hold. The kernel may have no pidfd, or a
//! sandbox may refuse it. Then only the pipes end the hold, as without the option.

use std::fs::File;
use std::io::{self, BufRead, stdin};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::thread;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::args::HoldArgs;
use crate::control_socket::{ControlSocket, ReleaseRequest};
use crate::exit::{Failure, SYSTEM};
use crate::process::{Process, watch_caller};
use crate::reader;
use crate::signals::Signals;

/// The line that a caller writes to stdin to hand the hold on to the process of `--pid`.
pub(crate) const STAY: &str = "stay";

#[derive(Debug)]
pub(super) enum EndEvent {
    /// The caller requested the end.
    Requested,
    /// The owner of the hold is gone.
    Gone,
    /// `leasehold release` requested the end, and waits for the answer.
    ReleaseRequested(ReleaseRequest),
    Signal(i32),
}

impl EndEvent {
    /// Returns the signal by which this process must end, if any.
    pub(super) fn signal(&self) -> Option<i32> {
        if let Self::Signal(number) = self { Some(*number) } else { None }
    }
}

enum HoldCommand {
    End(EndEvent),
    Stay,
}

/// A receiver of the events that end the hold.
pub(super) struct EndEvents {
    commands: UnboundedReceiver<HoldCommand>,
    sender: UnboundedSender<HoldCommand>,
    signals: Signals,
    /// Whether `stay` was received, so that the caller sends nothing more.
    pub(super) stays: bool,
}

impl EndEvents {
    pub(super) fn new(args: &HoldArgs) -> Result<Self, Failure> {
        let refused = |e| Failure::system("cannot catch signals", e);
        let signals = Signals::while_waiting().map_err(refused)?;
        let (sender, commands) = unbounded_channel();
        let cannot = |e| Failure::system("cannot watch stdin and stdout", e);
        listen(sender.clone(), args.pid.is_some()).map_err(cannot)?;
        let (end_sender, gone) = (sender.clone(), || HoldCommand::End(EndEvent::Gone));
        if let Some(pid) = args.caller {
            let end_sender = sender.clone();
            match watch_caller(pid, move || _ = end_sender.send(gone())) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    return Err(is_gone("--caller", pid));
                }
                _ => {}
            }
        }
        match args.pid {
            None => reader::watch(move || _ = end_sender.send(gone())).map_err(cannot)?,
            Some(pid) => {
                let watched = Process::with_pid(pid)?.watch(move || _ = end_sender.send(gone()));
                watched.map_err(|e| match e.kind() {
                    io::ErrorKind::NotFound => is_gone("--pid", pid),
                    _ => Failure::system("cannot watch the process given by --pid", e),
                })?;
            }
        }
        Ok(Self { commands, sender, signals, stays: false })
    }

    /// Starts to listen for `leasehold release`, if possible.
    pub(super) fn listen_at(&self, socket: ControlSocket) {
        let sender = self.sender.clone();
        // An error is ignored, because without the socket `release` removes the claim from the
        // store.
        let end = |request| HoldCommand::End(EndEvent::ReleaseRequested(request));
        let _ = socket.open(move |request| _ = sender.send(end(request)));
    }

    /// Waits for the next event that ends the hold.
    ///
    /// Cancel safe: dropping the future changes nothing.
    pub(super) async fn next(&mut self) -> EndEvent {
        loop {
            tokio::select! {
                Some(command) = self.commands.recv() => match command {
                    HoldCommand::End(end) => return end,
                    HoldCommand::Stay => self.stays = true,
                },
                number = self.signals.next() => return EndEvent::Signal(number),
            }
        }
    }

    pub(super) async fn gone(&mut self) {
        while matches!(self.next().await, EndEvent::Requested) {}
    }
}

/// Returns the failure for a process that exited before the lock was requested. `option` is the
/// option that names the process.
fn is_gone(option: &str, pid: i32) -> Failure {
    Failure::new(SYSTEM, format!("{option} {pid}: the process is gone; the lock was not taken"))
}

/// Reads commands from stdin, if stdin is a pipe or a socket.
fn listen(sender: UnboundedSender<HoldCommand>, may_stay: bool) -> io::Result<()> {
    let kind = File::from(stdin().as_fd().try_clone_to_owned()?).metadata()?.file_type();
    if !kind.is_fifo() && !kind.is_socket() {
        return Ok(());
    }
    let read = move || {
        for line in stdin().lock().split(b'\n').map_while(Result::ok) {
            match line.trim_ascii() {
                b"release" => break,
                word if may_stay && word == STAY.as_bytes() => {
                    let _ = sender.send(HoldCommand::Stay);
                    return;
                }
                // Other lines do not request the end.
                _ => {}
            }
        }
        let _ = sender.send(HoldCommand::End(EndEvent::Requested));
    };
    thread::Builder::new().name("stdin".into()).spawn(read).map(drop)
}
