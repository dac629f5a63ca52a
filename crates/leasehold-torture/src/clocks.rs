//! Wrong wall clocks: each worker has one of its own, with libfaketime.
//!
//! Only the wall clock is wrong. The clocks that measure durations stay right, because the
//! guarantees assume that they differ by at most 1 %.

use std::path::{Path, PathBuf};
use std::time::Duration;

use fastrand::Rng;
use leasehold::store::kit::wall_micros;
use leasehold::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use tokio::process::Command;

use super::history::{Time, now};

/// The file of the library that is loaded into the workers. This one is for several threads.
const LIBRARY: &str = "faketime/libfaketimeMT.so.1";

/// Gives workers wrong wall clocks.
#[derive(Clone, Debug)]
pub(super) struct Clocks {
    library: PathBuf,
    most: Duration,
}

/// The wall clock of a worker.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct WallClock {
    /// How much it is ahead of the parent's.
    ahead_ms: i64,
    /// The parent's wall clock, and its clock for durations at the same time.
    parent_ms: u64,
    at: Time,
}

/// How often a process reads its clocks, because it may be paused between the two.
const TRIES: u32 = 3;
/// The greatest error that the check allows.
const TOLERANCE_MS: u64 = 500;

impl Clocks {
    /// Prepares clocks that are wrong by up to `most`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`]: libfaketime is not installed.
    pub(super) fn new(most: Duration) -> Result<Self> {
        let missing = || {
            Error::new(ErrorKind::Config, "--clock-skew needs libfaketime, which was not found")
                .with_hint("install it (Debian: apt-get install libfaketime)")
        };
        let library = libraries().into_iter().find(|path| path.exists()).ok_or_else(missing)?;
        Ok(Self { library, most })
    }

    /// Chooses the clock of a worker and sets it.
    pub(super) fn set(&self, command: &mut Command, rng: &mut Rng) -> WallClock {
        let most = i64::try_from(self.most.as_millis()).unwrap_or(i64::MAX);
        let ahead_ms = rng.i64(-most..=most);
        command.env("LD_PRELOAD", &self.library);
        let sign = if ahead_ms < 0 { '-' } else { '+' };
        let ahead = Duration::from_millis(ahead_ms.unsigned_abs()).as_secs_f64();
        command.env("FAKETIME", format!("{sign}{ahead:.3}"));
        command.env("FAKETIME_DONT_FAKE_MONOTONIC", "1").env("NO_FAKE_STAT", "1");
        WallClock { ahead_ms, parent_ms: wall_micros() / 1_000, at: now() }
    }

    /// Removes the files of a worker's clock, which a killed process leaves.
    pub(super) fn remove_files(pid: u32) {
        for name in [format!("faketime_shm_{pid}"), format!("sem.faketime_sem_{pid}")] {
            let _ = std::fs::remove_file(Path::new("/dev/shm").join(name));
        }
    }
}

/// Returns the places of the library: Debian's, and those of other distributions.
fn libraries() -> [PathBuf; 4] {
    let debian = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    [&debian, "/usr/lib64", "/usr/lib", "/usr/local/lib"]
        .map(|folder| Path::new(folder).join(LIBRARY))
}

impl WallClock {
    /// Checks that this process has this clock. Without it, the test would show nothing.
    pub(super) fn check(&self) -> std::result::Result<(), String> {
        for _ in 0..TRIES {
            if self.is_set(wall_micros() / 1_000, now()) {
                return Ok(());
            }
        }
        Err("--clock-skew has no effect: libfaketime did not set the clock of this process, \
             perhaps because it is statically linked"
            .into())
    }

    /// Returns whether a clock that shows `wall_ms` at the time `at` is this one.
    fn is_set(&self, wall_ms: u64, at: Time) -> bool {
        let passed = at.saturating_sub(self.at) / 1_000_000;
        let expected = self.parent_ms.saturating_add(passed).saturating_add_signed(self.ahead_ms);
        wall_ms.abs_diff(expected) <= TOLERANCE_MS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_that_was_not_set_is_noticed() {
        let parent_ms = 1_800_000_000_000;
        for ahead_ms in [-3_600_000_i64, -1_000, 1_000, 3_600_000] {
            let clock = WallClock { ahead_ms, parent_ms, at: 5_000_000_000 };
            // The process was paused for 100 s before it looked.
            let at = 105_000_000_000;
            assert!(clock.is_set((parent_ms + 100_010).saturating_add_signed(ahead_ms), at));
            assert!(!clock.is_set(parent_ms + 100_000, at), "{ahead_ms}");
        }
    }
}
