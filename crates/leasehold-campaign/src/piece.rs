//! The parts of a campaign: each store, each version of its servers, each kind of faults.

use std::fmt;

use testbed::{Disk, Version};

use crate::faults::Faults;
use crate::run::Run;
use crate::store::Store;

/// One kind of run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The store.
    pub store: Store,
    /// The version of its servers.
    pub version: Version,
    /// The faults that are injected.
    pub faults: Faults,
}

impl Piece {
    /// Returns the version as it is in the state: `oldest` or `newest`.
    pub(crate) fn end(&self) -> &'static str {
        match self.version {
            Version::Oldest => "oldest",
            Version::Newest => "newest",
        }
    }

    /// Returns whether this was a run of this piece.
    pub(crate) fn is_of(&self, run: &Run) -> bool {
        run.store == self.store.name()
            && run.version == self.end()
            && run.faults == self.faults.to_string()
    }
}

impl fmt::Display for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}, {}", self.store.name(), self.end(), self.faults)
    }
}

/// Returns all pieces of these stores that this machine can run, which is a round. Pieces with all
/// faults come first, so that half a round covers every store.
pub fn pieces(stores: &[Store]) -> Vec<Piece> {
    let mut all = Vec::new();
    let possible = |faults: &Faults| *faults != Faults::Outage || Disk::is_possible();
    for faults in Faults::ALL.into_iter().filter(possible) {
        for &store in stores.iter().filter(|store| store.faults().contains(&faults)) {
            let each = store.versions().into_iter().map(|version| Piece { store, version, faults });
            all.extend(each);
        }
    }
    all
}

/// Returns the piece that was run least often. Of several, it is the first.
pub(crate) fn next(pieces: &[Piece], runs: &[Run]) -> Option<Piece> {
    let done = |piece: &Piece| runs.iter().filter(|run| piece.is_of(run)).count();
    pieces.iter().min_by_key(|piece| done(piece)).copied()
}
