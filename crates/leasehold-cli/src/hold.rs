//! `leasehold hold`: a lock for a program in any language.
//!
//! It takes the lock, says on stdout what becomes of it, one line for each thing, and holds it for as long as
//! somebody is there who wants it held. So another program has a lock by starting this one, and a shell
//! by `exec {L}< <(leasehold hold NAME < /dev/null)`.
//!
//! # Nobody's death leaves it held
//! It gives the lock back and ends when
//! - stdin says `release`, or ends;
//! - nobody reads stdout any more: whoever started us is gone, however that came, and its pipes with it;
//! - a signal ends it.
//!
//! If *we* die, the caller reads the end of our stdout, which says that the lock is not certain any more. If
//! the lock is lost, that is the last line, and we end with 74.
//!
//! stdin is read where it is a pipe or a socket. A terminal is the shell's to read, and so is a file.
//!
//! A caller that does not read stops nobody: a thread of its own writes. We are told of nothing by the caller
//! while it works, so a caller that is stopped or hangs goes on holding: `--max-hold` bounds that.

use std::fs::File;
use std::io::{self, BufRead, Write, stdin, stdout};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use leasehold::{Guard, Leasehold, State};
use serde::Serialize;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::args::HoldArgs;
use crate::drive::drive;
use crate::events::timed;
use crate::exit::{self, Failure};
use crate::inherited;
use crate::progress::Ahead;
use crate::reader;
use crate::shell::Process;
use crate::signals::{self, Signals};
use crate::take::{CLOSE_TIMEOUT, Taking, connect_to_take};

/// What the caller is told. Its fields are what is documented, and only grow.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Told {
    /// It stands in the queue; `ahead` counts those before it, holders included.
    Waiting { name: String, ahead: usize },
    /// The lock is the caller's, for so long at least if it is not renewed; without a time, until it ends.
    Held { name: String, token: u64, sequencer: String, remaining_seconds: Option<f64> },
    /// It was not renewed in time, and is certain for so long only.
    AtRisk { name: String, remaining_seconds: f64 },
    /// It was renewed after all.
    Recovered { name: String, remaining_seconds: Option<f64> },
    /// It may be another's.
    Lost { name: String, reason: String },
    /// It was given back; or its lease is left to do it, where the store did not answer.
    Released { name: String, token: u64, answered: bool },
    /// It ends with this code, and holds nothing.
    Failed { code: u8, message: String },
}

impl Told {
    /// A word, and what belongs to it: for a shell's `read`.
    fn words(&self) -> String {
        let seconds = |left: &Option<f64>| left.map_or(String::new(), |left| format!(" {left:.3}"));
        match self {
            Self::Waiting { ahead, .. } => format!("waiting {ahead}"),
            Self::Held { token, sequencer, remaining_seconds, .. } => {
                format!("held {token} {sequencer}{}", seconds(remaining_seconds))
            }
            Self::AtRisk { remaining_seconds, .. } => format!("at_risk {remaining_seconds:.3}"),
            Self::Recovered { remaining_seconds, .. } => {
                format!("recovered{}", seconds(remaining_seconds))
            }
            Self::Lost { reason, .. } => format!("lost {reason}"),
            Self::Released { token, .. } => format!("released {token}"),
            Self::Failed { code, message } => format!("failed {code} {message}"),
        }
    }
}

/// Tells the caller, who may not be reading.
#[derive(Clone)]
struct Caller {
    lines: mpsc::Sender<String>,
    json: bool,
}

impl Caller {
    /// The thread that writes ends when there is nobody left who tells.
    fn new(json: bool) -> (Self, JoinHandle<()>) {
        let (lines, said) = mpsc::channel::<String>();
        let writer = thread::spawn(move || {
            for line in said {
                let mut stdout = stdout().lock();
                // Who is gone is noticed elsewhere.
                let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
            }
        });
        (Self { lines, json }, writer)
    }

