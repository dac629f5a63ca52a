//! Python, with third-party lock clients that compete with leasehold in tests.

use std::path::{Path, PathBuf};

/// Returns the interpreter of the environment that `install.sh` creates in the target directory.
pub fn python() -> PathBuf {
    let python = environment().join("python");
    assert!(python.exists(), "no {}: run ./test.sh --install", python.display());
    python
}

/// Returns the folder with the programs of the environment that `install.sh` creates. It need not
/// exist.
pub(crate) fn environment() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace.join("target"), Into::into);
    workspace.join(target).join("python/bin")
}
