//! `leasehold close` and `open`: nobody gets a lock for a while, and who asks reads why.
//!
//! To close is to have the lock and to go: it is taken as by anybody else, so whoever holds it or stands before us in
//! the queue comes first, and released with the rest of the time still to be kept (`--at-least`). So
//! the store keeps it closed, and no process is needed for that. What says that it was closed, and not only
//! kept by a job that runs once per period, is its label; `open` ends that and nothing else.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use leasehold::store::Evict;
use leasehold::{Leasehold, Released};

use crate::args::{CloseArgs, OpenArgs};
use crate::closed;
use crate::drive::drive;
use crate::exit::{self, Failure};
use crate::signals::{self, Signals};
use crate::take::{CLOSE_TIMEOUT, Taking, connect_to_take, with_store};

pub(crate) fn close(args: CloseArgs) -> ExitCode {
    let done = drive(async {
        let mut signals =
            Signals::while_waiting().map_err(|e| Failure::system("cannot catch signals", e))?;
        tokio::select! {
            done = keep_closed(args) => done.map(|()| None),
            number = signals.next_ending() => Ok(Some(number)),
        }
    });
    match done {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(number)) => ExitCode::from(signals::die_of(number)),
        Err(failure) => failure.report(),
    }
}

async fn keep_closed(args: CloseArgs) -> Result<(), Failure> {
    let label = closed::label(args.reason.as_deref())?;
    let started = Instant::now();
    let name = args.name.clone();
    let take = args.take(label);
    let locks = connect_to_take(&take, started).await?;
    let (label, on_waiting) = (String::new(), Arc::new(|_: &str, _| {}));
    let taking = Taking { locks: &locks, args: &take, started, label, on_waiting };
    let guard = taking.one(&name).await?;
    let released = guard.release().await.map_err(exit::released)?;
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, locks.close()).await;
    if released == Released::Owed {
        let what = format!("the store did not answer: whether {name:?} is closed is not known");
        return Err(Failure::new(exit::UNAVAILABLE, what));
    }
    Ok(())
}

pub(crate) fn open(args: &OpenArgs) -> ExitCode {
    match drive(with_store(&args.store, async |locks| reopen(locks, &args.name).await)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

async fn reopen(locks: &Leasehold, name: &str) -> Result<(), Failure> {
    let claims = locks.read(name).await?.map_or_else(Vec::new, |lock| lock.claims);
    let closed = claims.iter().filter(|claim| closed::reason(claim).is_some());
    let mut opened = 0;
    for token in closed.filter_map(|claim| claim.token) {
        opened += locks.evict(name, Evict::Token(token)).await?;
    }
    match opened {
        0 => Err(Failure::new(exit::NOT_HELD, format!("{name:?} is not closed"))),
        _ => Ok(()),
    }
}
