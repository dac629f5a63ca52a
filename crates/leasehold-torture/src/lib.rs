//! `leasehold stress`: is my setup safe?
//!
//! Worker processes compete for locks. Under each lock they increment a register and add to a set,
//! which live in the parent process, as a database would. Meanwhile the workers are paused, killed and
//! disconnected. Everything they see is recorded in a history, and the checker reports which promise
//! of the store was broken, if any. A history can be saved to a file and checked again. To check other
//! lock implementations, write such a file.
//!
//! The same work is done on two resources. One accepts every write, the other rejects stale tokens.
//! On a store with leases, a holder that is paused for longer than its lease *must* corrupt the first
//! resource and *cannot* corrupt the second. If the first loses nothing, the run was too gentle, and
//! the result is inconclusive.
//!
//! Only three modules know about stores: `served` makes an in-process store available to the workers,
//! `relay` parses server URLs, and `ledger` keeps the fenced resource in the store itself.

#![forbid(unsafe_code)]

mod ambush;
mod archive;
mod args;
mod checker;
mod clocks;
mod faults;
mod history;
mod judged;
mod ledger;
mod line;
mod op;
mod outputs;
mod page;
mod parent;
mod reach;
mod record;
mod relay;
mod report;
mod resource;
mod run;
mod served;
mod trial;
mod wire;
mod worker;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use leasehold::{Error, ErrorKind};
use tokio::signal::unix::{SignalKind, signal};

use history::History;
use judged::Judged;
use trial::Trial;

pub use args::Args;
pub use wire::WORKER;

/// Runs `leasehold stress`.
pub fn main(args: &Args) -> ExitCode {
    let judged = outputs::Outputs::open(args).and_then(|outputs| {
        let tried = match &args.check {
            Some(file) => from_file(file).map(Some),
            None => torture(args),
        };
        tried.map(|tried| tried.map(|(trial, history)| (outputs, Judged::new(trial, history))))
    });
    match judged {
        Ok(None) => {
            eprintln!("leasehold stress: interrupted, no result");
            ExitCode::from(130)
        }
        Ok(Some((outputs, judged))) => {
            match args.json {
                true => println!("{}", wire::line(&judged.report).trim_end()),
                false => println!("{}", judged.report),
            }
            outputs.save(&judged).map_or_else(|e| failed(&e), |()| judged.report.exit_code())
        }
        Err(error) => failed(&error),
    }
}

fn failed(error: &Error) -> ExitCode {
    eprintln!("leasehold stress: {error}");
    ExitCode::from(match error.kind() {
        ErrorKind::Unreachable => 69,
        _ => 2,
    })
}

/// Reads a history from a file.
fn from_file(file: &Path) -> leasehold::Result<(Trial, History)> {
    let refused = |why: String| Error::new(ErrorKind::Config, format!("{}: {why}", file.display()));
    let opened = std::fs::File::open(file).map_err(|e| refused(e.to_string()))?;
    archive::read(std::io::BufReader::new(opened)).map_err(refused)
}

/// Runs the test. `None` means that it was interrupted. The end of the runtime then kills the
/// workers, including paused ones.
fn torture(args: &Args) -> leasehold::Result<Option<(Trial, History)>> {
    let failed = |e: std::io::Error| {
        Error::new(ErrorKind::Config, "cannot start the stress test").with_source(e)
    };
    // The runtime panics if it cannot open its own descriptors.
    let spare = || std::fs::File::open("/dev/null");
    let spares: Result<Vec<_>, _> = std::iter::repeat_with(spare).take(8).collect();
    drop(spares.map_err(failed)?);
    // The runtime has one thread, for two reasons. Check and write at a resource are then one step.
    // And the workers watch for the end of the thread that started them, which must live as long as
    // the run.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let program = std::env::current_exe().map_err(failed)?;
    let plan = args::Plan::new(args, program);
    if std::io::stderr().is_terminal() {
        eprintln!("{plan} …");
    }
    runtime.map_err(failed)?.block_on(async {
        let mut interrupted = signal(SignalKind::interrupt()).map_err(failed)?;
        let mut terminated = signal(SignalKind::terminate()).map_err(failed)?;
        tokio::select! {
            tried = run::run(plan) => tried.map(Some),
            _ = interrupted.recv() => Ok(None),
            _ = terminated.recv() => Ok(None),
        }
    })
}

/// Runs `leasehold torture-worker`, which [`main`] starts many times.
pub fn worker_main() -> ExitCode {
    worker::main()
}

/// Runs the test on a store that the caller has opened, and returns the report as JSON. `arguments`
/// are those of the command. Workers are started from `program`. This is for tests of the checker
/// itself.
///
/// # Errors
/// The errors of the run.
#[doc(hidden)]
pub fn report_on(
    store: leasehold::Client,
    arguments: &str,
    program: PathBuf,
) -> leasehold::Result<serde_json::Value> {
    #[derive(clap::Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }
    let refused = |e: &dyn std::fmt::Display| Error::new(ErrorKind::Config, e.to_string());
    let words = ["torture", "--store", "memory:"].into_iter().chain(arguments.split_whitespace());
    let command = <Command as clap::Parser>::try_parse_from(words).map_err(|e| refused(&e))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let plan = args::Plan::new(&command.args, program);
    let tried = runtime.map_err(|e| refused(&e))?.block_on(run::run_on(store, plan));
    let (trial, history) = tried?;
    serde_json::to_value(Judged::new(trial, history).report).map_err(|e| refused(&e))
}
