//! The packages of PyPI and npm that `install.sh` puts into the target directory.

use std::path::{Path, PathBuf};

/// Returns the interpreter of the environment that `install.sh` creates in the target directory.
pub fn python() -> PathBuf {
    let python = environment().join("python");
    assert!(python.exists(), "no {}: run ./test.sh --install", python.display());
    python
}

/// Returns a file of an npm package, such as `axe-core/axe.min.js`.
pub fn node_module(file: &str) -> PathBuf {
    let target = environment().join("../..");
    let path = target.join("node/node_modules").join(file);
    assert!(path.exists(), "no {}: run ./test.sh --all --install", path.display());
    path
}

/// Returns the folder with the programs of the environment that `install.sh` creates. It need not
/// exist.
pub(crate) fn environment() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace.join("target"), Into::into);
    workspace.join(target).join("python/bin")
}
