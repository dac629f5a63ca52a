//! The files of a new database server, which are created once for each test process and copied for
//! each server.
//!
//! Creating them takes one to two seconds of processor time, and copying them takes a tenth of
//! that. Some test programs start dozens of servers. A copy equals new files, because no server has
//! ever run on the original.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::command::run;
use crate::reaper;
use crate::version::{Server, Version};

/// Copies the files of a new server to `to`, which must not exist yet. `make` creates them in a
/// directory below the one that it is given, and returns their path.
pub(crate) fn copy(
    server: Server,
    version: Version,
    to: &Path,
    make: impl FnOnce(&Path) -> PathBuf,
) {
    type Made = Arc<OnceLock<PathBuf>>;
    static MADE: Mutex<BTreeMap<(&str, bool), Made>> = Mutex::new(BTreeMap::new());
    let key = (server.name(), version == Version::Oldest);
    let made = {
        let mut all = MADE.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(key).or_default())
    };
    // Callers that need the same files wait here, and others do not.
    let from = made.get_or_init(|| make(&reaper::lasting_directory("new")));
    // The copy keeps owners and permissions, and sparse files stay sparse.
    run(Command::new("cp").arg("-a").arg("--").arg(from).arg(to));
}
