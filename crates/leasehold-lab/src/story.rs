//! The definition of a story.

use std::pin::Pin;

use testbed::Server;

use crate::scene::Played;
use crate::trouble::Result;

/// A running story.
pub(crate) type Playing = Pin<Box<dyn Future<Output = Result<Played>>>>;

/// A way in which locks fail, replayed on a real server.
pub struct Story {
    /// The story's name on the command line.
    pub name: &'static str,
    /// What happens, in one line.
    pub line: &'static str,
    /// The kind of server that the story needs.
    pub server: Server,
    /// Three texts: what happens, why the recipe fails, and what leasehold does instead.
    pub telling: [&'static str; 3],
    /// Starts the servers and plays both halves.
    pub(crate) play: fn() -> Playing,
}
