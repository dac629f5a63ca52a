//! The program that `./campaign.sh` runs. See the library.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use leasehold_campaign::{Campaign, Ended, State, Store};

/// Run torture on every store, and continue where the last campaign stopped
#[derive(Parser)]
struct Args {
    /// The leasehold program that runs torture
    #[arg(long, value_name = "FILE")]
    program: PathBuf,
    /// State file, with a line of JSON for each run
    #[arg(long, value_name = "FILE", default_value = "docs/internals/reliability/runs.jsonl")]
    state: PathBuf,
    /// Time limit in minutes; pieces that would exceed it are not begun
    #[arg(long, value_name = "N", default_value_t = 110)]
    minutes: u64,
    /// Duration of a piece in seconds; fast stores take four times that, up to 120
    #[arg(long, value_name = "N", default_value_t = 120)]
    piece: u64,
    /// Directory for the histories of runs that broke a promise
    #[arg(long, value_name = "FOLDER", default_value = "target/campaign")]
    keep: PathBuf,
    /// Use only these stores, by their names in the table
    #[arg(long, value_name = "STORE", value_delimiter = ',', value_parser = store)]
    only: Vec<Store>,
}

fn store(name: &str) -> Result<Store, String> {
    let found = Store::ALL.into_iter().find(|store| store.name() == name);
    let names = Store::ALL.map(Store::name).join(", ");
    found.ok_or_else(|| format!("none of {names}"))
}

fn main() -> ExitCode {
    let args = Args::parse();
    // In it, members are partitioned, and the power of servers is cut.
    testbed::enter_own_network();
    // Servers of leasehold itself run in directories of their own.
    let program = match args.program.canonicalize() {
        Ok(program) => program,
        Err(why) => {
            eprintln!("campaign: {}: {why}", args.program.display());
            return ExitCode::FAILURE;
        }
    };
    let campaign = Campaign {
        program,
        stores: if args.only.is_empty() { Store::ALL.to_vec() } else { args.only },
        time: Duration::from_secs(args.minutes * 60),
        piece: Duration::from_secs(args.piece),
        keep: args.keep,
        is_told: true,
    };
    let ended = State::open(&args.state).and_then(|mut state| {
        let ended = campaign.go_on(&mut state)?;
        eprintln!("{}", leasehold_campaign::table::progress(state.runs()));
        Ok(ended)
    });
    match ended {
        Ok(Ended::Enough) => {
            eprintln!("campaign: each piece has run, and there are enough operations and faults");
            ExitCode::SUCCESS
        }
        Ok(Ended::Time) => {
            eprintln!("campaign: the time is over; run it again to go on");
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("campaign: {why}");
            ExitCode::FAILURE
        }
    }
}
