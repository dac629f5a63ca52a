//! Generates the command reference, `docs/reference/cli.md`, from the definition of the command
//! line.
//!
//! To update it: `UPDATE_DOCS=1 cargo test -p leasehold-cli --all-features reference`.

use std::fmt::Write;

use clap::{Arg, Command};

use crate::describe::seen;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/cli.md");

const HEAD: &str = "\
# Command reference

`leasehold COMMAND --help` and `leasehold man COMMAND` explain more. Exit statuses are in [Shell
scripts](../guide/shell-scripts.md#exit-status). `NAME` is the name of the lock. This page is generated.
";

#[test]
fn the_command_reference_is_up_to_date() {
    let wanted = page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(PAGE, wanted).unwrap();
        return;
    }
    let written = std::fs::read_to_string(PAGE).unwrap_or_default();
    assert!(
        written == wanted,
        "docs/reference/cli.md is stale: run UPDATE_DOCS=1 cargo test -p leasehold-cli --all-features reference"
    );
}

fn page() -> String {
    let mut command = seen();
    command.build();
    let mut page = HEAD.to_owned();
    let commands: Vec<&Command> = visible(&command).collect();
    let shared = shared(&commands);
    page.push_str("\n## Common options\n\n");
    for id in &shared {
        let found = commands.iter().flat_map(|command| options(command));
        option(&mut page, found.into_iter().find(|arg| arg.get_id().as_str() == id).unwrap());
    }
    for (n, command) in commands.iter().enumerate() {
        let _ = write!(page, "\n## {}\n\n{}.\n\n", command.get_name(), about(command));
        describe(&mut page, command, &shared, (n > 0).then_some(commands[0]));
    }
    page
}

/// Writes the usage and the options of a command, and those of its subcommands. Options that the
/// first command also has are only listed by name.
fn describe(page: &mut String, command: &Command, shared: &[String], first: Option<&Command>) {
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").lines().map(str::trim);
    let usage: Vec<String> = usage.map(|line| format!("`{line}`")).collect();
    let _ = writeln!(page, "{}", usage.join(" or "));
    let own = options(command).filter(|arg| {
        !shared.contains(&arg.get_id().to_string()) && text(arg) != "Name of the lock"
    });
    let (known, own): (Vec<&Arg>, Vec<&Arg>) = own.partition(|arg| {
        let is_same = |other: &&Arg| other.get_id() == arg.get_id() && text(other) == text(arg);
        first.is_some_and(|first| options(first).any(|other| is_same(&other)))
    });
    if !own.is_empty() {
        page.push('\n');
    }
    for arg in own {
        option(page, arg);
    }
    if let Some(first) = first.filter(|_| !known.is_empty()) {
        let names: Vec<String> = known.iter().map(|arg| format!("`{}`", name(arg))).collect();
        let _ = writeln!(page, "\nAs for [`{0}`](#{0}): {1}.", first.get_name(), names.join(", "));
    }
    for below in visible(command) {
        let _ = write!(
            page,
            "\n### {} {}\n\n{}.\n\n",
            command.get_name(),
            below.get_name(),
            about(below)
        );
        describe(page, below, shared, first);
    }
}

fn visible(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|below| !below.is_hide_set() && below.get_name() != "help")
}

fn options(command: &Command) -> impl Iterator<Item = &Arg> {
    let is_shown =
        |arg: &&Arg| !arg.is_hide_set() && !["help", "version"].contains(&arg.get_id().as_str());
    command
        .get_arguments()
        .filter(is_shown)
        .filter(|arg| !arg.is_positional() || arg.get_help().is_some())
}

/// Returns the options that more than half of the commands have with the same help.
fn shared(commands: &[&Command]) -> Vec<String> {
    let all = || commands.iter().flat_map(|command| options(command));
    let same = |one: &Arg, other: &Arg| {
        one.get_id() == other.get_id() && text(one) == text(other) && !one.is_positional()
    };
    let mut shared: Vec<String> = Vec::new();
    for arg in all() {
        let count = all().filter(|other| same(arg, other)).count();
        if count * 2 > commands.len() && !shared.contains(&arg.get_id().to_string()) {
            shared.push(arg.get_id().to_string());
        }
    }
    shared
}

/// Returns the names of an option and its value, such as `-w, --wait DUR`.
fn name(arg: &Arg) -> String {
    let mut names = Vec::new();
    names.extend(arg.get_short().map(|short| format!("-{short}")));
    names.extend(arg.get_long().map(|long| format!("--{long}")));
    let mut name = names.join(", ");
    let values = arg.get_value_names().unwrap_or_default();
    if arg.get_action().takes_values() && !values.is_empty() {
        let values: Vec<String> = values.iter().map(ToString::to_string).collect();
        let separator = if name.is_empty() { "" } else { " " };
        let _ = write!(name, "{separator}{}", values.join(" "));
    }
    name
}

fn option(page: &mut String, arg: &Arg) {
    let takes = arg.get_action().takes_values();
    let mut help = text(arg);
    let defaults: Vec<_> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if takes
        && !defaults.is_empty()
        && !arg.is_hide_default_value_set()
        && !help.contains("[default")
    {
        let _ = write!(help, " [default: {}]", defaults.join(" "));
    }
    let _ = writeln!(page, "- `{}`: {help}", name(arg));
}

/// Returns the first paragraph of an option's help, in one line.
fn text(arg: &Arg) -> String {
    one_line(&arg.get_help().map(ToString::to_string).unwrap_or_default())
}

fn about(command: &Command) -> String {
    let about = one_line(&command.get_about().map(ToString::to_string).unwrap_or_default());
    about.trim_end_matches('.').to_owned()
}

/// Returns the first paragraph in one line of Markdown. Text in angle brackets must not become an
/// HTML element.
fn one_line(text: &str) -> String {
    let first = text.split("\n\n").next().unwrap_or_default();
    first.split_whitespace().collect::<Vec<_>>().join(" ").replace('<', "\\<").replace('|', "\\|")
}
