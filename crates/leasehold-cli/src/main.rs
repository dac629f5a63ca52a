//! The `leasehold` command: run any program under a lock.

mod acquire;
mod args;
mod boottime;
mod check;
mod child;
mod doctor;
mod duration;
mod events;
mod exit;
mod inherited;
mod keeper;
mod list;
mod nested;
mod proc;
mod progress;
mod release;
mod run;
mod schema;
mod shell;
mod signals;
mod table;
mod take;
mod terminal;
mod torture;
mod watchdog;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Args, Command};
use crate::exit::Failure;

fn main() -> ExitCode {
    match Args::parse().command {
        Command::Run(args) => run::main(args),
        Command::Acquire(args) => acquire::main(args),
        Command::Release(args) => release::main(args),
        Command::Check(args) => check::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        Command::Ls(args) => list::ls(args),
        Command::Show(args) => list::show(args),
        Command::Keep(args) => keeper::main(args),
        Command::Schema(args) => schema::main(&args),
        Command::Torture(args) => torture::main(&args),
        Command::TortureWorker => torture::worker_main(),
        Command::Watchdog(args) => watchdog::main(&args),
    }
}

/// How many descriptors a runtime takes.
const DESCRIPTORS: usize = 8;

/// Runs what an invocation does, on this one thread: the library has its own for renewals.
fn drive<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    // The runtime panics where it cannot have its own.
    let spare = || std::fs::File::open("/dev/null");
    let spares: Result<Vec<_>, _> = std::iter::repeat_with(spare).take(DESCRIPTORS).collect();
    drop(spares.map_err(|e| Failure::system("cannot start", e))?);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::system("cannot start", e))?;
    let done = runtime.block_on(work);
    runtime.shutdown_background();
    done
}
