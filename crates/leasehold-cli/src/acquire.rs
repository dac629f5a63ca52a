//! `leasehold acquire`: a lock around a section of a shell script.
//!
//! A claim belongs to the process that made it, and this process ends before the section begins.
//! Therefore it starts [`leasehold hold`](crate::hold) in the background, bound to the
//! [process](crate::process) that owns the lock. It reads the output of the hold until the lock is
//! held. It prints the token, and only then writes `stay`. If it is killed before that, the hold
//! sees the pipe close and releases the lock. Thus a lock whose token was not printed never stays
//! held.
//!
//! The owner may exit, and its pid be reused, before the hold opens a pidfd for it. Therefore, once
//! the lock is held, this process checks that the owner is still the same process. If so, the owner
//! existed all the time.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use leasehold::Holder;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use serde::Deserialize;

use crate::args::{AcquireArgs, TakeArgs};
use crate::events::{Events, Style};
use crate::exit::{Failure, SYSTEM};
use crate::hold::STAY;
use crate::inherited;
use crate::mark::{DETACHED, RUN};
use crate::process::Process;
use crate::progress;
use crate::take::held_by_these;

/// Interval between updates of the line about the queue.
const EACH: Duration = Duration::from_secs(1);

pub(crate) fn main(args: &AcquireArgs) -> ExitCode {
    match acquire(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn acquire(args: &AcquireArgs) -> Result<(), Failure> {
    let whose = || args.pid.map_or_else(Process::reader, Process::with_pid);
    let process = whose()?;
    if inherited::stdout_closed() {
        return Err(Failure::system("cannot print the token", "stdout is closed"));
    }
    let refused = |e: std::io::Error| {
        Failure::system("cannot start the background process `leasehold hold`", e)
    };
    keep_descriptors_to_ourselves();
    let mut hold = Command::new("/proc/self/exe");
    hold.arg0("leasehold")
        .args(["hold", "--json"])
        .arg(format!("--pid={}", process.pid))
        .args(words(&args.take, &args.name))
        .envs(args.take.store.environment())
        .env(RUN, DETACHED)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    // SAFETY: setsid is a system call and async-signal-safe.
    unsafe { hold.pre_exec(|| nix::unistd::setsid().map(drop).map_err(Into::into)) };
    let mut hold = hold.spawn().map_err(refused)?;
    let (Some(mut order), Some(output)) = (hold.stdin.take(), hold.stdout.take()) else {
        return Err(no_answer());
    };
    let token = outcome(args, lines(BufReader::new(output)))?;
    // A shell that starts the parts of a pipeline has both ends open for a moment. By now it is
    // certain whether the shell reads this process's output.
    let still = whose().and_then(|now| {
        let gone =
            || Failure::system("the lock was released", format!("process {} is gone", process.pid));
        if now == process { Ok(()) } else { Err(gone()) }
    });
    if let Err(refused) = still {
        // The token was not printed, so the lock is released.
        drop(order);
        let _ = hold.wait();
        return Err(refused);
    }
    writeln!(std::io::stdout(), "{token}").and_then(|()| std::io::stdout().flush()).map_err(
        |e| Failure::system("the lock was released, because its token could not be printed", e),
    )?;
    writeln!(order, "{STAY}").map_err(|e| Failure::system("the lock is no longer held", e))
}

/// The events of the hold that this command handles.
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum HoldEvent {
    Waiting(Queue),
    Held {
        token: u64,
    },
    Failed {
        code: u8,
        message: String,
        hint: Option<String>,
    },
    #[serde(other)]
    Other,
}

/// The event about the wait: the queue position and the holders.
#[derive(Debug, Deserialize)]
struct Queue {
    ahead: usize,
    place: Option<usize>,
    held_by: Option<String>,
    holders: Vec<Held>,
}

#[derive(Debug, Deserialize)]
struct Held {
    #[serde(flatten)]
    holder: Holder,
    since_seconds: f64,
}

impl Queue {
    /// Returns the line for the terminal. `age` is the time since the hold printed the position.
    fn line(&self, name: &str, age: Duration) -> String {
        let by = match &self.holders[..] {
            [] => self.held_by.clone(),
            [first, others @ ..] => {
                let since = Duration::try_from_secs_f64(first.since_seconds).unwrap_or_default();
                Some(held_by_these(&first.holder, since + age, others.len()))
            }
        };
        progress::waiting(name, self.place.unwrap_or(self.ahead + 1), by.as_deref())
    }
}

/// Parses the hold's lines as they arrive, and returns the channel that receives them. A separate
/// thread reads them, so that the elapsed time in the line about the queue keeps updating.
fn lines(output: impl BufRead + Send + 'static) -> Receiver<HoldEvent> {
    let (tell, receiver) = channel();
    std::thread::spawn(move || {
        let lines = output.lines().map_while(Result::ok);
        let known = lines.filter_map(|line| serde_json::from_str(&line).ok());
        known.for_each(|event| _ = tell.send(event));
    });
    receiver
}

/// Reads the hold's events until the lock is held or the acquisition has failed. Returns the token.
#[allow(clippy::needless_pass_by_value, reason = "the reader owns its end of the channel")]
fn outcome(args: &AcquireArgs, lines: Receiver<HoldEvent>) -> Result<u64, Failure> {
    let events = Events::new(Style::Quiet);
    let mut queue: Option<(Queue, Instant)> = None;
    loop {
        if let Some((queue, since)) = &queue {
            events.progress(queue.line(&args.name, since.elapsed()));
        }
        match lines.recv_timeout(EACH) {
            Ok(HoldEvent::Waiting(now)) => queue = Some((now, Instant::now())),
            Ok(HoldEvent::Held { token }) => return Ok(token),
            Ok(HoldEvent::Failed { code, message, hint }) => {
                let silent = args.take.quiet && code == args.take.conflict_code();
                return Err(Failure { code, message, hint, silent });
            }
            Ok(HoldEvent::Other) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(no_answer());
            }
        }
    }
}

/// Returns the failure for a hold that ended or cannot be reached.
fn no_answer() -> Failure {
    let what = "the background process `leasehold hold` ended unexpectedly; the lock is not held";
    Failure::new(SYSTEM, what)
}

/// Returns the options for the hold, equal to those of this command. The store's URL is passed in
/// the environment, because it may contain a password and all users can read command lines.
fn words(take: &TakeArgs, name: &str) -> Vec<OsString> {
    let mut words: Vec<OsString> = Vec::new();
    let mut flag = |set: bool, name: &str| words.extend(set.then(|| name.into()));
    flag(take.try_only, "--try");
    flag(take.shared, "--shared");
    flag(take.exclusive, "--exclusive");
    flag(take.quiet, "--quiet");
    let mut value = |option: &str, value: Option<String>| {
        words.extend(value.map(|v| format!("--{option}={v}").into()));
    };
    let exact = |d: Duration| humantime::format_duration(d).to_string();
    value("wait", take.wait.map(exact));
    value("permits", take.permits.map(|n| n.to_string()));
    value("max", take.max.map(|n| n.to_string()));
    value("lease", Some(exact(take.lease)));
    value("max-hold", take.max_hold.map(exact));
    value("min-hold", take.min_hold.map(exact));
    value("lock-delay", take.lock_delay.map(exact));
    value("connect-timeout", take.connect_timeout.map(exact));
    value("label", take.label.clone());
    value("conflict-exit-code", take.conflict_exit_code.map(|code| code.to_string()));
    words.extend(["--".into(), name.into()]);
    words
}

/// Marks all descriptors except stdin, stdout and stderr as close-on-exec. The hold outlives this
/// process. If it inherited a pipe of the caller, the process that reads that pipe would keep
/// waiting.
fn keep_descriptors_to_ourselves() {
    let open = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let numbers: Vec<i32> = open.filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
    for number in numbers.into_iter().filter(|&n| n > 2) {
        // SAFETY: The descriptor is borrowed for this one call, which does not close it. A number
        // that is not open any longer (the directory's own) causes an error that changes nothing.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        let _ = fcntl(fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Args, Command};

    #[test]
    fn acquire_passes_its_options_to_hold() {
        let given = "leasehold acquire --wait 1500ms --max 3 --permits 2 --lease 7s --max-hold 1m \
                    --min-hold 3s --lock-delay 4s --connect-timeout 5s --label=--x -q -E 9 -- -name";
        let Command::Acquire(given) = Args::parse_from(given.split_whitespace()).command else {
            panic!("expected the command acquire");
        };
        let hold = ["leasehold", "hold", "--json", "--pid=1"].map(OsString::from);
        let Command::Hold(passed_on) =
            Args::parse_from(hold.into_iter().chain(words(&given.take, &given.name))).command
        else {
            panic!("expected the command hold");
        };
        assert_eq!(format!("{:?}", passed_on.take), format!("{:?}", given.take));
        assert_eq!(passed_on.name, "-name");
    }

    #[test]
    fn waiting_line_shows_how_long_the_lock_is_held() {
        let json = r#"{"time":1.0,"event":"waiting","name":"x","ahead":2,"place":2,"held_by":"x",
            "holders":[{"state":"held","host":"web-1","pid":7,"label":"nightly","token":5,
            "weight":1,"since_seconds":12.0,"remaining_seconds":null}]}"#;
        let HoldEvent::Waiting(mut queue) = serde_json::from_str(json).unwrap() else { panic!() };
        assert_eq!(
            queue.line("x", Duration::from_secs(3)),
            "waiting for \"x\" (position 2 in the queue): held by web-1 pid 7 (nightly) for 15s"
        );
        queue.holders.clear();
        queue.held_by = Some("frozen for 8h 0m more by db-1: moved".to_owned());
        assert_eq!(
            queue.line("x", Duration::ZERO),
            "waiting for \"x\" (position 2 in the queue): frozen for 8h 0m more by db-1: moved"
        );
    }
}
