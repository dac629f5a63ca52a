//! Python, with the clients of other people that tests let contend with ours.

use std::path::{Path, PathBuf};

/// The interpreter of the environment that `install.sh` makes in the target directory.
pub fn python() -> PathBuf {
    let python = environment().join("python");
    assert!(python.exists(), "no {}: run ./test.sh --install", python.display());
    python
}

/// The folder of that environment's programs; it need not exist.
pub(crate) fn environment() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace.join("target"), Into::into);
    workspace.join(target).join("python/bin")
}
