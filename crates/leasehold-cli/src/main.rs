//! The `leasehold` command: run any program under a lock.

mod acquire;
mod args;
mod boottime;
mod check;
mod child;
mod close;
mod closed;
mod danger;
mod describe;
mod doctor;
mod door;
mod drive;
mod elect;
mod end;
mod events;
mod exit;
mod follow;
mod held;
mod hold;
mod inherited;
mod list;
mod nested;
mod on_lost;
mod place;
mod proc;
mod process;
mod progress;
mod reader;
mod reenter;
#[cfg(all(test, feature = "lab"))]
mod reference;
mod release;
mod run;
mod schema;
mod signals;
mod supervise;
mod table;
mod take;
mod terminal;
#[cfg(feature = "top")]
mod top;
mod wait;
mod watchdog;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Args, Command};

fn main() -> ExitCode {
    match Args::parse().command {
        Command::Run(args) => run::main(args),
        Command::Acquire(args) => acquire::main(&args),
        Command::Close(args) => close::close(args),
        Command::Open(args) => close::open(&args),
        Command::Elect(args) => elect::main(args),
        Command::Events(args) => follow::main(&args),
        Command::Hold(args) => hold::main(&args),
        Command::Release(args) => release::main(args),
        Command::Check(args) => check::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        Command::Ls(args) => list::ls(args),
        Command::Show(args) => list::show(args),
        #[cfg(feature = "top")]
        Command::Top(args) => top::main(&args),
        Command::Wait(args) => wait::main(&args),
        Command::Completions(args) => describe::completions(&args),
        Command::Man(args) => describe::man(&args),
        Command::Schema(args) => schema::main(&args),
        #[cfg(feature = "torture")]
        Command::Torture(args) => leasehold_torture::main(&args),
        #[cfg(feature = "lab")]
        Command::Lab(args) => leasehold_lab::main(&args),
        #[cfg(feature = "torture")]
        Command::TortureWorker => leasehold_torture::worker_main(),
        Command::Watchdog(args) => watchdog::main(&args),
    }
}
