//! The files that a run is written to.
//!
//! They are opened before the run, so that a wrong path is reported immediately and not after an
//! hour. The old contents stay until there are new ones.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use leasehold::{Error, ErrorKind, Result};

use super::args::Args;
use super::judged::Judged;
use super::{archive, page};

/// The requested files.
pub(super) struct Outputs {
    html: Option<Output>,
    history: Option<Output>,
}

impl Outputs {
    /// Opens the files.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if a file cannot be written.
    pub(super) fn open(args: &Args) -> Result<Self> {
        let open = |file: &Option<PathBuf>| file.as_deref().map(Output::open).transpose();
        Ok(Self { html: open(&args.html)?, history: open(&args.history)? })
    }

    /// Writes the files.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if a file cannot be written completely.
    pub(super) fn save(self, judged: &Judged) -> Result<()> {
        if let Some(output) = self.history {
            output.write(|out| archive::write(&judged.trial, &judged.history, out))?;
        }
        if let Some(output) = self.html {
            output.write(|out| out.write_all(page::page(judged).as_bytes()))?;
        }
        Ok(())
    }
}

struct Output {
    path: PathBuf,
    file: File,
}

impl Output {
    fn open(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|e| cannot_write(path, &e))?;
        Ok(Self { path: path.to_owned(), file })
    }

    fn write(
        self,
        content: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
    ) -> Result<()> {
        let written = || {
            // A pipe or a terminal has no contents to truncate.
            if self.file.metadata()?.is_file() {
                self.file.set_len(0)?;
            }
            let mut out = BufWriter::new(self.file);
            content(&mut out)?;
            out.flush()
        };
        written().map_err(|e| cannot_write(&self.path, &e))
    }
}

fn cannot_write(path: &Path, why: &std::io::Error) -> Error {
    Error::new(ErrorKind::Config, format!("cannot write {}: {why}", path.display()))
}
