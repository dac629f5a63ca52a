//! Command-line arguments.

use std::path::PathBuf;

use leasehold::store::kit::did_you_mean;

use crate::stories::{ALL, named};
use crate::story::Story;

const HELP: &str = "\
Without a story, this command lists the stories. It plays each story twice, step by step: with the
common recipe, which is broken on purpose, and with leasehold. The stories use the servers that are
installed on this machine. Each server listens on a free port of 127.0.0.1 and keeps its data in a
temporary directory. At the end, the servers are stopped and their data is deleted.

Exit status:
  0   every story ended as described
  1   a story did not end as described
  2   bad usage
  69  a server is not installed or does not start

Examples:
  leasehold demo
  leasehold demo paused-holder
  leasehold demo --all --html stories.html
  leasehold demo --all --svg pictures";

/// Replay how well-known lock recipes fail
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// Stories to play [default: list them]
    #[arg(value_name = "STORY", conflicts_with = "all")]
    stories: Vec<String>,
    /// Play all stories whose servers are installed
    #[arg(long)]
    pub(crate) all: bool,
    /// Write the stories to FILE as a self-contained HTML page
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Write a picture of each story to DIR/STORY.svg
    #[arg(long, value_name = "DIR")]
    pub(crate) svg: Option<PathBuf>,
}

impl Args {
    /// Returns the requested stories in the order of the list, or the reason why a request is
    /// invalid.
    pub(crate) fn wanted(&self) -> Result<Vec<&'static Story>, String> {
        if self.all {
            return Ok(ALL.iter().collect());
        }
        if self.stories.is_empty() && (self.html.is_some() || self.svg.is_some()) {
            return Err("no story to write\nhint: name a story, or use --all".into());
        }
        let story = |name: &String| named(name).ok_or_else(|| unknown(name));
        self.stories.iter().map(story).collect()
    }
}

fn unknown(name: &str) -> String {
    let similar = did_you_mean(name, ALL.iter().map(|story| story.name));
    let list = "list all stories: leasehold demo";
    let hint = similar.map_or(list.to_owned(), |name| format!("did you mean {name:?}? Or {list}"));
    format!("unknown story {name:?}\nhint: {hint}")
}
