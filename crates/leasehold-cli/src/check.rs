//! `leasehold check`: is the hold that a sequencer tells of still held?
//!
//! For resources that are shell scripts. The answer is the exit code; on a yes nothing is printed.

use std::process::ExitCode;

use leasehold::{ErrorKind, Sequencer};

use crate::args::CheckArgs;
use crate::drive::drive;
use crate::exit::{self, Failure};
use crate::take::with_store;

pub(crate) fn main(args: &CheckArgs) -> ExitCode {
    match drive(check(args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

async fn check(args: &CheckArgs) -> Result<(), Failure> {
    // Before anything is connected to.
    let sequencer: Sequencer = args.sequencer.parse()?;
    with_store(&args.store, async |locks| match locks.check(&sequencer).await {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::Lost => {
            let what = format!(
                "{} is not held with token {} any more: refuse what comes with it",
                sequencer.name(),
                sequencer.token()
            );
            Err(Failure::new(exit::NOT_HELD, what))
        }
        Err(error) => Err(error.into()),
    })
    .await
}
