//! Waits for servers to reach a state.

use std::time::{Duration, Instant};

/// Time limit that is only reached if something is wrong.
const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) fn wait(what: &str, done: &dyn Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
