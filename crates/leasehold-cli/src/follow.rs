//! `leasehold events`: what changes in the queues, a line for each change.
//!
//! The library looks, and tells the differences ([`Changes`](leasehold::Changes)); this prints them.
//!
//! A store that is away is said so once, and looked at again: what changed meanwhile is told then.

use std::io::{Write, stdout};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use leasehold::{Became, Change, Leasehold, Token};
use serde::Serialize;

use crate::args::FollowArgs;
use crate::drive::drive;
use crate::events::timed;
use crate::exit::Failure;
use crate::reader;
use crate::table::clean;
use crate::take::with_store;

/// The pause after a look that failed.
const AGAIN: Duration = Duration::from_secs(1);
/// So long after the last one that failed, it is another outage.
const ANOTHER: Duration = Duration::from_secs(60);

pub(crate) fn main(args: &FollowArgs) -> ExitCode {
    let done = drive(with_store(&args.store, async |locks| {
        let (tell, gone) = tokio::sync::oneshot::channel();
        let cannot = |e| Failure::system("cannot follow stdout", e);
        reader::watch(move || _ = tell.send(())).map_err(cannot)?;
        tokio::select! {
            done = follow(args, locks) => done,
            // Who has seen enough is no failure.
            Ok(()) = gone => Ok(()),
        }
    }));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

async fn follow(args: &FollowArgs, locks: &Leasehold) -> Result<(), Failure> {
    let mut changes = locks.watch_all(&args.prefix).every(args.every);
    let mut away: Option<Instant> = None;
    loop {
        match changes.next().await {
            Ok(change) => {
                if print(args.json, &change).is_err() {
                    // A reader that has seen enough is no failure.
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

fn print(json: bool, change: &Change) -> std::io::Result<()> {
    let line = if json { timed(&Line::of(change)) } else { line(change) };
    let mut stdout = stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush())
}

/// A change as JSON. Its fields are what is documented, and only grow.
#[derive(Serialize)]
struct Line<'a> {
    event: Became,
    name: &'a str,
    token: Option<Token>,
    host: &'a str,
    pid: u32,
    label: &'a str,
    weight: u32,
}

impl<'a> Line<'a> {
    fn of(change: &'a Change) -> Self {
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

fn line(change: &Change) -> String {
    let word = change.became.as_str();
    let Line { name, token, host, pid, label, .. } = Line::of(change);
    let mut line = format!("{word:8}  {}  {}", clean(name), clean(host));
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
