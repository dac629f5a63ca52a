//! `leasehold freeze` and `unfreeze`: a lock has no new holders for a while, and everyone who tries sees the reason.
//!
//! To freeze a lock is to acquire all of it and to leave. The lock is acquired as by any other client, so holders and
//! earlier waiters come first, and released with the rest of the time as minimum hold (`--min-hold`). From then on the
//! store keeps the lock unavailable, and no process is needed. The label of the claim that is left in the queue tells a
//! frozen lock from the cooldown of a job. `unfreeze` removes such claims and no others.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use leasehold::store::Evict;
use leasehold::{Leasehold, Released};

use crate::args::{FreezeArgs, UnfreezeArgs};
use crate::drive::drive;
use crate::events;
use crate::exit::{self, Failure};
use crate::frozen;
use crate::signals::{self, Signals};
use crate::table::quoted;
use crate::take::{CLOSE_TIMEOUT, Taking, connect_to_take, with_store};

pub(crate) fn freeze(args: FreezeArgs) -> ExitCode {
    let done = drive(async {
        let mut signals =
            Signals::while_waiting().map_err(|e| Failure::system("cannot catch signals", e))?;
        tokio::select! {
            done = take_and_leave(args) => done.map(|()| None),
            number = signals.next_ending() => Ok(Some(number)),
        }
    });
    match done {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(number)) => ExitCode::from(signals::die_of(number)),
        Err(failure) => failure.report(),
    }
}

async fn take_and_leave(args: FreezeArgs) -> Result<(), Failure> {
    let label = frozen::label(args.reason.as_deref())?;
    let started = Instant::now();
    let name = args.name.clone();
    let take = args.take(label);
    let locks = connect_to_take(&take, started).await?;
    events::note_store(locks.url());
    let (label, on_waiting) = (String::new(), Arc::new(|_: &str, _| {}));
    let taking = Taking { locks: &locks, args: &take, started, label, on_waiting };
    let guard = taking.one(&name).await?;
    let released = guard.release().await.map_err(exit::released)?;
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, locks.close()).await;
    if released == Released::Owed {
        let what = format!("the store did not answer: {name:?} may or may not be frozen");
        let hint = format!("leasehold show {}", quoted(&name));
        return Err(Failure::new(exit::UNAVAILABLE, what).hint(hint));
    }
    Ok(())
}

pub(crate) fn unfreeze(args: &UnfreezeArgs) -> ExitCode {
    match drive(with_store(&args.store, async |locks| thaw(locks, &args.name).await)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

async fn thaw(locks: &Leasehold, name: &str) -> Result<(), Failure> {
    let claims = locks.read(name).await?.map_or_else(Vec::new, |lock| lock.claims);
    let frozen = claims.iter().filter(|claim| frozen::reason(claim).is_some());
    let mut ended = 0;
    for token in frozen.filter_map(|claim| claim.token) {
        ended += locks.evict(name, Evict::Token(token)).await?;
    }
    match ended {
        0 if !claims.is_empty() => {
            Err(Failure::new(exit::NOT_HELD, format!("{name:?} is not frozen"))
                .hint(format!("leasehold show {}", quoted(name))))
        }
        0 => Err(Failure::new(exit::NOT_HELD, format!("{name:?} is not frozen"))
            .hint("check the name: leasehold ls")),
        _ => Ok(()),
    }
}
