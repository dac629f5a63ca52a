//! Python, with the clients of other people that tests let contend with ours.

use std::path::{Path, PathBuf};

/// The interpreter of the environment that `test.sh` makes in the target directory, with what
/// `requirements.txt` names.
pub fn python() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace.join("target"), Into::into);
    let python = workspace.join(target).join("python/bin/python");
    assert!(python.exists(), "no {}: run ./test.sh once", python.display());
    python
}
