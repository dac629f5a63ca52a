//! Diagnoses the location of a file store: see [`leasehold_core::doctor`].

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use leasehold_core::doctor::{Finding, own_clock};
use leasehold_core::kit::file_system;

/// Checks the store's directory. May wait for the disk.
pub(super) fn diagnose(root: &Path, now: u64) -> Vec<Finding> {
    let mut found: Vec<Finding> = own_clock(now).into_iter().collect();
    found.extend(file_system(root, "the store's directory"));
    if let Ok(seen) = fs::metadata(root) {
        found.extend(sharing(root, &seen));
        found.extend(owner(&seen));
    }
    found
}

/// Returns findings about shared access. A user that can lock can also write the queues. File
/// permissions do not protect the users of a shared store from each other.
fn sharing(root: &Path, seen: &Metadata) -> Option<Finding> {
    let (mode, group) = (seen.mode(), seen.gid());
    if mode & 0o002 != 0 {
        return Some(Finding::weak(
            "rights",
            format!(
                "every user of this machine may write to the store's directory (mode {:o})",
                mode & 0o7777
            ),
            "every user can evict any holder; the sticky bit prevents deleting other users' \
             files, but not writing to them",
            format!(
                "share it with a group: `chgrp GROUP {dir}`, then `chmod 2770 {dir}`",
                dir = root.display()
            ),
        ));
    }
    (mode & 0o020 != 0).then(|| {
        Finding::note(
            "group",
            format!("the members of group {group} share the store"),
            "each of them can evict any holder; other users cannot",
        )
    })
}

fn owner(seen: &Metadata) -> Option<Finding> {
    let (owner, me) = (seen.uid(), rustix::process::geteuid().as_raw());
    (owner != me && owner != 0).then(|| {
        Finding::note(
            "owner",
            format!("the store's directory belongs to user {owner}"),
            "this user can evict any holder, and deny other users access to the directory",
        )
    })
}
