//! `leasehold completions` and `leasehold man`: the command line, told to shells and to `man`.
//!
//! Both are made of what the command reads ([`Args`]), so they are never of another version.

use std::io::{Write, stdout};
use std::process::ExitCode;

use clap::CommandFactory;
use clap_mangen::Man;

use crate::args::{Args, CompletionsArgs, ManArgs};
use crate::exit::{Failure, USAGE};

pub(crate) fn completions(args: &CompletionsArgs) -> ExitCode {
    let mut command = seen();
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "leasehold", &mut text);
    print(&text)
}

pub(crate) fn man(args: &ManArgs) -> ExitCode {
    let done = match (&args.into, &args.subcommand) {
        (Some(directory), _) => clap_mangen::generate_to(seen(), directory)
            .map(|_| Vec::new())
            .map_err(|e| Failure::system(&format!("cannot write to {}", directory.display()), e)),
        (None, None) => page(seen()),
        (None, Some(name)) => {
            let mut command = seen();
            // The names of its parts are those of the whole from then on.
            command.build();
            match command.find_subcommand(name) {
                Some(found) => page(found.clone()),
                None => Err(Failure::new(USAGE, format!("there is no command {name:?}"))),
            }
        }
    };
    match done {
        Ok(text) => print(&text),
        Err(failure) => failure.report(),
    }
}

fn page(command: clap::Command) -> Result<Vec<u8>, Failure> {
    let mut text = Vec::new();
    let made = Man::new(command).render(&mut text);
    made.map(|()| text).map_err(|e| Failure::system("cannot make the page", e))
}

/// The command line, without what is not to be seen.
pub(crate) fn seen() -> clap::Command {
    let all = Args::command();
    let bare = clap::Command::new("leasehold")
        .version(env!("CARGO_PKG_VERSION"))
        .about(all.get_about().cloned().unwrap_or_default())
        .after_help(all.get_after_help().cloned().unwrap_or_default());
    bare.subcommands(all.get_subcommands().filter(|command| !command.is_hide_set()).cloned())
}

fn print(text: &[u8]) -> ExitCode {
    // A reader that has seen enough is no failure.
    let _ = stdout().write_all(text).and_then(|()| stdout().flush());
    ExitCode::SUCCESS
}