    fn tell(&self, told: &Told) {
        let _ = self.lines.send(if self.json { timed(told) } else { told.words() });
    }
}

/// What ends a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The caller wants it so.
    Asked,
    /// There is no caller.
    Gone,
    Signal(i32),
}

/// Tells when the hold is to end.
struct Ends {
    told: UnboundedReceiver<End>,
    signals: Signals,
}

impl Ends {
    fn new() -> Result<Self, Failure> {
        let refused = |e| Failure::system("cannot catch signals", e);
        let signals = Signals::while_waiting().map_err(refused)?;
        let (tell, told) = unbounded_channel();
        let cannot = |e| Failure::system("cannot follow stdin and stdout", e);
        listen(tell.clone()).map_err(cannot)?;
        reader::watch(move || _ = tell.send(End::Gone)).map_err(cannot)?;
        Ok(Self { told, signals })
    }

    async fn next(&mut self) -> End {
        tokio::select! {
            end = self.told.recv() => match end {
                Some(end) => end,
                // Neither is to be listened to: a file, say.
                None => End::Signal(self.signals.next().await),
            },
            number = self.signals.next() => End::Signal(number),
        }
    }

    async fn reader_gone(&mut self) {
        while self.next().await == End::Asked {}
    }
}

/// Reads what the caller says, where it is ours to read.
fn listen(tell: UnboundedSender<End>) -> io::Result<()> {
    let kind = File::from(stdin().as_fd().try_clone_to_owned()?).metadata()?.file_type();
    if !kind.is_fifo() && !kind.is_socket() {
        return Ok(());
    }
    let read = move || {
        // A caller that speaks of other things is not asking for the end.
        let asked = |line: &Vec<u8>| line.trim_ascii() == b"release";
        let _ = stdin().lock().split(b'\n').map_while(Result::ok).find(asked);
        let _ = tell.send(End::Asked);
    };
    thread::Builder::new().name("stdin".into()).spawn(read).map(drop)
}

pub(crate) fn main(args: &HoldArgs) -> ExitCode {
    match drive(hold(args)) {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(number)) => ExitCode::from(signals::die_of(number)),
        Err(failure) if args.json => ExitCode::from(failure.code),
        Err(failure) => failure.report(),
    }
}

/// The signal that we are to end by, if any.
async fn hold(args: &HoldArgs) -> Result<Option<i32>, Failure> {
    if inherited::stdout_closed() {
        let what = "nothing was taken: nobody can be told that it is held";
        return Err(Failure::system(what, "stdout is closed"));
    }
    let (caller, writer) = Caller::new(args.json);
    let mut ends = Ends::new()?;
    let done = hold_for(args, &caller, &mut ends).await;
    if let Err(Failure { code, message, .. }) = &done
        && *code != exit::LOST
    {
        caller.tell(&Told::Failed { code: *code, message: message.clone() });
    }
    drop(caller);
    // All is written, or nobody reads it.
    let written = tokio::task::spawn_blocking(|| writer.join());
    tokio::select! {
        _ = written => {}
        () = ends.reader_gone() => {}
    }
    done
}

async fn hold_for(
    args: &HoldArgs,
    caller: &Caller,
    ends: &mut Ends,
) -> Result<Option<i32>, Failure> {
    let ended = |end| match end {
        End::Signal(number) => Ok(Some(number)),
        End::Asked | End::Gone => Ok(None),
    };
    let started = Instant::now();
    let locks = tokio::select! {
        locks = connect_to_take(&args.take, started) => locks?,
        end = ends.next() => return ended(end),
    };
    let guard = tokio::select! {
        guard = wait(&locks, args, started, caller) => guard,
        end = ends.next() => {
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, locks.close()).await;
            return ended(end);
        }
    };
    let done = match guard {
        Ok(guard) => match stay(&guard, caller, ends).await {
            Some(end) => give_back(guard, caller).await.and_then(|()| ended(end)),
            None => Err(lost(&guard, caller)),
        },
        Err(failure) => Err(failure),
    };
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, locks.close()).await;
    done
}

