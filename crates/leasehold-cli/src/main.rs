//! The `leasehold` command: run any program under a lock.

mod acquire;
mod args;
mod boottime;
mod child;
mod events;
mod exit;
mod keeper;
mod list;
mod proc;
mod progress;
mod release;
mod run;
mod shell;
mod signals;
mod table;
mod take;
mod terminal;
mod watchdog;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Args, Command};

fn main() -> ExitCode {
    match Args::parse().command {
        Command::Run(args) => run::main(args),
        Command::Acquire(args) => acquire::main(args),
        Command::Release(args) => release::main(args),
        Command::Ls(args) => list::ls(args),
        Command::Show(args) => list::show(args),
        Command::Keep(args) => keeper::main(args),
        Command::Watchdog(args) => watchdog::main(&args),
    }
}
