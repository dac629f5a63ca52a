//! `leasehold wait`: until a lock is free, or until somebody holds it.
//!
//! It looks and takes nothing: as soon as it has said so, somebody else may have the lock. For deployments
//! that wait for a job to end, and for tests. Who wants the lock then takes it, with `run`.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use leasehold::store::Wakeup;
use leasehold::{Changes, Leasehold};

use crate::args::WaitArgs;
use crate::drive::drive;
use crate::exit::{self, Failure};
use crate::table::{clean, short};
use crate::take::with_store;

/// How long it pauses between two looks, at first and at most.
const PAUSE: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];

pub(crate) fn main(args: &WaitArgs) -> ExitCode {
    match drive(with_store(&args.store, async |locks| wait(args, locks).await)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

async fn wait(args: &WaitArgs, locks: &Leasehold) -> Result<(), Failure> {
    let started = Instant::now();
    let [mut pause, longest] = PAUSE;
    let is_told = locks.guarantees().followed == Wakeup::Push;
    let mut changes = is_told.then(|| locks.watch(&args.name));
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
            () = next(&mut changes) => (),
            () = tokio::time::sleep(left.map_or(pause, |left| pause.min(left))) => (),
        }
        pause = (pause * 2).min(longest);
    }
}

/// Until the store says that something has changed, if it does. What, or why it cannot, is found by looking.
async fn next(changes: &mut Option<Changes>) {
    match changes {
        Some(changes) => drop(changes.next().await),
        None => std::future::pending().await,
    }
}
