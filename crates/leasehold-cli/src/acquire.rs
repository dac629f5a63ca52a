//! `leasehold acquire`: a lock around a section of a shell script.
//!
//! A claim belongs to the process that made it, and this process ends before the section begins. So
//! it starts a [keeper](crate::keeper) in the background, which takes the lock, holds and renews it
//! until it is released or the calling [shell](crate::shell) is gone. We wait for the keeper's word,
//! print the token, and only then tell the keeper that the lock was delivered: if we die before
//! that, the keeper sees the pipe close and gives the lock back. No lock is held that nobody knows
//! of.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

use crate::args::{AcquireArgs, TakeArgs};
use crate::events::{Event, Events, Style};
use crate::exit::{Failure, SYSTEM};
use crate::inherited;
use crate::keeper::DELIVERED;
use crate::shell::Process;

pub(crate) fn main(args: AcquireArgs) -> ExitCode {
    match acquire(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn acquire(args: &AcquireArgs) -> Result<(), Failure> {
    let shell = match args.pid {
        Some(pid) => Process::with_pid(pid)?,
        None => Process::calling_shell()?,
    };
    if inherited::stdout_closed() {
        return Err(Failure::system("the token cannot be printed", "stdout is closed"));
    }
    let refused = |e: std::io::Error| Failure::system("cannot start the keeper of the lock", e);
    let events = Events::new(Style::Quiet);
    keep_descriptors_to_ourselves();
    let mut keeper = Command::new("/proc/self/exe");
    keeper
        .arg0("leasehold")
        .arg("keep")
        .arg(format!("--pid={}", shell.pid))
        .arg(format!("--started={}", shell.started))
        .args(events.shows_progress().then_some("--progress"))
        .args(words(&args.take, &args.name))
        .envs(args.take.store.environment())
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    // SAFETY: setsid is a system call and async-signal-safe.
    unsafe { keeper.pre_exec(|| nix::unistd::setsid().map(drop).map_err(Into::into)) };
    let mut keeper = keeper.spawn().map_err(refused)?;
    let (Some(mut order), Some(report)) = (keeper.stdin.take(), keeper.stdout.take()) else {
        return Err(Failure::new(SYSTEM, "cannot talk to the keeper of the lock"));
    };
    let outcome = outcome(BufReader::new(report), &events);
    events.finish();
    let token = outcome?;
    // A shell that starts the parts of a pipeline has both ends of it for a moment, in which we may
    // have looked: by now it reads what we write, or does not.
    if let (None, Err(refused)) = (args.pid, Process::calling_shell()) {
        // Nobody was told of the lock, so the keeper gives it back.
        drop(order);
        let _ = keeper.wait();
        return Err(refused);
    }
    writeln!(std::io::stdout(), "{token}")
        .and_then(|()| std::io::stdout().flush())
        .map_err(|e| Failure::system("the lock was given back: cannot print its token", e))?;
    order.write_all(DELIVERED).map_err(refused)
}

/// Listens to the keeper until it has the lock, or has not.
fn outcome(report: impl BufRead, events: &Events) -> Result<u64, Failure> {
    for line in report.lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(Event::Progress { line }) => events.progress(line),
            Ok(Event::Acquired { token, .. }) => return Ok(token),
            Ok(Event::Failed { code, message, silent }) => {
                return Err(Failure { code, message, silent });
            }
            _ => {}
        }
    }
    Err(Failure::new(SYSTEM, "the keeper of the lock died; nothing is held"))
}

/// The same options, for the keeper. The store's URL is not among them: it may hold a password, and
/// command lines are for all to read.
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
    value("of", take.of.map(|n| n.to_string()));
    value("lease", Some(exact(take.lease)));
    value("max-hold", take.max_hold.map(exact));
    value("at-least", take.at_least.map(exact));
    value("lock-delay", take.lock_delay.map(exact));
    value("retry-store", take.retry_store.map(exact));
    value("label", take.label.clone());
    value("conflict-exit-code", take.conflict_exit_code.map(|code| code.to_string()));
    words.extend(["--".into(), name.into()]);
    words
}

/// The keeper outlives us: a pipe of the caller's that it kept open would keep the caller's reader
/// waiting. So nothing but its own stdin, stdout and stderr goes with it.
fn keep_descriptors_to_ourselves() {
    let open = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let numbers: Vec<i32> = open.filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
    for number in numbers.into_iter().filter(|&n| n > 2) {
        // SAFETY: borrowed for this one call, which does not close it; a number that is not open
        // any more (the directory's own) is an error that changes nothing.
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
    fn the_keeper_is_told_what_we_were_told() {
        let said = "leasehold acquire --wait 1500ms --of 3 --permits 2 --lease 7s --max-hold 1m \
                    --at-least 3s --lock-delay 4s --retry-store 5s --label=--x -q -E 9 -- -name";
        let Command::Acquire(said) = Args::parse_from(said.split_whitespace()).command else {
            panic!("not acquire");
        };
        let keep = ["leasehold", "keep", "--pid=1", "--started=2"].map(OsString::from);
        let Command::Keep(told) =
            Args::parse_from(keep.into_iter().chain(words(&said.take, &said.name))).command
        else {
            panic!("not keep");
        };
        assert_eq!(format!("{:?}", told.take), format!("{:?}", said.take));
        assert_eq!(told.name, "-name");
    }
}
