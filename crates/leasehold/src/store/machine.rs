//! What tells one directory or file of one machine from all others.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::claim::ClaimId;

/// What is different after each start of the machine.
pub(super) fn boot_id() -> String {
    // Without it every client would be in a boot of its own: safe, if nobody else's.
    let read = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let unknown = |_| ClaimId::random().map(ClaimId::to_hex).unwrap_or_default();
    read.unwrap_or_else(unknown).trim().to_owned()
}

/// The identity of a store that is this file or directory: the same by every path to it and in
/// every container of this kernel, another on every other machine and after a restart.
pub(super) fn identity_of(scheme: &str, path: &Path) -> String {
    let boot = boot_id();
    match std::fs::metadata(path) {
        Ok(seen) => format!("{scheme}:{boot}/{:x}-{:x}", seen.dev(), seen.ino()),
        // It was removed under us: nobody else can be meant by it.
        Err(_) => format!("{scheme}:{boot}/gone"),
    }
}
