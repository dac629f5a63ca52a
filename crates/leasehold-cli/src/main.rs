//! The `leasehold` command.

use std::process::ExitCode;

use clap::Parser;

mod torture;

#[derive(Parser)]
#[command(name = "leasehold", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Torture(torture::Args),
    #[command(name = torture::WORKER, hide = true)]
    TortureWorker,
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Torture(args) => torture::main(&args),
        Command::TortureWorker => torture::worker_main(),
    }
}
