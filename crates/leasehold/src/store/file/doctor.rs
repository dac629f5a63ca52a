//! What is wrong with where a file store is: see [`crate::doctor`].

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::doctor::{Finding, own_clock};
use crate::store::machine::file_system;

/// Looks at the store's directory; waits for the disk.
pub(super) fn diagnose(root: &Path, now: u64) -> Vec<Finding> {
    let mut found: Vec<Finding> = own_clock(now).into_iter().collect();
    found.extend(file_system(root, "the store's directory"));
    found.extend(fs::metadata(root).ok().and_then(|seen| rights(seen.mode())));
    found
}

fn rights(mode: u32) -> Option<Finding> {
    let all = mode & 0o002 != 0;
    let sticky = mode & 0o1000 != 0;
    match (all, sticky) {
        (true, false) => Some(Finding::weak(
            "rights",
            "everybody on this machine may delete the files of the store",
            "who deletes a file takes that lock away from whoever holds it",
            "chmod o-w the directory, or chmod +t it, so that each may delete only its own",
        )),
        _ => None,
    }
}
