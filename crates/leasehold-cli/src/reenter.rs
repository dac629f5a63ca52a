//! `run --reenter` below a `leasehold run` that holds the lock: executes CMD under that hold.
//!
//! Nothing is acquired. This process becomes CMD. It stays in the process group that the enclosing
//! run ends when the lock is almost lost, and its end is the end that the enclosing run waits for.
//! So the guarantees of the enclosing run apply to this CMD too.

use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::signal::{SigHandler, Signal};

use crate::args::RunArgs;
use crate::child::cannot_be_run;
use crate::events::{Event, Events};
use crate::exit::{self, Failure};
use crate::nested::Above;
use crate::{inherited, priority, signals};

/// Executes CMD in this process. Returns only if that failed.
pub(crate) fn exec(args: &RunArgs, above: &Above, events: &Events) -> Failure {
    let Some((program, arguments)) = args.command.split_first() else {
        return Failure::new(exit::USAGE, "no command given");
    };
    let (name, token) = (args.name().to_owned(), above.token.get());
    events.print(&Event::Reentered { name: name.clone(), token, pid: above.holder });
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
        // SAFETY: The closure runs before exec in this same process, and makes one system call.
        unsafe {
            command.pre_exec(|| {
                signals::set(Signal::SIGPIPE, SigHandler::SigIgn).map(drop).map_err(Into::into)
            });
        }
    }
    priority::restore();
    cannot_be_run(program, &command.exec())
}
