//! Reports events on stderr: nothing (the default), plain lines (`-v`), or JSON lines
//! (`--json`). On a terminal, one line shows the queue during a wait.
//!
//! A separate thread writes. Otherwise a process that does not read stderr would block leasehold,
//! and the lease would expire. A failure is printed even without that thread. stdout belongs to
//! CMD.

use std::io::{IsTerminal, Write, stderr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold::store::kit::locked;
use serde::Serialize;

use crate::signals;
use crate::table::short;

/// An event. The fields of its JSON form are documented. New ones may be added.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// The store in use.
    Store { store: String },
    /// This client is in the queue. `ahead` counts the claims ahead of it, including holders.
    Waiting { name: String, ahead: usize },
    /// The lock was acquired.
    Held { name: String, token: u64, waited_seconds: f64 },
    /// An enclosing leasehold holds the lock, and CMD runs under that hold.
    Reentered { name: String, token: u64, pid: u32 },
    /// CMD was started.
    Started { pid: i32 },
    /// A signal was forwarded.
    Forwarded { signal: i32 },
    /// CMD was stopped, leasehold stopped too, and both were continued.
    Stopped { signal: i32 },
    /// The lease was not renewed in time, or max-hold is nearly over: CMD was sent SIGTERM, unless
    /// it runs as another user.
    AtRisk { name: String, remaining_seconds: f64, sent: bool },
    /// A renewal succeeded after all.
    Recovered { name: String },
    /// The lease is about to expire: CMD was sent SIGKILL, unless it runs as another user.
    Killed { name: String, sent: bool },
    /// The lock is lost, and CMD was killed.
    Lost { name: String, reason: String },
    /// CMD ended, with a code or by a signal.
    Exited { code: Option<i32>, signal: Option<i32> },
    /// The lock was released.
    Released { name: String, token: u64 },
    /// Something that users should know, though it changes no exit code.
    Warning { message: String },
    /// leasehold itself ends with this code. A silent failure is printed only with `-v` or
    /// `--json`.
    Failed {
        code: u8,
        message: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        silent: bool,
    },
}

impl Event {
    /// Returns the event in words, in one line whatever the names contain. Only a hint has a line
    /// of its own.
    pub(crate) fn line(&self) -> String {
        let sent = |signal, sent| match sent {
            true => format!("sent {signal} to the command"),
            false => format!("could not send {signal}, because the command runs as another user"),
        };
        let seconds = |s: &f64| short(Duration::try_from_secs_f64(*s).unwrap_or_default());
        match self {
            Self::Store { store } => format!("using store {}", store.escape_debug()),
            Self::Waiting { name, ahead } => {
                format!("waiting for {name:?} ({ahead} ahead in the queue)")
            }
            Self::Held { name, token, waited_seconds } => {
                format!("acquired {name:?} after {} (token {token})", seconds(waited_seconds))
            }
            Self::Reentered { name, token, pid } => format!(
                "{name:?} is already held by the enclosing leasehold run (pid {pid}, token {token}): \
                 running the command under that hold"
            ),
            Self::Started { pid } => format!("started the command (process group {pid})"),
            Self::Forwarded { signal } => {
                format!("forwarded {} to the command", signals::name(*signal))
            }
            Self::Stopped { signal } => {
                format!("the command was stopped by {}", signals::name(*signal))
            }
            Self::AtRisk { name, remaining_seconds, sent: was_sent } => {
                let left = seconds(remaining_seconds);
                format!("{name:?} is about to expire, {left} left: {}", sent("SIGTERM", *was_sent))
            }
            Self::Recovered { name } => format!("renewed {name:?} after all"),
            Self::Killed { name, sent: was_sent } => {
                format!("{name:?} is about to be lost: {}", sent("SIGKILL", *was_sent))
            }
            Self::Lost { name, reason } => format!("lost {name:?}: {reason}"),
            Self::Exited { code: Some(code), .. } => format!("the command exited with {code}"),
            Self::Exited { signal, .. } => {
                format!("the command was killed by {}", signals::name(signal.unwrap_or_default()))
            }
            Self::Released { name, token } => format!("released {name:?} (token {token})"),
            Self::Failed { message, hint: Some(hint), .. } => format!("{message}\nhint: {hint}"),
            Self::Warning { message } | Self::Failed { message, .. } => message.clone(),
        }
    }

    /// Returns the event as one JSON object, with the time in seconds since 1970.
    pub(crate) fn json(&self) -> String {
        timed(self)
    }
}

/// Returns an event as one JSON object, with the time in seconds since 1970.
pub(crate) fn timed(event: &impl Serialize) -> String {
    #[derive(Serialize)]
    struct Timed<'a, T> {
        time: f64,
        #[serde(flatten)]
        event: &'a T,
    }
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    serde_json::to_string(&Timed { time, event }).unwrap_or_default()
}

/// Whether `-v` was given.
static VERBOSE: AtomicBool = AtomicBool::new(false);

