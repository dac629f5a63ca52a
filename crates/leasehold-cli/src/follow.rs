//! `leasehold events`: what changes in the queues, a line for each change.
//!
//! It looks again and again, at all queues at once, and tells the difference between two looks. So it costs
//! the store one request a look, and what came and went between two is not seen; of what ended nobody knows
//! whether it was given back or ran out. It takes nothing and is in nobody's way.
//!
//! A store that is away is said so once, and looked at again: what changed meanwhile is told then.

use std::collections::BTreeMap;
use std::io::{Write, stdout};
use std::process::ExitCode;
use std::time::Duration;

use leasehold::store::{ClaimInfo, LockInfo, Standing};
use leasehold::{Leasehold, Token};
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

/// One claim of one lock, by all that stays the same while it stands there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct Claim {
    name: String,
    token: Option<Token>,
    host: String,
    pid: u32,
    label: String,
    weight: u32,
}

impl Claim {
    fn of(lock: &LockInfo, claim: &ClaimInfo) -> Self {
        Self {
            name: lock.name.as_str().to_owned(),
            token: claim.token,
            host: claim.holder.host.clone(),
            pid: claim.holder.pid,
            label: claim.holder.label.clone(),
            weight: claim.weight,
        }
    }
}

/// What was seen of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Change {
    Waits,
    Holds,
    /// Its holder is gone, and the lock is kept closed in its place.
    Departed,
    /// It is in the queue no more.
    Ended,
}

impl Change {
    fn word(self) -> &'static str {
        match self {
            Self::Waits => "waits",
            Self::Holds => "holds",
            Self::Departed => "departed",
            Self::Ended => "ended",
        }
    }
}

type Seen = BTreeMap<Claim, Standing>;

fn seen(locks: &[LockInfo]) -> Seen {
    let claims = |lock: &'_ LockInfo| {
        lock.claims.iter().map(|claim| (Claim::of(lock, claim), claim.standing)).collect::<Vec<_>>()
    };
    locks.iter().flat_map(claims).collect()
}

/// What ended, and then what came: in this order a lock is free before it is held again.
fn changes<'a>(before: &'a Seen, now: &'a Seen) -> impl Iterator<Item = (&'a Claim, Change)> {
    let ended = before.keys().filter(|claim| !now.contains_key(*claim));
    let came = now.iter().filter(|(claim, standing)| before.get(*claim) != Some(*standing));
    let came = came.map(|(claim, standing)| {
        let change = match standing {
            Standing::Waiting => Change::Waits,
            Standing::Holding => Change::Holds,
            Standing::Departed => Change::Departed,
        };
        (claim, change)
    });
    ended.map(|claim| (claim, Change::Ended)).chain(came)
}

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
    let mut before = Seen::new();
    let mut is_away = false;
    loop {
        match locks.list(&args.prefix).await {
            Ok(listed) => {
                let now = seen(&listed);
                for (claim, change) in changes(&before, &now) {
                    if print(args.json, claim, change).is_err() {
                        // A reader that has seen enough is no failure.
                        return Ok(());
                    }
                }
                (before, is_away) = (now, false);
                tokio::time::sleep(args.every).await;
            }
            Err(error) if error.is_retryable() => {
                if !std::mem::replace(&mut is_away, true) {
                    Failure::from(error).report();
                }
                tokio::time::sleep(AGAIN).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

fn print(json: bool, claim: &Claim, change: Change) -> std::io::Result<()> {
    #[derive(Serialize)]
    struct Line<'a> {
        event: Change,
        #[serde(flatten)]
        claim: &'a Claim,
    }
    let line = match json {
        true => timed(&Line { event: change, claim }),
        false => line(claim, change),
    };
    let mut stdout = stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush())
}

fn line(claim: &Claim, change: Change) -> String {
    let mut line = format!("{:8}  {}  {}", change.word(), clean(&claim.name), clean(&claim.host));
    if claim.pid != 0 {
        line.push_str(&format!(" pid {}", claim.pid));
    }
    if !claim.label.is_empty() {
        line.push_str(&format!(" ({})", clean(&claim.label)));
    }
    if let Some(token) = claim.token {
        line.push_str(&format!("  token {token}"));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_free_before_it_is_held_again() {
        let claim = |name: &str, token| Claim {
            name: name.into(),
            token: Token::new(token),
            host: "web-1\u{1b}".into(),
            pid: 7,
            label: "x".into(),
            weight: 1,
        };
        let (first, second, other) = (claim("b", 1), claim("b", 2), claim("a", 3));
        let before = Seen::from([
            (first.clone(), Standing::Holding),
            (second.clone(), Standing::Waiting),
            (other.clone(), Standing::Holding),
        ]);
        let now = Seen::from([(second.clone(), Standing::Holding), (other, Standing::Holding)]);
        let told: Vec<_> = changes(&before, &now).collect();
        assert_eq!(told, [(&first, Change::Ended), (&second, Change::Holds)]);
        assert_eq!(changes(&now, &now).count(), 0);
        assert_eq!(line(&first, Change::Ended), "ended     b  web-1\\u{1b} pid 7 (x)  token 1");
    }
}
