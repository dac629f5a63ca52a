//! Lets a torture run disturb servers that another process manages.
//!
//! Torture runs a command repeatedly, and counts the servers as disturbed until it ends. The
//! command here creates a file and ends when the file is gone. The process that manages the servers
//! watches for the file, disturbs the servers, and removes it. If that process has died, the
//! command fails, and so does torture.

use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;

use crate::breakable::Breakable;

const SCRIPT: &str =
    ": >\"$0\" && while [ -e \"$0\" ]; do kill -0 \"$1\" || exit 1; sleep 0.02; done";

/// The command, and the side that disturbs the servers.
pub struct Asked {
    _directory: TempDir,
    file: PathBuf,
}

impl Default for Asked {
    fn default() -> Self {
        Self::new()
    }
}

impl Asked {
    /// Creates a command for this process.
    pub fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        Self { file: directory.path().join("asked"), _directory: directory }
    }

    /// Returns the arguments for torture: a `--` and the command.
    pub fn words(&self) -> Vec<String> {
        let file = self.file.to_str().expect("a temporary directory has a plain name");
        let master = std::process::id().to_string();
        ["--", "sh", "-c", SCRIPT, file, &master].map(String::from).to_vec()
    }

    /// Disturbs the servers whenever the command runs, until `run` has ended, and returns its
    /// result.
    ///
    /// # Panics
    /// If `run` panics, or the servers cannot be disturbed.
    pub fn serve<T: Send>(&self, servers: &mut Breakable, run: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let run = scope.spawn(run);
            let mut n = 0;
            while !run.is_finished() {
                if self.file.exists() {
                    servers.disturb(n);
                    n += 1;
                    std::fs::remove_file(&self.file).expect("a file that the command made");
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            run.join().unwrap_or_else(|why| std::panic::resume_unwind(why))
        })
    }
}
