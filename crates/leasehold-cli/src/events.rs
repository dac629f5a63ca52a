//! What happens, told on stderr: nothing (the default), plain lines (`-v`), or JSON lines
//! (`--json`); and on a terminal the one line about the queue while we wait.
//!
//! A thread of its own writes, since a reader that does not read would otherwise stop us, and
//! whoever is stopped renews nothing and reacts to nothing. stdout is CMD's alone.

use std::io::{IsTerminal, Write, stderr};
use std::sync::{Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use leasehold::kit::locked;
use serde::Serialize;

/// One thing that happened. Its JSON form is documented by its fields, and only grows.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// The store that is used.
    Store { store: String },
    /// We stand in the queue; `ahead` counts those before us, holders included.
    Waiting { name: String, ahead: usize },
    /// The lock is held.
    Held { name: String, token: u64, waited_seconds: f64 },
    /// A leasehold above us holds the lock: CMD runs under that hold.
    Reentered { name: String, token: u64, pid: u32 },
    /// CMD runs.
    Started { pid: i32 },
    /// A signal that came to us was passed on.
    Forwarded { signal: i32 },
    /// CMD was stopped, and us with it; and both run again.
    Stopped { signal: i32 },
    /// The lease was not renewed in time, or max-hold is nearly over: CMD was sent SIGTERM, unless
    /// it runs as another user.
    AtRisk { name: String, remaining_seconds: f64, sent: bool },
    /// A renewal came in time after all.
    Recovered { name: String },
    /// The end of the lease was too near: CMD was sent SIGKILL, unless it runs as another user.
    Killed { name: String, sent: bool },
    /// The lock is not held any more, and CMD is killed.
    Lost { name: String, reason: String },
    /// CMD ended: with a code, or by a signal.
    Exited { code: Option<i32>, signal: Option<i32> },
    /// The lock was given back.
    Released { name: String, token: u64 },
    /// Something that people should know, though it changes no exit code.
    Warning { message: String },
    /// leasehold itself ends with this code. A silent one is no news to people.
    Failed {
        code: u8,
        message: String,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        silent: bool,
    },
}

impl Event {
    /// For people; in one line whatever the names hold.
    fn line(&self) -> String {
        let plain = |name: &str| name.to_owned();
        let sent = |signal, sent| match sent {
            true => format!("sent {signal}"),
            false => format!("{signal} was refused, since the command runs as another user"),
        };
        match self {
            Self::Store { store } => format!("store {}", store.escape_debug()),
            Self::Waiting { name, ahead } => format!("waiting for {name:?}, {ahead} before us"),
            Self::Held { name, token, waited_seconds } => {
                format!("held {name:?}, token {token}, after {waited_seconds:.3} s")
            }
            Self::Reentered { name, token, pid } => {
                format!(
                    "{name:?} is held above, by pid {pid}, token {token}: the command runs under it"
                )
            }
            Self::Started { pid } => format!("the command runs as process group {pid}"),
            Self::Forwarded { signal } => format!("passed on signal {signal}"),
            Self::Stopped { signal } => format!("the command was stopped by signal {signal}"),
            Self::AtRisk { name, remaining_seconds, sent: was_sent } => {
                let sent = sent("SIGTERM", *was_sent);
                format!("{name:?} is certain for only {remaining_seconds:.3} s more: {sent}")
            }
            Self::Recovered { name } => format!("{name:?} was renewed after all"),
            Self::Killed { name, sent: was_sent } => {
                format!("{name:?} is as good as lost: {}", sent("SIGKILL", *was_sent))
            }
            Self::Lost { name, reason } => format!("lost {name:?}: {reason}"),
            Self::Exited { code: Some(code), .. } => format!("the command exited with {code}"),
            Self::Exited { signal, .. } => {
                format!("the command died of signal {}", signal.unwrap_or_default())
            }
            Self::Released { name, token } => format!("released {name:?}, token {token}"),
            Self::Warning { message } | Self::Failed { message, .. } => plain(message),
        }
    }

