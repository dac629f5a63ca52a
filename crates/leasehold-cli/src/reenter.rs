//! `run --reenter` under a `leasehold run` that has the lock: CMD, under its hold.
//!
//! Nothing is taken. We become CMD, in the place where we are: in the process group that the one above ends when the
//! lock is as good as lost, and with the end that it waits for. So what it promises of its CMD holds of
//! this one.

use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::signal::{SigHandler, Signal};

use crate::args::RunArgs;
use crate::child::cannot_be_run;
use crate::events::{Event, Events};
use crate::exit::{self, Failure};
use crate::nested::Above;
use crate::{inherited, priority, signals};

/// Becomes CMD. Returns if that could not be.
pub(crate) fn exec(args: &RunArgs, above: &Above, events: &Events) -> Failure {
    let Some((program, arguments)) = args.command.split_first() else {
        return Failure::new(exit::USAGE, "no command given");
    };
    let (name, token) = (args.name().to_owned(), above.token.get());
    events.tell(&Event::Reentered { name: name.clone(), token, pid: above.holder });
    events.finish();
    let mut command = Command::new(program);
    command.args(arguments).envs(args.take.store.environment()).envs([
        ("LEASEHOLD_NAME", name.clone()),
        ("LEASEHOLD_NAMES", name),
        ("LEASEHOLD_TOKEN", token.to_string()),
        ("LEASEHOLD_TOKENS", token.to_string()),
        ("LEASEHOLD_SEQUENCER", above.sequencer.to_string()),
        ("LEASEHOLD_SEQUENCERS", above.sequencer.to_string()),
    ]);
    if inherited::sigpipe_ignored() {
        // SAFETY: runs before exec in this very process; one system call.
        unsafe {
            command.pre_exec(|| {
                signals::set(Signal::SIGPIPE, SigHandler::SigIgn).map(drop).map_err(Into::into)
            });
        }
    }
    priority::restore();
    cannot_be_run(program, &command.exec())
}
