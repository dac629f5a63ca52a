//! A directory for one benchmark, on the disk that the build is on, removed when it ends.

use std::path::Path;

use tempfile::TempDir;

pub(crate) struct Scratch(TempDir);

impl Scratch {
    pub(crate) fn new() -> std::io::Result<Self> {
        tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).map(Self)
    }

    /// Where the raw subjects keep their file.
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// The file store in this directory.
    pub(crate) fn url(&self) -> String {
        Self::url_in(self.path())
    }

    /// The file store in the directory of another process's scratch.
    pub(crate) fn url_in(dir: &Path) -> String {
        format!("file:{}", dir.join("store").display())
    }
}
