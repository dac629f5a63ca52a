//! A directory for one benchmark, on the disk of the build. It is removed when the benchmark ends.

use std::path::Path;

use tempfile::TempDir;

pub(crate) struct Scratch(TempDir);

impl Scratch {
    pub(crate) fn new() -> std::io::Result<Self> {
        tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).map(Self)
    }

    /// Returns the directory in which the raw subjects keep their file.
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Returns the URL of the file store in this directory.
    pub(crate) fn url(&self) -> String {
        Self::url_in(self.path())
    }

    /// Returns the URL of the file store in another process's directory.
    pub(crate) fn url_in(dir: &Path) -> String {
        format!("file:{}", dir.join("store").display())
    }
}
