//! The `leasehold` command: run any program under a lock.

mod acquire;
mod activation;
mod args;
mod block_on;
mod boottime;
mod child;
mod command_end;
mod control_socket;
mod descendants;
mod describe;
mod doctor;
mod elect;
mod events;
mod exit;
mod follow;
mod freeze;
mod frozen;
mod held_locks;
mod hold;
mod inherited;
mod kill_policy;
mod list;
mod mark;
mod missing;
mod nested;
mod on_lost;
mod orphans;
mod place;
mod priority;
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
#[cfg(feature = "serve")]
mod serve;
mod signals;
mod slots;
mod supervise;
mod table;
mod take;
mod terminal;
#[cfg(feature = "top")]
mod top;
mod verify;
mod wait;
mod watchdog;

use std::process::ExitCode;

use crate::args::Command;

fn main() -> ExitCode {
    signals::end_even_as_first_process();
    let args = args::parse().unwrap_or_else(|error| {
        hold::report_usage(&error);
        error.exit()
    });
    events::set_verbose(args.verbose);
    match args.command {
        Command::Run(args) => run::main(args),
        Command::Elect(args) => elect::main(args),
        Command::Acquire(args) => acquire::main(&args),
        Command::Release(args) => release::main(&args),
        Command::Ls(args) => list::ls(args),
        Command::Show(args) => list::show(args),
        Command::Why(args) => list::why(args),
        #[cfg(feature = "top")]
        Command::Top(args) => top::main(&args),
        Command::Events(args) => follow::main(&args),
        Command::Wait(args) => wait::main(&args),
        Command::Freeze(args) => freeze::freeze(args),
        Command::Unfreeze(args) => freeze::unfreeze(&args),
        Command::Evict(args) => release::evict_main(&args),
        Command::Verify(args) => verify::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        #[cfg(feature = "torture")]
        Command::Stress(args) => leasehold_torture::main(&args),
        #[cfg(feature = "lab")]
        Command::Demo(args) => leasehold_lab::main(&args),
        #[cfg(feature = "serve")]
        Command::Serve(of) => serve::main(&of, args.verbose),
        Command::Hold(args) => hold::main(&args),
        Command::Schema(args) => schema::main(&args),
        Command::Completions(args) => describe::completions(&args),
        Command::Man(args) => describe::man(&args),
        #[cfg(not(feature = "top"))]
        Command::Top(_) => missing::subcommand("top", "top"),
        #[cfg(not(feature = "torture"))]
        Command::Stress(_) => missing::subcommand("stress", "torture"),
        #[cfg(not(feature = "lab"))]
        Command::Demo(_) => missing::subcommand("demo", "lab"),
        #[cfg(not(feature = "serve"))]
        Command::Serve(_) => missing::subcommand("serve", "serve"),
        #[cfg(feature = "torture")]
        Command::TortureWorker => leasehold_torture::worker_main(),
        Command::Watchdog(args) => watchdog::main(&args),
    }
}
