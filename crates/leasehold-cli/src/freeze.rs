//! `leasehold freeze` and `unfreeze`: a lock has no new holders for a while, and every client that
//! tries to acquire it sees the reason.
//!
//! `freeze` acquires the whole lock, releases it and exits. It acquires the lock like any other
//! client, so holders and earlier waiters come first. It releases the lock with the rest of the
//! time as minimum hold (`--min-hold`). From then on the store keeps the lock unavailable, and no
//! process is needed. The label of the claim that is left in the queue distinguishes a frozen lock
//! from the cooldown of a job. `unfreeze` removes such claims and no others.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use leasehold::store::{Evict, Place};
use leasehold::{Client, Released};

use crate::args::{FreezeArgs, UnfreezeArgs};
use crate::block_on::block_on;
use crate::events::{self, Event, note};
use crate::exit::{self, Failure};
use crate::frozen;
use crate::signals::{self, Signals};
use crate::table::short;
use crate::take::{CLOSE_TIMEOUT, Taking, connect_to_take, with_store};

pub(crate) fn freeze(args: FreezeArgs) -> ExitCode {
    let done = block_on(async {
        let mut signals =
            Signals::while_waiting().map_err(|e| Failure::system("cannot catch signals", e))?;
        take_and_leave(args, &mut signals).await
    });
    match done {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(number)) => ExitCode::from(signals::die_of(number)),
        Err(failure) => failure.naming("--min-hold", "--for").report(),
    }
}

/// Freezes the lock. Returns the signal that ended the attempt, if one did.
async fn take_and_leave(args: FreezeArgs, signals: &mut Signals) -> Result<Option<i32>, Failure> {
    let label = frozen::label(args.reason.as_deref())?;
    let started = Instant::now();
    let (name, time) = (args.name.clone(), args.time);
    let take = args.take(label);
    let locks = tokio::select! {
        locks = connect_to_take(&take, started) => locks?,
        number = signals.next_ending() => return Ok(Some(number)),
    };
    events::note_store(locks.url());
    if !locks.guarantees().min_hold {
        let what = format!("the locks of {} cannot be frozen", locks.url());
        let hint = "use file:, sqlite:, postgres:, mysql:, redis: or etcd:";
        return Err(Failure::new(exit::USAGE, what).hint(hint));
    }
    let was_reported = AtomicBool::new(false);
    let on_waiting = Arc::new(move |name: &str, place: Place| {
        if place.ahead > 0 && !was_reported.swap(true, Ordering::Relaxed) {
            let waiting = Event::Waiting { name: name.to_owned(), ahead: place.ahead }.line();
            note(&format!("{waiting}; later clients wait after this freeze"));
        }
    });
    let label = String::new();
    let taking = Taking { locks: &locks, args: &take, started, label, on_waiting };
    let frozen = async { taking.one(&name).await?.release().await.map_err(exit::released) };
    let ended = tokio::select! {
        released = frozen => Ok(released),
        number = signals.next_ending() => Err(number),
    };
    // This withdraws a claim that was not granted. Otherwise the store could grant the lock to a
    // process that no longer exists.
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, locks.close()).await;
    match ended {
        Err(number) => Ok(Some(number)),
        Ok(Err(failure)) => Err(failure),
        Ok(Ok(Released::Pending)) => {
            let what = format!("the store did not answer: {name:?} may or may not be frozen");
            let hint = take.store.command("show", Some(&name));
            Err(Failure::new(exit::UNAVAILABLE, what).hint(hint))
        }
        Ok(Ok(_)) => {
            // A number without a unit means seconds, so the user sees what was understood.
            note(&format!("{name:?} is frozen for {}", short(time)));
            Ok(None)
        }
    }
}

pub(crate) fn unfreeze(args: &UnfreezeArgs) -> ExitCode {
    match block_on(with_store(&args.store, async |locks| thaw(locks, args).await)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

async fn thaw(locks: &Client, args: &UnfreezeArgs) -> Result<(), Failure> {
    let UnfreezeArgs { store, name } = args;
    let claims = locks.inspect(name).await?.map_or_else(Vec::new, |lock| lock.claims);
    let frozen = claims.iter().filter(|claim| frozen::reason(claim).is_some());
    let mut ended = 0;
    for token in frozen.filter_map(|claim| claim.token) {
        ended += locks.evict(name, Evict::Token(token)).await?;
    }
    match ended {
        0 if !claims.is_empty() => {
            Err(Failure::new(exit::NOT_HELD, format!("{name:?} is not frozen"))
                .hint(store.command("show", Some(name))))
        }
        0 => Err(Failure::new(exit::NOT_HELD, format!("{name:?} is not frozen"))
            .hint(format!("check the name: {}", store.command("ls", None)))),
        _ => Ok(()),
    }
}
