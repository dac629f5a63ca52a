//! `leasehold completions` and `leasehold man`.
//!
//! Both are generated from the command line's [definition](crate::args), so they always match this
//! version.

use std::io::{Write, stdout};
use std::process::ExitCode;

use clap_mangen::Man;

use crate::args::{self, CompletionsArgs, ManArgs};
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
            // This gives the subcommands their full names.
            command.build();
            match command.find_subcommand(name) {
                Some(found) => page(found.clone()),
                None => Err(Failure::new(USAGE, format!("unknown command {name:?}"))
                    .hint("leasehold --help lists the commands")),
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
    made.map(|()| text).map_err(|e| Failure::system("cannot render the page", e))
}

/// Returns the definition of the command line without hidden commands.
pub(crate) fn seen() -> clap::Command {
    let all = args::command();
    let bare = clap::Command::new("leasehold")
        .version(env!("CARGO_PKG_VERSION"))
        .about(all.get_about().cloned().unwrap_or_default())
        .after_help(all.get_after_help().cloned().unwrap_or_default())
        .disable_help_flag(true)
        .disable_version_flag(true)
        .args(all.get_arguments().cloned());
    let visible = all.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    // clap_mangen leaves out the help of options that are not in the short help.
    bare.subcommands(visible.map(|command| command.mut_args(|arg| arg.hide_short_help(false))))
}

fn print(text: &[u8]) -> ExitCode {
    // A closed stdout is not a failure.
    let _ = stdout().write_all(text).and_then(|()| stdout().flush());
    ExitCode::SUCCESS
}
