//! `leasehold verify`: checks whether the hold that a sequencer names is still valid.
//!
//! It is intended for resources that are shell scripts. The answer is the exit code. For a valid
//! hold, the command prints nothing.

use std::process::ExitCode;

use leasehold::{ErrorKind, Sequencer};

use crate::args::VerifyArgs;
use crate::block_on::block_on;
use crate::exit::{self, Failure};
use crate::take::with_store;

pub(crate) fn main(args: &VerifyArgs) -> ExitCode {
    match block_on(verify(args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

async fn verify(args: &VerifyArgs) -> Result<(), Failure> {
    // This comes first, so that an invalid sequencer is rejected without a connection.
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