pub(crate) fn set_verbose(verbose: bool) {
    VERBOSE.store(verbose, Ordering::Relaxed);
}

/// Returns whether `-v` was given.
pub(crate) fn is_verbose() -> bool {
    VERBOSE.load(Ordering::Relaxed)
}

/// Prints the store in use, if `-v` was given. For commands that report nothing else.
pub(crate) fn note_store(store: &str) {
    if is_verbose() {
        note(&Event::Store { store: store.to_owned() }.line());
    }
}

/// Prints a line on stderr. For commands that report no events.
pub(crate) fn note(line: &str) {
    let _ = stderr().write_all(format!("leasehold: {line}\n").as_bytes());
}

/// The style in which events are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    Quiet,
    Plain,
    Json,
}

impl Style {
    /// Returns the style that `--json` and `--verbose` select.
    pub(crate) fn of(json: bool, verbose: bool) -> Self {
        match (json, verbose) {
            (true, _) => Self::Json,
            (false, true) => Self::Plain,
            (false, false) => Self::Quiet,
        }
    }
}

#[derive(Debug)]
enum Output {
    Line(String),
    Progress(String),
}

/// A printer of events.
#[derive(Debug)]
pub(crate) struct Events {
    style: Style,
    on_terminal: bool,
    writer: Mutex<Option<(mpsc::Sender<Output>, JoinHandle<()>)>>,
}

impl Events {
    pub(crate) fn new(style: Style) -> Self {
        let (sender, receiver) = mpsc::channel();
        let writer =
            std::thread::Builder::new().name("stderr".into()).spawn(move || write(receiver));
        Self {
            style,
            on_terminal: style != Style::Json && stderr().is_terminal(),
            writer: Mutex::new(writer.ok().map(|thread| (sender, thread))),
        }
    }

    /// Prints the event, if the style includes it.
    pub(crate) fn print(&self, event: &Event) {
        let line = match (self.style, event) {
            (Style::Quiet, Event::Failed { silent: true, .. }) => return,
            // A failure is always printed.
            (Style::Quiet, Event::Warning { .. } | Event::Failed { .. }) | (Style::Plain, _) => {
                format!("leasehold: {}", event.line())
            }
            (Style::Json, _) => event.json(),
            (Style::Quiet, _) => return,
        };
        // Without the thread, only a failure is printed. It is the last event, and no lock can
        // expire while this process waits for a reader of stderr. The thread is missing if the
        // system has no more threads, or after `finish`.
        let is_writing = locked(&self.writer).is_some();
        if is_writing {
            self.say(Output::Line(line));
        } else if matches!(event, Event::Failed { .. }) {
            let _ = stderr().write_all(format!("{line}\n").as_bytes());
        }
    }

    /// Returns whether a line about the queue is shown.
    pub(crate) fn shows_progress(&self) -> bool {
        self.on_terminal
    }

    /// Replaces the line about the queue; an empty one removes it.
    pub(crate) fn progress(&self, line: String) {
        if self.on_terminal {
            self.say(Output::Progress(line));
        }
    }

    fn say(&self, what: Output) {
        if let Some((sender, _)) = &*locked(&self.writer) {
            let _ = sender.send(what);
        }
    }

    /// Waits until everything is written.
    pub(crate) fn finish(&self) {
        let writer = locked(&self.writer).take();
        if let Some((sender, thread)) = writer {
            drop(sender);
            let _ = thread.join();
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Writes until all senders are gone. A closed stderr is not a failure.
#[allow(clippy::needless_pass_by_value, reason = "the thread owns its end of the channel")]
fn write(receiver: mpsc::Receiver<Output>) {
    let mut shown = false;
    let mut erase =
        |now_shown: bool| if std::mem::replace(&mut shown, now_shown) { "\r\x1b[K" } else { "" };
    for what in receiver {
        let text = match what {
            Output::Line(line) => format!("{}{line}\n", erase(false)),
            Output::Progress(line) if line.is_empty() => erase(false).to_owned(),
            Output::Progress(line) => {
                format!("{}{}", erase(true), crate::table::cut(&line, width()))
            }
        };
        let mut stderr = stderr().lock();
        let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
    }
    let _ = stderr().write_all(erase(false).as_bytes());
}

/// Returns the number of columns for one line on the terminal.
fn width() -> usize {
    let size = rustix::termios::tcgetwinsize(stderr());
    let columns = size.map_or(80, |s| usize::from(s.ws_col));
    // This is one column less, because some terminals wrap when the last one is written.
    if columns == 0 { 79 } else { columns - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_stay_on_one_line() {
        let name = "a\u{2028}b\"".to_owned();
        let event = Event::Held { name, token: 7, waited_seconds: 0.5 };
        assert_eq!(event.line(), "acquired \"a\\u{2028}b\\\"\" after 500ms (token 7)");
        let json = event.json();
        assert!(!json.contains('\n') && json.contains("\"event\":\"held\""), "{json}");
        let read: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&read["name"], &read["token"]), (&"a\u{2028}b\"".into(), &7.into()));
    }
}