    /// One JSON object, with the time in seconds since 1970.
    pub(crate) fn json(&self) -> String {
        timed(self)
    }
}

/// What happened, as one JSON object with the time in seconds since 1970.
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

/// How events are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    Quiet,
    Plain,
    Json,
}

impl Style {
    /// As `--json` and `--verbose` ask for it.
    pub(crate) fn of(json: bool, verbose: bool) -> Self {
        match (json, verbose) {
            (true, _) => Self::Json,
            (false, true) => Self::Plain,
            (false, false) => Self::Quiet,
        }
    }
}

#[derive(Debug)]
enum Said {
    Line(String),
    Progress(String),
}

/// Tells events.
#[derive(Debug)]
pub(crate) struct Events {
    style: Style,
    on_terminal: bool,
    writer: Mutex<Option<(mpsc::Sender<Said>, JoinHandle<()>)>>,
}

impl Events {
    pub(crate) fn new(style: Style) -> Self {
        let (sender, said) = mpsc::channel();
        let writer = std::thread::Builder::new().name("stderr".into()).spawn(move || write(said));
        Self {
            style,
            on_terminal: style != Style::Json && stderr().is_terminal(),
            writer: Mutex::new(writer.ok().map(|thread| (sender, thread))),
        }
    }

    /// Tells what happened, to those who asked.
    pub(crate) fn tell(&self, event: &Event) {
        match (self.style, event) {
            (Style::Quiet, Event::Failed { silent: true, .. }) => {}
            // The bare truth about a failure is told in any case.
            (Style::Quiet, Event::Warning { .. } | Event::Failed { .. }) | (Style::Plain, _) => {
                self.say(Said::Line(format!("leasehold: {}", event.line())));
            }
            (Style::Json, _) => self.say(Said::Line(event.json())),
            (Style::Quiet, _) => {}
        }
    }

    /// Whether a line about the queue would be seen.
    pub(crate) fn shows_progress(&self) -> bool {
        self.on_terminal
    }

    /// Replaces the line about the queue; an empty one removes it.
    pub(crate) fn progress(&self, line: String) {
        if self.on_terminal {
            self.say(Said::Progress(line));
        }
    }

    fn say(&self, what: Said) {
        if let Some((sender, _)) = &*locked(&self.writer) {
            let _ = sender.send(what);
        }
    }

    /// Returns when everything is written.
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

/// Writes until nobody says anything any more. A stderr that is gone is no reason to fail.
#[allow(clippy::needless_pass_by_value, reason = "the thread owns its end of the channel")]
fn write(said: mpsc::Receiver<Said>) {
    let mut shown = false;
    let mut erase =
        |now_shown: bool| if std::mem::replace(&mut shown, now_shown) { "\r\x1b[K" } else { "" };
    for what in said {
        let text = match what {
            Said::Line(line) => format!("{}{line}\n", erase(false)),
            Said::Progress(line) if line.is_empty() => erase(false).to_owned(),
            Said::Progress(line) => format!("{}{}", erase(true), crate::table::cut(&line, width())),
        };
        let mut stderr = stderr().lock();
        let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
    }
    let _ = stderr().write_all(erase(false).as_bytes());
}

/// How much fits on one line of the terminal.
fn width() -> usize {
    let size = rustix::termios::tcgetwinsize(stderr());
    let columns = size.map_or(80, |s| usize::from(s.ws_col));
    // One column less: some terminals wrap when the last is written.
    if columns == 0 { 79 } else { columns - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_stay_on_one_line() {
        let name = "a\u{2028}b\"".to_owned();
        let event = Event::Held { name, token: 7, waited_seconds: 0.5 };
        assert_eq!(event.line(), "held \"a\\u{2028}b\\\"\", token 7, after 0.500 s");
        let json = event.json();
        assert!(!json.contains('\n') && json.contains("\"event\":\"held\""), "{json}");
        let read: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&read["name"], &read["token"]), (&"a\u{2028}b\"".into(), &7.into()));
    }
}