/// Waits our turn, and says so.
async fn wait(
    locks: &Leasehold,
    args: &HoldArgs,
    started: Instant,
    caller: &Caller,
) -> Result<Guard, Failure> {
    let (caller, known) = (caller.clone(), Ahead::default());
    let label = Process::parent()
        .map_or_else(|| "hold".into(), |of| format!("for {} {}", of.program(), of.pid));
    let on_waiting = Arc::new(move |name: &str, ahead| {
        if known.learn(name, ahead) {
            caller.tell(&Told::Waiting { name: name.to_owned(), ahead });
        }
    });
    Taking { locks, args: &args.take, started, label, on_waiting }.one(&args.name).await
}

fn seconds(left: Duration) -> Option<f64> {
    (left < Duration::MAX).then_some(left.as_secs_f64())
}

/// Holds until that is to end. `None`: it was lost.
async fn stay(guard: &Guard, caller: &Caller, ends: &mut Ends) -> Option<End> {
    let name = guard.name().as_str();
    let mut watch = guard.watch();
    caller.tell(&Told::Held {
        name: name.to_owned(),
        token: guard.token().get(),
        sequencer: guard.sequencer().to_string(),
        remaining_seconds: seconds(watch.remaining()),
    });
    let mut at_risk = false;
    loop {
        match watch.state() {
            State::Lost(_) => return None,
            State::AtRisk(_) if !at_risk => {
                at_risk = true;
                let remaining_seconds = watch.remaining().as_secs_f64();
                caller.tell(&Told::AtRisk { name: name.to_owned(), remaining_seconds });
            }
            State::Held if at_risk => {
                at_risk = false;
                let remaining_seconds = seconds(watch.remaining());
                caller.tell(&Told::Recovered { name: name.to_owned(), remaining_seconds });
            }
            _ => {}
        }
        tokio::select! {
            _ = watch.changed() => {}
            end = ends.next() => return Some(end),
        }
    }
}

/// Says that it was lost.
fn lost(guard: &Guard, caller: &Caller) -> Failure {
    let name = guard.name().as_str().to_owned();
    let reason = match guard.state() {
        State::Lost(reason) => reason.as_str().to_owned(),
        _ => "gone".to_owned(),
    };
    let message = format!("lost {name:?}: {reason}");
    caller.tell(&Told::Lost { name, reason });
    Failure::new(exit::LOST, message)
}

async fn give_back(guard: Guard, caller: &Caller) -> Result<(), Failure> {
    let (name, token) = (guard.name().as_str().to_owned(), guard.token().get());
    let released = tokio::time::timeout(CLOSE_TIMEOUT, guard.release()).await;
    match released {
        Ok(Err(error)) if error.kind() == leasehold::ErrorKind::Lost => {
            let reason = error.lost_reason().map_or("gone", |reason| reason.as_str()).to_owned();
            let message = format!("lost {name:?}: {error}");
            caller.tell(&Told::Lost { name, reason });
            Err(Failure::new(exit::LOST, message))
        }
        released => {
            use leasehold::Released::{Now, Shared};
            let answered = matches!(released, Ok(Ok(Now | Shared)));
            caller.tell(&Told::Released { name, token, answered });
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_line_whatever_is_in_it() {
        let held = Told::Held {
            name: "a\u{2028}\"b\"".into(),
            token: 7,
            sequencer: "v1:x".into(),
            remaining_seconds: Some(14.5),
        };
        assert_eq!(held.words(), "held 7 v1:x 14.500");
        let json = timed(&held);
        assert!(!json.contains('\n'), "{json}");
        let read: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&read["event"], &read["token"]), (&"held".into(), &7.into()));
        assert!(read["time"].as_f64().is_some_and(|time| time > 1e9));
    }
}
