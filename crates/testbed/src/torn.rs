//! Writes that are torn by a power cut.
//!
//! A disk writes sectors, and in any order until a sync. So after a power cut, a file may contain
//! some sectors of a write that was not synced, and not the others. The [disk](crate::Disk) itself
//! loses all of them or none. This module adds the states in between: it compares each file before
//! the cut with the same file after it, and applies a part of the difference.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::seeded_rng::SeededRng;

/// What a disk writes as a whole, in bytes.
const SECTOR: usize = 512;

/// The files of a directory and of those in it.
pub(crate) struct Files(BTreeMap<PathBuf, File>);

struct File {
    /// Distinguishes this file from another one that replaced it, as by a rename.
    identity: (u64, SystemTime),
    bytes: Vec<u8>,
}

impl File {
    fn read(path: &Path, metadata: &Metadata) -> io::Result<Self> {
        let identity = (metadata.ino(), metadata.created()?);
        Ok(Self { identity, bytes: fs::read(path)? })
    }
}

impl Files {
    /// Reads all files. No process may write.
    pub(crate) fn of(directory: &Path) -> Self {
        let mut files = BTreeMap::new();
        add(directory, &mut files)
            .unwrap_or_else(|why| panic!("cannot read {}: {why}", directory.display()));
        Self(files)
    }

    /// Applies a part of what was written to these files and lost. Returns the number of changed
    /// files.
    pub(crate) fn tear(&self, directory: &Path, rng: &mut SeededRng) -> usize {
        let mut changed = 0;
        for (path, kept) in Self::of(directory).0 {
            let Some(written) = self.0.get(&path) else { continue };
            // The blocks of a file that was shortened stay as they were until that is permanent.
            let is_shorter = written.bytes.len() < kept.bytes.len();
            if written.identity != kept.identity || is_shorter {
                continue;
            }
            let bytes = torn(&kept.bytes, &written.bytes, rng);
            if bytes != kept.bytes {
                fs::write(&path, bytes)
                    .unwrap_or_else(|why| panic!("cannot write {}: {why}", path.display()));
                changed += 1;
            }
        }
        changed
    }
}

/// Changes the times of the last changes of all files.
pub(crate) fn set_times(directory: &Path, time: SystemTime) {
    for path in Files::of(directory).0.keys() {
        let changed =
            fs::File::options().append(true).open(path).and_then(|f| f.set_modified(time));
        changed.unwrap_or_else(|why| panic!("cannot change {}: {why}", path.display()));
    }
}

fn add(directory: &Path, files: &mut BTreeMap<PathBuf, File>) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let metadata = fs::symlink_metadata(&path)?;
        if metadata.is_dir() {
            add(&path, files)?;
        } else if metadata.is_file() {
            let file = File::read(&path, &metadata)?;
            files.insert(path, file);
        }
    }
    Ok(())
}

/// Returns a state of a file between what was kept and what was written. Sectors are overwritten in
/// any order, and the file grows from its end.
fn torn(kept: &[u8], written: &[u8], rng: &mut SeededRng) -> Vec<u8> {
    let mut torn = kept.to_vec();
    // The sector in which the file ended is written together with the beginning of its growth.
    let whole = kept.len() / SECTOR * SECTOR;
    for start in (0..whole).step_by(SECTOR) {
        if rng.below(2) == 0 {
            torn[start..start + SECTOR].copy_from_slice(&written[start..start + SECTOR]);
        }
    }
    let sectors = (written.len() - whole).div_ceil(SECTOR);
    let count = rng.index(sectors + 1);
    if count > 0 {
        torn.truncate(whole);
        torn.extend_from_slice(&written[whole..(whole + count * SECTOR).min(written.len())]);
    }
    torn
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the states that 1,000 cuts lead to.
    fn states(kept: &[u8], written: &[u8]) -> Vec<Vec<u8>> {
        let mut rng = SeededRng(1);
        let mut states: Vec<_> = (0..1_000).map(|_| torn(kept, written, &mut rng)).collect();
        states.sort();
        states.dedup();
        states
    }

    #[test]
    fn overwritten_sectors_are_old_or_new_and_the_file_grows_by_sectors() {
        let (old, new) = (vec![0; SECTOR * 2], vec![1; SECTOR * 2]);
        let mixed = states(&old, &new);
        assert_eq!(mixed.len(), 4);
        assert!(
            mixed.iter().all(|state| state.chunks(SECTOR).all(|s| s.iter().all(|b| *b == s[0])))
        );
        let lengths = |kept: usize, written: usize| -> Vec<usize> {
            states(&vec![7; kept], &vec![7; written]).iter().map(Vec::len).collect()
        };
        assert_eq!(lengths(1_000, 1_300), [1_000, 1_024, 1_300]);
        assert_eq!(lengths(512, 1_600), [512, 1_024, 1_536, 1_600]);
        assert_eq!(lengths(0, 100), [0, 100]);
        // The last sector is old or new as a whole.
        let tails = states(&[0; 100], &[1; 200]);
        assert_eq!(tails, [vec![0; 100], vec![1; 200]]);
    }
}
