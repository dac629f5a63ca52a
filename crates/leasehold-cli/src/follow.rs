//! `leasehold events`: prints a line for each change in the queues.
//!
//! The library polls the queues and reports the differences
//! ([`LockEvents`](leasehold::LockEvents)). This module prints them.
//!
//! If the store is unreachable, this is reported once and polling continues. The changes made in
//! the meantime are printed after the next successful poll.

use std::io::{Write, stdout};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use leasehold::{Client, LockEvent, LockEventKind, Token};
use serde::Serialize;

use crate::args::FollowArgs;
use crate::block_on::block_on;
use crate::events::timed;
use crate::exit::Failure;
use crate::reader;
use crate::table::clean;
use crate::take::with_store;

/// Pause after a poll that failed.
const AGAIN: Duration = Duration::from_secs(1);
/// An error that occurs later than this after the previous error belongs to a new outage.
const ANOTHER: Duration = Duration::from_secs(60);

pub(crate) fn main(args: &FollowArgs) -> ExitCode {
    let done = block_on(with_store(&args.store, async |locks| {
        let (tell, gone) = tokio::sync::oneshot::channel();
        let cannot = |e| Failure::system("cannot follow stdout", e);
        reader::watch(move || _ = tell.send(())).map_err(cannot)?;
        tokio::select! {
            done = follow(args, locks) => done,
            // A reader that closes the pipe is not an error.
            Ok(()) = gone => Ok(()),
        }
    }));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

async fn follow(args: &FollowArgs, locks: &Client) -> Result<(), Failure> {
    let mut changes = locks.watch_all(&args.prefix).every(args.every);
    let mut away: Option<Instant> = None;
    loop {
        match changes.next().await {
            Ok(change) => {
                if print(args.json, &change).is_err() {
                    // A reader that closes the pipe is not an error.
                    return Ok(());
                }
            }
            Err(error) if error.is_retryable() => {
                if away.replace(Instant::now()).is_none_or(|last| last.elapsed() > ANOTHER) {
                    Failure::from(error).report();
                }
                tokio::time::sleep(AGAIN).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

fn print(json: bool, change: &LockEvent) -> std::io::Result<()> {
    let line = if json { timed(&Line::of(change)) } else { line(change) };
    let mut stdout = stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush())
}

/// A change as JSON. The fields are documented, and only new ones may be added.
#[derive(Serialize)]
struct Line<'a> {
    event: LockEventKind,
    name: &'a str,
    token: Option<Token>,
    host: &'a str,
    pid: u32,
    label: &'a str,
    weight: u32,
}

impl<'a> Line<'a> {
    fn of(change: &'a LockEvent) -> Self {
        let (claim, holder) = (&change.claim, &change.claim.holder);
        Self {
            event: change.became,
            name: change.name.as_str(),
            token: claim.token,
            host: &holder.host,
            pid: holder.pid,
            label: &holder.label,
            weight: claim.weight,
        }
    }
}

fn line(change: &LockEvent) -> String {
    let word = change.became.as_str();
    let Line { name, token, host, pid, label, .. } = Line::of(change);
    let time = humantime::format_rfc3339_seconds(SystemTime::now());
    let mut line = format!("{time}  {word:8}  {}  {}", clean(name), clean(host));
    if pid != 0 {
        line.push_str(&format!(" pid {pid}"));
    }
    if !label.is_empty() {
        line.push_str(&format!(" ({})", clean(label)));
    }
    if let Some(token) = token {
        line.push_str(&format!("  token {token}"));
    }
    line
}
