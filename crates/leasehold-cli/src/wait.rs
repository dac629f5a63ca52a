//! `leasehold wait`: waits until a lock is free, or held.
//!
//! It does not acquire the lock, so another client may acquire it right afterwards. It is intended
//! for deployments that wait for a job to end, and for tests.

use std::convert::Infallible;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use leasehold::store::Wakeup;
use leasehold::{Client, Error, LockEvents};
use tokio::sync::Notify;

use crate::args::WaitArgs;
use crate::block_on::block_on;
use crate::exit::{self, Failure};
use crate::table::short;
use crate::take::{PATIENCE, held_by, with_store};

/// The first and the longest pause between two polls, if the store does not notify watchers.
const PAUSE: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];
/// The first and the longest pause between two polls, if the store notifies watchers.
const NOTIFIED: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(10)];

pub(crate) fn main(args: &WaitArgs) -> ExitCode {
    match block_on(with_store(&args.store, async |locks| wait(args, locks).await)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

async fn wait(args: &WaitArgs, locks: &Client) -> Result<(), Failure> {
    let changed = Notify::new();
    let is_notified = locks.guarantees().followed == Wakeup::Push;
    let following = async {
        match is_notified {
            true => follow(locks.watch(&args.name), &changed).await,
            false => std::future::pending().await,
        }
    };
    tokio::select! {
        ended = poll(args, locks, if is_notified { NOTIFIED } else { PAUSE }, &changed) => ended,
        never = following => match never {},
    }
}

/// Notifies `changed` of every change. The next poll then finds out what has changed, or reports
/// the error.
async fn follow(mut changes: LockEvents, changed: &Notify) -> Infallible {
    loop {
        // After an error, the next call returns only after it has polled again.
        let _ = changes.next().await;
        changed.notify_one();
    }
}

/// Returns whether to poll again after this error. `answered` is the time of the store's last
/// answer, if it has answered.
fn is_passing(error: &Error, started: Instant, answered: Option<Instant>) -> bool {
    let is_patient = answered.unwrap_or(started).elapsed() < PATIENCE;
    is_patient && (answered.is_some() || error.is_transient())
}

/// Polls until the lock is in the wanted state. It polls after each notification, and periodically.
async fn poll(
    args: &WaitArgs,
    locks: &Client,
    [mut pause, longest]: [Duration; 2],
    changed: &Notify,
) -> Result<(), Failure> {
    let started = Instant::now();
    let mut answered = None;
    loop {
        // The waiters are not read. The lock is free if it has neither a holder nor a cooldown.
        let lock = match locks.holders(&args.name).await {
            Ok(lock) => lock,
            // An error passes if the store has answered before, as it does for waiters in a queue.
            Err(error) if is_passing(&error, started, answered) => {
                let left = args.timeout.map(|limit| limit.saturating_sub(started.elapsed()));
                if left.is_some_and(|left| left.is_zero()) {
                    return Err(error.into());
                }
                tokio::time::sleep(left.map_or(PAUSE[1], |left| PAUSE[1].min(left))).await;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        answered = Some(Instant::now());
        let holder = lock.as_ref().and_then(|lock| lock.holders().next());
        let is_free = lock.as_ref().is_none_or(|lock| lock.claims.is_empty());
        let is_so = if args.held { holder.is_some() } else { is_free };
        if is_so {
            return Ok(());
        }
        let left = args.timeout.map(|limit| limit.saturating_sub(started.elapsed()));
        if left.is_some_and(|left| left.is_zero()) {
            let (name, limit) = (&args.name, short(args.timeout.unwrap_or_default()));
            let by = lock.as_ref().and_then(held_by);
            let state = match by {
                Some(by) => format!("{name:?} is {by}"),
                None if args.held => format!("{name:?} has no holder"),
                None => format!("{name:?} is about to be acquired by a waiter"),
            };
            let why = format!("timed out after {limit}: {state}");
            let hint = args.store.command("show", Some(name));
            return Err(Failure::new(exit::NOT_ACQUIRED, why).hint(hint));
        }
        tokio::select! {
            () = changed.notified() => (),
            () = tokio::time::sleep(left.map_or(pause, |left| pause.min(left))) => (),
        }
        pause = (pause * 2).min(longest);
    }
}
