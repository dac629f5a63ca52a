//! What the user asks for.

use std::path::PathBuf;

use crate::stories::{ALL, named};
use crate::story::Story;

const HELP: &str = "\
Each story is played twice, step by step: with the recipe that people know, which is broken
on purpose, and with leasehold. Without a story, they are listed. The servers are those that
are installed on this machine; they listen on free ports of 127.0.0.1, keep their data in a
directory of their own, and are gone at the end.

Exit codes: 0 all ended as they are told; 1 one did not; 2 bad usage; 69 a story that was
asked for by name needs a server that is not installed, or a server could not be started.

Examples:
  leasehold lab
  leasehold lab paused-holder
  leasehold lab --all --html stories.html
  leasehold lab --all --svg pictures";

/// Shows how well-known recipes for locks fail, on servers that it starts itself.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// The stories to play.
    #[arg(value_name = "STORY", conflicts_with = "all")]
    stories: Vec<String>,
    /// All stories; those whose server is not installed are named and left out.
    #[arg(long)]
    pub(crate) all: bool,
    /// Writes what was played into this file, as a page without references to elsewhere.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Writes a picture of each story into this directory, as STORY.svg.
    #[arg(long, value_name = "DIR")]
    pub(crate) svg: Option<PathBuf>,
}

impl Args {
    /// The stories that are asked for, in the order of the list; or why not.
    pub(crate) fn wanted(&self) -> Result<Vec<&'static Story>, String> {
        if self.all {
            return Ok(ALL.iter().collect());
        }
        if self.stories.is_empty() && (self.html.is_some() || self.svg.is_some()) {
            return Err("nothing to write: name a story, or give --all".into());
        }
        let story = |name: &String| {
            named(name)
                .ok_or_else(|| format!("there is no story {name:?}: `leasehold lab` lists them"))
        };
        self.stories.iter().map(story).collect()
    }
}
