//! Plays one story, in a thread of its own.
//!
//! `testbed` is made for tests, and panics if a server does not start. So each story has its own
//! thread, whose panic becomes the error of that story only.

use std::any::Any;

use crate::scene::Played;
use crate::story::Story;

/// Starts the servers of a story, plays it, and stops them.
///
/// # Errors
/// The reason why the story could not be played to its end, in one line.
pub fn play(story: &'static Story) -> Result<Played, String> {
    let thread = std::thread::Builder::new().name(story.name.to_owned());
    let playing = thread.spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| format!("cannot start a thread: {e}"))?;
        runtime.block_on((story.play)()).map_err(|trouble| trouble.to_string())
    });
    let playing = playing.map_err(|e| format!("cannot start a thread: {e}"))?;
    playing.join().unwrap_or_else(|panic| Err(first_line(&*panic)))
}

/// Returns the first line of a panic's message.
fn first_line(panic: &dyn Any) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panic");
    let line = text.lines().next().unwrap_or_default();
    format!("cannot start or use a server: {line}")
}
