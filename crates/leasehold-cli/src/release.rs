//! `leasehold release`: ends a hold.
//!
//! With `--token`, the hold of a script: the [`hold`](crate::hold) that has it is asked first, through
//! its [door](crate::door), because it alone knows whether the lock was held all the time, and because it keeps what
//! `--at-least` promised. Where there is none (another machine, or somebody killed it), the claim is taken out
//! of the store. With `--force`, whoever holds it.

use std::process::ExitCode;

use leasehold::Leasehold;
use leasehold::store::Evict;

use crate::args::ReleaseArgs;
use crate::door::Door;
use crate::drive::drive;
use crate::exit::{self, Failure};
use crate::take::with_store;

pub(crate) fn main(args: ReleaseArgs) -> ExitCode {
    match drive(with_store(&args.store, async |locks| release(locks, &args).await)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

async fn release(locks: &Leasehold, args: &ReleaseArgs) -> Result<(), Failure> {
    let ReleaseArgs { name, token, .. } = args;
    let Some(token) = *token else {
        return match locks.evict(name, Evict::Holders).await? {
            0 => Err(Failure::new(exit::NOT_HELD, format!("nobody holds {name:?}"))),
            _ => Ok(()),
        };
    };
    if let Some(answer) = Door::new(locks.identity(), name, token.get()).knock().await {
        return answer;
    }
    match locks.evict(name, Evict::Token(token)).await? {
        0 => {
            let what = format!(
                "{name:?} is not held with token {token}: it was lost or released before; what \
                 was done since may have been done by somebody else too"
            );
            Err(Failure::new(exit::LOST, what))
        }
        _ => Ok(()),
    }
}
