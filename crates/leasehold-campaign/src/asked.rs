//! How torture has servers disturbed that belong to somebody else's process.
//!
//! Torture runs a command again and again, and takes the servers for disturbed until it ends. Ours makes a
//! file and ends when that is gone; whoever has the servers looks for the file, does something to
//! them, and removes it. A command whose master has died fails, and torture with it.

use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;

use crate::breakable::Breakable;

const SCRIPT: &str =
    ": >\"$0\" && while [ -e \"$0\" ]; do kill -0 \"$1\" || exit 1; sleep 0.02; done";

/// The command, and who does what it asks for.
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
    /// A command of this process's own.
    pub fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        Self { file: directory.path().join("asked"), _directory: directory }
    }

    /// What torture is told: a `--`, and the command.
    pub fn words(&self) -> Vec<String> {
        let file = self.file.to_str().expect("a temporary directory has a plain name");
        let master = std::process::id().to_string();
        ["--", "sh", "-c", SCRIPT, file, &master].map(String::from).to_vec()
    }

    /// Disturbs the servers whenever that is asked for, until `run` has ended.
    ///
    /// # Panics
    /// As `run` or the servers do, when both are done.
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
