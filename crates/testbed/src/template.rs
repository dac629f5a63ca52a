//! The files of a new database server, made once for each test process and copied for each server.
//!
//! To make them takes one to two seconds of a processor (what a server installs into itself), to copy
//! them a tenth of one, and some test programs start dozens of servers. A copy is what a new one is:
//! nothing has ever run on it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::command::run;
use crate::reaper;
use crate::version::{Server, Version};

/// Copies the files of a new server to `to`, which is not there yet. `make` makes them in a directory
/// of its own below the one that it is given, whose path it returns.
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
    // Who needs the same waits for it here, and others do not.
    let from = made.get_or_init(|| make(&reaper::directory("new")));
    // With owners and rights; sparse files stay sparse.
    run(Command::new("cp").arg("-a").arg("--").arg(from).arg(to));
}
