//! What a campaign consists of: each store, each version of its servers, each kind of faults.

use std::fmt;

use testbed::Version;

use crate::faults::Faults;
use crate::run::Run;
use crate::store::Store;

/// One kind of run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// On which store.
    pub store: Store,
    /// On which end of the range of its servers.
    pub version: Version,
    /// What is done meanwhile.
    pub faults: Faults,
}

impl Piece {
    /// The version in the state: `oldest` or `newest`.
    pub(crate) fn end(&self) -> &'static str {
        match self.version {
            Version::Oldest => "oldest",
            Version::Newest => "newest",
        }
    }

    /// Whether this was a run of this piece.
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

/// All pieces that there are on this machine, of these stores: a round. Those with all faults come
/// first, so that half a round is something of every store.
pub fn pieces(stores: &[Store]) -> Vec<Piece> {
    let mut all = Vec::new();
    for faults in Faults::ALL {
        for &store in stores.iter().filter(|store| store.faults().contains(&faults)) {
            let each = store.versions().into_iter().map(|version| Piece { store, version, faults });
            all.extend(each);
        }
    }
    all
}

/// The piece that was done least often, and of those the first.
pub(crate) fn next(pieces: &[Piece], runs: &[Run]) -> Option<Piece> {
    let done = |piece: &Piece| runs.iter().filter(|run| piece.is_of(run)).count();
    pieces.iter().min_by_key(|piece| done(piece)).copied()
}
