//! Where in a queue a claim stands, found without looking through thousands.
//!
//! # The argument
//! Order in the queue is order of tokens, so who knows a claim's token finds its place by halving. The
//! tokens are kept by claim, in a map that has *at least* everybody who stands in the queue: who joins is
//! noted at once, who has left is noticed only now and then. So a claim that is not in the map is not in
//! the queue; and of one that is, the place that its token leads to is looked at. If another stands there,
//! everybody is looked at: then the claim has left, or the tokens are not in order, and either way the
//! answer is right.
//!
//! A queue that few stand in has no map: looking at them is faster. It is made when there are [`MANY`],
//! of all who stand there, made anew when half of it have left, and given up when few stand there.

use crate::words::claim::{ClaimId, IdMap};
use crate::words::token::Token;

/// From how many on there is a map.
const MANY: usize = 32;

/// The tokens of those who stand in a queue, by claim.
#[derive(Clone, Debug, Default)]
pub(super) enum Index {
    /// For a queue that is read, used once and written: making a map costs more than looking.
    #[default]
    Never,
    /// Few stand there.
    Few,
    Many(IdMap<Token>),
}

/// Where a claim is to be looked for.
pub(super) enum Found {
    /// It is not there.
    Nowhere,
    /// Where this token is, if it has not left.
    Under(Token),
    Unknown,
}

impl Index {
    pub(super) fn kept() -> Self {
        Self::Few
    }

    /// Notes the last of these, who has just joined.
    pub(super) fn joined(
        &mut self,
        all: impl DoubleEndedIterator<Item = (ClaimId, Token)> + ExactSizeIterator,
    ) {
        let here = all.len();
        match self {
            Self::Never => {}
            _ if here < MANY / 2 => *self = Self::Few,
            Self::Few if here < MANY => {}
            Self::Many(tokens) if tokens.len() < 2 * here => tokens.extend({ all }.next_back()),
            Self::Few | Self::Many(_) => *self = Self::Many(all.collect()),
        }
    }

    /// Notes that so many are left of those who stood there.
    pub(super) fn shrink(&mut self, here: usize) {
        if here < MANY && matches!(self, Self::Many(_)) {
            *self = Self::Few;
        }
    }

    pub(super) fn place_of(&self, id: ClaimId) -> Found {
        match self {
            Self::Never | Self::Few => Found::Unknown,
            Self::Many(tokens) => {
                tokens.get(&id).map_or(Found::Nowhere, |token| Found::Under(*token))
            }
        }
    }
}
