//! The file with the results of a campaign.
//!
//! This process opens, locks and reads it. A line is written by one write and synced. So the file
//! contains whole lines, unless the machine crashes during a write. Then the last line has no line
//! end. It is removed, and that run is repeated.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::run::Run;

/// The state, which is locked until it is dropped.
pub struct State {
    path: PathBuf,
    file: File,
    runs: Vec<Run>,
}

impl State {
    /// Opens the file, or creates it.
    ///
    /// # Errors
    /// One line with the reason:
    /// - The file cannot be read or written.
    /// - Another campaign has locked it.
    /// - A line is not a valid run.
    pub fn open(path: &Path) -> Result<Self, String> {
        let failed = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path);
        let mut file = file.map_err(|e| failed(&e))?;
        file.try_lock().map_err(|e| match e {
            TryLockError::WouldBlock => failed(&"another campaign is at work with it"),
            TryLockError::Error(e) => failed(&e),
        })?;
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(|e| failed(&e))?;
        let whole = text.rfind('\n').map_or(0, |at| at + 1);
        file.set_len(whole as u64)
            .and_then(|()| file.seek(SeekFrom::End(0)))
            .map_err(|e| failed(&e))?;
        let runs = read(&text[..whole]).map_err(|e| failed(&e))?;
        Ok(Self { path: path.to_owned(), file, runs })
    }

    /// Returns the runs in order.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Adds a run and assigns its number.
    ///
    /// # Errors
    /// The run cannot be written. The campaign must then stop, because later runs would be lost.
    pub(crate) fn add(&mut self, mut run: Run) -> Result<&Run, String> {
        run.run = self.runs.len() + 1;
        let mut line = serde_json::to_string(&run).map_err(|e| e.to_string())?;
        line.push('\n');
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|e| format!("{}: {e}", self.path.display()))?;
        self.runs.push(run);
        Ok(self.runs.last().expect("it was just added"))
    }
}

/// Parses lines into runs.
///
/// # Errors
/// The number of the first invalid line.
pub fn read(text: &str) -> Result<Vec<Run>, String> {
    let lines = (1..).zip(text.lines());
    let run = |(number, line): (usize, &str)| {
        let run: Run = serde_json::from_str(line).map_err(|e| format!("line {number}: {e}"))?;
        match run.run == number {
            true => Ok(run),
            false => Err(format!("line {number}: it says that it is run {}", run.run)),
        }
    };
    lines.map(run).collect()
}
