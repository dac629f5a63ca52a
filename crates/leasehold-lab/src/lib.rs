//! `leasehold demo`: replays how well-known lock recipes fail.
//!
//! A story is a list of steps that a few clients take one after the other on a real server, which this
//! crate starts. Each story is played twice: once with the common recipe, which fails, and once with
//! leasehold, which handles the same steps safely. Each step shows the server's actual reply.
//!
//! # Why every run is the same
//! - *One step at a time.* The story determines which client is next; no scheduler is involved.
//! - *No sleeps.* Where a lease has to expire, the story polls the server until it has.
//! - *Clocks are numbers.* A recipe that reads its client's clock is given the time in the story.
//! - *A crashed client does nothing more.* It neither renews nor releases what it has acquired, which is
//!   all that a server sees of `kill -9`. A paused holder looks the same for a while.
//! - *Random values are not shown.* Tokens, ports and times differ from run to run. They are compared and
//!   shown as t1, t2, …
//!
//! So the picture of a story is the same in each run, and a test compares it with the picture in the
//! documentation.
//!
//! The module `naive` contains the recipes, which are broken on purpose.

#![forbid(unsafe_code)]

mod args;
mod naive;
mod ours;
mod play;
mod scene;
mod server;
mod show;
mod stage;
mod stories;
mod story;
mod trouble;
mod wire;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

pub use args::Args;
pub use play::play;
pub use scene::{Belief, Cell, Half, Lane, Mark, Played, Step};
pub use show::{html, svg, terminal};
pub use stories::{ALL, named};
pub use story::Story;

/// Exit code: a story did not end as described.
const OTHERWISE: u8 = 1;
/// Exit code: bad usage.
const USAGE: u8 = 2;
/// Exit code: a server that a story needs is missing.
const MISSING: u8 = 69;

/// Runs `leasehold demo`.
pub fn main(args: &Args) -> ExitCode {
    let wanted = match args.wanted() {
        Ok(wanted) => wanted,
        Err(why) => return failed(USAGE, &why),
    };
    if wanted.is_empty() {
        say(&terminal::list(ALL));
        return ExitCode::SUCCESS;
    }
    // A server that cannot be started panics. The panic's message becomes the story's error.
    std::panic::set_hook(Box::new(|_| {}));
    let colours = terminal::Colours::of_this_terminal();
    let (mut code, mut all) = (0, Vec::new());
    for story in wanted {
        let missing = story.server.missing();
        if !missing.is_empty() {
            let (name, packages) = (story.name, missing.join(" "));
            eprintln!("leasehold demo: skipped {name}: missing packages: {packages}");
            code = if args.all { code } else { MISSING };
            continue;
        }
        match play(story) {
            Ok(played) => {
                say(&terminal::story(story, &played, colours));
                code = if played.is_as_told() { code } else { OTHERWISE };
                all.push((story, played));
            }
            Err(why) => {
                eprintln!("leasehold demo: {}: {why}", story.name);
                code = MISSING;
            }
        }
    }
    match save(args, &all) {
        Ok(()) => ExitCode::from(code),
        Err(why) => failed(USAGE, &why),
    }
}

/// Prints text. A reader that closes the pipe early is not an error.
fn say(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
}

fn failed(code: u8, why: &str) -> ExitCode {
    eprintln!("leasehold demo: {why}");
    ExitCode::from(code)
}

/// Writes the requested files.
fn save(args: &Args, all: &[(&Story, Played)]) -> Result<(), String> {
    let write = |path: &Path, text: &str| {
        std::fs::write(path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))
    };
    if let Some(file) = &args.html {
        write(file, &html::page(all))?;
    }
    if let Some(folder) = &args.svg {
        std::fs::create_dir_all(folder)
            .map_err(|e| format!("cannot create {}: {e}", folder.display()))?;
        for (story, played) in all {
            write(&folder.join(format!("{}.svg", story.name)), &svg::picture(story, played))?;
        }
    }
    Ok(())
}
