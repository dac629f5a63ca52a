//! What a story is.

use std::pin::Pin;

use testbed::Server;

use crate::scene::Played;
use crate::trouble::Result;

/// A story while it is played.
pub(crate) type Playing = Pin<Box<dyn Future<Output = Result<Played>>>>;

/// A way in which locks fail, to be played on a real server.
pub struct Story {
    /// What it is called on the command line.
    pub name: &'static str,
    /// What happens, in one line.
    pub line: &'static str,
    /// The failures, as docs/design.md numbers them.
    pub rows: &'static str,
    /// What it is played on.
    pub server: Server,
    /// What happens; why the recipe cannot do without; what leasehold does about it.
    pub telling: [&'static str; 3],
    /// Starts the servers and plays both halves.
    pub(crate) play: fn() -> Playing,
}
