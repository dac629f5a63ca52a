//! `leasehold wait`: until a lock is free, or until somebody holds it.
//!
//! It looks and takes nothing: as soon as it has said so, somebody else may have the lock. For deployments
//! that wait for a job to end, and for tests. Who wants the lock then takes it, with `run`.

use std::convert::Infallible;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use leasehold::store::Wakeup;
use leasehold::{Changes, Leasehold};
use tokio::sync::Notify;

use crate::args::WaitArgs;
use crate::drive::drive;
use crate::exit::{self, Failure};
use crate::table::{clean, short};
use crate::take::with_store;

/// How long it pauses between two looks, at first and at most, where nobody tells of changes.
const PAUSE: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];
/// The same where the store tells.
const TOLD: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(10)];

pub(crate) fn main(args: &WaitArgs) -> ExitCode {
    match drive(with_store(&args.store, async |locks| wait(args, locks).await)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

async fn wait(args: &WaitArgs, locks: &Leasehold) -> Result<(), Failure> {
    let bell = Notify::new();
    let is_told = locks.guarantees().followed == Wakeup::Push;
    let ringing = async {
        match is_told {
            true => ring(locks.watch(&args.name), &bell).await,
            false => std::future::pending().await,
        }
    };
    tokio::select! {
        ended = look(args, locks, if is_told { TOLD } else { PAUSE }, &bell) => ended,
        never = ringing => match never {},
    }
}

/// Rings whenever something has changed. What, or why that cannot be told, is found by looking.
async fn ring(mut changes: Changes, bell: &Notify) -> Infallible {
    loop {
        // One that fails comes no sooner than the next look would.
        let _ = changes.next().await;
        bell.notify_one();
    }
}

/// Looks until it is so: when it rings, and else now and then.
async fn look(
    args: &WaitArgs,
    locks: &Leasehold,
    [mut pause, longest]: [Duration; 2],
    bell: &Notify,
) -> Result<(), Failure> {
    let started = Instant::now();
    loop {
        let lock = locks.read(&args.name).await?;
        let holder = lock.as_ref().and_then(|lock| lock.holders().next());
        let is_free = lock.as_ref().is_none_or(|lock| lock.claims.is_empty());
        let is_so = if args.held { holder.is_some() } else { is_free };
        if is_so {
            return Ok(());
        }
        let left = args.timeout.map(|limit| limit.saturating_sub(started.elapsed()));
        if left.is_some_and(|left| left.is_zero()) {
            let name = clean(&args.name);
            let why = match holder {
                Some(holder) => {
                    format!("{} has held {name} for {}", holder.holder, short(holder.since))
                }
                None if args.held => format!("nobody holds {name}"),
                None => format!("{name} is kept for a while, or somebody is about to hold it"),
            };
            return Err(Failure::new(exit::NOT_ACQUIRED, why));
        }
        tokio::select! {
            () = bell.notified() => (),
            () = tokio::time::sleep(left.map_or(pause, |left| pause.min(left))) => (),
        }
        pause = (pause * 2).min(longest);
    }
}
