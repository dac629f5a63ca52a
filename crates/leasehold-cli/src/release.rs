//! `leasehold release` ends the hold of a script, `leasehold evict` any hold.
//!
//! `release --token` first asks the [`hold`](crate::hold) that has the lock, through its [door](crate::door). Only that
//! process knows whether the lock was held all the time, and it keeps what `--min-hold` promised. If there is none (it
//! was killed, or runs on another machine), the claim is removed from the store.

use std::process::ExitCode;

use leasehold::store::Evict;
use leasehold::{Leasehold, Token};

use crate::args::{EvictArgs, ReleaseArgs};
use crate::door::Door;
use crate::drive::drive;
use crate::exit::{self, Failure};
use crate::table::quoted;
use crate::take::with_store;

pub(crate) fn main(args: &ReleaseArgs) -> ExitCode {
    let ReleaseArgs { store, name, token, .. } = args;
    finish(drive(with_store(store, async |locks| match *token {
        Some(token) => release(locks, name, token).await,
        None => evict(locks, name, None).await,
    })))
}

pub(crate) fn evict_main(args: &EvictArgs) -> ExitCode {
    let EvictArgs { store, name, token } = args;
    finish(drive(with_store(store, async |locks| evict(locks, name, *token).await)))
}

fn finish(done: Result<(), Failure>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// The hint for a script that lost its lock.
const OVERLAP: &str = "work done since then may overlap with another holder's: check its result";

async fn release(locks: &Leasehold, name: &str, token: Token) -> Result<(), Failure> {
    if let Some(answer) = Door::new(locks.identity(), name, token.get()).knock().await {
        return answer.map_err(|failure| match failure.code {
            exit::LOST => failure.hint(OVERLAP),
            _ => failure,
        });
    }
    match locks.evict(name, Evict::Token(token)).await? {
        0 => {
            let what =
                format!("token {token} does not hold {name:?}: it was lost or released before");
            Err(Failure::new(exit::LOST, what).hint(OVERLAP))
        }
        _ => Ok(()),
    }
}

async fn evict(locks: &Leasehold, name: &str, token: Option<Token>) -> Result<(), Failure> {
    let whom = token.map_or(Evict::Holders, Evict::Token);
    match locks.evict(name, whom).await? {
        0 => {
            let what = match token {
                Some(token) => format!("token {token} does not hold {name:?}"),
                None => format!("{name:?} has no holder"),
            };
            let hint = format!("leasehold show {}", quoted(name));
            Err(Failure::new(exit::NOT_HELD, what).hint(hint))
        }
        _ => Ok(()),
    }
}
