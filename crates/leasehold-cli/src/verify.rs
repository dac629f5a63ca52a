//! `leasehold verify`: whether the hold that a sequencer names is still valid.
//!
//! For resources that are shell scripts. The answer is the exit code. A valid hold prints nothing.

use std::process::ExitCode;

use leasehold::{ErrorKind, Sequencer};

use crate::args::VerifyArgs;
use crate::drive::drive;
use crate::exit::{self, Failure};
use crate::take::with_store;

pub(crate) fn main(args: &VerifyArgs) -> ExitCode {
    match drive(verify(args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

async fn verify(args: &VerifyArgs) -> Result<(), Failure> {
    // Before connecting.
    let sequencer: Sequencer = args.sequencer.parse()?;
    with_store(&args.store, async |locks| match locks.check(&sequencer).await {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::Lost => {
            let (token, name) = (sequencer.token(), sequencer.name());
            let what = format!("token {token} no longer holds {name}: reject the request");
            Err(Failure::new(exit::NOT_HELD, what))
        }
        Err(error) => Err(error.into()),
    })
    .await
}
